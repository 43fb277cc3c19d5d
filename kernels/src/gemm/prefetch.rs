//! Software prefetching.

/// Memory to prefetch during a product because it is needed afterwards: rows of `run` elements, `row` apart. Only a
/// hint: any address is allowed, and prefetches that do not fit into the time of the product are left out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefetch {
    pub(crate) start: *const f32,
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) run: usize,
}

impl Prefetch {
    /// Prefetches nothing.
    pub(crate) const NONE: Prefetch = Prefetch { start: std::ptr::null(), row: 0, rows: 0, run: 0 };

    /// The share of tile `tile` of `tiles`.
    pub(super) fn of_tile(&self, tile: usize, tiles: usize) -> Prefetch {
        let first = self.rows * tile / tiles;
        let start = self.start.wrapping_add(first * self.row);
        Prefetch { start, rows: self.rows * (tile + 1) / tiles - first, ..*self }
    }
}
