//! What becomes of sums: the results of a convolution, and the gradient of its weights.

use std::ops::Range;

use super::super::epilogue::Outputs;
use super::super::{Epilogue, epilogue};
use super::operands::Runs;
use crate::AlignedVec;
use crate::conv::ConvShape;
use crate::gemm::transpose::Transpose;
use crate::simd::{Simd, Task};
use crate::storage::Storage;
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
        let Store { runs, first, columns, finish: Finish { bias, slope }, sums, outputs } = self;
        let ((height, width), filters) = (runs.result(), columns.end);
        assert!(sums.len() == SUMS && outputs.len() == height * width * filters, "outputs of a convolution");
        assert!(first < runs.pixels() && columns.start < filters, "a block of a convolution");
        assert!(bias.is_none_or(|bias| bias.len() == filters), "bias of a convolution");
        let (zero, slope) = (simd.splat(0.0), simd.splat(slope));
        let (mut row, mut column) = (first / runs.image.width, first % runs.image.width);
        for pixel in 0..BLOCK.min(runs.pixels() - first) {
            if column < width {
                let to = (row * width + column) * filters + columns.start;
                for at in (0..BLOCK.min(columns.len())).step_by(S::LANES) {
                    let count = S::LANES.min(columns.len() - at);
                    // SAFETY: a vector is within a row of a tile; `row` and `column` are those of an output, whose filters
                    // and their bias exist by the assertions.
                    unsafe {
                        let mut value = simd.load(sums.as_ptr().add(index(pixel, at)));
                        if let Some(bias) = bias {
                            let from = bias.as_ptr().add(columns.start + at);
                            value = simd.add(value, simd.load_first(from, count));
                        }
                        let value = simd.select(simd.greater(value, zero), value, simd.mul(value, slope));
                        O::store_first(simd, value, outputs.as_mut_ptr().add(to + at), count);
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

/// Pools the outputs of an image.
pub(super) struct Pool<'a, E> {
    pub(super) shape: ConvShape,
    pub(super) epilogue: Epilogue,
    pub(super) outputs: &'a [f32],
    pub(super) y: &'a mut [E],
    /// That of this image and of those after it.
    pub(super) chosen: &'a mut [u8],
}

impl<E: Storage> Task for Pool<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Pool { shape, epilogue, outputs, y, chosen } = self;
        let (width, filters) = (shape.out_width(), shape.filters);
        let (rows, columns) = epilogue.result(&shape);
        let result = columns * filters;
        for row in 0..rows {
            let line = width * filters;
            let outputs = Outputs {
                values: &outputs[2 * row * line..],
                rows: (shape.out_height() - 2 * row).min(2),
                width,
                channels: filters,
                pixel: filters,
                line,
            };
            let y = &mut y[row * result..(row + 1) * result];
            epilogue::pool(simd, &epilogue, outputs, y, &mut chosen[row * result..]);
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
