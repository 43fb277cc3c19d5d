//! What follows a convolution, by vectors of channels: max-pooling of two rows, and the way of the gradient back through
//! pooling and activation.

use super::border::Bordered;
use crate::conv::Shape;
use crate::conv::cpu::Tail;
use crate::simd::{MAX_LANES, Simd};

/// Pools one or two rows of `width` pixels to one row, the length of `y`; `chosen` gets the places of the maxima, and may
/// be written a little beyond them, where it is longer.
#[inline(always)]
pub(super) fn pool<S: Simd>(
    simd: S,
    rows: &[f32],
    (width, channels): (usize, usize),
    y: &mut [f32],
    chosen: &mut [u8],
) {
    let line = width * channels;
    let two = rows.len() == 2 * line;
    assert!(two || rows.len() == line, "one or two rows");
    assert!(y.len() / channels <= width.div_ceil(2) && chosen.len() >= y.len(), "a row of half the width");
    let places = [0.0, 1.0, 2.0, 3.0].map(|place| simd.splat(place));
    for pixel in 0..y.len() / channels {
        let second = 2 * pixel + 1 < width;
        for channel in (0..channels).step_by(S::LANES) {
            let count = S::LANES.min(channels - channel);
            let (from, to) = (2 * pixel * channels + channel, pixel * channels + channel);
            // SAFETY: the window's pixels lie within the rows by the assertions and tests; stores end within `y` and `chosen`.
            unsafe {
                let window = rows.as_ptr().add(from);
                let (mut best, mut place) = (simd.load_first(window, count), places[0]);
                let others = [(second, channels), (two, line), (second && two, line + channels)];
                for (at, (exists, offset)) in others.into_iter().enumerate() {
                    if exists {
                        let value = simd.load_first(window.add(offset), count);
                        let greater = simd.greater(value, best);
                        best = simd.select(greater, value, best);
                        place = simd.select(greater, places[at + 1], place);
                    }
                }
                simd.store_first(best, y.as_mut_ptr().add(to), count);
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

/// The results for one image and their gradient.
#[derive(Debug, Clone, Copy)]
pub(super) struct Results<'a> {
    pub(super) y: &'a [f32],
    pub(super) dy: &'a [f32],
    /// Empty without pooling.
    pub(super) chosen: &'a [u8],
}

/// Writes the gradient before activation and pooling to the middle of `to`, and adds it up in `bias`. Pixels that no
/// window covers are not written.
#[inline(always)]
pub(super) fn spread<S: Simd>(
    simd: S,
    shape: &Shape,
    tail: &Tail,
    from: Results<'_>,
    bordered: &Bordered,
    to: &mut [f32],
    bias: &mut [f32],
) {
    let channels = shape.filters;
    let (rows, columns) = tail.result(shape);
    let (height, width) = (shape.out_height(), shape.out_width());
    let len = rows * columns * channels;
    assert!(from.y.len() == len && from.dy.len() == len && bias.len() == channels, "results of an image");
    assert!(tail.pool.is_none() || from.chosen.len() == len, "choices of an image");
    assert!(to.len() >= bordered.len(), "the gradient of an image");
    let (line, interior) = (bordered.line(), bordered.interior());
    let (zero, one, slope) = (simd.splat(0.0), simd.splat(1.0), simd.splat(tail.slope.unwrap_or(1.0)));
    let places = [0.0, 1.0, 2.0, 3.0].map(|place| simd.splat(place));
    for row in 0..rows {
        for channel in (0..channels).step_by(S::LANES) {
            let count = S::LANES.min(channels - channel);
            // SAFETY: by the assertions and tests, all pixels lie within their images.
            unsafe {
                let mut sum = zero;
                for column in 0..columns {
                    let at = (row * columns + column) * channels + channel;
                    let positive = simd.greater(simd.load_first(from.y.as_ptr().add(at), count), zero);
                    let dy = simd.load_first(from.dy.as_ptr().add(at), count);
                    let gradient = simd.mul(dy, simd.select(positive, one, slope));
                    sum = simd.add(sum, gradient);
                    if tail.pool.is_none() {
                        let to = to.as_mut_ptr().add(interior + row * line + column * channels + channel);
                        simd.store_first(gradient, to, count);
                        continue;
                    }
                    let chosen = if at + S::LANES <= len {
                        simd.load_bytes(from.chosen.as_ptr().add(at))
                    } else {
                        let mut bytes = [0; MAX_LANES];
                        bytes[..count].copy_from_slice(&from.chosen[at..at + count]);
                        simd.load_bytes(bytes.as_ptr())
                    };
                    let to = to.as_mut_ptr().add(interior + 2 * (row * line + column * channels) + channel);
                    for (at, place) in places.into_iter().enumerate() {
                        let (u, v) = (at / 2, at % 2);
                        if 2 * row + u < height && 2 * column + v < width {
                            let value = simd.select(simd.equal(chosen, place), gradient, zero);
                            simd.store_first(value, to.add(u * line + v * channels), count);
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
