//! A checksum of bytes that travel between ranks: has a network adapter, a driver or a cable changed any of them?
//!
//! It is not cryptographic: it detects damage, not forgery. It has to be faster than the copies that the bytes go
//! through anyway, so it is made for vectors: each of 16 lanes adds up the products of its words' halves (the NH hash of
//! UMAC, Black et al. 1999), after each word was combined with a key that depends on its position. Damage of any form
//! goes unnoticed once in 2^32.
//!
//! Contract: both ends must compute the same number, on any processor, so the result depends on the seed and the bytes
//! alone.

use crate::level::detect;
#[cfg(target_arch = "x86_64")]
use crate::level::{AVX2, AVX512};
use crate::rng::splitmix64;

/// Words of a stripe.
const LANES: usize = 16;
type Stripe = [[u8; 8]; LANES];

/// The keys of the first stripe.
const KEYS: [u64; LANES] = {
    let mut keys = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        keys[lane] = splitmix64(lane as u64 + 1);
        lane += 1;
    }
    keys
};

/// The key of the same lane in the next stripe. Without the shift it would be the start of an arithmetic sequence, for
/// which the compiler takes several stripes into one vector, with slow gathers.
#[inline(always)]
fn next_key(key: u64) -> u64 {
    (key ^ (key >> 31)).wrapping_add(0x9e37_79b9_7f4a_7c15)
}

/// The product of the halves of a word that is combined with its key.
#[inline(always)]
fn product(word: u64, key: u64) -> u64 {
    let mixed = word ^ key;
    (mixed & 0xffff_ffff) * (mixed >> 32)
}

/// Sums of all lanes over whole stripes.
#[inline(always)]
fn add_stripes(stripes: &[Stripe]) -> [u64; LANES] {
    let (mut sums, mut keys) = ([0u64; LANES], KEYS);
    for stripe in stripes {
        let words: [u64; LANES] = stripe.map(u64::from_le_bytes);
        for ((sum, key), word) in sums.iter_mut().zip(&mut keys).zip(words) {
            *sum = sum.wrapping_add(product(word, *key));
            *key = next_key(*key);
        }
    }
    sums
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
fn add_stripes_avx512(stripes: &[Stripe]) -> [u64; LANES] {
    add_stripes(stripes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn add_stripes_avx2(stripes: &[Stripe]) -> [u64; LANES] {
    add_stripes(stripes)
}

/// The checksum of `bytes`, which differs with the seed. Its lower 32 bits are as good as any others.
///
/// ```
/// use mgpu_kernels::checksum::checksum;
///
/// assert_ne!(checksum(0, b"payload"), checksum(0, b"paylaod"));
/// assert_ne!(checksum(0, b"payload"), checksum(1, b"payload"));
/// ```
pub fn checksum(seed: u64, bytes: &[u8]) -> u64 {
    let (words, odd) = bytes.as_chunks::<8>();
    let (stripes, words) = words.as_chunks::<LANES>();
    let mut digest = splitmix64(seed ^ bytes.len() as u64);
    if !stripes.is_empty() {
        let sums = match detect() {
            // SAFETY: the level was detected on this processor.
            #[cfg(target_arch = "x86_64")]
            AVX512 => unsafe { add_stripes_avx512(stripes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            AVX2 => unsafe { add_stripes_avx2(stripes) },
            _ => add_stripes(stripes),
        };
        digest = sums.iter().fold(digest, |digest, sum| splitmix64(digest ^ sum));
    }
    let mut last = [0; 8];
    last[..odd.len()].copy_from_slice(odd);
    let words = words.iter().chain(std::iter::once(&last));
    words.fold(digest, |digest, word| splitmix64(digest ^ u64::from_le_bytes(*word)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u64).map(|index| splitmix64(index) as u8).collect()
    }

    proptest! {
        #[test]
        fn damage_is_detected(len in 1usize..3000, at in 0usize..3000, flip in 1u8.., other in 0usize..3000, zeros: bool) {
            let sent = bytes(if zeros { 0 } else { len });
            let sent = if zeros { vec![0; len] } else { sent };
            let of = |bytes: &[u8]| checksum(0, bytes) as u32;
            let (at, other) = (at % len, other % len);
            let mut damaged = sent.clone();
            damaged[at] ^= flip;
            prop_assert_ne!(of(&sent), of(&damaged));
            damaged.swap(at, other);
            prop_assert_ne!(of(&sent), of(&damaged));
            prop_assert_ne!(of(&sent), of(&sent[..len - 1]));
            prop_assert_ne!(of(&sent), checksum(1, &sent) as u32);
        }

        /// Whatever vectors a processor has, it computes the same sums.
        #[test]
        fn all_levels_agree(len in 0usize..40) {
            let stripes: Vec<Stripe> =
                (0..len as u64).map(|at| std::array::from_fn(|lane| splitmix64(at << 8 | lane as u64).to_le_bytes())).collect();
            let expected = add_stripes(&stripes);
            #[cfg(target_arch = "x86_64")]
            {
                if crate::level::best() >= AVX2 {
                    // SAFETY: the processor has this level.
                    prop_assert_eq!(unsafe { add_stripes_avx2(&stripes) }, expected);
                }
                if crate::level::best() >= AVX512 {
                    // SAFETY: the processor has this level.
                    prop_assert_eq!(unsafe { add_stripes_avx512(&stripes) }, expected);
                }
            }
            prop_assert_eq!(expected.len(), LANES);
        }
    }

    /// Blocks of memory that arrive at each other's place.
    #[test]
    fn exchanged_blocks_are_detected() {
        let sent = bytes(1 << 16);
        for size in [8, 64, 128, 512, 4096] {
            let mut damaged = sent.clone();
            let (first, second) = damaged.split_at_mut(1 << 15);
            first[..size].swap_with_slice(&mut second[..size]);
            assert_ne!(checksum(0, &sent) as u32, checksum(0, &damaged) as u32, "{size}");
        }
    }

    /// Both ends of a connection may be different programs.
    #[test]
    fn the_checksum_is_the_same_on_every_processor() {
        let found = [0, 5, 64, 1000].map(|len| checksum(7, &bytes(len)));
        assert_eq!(
            found,
            [0xb8b4_c297_7eab_ce45, 0x14f6_cd4c_93be_6613, 0x3f40_f2b9_1422_af67, 0x6d5b_b7ff_aa23_c544]
        );
    }
}
