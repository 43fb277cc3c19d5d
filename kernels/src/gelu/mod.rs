//! The Gaussian error linear unit (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).
//!
//! Contract: `y = x · Φ(x)`, where Φ(x) = (1 + erf(x/√2)) / 2 is the probability that a standard normal number is
//! below x: the exact form, PyTorch's default, and not the approximation with a hyperbolic tangent. The gradient is
//! `dx = dy · (Φ(x) + x · φ(x))` with φ(x) = exp(−x²/2) / √(2π). It needs the input, so the output is separate
//! memory; the gradient of the input replaces that of the output.
//!
//! Every implementation computes Φ and φ within 2·10⁻⁷, so `y` within 2·10⁻⁷ · |x|, before it is rounded to its type.
//! Minus infinity gives NaN, as in PyTorch.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::reference::{assert_close, narrow, random, widen};
    use crate::threads::Threads;

    /// Φ(x) and φ(x) in f64.
    fn normal(x: f64) -> (f64, f64) {
        let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
        let t = x.abs();
        let beyond = if t < 3.0 {
            // Φ(t) − 1/2 = φ(t) · (t + t³/3 + t⁵/(3·5) + …).
            let (mut term, mut sum) = (t, t);
            for odd in (3..200).step_by(2) {
                term *= t * t / f64::from(odd);
                sum += term;
            }
            0.5 - density * sum
        } else {
            // Φ(−t) = φ(t) / (t + 1/(t + 2/(t + 3/(t + …)))).
            let fraction = (1..200).rev().fold(t, |rest, k| t + f64::from(k) / rest);
            density / fraction
        };
        (if x < 0.0 { beyond } else { 1.0 - beyond }, density)
    }

    fn reference(x: f32) -> f64 {
        f64::from(x) * normal(f64::from(x)).0
    }

    fn slope(x: f32) -> f64 {
        let (below, density) = normal(f64::from(x));
        below + f64::from(x) * density
    }

    fn forward(x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len()];
        cpu::forward(&Threads::new(2), x, &mut y);
        y
    }

    #[test]
    fn the_reference_agrees_with_tables() {
        for (x, below) in [(0.0, 0.5), (1.0, 0.841_344_746_068_543), (-3.0, 1.349_898_031_630_09e-3)] {
            assert!((normal(x).0 - below).abs() < 1e-14, "{x}");
        }
        assert!((normal(-6.0).0 / 9.865_876_450_376_98e-10 - 1.0).abs() < 1e-13);
    }

    /// Numbers of every magnitude, a few hundred between consecutive powers of two.
    #[test]
    fn both_passes_are_within_their_bound_everywhere() {
        let bits = (0..f32::INFINITY.to_bits()).step_by(20_011);
        let x: Vec<f32> = bits.flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)]).collect();
        let y = forward(&x);
        let mut dx = vec![1.0; x.len()];
        cpu::backward(&Threads::new(2), &x, &mut dx);
        for ((&x, y), dx) in x.iter().zip(y).zip(dx) {
            let size = f64::from(x.abs());
            // Subnormal results are rounded to the next subnormal number.
            let last = f64::from(f32::from_bits(1));
            assert!((f64::from(y) - reference(x)).abs() <= 2e-7 * size + last, "{x:e}: {y:e}");
            assert!((f64::from(dx) - slope(x)).abs() <= 2e-7, "{x:e}: {dx:e}");
        }
    }

    #[test]
    fn small_values_keep_their_relative_precision() {
        let x: Vec<f32> = (0..9000).map(|i| -1e-3 * i as f32).collect();
        for (&x, y) in x.iter().zip(forward(&x)).skip(1) {
            assert!((f64::from(y) / reference(x) - 1.0).abs() < 1e-5, "{x}: {y:e}");
        }
    }

    #[test]
    fn nan_stays_nan() {
        let y = forward(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]);
        assert!(y[0].is_nan() && y[1] == f32::INFINITY && y[2].is_nan() && y[3] == 0.0);
        let mut dx = [1.0, 1.0, f32::NAN];
        cpu::backward(&Threads::new(1), &[f32::NAN, 100.0, 1.0], &mut dx);
        assert!(dx[0].is_nan() && dx[1] == 1.0 && dx[2].is_nan());
    }

    proptest! {
        #[test]
        fn the_gradient_is_the_slope_of_the_output(x in -6.0f64..6.0) {
            let by = 1e-5;
            let measured = ((x + by) * normal(x + by).0 - (x - by) * normal(x - by).0) / (2.0 * by);
            let mut dx = [1.0];
            cpu::backward(&Threads::new(1), &[x as f32], &mut dx);
            prop_assert!((f64::from(dx[0]) - measured).abs() < 1e-6, "{} is not {measured}", dx[0]);
        }

        #[test]
        fn threads_change_nothing_and_bf16_only_rounds_the_result(len in 1usize..40_000, count in 1usize..4) {
            let (x, dy) = (narrow(&random(len, 1)), narrow(&random(len, 2)));
            let wide = widen(&x);
            let (mut y, mut dx) = (vec![bf16::NAN; len], dy.clone());
            cpu::forward(&Threads::new(count), &x, &mut y);
            cpu::backward(&Threads::new(count), &x, &mut dx);
            prop_assert_eq!(y, narrow(&forward(&wide)));
            let mut expected = widen(&dy);
            cpu::backward(&Threads::new(1), &wide, &mut expected);
            let by_definition: Vec<f64> =
                wide.iter().zip(&dy).map(|(&x, dy)| slope(x) * dy.to_f64()).collect();
            assert_close(&expected, &by_definition, 4e-7);
            prop_assert_eq!(dx, narrow(&expected));
        }
    }
}
