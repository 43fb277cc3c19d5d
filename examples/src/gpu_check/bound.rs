//! How far a right result may be from the exact one.
//!
//! Let s be the exact sum of n products pᵢ, and S = √Σpᵢ². With u = 2^-24, rounding a partial sum to f32 changes it by at
//! most u times its size. Signs are random here, so that the partial sum after k products has a size of about
//! S·√(k/n), and the errors of the n additions, in whatever order they are made, do not add up but go at random as well:
//! their sum has a deviation of at most u·S·√n. [`SIGMAS`] such deviations are allowed. That is far more than
//! chance needs, and it is far less than any mistake makes: a missing product is an error of about S/√n, and operands rounded to TF32 by mistake one of 2^-12·S.
//!
//! Tensor cores cut digits off where others round, always towards zero, so that these errors do add up: [`cut`].
//!
//! Products themselves are exact: of bf16 or TF32 operands in f32, of f32 operands within a fused multiply-add.
//!
//! Rounding the result to bf16 adds 2^-8 of its size. Errors are therefore told as a part of the larger of S and |s|.

/// Deviations that are allowed.
const SIGMAS: f64 = 8.0;

/// Half the distance of f32 numbers next to 1.
pub(super) const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// The same of f64 numbers.
const UNIT_F64: f64 = f64::EPSILON / 2.0;

/// The same of bf16 numbers.
const UNIT_BF16: f64 = 1.0 / (1 << 8) as f64;

/// Rounding of a result to the type it is kept in: none beyond f32's own for f32.
pub(super) fn kept(bf16: bool) -> f64 {
    // Rounding comes after what it is added to.
    if bf16 { UNIT_BF16 * 1.001 } else { 0.0 }
}

/// A sum of `terms` products in f32, with bias and activation.
pub(super) fn sum(terms: usize, bf16: bool) -> f64 {
    (SIGMAS * (terms as f64).sqrt() + 4.0) * UNIT + kept(bf16)
}

/// What tensor cores add to that: they add up eight products at a time or more, and cut off up to 2·u of each partial sum,
/// of which the n/8 together have a size of ⅔·S·n/8. (An H100 comes to half of it.)
pub(super) fn cut(terms: usize) -> f64 {
    terms as f64 / 12.0 * 2.0 * UNIT
}

/// A sum of `terms` numbers in f64.
pub(super) fn sum_f64(terms: usize) -> f64 {
    (SIGMAS * (terms as f64).sqrt() + 4.0) * UNIT_F64
}

/// `operations` in f32, one after another.
pub(super) fn chain(operations: u32, bf16: bool) -> f64 {
    f64::from(operations) * UNIT + kept(bf16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_below_what_mistakes_make() {
        // The longest sums of the networks, and the longest of the checks.
        for terms in [25, 3200, 20_000] {
            assert!(sum(terms, false) < 1.0 / (1 << 13) as f64);
            assert!(sum(terms, false) + cut(terms) < 0.1 / (terms as f64).sqrt());
        }
    }
}
