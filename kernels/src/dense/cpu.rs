//! Dense layers on the CPU, fused with the activation that follows them.
//!
//! All three passes are products of the register tile of `gemm`. It needs one operand with contiguous columns in
//! panels, and the other with rows that do not map to the same few cache sets, as rows with a power of two of
//! elements do. So each operand is copied in blocks, which are then used from the L1 and L2 caches; each element of
//! the weights, by far the largest operand, is read from memory once per pass.
//!
//! - In the forward pass both operands are contiguous along the sum. The smaller one is transposed to panels: usually
//!   the samples, which gives yᵀ, transposed back at the end; the weights, if there are fewer outputs than samples.
//!   Threads own rows of the other operand.
//! - In the backward pass the inputs are the columns of both products, dw = dyᵀ·x and dx = dy·W, and threads own
//!   inputs.
//!
//! The result does not depend on which thread computes an element: sums run over blocks of the depth in order.

use std::ops::Range;

use super::{DenseShape, tiles as bf16_tiles};
use crate::AlignedVec;
use crate::gemm::block::{Block, Columns};
use crate::gemm::panels::{Panels, copy_rows};
use crate::gemm::prefetch::Prefetch;
use crate::gemm::tile::{Left, PANEL, Product, Right, Start, tiles};
use crate::gemm::transpose::Transpose;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{PerPart, Rows, Threads};
use crate::tile_engine::Engine;

use crate::Scratch;

/// With fewer multiply-adds another thread is not worth it: about 10 microseconds.
const WORTH_ANOTHER_THREAD: usize = 1 << 20;

/// The depth of a block of the forward pass: a tile's rows take 14 KiB, less than half of the smallest L1 cache.
const FORWARD_DEPTH: usize = 256;

/// The depth of a block of the weights' gradient. Few batches are larger, so results are written once.
const SAMPLES: usize = 512;

/// The depth of a block of the input's gradient: a panel takes 24 KiB, and 64 samples take 48 KiB.
const BACKWARD_DEPTH: usize = 192;

/// Columns of the inputs or weights that the backward pass packs at a time.
const WIDTH: usize = 512;

/// A dense layer and the activation that follows it.
#[derive(Debug)]
pub struct Dense {
    shape: DenseShape,
    slope: Option<f32>,
    engine: Option<Engine>,
}

/// Inputs of the backward pass: operands and result of the last forward pass, and the gradient of the result.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a> {
    /// Input, \[N, I\].
    pub x: &'a [f32],
    /// Weights, \[O, I\]: those of the forward pass.
    pub weights: &'a [f32],
    /// Result \[N, O\], after the activation; only the signs of its elements are used. Not read without an
    /// activation.
    pub y: &'a [f32],
    /// Gradient of `y`.
    pub dy: &'a [f32],
}

/// Elements from one row of a copy to the next: an odd number of whole cache lines, so that rows map to all cache sets.
fn padded_stride(columns: usize) -> usize {
    columns.next_multiple_of(16) | 16
}

/// The length of a block when `depth` is divided into equal blocks of at most `most`, of whole cache lines each
/// (except for the last).
fn block_of(depth: usize, most: usize) -> usize {
    depth.div_ceil(depth.div_ceil(most).max(1)).next_multiple_of(16).max(16)
}

impl Dense {
    /// Sets up a layer of `shape`, activated with `slope` for negative values (see [`crate::activation`]); `None` for
    /// no activation.
    pub fn new(shape: DenseShape, slope: Option<f32>) -> Dense {
        assert!(shape.inputs > 0 && shape.outputs > 0, "a dense layer has inputs and outputs");
        Dense { shape, slope, engine: None }
    }

    /// The same layer with operands rounded to bf16, and products by `engine`; in f32 if there is none. See
    /// [`crate::tile_engine`].
    pub fn with_engine(self, engine: Option<Engine>) -> Dense {
        Dense { engine, ..self }
    }

    /// What computes products of bf16; `None` if products are computed in f32.
    pub fn engine(&self) -> Option<Engine> {
        self.engine
    }

    /// Overwrites `y` \[N, O\] with `activation(x · Wᵀ + b)`.
    ///
    /// # Panics
    /// If lengths do not fit the shape.
    pub fn forward(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        x: &[f32],
        weights: &[f32],
        bias: &[f32],
        y: &mut [f32],
    ) {
        let DenseShape { inputs, outputs } = self.shape;
        let samples = self.samples(x.len(), y.len());
        assert_eq!(weights.len(), outputs * inputs, "weights of a dense layer");
        assert_eq!(bias.len(), outputs, "bias of a dense layer");
        let slope = self.slope.unwrap_or(1.0);
        if let Some(engine) = self.engine {
            bf16_tiles::forward(engine, self.shape, slope, threads, scratch, x, weights, bias, y);
            return;
        }
        let Scratch { parts, shared } = scratch;
        if outputs < samples {
            let columns = RowsAsColumns { count: outputs, depth: inputs };
            let packed = shared.reserve(columns.packed_len());
            columns.pack(threads, weights, packed);
            columns.multiply(threads, parts, samples, x, packed, Start::Bias(bias), slope, y, outputs);
            return;
        }
        let columns = RowsAsColumns { count: samples, depth: inputs };
        let row = padded_stride(samples);
        let (packed, transposed) =
            shared.reserve(columns.packed_len() + outputs * row).split_at_mut(columns.packed_len());
        columns.pack(threads, x, packed);
        columns.multiply(threads, parts, outputs, weights, packed, Start::Zero, 1.0, transposed, row);
        let grain = (1 << 15) / outputs + 1;
        threads.divide(samples, grain, Rows::new(y, outputs), |range, y| {
            let from = &transposed[range.start..];
            Transpose { from, rows: outputs, columns: range.len(), row }.to(y.values, outputs);
            dispatch(Finish { y: y.values, bias, slope });
        });
    }

    /// Overwrites `dw` and `db` with the gradients of weights and bias, summed over all samples, and `dx`, if given,
    /// with the gradient of the input.
    ///
    /// # Panics
    /// If lengths do not fit the shape.
    pub fn backward(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        from: Backward<'_>,
        dw: &mut [f32],
        db: &mut [f32],
        dx: Option<&mut [f32]>,
    ) {
        let DenseShape { inputs, outputs } = self.shape;
        let Backward { x, weights, y, dy } = from;
        let samples = self.samples(x.len(), dy.len());
        assert!(self.slope.is_none() || y.len() == dy.len(), "result of a dense layer");
        assert_eq!(weights.len(), outputs * inputs, "weights of a dense layer");
        assert_eq!(dw.len(), outputs * inputs, "gradient of a dense layer's weights");
        assert_eq!(db.len(), outputs, "gradient of a dense layer's bias");
        assert!(dx.as_ref().is_none_or(|dx| dx.len() == x.len()), "gradient of a dense layer's input");
        let Scratch { parts, shared } = scratch;

        // The gradient before the activation, with a row stride that suits both products.
        let row = padded_stride(outputs);
        let rounded_len = self.engine.map_or(0, |_| bf16_tiles::gradient_len(outputs, samples));
        let (dz, rounded) = shared.reserve(samples * row + rounded_len).split_at_mut(samples * row);
        let grain = (1 << 15) / (samples * PANEL).max(1) + 1;
        let columns = Columns::new(Block::new(dz, samples, outputs, row), PANEL);
        threads.divide(
            outputs.div_ceil(PANEL),
            grain,
            (columns, Rows::new(db, PANEL)),
            |range, (mut dz, db)| {
                let first = range.start * PANEL;
                dispatch(Activation {
                    slope: self.slope,
                    y,
                    dy,
                    outputs,
                    first,
                    dz: &mut dz.block,
                    db: db.values,
                });
            },
        );

        let dz = &*dz;
        if let Some(engine) = self.engine {
            let operands = (x, weights);
            bf16_tiles::backward(engine, self.shape, threads, parts, (dz, row), rounded, operands, dw, dx);
            return;
        }
        let passes = if dx.is_some() { 2 } else { 1 };
        let rows = if dx.is_some() { samples } else { 0 };
        let dx = Columns::new(Block::new(dx.unwrap_or_default(), rows, inputs, inputs), PANEL);
        let dw = Columns::new(Block::new(dw, outputs, inputs, inputs), PANEL);
        let work = samples * outputs * PANEL * passes;
        let grain = WORTH_ANOTHER_THREAD.div_ceil(work.max(1));
        let results = (dw, dx, PerPart::new(parts));
        threads.divide(inputs.div_ceil(PANEL), grain, results, |range, (mut dw, mut dx, part)| {
            let scratch = part.own();
            let end = inputs.min(range.end * PANEL);
            let columns = range.start * PANEL..end;
            weight_gradient(scratch, x, columns.clone(), dz, row, &mut dw.block, samples);
            if passes == 2 && samples > 0 {
                input_gradient(scratch, weights, columns, dz, row, &mut dx.block, outputs);
            }
        });
    }

    /// Number of samples in a batch.
    fn samples(&self, x: usize, y: usize) -> usize {
        let samples = x / self.shape.inputs;
        assert_eq!(x, samples * self.shape.inputs, "input of a dense layer");
        assert_eq!(y, samples * self.shape.outputs, "result of a dense layer");
        samples
    }
}

/// A matrix \[count, depth\] whose rows become the columns of a product.
///
/// Packed, it consists of blocks of the depth, each of panels of [`PANEL`] columns.
struct RowsAsColumns {
    count: usize,
    depth: usize,
}

impl RowsAsColumns {
    fn padded(&self) -> usize {
        self.count.next_multiple_of(PANEL)
    }

    /// The depth of a block.
    fn block(&self) -> usize {
        block_of(self.depth, FORWARD_DEPTH)
    }

    fn packed_len(&self) -> usize {
        self.padded() * self.depth
    }

    /// Transposes `values` to panels.
    fn pack(&self, threads: &Threads, values: &[f32], packed: &mut [f32]) {
        let (padded, block) = (self.padded(), self.block());
        let grain = (1 << 15) / (padded * block).max(1) + 1;
        threads.divide(
            self.depth.div_ceil(block),
            grain,
            Rows::new(packed, padded * block),
            |range, part| {
                for (index, packed) in range.zip(part.values.chunks_mut((padded * block).max(1))) {
                    let start = index * block;
                    let depth = block.min(self.depth - start);
                    for (first, panel) in
                        (0..self.count).step_by(PANEL).zip(packed.chunks_exact_mut(PANEL * depth))
                    {
                        let rows = PANEL.min(self.count - first);
                        let from = &values[first * self.depth + start..];
                        Transpose { from, rows, columns: depth, row: self.depth }.to(panel, PANEL);
                    }
                }
            },
        );
    }

    /// Multiplies `rows` rows of the same depth by the packed columns.
    #[expect(clippy::too_many_arguments, reason = "two operands and a result")]
    fn multiply(
        &self,
        threads: &Threads,
        parts: &mut [AlignedVec],
        rows: usize,
        values: &[f32],
        packed: &[f32],
        start: Start<'_>,
        slope: f32,
        c: &mut [f32],
        c_row: usize,
    ) {
        let (padded, block) = (self.padded(), self.block());
        let grain = WORTH_ANOTHER_THREAD.div_ceil((self.count * self.depth).max(1));
        let results = (Rows::new(c, c_row), PerPart::new(parts));
        threads.divide(rows, grain, results, |range, (c, part)| {
            let tiles = tiles(range.len());
            let row = padded_stride(block);
            let copy = part.own().reserve(range.len().div_ceil(tiles.max(1)) * row);
            for first in (0..self.depth).step_by(block) {
                let depth = block.min(self.depth - first);
                let columns = &packed[first * padded..];
                let last = first + depth == self.depth;
                for tile in 0..tiles {
                    let (from, to) = (range.len() * tile / tiles, range.len() * (tile + 1) / tiles);
                    // Prefetches what the next tile will copy.
                    let next = if tile + 1 < tiles {
                        (first, range.start + to)
                    } else {
                        (first + depth, range.start)
                    };
                    let prefetch = Prefetch {
                        start: values.as_ptr().wrapping_add(next.1 * self.depth + next.0),
                        row: self.depth,
                        rows: if next.0 < self.depth { to - from } else { 0 },
                        run: depth,
                    };
                    copy_rows(
                        &values[(range.start + from) * self.depth + first..],
                        self.depth,
                        to - from,
                        depth,
                        copy,
                        row,
                    );
                    Product {
                        rows: to - from,
                        columns: self.count,
                        depth,
                        segments: 1,
                        left: Left { values: copy, row, depth: 1, segment: 0 },
                        right: Right { values: columns, depth: PANEL, segment: 0, panel: PANEL * depth },
                        start: if first == 0 { start } else { Start::Existing },
                        slope: if last { slope } else { 1.0 },
                    }
                    .compute(
                        &mut c.values[from * c_row..],
                        c_row,
                        [prefetch, Prefetch::NONE],
                    );
                }
            }
        });
    }
}

/// `dw = dzᵀ · x` for some columns: those inputs of `x` that `dw` has.
fn weight_gradient(
    scratch: &mut AlignedVec,
    x: &[f32],
    columns: Range<usize>,
    dz: &[f32],
    row: usize,
    dw: &mut Block<'_>,
    samples: usize,
) {
    let (inputs, rows) = (dw.row_stride(), dw.rows());
    let tiles = tiles(rows);
    let product = Product {
        rows,
        columns: columns.len(),
        depth: samples,
        segments: 1,
        left: Left { values: dz, row: 1, depth: row, segment: 0 },
        right: Right { values: &x[columns.start.min(x.len())..], depth: inputs, segment: 0, panel: PANEL },
        start: Start::Zero,
        slope: 1.0,
    };
    if tiles == 1 || samples == 0 {
        // Each element is read once, so a copy is not worth it.
        product.compute_block(dw, Prefetch::NONE);
        return;
    }
    let block = block_of(samples, SAMPLES);
    let packed = scratch.reserve(WIDTH * block);
    for at in columns.clone().step_by(WIDTH) {
        let panels = Panels { from: x, row: inputs, columns: at..columns.end.min(at + WIDTH) };
        let part = at - columns.start..at - columns.start + panels.columns.len();
        for first in (0..samples).step_by(block) {
            let depth = block.min(samples - first);
            panels.pack(first..first + depth, packed);
            for tile in 0..tiles {
                let (from, to) = (rows * tile / tiles, rows * (tile + 1) / tiles);
                let next = to..rows * (tile + 2).min(tiles) / tiles;
                let prefetch = dw.prefetch(next, part.clone());
                Product {
                    rows: to - from,
                    columns: part.len(),
                    depth,
                    left: Left { values: &dz[first * row + from..], ..product.left },
                    right: Right { values: packed, depth: PANEL, segment: 0, panel: PANEL * depth },
                    start: if first == 0 { Start::Zero } else { Start::Existing },
                    ..product
                }
                .compute_block(&mut dw.from(from, part.start), prefetch);
            }
        }
    }
}

/// `dx = dz · W` for some columns.
///
/// While one block of the weights is used, the next one is copied: its memory is prefetched during the product of
/// each panel, and copied after it. Prefetching much earlier would be too early, since the rows of a block map to few
/// cache sets.
fn input_gradient(
    scratch: &mut AlignedVec,
    weights: &[f32],
    columns: Range<usize>,
    dz: &[f32],
    row: usize,
    dx: &mut Block<'_>,
    outputs: usize,
) {
    let (inputs, samples) = (dx.row_stride(), dx.rows());
    let product = Product {
        rows: samples,
        columns: columns.len(),
        depth: outputs,
        segments: 1,
        left: Left { values: dz, row, depth: 1, segment: 0 },
        right: Right { values: &weights[columns.start..], depth: inputs, segment: 0, panel: PANEL },
        start: Start::Zero,
        slope: 1.0,
    };
    if outputs <= 12 || tiles(samples) == 1 {
        // The rows of a panel fit the cache anyway, or are used once, so a copy is not worth it.
        product.compute_block(dx, Prefetch::NONE);
        return;
    }
    let block = block_of(outputs, BACKWARD_DEPTH);
    let depths = outputs.div_ceil(block);
    // Consecutive blocks follow the depth first.
    let blocks = columns.len().div_ceil(WIDTH) * depths;
    let block_at = |index: usize| {
        let at = columns.start + index / depths * WIDTH;
        let first = index % depths * block;
        let panels = Panels { from: weights, row: inputs, columns: at..columns.end.min(at + WIDTH) };
        (panels, first..outputs.min(first + block))
    };
    let (mut packed, mut other) = scratch.reserve(2 * WIDTH * block).split_at_mut(WIDTH * block);
    let (panels, rows) = block_at(0);
    panels.pack(rows, packed);
    for index in 0..blocks {
        let (panels, rows) = block_at(index);
        let next = (index + 1 < blocks).then(|| block_at(index + 1));
        let depth = rows.len();
        let count = panels.columns.len().div_ceil(PANEL);
        for (panel, values) in packed.chunks_exact(PANEL * depth).take(count).enumerate() {
            // The rows of the next block to prefetch during this panel and the next.
            let share = |panel: usize| {
                next.as_ref().map(|(_, rows)| {
                    let at = |panel: usize| rows.start + rows.len() * panel.min(count) / count;
                    at(panel)..at(panel + 1)
                })
            };
            let prefetch = match (&next, share(panel + 1)) {
                (Some((panels, _)), Some(rows)) => panels.prefetch(rows),
                _ => Prefetch::NONE,
            };
            let at = panels.columns.start - columns.start + panel * PANEL;
            Product {
                columns: PANEL.min(panels.columns.len() - panel * PANEL),
                depth,
                left: Left { values: &dz[rows.start..], ..product.left },
                right: Right { values, depth: PANEL, segment: 0, panel: 0 },
                start: if rows.start == 0 { Start::Zero } else { Start::Existing },
                ..product
            }
            .compute_block(&mut dx.from(0, at), prefetch);
            if let (Some((panels, rows)), Some(part)) = (&next, share(panel)) {
                panels.pack_part(rows.clone(), part, other);
            }
        }
        std::mem::swap(&mut packed, &mut other);
    }
}

/// Adds the bias to all rows and applies the activation.
struct Finish<'a> {
    y: &'a mut [f32],
    bias: &'a [f32],
    slope: f32,
}

impl Task for Finish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in self.y.chunks_exact_mut(self.bias.len()) {
            for (y, &bias) in row.iter_mut().zip(self.bias) {
                let sum = *y + bias;
                let scaled = sum * self.slope;
                *y = if sum > 0.0 { sum } else { scaled };
            }
        }
    }
}

/// Copies some columns of `dy` to `dz`, applies the activation's gradient, and sums them.
struct Activation<'a, 'b> {
    slope: Option<f32>,
    y: &'a [f32],
    dy: &'a [f32],
    outputs: usize,
    /// The first column.
    first: usize,
    dz: &'a mut Block<'b>,
    db: &'a mut [f32],
}

impl Task for Activation<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (rows, columns) = (self.dz.rows(), self.dz.columns());
        for start in (0..columns).step_by(PANEL) {
            let end = columns.min(start + PANEL);
            let mut sums = [0.0f64; PANEL];
            for n in 0..rows {
                let at = n * self.outputs + self.first + start;
                let dy = &self.dy[at..at + end - start];
                let dz = &mut self.dz.row(n)[start..end];
                match self.slope {
                    None => dz.copy_from_slice(dy),
                    Some(slope) => {
                        for ((dz, &dy), &y) in dz.iter_mut().zip(dy).zip(&self.y[at..at + end - start]) {
                            let scaled = dy * slope;
                            *dz = if y > 0.0 { dy } else { scaled };
                        }
                    }
                }
                for (sum, &dz) in sums.iter_mut().zip(&*dz) {
                    *sum += f64::from(dz);
                }
            }
            for (db, sum) in self.db[start..end].iter_mut().zip(sums) {
                *db = sum as f32;
            }
        }
    }
}
