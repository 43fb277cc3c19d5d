//! Convolution by its definition, as products of register tiles.
//!
//! With channels last, the K·C inputs that one kernel row covers are contiguous, and the next kernel row covers those
//! one row of the image further on. So every pass is a [`Product`] whose segments are rows:
//!
//! - A row of outputs is the product of W' runs of K·C inputs, C apart, and the filters, summed over K kernel rows.
//! - The weight gradient of a kernel row is the product of K·C inputs and F gradients, summed over W'·H' pixels.
//! - The input gradient is a convolution of the result's gradient, with the filters rotated by 180°.
//!
//! No columns are gathered (no im2col). If the kernel may read beyond the edge, the image is first copied into a
//! border of zeros (`border`). The epilogue is applied to one or two rows of a convolution at a time (`epilogue`).
//! For too few channels or filters to fill a vector, each pass has a faster variant (`pixels`, `fold`, `chosen`), and so have
//! layers with one channel (`windows`).
//!
//! Every thread sums the weight gradients of its images; the threads' sums are added in the order of threads.

mod border;
mod chosen;
mod epilogue;
mod fold;
mod pixels;
pub(super) mod tiles;
mod weights;
mod windows;

use super::{Backward, Epilogue};
use crate::conv::ConvShape;
use crate::gemm::tile::{Left, Lines, PANEL, Product, Right, Start};
use crate::simd::{MAX_LANES, Simd, Task, dispatch};
use crate::storage::{Storage, convert};
use crate::threads::{PerPart, Rows, Threads};
use crate::{AlignedVec, Scratch};

use border::{GradientBlock, PaddedImage};
use epilogue::Outputs;

/// A convolution computed directly.
#[derive(Debug)]
pub(super) struct Direct {
    shape: ConvShape,
    epilogue: Epilogue,
    /// The filters as the right operand of the forward pass or of the input gradient.
    packed: AlignedVec,
    /// The gradients of the bias, one for each thread.
    bias: Vec<Vec<f64>>,
}

/// Takes `len` elements from scratch memory; the rest begins at a cache line again.
fn cut<'a>(memory: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (first, rest) = std::mem::take(memory).split_at_mut(lines(len));
    *memory = rest;
    &mut first[..len]
}

/// `len` rounded up to whole cache lines.
fn lines(len: usize) -> usize {
    len.next_multiple_of(MAX_LANES)
}

impl Direct {
    pub(super) fn new(shape: ConvShape, epilogue: Epilogue) -> Self {
        Direct { shape, epilogue, packed: AlignedVec::default(), bias: Vec::new() }
    }

    /// Elements of the result for one image.
    fn result_len(&self) -> usize {
        let (height, width) = self.epilogue.result(&self.shape);
        height * width * self.shape.filters
    }

    #[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
    pub(super) fn forward<E: Storage>(
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
        let (shape, epilogue, result_len) = (self.shape, self.epilogue, self.result_len());
        let packed = self.packed.reserve(weights::packed_len(shape.channels, shape.filters, shape.kernel));
        weights::pack(&shape, weights, packed);
        let chosen_len = if epilogue.pool.is_some() { result_len } else { 0 };
        let outputs =
            (Rows::new(y, result_len), Rows::new(chosen, chosen_len), PerPart::new(&mut scratch.parts));
        threads.divide(images, 1, outputs, |range, (y, chosen, part)| {
            let x = &x[range.start * shape.input_len()..range.end * shape.input_len()];
            let memory = part.own();
            let images = range.len();
            dispatch(Forward {
                shape,
                epilogue,
                images,
                x,
                packed,
                bias,
                y: y.values,
                chosen: chosen.values,
                memory,
            });
        });
    }

    #[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
    pub(super) fn backward<E: Storage>(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        images: usize,
        from: Backward<'_, E>,
        dw: &mut [f32],
        db: &mut [f32],
        dx: Option<&mut [E]>,
    ) {
        let (shape, epilogue, result_len) = (self.shape, self.epilogue, self.result_len());
        let packed: &[f32] = if dx.is_some() {
            if fold::is_faster(&shape) {
                let packed = self.packed.reserve(fold::packed_len(&shape));
                fold::pack(&shape, from.weights, packed);
                packed
            } else {
                let len = weights::packed_len(shape.filters, shape.channels, shape.kernel);
                let packed = self.packed.reserve(len);
                weights::pack_flipped(&shape, from.weights, packed);
                packed
            }
        } else {
            &[]
        };
        let chosen_len = if epilogue.pool.is_some() { result_len } else { 0 };
        let parts = threads.parts(images, 1);
        self.bias.resize(threads.count(), Vec::new());
        let dx_len = if dx.is_some() { shape.input_len() } else { 0 };
        let dx = Rows::new(dx.unwrap_or(&mut []), dx_len);
        let outputs = (dx, PerPart::new(&mut scratch.parts), PerPart::new(&mut self.bias));
        threads.divide(images, 1, outputs, |range, (dx, part, bias)| {
            let result = range.start * result_len..range.end * result_len;
            let from = Backward {
                x: &from.x[range.start * shape.input_len()..range.end * shape.input_len()],
                weights: from.weights,
                y: &from.y[result.clone()],
                chosen: &from.chosen[range.start * chosen_len..range.end * chosen_len],
                dy: &from.dy[result],
            };
            let bias = bias.own();
            bias.clear();
            bias.resize(shape.filters, 0.0);
            let dx = (dx_len > 0).then_some(dx.values);
            let memory = part.own();
            dispatch(Gradients { shape, epilogue, images: range.len(), from, packed, bias, dx, memory });
        });
        for (filter, db) in db.iter_mut().enumerate() {
            *db = self.bias[..parts].iter().map(|sums| sums[filter]).sum::<f64>() as f32;
        }
        let parts = &scratch.parts[..parts];
        let grain = (1 << 14) / shape.filter_len() + 1;
        threads.divide(shape.filters, grain, Rows::new(dw, shape.filter_len()), |filters, dw| {
            weights::sum_parts(&shape, parts, filters, dw.values);
        });
    }
}

/// The forward pass of a thread's images.
struct Forward<'a, E> {
    shape: ConvShape,
    epilogue: Epilogue,
    images: usize,
    x: &'a [E],
    packed: &'a [f32],
    bias: &'a [f32],
    y: &'a mut [E],
    chosen: &'a mut [u8],
    memory: &'a mut AlignedVec,
}

impl<E: Storage> Task for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Forward { shape, epilogue, images, x, packed, bias, y, chosen, memory } = self;
        let (filters, width, height) = (shape.filters, shape.out_width(), shape.out_height());
        let padded = PaddedImage::input(&shape);
        let by_pixels = pixels::is_faster(&shape, &epilogue);
        let by_windows = windows::is_faster(&shape) && !by_pixels;
        let (pixel, line, slack, planes_len) = match by_pixels {
            true => {
                let (pixel, line) = (pixels::pixel_len::<S>(&shape), pixels::line_len::<S>(&shape));
                (pixel, line, pixels::SLACK, pixels::planes_len::<S>(&shape))
            }
            false => (filters, width * filters, if by_windows { windows::slack(&padded) } else { 0 }, 0),
        };
        let copied = padded.above > 0 || by_pixels || by_windows;
        let (rows, columns) = epilogue.result(&shape);
        let result = columns * filters;
        // Two rows for one row of a pooled result or for a row of windows; otherwise all rows at once.
        let (steps, rows_each) = match epilogue.pool {
            Some(_) => (rows, 2),
            None if by_windows => (height.div_ceil(2), 2),
            None => (1, height),
        };
        let in_place = by_windows || epilogue.pool.is_none() && E::wide(y).is_some();
        let outputs_len = if in_place { 0 } else { rows_each * line };
        let needed = [padded.len() + slack, outputs_len, planes_len];
        let mut memory = memory.reserve(needed.map(lines).iter().sum());
        let [image, outputs, planes] = needed.map(|len| cut(&mut memory, len));
        if copied {
            image.fill(0.0);
        }
        for n in 0..images {
            let x = image_of(x, n, shape.input_len());
            let x = E::wide(x).filter(|_| !copied).unwrap_or_else(|| {
                padded.copy(x, image);
                image
            });
            let y = &mut y[n * rows * result..(n + 1) * rows * result];
            for step in 0..steps {
                let count = rows_each.min(height - rows_each * step);
                let x = &x[rows_each * step * padded.line()..];
                let results = match epilogue.pool {
                    Some(_) => step..step + 1,
                    None => rows_each * step..rows_each * step + count,
                };
                let y = &mut y[results.start * result..results.end * result];
                // That of this row and of those after it.
                let chosen = match epilogue.pool {
                    Some(_) => &mut chosen[(n * rows + step) * result..],
                    None => &mut [],
                };
                if by_windows {
                    windows::rows(simd, (&shape, &epilogue), count, (x, packed, bias), y, chosen);
                    continue;
                }
                let (product, lines) = rows_of_convolution(&padded, shape.kernel, x, packed, filters, count);
                // The activation is monotonic, so it can be applied after the maximum.
                let slope = if epilogue.pool.is_some() { 1.0 } else { epilogue.slope.unwrap_or(1.0) };
                let product = Product { start: Start::Bias(bias), slope, ..product };
                if epilogue.pool.is_some() {
                    if by_pixels {
                        pixels::rows(simd, &shape, count, (x, packed, bias), planes, outputs);
                    } else {
                        product.compute_lines(simd, lines, outputs, filters);
                    }
                    let outputs =
                        Outputs { values: outputs, rows: count, width, channels: filters, pixel, line };
                    epilogue::pool(simd, &epilogue, outputs, y, chosen);
                } else if let Some(y) = E::wide_mut(y) {
                    product.compute_lines(simd, lines, y, filters);
                } else {
                    product.compute_lines(simd, lines, outputs, filters);
                    convert(outputs, y);
                }
            }
        }
    }
}

/// Image `n` of those in `values`.
fn image_of<E>(values: &[E], n: usize, len: usize) -> &[E] {
    &values[n * len..(n + 1) * len]
}

/// The product that computes the first `count` rows of a convolution of a padded image.
#[inline(always)]
fn rows_of_convolution<'a>(
    image: &PaddedImage,
    kernel: usize,
    x: &'a [f32],
    packed: &'a [f32],
    columns: usize,
    count: usize,
) -> (Product<'a>, Lines) {
    let (channels, line) = (image.channels, image.line());
    let depth = kernel * channels;
    let product = Product {
        rows: image.width + 1 - kernel,
        columns,
        depth,
        segments: kernel,
        left: Left { values: x, row: channels, depth: 1, segment: line },
        right: Right { values: packed, depth: PANEL, segment: depth * PANEL, panel: kernel * depth * PANEL },
        start: Start::Zero,
        slope: 1.0,
    };
    (product, Lines { count, left: line, c: product.rows * columns })
}

/// The backward pass of a thread's images. The weight gradient, \[K, K·C, filters\], remains at the beginning of
/// `memory`.
struct Gradients<'a, E> {
    shape: ConvShape,
    epilogue: Epilogue,
    images: usize,
    from: Backward<'a, E>,
    packed: &'a [f32],
    bias: &'a mut [f64],
    dx: Option<&'a mut [E]>,
    memory: &'a mut AlignedVec,
}

impl<E: Storage> Task for Gradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Gradients { shape, epilogue, images, from, packed, bias, mut dx, memory } = self;
        let ConvShape { channels, filters, kernel, .. } = shape;
        let (rows, columns) = epilogue.result(&shape);
        // An image one pixel wide may be empty after pooling.
        let rows = if columns > 0 { rows } else { 0 };
        let folded = fold::is_faster(&shape);
        let input = PaddedImage::input(&shape);
        let gradient = if folded { fold::gradient(&shape) } else { PaddedImage::gradient(&shape) };
        let block = GradientBlock::new(&shape, &epilogue);
        let by_filters = chosen::is_faster::<S>(&shape, &epilogue);
        let sparse = by_filters || windows::is_faster(&shape) && epilogue.pool.is_some();
        let (slack, sums_len) = match (by_filters, sparse) {
            (true, _) => (chosen::slack(&input), chosen::sums_len(&shape)),
            (false, true) => (windows::slack(&input), windows::memory_len(&shape, &epilogue)),
            (false, false) => (0, 0),
        };
        let image_len = input.len() + slack;
        let dw_len = weights::gradient_len(&shape);
        let gradient_len = if dx.is_some() { gradient.len() } else { 0 };
        let products_len = if dx.is_some() && folded { fold::products_len(&shape) } else { 0 };
        let input_len =
            if dx.as_ref().is_some_and(|dx| E::wide(dx).is_none()) { shape.input_len() } else { 0 };
        let needed =
            [dw_len, image_len, block.len(), gradient_len, filters, products_len, sums_len, input_len];
        let mut memory = memory.reserve(needed.map(lines).iter().sum());
        memory.fill(0.0);
        let (dw, image) = (cut(&mut memory, dw_len), cut(&mut memory, image_len));
        let (g, whole) = (cut(&mut memory, block.len()), cut(&mut memory, gradient_len));
        let (db, products) = (cut(&mut memory, filters), cut(&mut memory, products_len));
        let (sums, narrowed) = (cut(&mut memory, sums_len), cut(&mut memory, input_len));
        let stride = lines(filters);
        for n in 0..images {
            let x = image_of(from.x, n, shape.input_len());
            let x = E::wide(x).filter(|_| input.above == 0 && !sparse).unwrap_or_else(|| {
                input.copy(x, image);
                image
            });
            db.fill(0.0);
            // The gradients of weights and bias need the chosen pixels only.
            let spread = if sparse && dx.is_none() { 0 } else { rows };
            for first in (0..spread).step_by(block.results) {
                let count = block.results.min(rows - first);
                let line = columns * filters;
                let results = (n * rows + first) * line..(n * rows + first + count) * line;
                let chosen = if epilogue.pool.is_some() { &from.chosen[results.clone()] } else { &[] };
                let results =
                    epilogue::Results { y: &from.y[results.clone()], dy: &from.dy[results], chosen };
                let row = first * block.rows_each;
                let height = (count * block.rows_each).min(shape.out_height() - row);
                let whole = dx
                    .is_some()
                    .then(|| (&gradient, &mut whole[gradient.interior() + row * gradient.line()..]));
                epilogue::spread(
                    simd,
                    &epilogue,
                    (height, shape.out_width()),
                    results,
                    Some((&block, &mut *g)),
                    whole,
                    db,
                );
                if sparse {
                    continue;
                }
                let product = Product {
                    rows: kernel * channels,
                    columns: filters,
                    depth: shape.out_width(),
                    segments: height,
                    left: Left {
                        values: &x[row * input.line()..],
                        row: 1,
                        depth: channels,
                        segment: input.line(),
                    },
                    right: Right {
                        values: g,
                        depth: block.stride,
                        segment: shape.out_width() * block.stride,
                        panel: block.panel,
                    },
                    start: Start::Existing,
                    slope: 1.0,
                };
                let kernel_rows = Lines { count: kernel, left: input.line(), c: product.rows * stride };
                product.compute_lines(simd, kernel_rows, dw, stride);
            }
            if sparse {
                let results = n * rows * columns * filters..(n + 1) * rows * columns * filters;
                let chosen = &from.chosen[results.clone()];
                let results =
                    epilogue::Results { y: &from.y[results.clone()], dy: &from.dy[results], chosen };
                db.fill(0.0);
                if by_filters {
                    chosen::add_image(simd, (&shape, &epilogue), x, results, sums, db);
                } else {
                    windows::add_image(simd, (&shape, &epilogue), x, results, sums, dw, db);
                }
            }
            bias.iter_mut().zip(db.iter()).for_each(|(sum, db)| *sum += f64::from(*db));
            if let Some(dx) = &mut dx {
                let dx = &mut dx[n * shape.input_len()..][..shape.input_len()];
                let sums = E::wide_mut(dx).unwrap_or(narrowed);
                if folded {
                    fold::input_gradient(simd, &shape, whole, packed, products, sums);
                } else {
                    let (product, lines) =
                        rows_of_convolution(&gradient, kernel, whole, packed, channels, shape.height);
                    product.compute_lines(simd, lines, sums, channels);
                }
                if input_len > 0 {
                    convert(narrowed, dx);
                }
            }
        }
        if by_filters {
            chosen::reorder::<S>(&shape, sums, dw);
        }
    }
}
