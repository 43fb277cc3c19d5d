//! Software prefetching.

/// Elements of a cache line.
const LINE: usize = 16;

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

    /// The share of tile `tile` of `tiles`: some rows, or a part of one if there are more tiles than rows; nothing for later
    /// tiles.
    pub(crate) fn of_tile(&self, tile: usize, tiles: usize) -> Prefetch {
        let tiles_of_row = tiles.checked_div(self.rows).unwrap_or(0);
        if tiles_of_row > 1 {
            let (row, part) = (tile / tiles_of_row, tile % tiles_of_row);
            let len = self.run.div_ceil(tiles_of_row).next_multiple_of(LINE);
            let first = (part * len).min(self.run);
            let start = self.start.wrapping_add(row * self.row + first);
            let rows = usize::from(row < self.rows);
            return Prefetch { start, row: 0, rows, run: len.min(self.run - first) };
        }
        let from_tile = |tile: usize| self.rows * tile.min(tiles) / tiles;
        let first = from_tile(tile);
        let start = self.start.wrapping_add(first * self.row);
        Prefetch { start, rows: from_tile(tile + 1) - first, ..*self }
    }

    /// The lines of memory, one after the other.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn lines(self) -> impl ExactSizeIterator<Item = *const f32> {
        let Prefetch { start, row, rows, run } = self;
        let lines = run.div_ceil(LINE);
        (0..rows * lines).map(move |at| start.wrapping_add(at / lines * row + at % lines * LINE))
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Also with more tiles than rows, of which the last may be left without a share. Tiles after the last have none.
        #[test]
        fn tiles_share_all_lines(rows in 0usize..9, run in 1usize..200, tiles in 1usize..30) {
            let all = Prefetch { start: std::ptr::null::<f32>().wrapping_add(1024), row: 500, rows, run };
            let mut shared: Vec<_> = (0..tiles + 3).flat_map(|tile| all.of_tile(tile, tiles).lines()).collect();
            shared.sort();
            shared.dedup();
            prop_assert_eq!(shared, all.lines().collect::<Vec<_>>());
        }
    }
}
