//! GELU on the CPU: one pass over memory each.
//!
//! The C library's `erf` takes one number at a time and branches. This one is a loop without branches, which the
//! compiler vectorises. With t = |x|,
//!
//! Φ(−t) = exp(−t²/2) · P(w) / (t + 2), where w = (t − 2) / (t + 2),
//!
//! and P is the polynomial of degree 11 that interpolates (t + 2) · Φ(−t) · exp(t²/2) at Chebyshev points, with an
//! error below 3.5·10⁻⁸; the rest of the error is f32's rounding. (The form is that of Shepherd and Laframboise,
//! "Chebyshev approximation of (1 + 2x) exp(x²) erfc x in 0 ≤ x < ∞", Math. Comp. 36, 1981.) The same exponential is
//! used for Φ and its derivative. Nothing is contracted to fused multiply-adds, so results are the same bits at every
//! [`level`](crate::level).

use crate::Storage;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// Fewer elements are not worth another thread.
const GRAIN: usize = 1 << 13;

/// Overwrites `y` with `x · Φ(x)`.
///
/// # Panics
/// If the lengths differ.
pub fn forward<E: Storage>(threads: &Threads, x: &[E], y: &mut [E]) {
    E::gelu_forward(threads, x, y);
}

pub(crate) fn forward_as<E: Storage>(threads: &Threads, x: &[E], y: &mut [E]) {
    assert_eq!(x.len(), y.len());
    threads.divide(x.len(), GRAIN, Rows::new(y, 1), |range, part| {
        dispatch(Forward { x: &x[range], y: part.values });
    });
}

struct Forward<'a, E> {
    x: &'a [E],
    y: &'a mut [E],
}

impl<E: Storage> Task for Forward<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (y, x) in self.y.iter_mut().zip(self.x) {
            let x = x.widen();
            *y = E::narrow(x * normal(x).below);
        }
    }
}

/// Replaces the gradient of the output in place by that of the input, given the input.
///
/// # Panics
/// If the lengths differ.
pub fn backward<E: Storage>(threads: &Threads, x: &[E], gradient: &mut [E]) {
    E::gelu_backward(threads, x, gradient);
}

pub(crate) fn backward_as<E: Storage>(threads: &Threads, x: &[E], gradient: &mut [E]) {
    assert_eq!(x.len(), gradient.len());
    threads.divide(x.len(), GRAIN, Rows::new(gradient, 1), |range, part| {
        dispatch(Backward { x: &x[range], gradient: part.values });
    });
}

struct Backward<'a, E> {
    x: &'a [E],
    gradient: &'a mut [E],
}

impl<E: Storage> Task for Backward<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (gradient, x) in self.gradient.iter_mut().zip(self.x) {
            let x = x.widen();
            let Normal { below, density } = normal(x);
            *gradient = E::narrow(gradient.widen() * (below + x * density));
        }
    }
}

/// The standard normal distribution at one point.
struct Normal {
    /// Φ(x), within 2·10⁻⁷.
    below: f32,
    /// Φ'(x), within 10⁻⁷.
    density: f32,
}

/// Coefficients of P, from the highest power down.
const POLYNOMIAL: [f32; 12] = [
    -5.463_641e-5,
    -1.429_159e-4,
    1.054_908_9e-4,
    8.212_751e-4,
    8.472_575_6e-4,
    -1.939_580_7e-3,
    -6.743_082_3e-3,
    -4.733_884_7e-4,
    3.672_062_6e-2,
    2.879_774_2e-2,
    -3.314_045_4e-1,
    6.724_08e-1,
];

#[inline(always)]
fn normal(x: f32) -> Normal {
    // Beyond this the result underflows in f32.
    let t = if x.abs() < 16.0 { x.abs() } else { 16.0 };
    let exponential = exp_minus(0.5 * t * t);
    let share = 1.0 / (t + 2.0);
    let w = (t - 2.0) * share;
    let mut p = POLYNOMIAL[0];
    for coefficient in &POLYNOMIAL[1..] {
        p = p * w + coefficient;
    }
    let beyond = exponential * (share * p);
    let below = if x < 0.0 { beyond } else { 1.0 - beyond };
    Normal { below, density: exponential * FRAC_1_SQRT_2PI }
}

/// 1 / √(2π).
const FRAC_1_SQRT_2PI: f32 = 0.398_942_3;

/// exp(−s) for s ≥ 0, as 2⁻ⁿ · exp(r) with |r| ≤ ln 2 / 2; 0 from 87 on, where results are almost subnormal.
#[inline(always)]
fn exp_minus(s: f32) -> f32 {
    // Adding this to a number below 2^22 leaves the nearest integer in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, of which the first has so few bits that its multiples are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // 1/7!, 1/6!, … 1/0!.
    const SERIES: [f32; 8] =
        [1.984_127e-4, 1.388_888_9e-3, 8.333_334e-3, 4.166_666_8e-2, 0.166_666_67, 0.5, 1.0, 1.0];
    let shifted = s * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (n * LN_2[0] - s) + n * LN_2[1];
    let mut exp = SERIES[0];
    for coefficient in &SERIES[1..] {
        exp = exp * r + coefficient;
    }
    let exponent = 127u32.wrapping_sub(shifted.to_bits().wrapping_sub(ROUND.to_bits()));
    let exp = exp * f32::from_bits(exponent << 23);
    if s < 87.0 { exp } else { 0.0 }
}
