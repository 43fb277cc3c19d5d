//! The forward pass of a pooled layer with one channel and few filters.
//!
//! A vector of filters would have most of its lanes empty. Here a vector holds neighbouring pixels of a row instead, and each
//! weight is broadcast. The sums of a few vectors and filters stay in registers. The filters' rows are then transposed, so
//! that the channels of a pixel are contiguous again. Every sum has the order of terms, and so the bits, of the product that
//! this replaces.

use super::border::PaddedImage;
use crate::conv::ConvShape;
use crate::conv::cpu::Epilogue;
use crate::gemm::tile::{PANEL, SPAN};
use crate::simd::{MAX_LANES, Simd};

/// Elements beyond an input image that may be read: almost one vector.
pub(super) const SLACK: usize = MAX_LANES;

/// Whether this computes the layer faster.
pub(super) fn is_faster(shape: &ConvShape, epilogue: &Epilogue) -> bool {
    let few = 2 * shape.filters <= MAX_LANES && shape.filter_len() <= SPAN;
    shape.channels == 1 && few && epilogue.pool.is_some()
}

/// Pixels of a row in whole vectors.
fn row_len<S: Simd>(shape: &ConvShape) -> usize {
    shape.out_width().next_multiple_of(S::LANES)
}

/// Elements from one pixel of the outputs to the next: the filters in whole vectors.
pub(super) fn pixel_len<S: Simd>(shape: &ConvShape) -> usize {
    shape.filters.next_multiple_of(S::LANES)
}

/// Elements from one row of the outputs to the next.
pub(super) fn line_len<S: Simd>(shape: &ConvShape) -> usize {
    row_len::<S>(shape) * pixel_len::<S>(shape)
}

/// Elements of a row of pixels for each filter, and for those that fill the last group or vector.
pub(super) fn planes_len<S: Simd>(shape: &ConvShape) -> usize {
    MAX_LANES * row_len::<S>(shape)
}

/// Computes `count` rows of outputs from those of a padded image on, without activation. `planes` may contain anything.
#[inline(always)]
pub(super) fn rows<S: Simd>(
    simd: S,
    shape: &ConvShape,
    count: usize,
    (x, packed, bias): (&[f32], &[f32], &[f32]),
    planes: &mut [f32],
    outputs: &mut [f32],
) {
    let (filters, line) = (shape.filters, PaddedImage::input(shape).line());
    let (row, pixel) = (row_len::<S>(shape), pixel_len::<S>(shape));
    assert!(count > 0 && x.len() >= (count + shape.kernel - 1) * line + SLACK, "rows of an image and slack");
    assert!(packed.len() >= shape.kernel * shape.kernel * PANEL && bias.len() == filters, "filters and bias");
    assert!(planes.len() >= planes_len::<S>(shape), "rows of all filters");
    assert!(outputs.len() >= count * line_len::<S>(shape), "rows of outputs");
    let mut padded = [0.0; MAX_LANES];
    padded[..filters].copy_from_slice(bias);
    for (x, outputs) in (0..count).map(|row| &x[row * line..]).zip(outputs.chunks_exact_mut(row * pixel)) {
        let mut first = 0;
        while first < row {
            // SAFETY: the vectors lie within a row of `planes`, and their inputs end less than a vector after those of
            // the row's last pixel. Groups of filters end within a panel and within `planes`, both of 16 or more.
            unsafe {
                let (from, to) = (x.as_ptr().add(first), planes.as_mut_ptr().add(first));
                let operands = (from, line, packed.as_ptr(), padded.as_ptr());
                first += S::LANES
                    * match (row - first) / S::LANES {
                        1 => block::<S, 1, 8>(simd, shape, operands, to, row),
                        2 | 3 => block::<S, 2, 4>(simd, shape, operands, to, row),
                        _ => block::<S, 4, 2>(simd, shape, operands, to, row),
                    };
            }
        }
        for (from, filter) in (0..row)
            .step_by(S::LANES)
            .flat_map(|from| (0..pixel).step_by(S::LANES).map(move |filter| (from, filter)))
        {
            // SAFETY: whole vectors of pixels and filters on both sides.
            unsafe {
                let planes = planes.as_ptr().add(filter * row + from);
                simd.transpose(planes, row, outputs.as_mut_ptr().add(from * pixel + filter), pixel);
            }
        }
    }
}

/// Writes `V` vectors of pixels for each filter to rows of `to`, `row` elements apart; `F` filters at a time. Returns `V`.
///
/// # Safety
/// The kernel may read as many pixels from `x` on in each of its rows, which are `line` elements apart. Filters are in one
/// panel. There are as many biases, and rows of `to` that can be written, as filters in whole groups.
#[inline(always)]
unsafe fn block<S: Simd, const V: usize, const F: usize>(
    simd: S,
    shape: &ConvShape,
    (x, line, packed, bias): (*const f32, usize, *const f32, *const f32),
    to: *mut f32,
    row: usize,
) -> usize {
    for filter in (0..shape.filters).step_by(F) {
        let mut sums = [[simd.splat(0.0); V]; F];
        // SAFETY: the caller's promise.
        unsafe {
            for (at, sums) in sums.iter_mut().enumerate() {
                *sums = [simd.splat(*bias.add(filter + at)); V];
            }
            let mut weights = packed.add(filter);
            for u in 0..shape.kernel {
                for v in 0..shape.kernel {
                    let seen = x.add(u * line + v);
                    let mut pixels = [simd.splat(0.0); V];
                    for (at, pixels) in pixels.iter_mut().enumerate() {
                        *pixels = simd.load(seen.add(at * S::LANES));
                    }
                    for (at, sums) in sums.iter_mut().enumerate() {
                        let weight = simd.splat(*weights.add(at));
                        for (sum, pixels) in sums.iter_mut().zip(&pixels) {
                            *sum = simd.mul_add(*pixels, weight, *sum);
                        }
                    }
                    weights = weights.add(PANEL);
                }
            }
            for (at, sums) in sums.iter().enumerate() {
                for (vector, sum) in sums.iter().enumerate() {
                    simd.store(*sum, to.add((filter + at) * row + vector * S::LANES));
                }
            }
        }
    }
    V
}
