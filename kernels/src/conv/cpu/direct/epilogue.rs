//! The epilogue of a convolution, by vectors of channels: max-pooling of two rows and the activation, and the
//! gradients of both.

use super::border::{GradientBlock, PaddedImage};
use crate::Storage;
use crate::conv::cpu::{Epilogue, activate, before_activation};
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
    for result in 0..y.len() / channels {
        let (below, right) = (if two { line } else { 0 }, if 2 * result + 1 < width { pixel } else { 0 });
        for channel in (0..channels).step_by(S::LANES) {
            let count = S::LANES.min(channels - channel);
            let (from, to) = (2 * result * pixel + channel, result * channels + channel);
            // SAFETY: the window's pixels lie within the rows by the assertions and conditions; stores end within `y`
            // and `chosen`.
            unsafe {
                let window = values.as_ptr().add(from);
                let load = |from: usize| f32::load_at_least(simd, window.add(from), count, pixel - channel);
                let outputs = [load(0), load(right), load(below), load(below + right)];
                pool_window(simd, epilogue, outputs, (y, chosen), to, count);
            }
        }
    }
}

/// Writes the maximum of a window's outputs, row by row, and its position, from element `to` on. The first output stands
/// in for those outside the image.
///
/// # Safety
/// Both destinations have `to + count` elements.
#[inline(always)]
pub(super) unsafe fn pool_window<S: Simd, E: Storage>(
    simd: S,
    epilogue: &Epilogue,
    outputs: [S::F32; 4],
    (y, chosen): (&mut [E], &mut [u8]),
    to: usize,
    count: usize,
) {
    let slope = simd.splat(epilogue.slope.unwrap_or(1.0));
    let (mut best, mut place) = (outputs[0], simd.splat(0.0));
    for (at, &output) in outputs.iter().enumerate().skip(1) {
        let greater = simd.greater(output, best);
        best = simd.select(greater, output, best);
        place = simd.select(greater, simd.splat(at as f32), place);
    }
    let best = activate(simd, best, slope);
    // SAFETY: the caller's promise. What is written beyond the channels is overwritten by the next pixel's.
    unsafe {
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

/// Rows of one image's result and their gradient.
#[derive(Debug, Clone, Copy)]
pub(super) struct Results<'a, E> {
    pub(super) y: &'a [E],
    pub(super) dy: &'a [E],
    /// Empty without pooling.
    pub(super) chosen: &'a [u8],
}

/// Writes rows of the gradient before activation and pooling to a block and to an image, to those given and each from its
/// first pixel on, and adds them to `bias`. Pixels that no window covers are not written.
#[inline(always)]
pub(super) fn spread<S: Simd, E: Storage>(
    simd: S,
    epilogue: &Epilogue,
    (height, width): (usize, usize),
    from: Results<'_, E>,
    block: Option<(&GradientBlock, &mut [f32])>,
    image: Option<(&PaddedImage, &mut [f32])>,
    bias: &mut [f32],
) {
    let channels = bias.len();
    let (each, columns) = match epilogue.pool {
        Some(Rounding::Floor) => (2, width / 2),
        Some(Rounding::Ceil) => (2, width.div_ceil(2)),
        None => (1, width),
    };
    let len = from.y.len();
    let rows = len / (columns * channels).max(1);
    if rows == 0 {
        return;
    }
    assert!(len == rows * columns * channels && from.dy.len() == len, "rows of a result");
    assert!(epilogue.pool.is_none() || from.chosen.len() == len, "positions of a result's maxima");
    assert!(rows <= height && height <= rows * each, "rows of a gradient");
    let block = block.map(|(block, to)| {
        assert!(to.len() >= block.len() && channels <= block.channels(), "a block of a gradient");
        assert!(height * width * block.stride <= block.panel, "pixels of a block of a gradient");
        (*block, to.as_mut_ptr())
    });
    let image = image.map(|(padded, to)| {
        let line = padded.line();
        assert!(padded.channels == channels && to.len() >= (height - 1) * line + width * channels, "rows");
        (line, to.as_mut_ptr())
    });
    let mut spread = Spread { epilogue, height, width, columns, from, block, image, bias };
    for row in 0..rows {
        let mut channel = 0;
        while channel < channels {
            // SAFETY: by the assertions, all pixels lie within their rows, block and image.
            unsafe {
                channel += S::LANES
                    * match ((channels - channel) / S::LANES, epilogue.pool.is_some()) {
                        (STRIP.., true) => spread.windows::<S, STRIP>(simd, row, channel),
                        (STRIP.., false) => spread.pixels::<S, STRIP>(simd, row, channel),
                        (HALF.., true) => spread.windows::<S, HALF>(simd, row, channel),
                        (HALF.., false) => spread.pixels::<S, HALF>(simd, row, channel),
                        (_, true) => spread.windows::<S, 1>(simd, row, channel),
                        (_, false) => spread.pixels::<S, 1>(simd, row, channel),
                    };
            }
        }
    }
}

/// Vectors of channels that are read one after another: processors fetch memory in advance that is read nearly in order. Their
/// sums stay in registers.
const STRIP: usize = 8;

/// The same for few channels.
const HALF: usize = STRIP / 2;

/// The arguments of [`spread`], which has checked them.
struct Spread<'a, 'b, E> {
    epilogue: &'a Epilogue,
    height: usize,
    width: usize,
    /// Pixels of a row of the result.
    columns: usize,
    from: Results<'a, E>,
    block: Option<(GradientBlock, *mut f32)>,
    /// With the elements of a row.
    image: Option<(usize, *mut f32)>,
    bias: &'b mut [f32],
}

impl<E: Storage> Spread<'_, '_, E> {
    /// Spreads a row of the result without pooling: `V` vectors of channels from `channel` on. Returns `V`.
    ///
    /// # Safety
    /// The row and the first lane of each vector exist; only a single vector may be partial.
    #[inline(always)]
    unsafe fn pixels<S: Simd, const V: usize>(&mut self, simd: S, row: usize, channel: usize) -> usize {
        let channels = self.bias.len();
        let mut sums = [simd.splat(0.0); V];
        for column in 0..self.columns {
            let at = (row * self.columns + column) * channels + channel;
            for (vector, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    let gradient = self.gradient::<S, V>(simd, at + vector * S::LANES, channel);
                    *sum = simd.add(*sum, gradient);
                    self.store::<S, V>(simd, gradient, (row, column), channel + vector * S::LANES);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.add_to_bias(simd, sums, channel) }
    }

    /// As [`pixels`](Self::pixels), with pooling.
    ///
    /// # Safety
    /// The same.
    #[inline(always)]
    unsafe fn windows<S: Simd, const V: usize>(&mut self, simd: S, row: usize, channel: usize) -> usize {
        let (channels, zero) = (self.bias.len(), simd.splat(0.0));
        let places = [zero, simd.splat(1.0), simd.splat(2.0), simd.splat(3.0)];
        let mut sums = [zero; V];
        for column in 0..self.columns {
            for (vector, sum) in sums.iter_mut().enumerate() {
                let channel = channel + vector * S::LANES;
                let at = (row * self.columns + column) * channels + channel;
                // SAFETY: the caller's promise.
                unsafe {
                    let gradient = self.gradient::<S, V>(simd, at, channel);
                    *sum = simd.add(*sum, gradient);
                    let chosen = match self.from.chosen {
                        chosen if at + S::LANES <= chosen.len() => simd.load_bytes(chosen.as_ptr().add(at)),
                        chosen => {
                            let mut bytes = [0; MAX_LANES];
                            bytes[..chosen.len() - at].copy_from_slice(&chosen[at..]);
                            simd.load_bytes(bytes.as_ptr())
                        }
                    };
                    for (place, number) in places.into_iter().enumerate() {
                        let (i, j) = (2 * row + place / 2, 2 * column + place % 2);
                        if i < self.height && j < self.width {
                            let value = simd.select(simd.equal(chosen, number), gradient, zero);
                            self.store::<S, V>(simd, value, (i, j), channel);
                        }
                    }
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.add_to_bias(simd, sums, channel) }
    }

    /// Lanes of each of `V` vectors from `channel` on.
    #[inline(always)]
    fn lanes<S: Simd, const V: usize>(&self, channel: usize) -> usize {
        if V > 1 { S::LANES } else { S::LANES.min(self.bias.len() - channel) }
    }

    /// The gradient before the activation, from element `at` on. Lanes beyond the last channel do not matter.
    ///
    /// # Safety
    /// The first lane exists.
    #[inline(always)]
    unsafe fn gradient<S: Simd, const V: usize>(&self, simd: S, at: usize, channel: usize) -> S::F32 {
        let (count, slope) = (self.lanes::<S, V>(channel), self.epilogue.slope.unwrap_or(1.0));
        // SAFETY: the caller's promise.
        let load = |values: &[E]| unsafe {
            E::load_at_least(
                simd,
                values.as_ptr().add(at),
                count,
                if V > 1 { count } else { values.len() - at },
            )
        };
        before_activation(simd, load(self.from.y), load(self.from.dy), simd.splat(slope))
    }

    /// Writes a vector of channels of pixel (i, j).
    ///
    /// # Safety
    /// The pixel and the channels exist.
    #[inline(always)]
    unsafe fn store<S: Simd, const V: usize>(
        &self,
        simd: S,
        values: S::F32,
        (i, j): (usize, usize),
        channel: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some((block, to)) = &self.block {
                // Whole vectors, since a pixel of a block is padded to whole cache lines.
                let first = channel / PANEL * block.panel + channel % PANEL;
                simd.store(values, to.add(first + (i * self.width + j) * block.stride));
            }
            if let Some((line, to)) = self.image {
                let to = to.add(i * line + j * self.bias.len() + channel);
                match self.lanes::<S, V>(channel) {
                    count if count == S::LANES => simd.store(values, to),
                    count => simd.store_first(values, to, count),
                }
            }
        }
    }

    /// Adds vectors of channels to the gradient of the bias, and returns their number.
    ///
    /// # Safety
    /// The first lane of each vector exists.
    #[inline(always)]
    unsafe fn add_to_bias<S: Simd, const V: usize>(
        &mut self,
        simd: S,
        sums: [S::F32; V],
        channel: usize,
    ) -> usize {
        for (vector, sum) in sums.iter().enumerate() {
            let count = self.lanes::<S, V>(channel);
            // SAFETY: the caller's promise.
            unsafe {
                let bias = self.bias.as_mut_ptr().add(channel + vector * S::LANES);
                simd.store_first(simd.add(simd.load_first(bias.cast_const(), count), *sum), bias, count);
            }
        }
        V
    }
}
