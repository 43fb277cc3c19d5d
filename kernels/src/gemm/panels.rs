//! Copies of operands in the order in which a product reads them.

use std::ops::Range;

use super::prefetch::Prefetch;
use super::tile::PANEL;
use crate::simd::{Simd, Task, dispatch};

/// Some columns of a row-major matrix, to be packed in panels of [`PANEL`].
#[derive(Debug, Clone)]
pub(crate) struct Panels<'a> {
    pub(crate) from: &'a [f32],
    /// Elements from one row to the next.
    pub(crate) row: usize,
    pub(crate) columns: Range<usize>,
}

impl Panels<'_> {
    /// Packed elements of `rows` rows.
    pub(crate) fn packed_len(&self, rows: usize) -> usize {
        self.columns.len().next_multiple_of(PANEL) * rows
    }

    /// Packs the columns of `rows`, one panel after the other. Padding in the last panel keeps its old contents.
    ///
    /// # Panics
    /// If there are no such elements or `packed` is too short.
    pub(crate) fn pack(&self, rows: Range<usize>, packed: &mut [f32]) {
        self.pack_part(rows.clone(), rows, packed);
    }

    /// As [`pack`](Self::pack), but writes only `part` of the rows.
    pub(crate) fn pack_part(&self, rows: Range<usize>, part: Range<usize>, packed: &mut [f32]) {
        dispatch(Pack { panels: self, rows, part, packed });
    }

    /// Some rows to prefetch before they are packed.
    pub(crate) fn prefetch(&self, rows: Range<usize>) -> Prefetch {
        let start = self.from.as_ptr().wrapping_add(rows.start * self.row + self.columns.start);
        Prefetch { start, row: self.row, rows: rows.len(), run: self.columns.len() }
    }
}

struct Pack<'a, 'b> {
    panels: &'a Panels<'b>,
    rows: Range<usize>,
    part: Range<usize>,
    packed: &'a mut [f32],
}

impl Task for Pack<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Panels { from, row, ref columns } = *self.panels;
        let panel = self.rows.len() * PANEL;
        let packed = &mut self.packed[..self.panels.packed_len(self.rows.len())];
        for r in self.part {
            let k = r - self.rows.start;
            let from = &from[r * row + columns.start..r * row + columns.end];
            let (whole, rest) = from.as_chunks::<PANEL>();
            for (index, from) in whole.iter().enumerate() {
                let at = index * panel + k * PANEL;
                packed[at..at + PANEL].copy_from_slice(from);
            }
            let at = whole.len() * panel + k * PANEL;
            for (to, &from) in packed.get_mut(at..).unwrap_or_default().iter_mut().zip(rest) {
                *to = from;
            }
        }
    }
}

/// Copies `count` rows of `columns` elements, `row` apart, to rows `to_row` apart.
///
/// # Panics
/// If a side is too short.
pub(crate) fn copy_rows(
    from: &[f32],
    row: usize,
    count: usize,
    columns: usize,
    to: &mut [f32],
    to_row: usize,
) {
    for r in 0..count {
        to[r * to_row..r * to_row + columns].copy_from_slice(&from[r * row..r * row + columns]);
    }
}
