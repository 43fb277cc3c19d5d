//! Digests on the CPU.

use crate::rng::splitmix64;

/// Number of elements that are infinite or not a number.
pub fn not_finite(values: &[f32]) -> u64 {
    values.iter().filter(|value| !value.is_finite()).count() as u64
}

/// The hash of an arena.
pub fn hash(values: &[f32]) -> u64 {
    let terms = values.iter().zip(0u64..).map(|(value, i)| splitmix64(i << 32 | u64::from(value.to_bits())));
    terms.fold(0, u64::wrapping_add)
}
