//! Convolution as matrix products over tiles of columns.
//!
//! A tile is a run of output rows, across images if the images are small. Its *columns* matrix holds, for each
//! output position of the tile (a column), the C·K·K inputs that the kernel sees there (Chellapilla, Puri and
//! Simard, "High performance convolutional neural networks for document processing", 2006). With it
//!
//! - forward is `y_tile = w · columns`,
//! - the weight gradient is `dw += dy_tile · columnsᵀ`, summed over tiles,
//! - the input gradient is `columns = wᵀ · dy_tile`, whose entries are added back to where they came from.
//!
//! A tile is small enough to stay in the L2 cache between being gathered and being multiplied, so the columns
//! of a whole image, K² times its size, never exist. Threads own images; each sums weight gradients of its
//! own, which are added up in thread order at the end.

use std::ops::Range;

use super::Shape;
use crate::gemm::{Existing, Matrix, multiply};
use crate::sum::sum;
use crate::threads::{PerPart, Rows, Threads};

/// Elements of a tile's columns and outputs together: 1 MiB, half of a current server core's L2 cache.
const TILE_BUDGET: usize = 1 << 18;

/// Memory that the passes of all layers of a network share; it grows to the largest layer's needs once.
#[derive(Debug)]
pub struct Scratch {
    budget: usize,
    parts: Vec<Part>,
}

/// One thread's share of the scratch memory.
#[derive(Debug, Default)]
struct Part {
    columns: Vec<f32>,
    tile: Vec<f32>,
    weights: Vec<f32>,
}

impl Scratch {
    /// Empty scratch memory for the threads of a rank.
    pub fn new(threads: &Threads) -> Self {
        Self::with_tile_budget(threads, TILE_BUDGET)
    }

    /// Tiles of about `budget` elements: one output row at least.
    pub(super) fn with_tile_budget(threads: &Threads, budget: usize) -> Self {
        Self { budget, parts: (0..threads.count()).map(|_| Part::default()).collect() }
    }
}

/// `len` elements of scratch memory with arbitrary contents.
fn reserve(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// A run of output rows of one image within a tile.
struct Segment {
    image: usize,
    rows: Range<usize>,
    /// The first of the tile's columns that belongs to the segment.
    column: usize,
}

/// Consecutive output rows, counted over all images of a part.
struct Tile {
    rows: Range<usize>,
    height: usize,
    width: usize,
}

impl Tile {
    fn columns(&self) -> usize {
        self.rows.len() * self.width
    }

    fn segments(&self) -> impl Iterator<Item = Segment> + '_ {
        let images = self.rows.start / self.height..self.rows.end.div_ceil(self.height);
        images.map(|image| {
            let first = image * self.height;
            let start = self.rows.start.max(first);
            let end = self.rows.end.min(first + self.height);
            let column = (start - self.rows.start) * self.width;
            Segment { image, rows: start - first..end - first, column }
        })
    }
}

/// Cuts the output rows of `images` images into tiles.
fn tiles(shape: &Shape, images: usize, budget: usize) -> impl Iterator<Item = Tile> {
    let (height, width) = (shape.out_height(), shape.out_width());
    let mut rows = (budget / ((shape.filter_len() + shape.filters) * width)).max(1);
    // Whole vector registers of columns, where a tile has the rows for it.
    let step = [1, 2, 4, 8, 16].into_iter().find(|step| step * width % 16 == 0).unwrap_or(1);
    if rows > step {
        rows -= rows % step;
    }
    let total = images * height;
    (0..total).step_by(rows).map(move |start| Tile { rows: start..total.min(start + rows), height, width })
}

/// What one place (u, v) of the kernel sees of one channel, for the output rows of one segment.
///
/// With same padding, output and input rows are of one length, so that what the place sees of consecutive rows
/// is one contiguous run of the plane, wrong only in the few columns where it looks past the border. Copying the
/// run and blanking those is much cheaper than copying row by row.
struct View {
    /// The elements of the segment's line of columns whose input row exists.
    line: Range<usize>,
    /// Among the columns of an output row, those whose input column exists.
    inside: Range<usize>,
    /// Place in the plane of the first element that exists.
    source: usize,
}

impl View {
    fn new(shape: &Shape, segment: &Segment, u: usize, v: usize) -> View {
        let (pad, out) = (shape.pad(), shape.out_width());
        let within = |range: Range<usize>, place: usize, extent: usize| {
            let start = range.start.max(pad.saturating_sub(place)).min(range.end);
            start..range.end.min((extent + pad).saturating_sub(place)).max(start)
        };
        let rows = within(segment.rows.clone(), u, shape.height);
        let inside = within(0..out, v, shape.width);
        if rows.is_empty() || inside.is_empty() {
            return View { line: 0..0, inside: 0..0, source: 0 };
        }
        let first = segment.rows.start;
        View {
            line: (rows.start - first) * out..(rows.end - first) * out,
            source: (rows.start + u - pad) * shape.width + inside.start + v - pad,
            inside,
        }
    }

    /// The run within a line of whole rows of `out` columns.
    fn run(&self, out: usize) -> Range<usize> {
        self.inside.start..self.line.len() - (out - self.inside.end)
    }

    /// Zeroes the elements of a line of whole rows that see nothing.
    fn blank_borders(&self, line: &mut [f32], out: usize) {
        for column in (0..self.inside.start).chain(self.inside.end..out) {
            line.iter_mut().skip(column).step_by(out).for_each(|value| *value = 0.0);
        }
    }
}

/// Calls `visit` with the index of the plane in the images of a part, the view, and the line in the columns, for
/// every segment of a tile, channel and place of the kernel.
fn for_each_view(shape: &Shape, tile: &Tile, mut visit: impl FnMut(usize, View, Range<usize>)) {
    let kernel = shape.kernel;
    for segment in tile.segments() {
        for (channel, place) in (0..shape.channels).flat_map(|c| (0..kernel * kernel).map(move |p| (c, p))) {
            let view = View::new(shape, &segment, place / kernel, place % kernel);
            let start = (channel * kernel * kernel + place) * tile.columns() + segment.column;
            let line = start..start + segment.rows.len() * tile.width;
            visit(segment.image * shape.channels + channel, view, line);
        }
    }
}

/// Gathers the columns of one tile from the images of a part.
fn gather_columns(shape: &Shape, tile: &Tile, x: &[f32], columns: &mut [f32]) {
    let (width, out, plane) = (shape.width, shape.out_width(), shape.height * shape.width);
    for_each_view(shape, tile, |at, view, line| {
        let (x, line) = (&x[at * plane..][..plane], &mut columns[line]);
        line[..view.line.start].fill(0.0);
        line[view.line.end..].fill(0.0);
        if view.line.is_empty() {
            return;
        }
        let line = &mut line[view.line.clone()];
        if out == width {
            let run = &mut line[view.run(out)];
            run.copy_from_slice(&x[view.source..][..run.len()]);
            view.blank_borders(line, out);
        } else {
            for (row, x) in line.chunks_exact_mut(out).zip(x[view.source..].chunks(width)) {
                row.copy_from_slice(&x[..out]);
            }
        }
    });
}

/// Adds the columns of one tile to the places in the images that [`gather_columns`] reads. Columns that were
/// gathered from nowhere are zeroed on the way.
fn scatter_columns(shape: &Shape, tile: &Tile, columns: &mut [f32], dx: &mut [f32]) {
    let (width, out, plane) = (shape.width, shape.out_width(), shape.height * shape.width);
    for_each_view(shape, tile, |at, view, line| {
        if view.line.is_empty() {
            return;
        }
        let dx = &mut dx[at * plane..][..plane][view.source..];
        let line = &mut columns[line][view.line.clone()];
        if out == width {
            view.blank_borders(line, out);
            add(dx, &line[view.run(out)]);
        } else {
            line.chunks_exact(out).zip(dx.chunks_mut(width)).for_each(|(row, dx)| add(dx, row));
        }
    });
}

/// Adds `values` to as many of the first `sums`.
fn add(sums: &mut [f32], values: &[f32]) {
    for (sum, &value) in sums[..values.len()].iter_mut().zip(values) {
        *sum += value;
    }
}

/// Gathers the output gradients of one tile: F rows, one column for every output position.
fn gather_outputs(shape: &Shape, tile: &Tile, dy: &[f32], target: &mut [f32]) {
    let (width, plane, count) = (tile.width, tile.height * tile.width, tile.columns());
    for segment in tile.segments() {
        for filter in 0..shape.filters {
            let source = (segment.image * shape.filters + filter) * plane + segment.rows.start * width;
            let len = segment.rows.len() * width;
            target[filter * count + segment.column..][..len].copy_from_slice(&dy[source..source + len]);
        }
    }
}

/// Writes the products of one tile, plus the bias, to the output images.
fn scatter_outputs(shape: &Shape, tile: &Tile, values: &[f32], bias: &[f32], y: &mut [f32]) {
    let (width, plane, count) = (tile.width, tile.height * tile.width, tile.columns());
    for segment in tile.segments() {
        for (filter, &bias) in bias.iter().enumerate() {
            let target = (segment.image * shape.filters + filter) * plane + segment.rows.start * width;
            let len = segment.rows.len() * width;
            let values = &values[filter * count + segment.column..][..len];
            for (y, &value) in y[target..target + len].iter_mut().zip(values) {
                *y = value + bias;
            }
        }
    }
}

/// Number of images in a batch whose input or output holds `len` elements.
fn images(len: usize, image_len: usize) -> usize {
    assert_eq!(len % image_len, 0, "{len} elements are no whole number of images of {image_len}");
    len / image_len
}

/// Overwrites `y` with the convolution of `x` with `weights`, plus `bias`.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn forward(
    threads: &Threads,
    scratch: &mut Scratch,
    shape: &Shape,
    x: &[f32],
    weights: &[f32],
    bias: &[f32],
    y: &mut [f32],
) {
    shape.check();
    let images = images(x.len(), shape.input_len());
    assert_eq!(weights.len(), shape.weights_len());
    assert_eq!(bias.len(), shape.filters);
    assert_eq!(y.len(), images * shape.output_len());
    let filters = Matrix::new(weights, shape.filters, shape.filter_len());
    let budget = scratch.budget;
    let outputs = (Rows::new(y, shape.output_len()), PerPart::new(&mut scratch.parts));
    threads.divide(images, 1, outputs, |range, (y, part)| {
        let Part { columns, tile: product, .. } = part.own();
        let x = &x[range.start * shape.input_len()..range.end * shape.input_len()];
        for tile in tiles(shape, range.len(), budget) {
            let columns = reserve(columns, shape.filter_len() * tile.columns());
            let product = reserve(product, shape.filters * tile.columns());
            gather_columns(shape, &tile, x, columns);
            let columns = Matrix::new(columns, shape.filter_len(), tile.columns());
            multiply(product, filters, columns, Existing::Replace);
            scatter_outputs(shape, &tile, product, bias, y.values);
        }
    });
}

/// Overwrites `dw` with the gradient of the weights, summed over all images.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn backward_weights(
    threads: &Threads,
    scratch: &mut Scratch,
    shape: &Shape,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
) {
    shape.check();
    let images = images(x.len(), shape.input_len());
    assert_eq!(dy.len(), images * shape.output_len());
    assert_eq!(dw.len(), shape.weights_len());
    let budget = scratch.budget;
    let parts = threads.parts(images, 1);
    threads.divide(images, 1, PerPart::new(&mut scratch.parts), |range, part| {
        let Part { columns, tile: gradient, weights } = part.own();
        let weights = reserve(weights, shape.weights_len());
        let x = &x[range.start * shape.input_len()..range.end * shape.input_len()];
        let dy = &dy[range.start * shape.output_len()..range.end * shape.output_len()];
        let mut existing = Existing::Replace;
        for tile in tiles(shape, range.len(), budget) {
            let columns = reserve(columns, shape.filter_len() * tile.columns());
            let gradient = reserve(gradient, shape.filters * tile.columns());
            gather_columns(shape, &tile, x, columns);
            gather_outputs(shape, &tile, dy, gradient);
            let columns = Matrix::new(columns, shape.filter_len(), tile.columns()).transposed();
            multiply(weights, Matrix::new(gradient, shape.filters, tile.columns()), columns, existing);
            existing = Existing::Add;
        }
    });
    if images == 0 {
        return dw.fill(0.0);
    }
    let (first, others) = scratch.parts[..parts].split_first().expect("at least one part");
    threads.divide(dw.len(), 1 << 14, Rows::new(dw, 1), |range, dw| {
        dw.values.copy_from_slice(&first.weights[range.clone()]);
        for part in others {
            for (dw, &value) in dw.values.iter_mut().zip(&part.weights[range.clone()]) {
                *dw += value;
            }
        }
    });
}

/// Overwrites `db` with the gradient of the bias, summed over all images and positions.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn backward_bias(threads: &Threads, shape: &Shape, dy: &[f32], db: &mut [f32]) {
    let images = images(dy.len(), shape.output_len());
    assert_eq!(db.len(), shape.filters);
    let plane = shape.out_height() * shape.out_width();
    let grain = (1 << 15) / (images * plane).max(1) + 1;
    threads.divide(shape.filters, grain, Rows::new(db, 1), |range, db| {
        for (filter, db) in range.zip(db.values) {
            let planes = (0..images).map(|image| &dy[(image * shape.filters + filter) * plane..][..plane]);
            *db = planes.map(sum).sum::<f64>() as f32;
        }
    });
}

/// Overwrites `dx` with the gradient of the input.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn backward_input(
    threads: &Threads,
    scratch: &mut Scratch,
    shape: &Shape,
    weights: &[f32],
    dy: &[f32],
    dx: &mut [f32],
) {
    shape.check();
    let images = images(dy.len(), shape.output_len());
    assert_eq!(dx.len(), images * shape.input_len());
    assert_eq!(weights.len(), shape.weights_len());
    let filters = Matrix::new(weights, shape.filters, shape.filter_len());
    let budget = scratch.budget;
    let outputs = (Rows::new(dx, shape.input_len()), PerPart::new(&mut scratch.parts));
    threads.divide(images, 1, outputs, |range, (dx, part)| {
        let Part { columns, tile: gradient, .. } = part.own();
        let dy = &dy[range.start * shape.output_len()..range.end * shape.output_len()];
        dx.values.fill(0.0);
        for tile in tiles(shape, range.len(), budget) {
            let columns = reserve(columns, shape.filter_len() * tile.columns());
            let gradient = reserve(gradient, shape.filters * tile.columns());
            gather_outputs(shape, &tile, dy, gradient);
            let gradient = Matrix::new(gradient, shape.filters, tile.columns());
            multiply(columns, filters.transposed(), gradient, Existing::Replace);
            scatter_columns(shape, &tile, columns, dx.values);
        }
    });
}
