//! A counter-based random number generator.
//!
//! The number for counter `i` is a function of `(seed, stream, i)` alone: no state is carried from one number to the
//! next. So any thread and any rank can generate the numbers of its own slice of a mask or a weight tensor, and gets
//! exactly those that a single thread would have generated for it.
//!
//! The mixing function is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
//! 2014) with the counter in place of its additive state.

const INCREMENT: u64 = 0x9E37_79B9_7F4A_7C15;

/// The splitmix64 output for state `x`: one round of the generator.
///
/// ```
/// assert_eq!(mgpu_kernels::rng::splitmix64(0), 0xE220_A839_7B1D_CDAF);
/// ```
pub const fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(INCREMENT);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// One stream of random numbers, addressed by counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    base: u64,
}

impl Stream {
    /// The stream number `stream` of `seed`. Seed and stream are mixed one after the other, so that neighbouring
    /// seeds and neighbouring streams share no numbers at neighbouring counters.
    pub const fn new(seed: u64, stream: u64) -> Self {
        Self { base: splitmix64(splitmix64(seed) ^ stream) }
    }

    /// 64 random bits for counter `i`.
    #[inline]
    pub const fn bits(self, i: u64) -> u64 {
        splitmix64(self.base.wrapping_add(i.wrapping_mul(INCREMENT)))
    }

    /// 24 random bits for counter `i`: the precision of a `f32` in [0, 1).
    #[inline]
    pub const fn bits24(self, i: u64) -> u32 {
        (self.bits(i) >> 40) as u32
    }

    /// 24 random bits for each of the counters `first`, `first + stride`, and so on, without end. It takes a multiplication
    /// less for each than [`bits24`](Self::bits24).
    #[inline(always)]
    pub(crate) fn bits24_of_every(self, first: u64, stride: u64) -> impl Iterator<Item = u32> {
        let mut state = self.base.wrapping_add(first.wrapping_mul(INCREMENT));
        let step = stride.wrapping_mul(INCREMENT);
        std::iter::repeat_with(move || {
            let bits = splitmix64(state);
            state = state.wrapping_add(step);
            (bits >> 40) as u32
        })
    }

    /// A number in [0, 1) for counter `i`, a multiple of 2^-24.
    #[inline]
    pub fn uniform(self, i: u64) -> f32 {
        self.bits24(i) as f32 / (1 << 24) as f32
    }
}

/// The number in [0, 1) that belongs to `(seed, stream, i)`.
///
/// In a loop over `i`, [`Stream::uniform`] is faster: it mixes seed and stream only once.
pub fn uniform(seed: u64, stream: u64, i: u64) -> f32 {
    Stream::new(seed, stream).uniform(i)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fill_the_unit_interval_evenly() {
        let stream = Stream::new(7, 3);
        let mut counts = [0u32; 16];
        for i in 0..160_000 {
            let value = stream.uniform(i);
            assert!((0.0..1.0).contains(&value));
            counts[(value * 16.0) as usize] += 1;
        }
        // 10,000 expected in each of 16 bins, standard deviation 97.
        assert!(counts.iter().all(|&count| count.abs_diff(10_000) < 600), "{counts:?}");
    }

    #[test]
    fn every_counter_of_a_stride_has_its_own_bits() {
        let stream = Stream::new(5, 8);
        for (first, stride) in [(0, 1), (3, 196), (u64::MAX - 5, 7)] {
            let counters = (0..20u64).map(|n| first.wrapping_add(n.wrapping_mul(stride)));
            assert!(stream.bits24_of_every(first, stride).take(20).eq(counters.map(|i| stream.bits24(i))));
        }
    }

    #[test]
    fn seed_stream_and_counter_all_matter() {
        let reference = Stream::new(1, 2).bits(3);
        assert_ne!(reference, Stream::new(2, 2).bits(3));
        assert_ne!(reference, Stream::new(1, 3).bits(3));
        assert_ne!(reference, Stream::new(1, 2).bits(4));
        assert_eq!(uniform(1, 2, 3), Stream::new(1, 2).uniform(3));
    }
}
