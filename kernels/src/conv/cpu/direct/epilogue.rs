//! The epilogue of a convolution, by vectors of channels: max-pooling of two rows and the activation, and the
//! gradients of both.

use super::border::{GradientBlock, PaddedImage};
use crate::Storage;
use crate::conv::cpu::Epilogue;
use crate::gemm::tile::PANEL;
use crate::pool::Rounding;
use crate::simd::{MAX_LANES, Simd};
use crate::storage::lanes::Lanes;

/// One or two rows of a convolution's outputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outputs<'a> {
    pub(super) values: &'a [f32],
    pub(super) rows: usize,
    /// Pixels of a row.
    pub(super) width: usize,
    pub(super) channels: usize,
    /// Elements from one pixel to the next.
    pub(super) pixel: usize,
    /// Elements from one row to the next.
    pub(super) line: usize,
}

/// Pools rows to one row, the length of `y`, and applies the activation. Writes the positions of the maxima to `chosen`, and
/// possibly a few bytes after them if `chosen` is longer.
#[inline(always)]
pub(super) fn pool<S: Simd, E: Storage>(
    simd: S,
    epilogue: &Epilogue,
    outputs: Outputs<'_>,
    y: &mut [E],
    chosen: &mut [u8],
) {
    let Outputs { values, rows, width, channels, pixel, line } = outputs;
    let two = rows == 2;
    assert!(two || rows == 1, "one or two rows");
    assert!(pixel >= channels && line >= width * pixel && values.len() >= rows * line, "pixels of rows");
    assert!(y.len() / channels <= width.div_ceil(2) && chosen.len() >= y.len(), "a row of half the width");
    let (zero, slope) = (simd.splat(0.0), simd.splat(epilogue.slope.unwrap_or(1.0)));
    let places = [simd.splat(0.0), simd.splat(1.0), simd.splat(2.0), simd.splat(3.0)];
    for result in 0..y.len() / channels {
        let second = 2 * result + 1 < width;
        for channel in (0..channels).step_by(S::LANES) {
            let count = S::LANES.min(channels - channel);
            let (from, to) = (2 * result * pixel + channel, result * channels + channel);
            // SAFETY: the window's pixels lie within the rows by the assertions and conditions; stores end within `y`
            // and `chosen`.
            unsafe {
                let window = values.as_ptr().add(from);
                let load = |from| f32::load_at_least(simd, from, count, pixel - channel);
                let (mut best, mut place) = (load(window), places[0]);
                let others = [(second, pixel), (two, line), (second && two, line + pixel)];
                for (at, (exists, offset)) in others.into_iter().enumerate() {
                    if exists {
                        let value = load(window.add(offset));
                        let greater = simd.greater(value, best);
                        best = simd.select(greater, value, best);
                        place = simd.select(greater, places[at + 1], place);
                    }
                }
                let best = simd.select(simd.greater(best, zero), best, simd.mul(best, slope));
                // What is written beyond the channels is overwritten by the next pixel's.
                E::store_at_least(simd, best, y.as_mut_ptr().add(to), count, y.len() - to);
                if to + S::LANES <= chosen.len() {
                    simd.store_bytes(place, chosen.as_mut_ptr().add(to));
                } else {
                    let mut bytes = [0; MAX_LANES];
                    simd.store_bytes(place, bytes.as_mut_ptr());
                    chosen[to..to + count].copy_from_slice(&bytes[..count]);
                }
            }
        }
    }
}

/// Rows of one image's result and their gradient.
#[derive(Debug, Clone, Copy)]
pub(super) struct Results<'a, E> {
    pub(super) y: &'a [E],
    pub(super) dy: &'a [E],
    /// Empty without pooling.
    pub(super) chosen: &'a [u8],
}

/// Writes rows of the gradient before activation and pooling to a block and, if given, to an image, each from its
/// first pixel on, and adds them to `bias`. Pixels that no window covers are not written.
#[inline(always)]
pub(super) fn spread<S: Simd, E: Storage>(
    simd: S,
    epilogue: &Epilogue,
    (height, width): (usize, usize),
    from: Results<'_, E>,
    (block, to): (&GradientBlock, &mut [f32]),
    (padded, image): (&PaddedImage, Option<&mut [f32]>),
    bias: &mut [f32],
) {
    let channels = bias.len();
    let each = block.rows_each;
    let columns = match epilogue.pool {
        Some(Rounding::Floor) => width / 2,
        Some(Rounding::Ceil) => width.div_ceil(2),
        None => width,
    };
    let len = from.y.len();
    let rows = len / (columns * channels).max(1);
    assert!(len == rows * columns * channels && from.dy.len() == len, "rows of a result");
    assert!(epilogue.pool.is_none() || from.chosen.len() == len, "positions of a result's maxima");
    assert!(rows <= height && height <= rows * each && rows <= block.results, "rows of a gradient");
    assert!(to.len() >= block.len() && channels <= block.channels(), "a block of a gradient");
    assert!(height * width * block.stride <= block.panel, "pixels of a block of a gradient");
    let line = padded.line();
    let image = match image {
        Some(image) => {
            assert!(padded.channels == channels && image.len() >= (height - 1) * line + width * channels);
            image.as_mut_ptr()
        }
        None => std::ptr::null_mut(),
    };
    let (zero, one, slope) = (simd.splat(0.0), simd.splat(1.0), simd.splat(epilogue.slope.unwrap_or(1.0)));
    let places = [simd.splat(0.0), simd.splat(1.0), simd.splat(2.0), simd.splat(3.0)];
    for row in 0..rows {
        for channel in (0..channels).step_by(S::LANES) {
            let count = S::LANES.min(channels - channel);
            let first = channel / PANEL * block.panel + channel % PANEL;
            // SAFETY: by the assertions, all pixels lie within their rows, block and image.
            unsafe {
                let mut sum = zero;
                for column in 0..columns {
                    let at = (row * columns + column) * channels + channel;
                    let positive = simd.greater(E::load_first(simd, from.y.as_ptr().add(at), count), zero);
                    let dy = E::load_first(simd, from.dy.as_ptr().add(at), count);
                    let gradient = simd.mul(dy, simd.select(positive, one, slope));
                    sum = simd.add(sum, gradient);
                    let chosen = if epilogue.pool.is_none() {
                        zero
                    } else if at + S::LANES <= len {
                        simd.load_bytes(from.chosen.as_ptr().add(at))
                    } else {
                        let mut bytes = [0; MAX_LANES];
                        bytes[..count].copy_from_slice(&from.chosen[at..at + count]);
                        simd.load_bytes(bytes.as_ptr())
                    };
                    for (place, number) in places.into_iter().enumerate().take(each * each) {
                        let (i, j) = (each * row + place / 2, each * column + place % 2);
                        if i < height && j < width {
                            let value = simd.select(simd.equal(chosen, number), gradient, zero);
                            // Whole vectors, since a pixel of a block is padded to whole cache lines.
                            simd.store(value, to.as_mut_ptr().add(first + (i * width + j) * block.stride));
                            if !image.is_null() {
                                let to = image.add(i * line + j * channels + channel);
                                if count == S::LANES {
                                    simd.store(value, to);
                                } else {
                                    simd.store_first(value, to, count);
                                }
                            }
                        }
                    }
                }
                let bias = bias.as_mut_ptr().add(channel);
                let total = simd.add(simd.load_first(bias.cast_const(), count), sum);
                simd.store_first(total, bias, count);
            }
        }
    }
}
