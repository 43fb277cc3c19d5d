//! A fixed number of worker threads for one rank, and static partitions of work among them.
//!
//! A kernel divides its items (images, rows, channels, elements) into at most one part per thread, and each part
//! writes a slice of the output that no other part accesses. Which part computes which items depends only on the
//! numbers of items and threads, never on timing, so a result is bitwise the same from run to run. The output is
//! divided before the work starts: there are no locks, and no `unsafe` except for parts that are columns of a matrix
//! (`gemm::block`). The caller computes the first part itself, so a rank with n threads keeps n cores busy and wakes
//! n − 1 threads.
//!
//! Each rank has its own pool, because ranks may be threads of one process and must not wait for each other's
//! kernels. With one thread there is no pool, and everything runs on the calling thread.

use std::fmt;
use std::ops::Range;

/// The worker threads of one rank.
pub struct Threads {
    pool: Option<rayon::ThreadPool>,
    count: usize,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("count", &self.count).finish()
    }
}

impl Threads {
    /// `count` worker threads; with one, work runs on the calling thread.
    ///
    /// # Panics
    /// If `count` is zero or the operating system refuses to start the threads.
    pub fn new(count: usize) -> Self {
        Self::try_new(count).unwrap_or_else(|problem| panic!("{problem}"))
    }

    /// As [`new`](Self::new), but returns an error text instead of panicking.
    ///
    /// # Errors
    /// If `count` is zero or the operating system refuses to start the threads.
    pub fn try_new(count: usize) -> Result<Self, String> {
        let start = || {
            // The calling thread is one of the workers.
            let builder = rayon::ThreadPoolBuilder::new().num_threads(count - 1);
            let pool = builder.thread_name(|index| format!("kernel-{index}")).build();
            pool.map_err(|error| format!("cannot start {count} threads: {error}"))
        };
        match count {
            0 => Err("a rank needs at least one thread".to_owned()),
            1 => Ok(Self { pool: None, count }),
            _ => Ok(Self { pool: Some(start()?), count }),
        }
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Number of parts into which [`Threads::divide`] divides `items` items, if a part should have at least `grain`
    /// of them.
    pub fn parts(&self, items: usize, grain: usize) -> usize {
        self.count.min(items / grain.max(1)).max(1)
    }

    /// Divides `items` items and their `outputs` into parts of about equal size and calls `work` once for each, with
    /// the range of items and the part's share of the outputs. Parts have at least `grain` items if there are enough:
    /// with less than about ten microseconds of work another thread is not worth it.
    ///
    /// ```
    /// use mgpu_kernels::threads::{Rows, Threads};
    /// let mut squares = vec![0; 10];
    /// Threads::new(2).divide(10, 1, Rows::new(&mut squares, 1), |range, part| {
    ///     for (item, square) in range.zip(part.values) {
    ///         *square = item * item;
    ///     }
    /// });
    /// assert_eq!(squares, [0, 1, 4, 9, 16, 25, 36, 49, 64, 81]);
    /// ```
    pub fn divide<D, F>(&self, items: usize, grain: usize, outputs: D, work: F)
    where
        D: Divide,
        F: Fn(Range<usize>, D) + Sync,
    {
        let parts = self.parts(items, grain);
        match &self.pool {
            Some(pool) if parts > 1 => {
                let border = |part: usize| items * part / parts;
                let (first, mut rest) = outputs.divide(border(1), 1);
                pool.in_place_scope(|scope| {
                    let work = &work;
                    for part in 1..parts - 1 {
                        let range = border(part)..border(part + 1);
                        let (own, others) = rest.divide(range.len(), 1);
                        rest = others;
                        scope.spawn(move |_| work(range, own));
                    }
                    scope.spawn(move |_| work(border(parts - 1)..items, rest));
                    work(0..border(1), first);
                });
            }
            _ => work(0..items, outputs),
        }
    }
}

/// Outputs that can be divided in two, each half to be written by another thread.
pub trait Divide: Send + Sized {
    /// Splits off the outputs of the first `items` items, which the first `parts` parts compute.
    fn divide(self, items: usize, parts: usize) -> (Self, Self);
}

/// No outputs.
impl Divide for () {
    fn divide(self, _items: usize, _parts: usize) -> ((), ()) {
        ((), ())
    }
}

/// A slice that holds `width` elements for every item.
#[derive(Debug)]
pub struct Rows<'a, T> {
    /// The elements of this part's items.
    pub values: &'a mut [T],
    width: usize,
}

impl<'a, T> Rows<'a, T> {
    /// `values` with `width` elements for each item.
    pub fn new(values: &'a mut [T], width: usize) -> Self {
        Self { values, width }
    }
}

impl<T: Send> Divide for Rows<'_, T> {
    fn divide(self, items: usize, _parts: usize) -> (Self, Self) {
        let (left, right) = self.values.split_at_mut(items * self.width);
        (Self { values: left, width: self.width }, Self { values: right, width: self.width })
    }
}

/// A slice with one element for every part: scratch memory or partial sums.
#[derive(Debug)]
pub struct PerPart<'a, T>(&'a mut [T]);

impl<'a, T> PerPart<'a, T> {
    /// `values`, of which part `p` gets element `p`.
    pub fn new(values: &'a mut [T]) -> Self {
        Self(values)
    }

    /// This part's element.
    ///
    /// # Panics
    /// If there are fewer elements than parts.
    pub fn own(self) -> &'a mut T {
        self.0.first_mut().expect("one element for every part")
    }
}

impl<T: Send> Divide for PerPart<'_, T> {
    fn divide(self, _items: usize, parts: usize) -> (Self, Self) {
        let (left, right) = self.0.split_at_mut(parts);
        (Self(left), Self(right))
    }
}

impl<A: Divide, B: Divide> Divide for (A, B) {
    fn divide(self, items: usize, parts: usize) -> (Self, Self) {
        let (a, b) = (self.0.divide(items, parts), self.1.divide(items, parts));
        ((a.0, b.0), (a.1, b.1))
    }
}

impl<A: Divide, B: Divide, C: Divide> Divide for (A, B, C) {
    fn divide(self, items: usize, parts: usize) -> (Self, Self) {
        let (a, b) = (self.0.divide(items, parts), self.1.divide(items, parts));
        let c = self.2.divide(items, parts);
        ((a.0, b.0, c.0), (a.1, b.1, c.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_item_is_computed_once_by_the_part_that_owns_it(
            items in 0usize..50, count in 1usize..5, grain in 1usize..9, width in 1usize..4,
        ) {
            let threads = Threads::new(count);
            let mut visits = vec![0u32; items * width];
            let mut owners = vec![None; count];
            let outputs = (Rows::new(&mut visits, width), PerPart::new(&mut owners));
            threads.divide(items, grain, outputs, |range, (rows, owner)| {
                assert_eq!(rows.values.len(), range.len() * width);
                rows.values.iter_mut().for_each(|visit| *visit += 1);
                *owner.own() = Some(range);
            });
            prop_assert!(visits.iter().all(|&visit| visit == 1));
            let ranges: Vec<_> = owners.into_iter().flatten().collect();
            prop_assert_eq!(ranges.len(), threads.parts(items, grain));
            prop_assert_eq!(ranges.iter().map(|range| range.len()).sum::<usize>(), items);
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
