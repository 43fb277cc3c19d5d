//! Digests of a whole arena: is everything finite, is it the same as on another rank, what is its norm?
//!
//! Contract: `count_non_finite` is the number of non-finite elements (NaN or Inf). `sum_of_squares` (CPU only) is
//! taken in f64, in an order that depends on the length alone. `hash` is the sum modulo 2^64, over all elements i <
//! 2^32 of f32, of `splitmix64(i · 2^32 + b)` with the element's bits b (see [`crate::rng`]). A sum of integers does
//! not depend on its order, so every backend and every partition of the work computes the same number; the index in
//! each term makes it depend on the order of the elements. Arenas that differ in one element never have the same
//! hash, others once in 2^64: this protects against bit flips and software errors, not against an attacker who
//! searches for a collision.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;
    use crate::rng::splitmix64;
    use crate::threads::Threads;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bit_flip_and_any_swap_changes_the_hash(len in 2usize..200, at in 0usize..200, bit in 0u32..32) {
            let values = random(len, 1);
            let mut other = values.clone();
            let at = at % len;
            other[at] = f32::from_bits(other[at].to_bits() ^ 1 << bit);
            prop_assert_ne!(cpu::hash(&values), cpu::hash(&other));
            let mut other = values.clone();
            other.swap(at, (at + 1) % len);
            prop_assert_ne!(cpu::hash(&values), cpu::hash(&other));
        }
    }

    #[test]
    fn the_hash_follows_the_contract() {
        assert_eq!(cpu::hash(&[]), 0);
        let terms = [splitmix64(0x3f80_0000), splitmix64(1 << 32 | 0x8000_0000)];
        assert_eq!(cpu::hash(&[1.0, -0.0]), terms[0].wrapping_add(terms[1]));
    }

    #[test]
    fn infinities_and_nans_are_counted() {
        let one = Threads::new(1);
        assert_eq!(cpu::count_non_finite(&one, &[0.0, f32::NAN, f32::MAX, f32::NEG_INFINITY, 1e-40]), 2);
        let mut values = random(200_000, 2);
        values[199_999] = f32::INFINITY;
        values[4_095] = -f32::NAN;
        for threads in [one, Threads::new(3)] {
            assert_eq!(cpu::count_non_finite(&threads, &values), 2);
        }
    }

    #[test]
    fn every_element_is_checked_within_32_steps_and_rows_and_columns_in_any_step() {
        for len in [0, 5, 16, 511, 512, 513, 1500] {
            for bad in 0..len {
                let mut values = vec![1.0; len];
                values[bad] = f32::NAN;
                assert!((0..32).any(|step| cpu::sample_has_non_finite(&values, step)), "{bad} of {len}");
            }
            assert!((0..32).all(|step| !cpu::sample_has_non_finite(&vec![1.0; len], step)));
        }
        for (rows, columns) in [(1024, 6272), (200, 1024), (512, 512)] {
            for step in [0, 5] {
                let mut values = vec![0.5; rows * columns];
                values[columns * 7..columns * 8].fill(f32::INFINITY);
                assert!(cpu::sample_has_non_finite(&values, step), "a row of {rows}x{columns}");
                let mut values = vec![0.5; rows * columns];
                values.chunks_mut(columns).for_each(|row| row[columns / 3] = f32::NAN);
                assert!(cpu::sample_has_non_finite(&values, step), "a column of {rows}x{columns}");
            }
        }
    }

    #[test]
    fn squares_are_summed_without_overflow_or_loss() {
        for len in [0, 1, 31, 32, 33, 10_000] {
            let values: Vec<f32> = (0..len).map(|i| (i % 100) as f32 - 50.0).collect();
            let expected: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
            assert_eq!(cpu::sum_of_squares(&values), expected, "{len}");
        }
        let norm = cpu::sum_of_squares(&[3e30, -4e30]).sqrt();
        assert!((norm / 5e30 - 1.0).abs() < 1e-6, "{norm}");
    }
}
