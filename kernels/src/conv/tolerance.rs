//! How far the results of a correct algorithm may be from those of the plain kernels ([`super::plain`]).
//!
//! Autotuning multiplies random numbers from -1 to 1. A product of two has a mean square of 1/9, so a sum of n
//! products has a typical magnitude of S = √(n/9); a bias adds 1/3 to the mean square. Rounding errors are relative
//! to S or, where a sum is larger, to the sum s itself. A result may differ by t · (S + |s|), where t is the sum of
//!
//! - *accumulation*: each of n additions in f32 rounds a partial sum of magnitude S or less by up to u = 2^-24. In any
//!   order these errors have a standard deviation of at most u·S·√n, of which 8 are allowed. A library may transform
//!   before it multiplies (Winograd, FFT), which costs a few bits: 16 times as much is allowed;
//! - *truncation*: tensor cores add eight or more products at a time and truncate, always towards zero, by up to 2u.
//!   The n/8 partial sums add up to ⅔·S·n/8;
//! - *operands*: TF32 keeps 10 bits. A library may truncate to them instead of rounding, which makes each operand too
//!   small by up to 2^-10 of its magnitude;
//! - *storage*: rounding to bf16 is by up to u = 2^-8, and to f16 by 2^-11. A library may round the product, the product with the bias, and the
//!   activated output. It may also split a sum over k blocks and add their parts in that type, one after the other.
//!   Rounding the partial sums, of magnitude S·√(i/k), has a standard deviation of 0.42·u·S·√(k/2) in all, or of
//!   0.42·u·S·√(k/6) where s is small, and the largest of a million results is 5 deviations off. A multiple of 6 is
//!   enough for k = 16, and one of 12, for gradients of weights, whose sums are the longest, for k = 64.
//!
//! That is a few times what correct algorithms need: leaving one out costs speed in every step. A tile of results that
//! is not computed, or a slice of the sum that is left out, is an error of at least S/√n times the square root of its
//! number of products: far more.

use crate::cuda::algorithm::{Form, LibraryAlgorithm};
use crate::cuda::compare::Tolerance;
use crate::{DType, Precision};

/// Half the distance between f32 numbers next to 1.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// The same for a type that stores activations, if that rounds f32.
fn unit_of_storage(dtype: DType) -> Option<f64> {
    match dtype {
        DType::Bf16 => Some(1.0 / (1 << 8) as f64),
        DType::F16 => Some(1.0 / (1 << 11) as f64),
        _ => None,
    }
}

/// The tolerance for sums of `terms` products, and of a bias if there is one, computed by `algorithm` (or this
/// crate's own kernel). Results are stored as `stored`.
pub(super) fn tolerance(
    algorithm: Option<&LibraryAlgorithm>,
    precision: Precision,
    terms: usize,
    has_bias: bool,
    stored: DType,
) -> Tolerance {
    let n = terms as f64;
    let transforms = if algorithm.is_some() { 16.0 } else { 1.0 };
    let accumulation = transforms * (8.0 * n.sqrt() + 8.0) * UNIT;
    let truncation = if precision == Precision::F32 { 0.0 } else { n / 12.0 * 2.0 * UNIT };
    let operands = if precision == Precision::Tf32 { 6.0 / 1024.0 } else { 0.0 };
    let narrow = algorithm.is_some_and(|algorithm| algorithm.form == Form::Narrow);
    let unit = unit_of_storage(if narrow { precision.storage() } else { stored }).unwrap_or(0.0);
    let storage = match algorithm {
        Some(_) if narrow => 12.0 * unit,
        Some(_) => 6.0 * unit,
        None => 1.001 * unit,
    };
    let bias = if has_bias { 1.0 / 3.0 } else { 0.0 };
    Tolerance {
        relative: (accumulation + truncation + operands + storage) as f32,
        scale: (n / 9.0 + bias).sqrt() as f32,
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::rng;

    fn library(form: Form) -> LibraryAlgorithm {
        LibraryAlgorithm::cudnn(1, form)
    }

    #[test]
    fn tolerances_follow_type_and_depth() {
        let of = |precision: Precision, terms| tolerance(None, precision, terms, false, precision.storage());
        for terms in [1, 25, 3200, 800_000] {
            assert!(of(Precision::F32, terms).relative < of(Precision::Tf32, terms).relative);
            assert!(of(Precision::F32, terms).relative < of(Precision::F16, terms).relative);
            assert!(of(Precision::F16, terms).relative < of(Precision::Bf16, terms).relative);
            let deeper = of(Precision::F32, 2 * terms);
            assert!(of(Precision::F32, terms).relative < deeper.relative);
            assert!(of(Precision::F32, terms).scale < deeper.scale);
        }
        for precision in [Precision::Bf16, Precision::F16] {
            let unit = unit_of_storage(precision.storage()).unwrap() as f32;
            let plain = tolerance(Some(&library(Form::Plain)), precision, 100, false, DType::F32);
            let narrow = tolerance(Some(&library(Form::Narrow)), precision, 100, false, DType::F32);
            assert!(plain.relative < unit && narrow.relative > 3.0 * unit);
        }
    }

    /// The largest error of sums of `parts` products that are added in bf16, as a share of the tolerance.
    fn share_of_bf16_sums(parts: u64, form: Form, stored: DType) -> f64 {
        let Tolerance { relative, scale } =
            tolerance(Some(&library(form)), Precision::Bf16, parts as usize, false, stored);
        let random = rng::Stream::new(1, 0);
        let number = |i| random.uniform(i) * 2.0 - 1.0;
        let share = |result: u64| {
            let (mut exact, mut sum) = (0.0, bf16::ZERO);
            for i in result * parts..(result + 1) * parts {
                let product = number(2 * i) * number(2 * i + 1);
                exact += f64::from(product);
                sum = bf16::from_f32(sum.to_f32() + bf16::from_f32(product).to_f32());
            }
            (exact - sum.to_f64()).abs() / (f64::from(relative) * (f64::from(scale) + exact.abs()))
        };
        (0..20_000).map(share).fold(0.0, f64::max)
    }

    #[test]
    fn parts_of_a_sum_may_be_added_in_bf16() {
        let shares = [
            share_of_bf16_sums(16, Form::Plain, DType::Bf16),
            share_of_bf16_sums(64, Form::Narrow, DType::F32),
        ];
        assert!(shares.iter().all(|share| (0.3..1.0).contains(share)), "{shares:?}");
    }

    #[test]
    fn a_missing_tile_or_slice_is_beyond_every_tolerance() {
        // The shallowest and the deepest sums of the networks.
        for terms in [25usize, 72, 3200, 15_488, 802_816] {
            for precision in Precision::ALL {
                let Tolerance { relative, scale } =
                    tolerance(Some(&library(Form::Plain)), precision, terms, false, precision.storage());
                // A result that was not computed is off by its magnitude, S, and a tile has thousands of results. The
                // last of a thousand slices, the most that a kernel makes, is off by S/√1000.
                assert!(2.0 * relative < 0.1, "{precision} {terms}");
                assert!(2.0 * relative * scale < scale / 1000f32.sqrt() * 3.0, "{precision} {terms}");
            }
        }
    }
}
