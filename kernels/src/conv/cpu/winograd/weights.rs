//! Transforms between filters and values at the points, packed for the products.
//!
//! The values of all filters at a point are a matrix \[C, F\]; for the input's gradient its transpose \[F, C\]. Both
//! are stored in panels of [`PANEL`] columns, with all points of a panel together, so that each thread computes
//! panels of its own.

use super::points::{MAX_POINTS, MAX_TAPS, Points};
use crate::AlignedVec;
use crate::conv::ConvShape;
use crate::gemm::tile::PANEL;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// The orientation of the matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Orientation {
    /// \[C, F\]
    Forward,
    /// \[F, C\]
    Backward,
}

/// Taps of [`PANEL`] filters for one channel, or of one filter for [`PANEL`] channels.
type Taps = [[[f32; PANEL]; MAX_TAPS]; MAX_TAPS];

/// Filters at the points.
#[derive(Debug)]
pub(super) struct Filters {
    orientation: Orientation,
    values: AlignedVec,
    /// Elements of a point's panel.
    point: usize,
    /// Elements from one panel to the next.
    panel: usize,
}

impl Filters {
    /// Memory for the filters of `shape` at `points` points in two dimensions.
    pub(super) fn new(shape: &ConvShape, points: usize, orientation: Orientation) -> Self {
        let (depth, columns) = match orientation {
            Orientation::Forward => (shape.channels, shape.filters),
            Orientation::Backward => (shape.filters, shape.channels),
        };
        let point = depth * PANEL;
        let panel = points * point;
        Filters { orientation, values: AlignedVec::zeroed(columns.div_ceil(PANEL) * panel), point, panel }
    }

    /// The panels at one point, and the distance between them.
    pub(super) fn at(&self, point: usize) -> (&[f32], usize) {
        (&self.values[point * self.point..], self.panel)
    }

    /// Transforms `weights` \[F, C, K, K\]: `u = G w Gᵀ`.
    pub(super) fn transform(
        &mut self,
        threads: &Threads,
        shape: &ConvShape,
        points: &Points,
        weights: &[f32],
    ) {
        let Filters { orientation, point, panel, .. } = *self;
        let panels = self.values.len() / panel;
        threads.divide(panels, 1, Rows::new(&mut self.values, panel), |range, part| {
            for (index, panel) in range.zip(part.values.chunks_exact_mut(panel)) {
                dispatch(Transform {
                    shape,
                    points,
                    weights,
                    orientation,
                    first: index * PANEL,
                    panel,
                    point,
                });
            }
        });
    }
}

/// One panel's part of [`Filters::transform`].
struct Transform<'a> {
    shape: &'a ConvShape,
    points: &'a Points,
    weights: &'a [f32],
    orientation: Orientation,
    /// The panel's first column.
    first: usize,
    panel: &'a mut [f32],
    /// Elements of a point.
    point: usize,
}

impl Task for Transform<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Transform { shape, points, weights, orientation, first, panel, point } = self;
        let (n, taps) = (points.count(), points.taps);
        for (k, row) in (0..point / PANEL).map(|k| (k, k * PANEL)) {
            let of_filters = read_taps(shape, weights, orientation, first, k);
            let mut half = [[[0.0; PANEL]; MAX_TAPS]; MAX_POINTS];
            for (half, factors) in half.iter_mut().zip(&points.filter).take(n) {
                for (v, half) in half.iter_mut().enumerate().take(taps) {
                    for (taps, factor) in of_filters.iter().zip(factors).take(taps) {
                        add_scaled(half, &taps[v], *factor);
                    }
                }
            }
            for (at, (i, j)) in (0..n * n).map(|at| (at, (at / n, at % n))) {
                let mut value = [0.0; PANEL];
                for (half, factor) in half[i].iter().zip(&points.filter[j]).take(taps) {
                    add_scaled(&mut value, half, *factor);
                }
                panel[at * point + row..][..PANEL].copy_from_slice(&value);
            }
        }
    }
}

/// `sum += values · factor`.
#[inline(always)]
fn add_scaled(sum: &mut [f32; PANEL], values: &[f32; PANEL], factor: f32) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += value * factor;
    }
}

/// The taps of row `k` of the matrix, columns from `first`.
#[inline(always)]
fn read_taps(shape: &ConvShape, weights: &[f32], orientation: Orientation, first: usize, k: usize) -> Taps {
    let mut taps = [[[0.0; PANEL]; MAX_TAPS]; MAX_TAPS];
    let columns = match orientation {
        Orientation::Forward => shape.filters,
        Orientation::Backward => shape.channels,
    };
    for column in first..columns.min(first + PANEL) {
        let (filter, channel) = match orientation {
            Orientation::Forward => (column, k),
            Orientation::Backward => (k, column),
        };
        let kernel = shape.kernel;
        let source = &weights[(filter * shape.channels + channel) * kernel * kernel..][..kernel * kernel];
        for (u, row) in source.chunks_exact(kernel).enumerate() {
            for (v, value) in row.iter().enumerate() {
                taps[u][v][column - first] = *value;
            }
        }
    }
    taps
}

/// Overwrites the gradient of the weights \[F, C, K, K\] with that computed from the gradients at the points, `dw =
/// Gᵀ du G`. The `parts` are summed; each has a matrix \[C, F\] for every point, `stride` elements apart.
pub(super) fn weight_gradients(
    threads: &Threads,
    shape: &ConvShape,
    points: &Points,
    parts: &[AlignedVec],
    stride: usize,
    dw: &mut [f32],
) {
    let filter_len = shape.filter_len();
    let panels = shape.filters.div_ceil(PANEL);
    threads.divide(panels, 1, Rows::new(dw, PANEL * filter_len), |range, dw| {
        for (panel, dw) in range.zip(dw.values.chunks_mut(PANEL * filter_len)) {
            dispatch(WeightGradients { shape, points, parts, stride, first: panel * PANEL, dw });
        }
    });
}

/// [`weight_gradients`] of one panel of filters.
struct WeightGradients<'a> {
    shape: &'a ConvShape,
    points: &'a Points,
    parts: &'a [AlignedVec],
    stride: usize,
    /// The panel's first filter.
    first: usize,
    dw: &'a mut [f32],
}

impl Task for WeightGradients<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let WeightGradients { shape, points, parts, stride, first, dw } = self;
        let (n, kernel, filter_len) = (points.count(), points.taps, shape.filter_len());
        let width = PANEL.min(shape.filters - first);
        for channel in 0..shape.channels {
            let mut half = [[[0.0; PANEL]; MAX_POINTS]; MAX_TAPS];
            for (i, j) in (0..n * n).map(|at| (at / n, at % n)) {
                let mut value = [0.0; PANEL];
                for part in parts {
                    let from = &part[(i * n + j) * stride + channel * shape.filters + first..][..width];
                    value.iter_mut().zip(from).for_each(|(sum, value)| *sum += value);
                }
                for (half, factor) in half.iter_mut().zip(&points.filter[i]).take(kernel) {
                    add_scaled(&mut half[j], &value, *factor);
                }
            }
            for (u, v) in (0..kernel * kernel).map(|at| (at / kernel, at % kernel)) {
                let mut value = [0.0; PANEL];
                for (half, factors) in half[u].iter().zip(&points.filter).take(n) {
                    add_scaled(&mut value, half, factors[v]);
                }
                for (filter, value) in value[..width].iter().enumerate() {
                    dw[filter * filter_len + (channel * kernel + u) * kernel + v] = *value;
                }
            }
        }
    }
}
