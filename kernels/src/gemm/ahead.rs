//! Requests for memory ahead of its use.

/// Memory that will be needed after a product, to be asked for while it is computed: rows of `run` elements, `row` apart.
/// No more than a hint: the addresses may be any, and what takes longer than the product is left out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) start: *const f32,
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) run: usize,
}

impl Ahead {
    /// Nothing is asked for.
    pub(crate) const NONE: Ahead = Ahead { start: std::ptr::null(), row: 0, rows: 0, run: 0 };

    /// What tile `tile` of `tiles` asks for.
    pub(super) fn of_tile(&self, tile: usize, tiles: usize) -> Ahead {
        let first = self.rows * tile / tiles;
        let start = self.start.wrapping_add(first * self.row);
        Ahead { start, rows: self.rows * (tile + 1) / tiles - first, ..*self }
    }
}
