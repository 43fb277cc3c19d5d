//! How all ranks agree where to stop, without an operation of their own.
//!
//! Every rank asks again and again whether it should stop, for instance before each step. Such a question is a *stop
//! check*. All ranks make the same checks, so a check is known by its number, and the ranks stop at the same place if
//! they stop at the check of the same number. That number is chosen while the ranks run. Each node does this:
//!
//! 1. It marks the page: a stop is *proposed*. A rank that sees this in a check waits there for the number.
//! 2. Then it reads how many checks each of its ranks has begun. Let c be the largest count. A rank counts its check
//!    before it reads the mark, and both are sequentially consistent: so a rank that has not seen the mark in the last
//!    check that was counted for it sees the mark in its next one, which has the number c + 1 at most. No rank of this
//!    node gets past check c + 1 without knowing that a stop is proposed.
//! 3. The largest c + 1 of all nodes is the number at which all ranks stop. No rank is beyond it. Those that wait at an
//!    earlier check go on up to it.
//!
//! A waiting rank needs no other rank to go on, only the servers: so this cannot deadlock with an operation in which
//! other ranks wait for it. On one host the three parts follow each other within a microsecond, and hardly any rank ever
//! waits. A check costs two atomic operations.

use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

use super::ProgressPage;

/// Values of the header's `stop`. Later ones are the number of a check plus [`FIRST_CHECK`].
const NOT_ASKED: u64 = 0;
const PROPOSED: u64 = 1;
const FIRST_CHECK: u64 = 2;

/// Whether the ranks are going to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopState {
    /// Nobody has asked for it.
    NotAsked,
    /// The check is being chosen. A rank that finds this in a check waits there.
    Proposed,
    /// At the stop check of this number.
    At(u64),
}

impl ProgressPage {
    /// Counts a stop check of `rank`. Returns its number, from 1. [`stop_state`](Self::stop_state) has to be read after it.
    #[inline]
    pub fn begin_stop_check(&self, rank: u32) -> u64 {
        self.record(rank).stop_checks.fetch_add(1, SeqCst).wrapping_add(1)
    }

    /// Whether the ranks are going to stop.
    #[inline]
    pub fn stop_state(&self) -> StopState {
        match self.header().stop.load(SeqCst) {
            NOT_ASKED => StopState::NotAsked,
            PROPOSED => StopState::Proposed,
            number => StopState::At(number - FIRST_CHECK),
        }
    }

    /// True if `rank` has begun a stop check: it stops by itself when it is asked to.
    pub fn checks_for_stops(&self, rank: u32) -> bool {
        self.record(rank).stop_checks.load(SeqCst) > 0
    }

    /// Proposes a stop to `ranks`, those of this host. Returns the first check that none of them can pass without knowing
    /// of it.
    pub fn propose_stop(&self, ranks: Range<u32>) -> u64 {
        let _ = self.header().stop.compare_exchange(NOT_ASKED, PROPOSED, SeqCst, SeqCst);
        // Counts are read after the mark is set. A hostile count must not wrap.
        let counts = ranks.map(|rank| self.record(rank).stop_checks.load(SeqCst));
        counts.max().unwrap_or_default().saturating_add(1).min(u64::MAX - FIRST_CHECK)
    }

    /// Makes the ranks stop at this check, which no rank has passed. The first choice is kept.
    pub fn stop_at(&self, check: u64) {
        let number = check.saturating_add(FIRST_CHECK);
        let _ = self.header().stop.compare_exchange(PROPOSED, number, SeqCst, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::time::Duration;

    use super::*;

    /// A rank: makes checks until it is told to stop. Returns the number of the last one.
    fn run(page: &ProgressPage, rank: u32, mut between: impl FnMut()) -> u64 {
        loop {
            let check = page.begin_stop_check(rank);
            loop {
                match page.stop_state() {
                    StopState::NotAsked => break,
                    StopState::Proposed => std::thread::yield_now(),
                    StopState::At(number) if check < number => break,
                    StopState::At(number) => {
                        assert_eq!(check, number, "rank {rank} has passed the check");
                        return check;
                    }
                }
            }
            between();
        }
    }

    #[test]
    fn all_ranks_stop_at_the_same_check() {
        for round in 0..200 {
            let (page, _fd) = ProgressPage::create(3).unwrap();
            let page = &page;
            let last = std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || run(page, rank, || {}))).collect();
                while !page.checks_for_stops(round % 3) {
                    std::thread::yield_now();
                }
                page.stop_at(page.propose_stop(0..3));
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<u64>>()
            });
            assert!(last.iter().all(|check| *check == last[0]), "{last:?}");
        }
    }

    /// Two hosts whose messages take long, with ranks that meet between two checks as in a collective.
    #[test]
    fn ranks_of_two_hosts_that_wait_for_each_other_stop_at_the_same_check() {
        for round in 0..50 {
            let pages = [ProgressPage::create(2).unwrap().0, ProgressPage::create(2).unwrap().0];
            let (pages, meeting) = (&pages, Barrier::new(2));
            let meeting = &meeting;
            let last = std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..2u32)
                    .map(|rank| {
                        let page = &pages[rank as usize];
                        scope.spawn(move || run(page, rank, || _ = meeting.wait()))
                    })
                    .collect();
                while !pages[1].checks_for_stops(1) {
                    std::thread::yield_now();
                }
                // The first host holds its rank back while that of the second one runs into it.
                let first = pages[0].propose_stop(0..1);
                if round % 2 == 0 {
                    std::thread::sleep(Duration::from_micros(100));
                }
                let chosen = first.max(pages[1].propose_stop(1..2));
                pages.iter().rev().for_each(|page| page.stop_at(chosen));
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<u64>>()
            });
            assert_eq!(last[0], last[1]);
        }
    }

    #[test]
    fn the_first_choice_is_kept() {
        let (page, _fd) = ProgressPage::create(1).unwrap();
        page.stop_at(3);
        assert_eq!(page.stop_state(), StopState::NotAsked);
        assert_eq!(page.propose_stop(0..1), 1);
        page.begin_stop_check(0);
        assert_eq!((page.propose_stop(0..1), page.stop_state()), (2, StopState::Proposed));
        page.stop_at(7);
        page.stop_at(8);
        page.propose_stop(0..1);
        assert_eq!(page.stop_state(), StopState::At(7));
        let hostile = ProgressPage::create(1).unwrap().0;
        hostile.record(0).stop_checks.store(u64::MAX, SeqCst);
        hostile.stop_at(hostile.propose_stop(0..1));
        assert!(matches!(hostile.stop_state(), StopState::At(_)));
    }
}
