//! Dense layers on the CPU with products of bf16: the three passes by an engine of [`tile_engine`](crate::tile_engine).
//!
//! Input, weights and gradients are f32 in memory and are rounded to bf16 in the copies that become operands: once a step
//! for each element and pass. Sums, bias and activation are f32.
//!
//! - Forward: threads own outputs, in blocks of 32. `yᵀ = W · xᵀ`: the rows of the weights, which are the larger operand,
//!   only have to be rounded. A block of the depth of all samples stays in the L2 cache meanwhile.
//! - Backward: threads own inputs. For `dx = dz · W` and `dw = dzᵀ · x` both `W` and `x` are the operand whose rows are
//!   the depth; two rows are interleaved.
//!
//! The result does not depend on which thread computes an element: sums run over blocks of the depth in order.

use std::ops::Range;

use half::bf16;

use super::DenseShape;
use crate::gemm::block::{Block, Columns};
use crate::gemm::prefetch::Prefetch;
use crate::gemm::transpose::Transpose;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{PerPart, Rows, Threads};
use crate::tile_engine::pack::{RowPairs, round_row, row_stride, rows_as_panel, steps};
use crate::tile_engine::{
    BLOCK, Begin, DEPTH, Depth, Engine, Left, Right, SIDE, SUMS, Session, TILE, row_of,
};
use crate::{AlignedVec, Scratch};

/// With fewer multiply-adds another thread is not worth it.
const WORTH_ANOTHER_THREAD: usize = 1 << 22;

/// The depth of a block of the forward pass: 64 samples take 128 KiB.
const FORWARD_DEPTH: usize = 1024;

/// The depth of a block of the input's gradient.
const BACKWARD_DEPTH: usize = 256;

/// Columns that the backward pass packs at a time; a multiple of a block's.
const WIDTH: usize = 256;

/// Takes `len` elements from scratch memory; the rest begins at a cache line again.
fn cut<'a>(memory: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (first, rest) = std::mem::take(memory).split_at_mut(len.next_multiple_of(SIDE));
    *memory = rest;
    &mut first[..len]
}

/// As [`cut`], for elements of half the size.
fn cut_bf16<'a>(memory: &mut &'a mut [f32], len: usize) -> &'a mut [bf16] {
    &mut bytemuck::cast_slice_mut(cut(memory, len.div_ceil(2)))[..len]
}

/// The memory that [`cut`] takes for lengths in f32.
fn needed(lens: &[usize]) -> usize {
    lens.iter().map(|len| len.next_multiple_of(SIDE)).sum()
}

/// The forward pass, as that of [`super::cpu::Dense`], whose lengths were checked.
#[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
pub(super) fn forward(
    engine: Engine,
    shape: DenseShape,
    slope: f32,
    threads: &Threads,
    scratch: &mut Scratch,
    x: &[f32],
    weights: &[f32],
    bias: &[f32],
    y: &mut [f32],
) {
    let DenseShape { inputs, outputs } = shape;
    let samples = x.len() / inputs;
    let Scratch { parts, shared } = scratch;
    // The samples as columns: blocks of the depth, each of panels.
    let panels = samples.div_ceil(BLOCK) * 2;
    let blocks = inputs.div_ceil(FORWARD_DEPTH);
    let block_len = panels * SIDE * FORWARD_DEPTH;
    let mut memory = shared.reserve(needed(&[(blocks * block_len).div_ceil(2)]));
    let packed = cut_bf16(&mut memory, blocks * block_len);
    let panel_of = |first: usize| steps(FORWARD_DEPTH.min(inputs - first)) * TILE;
    let grain = (1 << 15) / (samples * FORWARD_DEPTH).max(1) + 1;
    let outputs_of_packing = (Rows::new(packed, block_len), PerPart::new(parts));
    threads.divide(blocks, grain, outputs_of_packing, |range, (packed, part)| {
        let rounded: &mut [bf16] = bytemuck::cast_slice_mut(part.own().reserve(SIDE * FORWARD_DEPTH / 2));
        for (index, packed) in range.zip(packed.values.chunks_exact_mut(block_len.max(1))) {
            let first = index * FORWARD_DEPTH;
            let depth = FORWARD_DEPTH.min(inputs - first);
            for (panel, to) in packed.chunks_exact_mut(panel_of(first)).take(panels).enumerate() {
                let sample = (panel * SIDE).min(samples);
                let rows = SIDE.min(samples - sample);
                let from = x.get(sample * inputs + first..).unwrap_or_default();
                rows_as_panel(from, rows, depth, inputs, rounded, to);
            }
        }
    });

    let packed = &*packed;
    let weight_rows = |block: usize, first: usize| Prefetch {
        start: weights.as_ptr().wrapping_add(block * BLOCK * inputs + first),
        row: inputs,
        rows: BLOCK.min(outputs - block * BLOCK),
        run: inputs.saturating_sub(first).min(FORWARD_DEPTH),
    };
    let grain = WORTH_ANOTHER_THREAD.div_ceil((samples * inputs * BLOCK).max(1));
    let y = Columns::new(Block::new(y, samples, outputs, outputs), BLOCK);
    threads.divide(outputs.div_ceil(BLOCK), grain, (y, PerPart::new(parts)), |range, (mut y, part)| {
        let stride = row_stride(FORWARD_DEPTH.min(inputs));
        let (copy_len, sums_len) = (BLOCK * stride, range.len() * panels / 2 * SUMS);
        let mut memory = part.own().reserve(needed(&[copy_len / 2, sums_len]));
        let (copy, sums) = (cut_bf16(&mut memory, copy_len), cut(&mut memory, sums_len));
        let session = engine.start();
        for (index, first) in (0..inputs).step_by(FORWARD_DEPTH).enumerate() {
            let depth = FORWARD_DEPTH.min(inputs - first);
            let panel = panel_of(first);
            let begin = if first == 0 { Begin::Zero } else { Begin::Sums };
            for (sums, output) in sums.chunks_exact_mut((panels / 2 * SUMS).max(1)).zip(range.clone()) {
                for (row, to) in copy.chunks_exact_mut(stride).enumerate() {
                    let to = &mut to[..steps(depth) * DEPTH];
                    match output * BLOCK + row {
                        row if row < outputs => round_row(&weights[row * inputs + first..][..depth], to),
                        _ => to.fill(bf16::ZERO),
                    }
                }
                // What is rounded next: the same part of the next outputs, or the next part of the first ones.
                let next = match output + 1 {
                    next if next < range.end => weight_rows(next, first),
                    _ => weight_rows(range.start, first + FORWARD_DEPTH),
                };
                for (pair, sums) in sums.chunks_exact_mut(SUMS).enumerate() {
                    let left = Left { values: copy, groups: [0, SIDE * stride], row: stride, segment: 0 };
                    let at = index * block_len + 2 * pair * panel;
                    let right = Right { values: packed, panels: [at, at + panel], segment: 0 };
                    let depth = Depth { segments: 1, steps: steps(depth) };
                    session.multiply_prefetching(
                        left,
                        right,
                        depth,
                        begin,
                        sums,
                        next.share(pair, panels / 2),
                    );
                }
            }
        }
        drop(session);
        for (index, sums) in sums.chunks_exact((panels / 2 * SUMS).max(1)).enumerate() {
            let columns = index * BLOCK..(index * BLOCK + BLOCK).min(y.block.columns());
            let bias = &bias[range.start * BLOCK..][columns.clone()];
            for (pair, sums) in sums.chunks_exact(SUMS).enumerate() {
                let mut rows = [0.0; SUMS];
                for (tile, sums) in sums.chunks_exact(SIDE * SIDE).enumerate() {
                    let to = &mut rows[tile % 2 * SIDE * BLOCK + tile / 2 * SIDE..];
                    Transpose { from: sums, rows: SIDE, columns: SIDE, row: SIDE }.to(to, BLOCK);
                }
                let first = pair * BLOCK;
                for (sample, row) in (first..samples).zip(rows.chunks_exact(BLOCK)) {
                    let y = &mut y.block.row(sample)[columns.clone()];
                    for ((y, &sum), &bias) in y.iter_mut().zip(row).zip(bias) {
                        let sum = sum + bias;
                        *y = if sum > 0.0 { sum } else { sum * slope };
                    }
                }
            }
        }
    });
}

/// Memory for the operands of the backward pass that are made of the gradient before the activation, in f32.
pub(super) fn gradient_len(outputs: usize, samples: usize) -> usize {
    let rows = samples.next_multiple_of(BLOCK) * row_stride(outputs);
    let columns = outputs.next_multiple_of(BLOCK) * row_stride(samples);
    needed(&[rows.div_ceil(2), columns.div_ceil(2), outputs * samples])
}

/// The gradient before the activation, dz: rounded, as the left operand of both gradients.
struct Gradient<'a> {
    outputs: usize,
    samples: usize,
    /// Sample by sample.
    rows: &'a [bf16],
    /// Output by output.
    columns: &'a [bf16],
}

impl<'a> Gradient<'a> {
    /// `dz` has rows `row` elements apart.
    fn new(
        dz: &[f32],
        row: usize,
        (outputs, samples): (usize, usize),
        threads: &Threads,
        mut memory: &'a mut [f32],
    ) -> Self {
        let (across, along) = (row_stride(outputs), row_stride(samples));
        let rows = cut_bf16(&mut memory, samples.next_multiple_of(BLOCK) * across);
        let columns = cut_bf16(&mut memory, outputs.next_multiple_of(BLOCK) * along);
        let transposed = cut(&mut memory, outputs * samples);
        let grain = (1 << 15) / outputs + 1;
        threads.divide(rows.len() / across, grain, Rows::new(&mut *rows, across), |range, rows| {
            for (sample, to) in range.zip(rows.values.chunks_exact_mut(across)) {
                if sample < samples {
                    round_row(&dz[sample * row..][..outputs], to);
                } else {
                    to.fill(bf16::ZERO);
                }
            }
        });
        Transpose { from: dz, rows: samples, columns: outputs, row }.to(transposed, samples.max(1));
        for (output, to) in columns.chunks_exact_mut(along).enumerate() {
            if output < outputs {
                round_row(&transposed[output * samples..][..samples], to);
            } else {
                to.fill(bf16::ZERO);
            }
        }
        Gradient { outputs, samples, rows, columns }
    }
}

/// The gradients of weights and input, as those of [`super::cpu::Dense`], from the gradient before the activation: `dz`,
/// whose rows are `row` elements apart. `memory` has [`gradient_len`] elements.
#[expect(clippy::too_many_arguments, reason = "two operands and two results")]
pub(super) fn backward(
    engine: Engine,
    shape: DenseShape,
    threads: &Threads,
    parts: &mut [AlignedVec],
    (dz, row): (&[f32], usize),
    memory: &mut [f32],
    (x, weights): (&[f32], &[f32]),
    dw: &mut [f32],
    dx: Option<&mut [f32]>,
) {
    let DenseShape { inputs, outputs } = shape;
    let samples = x.len() / inputs;
    let gradient = Gradient::new(dz, row, (outputs, samples), threads, memory);
    let passes = if dx.is_some() { 2 } else { 1 };
    let rows = if dx.is_some() { samples } else { 0 };
    let dx = Columns::new(Block::new(dx.unwrap_or_default(), rows, inputs, inputs), BLOCK);
    let dw = Columns::new(Block::new(dw, outputs, inputs, inputs), BLOCK);
    let grain = WORTH_ANOTHER_THREAD.div_ceil((samples * outputs * BLOCK * passes).max(1));
    let results = (dw, dx, PerPart::new(parts));
    threads.divide(inputs.div_ceil(BLOCK), grain, results, |range, (mut dw, mut dx, part)| {
        let session = engine.start();
        let scratch = part.own();
        let (first, end) = (range.start * BLOCK, inputs.min(range.end * BLOCK));
        for at in (first..end).step_by(WIDTH) {
            let columns = at..end.min(at + WIDTH);
            weight_gradient(&session, scratch, &gradient, x, columns.clone(), first, &mut dw.block);
            if passes == 2 {
                input_gradient(&session, scratch, &gradient, weights, columns, first, &mut dx.block);
            }
        }
    });
}

/// `dw = dzᵀ · x` for some columns; `dw` begins at column `origin`.
fn weight_gradient(
    session: &Session,
    scratch: &mut AlignedVec,
    gradient: &Gradient<'_>,
    x: &[f32],
    columns: Range<usize>,
    origin: usize,
    dw: &mut Block<'_>,
) {
    let Gradient { outputs, samples, .. } = *gradient;
    let (inputs, steps, stride) = (dw.row_stride(), steps(samples), row_stride(samples));
    let panel = panel_stride(steps);
    let blocks = columns.len().div_ceil(BLOCK);
    let packed_len = blocks * 2 * panel;
    let mut memory = scratch.reserve(needed(&[packed_len.div_ceil(2), SUMS]));
    let (packed, sums) = (cut_bf16(&mut memory, packed_len), cut(&mut memory, SUMS));
    let from = x.get(columns.start..).unwrap_or_default();
    RowPairs { from, row: inputs, rows: samples, columns: columns.len(), panel }.pack(packed);
    clear_odd_panel(columns.len(), panel, packed);
    for output in (0..outputs).step_by(BLOCK) {
        let at = output * stride;
        let left =
            Left { values: gradient.columns, groups: [at, at + SIDE * stride], row: stride, segment: 0 };
        for block in 0..blocks {
            let panels = [2 * block * panel, (2 * block + 1) * panel];
            let first = columns.start - origin + block * BLOCK;
            let width = BLOCK.min(columns.end - origin - first);
            let rows = output..outputs.min(output + BLOCK);
            session.multiply_prefetching(
                left,
                Right { values: packed, panels, segment: 0 },
                Depth { segments: 1, steps },
                Begin::Zero,
                sums,
                dw.prefetch(rows.clone(), first..first + width),
            );
            dispatch(CopySums { sums, rows, columns: first..first + width, to: dw });
        }
    }
}

/// `dx = dz · W` for some columns; `dx` begins at column `origin`.
///
/// While one block of the depth is multiplied, the next one is packed: some rows of it after each product, which were
/// prefetched meanwhile. Prefetching much earlier would be too early, since the rows of a block map to few cache sets.
fn input_gradient(
    session: &Session,
    scratch: &mut AlignedVec,
    gradient: &Gradient<'_>,
    weights: &[f32],
    columns: Range<usize>,
    origin: usize,
    dx: &mut Block<'_>,
) {
    let Gradient { outputs, samples, .. } = *gradient;
    let (inputs, stride) = (dx.row_stride(), row_stride(outputs));
    let blocks = columns.len().div_ceil(BLOCK);
    let (panel, lines) = (panel_stride(steps(BACKWARD_DEPTH.min(outputs))), samples.div_ceil(BLOCK));
    let (packed_len, sums_len) = (blocks * 2 * panel, blocks * lines * SUMS);
    let mut memory = scratch.reserve(needed(&[packed_len.div_ceil(2), packed_len.div_ceil(2), sums_len]));
    let (mut packed, mut other) = (cut_bf16(&mut memory, packed_len), cut_bf16(&mut memory, packed_len));
    let sums = cut(&mut memory, sums_len);
    for memory in [&mut *packed, &mut *other] {
        clear_odd_panel(columns.len(), panel, memory);
    }
    let block_at = |first: usize| RowPairs {
        from: &weights[first * inputs + columns.start..],
        row: inputs,
        rows: BACKWARD_DEPTH.min(outputs - first),
        columns: columns.len(),
        panel,
    };
    block_at(0).pack(packed);
    for first in (0..outputs).step_by(BACKWARD_DEPTH) {
        let steps = steps(BACKWARD_DEPTH.min(outputs - first));
        let next = (first + BACKWARD_DEPTH < outputs).then(|| block_at(first + BACKWARD_DEPTH));
        // The pairs of rows that are packed after a product.
        let share = |next: &RowPairs<'_>, product: usize| {
            let end = |products: usize| next.pairs() * products.min(blocks * lines) / (blocks * lines);
            end(product)..end(product + 1)
        };
        for (at, sums) in sums.chunks_exact_mut(SUMS).enumerate() {
            let (block, line) = (at / lines, at % lines);
            let place = line * BLOCK * stride + first;
            let groups = [place, place + SIDE * stride];
            let left = Left { values: gradient.rows, groups, row: stride, segment: 0 };
            let panels = [2 * block * panel, (2 * block + 1) * panel];
            let right = Right { values: packed, panels, segment: 0 };
            let ahead = next.map_or(Prefetch::NONE, |next| next.prefetch(share(&next, at + 1)));
            let begin = if first == 0 { Begin::Zero } else { Begin::Sums };
            session.multiply_prefetching(left, right, Depth { segments: 1, steps }, begin, sums, ahead);
            if let Some(next) = next {
                next.pack_part(share(&next, at), other);
            }
        }
        std::mem::swap(&mut packed, &mut other);
    }
    for (at, sums) in sums.chunks_exact(SUMS).enumerate() {
        let (block, line) = (at / lines, at % lines);
        let first = columns.start - origin + block * BLOCK;
        let width = BLOCK.min(columns.end - origin - first);
        let rows = line * BLOCK..samples.min(line * BLOCK + BLOCK);
        dispatch(CopySums { sums, rows, columns: first..first + width, to: dx });
    }
}

/// Elements from one panel of `steps` tiles to the next: a cache line more than they have, so that the same row of all panels
/// maps to different cache sets.
fn panel_stride(steps: usize) -> usize {
    steps * TILE + DEPTH
}

/// Panels are multiplied two at a time: if their number is odd, fills one more with zeros.
fn clear_odd_panel(columns: usize, panel: usize, packed: &mut [bf16]) {
    let panels = columns.div_ceil(SIDE);
    if panels % 2 == 1 {
        packed[panels * panel..(panels + 1) * panel].fill(bf16::ZERO);
    }
}

/// Copies the sums of a block to some rows and columns, at most as many as it has.
struct CopySums<'a, 'b> {
    sums: &'a [f32],
    rows: Range<usize>,
    columns: Range<usize>,
    to: &'a mut Block<'b>,
}

impl Task for CopySums<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let CopySums { sums, rows, columns, to } = self;
        for (index, row) in rows.enumerate() {
            for (to, from) in to.row(row)[columns.clone()].chunks_mut(SIDE).zip(row_of(sums, index)) {
                match to.first_chunk_mut() {
                    Some(whole) => *whole = *from,
                    None => to.copy_from_slice(&from[..to.len()]),
                }
            }
        }
    }
}
