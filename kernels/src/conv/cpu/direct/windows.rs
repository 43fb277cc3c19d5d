//! Layers with one channel: first layers.
//!
//! A sum has only K² terms there, so what a product of register tiles does besides its sums takes most of the time. Here
//! the outputs of a window of 2×2 pixels are summed together: each input is loaded once for all of them. With pooling, their
//! maximum is found in registers, and the outputs themselves are never stored. Every sum has the order of terms, and so the
//! bits, of the product that this replaces.
//!
//! Behind pooling, the weight gradient of a filter needs one pixel of each window only, but not the same one for all
//! filters of a vector. [`Simd::pick`] takes the input of each filter's own pixel from four inputs, so that one
//! multiply-add does the work of four.

use super::border::PaddedImage;
use super::epilogue::{Results, pool_window};
use super::lines;
use crate::Storage;
use crate::conv::ConvShape;
use crate::conv::cpu::{Epilogue, activate, before_activation};
use crate::gemm::tile::{PANEL, SPAN};
use crate::simd::{MAX_LANES, Simd, Task};
use crate::storage::lanes::Lanes;

/// Vectors of filters that are computed together.
const GROUP: usize = 2;

/// Elements beyond an input image that may be read: windows may exceed its edge by one pixel.
pub(super) fn slack(input: &PaddedImage) -> usize {
    input.line() + 1
}

/// Whether this computes the forward pass faster, and behind pooling the weight gradient.
pub(super) fn is_faster(shape: &ConvShape) -> bool {
    shape.channels == 1 && matches!(shape.kernel, 3 | 5) && shape.filter_len() <= SPAN
}

/// Computes the result of two rows of outputs, or of one if `rows` is 1, from those of a padded image on. `x` is followed by
/// [`slack`] elements.
#[inline(always)]
pub(super) fn rows<S: Simd, E: Storage>(
    simd: S,
    (shape, epilogue): (&ConvShape, &Epilogue),
    rows: usize,
    operands: (&[f32], &[f32], &[f32]),
    y: &mut [E],
    chosen: &mut [u8],
) {
    match shape.kernel {
        3 => rows_of::<S, E, 3>(simd, (shape, epilogue), rows, operands, y, chosen),
        5 => rows_of::<S, E, 5>(simd, (shape, epilogue), rows, operands, y, chosen),
        _ => unreachable!("a kernel that `is_faster` excludes"),
    }
}

#[inline(always)]
fn rows_of<S: Simd, E: Storage, const K: usize>(
    simd: S,
    (shape, epilogue): (&ConvShape, &Epilogue),
    rows: usize,
    (x, packed, bias): (&[f32], &[f32], &[f32]),
    y: &mut [E],
    chosen: &mut [u8],
) {
    let (filters, width, line) = (shape.filters, shape.out_width(), PaddedImage::input(shape).line());
    let is_pooled = epilogue.pool.is_some();
    let columns = if is_pooled { y.len() / filters } else { width.div_ceil(2) };
    assert!(matches!(rows, 1 | 2) && (is_pooled || y.len() == rows * width * filters), "rows of outputs");
    assert!(
        columns <= width.div_ceil(2) && (!is_pooled || chosen.len() >= y.len()),
        "a row of half the width"
    );
    assert!(columns == 0 || x.len() > (K + 1) * line, "rows of an image and slack");
    assert!(
        packed.len() >= filters.div_ceil(PANEL) * K * K * PANEL && bias.len() == filters,
        "filters and bias"
    );
    for column in 0..columns {
        let window = Window {
            epilogue,
            // SAFETY: column 2·`column` lies within the first row of the image.
            x: unsafe { x.as_ptr().add(2 * column) },
            line,
            packed,
            bias,
            rows,
            columns: (width - 2 * column).min(2),
            to: if is_pooled { column } else { 2 * column } * filters,
            row: width * filters,
        };
        let mut first = 0;
        while first < filters {
            // SAFETY: the window ends at most one pixel beyond the image's rows. Vectors of filters lie in panels, and
            // the elements of the results that are written exist.
            unsafe {
                first += S::LANES
                    * if first + S::LANES < filters {
                        window.compute::<S, E, K, GROUP>(simd, first, y, chosen)
                    } else {
                        window.compute::<S, E, K, 1>(simd, first, y, chosen)
                    };
            }
        }
    }
}

/// The operands and results of a window of 2×2 outputs.
#[derive(Clone, Copy)]
struct Window<'a> {
    epilogue: &'a Epilogue,
    /// The first input.
    x: *const f32,
    /// Inputs of a row.
    line: usize,
    packed: &'a [f32],
    bias: &'a [f32],
    /// Rows and columns of the window inside the image, 1 or 2.
    rows: usize,
    columns: usize,
    /// The first element of the result.
    to: usize,
    /// Elements of a row of outputs.
    row: usize,
}

impl Window<'_> {
    /// Computes the results of `V` vectors of filters from `first` on, and returns `V`.
    ///
    /// # Safety
    /// `x` has K+1 rows of K+1 elements. The first lane of every vector is a filter, and `packed` has whole panels. The
    /// results exist.
    #[inline(always)]
    unsafe fn compute<S: Simd, E: Storage, const K: usize, const V: usize>(
        self,
        simd: S,
        first: usize,
        y: &mut [E],
        chosen: &mut [u8],
    ) -> usize {
        let Window { epilogue, x, line, packed, bias, .. } = self;
        let filters = bias.len();
        // SAFETY: the caller's promise.
        unsafe {
            let mut weights = [packed.as_ptr(); V];
            let mut sums = [[simd.splat(0.0); V]; 4];
            for (vector, weights) in weights.iter_mut().enumerate() {
                let filter = first + vector * S::LANES;
                *weights = packed.as_ptr().add(filter / PANEL * K * K * PANEL + filter % PANEL);
                let room = filters - filter;
                let bias = f32::load_at_least(simd, bias.as_ptr().add(filter), room.min(S::LANES), room);
                for sum in &mut sums {
                    sum[vector] = bias;
                }
            }
            // The first row of inputs is seen by the first row of outputs only, the last one by the second only.
            sums = add_row::<S, K, V, true, false>(simd, x, weights, sums);
            for i in 1..K {
                let weights = weights.map(|weights| weights.add(i * K * PANEL));
                sums = add_row::<S, K, V, true, true>(simd, x.add(i * line), weights, sums);
            }
            let beyond = weights.map(|weights| weights.add(K * K * PANEL));
            sums = add_row::<S, K, V, false, true>(simd, x.add(K * line), beyond, sums);
            for (vector, filter) in (0..V).zip((first..).step_by(S::LANES)) {
                let count = S::LANES.min(filters - filter);
                let outputs = [sums[0][vector], sums[1][vector], sums[2][vector], sums[3][vector]];
                if epilogue.pool.is_some() {
                    let (right, below) = (self.columns == 2, self.rows == 2);
                    let or_first = |exists, output| if exists { output } else { outputs[0] };
                    let outputs = [
                        outputs[0],
                        or_first(right, outputs[1]),
                        or_first(below, outputs[2]),
                        or_first(right && below, outputs[3]),
                    ];
                    pool_window(simd, epilogue, outputs, (&mut *y, &mut *chosen), self.to + filter, count);
                } else {
                    self.store(simd, outputs, y, filter, count);
                }
            }
        }
        V
    }

    /// Applies the activation to outputs and writes them.
    ///
    /// # Safety
    /// The results exist.
    #[inline(always)]
    unsafe fn store<S: Simd, E: Storage>(
        self,
        simd: S,
        outputs: [S::F32; 4],
        y: &mut [E],
        filter: usize,
        count: usize,
    ) {
        let slope = simd.splat(self.epilogue.slope.unwrap_or(1.0));
        let pixel = self.bias.len();
        for (at, &output) in outputs.iter().enumerate() {
            let (row, column) = (at / 2, at % 2);
            if row < self.rows && column < self.columns {
                let value = activate(simd, output, slope);
                // SAFETY: the caller's promise. The next pixel's results may have been written already.
                unsafe {
                    let to = y.as_mut_ptr().add(self.to + row * self.row + column * pixel + filter);
                    E::store_at_least(simd, value, to, count, count);
                }
            }
        }
    }
}

/// Adds the products with one row of inputs to the sums of the outputs of a window: row `FIRST` by the row of the filters
/// at `weights`, row `SECOND` by the one before.
///
/// # Safety
/// `x` has K+1 elements, and the rows of filters exist.
#[inline(always)]
unsafe fn add_row<S: Simd, const K: usize, const V: usize, const FIRST: bool, const SECOND: bool>(
    simd: S,
    x: *const f32,
    weights: [*const f32; V],
    mut sums: [[S::F32; V]; 4],
) -> [[S::F32; V]; 4] {
    for j in 0..K + 1 {
        // SAFETY: the caller's promise.
        unsafe {
            let value = simd.splat(*x.add(j));
            for (row, computed) in [(0, FIRST), (1, SECOND)] {
                for column in 0..2 {
                    if computed && (column..K + column).contains(&j) {
                        for vector in 0..V {
                            let weight =
                                weights[vector].add((j - column) * PANEL).wrapping_sub(row * K * PANEL);
                            let sum = &mut sums[2 * row + column][vector];
                            *sum = simd.mul_add(value, simd.load(weight), *sum);
                        }
                    }
                }
            }
        }
    }
    sums
}

/// Elements of memory for [`add_image`].
pub(super) fn memory_len(shape: &ConvShape, epilogue: &Epilogue) -> usize {
    let (rows, columns) = epilogue.result(shape);
    lines(4 * PaddedImage::input(shape).len()) + 2 * rows * columns * GROUP * MAX_LANES
}

/// Adds the gradients from one image to those of the weights, \[K, K, filters in whole cache lines\], and to `bias`. `x` is
/// followed by [`slack`] elements; `memory` may contain anything.
#[inline(always)]
pub(super) fn add_image<S: Simd, E: Storage>(
    simd: S,
    (shape, epilogue): (&ConvShape, &Epilogue),
    x: &[f32],
    from: Results<'_, E>,
    memory: &mut [f32],
    dw: &mut [f32],
    bias: &mut [f32],
) {
    let (filters, input) = (shape.filters, PaddedImage::input(shape));
    let (line, len) = (input.line(), input.len());
    let (rows, columns) = epilogue.result(shape);
    let windows = rows * columns;
    let results = windows * filters;
    assert!(from.y.len() == results && from.dy.len() == results && from.chosen.len() == results, "an image");
    assert!(
        x.len() > len + line && memory.len() >= memory_len(shape, epilogue),
        "an image, slack and memory"
    );
    assert!(dw.len() >= shape.filter_len() * lines(filters) && bias.len() == filters, "gradients");
    let (fours, memory) = memory.split_at_mut(lines(4 * len));
    for (at, four) in fours.as_chunks_mut().0.iter_mut().take(len).enumerate() {
        *four = [x[at], x[at + 1], x[at + line], x[at + line + 1]];
    }
    let (gradients, places) = memory.split_at_mut(windows * GROUP * MAX_LANES);
    let mut first = 0;
    while first < filters {
        let group = Group { shape, epilogue, first, rows, columns };
        // SAFETY: the lengths were checked; the first lane of every vector is a filter.
        unsafe {
            first += S::LANES
                * if first + S::LANES < filters {
                    group.add::<S, E, GROUP>(simd, fours, from, (gradients, places), dw, bias)
                } else {
                    group.add::<S, E, 1>(simd, fours, from, (gradients, places), dw, bias)
                };
        }
    }
}

/// Vectors of filters from `first` on.
#[derive(Clone, Copy)]
struct Group<'a> {
    shape: &'a ConvShape,
    epilogue: &'a Epilogue,
    first: usize,
    /// Windows.
    rows: usize,
    columns: usize,
}

impl Group<'_> {
    /// Adds the gradients of `V` vectors of filters, and returns `V`.
    ///
    /// # Safety
    /// The lengths are those that [`add_image`] checks.
    #[inline(always)]
    unsafe fn add<S: Simd, E: Storage, const V: usize>(
        self,
        simd: S,
        fours: &[f32],
        from: Results<'_, E>,
        (gradients, places): (&mut [f32], &mut [f32]),
        dw: &mut [f32],
        bias: &mut [f32],
    ) -> usize {
        // SAFETY: the caller's promise.
        unsafe {
            self.collect::<S, E, V>(simd, from, (gradients, places), bias);
            match self.shape.kernel {
                3 => simd.call(Sum::<3, V> { group: self, fours, gradients, places, dw }),
                5 => simd.call(Sum::<5, V> { group: self, fours, gradients, places, dw }),
                _ => unreachable!("a kernel that `is_faster` excludes"),
            }
        }
        V
    }

    /// Writes the gradients before the activation, and the chosen places, window by window, and adds them to `bias`.
    ///
    /// # Safety
    /// As for [`add`](Self::add).
    #[inline(always)]
    unsafe fn collect<S: Simd, E: Storage, const V: usize>(
        self,
        simd: S,
        from: Results<'_, E>,
        (gradients, places): (&mut [f32], &mut [f32]),
        bias: &mut [f32],
    ) {
        let filters = self.shape.filters;
        let zero = simd.splat(0.0);
        let slope = simd.splat(self.epilogue.slope.unwrap_or(1.0));
        for vector in 0..V {
            let filter = self.first + vector * S::LANES;
            let count = S::LANES.min(filters - filter);
            let mut total = zero;
            for row in 0..self.rows {
                let mut sum = zero;
                for window in row * self.columns..(row + 1) * self.columns {
                    let at = window * filters + filter;
                    // SAFETY: the caller's promise. Sums of lanes beyond the last filter do not matter.
                    unsafe {
                        let load = |values: &[E]| {
                            E::load_at_least(simd, values.as_ptr().add(at), count, values.len() - at)
                        };
                        let gradient = before_activation(simd, load(from.y), load(from.dy), slope);
                        sum = simd.add(sum, gradient);
                        let to = (window * V + vector) * S::LANES;
                        simd.store(gradient, gradients.as_mut_ptr().add(to));
                        let chosen = if at + S::LANES <= from.chosen.len() {
                            simd.load_places(from.chosen.as_ptr().add(at))
                        } else {
                            let mut bytes = [0; MAX_LANES];
                            bytes[..count].copy_from_slice(&from.chosen[at..at + count]);
                            simd.load_places(bytes.as_ptr())
                        };
                        simd.store(chosen, places.as_mut_ptr().add(to));
                    }
                }
                total = simd.add(total, sum);
            }
            // SAFETY: `count` filters.
            unsafe {
                let to = bias.as_mut_ptr().add(filter);
                let before = simd.load_first(to.cast_const(), count);
                simd.store_first(simd.add(before, total), to, count);
            }
        }
    }
}

/// Adds the products of gradients and inputs to the gradients of the weights of `V` vectors of filters, those of one kernel
/// row at a time. Constructed only by [`Group::add`], and [called](Simd::call), so that sums have all registers.
struct Sum<'a, const K: usize, const V: usize> {
    group: Group<'a>,
    fours: &'a [f32],
    gradients: &'a [f32],
    places: &'a [f32],
    dw: &'a mut [f32],
}

impl<const K: usize, const V: usize> Task for Sum<'_, K, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Sum { group: Group { shape, first, rows, columns, .. }, fours, gradients, places, dw } = self;
        let (line, stride) = (PaddedImage::input(shape).line(), lines(shape.filters));
        for u in 0..K {
            let mut sums = [[simd.splat(0.0); V]; K];
            // SAFETY: whoever constructed it promises the lengths: a window's inputs begin within the image, and the rows of
            // weights have whole cache lines.
            unsafe {
                for row in 0..rows {
                    let mut at = row * columns * V * S::LANES;
                    let mut seen = fours.as_ptr().add(4 * (2 * row + u) * line);
                    for _ in 0..columns {
                        let (mut gradient, mut place) = ([simd.splat(0.0); V], [simd.splat(0.0); V]);
                        for vector in 0..V {
                            gradient[vector] = simd.load(gradients.as_ptr().add(at + vector * S::LANES));
                            place[vector] = simd.load(places.as_ptr().add(at + vector * S::LANES));
                        }
                        for (v, sums) in sums.iter_mut().enumerate() {
                            let four = simd.load_four(seen.add(4 * v));
                            for vector in 0..V {
                                let input = simd.pick(four, place[vector]);
                                sums[vector] = simd.mul_add(gradient[vector], input, sums[vector]);
                            }
                        }
                        at += V * S::LANES;
                        seen = seen.add(8);
                    }
                }
                for (v, sums) in sums.iter().enumerate() {
                    for (vector, sum) in sums.iter().enumerate() {
                        let to = dw.as_mut_ptr().add((u * K + v) * stride + first + vector * S::LANES);
                        simd.store(simd.add(simd.load(to.cast_const()), *sum), to);
                    }
                }
            }
        }
    }
}
