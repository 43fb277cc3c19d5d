//! Copies of f32 matrices as operands of an engine, rounded to nearest even.

use std::ops::Range;

use half::bf16;

use super::{DEPTH, SIDE};
use crate::gemm::prefetch::Prefetch;
use crate::gemm::transpose::Transpose;
use crate::simd::{Simd, Task, dispatch};
use crate::storage::convert;

/// Tiles for a depth.
pub(crate) fn steps(depth: usize) -> usize {
    depth.div_ceil(DEPTH)
}

/// Elements from one row to the next of a left operand: an odd number of whole tile rows, which are cache lines, so that
/// rows map to all cache sets.
pub(crate) fn row_stride(depth: usize) -> usize {
    (steps(depth) | 1) * DEPTH
}

/// Rounds a row of a left operand, and pads it with zeros.
pub(crate) fn round_row(from: &[f32], to: &mut [bf16]) {
    let (values, padding) = to.split_at_mut(from.len());
    convert(from, values);
    padding.fill(bf16::ZERO);
}

/// Packs up to 16 rows of a matrix, `row` elements apart, as the columns of a panel: `depth` elements of each, to
/// [`steps`] tiles. `rounded` is memory for as many elements.
///
/// # Panics
/// If a side is too short.
pub(crate) fn rows_as_panel(
    from: &[f32],
    rows: usize,
    depth: usize,
    row: usize,
    rounded: &mut [bf16],
    panel: &mut [bf16],
) {
    let padded = steps(depth) * DEPTH;
    let (rounded, panel) = (&mut rounded[..SIDE * padded], &mut panel[..SIDE * padded]);
    for (index, to) in rounded.chunks_exact_mut(padded.max(1)).enumerate() {
        match index {
            index if index < rows => round_row(&from[index * row..][..depth], to),
            _ => to.fill(bf16::ZERO),
        }
    }
    // A pair is moved as one element of 32 bits.
    let (from, to) = (bytemuck::cast_slice(rounded), bytemuck::cast_slice_mut(panel));
    Transpose { from, rows: SIDE, columns: padded / 2, row: padded / 2 }.to(to, SIDE);
}

/// Some columns of a row-major matrix as panels: its rows are the depth.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowPairs<'a> {
    /// From the first column on.
    pub(crate) from: &'a [f32],
    /// Elements from one row to the next.
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements from one panel to the next.
    pub(crate) panel: usize,
}

impl RowPairs<'_> {
    /// Pairs of rows of a panel, with those that are padding.
    pub(crate) fn pairs(&self) -> usize {
        steps(self.rows) * DEPTH / 2
    }

    /// Writes the panels that have some of the columns, and pads them to 16 columns and whole tiles.
    ///
    /// # Panics
    /// If a side is too short.
    pub(crate) fn pack(&self, panels: &mut [bf16]) {
        self.pack_part(0..self.pairs(), panels);
    }

    /// As [`pack`](Self::pack), but writes only some pairs of rows.
    pub(crate) fn pack_part(&self, pairs: Range<usize>, panels: &mut [bf16]) {
        dispatch(PackPairs { matrix: *self, pairs, panels });
    }

    /// The rows of some pairs, to prefetch before they are packed.
    pub(crate) fn prefetch(&self, pairs: Range<usize>) -> Prefetch {
        let rows = (2 * pairs.start).min(self.rows)..(2 * pairs.end).min(self.rows);
        let start = self.from.as_ptr().wrapping_add(rows.start * self.row);
        Prefetch { start, row: self.row, rows: rows.len(), run: self.columns }
    }
}

/// Rounds two rows of a panel to its pairs.
#[inline(always)]
pub(crate) fn store_pairs<S: Simd>(
    simd: S,
    even: &[f32; SIDE],
    odd: &[f32; SIDE],
    to: &mut [bf16; 2 * SIDE],
) {
    for column in (0..SIDE).step_by(S::LANES) {
        // SAFETY: both rows have 16 columns, and `to` as many pairs.
        unsafe {
            let [even, odd] = [even, odd].map(|row| simd.load(row.as_ptr().add(column)));
            simd.store_bf16_pairs(even, odd, to.as_mut_ptr().add(2 * column));
        }
    }
}

struct PackPairs<'a, 'b> {
    matrix: RowPairs<'a>,
    pairs: Range<usize>,
    panels: &'b mut [bf16],
}

impl Task for PackPairs<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PackPairs { matrix, pairs, panels } = self;
        let RowPairs { from, row, rows, columns, panel } = matrix;
        let len = matrix.pairs() * 2 * SIDE;
        assert!(panel >= len || columns <= SIDE, "panels of {len} elements {panel} elements apart");
        for pair in pairs {
            // No arrays are mapped here: the function that does it is not always inlined.
            let line = |at: usize| if at < rows { &from[at * row..][..columns] } else { &[] };
            let (even, odd) = (line(2 * pair), line(2 * pair + 1));
            for (index, first) in (0..columns).step_by(SIDE).enumerate() {
                let to: &mut [bf16; 2 * SIDE] =
                    panels[index * panel + pair * 2 * SIDE..].first_chunk_mut().expect("a pair of a panel");
                match (chunk(even, first), chunk(odd, first)) {
                    (Some(even), Some(odd)) => store_pairs(simd, even, odd, to),
                    _ => store_pairs(simd, &padded(even, first), &padded(odd, first), to),
                }
            }
        }
    }
}

/// The 16 elements of a line from `first` on, if there are as many.
fn chunk(line: &[f32], first: usize) -> Option<&[f32; SIDE]> {
    line.get(first..)?.first_chunk()
}

/// The 16 elements of a line from `first` on, or zeros beyond its end.
fn padded(line: &[f32], first: usize) -> [f32; SIDE] {
    let mut columns = [0.0; SIDE];
    let rest = line.get(first..).unwrap_or_default();
    let width = rest.len().min(SIDE);
    columns[..width].copy_from_slice(&rest[..width]);
    columns
}
