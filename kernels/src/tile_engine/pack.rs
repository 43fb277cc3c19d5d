//! Copies of f32 matrices as operands of an engine, rounded to nearest even.

use half::bf16;

use super::{DEPTH, SIDE};
use crate::gemm::transpose::Transpose;
use crate::reduce::half_floats::narrow_bf16;
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
    /// Writes the panels that have some of the columns, and pads them to 16 columns and whole tiles.
    ///
    /// # Panics
    /// If a side is too short.
    pub(crate) fn pack(&self, panels: &mut [bf16]) {
        dispatch(PackPairs { matrix: *self, panels });
    }
}

struct PackPairs<'a, 'b> {
    matrix: RowPairs<'a>,
    panels: &'b mut [bf16],
}

impl Task for PackPairs<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let RowPairs { from, row, rows, columns, panel } = self.matrix;
        let pairs = steps(rows) * DEPTH / 2;
        assert!(
            panel >= pairs * 2 * SIDE || columns <= SIDE,
            "panels of {pairs} pairs {panel} elements apart"
        );
        let zeros = [0.0; SIDE];
        for pair in 0..pairs {
            for (index, first) in (0..columns).step_by(SIDE).enumerate() {
                let width = SIDE.min(columns - first);
                let to: &mut [bf16; 2 * SIDE] = self.panels[index * panel + pair * 2 * SIDE..]
                    .first_chunk_mut()
                    .expect("a pair of a panel");
                let mut partial = [zeros; 2];
                let mut both = [&zeros; 2];
                for (at, (values, partial)) in both.iter_mut().zip(&mut partial).enumerate() {
                    if 2 * pair + at < rows {
                        let from = &from[(2 * pair + at) * row + first..];
                        *values = match from.first_chunk() {
                            Some(whole) if width == SIDE => whole,
                            _ => {
                                partial[..width].copy_from_slice(&from[..width]);
                                partial
                            }
                        };
                    }
                }
                for column in 0..SIDE {
                    to[2 * column] = narrow_bf16(both[0][column]);
                    to[2 * column + 1] = narrow_bf16(both[1][column]);
                }
            }
        }
    }
}
