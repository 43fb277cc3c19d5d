//! Direct convolution with products of bf16, by an engine of [`tile_engine`](crate::tile_engine).
//!
//! As for f32, every pass is a product without gathered columns (`operands`):
//!
//! - The forward pass multiplies the runs of inputs under each kernel row by the filters.
//! - The input gradient is the same convolution of the gradient before activation and pooling, with the filters rotated
//!   by 180°.
//! - The weight gradient multiplies channels of the input by those of the gradient, summed over pixels: one product for each
//!   place in the kernel. A few images are summed in one product, because small images have few pixels.
//!
//! Images, filters and the gradient are rounded to bf16, the filters once a step. Sums, bias, activation and pooling are
//! f32. Every thread sums the weight gradients of its images; the threads' sums are added in the order of threads.

mod operands;
mod results;

use std::ops::Range;

use half::bf16;

use super::border::{GradientBlock, PaddedImage};
use super::{Backward, Epilogue, epilogue};
use crate::conv::ConvShape;
use crate::simd::{Simd, Task, dispatch};
use crate::storage::{Storage, convert};
use crate::threads::{PerPart, Rows, Threads};
use crate::tile_engine::pack::RowPairs;
use crate::tile_engine::{BLOCK, Begin, DEPTH, Depth, Engine, Left, Right, SIDE, SUMS, Session};
use crate::{AlignedVec, Scratch};

use operands::{Filters, Planes, Runs, Weights};
use results::{Finish, Pool, Store, WeightBlocks};

/// The depth of a weight gradient's product that is worth more images.
const ENOUGH_PIXELS: usize = 768;

/// A convolution computed directly, with products of bf16.
#[derive(Debug)]
pub(in crate::conv::cpu) struct TiledDirect {
    shape: ConvShape,
    epilogue: Epilogue,
    engine: Engine,
    /// The filters of the forward pass or of the input gradient.
    packed: AlignedVec<bf16>,
    /// The gradients of the bias, one for each thread.
    bias: Vec<Vec<f64>>,
}

/// Whether most of a tile would be used.
pub(in crate::conv::cpu) fn suits(shape: &ConvShape) -> bool {
    shape.channels >= SIDE && shape.filters >= SIDE
}

/// Takes `len` elements from scratch memory; the rest begins at a cache line again.
fn cut_bf16<'a>(memory: &mut &'a mut [f32], len: usize) -> &'a mut [bf16] {
    &mut bytemuck::cast_slice_mut(super::cut(memory, len.div_ceil(2)))[..len]
}

impl TiledDirect {
    pub(in crate::conv::cpu) fn new(shape: ConvShape, epilogue: Epilogue, engine: Engine) -> Self {
        TiledDirect { shape, epilogue, engine, packed: AlignedVec::default(), bias: Vec::new() }
    }

    pub(in crate::conv::cpu) fn engine(&self) -> Engine {
        self.engine
    }

    fn result_len(&self) -> usize {
        let (height, width) = self.epilogue.result(&self.shape);
        height * width * self.shape.filters
    }

    #[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
    pub(in crate::conv::cpu) fn forward<E: Storage>(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        images: usize,
        x: &[E],
        weights: &[f32],
        bias: &[f32],
        y: &mut [E],
        chosen: &mut [u8],
    ) {
        let (shape, epilogue, engine, result_len) =
            (self.shape, self.epilogue, self.engine, self.result_len());
        let ConvShape { channels, filters, kernel, .. } = shape;
        let layout = Filters { channels, filters, kernel };
        let packed = self.packed.reserve(layout.len());
        layout.pack(threads, &mut scratch.parts, Weights::of_forward(&shape, weights), packed);
        let chosen_len = if epilogue.pool.is_some() { result_len } else { 0 };
        let outputs =
            (Rows::new(y, result_len), Rows::new(chosen, chosen_len), PerPart::new(&mut scratch.parts));
        threads.divide(images, 1, outputs, |range, (y, chosen, part)| {
            let runs = Runs { image: PaddedImage::input(&shape), kernel };
            let outputs_len = if epilogue.pool.is_some() { shape.output_len() } else { 0 };
            let memory_len = [runs.len().div_ceil(2), outputs_len, SUMS];
            let mut memory = part.own().reserve(memory_len.map(super::lines).iter().sum());
            let image = cut_bf16(&mut memory, runs.len());
            let outputs = super::cut(&mut memory, outputs_len);
            let sums = super::cut(&mut memory, SUMS);
            image.fill(bf16::ZERO);
            let session = engine.start();
            let filters = (layout, &*packed);
            for n in range.clone() {
                let own = (n - range.start) * result_len..(n - range.start + 1) * result_len;
                runs.image.copy(super::image_of(x, n, shape.input_len()), image);
                let y = &mut y.values[own.clone()];
                if epilogue.pool.is_some() {
                    // The activation is monotonic, so it can be applied after the maximum.
                    let finish = Finish { bias: Some(bias), slope: 1.0 };
                    convolve(&session, &runs, image, filters, finish, sums, outputs);
                    // The rows of the last image are not followed by others.
                    dispatch(Pool { shape, epilogue, outputs, y, chosen: &mut chosen.values[own.start..] });
                } else {
                    let finish = Finish { bias: Some(bias), slope: epilogue.slope.unwrap_or(1.0) };
                    convolve(&session, &runs, image, filters, finish, sums, y);
                }
            }
        });
    }

    #[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
    pub(in crate::conv::cpu) fn backward<E: Storage>(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        images: usize,
        from: Backward<'_, E>,
        dw: &mut [f32],
        db: &mut [f32],
        dx: Option<&mut [E]>,
    ) {
        let (shape, epilogue, engine) = (self.shape, self.epilogue, self.engine);
        let ConvShape { channels, filters, kernel, .. } = shape;
        // The gradient is convolved: its channels are the filters.
        let layout = Filters { channels: filters, filters: channels, kernel };
        let packed = if dx.is_some() {
            let packed = self.packed.reserve(layout.len());
            layout.pack(
                threads,
                &mut scratch.parts,
                Weights::of_input_gradient(&shape, from.weights),
                packed,
            );
            packed
        } else {
            &mut []
        };
        let packed = &*packed;
        let parts = threads.parts(images, 1);
        self.bias.resize(threads.count(), Vec::new());
        let dx_len = if dx.is_some() { shape.input_len() } else { 0 };
        let dx = Rows::new(dx.unwrap_or(&mut []), dx_len);
        let outputs = (dx, PerPart::new(&mut scratch.parts), PerPart::new(&mut self.bias));
        threads.divide(images, 1, outputs, |range, (dx, part, bias)| {
            let bias = bias.own();
            bias.clear();
            bias.resize(filters, 0.0);
            let dx = (dx_len > 0).then_some(dx.values);
            let gradients = Gradients { shape, epilogue, from, images: range, filters: (layout, packed) };
            gradients.compute(&engine.start(), part.own(), bias, dx);
        });
        for (filter, db) in db.iter_mut().enumerate() {
            *db = self.bias[..parts].iter().map(|sums| sums[filter]).sum::<f64>() as f32;
        }
        WeightBlocks::new(&shape).sum(threads, &mut scratch.parts[..parts], dw);
    }
}

/// Overwrites `outputs`, \[row, column, filter\], with the convolution of a padded image.
fn convolve<O: Storage>(
    session: &Session,
    runs: &Runs,
    image: &[bf16],
    (layout, packed): (Filters, &[bf16]),
    finish: Finish<'_>,
    sums: &mut [f32],
    outputs: &mut [O],
) {
    let channels = runs.image.channels;
    let depth = Depth { segments: runs.kernel, steps: runs.steps() };
    for (block, panel) in (0..layout.filters).step_by(BLOCK).zip((0..).step_by(2)) {
        let panels = [panel * layout.panel(), (panel + 1) * layout.panel()];
        let right = Right { values: packed, panels, segment: layout.segment() };
        for first in (0..runs.pixels()).step_by(BLOCK) {
            let groups = [first * channels, (first + SIDE) * channels];
            let left = Left { values: image, groups, row: channels, segment: runs.image.line() };
            session.multiply(left, right, depth, Begin::Zero, sums);
            let columns = block..layout.filters;
            dispatch(Store { runs, first, columns, finish, sums, outputs });
        }
    }
}

/// The backward pass of a thread's images. The weight gradient, [`WeightBlocks`], remains at the beginning of the memory.
struct Gradients<'a, E> {
    shape: ConvShape,
    epilogue: Epilogue,
    /// Those of all images.
    from: Backward<'a, E>,
    images: Range<usize>,
    /// For the input gradient.
    filters: (Filters, &'a [bf16]),
}

impl<E: Storage> Gradients<'_, E> {
    fn compute(self, session: &Session, memory: &mut AlignedVec, bias: &mut [f64], mut dx: Option<&mut [E]>) {
        let Gradients { shape, epilogue, from, ref images, filters: (layout, packed) } = self;
        let ConvShape { kernel, filters, .. } = shape;
        let planes = Planes::new(&shape);
        let blocks = WeightBlocks::new(&shape);
        let group = ENOUGH_PIXELS.div_ceil(planes.depth).min(images.len()).max(1);
        // The gradient before activation and pooling: its rows are as wide as those of the padded input, so that both have
        // the same pixels.
        let input = PaddedImage::input(&shape);
        let gradient =
            PaddedImage { channels: filters, height: shape.out_height(), above: 0, beside: 0, ..input };
        let block = GradientBlock::new(&shape, &epilogue);
        let pairs_len = blocks.filters * 2 * SIDE * planes.depth;
        let runs = Runs { image: PaddedImage::gradient(&shape), kernel };
        let [padded_len, interleaved_len] = planes.memory_len();
        let runs_len = if dx.is_some() { runs.len() } else { 0 };
        let needed = [
            blocks.len(),
            (group * planes.len()).div_ceil(2),
            (group * pairs_len).div_ceil(2),
            planes.depth * filters,
            block.len(),
            filters,
            padded_len.div_ceil(2),
            interleaved_len,
            runs_len.div_ceil(2),
            SUMS,
        ];
        let mut memory = memory.reserve(needed.map(super::lines).iter().sum());
        memory.fill(0.0);
        let dw = super::cut(&mut memory, blocks.len());
        let inputs = cut_bf16(&mut memory, group * planes.len());
        let pairs = cut_bf16(&mut memory, group * pairs_len);
        let dz = super::cut(&mut memory, planes.depth * filters);
        let (unused, db) = (super::cut(&mut memory, block.len()), super::cut(&mut memory, filters));
        let padded = cut_bf16(&mut memory, padded_len);
        let interleaved = super::cut(&mut memory, interleaved_len);
        let image = cut_bf16(&mut memory, runs_len);
        let sums = super::cut(&mut memory, SUMS);
        for first in images.clone().step_by(group) {
            let count = group.min(images.end - first);
            for (n, (inputs, pairs)) in (first..first + count)
                .zip(inputs.chunks_exact_mut(planes.len()).zip(pairs.chunks_exact_mut(pairs_len)))
            {
                db.fill(0.0);
                dispatch(Spread {
                    shape,
                    epilogue,
                    from,
                    n,
                    block: (&block, unused),
                    to: (&gradient, dz),
                    bias: db,
                });
                bias.iter_mut().zip(db.iter()).for_each(|(sum, db)| *sum += f64::from(*db));
                let x = super::image_of(from.x, n, shape.input_len());
                planes.copy(x, inputs, padded, interleaved);
                let columns = RowPairs {
                    from: dz,
                    row: filters,
                    rows: planes.depth,
                    columns: filters,
                    panel: SIDE * planes.depth,
                };
                columns.pack(pairs);
                if let Some(dx) = &mut dx {
                    let rows = dz.chunks_exact(gradient.line()).take(gradient.height);
                    let inner = shape.out_width() * filters;
                    let to = image[runs.image.interior()..].chunks_mut(runs.image.line());
                    for (from, to) in rows.zip(to) {
                        convert(&from[..inner], &mut to[..inner]);
                    }
                    let finish = Finish { bias: None, slope: 1.0 };
                    let at = (n - images.start) * shape.input_len();
                    let dx = &mut dx[at..at + shape.input_len()];
                    convolve(session, &runs, image, (layout, packed), finish, sums, dx);
                }
            }
            let depth = Depth { segments: count, steps: planes.depth / DEPTH };
            for (channel, place) in
                (0..blocks.channels * blocks.places).map(|at| (at / blocks.places, at % blocks.places))
            {
                let start = channel * BLOCK * planes.plane + place / kernel * input.width + place % kernel;
                let left = Left {
                    values: inputs,
                    groups: [start, start + SIDE * planes.plane],
                    row: planes.plane,
                    segment: planes.len(),
                };
                for filter in 0..blocks.filters {
                    let panel = SIDE * planes.depth;
                    let panels = [2 * filter * panel, (2 * filter + 1) * panel];
                    let right = Right { values: pairs, panels, segment: pairs_len };
                    let at = blocks.block(place, channel * BLOCK, filter * BLOCK);
                    session.multiply(left, right, depth, Begin::Sums, &mut dw[at..at + SUMS]);
                }
            }
        }
    }
}

/// Writes the gradient before activation and pooling of one image, and adds it to `bias`.
struct Spread<'a, 'b, E> {
    shape: ConvShape,
    epilogue: Epilogue,
    from: Backward<'a, E>,
    n: usize,
    /// Only written.
    block: (&'b GradientBlock, &'b mut [f32]),
    to: (&'b PaddedImage, &'b mut [f32]),
    bias: &'b mut [f32],
}

impl<E: Storage> Task for Spread<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Spread { shape, epilogue, from, n, block: (block, unused), to: (gradient, to), bias } = self;
        let (rows, columns) = epilogue.result(&shape);
        // An image one pixel wide may be empty after pooling.
        let rows = if columns > 0 { rows } else { 0 };
        let line = columns * shape.filters;
        for first in (0..rows).step_by(block.results) {
            let count = block.results.min(rows - first);
            let results = (n * rows + first) * line..(n * rows + first + count) * line;
            let chosen = if epilogue.pool.is_some() { &from.chosen[results.clone()] } else { &[] };
            let results = epilogue::Results { y: &from.y[results.clone()], dy: &from.dy[results], chosen };
            let row = first * block.rows_each;
            let height = (count * block.rows_each).min(shape.out_height() - row);
            let image = Some(&mut to[row * gradient.line()..]);
            epilogue::spread(
                simd,
                &epilogue,
                (height, shape.out_width()),
                results,
                (block, &mut *unused),
                (gradient, image),
                bias,
            );
        }
    }
}
