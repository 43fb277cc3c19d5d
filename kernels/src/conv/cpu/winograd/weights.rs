//! Transforms between filters and values at the points, packed for the products.
//!
//! The values of all filters at a point are a matrix \[C, F\]; for the input's gradient its transpose \[F, C\]. Both
//! are stored in panels of [`PANEL`] columns, with all points of a panel together, so that each thread computes
//! panels of its own. The distance between two points' parts of a panel is a cache line more than their length, as between
//! matrices of tiles (see [`tiles`](super::tiles)).

#![expect(clippy::needless_range_loop, reason = "an index is a place in a tile, in several arrays at once")]

use super::points::{MAX_TAPS, Points};
use crate::AlignedVec;
use crate::conv::ConvShape;
use crate::gemm::prefetch::Prefetch;
use crate::gemm::tile::PANEL;
use crate::simd::{MAX_LANES, Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// The orientation of the matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Orientation {
    /// \[C, F\]
    Forward,
    /// \[F, C\]
    Backward,
}

/// Elements between a point's part of a panel and the next one: a cache line.
const POINT_PADDING: usize = 16;

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
        let point = depth * PANEL + POINT_PADDING;
        let panel = points * point;
        Filters { orientation, values: AlignedVec::zeroed(columns.div_ceil(PANEL) * panel), point, panel }
    }

    /// The panels at one point, and the distance between them.
    pub(super) fn at(&self, point: usize) -> (&[f32], usize) {
        (&self.values[point * self.point..], self.panel)
    }

    /// What a product prefetches before that with the panels at `point`; nothing after the last one.
    pub(super) fn ahead(&self, point: usize) -> Prefetch {
        let start = self.values.as_ptr().wrapping_add(point * self.point);
        let rows = if (point + 1) * self.point <= self.panel { self.values.len() / self.panel } else { 0 };
        Prefetch { start, row: self.panel, rows, run: self.point - POINT_PADDING }
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
    /// Elements from one point to the next.
    point: usize,
}

/// Calls a method with the numbers of points and taps as constants.
macro_rules! with_extents {
    ($task:ident.$method:ident, $simd:ident) => {
        match ($task.points.count(), $task.points.taps) {
            (4, 3) => $task.$method::<S, 4, 3>($simd),
            (6, 3) => $task.$method::<S, 6, 3>($simd),
            (8, 3) => $task.$method::<S, 8, 3>($simd),
            (6, 5) => $task.$method::<S, 6, 5>($simd),
            (8, 5) => $task.$method::<S, 8, 5>($simd),
            (points, taps) => unreachable!("{taps} taps at {points} points"),
        }
    };
}

impl Task for Transform<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        with_extents!(self.transform, simd);
    }
}

impl Transform<'_> {
    #[inline(always)]
    fn transform<S: Simd, const POINTS: usize, const TAPS: usize>(self, simd: S) {
        let Transform { shape, points, weights, orientation, first, panel, point } = self;
        let depth = (point - POINT_PADDING) / PANEL;
        let mut taps: Taps = [[[0.0; PANEL]; MAX_TAPS]; MAX_TAPS];
        let zero = simd.splat(0.0);
        for k in 0..depth {
            read_taps(shape, weights, orientation, first, k, &mut taps);
            if orientation == Orientation::Backward {
                // The next row's taps: they are contiguous, but far from these.
                let next = ((k + 1) * shape.channels + first) * TAPS * TAPS;
                for line in (0..PANEL * TAPS * TAPS).step_by(MAX_LANES) {
                    simd.prefetch(weights.as_ptr().wrapping_add(next + line));
                }
            }
            let rows = &mut panel[k * PANEL..];
            assert!(rows.len() >= (POINTS * POINTS - 1) * point + PANEL, "a panel's points");
            for lane in (0..PANEL).step_by(S::LANES) {
                let mut half = [[zero; TAPS]; POINTS];
                for v in 0..TAPS {
                    let mut column = [zero; TAPS];
                    for u in 0..TAPS {
                        // SAFETY: lanes of a panel.
                        column[u] = unsafe { simd.load(taps[u][v].as_ptr().add(lane)) };
                    }
                    for i in 0..POINTS {
                        half[i][v] = weighted(simd, &column, &points.filter[i]);
                    }
                }
                for (at, (i, j)) in (0..POINTS * POINTS).map(|at| (at, (at / POINTS, at % POINTS))) {
                    let value = weighted(simd, &half[i], &points.filter[j]);
                    let to = rows.as_mut_ptr().wrapping_add(at * point + lane);
                    // A later row's: processors do not prefetch so many rows at once.
                    simd.prefetch(to.wrapping_add(4 * PANEL));
                    // SAFETY: `rows` was found to have a panel's row for each of the points.
                    unsafe { simd.store(value, to) };
                }
            }
        }
    }
}

/// `Σ values[k] · factors[k]`, in this order and without fused multiply-adds: the same bits on all processors.
#[inline(always)]
fn weighted<S: Simd, const TAPS: usize>(
    simd: S,
    values: &[S::F32; TAPS],
    factors: &[f32; MAX_TAPS],
) -> S::F32 {
    let mut sum = simd.splat(0.0);
    for k in 0..TAPS {
        sum = simd.add(sum, simd.mul(values[k], simd.splat(factors[k])));
    }
    sum
}

/// Reads the taps of row `k` of the matrix, columns from `first`.
#[inline(always)]
fn read_taps(
    shape: &ConvShape,
    weights: &[f32],
    orientation: Orientation,
    first: usize,
    k: usize,
    taps: &mut Taps,
) {
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
    fn run<S: Simd>(self, simd: S) {
        with_extents!(self.transform, simd);
    }
}

impl WeightGradients<'_> {
    #[inline(always)]
    fn transform<S: Simd, const POINTS: usize, const TAPS: usize>(self, simd: S) {
        let WeightGradients { shape, points, parts, stride, first, dw } = self;
        let (filters, filter_len) = (shape.filters, shape.filter_len());
        let width = PANEL.min(filters - first);
        let zero = simd.splat(0.0);
        assert!(width.is_multiple_of(S::LANES), "channels are whole vectors");
        for part in parts {
            let last = (POINTS * POINTS - 1) * stride + (shape.channels - 1) * filters + first + width;
            assert!(part.len() >= last, "gradients at the points");
        }
        let mut values = [0.0; MAX_LANES];
        for channel in 0..shape.channels {
            for lane in (0..width).step_by(S::LANES) {
                let at = channel * filters + first + lane;
                let mut half = [[zero; POINTS]; TAPS];
                for j in 0..POINTS {
                    let mut sums = [zero; TAPS];
                    for i in 0..POINTS {
                        let mut value = zero;
                        for part in parts {
                            let from = part.as_ptr().wrapping_add((i * POINTS + j) * stride + at);
                            // The next channel's: processors do not prefetch so many rows at once.
                            simd.prefetch(from.wrapping_add(filters));
                            // SAFETY: every part was found to have an element for each point, channel and filter.
                            value = simd.add(value, unsafe { simd.load(from) });
                        }
                        for u in 0..TAPS {
                            sums[u] = simd.add(sums[u], simd.mul(value, simd.splat(points.filter[i][u])));
                        }
                    }
                    for u in 0..TAPS {
                        half[u][j] = sums[u];
                    }
                }
                for (u, v) in (0..TAPS * TAPS).map(|at| (at / TAPS, at % TAPS)) {
                    let mut value = zero;
                    for j in 0..POINTS {
                        let factor = simd.splat(points.filter[j][v]);
                        value = simd.add(value, simd.mul(half[u][j], factor));
                    }
                    // SAFETY: no vector has more lanes.
                    unsafe { simd.store(value, values.as_mut_ptr()) };
                    for (filter, value) in (lane..).zip(&values[..S::LANES]) {
                        dw[filter * filter_len + (channel * TAPS + u) * TAPS + v] = *value;
                    }
                }
            }
        }
    }
}
