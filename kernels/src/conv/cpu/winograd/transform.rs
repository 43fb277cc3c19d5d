//! The transforms along one axis, on vectors of channels.
//!
//! Order of points: 0, then +p and −p of each pair, then infinity. All arrays have room for the maximum number of
//! points; with `PAIRS` pairs, the first 2·`PAIRS` + 2 are used. The backward transforms are the transposes of the
//! forward ones: the gradient of a linear map is its transpose.

#![expect(clippy::needless_range_loop, reason = "an index is a place in a tile, in several arrays at once")]

use super::points::{MAX_POINTS, Points};
use crate::simd::Simd;

/// Values along one axis: of an image, or at the points.
pub(super) type Line<V> = [V; MAX_POINTS];

/// Values of the image at the points, `Bᵀ d`.
#[inline(always)]
pub(super) fn input<S: Simd, const PAIRS: usize>(simd: S, points: &Points, d: &Line<S::F32>) -> Line<S::F32> {
    let mut v = [simd.splat(0.0); MAX_POINTS];
    // The highest coefficient of each polynomial is 1 (p for odd sums).
    let (mut zero, mut infinity) = (d[2 * PAIRS], d[2 * PAIRS + 1]);
    for k in 0..PAIRS {
        let end = simd.splat(points.ends[k]);
        zero = simd.mul_add(d[2 * k], end, zero);
        infinity = simd.mul_add(d[2 * k + 1], end, infinity);
    }
    for pair in 0..PAIRS {
        let mut even = d[2 * PAIRS];
        let mut odd = simd.mul(d[2 * PAIRS - 1], simd.splat(points.odd[pair][PAIRS - 1]));
        for k in 0..PAIRS - 1 {
            even = simd.mul_add(d[2 * k + 2], simd.splat(points.even[pair][k]), even);
            odd = simd.mul_add(d[2 * k + 1], simd.splat(points.odd[pair][k]), odd);
        }
        v[2 * pair + 1] = simd.add(even, odd);
        v[2 * pair + 2] = simd.sub(even, odd);
    }
    v[0] = zero;
    v[2 * PAIRS + 1] = infinity;
    v
}

/// The gradient of the image from that of its values at the points, `B v`.
#[inline(always)]
pub(super) fn input_gradient<S: Simd, const PAIRS: usize>(
    simd: S,
    points: &Points,
    v: &Line<S::F32>,
) -> Line<S::F32> {
    let mut d = [simd.splat(0.0); MAX_POINTS];
    let (zero, infinity) = (v[0], v[2 * PAIRS + 1]);
    d[2 * PAIRS] = zero;
    d[2 * PAIRS + 1] = infinity;
    for k in 0..PAIRS {
        let end = simd.splat(points.ends[k]);
        d[2 * k] = simd.mul(zero, end);
        d[2 * k + 1] = simd.mul(infinity, end);
    }
    for pair in 0..PAIRS {
        let (plus, minus) = (v[2 * pair + 1], v[2 * pair + 2]);
        let (even, odd) = (simd.add(plus, minus), simd.sub(plus, minus));
        d[2 * PAIRS] = simd.add(d[2 * PAIRS], even);
        for k in 0..PAIRS {
            if k < PAIRS - 1 {
                d[2 * k + 2] = simd.mul_add(even, simd.splat(points.even[pair][k]), d[2 * k + 2]);
            }
            d[2 * k + 1] = simd.mul_add(odd, simd.splat(points.odd[pair][k]), d[2 * k + 1]);
        }
    }
    d
}

/// Outputs from the products at the points, `Aᵀ m`. The first `points.tile` are used.
#[inline(always)]
pub(super) fn output<S: Simd, const PAIRS: usize, const TILE: usize>(
    simd: S,
    points: &Points,
    m: &Line<S::F32>,
) -> Line<S::F32> {
    let mut y = [simd.splat(0.0); MAX_POINTS];
    y[0] = m[0];
    for pair in 0..PAIRS {
        let (plus, minus) = (m[2 * pair + 1], m[2 * pair + 2]);
        let (even, odd) = (simd.add(plus, minus), simd.sub(plus, minus));
        y[0] = simd.add(y[0], even);
        for i in 1..TILE {
            let term = if i % 2 == 0 { even } else { odd };
            y[i] = simd.mul_add(term, simd.splat(points.powers[pair][i]), y[i]);
        }
    }
    y[TILE - 1] = simd.add(y[TILE - 1], m[2 * PAIRS + 1]);
    y
}

/// Gradients of the products at the points from those of the outputs, `A y`.
#[inline(always)]
pub(super) fn output_gradient<S: Simd, const PAIRS: usize, const TILE: usize>(
    simd: S,
    points: &Points,
    y: &Line<S::F32>,
) -> Line<S::F32> {
    let mut m = [simd.splat(0.0); MAX_POINTS];
    m[0] = y[0];
    for pair in 0..PAIRS {
        let mut even = y[0];
        let mut odd = simd.mul(y[1], simd.splat(points.powers[pair][1]));
        for i in 2..TILE {
            let power = simd.splat(points.powers[pair][i]);
            if i % 2 == 0 {
                even = simd.mul_add(y[i], power, even);
            } else {
                odd = simd.mul_add(y[i], power, odd);
            }
        }
        m[2 * pair + 1] = simd.add(even, odd);
        m[2 * pair + 2] = simd.sub(even, odd);
    }
    m[2 * PAIRS + 1] = y[TILE - 1];
    m
}
