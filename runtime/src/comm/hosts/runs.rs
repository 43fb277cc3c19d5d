//! Which ranks of a communicator are next to each other on one host. Pure.
//!
//! A *run* is a longest sequence of consecutive ranks of one host. The world of an agent for each host has a run for each
//! host; a group may have several runs on one host, if its ranks are in another order.

use std::ops::Range;

/// The runs of a communicator, and that of this rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Runs {
    runs: Vec<Range<u32>>,
    own: usize,
    rank: u32,
}

impl Runs {
    /// Of ranks on these hosts, in rank order, for rank `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub(super) fn new(hosts: impl IntoIterator<Item = u32>, rank: u32) -> Self {
        let mut runs: Vec<(u32, Range<u32>)> = Vec::new();
        for (host, rank) in hosts.into_iter().zip(0..) {
            match runs.last_mut() {
                Some((last, run)) if *last == host => run.end = rank + 1,
                _ => runs.push((host, rank..rank + 1)),
            }
        }
        let runs: Vec<Range<u32>> = runs.into_iter().map(|(_, run)| run).collect();
        let own = runs.iter().position(|run| run.contains(&rank)).expect("a rank is in some run");
        Runs { runs, own, rank }
    }

    /// The ranks of this rank's run, which share memory.
    pub(super) fn own(&self) -> Range<u32> {
        self.runs[self.own].clone()
    }

    /// Whether no two ranks share memory.
    pub(super) fn are_single(&self) -> bool {
        self.runs.iter().all(|run| run.len() == 1)
    }

    /// Number of parts into which a payload is divided, so that every rank of the longest run has one to work on.
    pub(super) fn parts(&self) -> u32 {
        self.runs.iter().map(|run| run.len() as u32).max().unwrap_or(1)
    }

    /// The rank of each run that works on part `part`, in the order of the runs.
    pub(super) fn workers(&self, part: u32) -> impl DoubleEndedIterator<Item = u32> {
        self.runs.iter().map(move |run| run.start + part % run.len() as u32)
    }

    /// The rank of this run that works on part `part`.
    pub(super) fn worker(&self, part: u32) -> u32 {
        self.worker_beside(self.rank, part)
    }

    /// The rank that works on part `part` in the run of `rank`.
    pub(super) fn worker_beside(&self, rank: u32, part: u32) -> u32 {
        let run = self.run_of(rank);
        run.start + part % run.len() as u32
    }

    /// The part on which `rank` works, and no other rank of its run.
    pub(super) fn part_of(&self, rank: u32) -> u32 {
        rank - self.run_of(rank).start
    }

    /// Position of the run of `rank`.
    pub(super) fn index_of(&self, rank: u32) -> usize {
        self.runs.iter().position(|run| run.contains(&rank)).expect("a rank is in some run")
    }

    fn run_of(&self, rank: u32) -> Range<u32> {
        self.run(self.index_of(rank))
    }

    /// The ranks that work on part `part` in the run before and the run after this one.
    pub(super) fn neighbours(&self, part: u32) -> [Option<u32>; 2] {
        let worker = |run: Option<usize>| self.workers(part).nth(run?);
        [worker(self.own.checked_sub(1)), worker(Some(self.own + 1))]
    }

    /// Whether the first run is a single rank: what it passes on are elements, not yet accumulators.
    pub(super) fn begin_with_one(&self) -> bool {
        self.runs[0].len() == 1
    }

    /// This rank's position in its run.
    pub(super) fn position_in_run(&self) -> u32 {
        self.rank - self.runs[self.own].start
    }

    /// This rank.
    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of runs.
    pub(super) fn count(&self) -> usize {
        self.runs.len()
    }

    /// The ranks of run `run`.
    pub(super) fn run(&self, run: usize) -> Range<u32> {
        self.runs[run].clone()
    }

    /// Position of this rank's run.
    pub(super) fn position(&self) -> usize {
        self.own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_host_form_a_run() {
        let runs = Runs::new([0, 0, 1, 1, 1], 3);
        assert_eq!((runs.own(), runs.position(), runs.parts()), (2..5, 1, 3));
        assert!(runs.workers(0).eq([0, 2]) && runs.workers(1).eq([1, 3]) && runs.workers(2).eq([0, 4]));
        assert_eq!((runs.neighbours(2), runs.worker(2)), ([Some(0), None], 4));
        assert_eq!(Runs::new([0, 0, 1], 0).neighbours(1), [None, Some(2)]);
        assert!(!runs.are_single() && !runs.begin_with_one());
    }

    #[test]
    fn ranks_in_another_order_form_short_runs() {
        let runs = Runs::new([4, 2, 4, 2], 2);
        assert_eq!((runs.own(), runs.parts(), runs.are_single()), (2..3, 1, true));
        assert!(runs.workers(0).eq(0..4) && runs.begin_with_one());
        assert_eq!(runs.neighbours(0), [Some(1), Some(3)]);
    }
}
