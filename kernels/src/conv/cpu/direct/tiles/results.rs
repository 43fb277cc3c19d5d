//! What becomes of sums: the results of a convolution, and the gradient of its weights.

use std::ops::Range;

use super::super::{Epilogue, epilogue};
use super::operands::Runs;
use crate::AlignedVec;
use crate::conv::ConvShape;
use crate::conv::cpu::activate;
use crate::gemm::transpose::Transpose;
use crate::simd::{MIN_LANES, Simd, Task};
use crate::storage::Storage;
use crate::storage::lanes::Lanes;
use crate::threads::{Rows, Threads};
use crate::tile_engine::{BLOCK, SIDE, SUMS, index};

/// What follows a convolution's sums.
#[derive(Clone, Copy)]
pub(super) struct Finish<'a> {
    pub(super) bias: Option<&'a [f32]>,
    pub(super) slope: f32,
}

/// Writes the sums of a block to the outputs of its pixels, with bias and activation.
pub(super) struct Store<'a, O> {
    pub(super) runs: &'a Runs,
    /// The first pixel.
    pub(super) first: usize,
    /// From the first column of the block to the last of all.
    pub(super) columns: Range<usize>,
    pub(super) finish: Finish<'a>,
    pub(super) sums: &'a [f32],
    /// \[row, column, filter\].
    pub(super) outputs: &'a mut [O],
}

impl<O: Storage> Task for Store<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Store { runs, first, ref columns, finish, sums, ref outputs } = self;
        let ((height, width), filters) = (runs.result(), columns.end);
        assert!(sums.len() == SUMS && outputs.len() == height * width * filters, "outputs of a convolution");
        assert!(first < runs.pixels() && columns.start < filters, "a block of a convolution");
        assert!(finish.bias.is_none_or(|bias| bias.len() == filters), "bias of a convolution");
        // SAFETY: the assertions.
        unsafe {
            match (columns.len() >= BLOCK, finish.bias.is_some() || finish.slope != 1.0) {
                (true, true) => self.pixels::<S, true, true>(simd),
                (true, false) => self.pixels::<S, true, false>(simd),
                (false, _) => self.pixels::<S, false, true>(simd),
            }
        }
    }
}

impl<O: Storage> Store<'_, O> {
    /// Stores all pixels. `WHOLE` tells that there are as many columns as in a block, and `FINISH` whether anything becomes of
    /// the sums before.
    ///
    /// # Safety
    /// The lengths are those that `run` checks.
    #[inline(always)]
    unsafe fn pixels<S: Simd, const WHOLE: bool, const FINISH: bool>(self, simd: S) {
        let Store { runs, first, columns, finish: Finish { bias, slope }, sums, outputs } = self;
        let ((_, width), filters) = (runs.result(), columns.end);
        let count = |at: usize| if WHOLE { S::LANES } else { S::LANES.min(columns.len().saturating_sub(at)) };
        let (zero, slope) = (simd.splat(0.0), simd.splat(slope));
        let mut biases = [zero; BLOCK / MIN_LANES];
        if let Some(bias) = bias {
            for (at, vector) in (0..BLOCK).step_by(S::LANES).zip(&mut biases) {
                // SAFETY: the caller's promise; no element is read beyond the columns.
                *vector =
                    unsafe { simd.load_first(bias.as_ptr().wrapping_add(columns.start + at), count(at)) };
            }
        }
        let (mut row, mut column) = (first / runs.image.width, first % runs.image.width);
        for pixel in 0..BLOCK.min(runs.pixels() - first) {
            if column < width {
                let to = (row * width + column) * filters + columns.start;
                for (at, bias) in (0..BLOCK).step_by(S::LANES).zip(&biases) {
                    // SAFETY: a vector is within a row of a tile; `row` and `column` are those of an output, whose filters
                    // exist by the caller's promise.
                    unsafe {
                        let mut value = simd.load(sums.as_ptr().add(index(pixel, at)));
                        if FINISH {
                            value = activate(simd, simd.add(value, *bias), slope);
                        }
                        let to = outputs.as_mut_ptr().wrapping_add(to + at);
                        match count(at) {
                            count if count == S::LANES => O::store(simd, value, to),
                            count => O::store_first(simd, value, to, count),
                        }
                    }
                }
            }
            column += 1;
            if column == runs.image.width {
                (row, column) = (row + 1, 0);
            }
        }
    }
}

/// Blocks of sums, of 32 pixels each, of which the last few are kept: those that a row of a pooled result needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring {
    blocks: usize,
}

impl Ring {
    pub(super) fn new(runs: &Runs) -> Ring {
        // Two rows, and the parts of blocks before and after them.
        Ring { blocks: (2 * runs.image.width).div_ceil(BLOCK) + 2 }
    }

    /// Elements of all blocks.
    pub(super) fn len(&self) -> usize {
        self.blocks * SUMS
    }

    /// The sums of the block that begins with pixel `first`.
    pub(super) fn block(&self, first: usize) -> Range<usize> {
        let at = first / BLOCK % self.blocks * SUMS;
        at..at + SUMS
    }
}

/// Adds the bias to the sums of two rows of a convolution, or of the last one, and pools them to a row of the result.
pub(super) struct Pool<'a, E> {
    pub(super) runs: &'a Runs,
    pub(super) epilogue: Epilogue,
    pub(super) ring: Ring,
    pub(super) sums: &'a [f32],
    /// From the first column of the blocks to the last of all.
    pub(super) columns: Range<usize>,
    pub(super) bias: &'a [f32],
    /// The row of the result.
    pub(super) row: usize,
    /// That row's results, \[column, filter\].
    pub(super) y: &'a mut [E],
    pub(super) chosen: &'a mut [u8],
}

impl<E: Storage> Task for Pool<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Pool { runs, epilogue, ring, sums, columns, bias, row, y, chosen } = self;
        let ((height, width), filters) = (runs.result(), columns.end);
        let line = runs.image.width;
        assert!(
            sums.len() == ring.len() && columns.start < filters && bias.len() == filters,
            "sums and bias"
        );
        assert!(
            y.len().div_ceil(filters) <= width.div_ceil(2) && y.len() == chosen.len(),
            "a row of half the width"
        );
        assert!(2 * row < height, "a row of the result");
        let below = if 2 * row + 1 < height { line } else { 0 };
        for column in 0..y.len() / filters {
            let first = 2 * row * line + 2 * column;
            let right = usize::from(2 * column + 1 < width);
            let sums_of = |pixel: usize| {
                let block = ring.block(pixel / BLOCK * BLOCK);
                sums[block].as_ptr().wrapping_add(index(pixel % BLOCK, 0))
            };
            let pixels = [
                sums_of(first),
                sums_of(first + right),
                sums_of(first + below),
                sums_of(first + below + right),
            ];
            for at in (0..BLOCK.min(columns.len())).step_by(S::LANES) {
                let count = S::LANES.min(columns.len() - at);
                let filter = columns.start + at;
                let to = column * filters + filter;
                // SAFETY: a vector is within a row of a tile, and `count` filters exist. Nothing is written beyond them, since
                // the next pixel may have results already.
                unsafe {
                    let bias = f32::load_at_least(simd, bias.as_ptr().add(filter), count, filters - filter);
                    let output =
                        |pixel: *const f32| simd.add(simd.load(pixel.wrapping_add(index(0, at))), bias);
                    let outputs =
                        [output(pixels[0]), output(pixels[1]), output(pixels[2]), output(pixels[3])];
                    let results = (&mut y[..to + count], &mut chosen[..to + count]);
                    epilogue::pool_window(simd, &epilogue, outputs, results, to, count);
                }
            }
        }
    }
}

/// The sums of a thread's weight gradient: a block for each place in the kernel, each 32 channels and each 32 filters.
#[derive(Debug, Clone, Copy)]
pub(super) struct WeightBlocks {
    shape: ConvShape,
    pub(super) places: usize,
    pub(super) channels: usize,
    pub(super) filters: usize,
}

impl WeightBlocks {
    pub(super) fn new(shape: &ConvShape) -> Self {
        WeightBlocks {
            shape: *shape,
            places: shape.kernel * shape.kernel,
            channels: shape.channels.div_ceil(BLOCK),
            filters: shape.filters.div_ceil(BLOCK),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.places * self.channels * self.filters * SUMS
    }

    /// The first sum of a block.
    pub(super) fn block(&self, place: usize, channel: usize, filter: usize) -> usize {
        ((place * self.channels + channel / BLOCK) * self.filters + filter / BLOCK) * SUMS
    }

    /// Adds up the sums of all threads, in the first one's memory, and writes them to `dw`, \[F, C, K, K\].
    pub(super) fn sum(&self, threads: &Threads, parts: &mut [AlignedVec], dw: &mut [f32]) {
        let Some((total, others)) = parts.split_first_mut() else {
            dw.fill(0.0);
            return;
        };
        let total = &mut total[..self.len()];
        threads.divide(total.len() / SUMS, 16, Rows::new(&mut *total, SUMS), |range, total| {
            let sums = range.start * SUMS..range.end * SUMS;
            for other in &*others {
                total.values.iter_mut().zip(&other[sums.clone()]).for_each(|(total, sum)| *total += sum);
            }
        });
        let ConvShape { channels, filters, .. } = self.shape;
        let filter_len = self.shape.filter_len();
        let grain = (1 << 14) / filter_len + 1;
        threads.divide(filters, grain, Rows::new(dw, filter_len), |range, dw| {
            let mut first = range.start;
            while first < range.end {
                // The filters that are in one tile.
                let end = range.end.min((first / SIDE + 1) * SIDE);
                for channel in 0..channels {
                    let at = self.block(0, channel, first) + index(channel % BLOCK, first % BLOCK);
                    let to = (first - range.start) * filter_len + channel * self.places;
                    let weights = Transpose {
                        from: &total[at..],
                        rows: self.places,
                        columns: end - first,
                        row: self.channels * self.filters * SUMS,
                    };
                    weights.to(&mut dw.values[to..], filter_len);
                }
                first = end;
            }
        });
    }
}
