//! Software prefetching.

use crate::simd::Simd;

/// Elements of a cache line.
const LINE: usize = 16;

/// Memory to prefetch because it is needed soon: rows of `run` elements, `row` apart. Only a hint: any address is allowed, and
/// what does not fit into the time of a product is left out.
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

    /// All of `values`.
    pub(crate) fn of(values: &[f32]) -> Prefetch {
        Prefetch { start: values.as_ptr(), row: 0, rows: 1, run: values.len() }
    }

    /// The share of part `part` of `parts`: some rows, or a part of one if there are more parts than rows; nothing for later
    /// parts.
    #[inline]
    pub(crate) fn share(&self, part: usize, parts: usize) -> Prefetch {
        let parts_of_row = parts.checked_div(self.rows).unwrap_or(0);
        if parts_of_row > 1 {
            let (row, part) = (part / parts_of_row, part % parts_of_row);
            let len = self.run.div_ceil(parts_of_row).next_multiple_of(LINE);
            let first = (part * len).min(self.run);
            let start = self.start.wrapping_add(row * self.row + first);
            let rows = usize::from(row < self.rows);
            return Prefetch { start, row: 0, rows, run: len.min(self.run - first) };
        }
        let from_part = |part: usize| self.rows * part.min(parts) / parts;
        let first = from_part(part);
        let start = self.start.wrapping_add(first * self.row);
        Prefetch { start, rows: from_part(part + 1) - first, ..*self }
    }

    /// Prefetches all of it now, row by row: processors that see the lines of a row in order fetch the next ones themselves.
    #[inline(always)]
    pub(crate) fn fetch<S: Simd>(self, simd: S) {
        for row in 0..self.rows {
            let start = self.start.wrapping_add(row * self.row);
            for at in (0..self.run).step_by(LINE) {
                simd.prefetch(start.wrapping_add(at));
            }
        }
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
        /// Also with more parts than rows, of which the last may be left without a share. Parts after the last have none.
        #[test]
        fn parts_share_all_lines(rows in 0usize..9, run in 1usize..200, parts in 1usize..30) {
            let all = Prefetch { start: std::ptr::null::<f32>().wrapping_add(1024), row: 500, rows, run };
            let mut shared: Vec<_> = (0..parts + 3).flat_map(|part| all.share(part, parts).lines()).collect();
            shared.sort();
            shared.dedup();
            prop_assert_eq!(shared, all.lines().collect::<Vec<_>>());
        }
    }
}
