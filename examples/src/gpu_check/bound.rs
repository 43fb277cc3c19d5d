//! How far a correct result may be from the exact one.
//!
//! Let s be the exact sum of n products pᵢ, and S = √Σpᵢ². With u = 2^-24, rounding a partial sum to f32 changes it
//! by at most u times its magnitude. Signs are random here, so the partial sum after k products has a magnitude of
//! about S·√(k/n). The errors of the n additions, in any order, are random too; their sum has a standard deviation of
//! at most u·S·√n. [`SIGMAS`] standard deviations are allowed. That is far more than random errors need and far less
//! than any bug causes: a missing product is an error of about S/√n, and operands wrongly rounded to TF32 one of
//! 2^-12·S.
//!
//! Tensor cores truncate where others round, always towards zero, so these errors do add up: see [`cut`].
//!
//! The products themselves are exact: of bf16, f16 or TF32 operands in f32, of f32 operands in a fused multiply-add.
//!
//! Rounding the result to bf16 adds 2^-8 of its magnitude, to f16 2^-11. Errors are therefore relative to the larger of S
//! and |s|; those of f16 to at least 2^-14, below which its numbers are equally far apart.

use mgpu_kernels::{DType, Precision};

/// Allowed standard deviations.
const SIGMAS: f64 = 8.0;

/// Half the distance between f32 numbers next to 1.
pub(super) const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// The same for f64.
const UNIT_F64: f64 = f64::EPSILON / 2.0;

/// The same for bf16 and f16.
const UNIT_BF16: f64 = 1.0 / (1 << 8) as f64;
const UNIT_F16: f64 = 1.0 / (1 << 11) as f64;

/// The smallest normal number of f16.
const LEAST_F16: f64 = 1.0 / (1 << 14) as f64;

/// The least magnitude that errors are relative to, in checks of a precision.
pub(super) fn least_scale(precision: &str) -> f64 {
    if precision == Precision::F16.name() { LEAST_F16 } else { 0.0 }
}

/// Rounding of a stored result: none beyond f32's own for f32.
pub(super) fn kept(dtype: DType) -> f64 {
    // The rounding also applies to the error added before.
    match dtype {
        DType::Bf16 => UNIT_BF16 * 1.001,
        DType::F16 => UNIT_F16 * 1.001,
        _ => 0.0,
    }
}

/// Bound of a sum of `terms` products in f32, with bias and activation.
pub(super) fn sum(terms: usize, stored: DType) -> f64 {
    (SIGMAS * (terms as f64).sqrt() + 4.0) * UNIT + kept(stored)
}

/// The additional error of tensor cores: they add eight or more products at a time and truncate up to 2·u of each
/// partial sum; the magnitudes of the n/8 partial sums add up to ⅔·S·n/8. (An H100 reaches half of it.)
pub(super) fn cut(terms: usize) -> f64 {
    terms as f64 / 12.0 * 2.0 * UNIT
}

/// Bound of a sum of `terms` numbers in f64.
pub(super) fn sum_f64(terms: usize) -> f64 {
    (SIGMAS * (terms as f64).sqrt() + 4.0) * UNIT_F64
}

/// Bound of `operations` dependent operations in f32.
pub(super) fn chain(operations: u32, stored: DType) -> f64 {
    f64::from(operations) * UNIT + kept(stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_below_what_mistakes_make() {
        // The longest sums of the networks, and of the checks.
        for terms in [25, 3200, 20_000] {
            assert!(sum(terms, DType::F32) < 1.0 / (1 << 13) as f64);
            assert!(sum(terms, DType::F32) + cut(terms) < 0.1 / (terms as f64).sqrt());
        }
    }
}
