//! Two-dimensional transforms between tiles of images and values at the points.
//!
//! A tile of outputs needs the n×n pixels around it. The transform of a tile is that of its columns, followed by that
//! of the rows of the result, for a vector of channels at a time. Values at the points are ordered by point: one
//! matrix \[tiles, channels\] for each of the n² points, so that all tiles of a block are multiplied by all filters
//! in n² matrix products. The distance between matrices is one cache line more than their length: otherwise the n²
//! locations of a tile's values would map to a few sets of the cache.
//!
//! Each pass exists forward and backward, and the backward one is the transpose: where tiles overlap in the image,
//! the gradient of a pixel is the sum of theirs.
//!
//! A tile's values are in n² places, and those of blocks of the backward passes do not fit into the L2 cache, so a transform
//! prefetches what that of the next tile will read and write. It does so row by row: with a vector of every pixel at a time, more
//! rows would be read at once than processors foresee.
//!
//! No closure here contains vector code: one that is not inlined is compiled without the vector instructions.

#![expect(clippy::needless_range_loop, reason = "an index is a place in a tile, in several arrays at once")]

use std::ops::Range;

use super::points::{MAX_POINTS, Points};
use super::transform::{input, input_gradient, output, output_gradient};
use crate::Storage;
use crate::conv::ConvShape;
use crate::conv::cpu::{Epilogue, activate, before_activation};
use crate::gemm::prefetch::Prefetch;
use crate::pool;
use crate::simd::{MAX_LANES, Simd, Task};

/// Most tiles in a block of the forward pass: three register tiles of rows with AVX-512. With 128 channels and filters at 64
/// points they take 2.75 MiB of each thread. With twice as many, the pass took 1.4 times as long on two cores of an EPYC (1 MiB
/// of L2 each, 32 MiB of L3).
pub(super) const FORWARD_TILES: usize = 42;

/// The same for the backward passes. Each block reads and writes the sums of the weights' gradient, so smaller blocks cost more
/// than they save.
pub(super) const BACKWARD_TILES: usize = 84;

/// The same for all passes of layers whose filters' matrices take more than [`LARGE_FILTERS`] bytes, and are read from memory
/// for each block.
const TILES_WITH_LARGE_FILTERS: usize = 168;
const LARGE_FILTERS: usize = 8 << 20;

/// A tiling of the outputs of a convolution.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiling {
    pub(super) shape: ConvShape,
    pub(super) slope: f32,
    /// Pooling of the outputs. A window lies within one tile, since tiles have an even extent.
    pub(super) pool: Option<pool::PoolShape>,
    pub(super) points: Points,
    /// Tiles of an image, down and across.
    rows: usize,
    columns: usize,
}

/// The part of `count` positions from `first` on that lies within `0..extent`.
#[inline(always)]
fn within(first: isize, count: usize, extent: usize) -> std::ops::Range<usize> {
    let start = (-first).clamp(0, count as isize) as usize;
    let end = (extent as isize - first).clamp(start as isize, count as isize) as usize;
    start..end
}

impl Tiling {
    pub(super) fn new(shape: ConvShape, epilogue: Epilogue, tile: usize) -> Self {
        Tiling {
            shape,
            slope: epilogue.slope.unwrap_or(1.0),
            pool: epilogue.pooling(&shape),
            points: Points::new(tile, shape.kernel),
            rows: shape.out_height().div_ceil(tile),
            columns: shape.out_width().div_ceil(tile),
        }
    }

    /// Tiles of an image.
    pub(super) fn tiles(&self) -> usize {
        self.rows * self.columns
    }

    /// Tiles in a block, when `all` tiles of a thread are divided into blocks of about equal size: at most `most`, or more
    /// with large filters.
    pub(super) fn block(&self, all: usize, most: usize) -> usize {
        let filters = self.points() * self.shape.channels * self.shape.filters * size_of::<f32>();
        let most = if filters > LARGE_FILTERS { TILES_WITH_LARGE_FILTERS } else { most };
        all.div_ceil(all.div_ceil(most).max(1)).max(1)
    }

    /// Number of points in two dimensions, n².
    pub(super) fn points(&self) -> usize {
        self.points.count() * self.points.count()
    }

    /// Elements from one point's matrix of `tiles` rows to the next one.
    pub(super) fn stride(tiles: usize, channels: usize) -> usize {
        (tiles * channels).next_multiple_of(16) + 16
    }

    /// Rows, columns and elements of an image of the result.
    fn result(&self) -> (usize, usize, usize) {
        let (height, width) = match self.pool {
            Some(pool) => (pool.out_height(), pool.out_width()),
            None => (self.shape.out_height(), self.shape.out_width()),
        };
        (height, width, height * width * self.shape.filters)
    }

    /// The place of a tile in consecutive images: image, first output row and column.
    #[inline(always)]
    fn place(&self, tile: usize) -> (usize, usize, usize) {
        let Tiling { rows, columns, points: Points { tile: extent, .. }, .. } = *self;
        let (image, place) = (tile / (rows * columns), tile % (rows * columns));
        (image, place / columns * extent, place % columns * extent)
    }

    /// What a tile needs of the images `x`.
    fn inputs_of<E>(&self, tile: usize, x: &[E]) -> Prefetch {
        let ConvShape { channels, height, width, .. } = self.shape;
        let (image, row, column) = self.place(tile);
        let pad = self.shape.pad() as isize;
        let corner = (row as isize - pad, column as isize - pad);
        square(x, (height, width, channels), image, corner, self.points.count())
    }

    /// A tile's part of the results `y`.
    fn results_of<E>(&self, tile: usize, y: &[E]) -> Prefetch {
        let (height, width, _) = self.result();
        let (image, row, column) = self.place(tile);
        let window = if self.pool.is_some() { 2 } else { 1 };
        let corner = ((row / window) as isize, (column / window) as isize);
        square(y, (height, width, self.shape.filters), image, corner, self.points.tile / window)
    }

    /// The values of a tile at all points, for a block of `tiles`.
    fn values_of(&self, tile: usize, values: &[f32], tiles: usize, channels: usize) -> Prefetch {
        let start = values.as_ptr().wrapping_add(tile * channels);
        let rows = if tile < tiles { self.points() } else { 0 };
        Prefetch { start, row: Tiling::stride(tiles, channels), rows, run: channels }
    }
}

/// A square of an image of \[height, width, channels\], without what lies outside.
fn square<E>(
    images: &[E],
    (height, width, channels): (usize, usize, usize),
    image: usize,
    (row, column): (isize, isize),
    extent: usize,
) -> Prefetch {
    let (rows, columns) = (within(row, extent, height), within(column, extent, width));
    let (row, column) = (row + rows.start as isize, column + columns.start as isize);
    let first = ((image * height + row as usize) * width + column as usize) * channels;
    let words = |elements: usize| elements * size_of::<E>() / size_of::<f32>();
    Prefetch {
        start: images.as_ptr().wrapping_add(first).cast(),
        row: words(width * channels),
        rows: if first < images.len() { rows.len() } else { 0 },
        run: words(columns.len() * channels),
    }
}

/// Prefetches a share of each area: that of the vector of channels from `channel` on.
#[inline(always)]
fn prefetch<S: Simd, const AREAS: usize>(
    simd: S,
    areas: &[Prefetch; AREAS],
    channel: usize,
    channels: usize,
) {
    for area in areas {
        area.share(channel / S::LANES, channels / S::LANES).fetch(simd);
    }
}

/// Images to values at the points: `v = Bᵀ x B`.
pub(super) struct Inputs<'a, E, const PAIRS: usize> {
    pub(super) tiling: &'a Tiling,
    /// Whole images, and the block's tiles of them.
    pub(super) x: &'a [E],
    pub(super) tiles: Range<usize>,
    pub(super) v: &'a mut [f32],
}

impl<E: Storage, const PAIRS: usize> Task for Inputs<'_, E, PAIRS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Inputs { tiling, x, tiles, v } = self;
        let ConvShape { channels, height, width, .. } = tiling.shape;
        let (n, pad) = (2 * PAIRS + 2, tiling.shape.pad() as isize);
        let images = x.len() / tiling.shape.input_len();
        let stride = Tiling::stride(tiles.len(), channels);
        assert!(tiles.end <= images * tiling.tiles() && v.len() >= n * n * stride);
        assert!(channels.is_multiple_of(S::LANES) && n == tiling.points.count());
        let zero = simd.splat(0.0);
        for (number, tile) in tiles.clone().enumerate() {
            let (image, row, column) = tiling.place(tile);
            let (row, column) = (row as isize - pad, column as isize - pad);
            let (rows, columns) = (within(row, n, height), within(column, n, width));
            // Columns outside the image stay zero.
            let mut down = [[zero; MAX_POINTS]; MAX_POINTS];
            let next =
                [tiling.inputs_of(tile + 1, x), tiling.values_of(number + 1, v, tiles.len(), channels)];
            for channel in (0..channels).step_by(S::LANES) {
                prefetch(simd, &next, channel, channels);
                for j in columns.clone() {
                    let mut line = [zero; MAX_POINTS];
                    for i in rows.clone() {
                        let place = (row + i as isize) as usize * width + (column + j as isize) as usize;
                        let at = (image * height * width + place) * channels + channel;
                        // SAFETY: a pixel of one of the images, whose channels are whole vectors.
                        line[i] = unsafe { E::load(simd, x.as_ptr().add(at)) };
                    }
                    let line = input::<S, PAIRS>(simd, &tiling.points, &line);
                    for i in 0..n {
                        down[i][j] = line[i];
                    }
                }
                for i in 0..n {
                    let line = input::<S, PAIRS>(simd, &tiling.points, &down[i]);
                    for j in 0..n {
                        let at = (i * n + j) * stride + number * channels + channel;
                        // SAFETY: `stride` holds all tiles, and `v` has n² of them.
                        unsafe { simd.store(line[j], v.as_mut_ptr().add(at)) };
                    }
                }
            }
        }
    }
}

/// From gradients of values at the points to those of images: `dx = Σ B dv Bᵀ` over tiles.
pub(super) struct InputGradients<'a, E, const PAIRS: usize> {
    pub(super) tiling: &'a Tiling,
    pub(super) dv: &'a [f32],
    /// Memory for one image. It keeps the sums of an image whose other tiles are in the next block.
    pub(super) sums: &'a mut [f32],
    /// Whole images, and the block's tiles of them.
    pub(super) tiles: Range<usize>,
    pub(super) dx: &'a mut [E],
}

impl<E: Storage, const PAIRS: usize> Task for InputGradients<'_, E, PAIRS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let InputGradients { tiling, dv, sums, tiles, dx } = self;
        let ConvShape { channels, height, width, .. } = tiling.shape;
        let (n, pad) = (2 * PAIRS + 2, tiling.shape.pad() as isize);
        let len = tiling.shape.input_len();
        let images = dx.len() / len;
        let stride = Tiling::stride(tiles.len(), channels);
        assert!(tiles.end <= images * tiling.tiles() && sums.len() == len && dv.len() >= n * n * stride);
        assert!(channels.is_multiple_of(S::LANES) && n == tiling.points.count());
        let mut across = [[simd.splat(0.0); MAX_POINTS]; MAX_POINTS];
        for (number, tile) in tiles.clone().enumerate() {
            let (image, row, column) = tiling.place(tile);
            // The first tile of an image.
            if (row, column) == (0, 0) {
                sums.fill(0.0);
            }
            let (row, column) = (row as isize - pad, column as isize - pad);
            let (rows, columns) = (within(row, n, height), within(column, n, width));
            let next = [tiling.values_of(number + 1, dv, tiles.len(), channels)];
            for channel in (0..channels).step_by(S::LANES) {
                prefetch(simd, &next, channel, channels);
                for i in 0..n {
                    let mut line = [simd.splat(0.0); MAX_POINTS];
                    for j in 0..n {
                        let at = (i * n + j) * stride + number * channels + channel;
                        // SAFETY: `stride` holds all tiles, and `dv` has n² of them.
                        line[j] = unsafe { simd.load(dv.as_ptr().add(at)) };
                    }
                    let line = input_gradient::<S, PAIRS>(simd, &tiling.points, &line);
                    for j in 0..n {
                        across[j][i] = line[j];
                    }
                }
                for j in columns.clone() {
                    let line = input_gradient::<S, PAIRS>(simd, &tiling.points, &across[j]);
                    for i in rows.clone() {
                        let place = (row + i as isize) as usize * width + (column + j as isize) as usize;
                        let at = place * channels + channel;
                        // SAFETY: a pixel of the image, whose channels are whole vectors.
                        unsafe {
                            let sum = simd.add(simd.load(sums.as_ptr().add(at)), line[i]);
                            simd.store(sum, sums.as_mut_ptr().add(at));
                        }
                    }
                }
            }
            // The last one.
            if (tiles.start + number + 1).is_multiple_of(tiling.tiles()) {
                for at in (0..len).step_by(S::LANES) {
                    // SAFETY: pixels of the image, whose channels are whole vectors.
                    unsafe {
                        E::store(
                            simd,
                            simd.load(sums.as_ptr().add(at)),
                            dx.as_mut_ptr().add(image * len + at),
                        );
                    };
                }
            }
        }
    }
}

/// From products at the points to results: `y = pool(activation(Aᵀ m A + bias))`.
pub(super) struct Outputs<'a, E, const PAIRS: usize, const TILE: usize> {
    pub(super) tiling: &'a Tiling,
    pub(super) m: &'a [f32],
    pub(super) bias: &'a [f32],
    /// Whole images, and the block's tiles of them.
    pub(super) tiles: Range<usize>,
    pub(super) y: &'a mut [E],
    pub(super) chosen: &'a mut [u8],
}

impl<E: Storage, const PAIRS: usize, const TILE: usize> Task for Outputs<'_, E, PAIRS, TILE> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Outputs { tiling, m, bias, tiles, y, chosen } = self;
        let n = 2 * PAIRS + 2;
        let filters = tiling.shape.filters;
        let (out_height, out_width) = (tiling.shape.out_height(), tiling.shape.out_width());
        let (height, width, len) = tiling.result();
        let images = y.len() / len;
        let stride = Tiling::stride(tiles.len(), filters);
        assert!(tiles.end <= images * tiling.tiles() && m.len() >= n * n * stride && bias.len() == filters);
        assert!(filters.is_multiple_of(S::LANES) && n == tiling.points.count() && TILE == tiling.points.tile);
        assert!(tiling.pool.is_none() || chosen.len() == y.len());
        let (zero, slope) = (simd.splat(0.0), simd.splat(tiling.slope));
        let mut down = [[zero; MAX_POINTS]; TILE];
        let mut pixels = [[zero; MAX_POINTS]; TILE];
        for (number, tile) in tiles.clone().enumerate() {
            let (image, row, column) = tiling.place(tile);
            let next = [tiling.results_of(tile + 1, y)];
            for filter in (0..filters).step_by(S::LANES) {
                prefetch(simd, &next, filter, filters);
                for j in 0..n {
                    let mut line = [zero; MAX_POINTS];
                    for i in 0..n {
                        let at = (i * n + j) * stride + number * filters + filter;
                        // SAFETY: `stride` holds all tiles, and `m` has n² of them.
                        line[i] = unsafe { simd.load(m.as_ptr().add(at)) };
                    }
                    let line = output::<S, PAIRS, TILE>(simd, &tiling.points, &line);
                    for i in 0..TILE {
                        down[i][j] = line[i];
                    }
                }
                // SAFETY: filters are whole vectors.
                let bias = unsafe { simd.load(bias.as_ptr().add(filter)) };
                for i in 0..TILE {
                    pixels[i] = output::<S, PAIRS, TILE>(simd, &tiling.points, &down[i]);
                    for j in 0..TILE {
                        pixels[i][j] = activate(simd, simd.add(pixels[i][j], bias), slope);
                    }
                }
                if tiling.pool.is_none() {
                    for i in 0..TILE.min(out_height - row) {
                        for j in 0..TILE.min(out_width - column) {
                            let at = ((image * height + row + i) * width + column + j) * filters + filter;
                            // SAFETY: a pixel of one of the images, whose filters are whole vectors.
                            unsafe { E::store(simd, pixels[i][j], y.as_mut_ptr().add(at)) };
                        }
                    }
                    continue;
                }
                for i in (0..TILE).step_by(2).take_while(|i| (row + i) / 2 < height) {
                    for j in (0..TILE).step_by(2).take_while(|j| (column + j) / 2 < width) {
                        let (mut best, mut place) = (pixels[i][j], zero);
                        for (u, v) in [(0, 1), (1, 0), (1, 1)] {
                            if row + i + u < out_height && column + j + v < out_width {
                                let value = pixels[i + u][j + v];
                                let larger = simd.greater(value, best);
                                best = simd.select(larger, value, best);
                                place = simd.select(larger, simd.splat((2 * u + v) as f32), place);
                            }
                        }
                        let pixel = (image * height + (row + i) / 2) * width + (column + j) / 2;
                        // SAFETY: a pixel of one of the images; `chosen` is as long as `y`.
                        unsafe {
                            E::store(simd, best, y.as_mut_ptr().add(pixel * filters + filter));
                            simd.store_bytes(place, chosen.as_mut_ptr().add(pixel * filters + filter));
                        }
                    }
                }
            }
        }
    }
}

/// Gradient before the activation of the elements from `at` on.
///
/// # Safety
/// `y` and `dy` have as many elements there as a vector.
#[inline(always)]
unsafe fn gradient_at<S: Simd, E: Storage>(simd: S, y: &[E], dy: &[E], at: usize, slope: S::F32) -> S::F32 {
    // SAFETY: the caller's promise.
    let (y, dy) = unsafe { (E::load(simd, y.as_ptr().add(at)), E::load(simd, dy.as_ptr().add(at))) };
    before_activation(simd, y, dy, slope)
}

/// From gradients of results to those of products at the points, `dm = A dz Aᵀ`, where `dz` is the gradient before
/// activation and pooling; and the sum of `dz` for each filter.
pub(super) struct OutputGradients<'a, E, const PAIRS: usize, const TILE: usize> {
    pub(super) tiling: &'a Tiling,
    /// Whole images, and the block's tiles of them.
    pub(super) tiles: Range<usize>,
    pub(super) y: &'a [E],
    pub(super) chosen: &'a [u8],
    pub(super) dy: &'a [E],
    pub(super) dm: &'a mut [f32],
    /// The sums of this block are added to it.
    pub(super) sums: &'a mut [f64],
}

impl<E: Storage, const PAIRS: usize, const TILE: usize> Task for OutputGradients<'_, E, PAIRS, TILE> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let OutputGradients { tiling, tiles, y, chosen, dy, dm, sums } = self;
        let n = 2 * PAIRS + 2;
        let filters = tiling.shape.filters;
        let (height, width, len) = tiling.result();
        let images = y.len() / len;
        let stride = Tiling::stride(tiles.len(), filters);
        assert!(tiles.end <= images * tiling.tiles() && dy.len() == y.len() && dm.len() >= n * n * stride);
        assert!(filters.is_multiple_of(S::LANES) && n == tiling.points.count() && TILE == tiling.points.tile);
        assert!((tiling.pool.is_none() || chosen.len() == y.len()) && sums.len() == filters);
        let (zero, slope) = (simd.splat(0.0), simd.splat(tiling.slope));
        let mut down = [[zero; MAX_POINTS]; MAX_POINTS];
        for (number, tile) in tiles.clone().enumerate() {
            let (image, row, column) = tiling.place(tile);
            // By column; elements outside the image stay zero.
            let mut pixels = [[zero; MAX_POINTS]; TILE];
            let next = [
                tiling.results_of(tile + 1, y),
                tiling.results_of(tile + 1, dy),
                tiling.values_of(number + 1, dm, tiles.len(), filters),
            ];
            for filter in (0..filters).step_by(S::LANES) {
                prefetch(simd, &next, filter, filters);
                let mut sum = zero;
                if tiling.pool.is_none() {
                    for i in 0..TILE.min(height - row) {
                        for j in 0..TILE.min(width - column) {
                            let at = ((image * height + row + i) * width + column + j) * filters + filter;
                            // SAFETY: a pixel of one of the images, whose filters are whole vectors.
                            pixels[j][i] = unsafe { gradient_at(simd, y, dy, at, slope) };
                            sum = simd.add(sum, pixels[j][i]);
                        }
                    }
                } else {
                    for i in (0..TILE).step_by(2).take_while(|i| (row + i) / 2 < height) {
                        for j in (0..TILE).step_by(2).take_while(|j| (column + j) / 2 < width) {
                            let pixel = (image * height + (row + i) / 2) * width + (column + j) / 2;
                            let at = pixel * filters + filter;
                            // SAFETY: a pixel of one of the images, whose filters are whole vectors.
                            let value = unsafe { gradient_at(simd, y, dy, at, slope) };
                            sum = simd.add(sum, value);
                            // SAFETY: `chosen` is as long as the result.
                            let place = unsafe { simd.load_bytes(chosen.as_ptr().add(at)) };
                            for (u, v) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                                let here = simd.equal(place, simd.splat((2 * u + v) as f32));
                                pixels[j + v][i + u] = simd.select(here, value, zero);
                            }
                        }
                    }
                }
                for j in 0..TILE {
                    let line = output_gradient::<S, PAIRS, TILE>(simd, &tiling.points, &pixels[j]);
                    for i in 0..n {
                        down[i][j] = line[i];
                    }
                }
                for i in 0..n {
                    let line = output_gradient::<S, PAIRS, TILE>(simd, &tiling.points, &down[i]);
                    for j in 0..n {
                        let at = (i * n + j) * stride + number * filters + filter;
                        // SAFETY: `stride` holds all tiles, and `dm` has n² of them.
                        unsafe { simd.store(line[j], dm.as_mut_ptr().add(at)) };
                    }
                }
                // Only few terms are summed in single precision.
                let mut lanes = [0.0; MAX_LANES];
                // SAFETY: no vector has more lanes.
                unsafe { simd.store(sum, lanes.as_mut_ptr()) };
                for (total, lane) in sums[filter..].iter_mut().zip(&lanes[..S::LANES]) {
                    *total += f64::from(*lane);
                }
            }
        }
    }
}
