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

use super::border::PaddedImage;
use super::{Backward, Epilogue, epilogue};
use crate::conv::ConvShape;
use crate::simd::{Simd, Task, dispatch};
use crate::storage::{Storage, convert};
use crate::threads::{PerPart, Rows, Threads};
use crate::tile_engine::pack::RowPairs;
use crate::tile_engine::{BLOCK, Begin, DEPTH, Depth, Engine, Left, Right, SIDE, SUMS, Session};
use crate::{AlignedVec, Scratch};

use operands::{Filters, Planes, Runs, Weights};
use results::{Finish, Pool, Ring, Store, WeightBlocks};

/// The depth of a weight gradient's product that is worth more images.
const ENOUGH_PIXELS: usize = 768;

/// Elements of the gradient before activation and pooling that are computed at a time, if so many are two rows: 32 KiB.
const GRADIENTS: usize = 8192;

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
        let packed = &*packed;
        let chosen_len = if epilogue.pool.is_some() { result_len } else { 0 };
        let outputs =
            (Rows::new(y, result_len), Rows::new(chosen, chosen_len), PerPart::new(&mut scratch.parts));
        threads.divide(images, 1, outputs, |range, (y, chosen, part)| {
            let runs = Runs { image: PaddedImage::input(&shape), kernel };
            let ring = Ring::new(&runs);
            let sums_len = if epilogue.pool.is_some() { ring.len() } else { SUMS };
            let memory_len = [runs.len().div_ceil(2), sums_len];
            let mut memory = part.own().reserve(memory_len.map(super::lines).iter().sum());
            let image = cut_bf16(&mut memory, runs.len());
            let sums = super::cut(&mut memory, sums_len);
            image.fill(bf16::ZERO);
            let session = engine.start();
            for n in range.clone() {
                let own = (n - range.start) * result_len..(n - range.start + 1) * result_len;
                runs.image.copy(super::image_of(x, n, shape.input_len()), image);
                let convolution = Convolution { session: &session, runs: &runs, image, layout, packed };
                let y = &mut y.values[own.clone()];
                if epilogue.pool.is_some() {
                    let chosen = &mut chosen.values[own];
                    convolution.pool(
                        (epilogue, bias),
                        (ring, &mut *sums),
                        epilogue.result(&shape),
                        y,
                        chosen,
                    );
                } else {
                    let finish = Finish { bias: Some(bias), slope: epilogue.slope.unwrap_or(1.0) };
                    convolution.store(finish, sums, y);
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

/// The products of a convolution of a padded image.
#[derive(Clone, Copy)]
struct Convolution<'a> {
    session: &'a Session,
    runs: &'a Runs,
    image: &'a [bf16],
    layout: Filters,
    packed: &'a [bf16],
}

impl Convolution<'_> {
    /// Overwrites `sums` with the products of a block of pixels from `first` on and of filters from `filter` on.
    fn multiply(&self, first: usize, filter: usize, sums: &mut [f32]) {
        let Convolution { session, runs, image, layout, packed } = *self;
        let channels = runs.image.channels;
        let groups = [first * channels, (first + SIDE) * channels];
        let left = Left { values: image, groups, row: channels, segment: runs.image.line() };
        let panels = [0, 1].map(|panel| (filter / SIDE + panel) * layout.panel());
        let right = Right { values: packed, panels, segment: layout.segment() };
        let depth = Depth { segments: runs.kernel, steps: runs.steps() };
        session.multiply(left, right, depth, Begin::Zero, sums);
    }

    /// Overwrites `outputs`, \[row, column, filter\].
    fn store<O: Storage>(&self, finish: Finish<'_>, sums: &mut [f32], outputs: &mut [O]) {
        let (runs, filters) = (self.runs, self.layout.filters);
        for filter in (0..filters).step_by(BLOCK) {
            for first in (0..runs.pixels()).step_by(BLOCK) {
                self.multiply(first, filter, sums);
                dispatch(Store { runs, first, columns: filter..filters, finish, sums, outputs });
            }
        }
    }

    /// Overwrites an image of the result, `rows` by `columns`, with the pooled outputs: each row as soon as its sums are
    /// complete.
    fn pool<E: Storage>(
        &self,
        (epilogue, bias): (Epilogue, &[f32]),
        (ring, sums): (Ring, &mut [f32]),
        (rows, columns): (usize, usize),
        y: &mut [E],
        chosen: &mut [u8],
    ) {
        let (runs, filters) = (self.runs, self.layout.filters);
        let (height, width) = runs.result();
        let line = columns * filters;
        for filter in (0..filters).step_by(BLOCK) {
            let mut first = 0;
            for row in 0..rows {
                // From the first pixel of two rows to the last, or of one.
                let end = (2 * row + 2).min(height) * runs.image.width - (runs.image.width - width);
                while first < end {
                    self.multiply(first, filter, &mut sums[ring.block(first)]);
                    first += BLOCK;
                }
                let (y, chosen) = (&mut y[row * line..][..line], &mut chosen[row * line..][..line]);
                let columns = filter..filters;
                dispatch(Pool { runs, epilogue, ring, sums, columns, bias, row, y, chosen });
            }
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
        // the same pixels. It is computed, and rounded, some rows at a time: an even number of pixels.
        let width = PaddedImage::input(&shape).width;
        let line = width * filters;
        let rows_each = (GRADIENTS / line).next_multiple_of(2).max(2);
        let pairs_len = blocks.filters * 2 * SIDE * planes.depth;
        let runs = Runs { image: PaddedImage::gradient(&shape), kernel };
        let [padded_len, interleaved_len] = planes.memory_len();
        let runs_len = if dx.is_some() { runs.len() } else { 0 };
        let needed = [
            blocks.len(),
            (group * planes.len()).div_ceil(2),
            (group * pairs_len).div_ceil(2),
            rows_each * line,
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
        let dz = super::cut(&mut memory, rows_each * line);
        let db = super::cut(&mut memory, filters);
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
                for row in (0..shape.out_height()).step_by(rows_each) {
                    let rows = row..shape.out_height().min(row + rows_each);
                    dispatch(Spread { shape, epilogue, from, n, rows: rows.clone(), width, dz, bias: db });
                    let first = row * width;
                    let columns = RowPairs {
                        from: dz,
                        row: filters,
                        rows: (rows_each * width).min(planes.depth - first),
                        columns: filters,
                        panel: SIDE * planes.depth,
                    };
                    columns.pack_part(0..columns.rows.div_ceil(2), &mut pairs[SIDE * first..]);
                    if dx.is_some() {
                        let inner = shape.out_width() * filters;
                        let to = image[runs.image.interior() + row * runs.image.line()..]
                            .chunks_mut(runs.image.line());
                        for (from, to) in dz.chunks_exact(line).take(rows.len()).zip(to) {
                            convert(&from[..inner], &mut to[..inner]);
                        }
                    }
                }
                bias.iter_mut().zip(db.iter()).for_each(|(sum, db)| *sum += f64::from(*db));
                let x = super::image_of(from.x, n, shape.input_len());
                planes.copy(x, inputs, padded, interleaved);
                if let Some(dx) = &mut dx {
                    let finish = Finish { bias: None, slope: 1.0 };
                    let at = (n - images.start) * shape.input_len();
                    let dx = &mut dx[at..at + shape.input_len()];
                    let convolution = Convolution { session, runs: &runs, image, layout, packed };
                    convolution.store(finish, sums, dx);
                }
            }
            let depth = Depth { segments: count, steps: planes.depth / DEPTH };
            for (channel, place) in
                (0..blocks.channels * blocks.places).map(|at| (at / blocks.places, at % blocks.places))
            {
                let start = channel * BLOCK * planes.plane + place / kernel * width + place % kernel;
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

/// Overwrites `dz` with some rows of the gradient before activation and pooling of image `n`, and adds them to `bias`. Rows
/// after the last are zeros, and so are columns beyond the gradient's if they were before.
struct Spread<'a, 'b, E> {
    shape: ConvShape,
    epilogue: Epilogue,
    from: Backward<'a, E>,
    n: usize,
    /// From an even one on.
    rows: Range<usize>,
    /// Pixels of a row of `dz`.
    width: usize,
    dz: &'b mut [f32],
    bias: &'b mut [f32],
}

impl<E: Storage> Task for Spread<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Spread { shape, epilogue, from, n, rows, width, dz, bias } = self;
        let (results, columns) = epilogue.result(&shape);
        let each = if epilogue.pool.is_some() { 2 } else { 1 };
        let line = columns * shape.filters;
        let own = rows.start / each..rows.end.div_ceil(each).min(results);
        let height = (own.len() * each).min(rows.len());
        let own = (n * results + own.start) * line..(n * results + own.end) * line;
        let chosen = if epilogue.pool.is_some() { &from.chosen[own.clone()] } else { &[] };
        let results = epilogue::Results { y: &from.y[own.clone()], dy: &from.dy[own], chosen };
        let padded = PaddedImage { height, width, channels: shape.filters, above: 0, beside: 0 };
        let image = Some((&padded, &mut *dz));
        epilogue::spread(simd, &epilogue, (height, shape.out_width()), results, None, image, bias);
        dz[height * padded.line()..].fill(0.0);
    }
}
