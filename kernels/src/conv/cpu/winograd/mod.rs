//! Convolution on transformed tiles (Winograd).
//!
//! ```text
//! forward    x ── Bᵀ x B ─→ v ─┐                    backward   dy ── A dz Aᵀ ─→ dm ─┬─ vᵀ · dm, summed ─→ du ── Gᵀ du G ─→ dw
//!            w ── G w Gᵀ ─→ u ─┴─ v · u ─→ m ── Aᵀ m A ─→ y      x ── Bᵀ x B ─→ v ──┘
//!                                                                                   └─ dm · uᵀ ─→ dv ── B dv Bᵀ ─→ dx
//! ```
//!
//! Tiles are processed in blocks, so that a block's matrices stay in the cache between transforms and products, and
//! the filters' matrices are read once for many tiles. The backward pass is the transpose of the forward one, step by
//! step. One transform of the output's gradient serves weights and input. The transform of the input is computed
//! again, since keeping its n²/m² times as many values would cost more than computing them.
//!
//! Points are defined in [`points`], one-dimensional transforms in [`transform`], tiles of images in [`tiles`],
//! filters in [`weights`].

mod points;
mod tiles;
mod transform;
mod weights;

use super::{Backward, Epilogue};
use crate::conv::ConvShape;
use crate::gemm::prefetch::Prefetch;
use crate::gemm::tile::{Left, PANEL, Product, Right, Start};
use crate::simd::{self, MAX_LANES};
use crate::threads::{PerPart, Rows, Threads};
use crate::{DType, Scratch, Storage};
use tiles::{BACKWARD_TILES, FORWARD_TILES, InputGradients, Inputs, OutputGradients, Outputs, Tiling};
use weights::{Filters, Orientation, weight_gradients};

/// Extents of the tiles of the forward and the backward passes, or `None` if Winograd is not suitable for `shape`:
/// with few channels the transforms cost more than they save, with few outputs most of a tile lies outside, and the
/// channels have to be whole vectors.
///
/// More points mean fewer products and more rounding. The forward pass decides which value of a window is the largest
/// and which values are positive, and a decision that differs from exact arithmetic moves whole gradients; so for images
/// in f32 the forward pass uses tiles that round no more than a direct sum does. That holds for tiles of 4×4 with filters
/// of 3×3. With filters of 5×5 and 128 channels the root mean square of the errors, in 10⁻⁶ of that of the results (found by
/// simulation), is 0.7 for a running direct sum, 0.6 for tiles of 2×2, 1.1 for 4×2 and 2.1 for 4×4. Golden runs fail with
/// tiles of 4×4, and one of four with 4×2 (`conv6`).
///
/// In gradients more rounding is acceptable: that of tiles of 4×4 with filters of 5×5, and of 6×6 with filters of 3×3, where
/// the root mean square of the gradients' errors is 2.5·10⁻⁶ of theirs (tiles of 4×4: 0.6·10⁻⁶, direct sums: 0.15·10⁻⁶;
/// 256 channels, 128 filters).
///
/// Images that are stored in 16 bits have been rounded a hundred times as much (bf16: up to 4·10⁻³, fp16: 5·10⁻⁴), so
/// there the forward pass uses the tiles with the fewest products, too.
pub(super) fn tiles(shape: &ConvShape, storage: DType) -> Option<(usize, usize)> {
    let channels = shape.channels.min(shape.filters);
    let vectors = shape.channels.is_multiple_of(MAX_LANES) && shape.filters.is_multiple_of(MAX_LANES);
    let outputs = shape.out_height().min(shape.out_width());
    let (exact, fewest_products) = match shape.kernel {
        _ if !vectors || channels < 32 || outputs < 4 => return None,
        3 => (4, tile_with_fewest_products(shape)),
        5 => (2, 4),
        _ => return None,
    };
    Some((if storage == DType::F32 { exact } else { fewest_products }, fewest_products))
}

/// Extent of the tiles with which a layer with filters of 3×3 takes the fewest products. Larger tiles take fewer for each
/// output, but more of them lie outside.
fn tile_with_fewest_products(shape: &ConvShape) -> usize {
    let products = |tile: usize| {
        let tiles = shape.out_height().div_ceil(tile) * shape.out_width().div_ceil(tile);
        tiles * (tile + 2) * (tile + 2)
    };
    if products(6) < products(4) { 6 } else { 4 }
}

/// Calls a task with the numbers of pairs and outputs as constants.
macro_rules! with_points {
    ($tiling:expr, $task:ident $fields:tt) => {
        match ($tiling.points.count(), $tiling.points.tile) {
            (4, 2) => simd::dispatch($task::<_, 1, 2> $fields),
            (6, 2) => simd::dispatch($task::<_, 2, 2> $fields),
            (6, 4) => simd::dispatch($task::<_, 2, 4> $fields),
            (8, 4) => simd::dispatch($task::<_, 3, 4> $fields),
            (8, 6) => simd::dispatch($task::<_, 3, 6> $fields),
            (points, tile) => unreachable!("tiles of {tile} from {points} points"),
        }
    };
    ($tiling:expr, input $task:ident $fields:tt) => {
        match $tiling.points.count() {
            4 => simd::dispatch($task::<_, 1> $fields),
            6 => simd::dispatch($task::<_, 2> $fields),
            8 => simd::dispatch($task::<_, 3> $fields),
            points => unreachable!("{points} points"),
        }
    };
}

/// A convolution computed on transformed tiles.
#[derive(Debug)]
pub(super) struct Winograd {
    /// The forward pass's tiles, and the filters at their points.
    forward: (Tiling, Filters),
    /// The backward passes' tiles, and the filters at their points, if the input's gradient has been requested.
    backward: (Tiling, Option<Filters>),
    /// Each thread's sums of the bias's gradient.
    sums: Vec<Vec<f64>>,
}

impl Winograd {
    /// Forward passes use tiles of `forward` rows and columns of outputs, backward passes tiles of `backward`.
    pub(super) fn new(shape: ConvShape, epilogue: Epilogue, forward: usize, backward: usize) -> Self {
        let tiling = Tiling::new(shape, epilogue, forward);
        let filters = Filters::new(&shape, tiling.points(), Orientation::Forward);
        Winograd {
            forward: (tiling, filters),
            backward: (Tiling::new(shape, epilogue, backward), None),
            sums: Vec::new(),
        }
    }

    /// Extents of the tiles of the forward and the backward passes.
    pub(super) fn tiles(&self) -> (usize, usize) {
        (self.forward.0.points.tile, self.backward.0.points.tile)
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
        let (tiling, forward) = &mut self.forward;
        forward.transform(threads, &tiling.shape, &tiling.points, weights);
        let (tiling, forward) = &self.forward;
        let ConvShape { channels, filters, .. } = tiling.shape;
        let (image, result) = (tiling.shape.input_len(), y.len() / images.max(1));
        let choices = chosen.len() / images.max(1);
        let outputs = (Rows::new(y, result), Rows::new(chosen, choices), PerPart::new(&mut scratch.parts));
        threads.divide(images, 1, outputs, |range, (y, chosen, part)| {
            let part = part.own();
            let (images, x) = (range.len(), &x[range.start * image..range.end * image]);
            let all = images * tiling.tiles();
            let block = tiling.block(all, FORWARD_TILES);
            for first in (0..all).step_by(block) {
                let tiles = first..all.min(first + block);
                let (inputs, outputs) =
                    (Tiling::stride(tiles.len(), channels), Tiling::stride(tiles.len(), filters));
                let scratch = part.reserve(tiling.points() * (inputs + outputs));
                let (v, m) = scratch.split_at_mut(tiling.points() * inputs);
                with_points!(tiling, input Inputs { tiling, x, tiles: tiles.clone(), v: &mut *v });
                for point in 0..tiling.points() {
                    let (u, panel) = forward.at(point);
                    let product = Product {
                        rows: tiles.len(),
                        columns: filters,
                        depth: channels,
                        segments: 1,
                        left: Left { values: &v[point * inputs..], row: channels, depth: 1, segment: 0 },
                        right: Right { values: u, depth: PANEL, segment: 0, panel },
                        start: Start::Zero,
                        slope: 1.0,
                    };
                    let next_v = matrix(v, point + 1, inputs);
                    let m = &mut m[point * outputs..][..outputs];
                    product.compute(m, filters, [forward.ahead(point + 1), next_v]);
                }
                let (y, chosen) = (&mut *y.values, &mut *chosen.values);
                with_points!(tiling, Outputs { tiling, m: &*m, bias, tiles, y, chosen });
            }
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
        let Backward { x, weights, y, chosen, dy } = from;
        let (tiling, backward) = &mut self.backward;
        let shape = tiling.shape;
        let ConvShape { channels, filters, .. } = shape;
        let points = tiling.points();
        let (image, result) = (shape.input_len(), y.len() / images.max(1));
        let choices = chosen.len() / images.max(1);
        if dx.is_some() {
            let backward =
                backward.get_or_insert_with(|| Filters::new(&shape, points, Orientation::Backward));
            backward.transform(threads, &shape, &tiling.points, weights);
        }
        self.sums.resize_with(threads.count(), || vec![0.0; filters]);
        let mut sums = std::mem::take(&mut self.sums);
        let (tiling, backward) = &self.backward;
        let gradients = Tiling::stride(channels, filters);
        let input_len = if dx.is_some() { image } else { 0 };
        let outputs = (
            Rows::new(dx.unwrap_or_default(), input_len),
            PerPart::new(&mut scratch.parts),
            PerPart::new(&mut sums),
        );
        let parts = threads.parts(images, 1);
        threads.divide(images, 1, outputs, |range, (dx, part, sums)| {
            let (part, sums) = (part.own(), sums.own());
            sums.fill(0.0);
            let all = range.len() * tiling.tiles();
            let results = range.start * result..range.end * result;
            let (x, y) = (&x[range.start * image..range.end * image], &y[results.clone()]);
            let (dy, chosen) = (&dy[results], &chosen[range.start * choices..range.end * choices]);
            let block = tiling.block(all, BACKWARD_TILES);
            let mut start = Start::Zero;
            for first in (0..all).step_by(block) {
                let tiles = first..all.min(first + block);
                let (inputs, outputs) =
                    (Tiling::stride(tiles.len(), channels), Tiling::stride(tiles.len(), filters));
                let scratch = part.reserve(points * (gradients + inputs + outputs) + input_len);
                let (du, rest) = scratch.split_at_mut(points * gradients);
                let (image_sums, rest) = rest.split_at_mut(input_len);
                let (v, dm) = rest.split_at_mut(points * inputs);
                with_points!(
                    tiling,
                    OutputGradients { tiling, tiles: tiles.clone(), y, chosen, dy, dm: &mut *dm, sums: &mut *sums }
                );
                with_points!(tiling, input Inputs { tiling, x, tiles: tiles.clone(), v: &mut *v });
                for point in 0..points {
                    // What the next point's products read: both operands, and sums, which are a few rows in many places.
                    let (next_v, next_dm) = (matrix(v, point + 1, inputs), matrix(dm, point + 1, outputs));
                    let next_du = Prefetch {
                        start: du[(point + 1) * gradients..].as_ptr(),
                        row: filters,
                        rows: if point + 1 < points { channels } else { 0 },
                        run: filters,
                    };
                    let (v, dm) = (&mut v[point * inputs..][..inputs], &dm[point * outputs..]);
                    let product = Product {
                        rows: channels,
                        columns: filters,
                        depth: tiles.len(),
                        segments: 1,
                        left: Left { values: v, row: 1, depth: channels, segment: 0 },
                        right: Right { values: dm, depth: filters, segment: 0, panel: PANEL },
                        start,
                        slope: 1.0,
                    };
                    let backward = backward.as_ref().filter(|_| input_len > 0);
                    let ahead = backward.map_or(Prefetch::NONE, |backward| backward.ahead(point));
                    product.compute(&mut du[point * gradients..][..gradients], filters, [ahead, next_dm]);
                    // The transformed input is no longer needed: its memory is reused for the gradient.
                    if let Some(backward) = backward {
                        let (u, panel) = backward.at(point);
                        let product = Product {
                            rows: tiles.len(),
                            columns: channels,
                            depth: filters,
                            segments: 1,
                            left: Left { values: dm, row: filters, depth: 1, segment: 0 },
                            right: Right { values: u, depth: PANEL, segment: 0, panel },
                            start: Start::Zero,
                            slope: 1.0,
                        };
                        product.compute(v, channels, [next_du, next_v]);
                    }
                }
                start = Start::Existing;
                if input_len > 0 {
                    let dx = &mut *dx.values;
                    with_points!(tiling, input InputGradients { tiling, dv: &*v, sums: &mut *image_sums, tiles, dx });
                }
            }
        });
        self.sums = sums;
        if images == 0 {
            db.fill(0.0);
            return dw.fill(0.0);
        }
        for (filter, db) in db.iter_mut().enumerate() {
            *db = self.sums[..parts].iter().map(|sums| sums[filter]).sum::<f64>() as f32;
        }
        weight_gradients(threads, &shape, &tiling.points, &scratch.parts[..parts], gradients, dw);
    }
}

/// The matrix at one point, of `len` elements; nothing after the last one.
fn matrix(matrices: &[f32], point: usize, len: usize) -> Prefetch {
    Prefetch::of(matrices[point * len..].get(..len).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::Padding;
    use crate::conv::cpu::tests::for_each_product;
    use crate::pool::Rounding;
    use crate::reference::{assert_close, random};

    /// All results of a convolution in double precision, by the definition.
    struct Expected {
        y: Vec<f64>,
        chosen: Vec<u8>,
        dw: Vec<f64>,
        db: Vec<f64>,
        dx: Vec<f64>,
    }

    fn define(
        shape: &ConvShape,
        epilogue: Epilogue,
        x: &[f32],
        w: &[f32],
        b: &[f32],
        dy: &[f32],
    ) -> Expected {
        let filters = shape.filters;
        let images = x.len() / shape.input_len();
        let (oh, ow) = (shape.out_height(), shape.out_width());
        let slope = f64::from(epilogue.slope.unwrap_or(1.0));
        let mut z: Vec<f64> = (0..images * oh * ow * filters).map(|at| f64::from(b[at % filters])).collect();
        for_each_product(shape, images, |y, wi, xi| z[y] += f64::from(w[wi]) * f64::from(x[xi]));
        let active: Vec<f64> = z.iter().map(|z| if *z > 0.0 { *z } else { z * slope }).collect();
        let mut dz = vec![0.0; z.len()];
        let (mut y, mut chosen) = (Vec::new(), Vec::new());
        match epilogue.pooling(shape) {
            None => {
                y.clone_from(&active);
                dz.iter_mut().zip(dy).for_each(|(dz, dy)| *dz = f64::from(*dy));
            }
            Some(pool) => {
                let (ph, pw) = (pool.out_height(), pool.out_width());
                for (at, (n, i, j)) in
                    (0..images * ph * pw).map(|at| (at, (at / (ph * pw), at / pw % ph, at % pw)))
                {
                    for f in 0..filters {
                        let places = [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter();
                        let places = places.filter(|(u, v)| 2 * i + u < oh && 2 * j + v < ow);
                        let place =
                            |(u, v): (usize, usize)| ((n * oh + 2 * i + u) * ow + 2 * j + v) * filters + f;
                        let best = places
                            .reduce(|a, b| if active[place(b)] > active[place(a)] { b } else { a })
                            .unwrap();
                        y.push(active[place(best)]);
                        chosen.push((2 * best.0 + best.1) as u8);
                        dz[place(best)] = f64::from(dy[at * filters + f]);
                    }
                }
            }
        }
        dz.iter_mut().zip(&z).for_each(|(dz, z)| *dz *= if *z > 0.0 { 1.0 } else { slope });
        let (mut dw, mut dx, mut db) = (vec![0.0; w.len()], vec![0.0; x.len()], vec![0.0; filters]);
        for_each_product(shape, images, |y, wi, xi| {
            dw[wi] += dz[y] * f64::from(x[xi]);
            dx[xi] += dz[y] * f64::from(w[wi]);
        });
        dz.iter().enumerate().for_each(|(at, dz)| db[at % filters] += dz);
        Expected { y, chosen, dw, db, dx }
    }

    /// Within a few roundings of the largest element: transforms mix large and small elements.
    #[track_caller]
    fn near(actual: &[f32], expected: &[f64]) {
        let largest = expected.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
        let scaled: Vec<f64> = expected.iter().map(|value| value / largest).collect();
        let actual: Vec<f32> = actual.iter().map(|value| value / largest as f32).collect();
        assert_close(&actual, &scaled, 1e-5);
    }

    #[test]
    fn all_passes_match_the_definition() {
        let epilogues = [
            Epilogue::NONE,
            Epilogue { slope: Some(0.2), pool: Some(Rounding::Floor) },
            Epilogue { slope: Some(0.0), pool: Some(Rounding::Ceil) },
        ];
        let cases = [
            (32, 48, 3, 7, (2, 4)),
            (48, 32, 5, 9, (2, 4)),
            (32, 32, 3, 12, (4, 4)),
            (32, 32, 5, 14, (2, 4)),
            (32, 48, 3, 11, (6, 6)),
            (48, 32, 3, 12, (4, 6)),
            // Blocks of the backward passes that end within images.
            (32, 32, 3, 39, (4, 4)),
        ];
        for (index, (channels, filters, kernel, extent, (forward, backward))) in cases.into_iter().enumerate()
        {
            for (epilogue, padding) in
                epilogues.into_iter().zip([Padding::Same, Padding::Valid, Padding::Same])
            {
                let shape =
                    ConvShape { channels, height: extent, width: extent + 1, filters, kernel, padding };
                let mut conv = Winograd::new(shape, epilogue, forward, backward);
                let images = 3;
                let x = random(images * shape.input_len(), 1);
                let w: Vec<f32> = random(shape.weights_len(), 2).iter().map(|w| w / 16.0).collect();
                let b = random(filters, 3);
                let (rows, columns) = epilogue.result(&shape);
                let len = images * rows * columns * filters;
                let dy = random(len, 4);
                let expected = define(&shape, epilogue, &x, &w, &b, &dy);
                let (mut y, mut chosen) = (vec![f32::NAN; len], vec![9; expected.chosen.len()]);
                let threads = Threads::new(1 + index % 3);
                let mut scratch = Scratch::new(&threads);
                conv.forward(&threads, &mut scratch, images, &x, &w, &b, &mut y, &mut chosen);
                near(&y, &expected.y);
                assert_eq!(chosen, expected.chosen);
                let (mut dw, mut db) = (vec![f32::NAN; w.len()], vec![f32::NAN; filters]);
                let mut dx = vec![f32::NAN; x.len()];
                let from = Backward { x: &x, weights: &w, y: &y, chosen: &chosen, dy: &dy };
                conv.backward(&threads, &mut scratch, images, from, &mut dw, &mut db, Some(&mut dx));
                near(&dw, &expected.dw);
                near(&db, &expected.db);
                near(&dx, &expected.dx);
                dw.fill(f32::NAN);
                conv.backward(&threads, &mut scratch, images, from, &mut dw, &mut db, None);
                near(&dw, &expected.dw);
            }
        }
    }
}
