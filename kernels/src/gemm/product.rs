//! The matrix product that all CPU kernels use.
//!
//! Dense layers, all three passes of a direct convolution and the products between the transforms of a Winograd
//! convolution are sums `c[r,j] = Σ_s Σ_k a[r,k,s] · b[k,j,s]` that differ only in the layout of the operands. `a` is
//! read one element at a time, each broadcast to all lanes, so its three strides are free. `b` is read one vector at
//! a time, so its columns are contiguous. The product is computed in register tiles (`tile`).

use super::block::Block;
use super::prefetch::Prefetch;
use super::tile::{InVectors, Strip};
use crate::simd::{Simd, Task, dispatch};

/// Columns of a panel in packed operands: two of the widest vectors.
pub(crate) const PANEL: usize = 2 * crate::simd::MAX_LANES;

/// The operand whose elements are broadcast to all lanes, at `row·r + depth·k + segment·s`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row: usize,
    pub(crate) depth: usize,
    pub(crate) segment: usize,
}

/// The operand with contiguous columns: column j of a panel (see [`PANEL`]) is at `depth·k + segment·s + j`, and
/// panels are `panel` elements apart. `panel` is [`PANEL`] for a matrix with contiguous rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Right<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) depth: usize,
    pub(crate) segment: usize,
    pub(crate) panel: usize,
}

/// The initial value of the sums.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'a> {
    /// Zero.
    Zero,
    /// The contents of the destination.
    Existing,
    /// A value for each column.
    Bias(&'a [f32]),
}

/// Several products with the same right operand, whose left operands and destinations are these numbers of elements
/// apart: rows of an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lines {
    pub(crate) count: usize,
    pub(crate) left: usize,
    pub(crate) c: usize,
}

impl Lines {
    const ONE: Lines = Lines { count: 1, left: 0, c: 0 };
}

/// One product and its extents.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) segments: usize,
    pub(crate) left: Left<'a>,
    pub(crate) right: Right<'a>,
    pub(crate) start: Start<'a>,
    /// Slope of an activation for negative results; 1 for none.
    pub(crate) slope: f32,
}

impl Product<'_> {
    /// Writes the product to `c`, whose rows are `row` elements apart.
    ///
    /// # Panics
    /// If an operand or `c` is too short.
    pub(crate) fn compute(&self, c: &mut [f32], row: usize) {
        self.compute_prefetching(c, row, Prefetch::NONE);
    }

    /// As [`compute`](Self::compute), prefetching other memory meanwhile.
    pub(crate) fn compute_prefetching(&self, c: &mut [f32], row: usize, prefetch: Prefetch) {
        dispatch(Compute { product: *self, lines: Lines::ONE, c, row, prefetch });
    }

    /// Writes the product to the upper left corner of `c`, prefetching other memory meanwhile.
    ///
    /// # Panics
    /// If an operand or `c` is too small.
    pub(crate) fn compute_block(&self, c: &mut Block<'_>, prefetch: Prefetch) {
        assert!(self.rows <= c.rows() && self.columns <= c.columns(), "a product's destination");
        let (corner, row) = (c.corner(), c.row_stride());
        // The block has at least the extents of the product.
        dispatch(AtCorner(ComputeAt { product: *self, lines: Lines::ONE, c: corner, row, prefetch }));
    }

    /// Computes the product for several lines, within a task: all lines for some columns, then for the next ones.
    #[inline(always)]
    pub(crate) fn compute_lines<S: Simd>(&self, simd: S, lines: Lines, c: &mut [f32], row: usize) {
        Compute { product: *self, lines, c, row, prefetch: Prefetch::NONE }.run(simd);
    }

    /// Writes the product to memory from `c` on.
    ///
    /// # Safety
    /// For each line, rows `row` elements apart with as many columns as the product has can be written.
    #[inline(always)]
    unsafe fn compute_at<S: Simd>(&self, simd: S, lines: Lines, c: *mut f32, row: usize, prefetch: Prefetch) {
        let Product { rows, columns, depth, segments, left, right, start, .. } = *self;
        if rows == 0 || columns == 0 || lines.count == 0 {
            return;
        }
        if let Start::Bias(bias) = start {
            assert!(bias.len() >= columns, "a product's bias");
        }
        if depth > 0 && segments > 0 {
            let last = (depth - 1, segments - 1);
            let end = (lines.count - 1) * lines.left
                + (rows - 1) * left.row
                + last.0 * left.depth
                + last.1 * left.segment;
            assert!(left.values.len() > end, "a product's left operand");
            let (panel, column) = ((columns - 1) / PANEL, (columns - 1) % PANEL);
            let end = panel * right.panel + last.0 * right.depth + last.1 * right.segment + column;
            assert!(right.values.len() > end, "a product's right operand");
            assert!(panel == 0 || right.panel >= PANEL, "panels of a product's right operand");
        }
        let four = rows <= S::WIDE_ROWS && 2 * S::LANES == PANEL;
        // Divides the rows into tiles of about equal height.
        let tiles = rows.div_ceil(S::ROWS);
        let all = tiles * columns.div_ceil(2 * S::LANES);
        let (mut column, mut done) = (0, 0);
        while column < columns {
            let strip = Strip { product: self, lines, c, row, column, tiles, prefetch, done, all };
            let vectors = match columns - column {
                rest if rest <= S::LANES => {
                    simd.call(InVectors::<1>(strip));
                    1
                }
                rest if four && rest >= 4 * S::LANES => {
                    simd.call(InVectors::<4>(strip));
                    4
                }
                _ => {
                    simd.call(InVectors::<2>(strip));
                    2
                }
            };
            column += vectors * S::LANES;
            done += lines.count * tiles;
        }
    }
}

struct Compute<'a> {
    product: Product<'a>,
    lines: Lines,
    c: &'a mut [f32],
    row: usize,
    prefetch: Prefetch,
}

impl Task for Compute<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Compute { product, lines, c, row, prefetch } = self;
        let Product { rows, columns, .. } = product;
        if rows == 0 || columns == 0 || lines.count == 0 {
            return;
        }
        assert!(row >= columns || rows == 1, "rows of {columns} columns {row} elements apart");
        let last = (lines.count - 1) * lines.c + (rows - 1) * row + columns - 1;
        assert!(c.len() > last, "a product's destination");
        // The last element exists, and so do all before it.
        simd.call(ComputeAt { product, lines, c: c.as_mut_ptr(), row, prefetch });
    }
}

/// A product whose destination was checked: constructed only where all its elements can be written. It is always
/// [called](Simd::call) and never inlined, because its tiles are most of the code of this crate: compiled once for each
/// instruction set.
struct ComputeAt<'a> {
    product: Product<'a>,
    lines: Lines,
    c: *mut f32,
    row: usize,
    prefetch: Prefetch,
}

impl Task for ComputeAt<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ComputeAt { product, lines, c, row, prefetch } = self;
        // SAFETY: whoever constructed it checked the destination.
        unsafe { product.compute_at(simd, lines, c, row, prefetch) }
    }
}

struct AtCorner<'a>(ComputeAt<'a>);

impl Task for AtCorner<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        simd.call(self.0);
    }
}

/// The number of register tiles of about equal height into which `rows` rows are divided.
pub(crate) fn tiles(rows: usize) -> usize {
    struct Tiles(usize);
    impl Task for Tiles {
        type Output = usize;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> usize {
            self.0.div_ceil(S::ROWS)
        }
    }
    dispatch(Tiles(rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(192))]
        #[test]
        fn a_product_sums_over_segments_and_depth(
            (rows, columns, depth, segments) in (1usize..40, 1usize..80, 0usize..50, 0usize..4),
            (a_rows_apart, packed, start) in (any::<bool>(), any::<bool>(), 0usize..3), leaky: bool, lines in 1usize..3,
        ) {
            let (row, step) = if a_rows_apart { (depth + 3, 1) } else { (1, rows + 2) };
            let left_segment = (rows + 3) * (depth + 3);
            let left_line = left_segment * segments.max(1) + 1;
            let left = random(left_line * lines, 1);
            let panels = columns.div_ceil(PANEL);
            let (right_depth, panel) = if packed { (PANEL, PANEL * depth * segments) } else { (columns, PANEL) };
            let right_segment = right_depth * depth;
            let right = random((panels * PANEL * depth * segments).max(columns * depth * segments), 2);
            let bias = random(columns, 3);
            let stride = columns + 5;
            let before = random(lines * rows * stride, 4);
            let slope = if leaky { 0.2 } else { 1.0 };
            let mut expected = Vec::new();
            for (at, &old) in before.iter().enumerate() {
                let (line, r, j) = (at / stride / rows, at / stride % rows, at % stride);
                if j >= columns {
                    expected.push(f64::from(old));
                    continue;
                }
                let mut sum = [0.0, f64::from(old), f64::from(bias[j])][start];
                for (s, k) in (0..segments * depth).map(|at| (at / depth, at % depth)) {
                    let a = left[line * left_line + r * row + k * step + s * left_segment];
                    let b = right[j / PANEL * panel + j % PANEL + k * right_depth + s * right_segment];
                    sum += f64::from(a) * f64::from(b);
                }
                expected.push(if sum > 0.0 { sum } else { sum * f64::from(slope) });
            }
            let product = Product {
                rows, columns, depth, segments, slope,
                left: Left { values: &left, row, depth: step, segment: left_segment },
                right: Right { values: &right, depth: right_depth, segment: right_segment, panel },
                start: [Start::Zero, Start::Existing, Start::Bias(&bias)][start],
            };
            let mut c = before.clone();
            dispatch(Compute { product, lines: Lines { count: lines, left: left_line, c: rows * stride }, c: &mut c, row: stride, prefetch: Prefetch::NONE });
            assert_close(&c, &expected, 1e-5);
        }
    }
}
