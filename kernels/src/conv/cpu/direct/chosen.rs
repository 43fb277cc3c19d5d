//! The weight gradient behind pooling from the chosen pixels only, for layers with few filters.
//!
//! Behind pooling three of four gradients are zero. With many filters, which chose different pixels, a product over
//! all pixels is still the fastest way. With 6 or 16 filters most lanes of its vectors would be empty; here a vector
//! holds the inputs of a kernel row instead, and the sums of one filter stay in registers for a whole image.

use super::border::PaddedImage;
use super::epilogue::Results;
use super::{lines, weights};
use crate::Storage;
use crate::conv::ConvShape;
use crate::conv::cpu::Epilogue;
use crate::simd::{MAX_LANES, Simd};

/// Elements beyond an input image that may be read: windows may exceed its edge by one pixel, vectors by almost one
/// vector.
pub(super) fn slack(input: &PaddedImage) -> usize {
    input.line() + input.channels + 2 * MAX_LANES
}

/// Vectors for a kernel row.
fn vectors<S: Simd>(shape: &ConvShape) -> usize {
    (shape.kernel * shape.channels).div_ceil(S::LANES)
}

/// Whether this computes the weight gradient of `shape` faster.
pub(super) fn is_faster<S: Simd>(shape: &ConvShape, epilogue: &Epilogue) -> bool {
    let few = shape.filters <= MAX_LANES;
    few && epilogue.pool.is_some() && matches!(shape.kernel, 3 | 5) && vectors::<S>(shape) <= 2
}

/// Elements of the sums of all filters, \[F, K, whole vectors\].
pub(super) fn sums_len(shape: &ConvShape) -> usize {
    shape.filters * shape.kernel * 2 * MAX_LANES
}

/// Adds the gradients from one image to `sums`, and to `bias`. `x` is followed by [`slack`] elements.
#[inline(always)]
pub(super) fn add_image<S: Simd, E: Storage>(
    simd: S,
    (shape, epilogue): (&ConvShape, &Epilogue),
    x: &[f32],
    from: Results<'_, E>,
    sums: &mut [f32],
    bias: &mut [f32],
) {
    match (shape.kernel, vectors::<S>(shape)) {
        (3, 1) => add::<S, E, 3, 1>(simd, (shape, epilogue), x, from, sums, bias),
        (3, 2) => add::<S, E, 3, 2>(simd, (shape, epilogue), x, from, sums, bias),
        (5, 1) => add::<S, E, 5, 1>(simd, (shape, epilogue), x, from, sums, bias),
        (5, 2) => add::<S, E, 5, 2>(simd, (shape, epilogue), x, from, sums, bias),
        _ => unreachable!("a kernel that `is_faster` excludes"),
    }
}

#[inline(always)]
fn add<S: Simd, E: Storage, const K: usize, const V: usize>(
    simd: S,
    (shape, epilogue): (&ConvShape, &Epilogue),
    x: &[f32],
    from: Results<'_, E>,
    sums: &mut [f32],
    bias: &mut [f32],
) {
    let (filters, channels) = (shape.filters, shape.channels);
    let (rows, columns) = epilogue.result(shape);
    let line = PaddedImage::input(shape).line();
    let len = rows * columns * filters;
    assert!(from.y.len() == len && from.dy.len() == len && from.chosen.len() == len, "results of an image");
    assert!(sums.len() >= filters * K * V * S::LANES && bias.len() == filters, "sums of all filters");
    if len == 0 {
        return;
    }
    let end = (2 * rows + K - 2) * line + (2 * columns - 1) * channels + V * S::LANES;
    assert!(x.len() >= end, "an image and its slack");
    let places = [0, channels, line, line + channels];
    let factors = [epilogue.slope.unwrap_or(1.0), 1.0];
    for (filter, bias) in bias.iter_mut().enumerate() {
        // SAFETY: windows exceed the image by at most one pixel, and `x` was checked to have that many elements.
        unsafe {
            let own = sums.as_mut_ptr().add(filter * K * V * S::LANES);
            let mut acc = [[simd.splat(0.0); V]; K];
            let mut total = 0.0;
            for row in 0..rows {
                for column in 0..columns {
                    let at = (row * columns + column) * filters + filter;
                    let positive = usize::from(from.y.get_unchecked(at).widen() > 0.0);
                    let gradient = from.dy.get_unchecked(at).widen() * factors[positive];
                    total += gradient;
                    let place = places[usize::from(*from.chosen.get_unchecked(at)) % 4];
                    let seen = x.as_ptr().add(2 * (row * line + column * channels) + place);
                    let gradient = simd.splat(gradient);
                    for (u, acc) in acc.iter_mut().enumerate() {
                        for (v, acc) in acc.iter_mut().enumerate() {
                            let inputs = simd.load(seen.add(u * line + v * S::LANES));
                            *acc = simd.mul_add(gradient, inputs, *acc);
                        }
                    }
                }
            }
            *bias += total;
            for (at, acc) in acc.iter().flatten().enumerate() {
                let to = own.add(at * S::LANES);
                simd.store(simd.add(simd.load(to.cast_const()), *acc), to);
            }
        }
    }
}

/// Writes the sums in the layout of a thread's weight gradient, see [`weights::gradient_len`].
pub(super) fn reorder<S: Simd>(shape: &ConvShape, sums: &[f32], dw: &mut [f32]) {
    let (seen, stride) = (shape.kernel * shape.channels, lines(shape.filters));
    assert!(dw.len() >= weights::gradient_len(shape), "a weight gradient");
    for (at, run) in
        sums.chunks_exact(vectors::<S>(shape) * S::LANES).take(shape.filters * shape.kernel).enumerate()
    {
        let (filter, u) = (at / shape.kernel, at % shape.kernel);
        for (tap, &sum) in run[..seen].iter().enumerate() {
            dw[(u * seen + tap) * stride + filter] = sum;
        }
    }
}
