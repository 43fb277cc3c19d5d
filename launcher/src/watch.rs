//! Finds a stuck rank from the last actions of all ranks and their times. Pure: no I/O.
//!
//! A rank without progress is the culprit only if it does not wait for another rank. When a collective hangs, all ranks
//! soon make no progress, and the rank that the others wait for is the only one that does not wait. If each rank waits
//! for another one, some wait in a cycle, because their calls do not match: of these, the rank with the fewest
//! operations holds up the others. (Ranks outside of the cycle, as in another group, may have made fewer.) A rank that
//! was stopped (SIGSTOP) while it waited still appears to wait on the progress page; the kernel reports that it is
//! stopped.

use std::time::Duration;

use mgpu_control::progress::{Operation, Progress};

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No rank is stuck; the time of the next check, if one is needed.
    Healthy(Option<Duration>),
    /// This rank is stuck, for this long.
    Silent(u32, Duration),
}

/// A rank and its progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WatchedRank {
    pub(crate) rank: u32,
    pub(crate) progress: Progress,
}

impl WatchedRank {
    fn waits(&self) -> bool {
        self.progress.operation.is_some_and(|last| {
            last.running && (last.waits_for.is_some() || last.operation == Operation::Connect)
        })
    }

    /// The rank it waits for.
    fn waits_for(&self) -> Option<u32> {
        self.progress.operation.filter(|last| last.running)?.waits_for
    }

    fn idle(&self, now: Duration) -> Duration {
        now.saturating_sub(self.progress.changed)
    }

    fn sequence(&self) -> u64 {
        self.progress.operation.map_or(0, |last| last.sequence)
    }
}

/// Checks the joined ranks at time `now` (of [`mgpu_control::progress::now`]). `is_stopped` asks the kernel whether a
/// rank is stopped.
pub(crate) fn find_silent_rank(
    ranks: &[WatchedRank],
    timeout: Duration,
    now: Duration,
    is_stopped: impl Fn(u32) -> bool,
) -> Verdict {
    let (overdue, healthy): (Vec<&WatchedRank>, Vec<&WatchedRank>) =
        ranks.iter().partition(|rank| rank.idle(now) >= timeout);
    let silent = |rank: &WatchedRank| Verdict::Silent(rank.rank, rank.idle(now));
    let not_waiting = overdue.iter().filter(|rank| !rank.waits() || is_stopped(rank.rank));
    if let Some(culprit) = not_waiting.min_by_key(|rank| rank.progress.changed) {
        return silent(culprit);
    }
    // False comes first.
    let order = |rank: &&&WatchedRank| (!waits_for_itself(rank, ranks), rank.sequence());
    if healthy.is_empty()
        && let Some(culprit) = overdue.iter().min_by_key(order)
    {
        return silent(culprit);
    }
    Verdict::Healthy(healthy.iter().map(|rank| rank.progress.changed + timeout).min())
}

/// Whether the chain of who waits for whom leads from a rank back to it.
fn waits_for_itself(first: &WatchedRank, ranks: &[WatchedRank]) -> bool {
    let next = |from: &u32| ranks.iter().find(|rank| rank.rank == *from).and_then(WatchedRank::waits_for);
    std::iter::successors(first.waits_for(), next).take(ranks.len()).any(|rank| rank == first.rank)
}

#[cfg(test)]
mod tests {
    use mgpu_control::progress::{LastOperation, Phase, RankState};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn rank(rank: u32, changed: u64, operation: Option<(u64, Option<u32>)>) -> WatchedRank {
        let last = |(sequence, waits_for)| LastOperation {
            operation: Operation::AllReduce,
            sequence,
            bytes: 4,
            running: true,
            waits_for,
        };
        let progress = Progress {
            state: RankState::Joined,
            pid: 1,
            phase: Phase::Step,
            step: 1,
            steps_begun: 1,
            operation: operation.map(last),
            changed: Duration::from_secs(changed),
        };
        WatchedRank { rank, progress }
    }

    fn check(ranks: &[WatchedRank], now: u64, stopped: Option<u32>) -> Verdict {
        find_silent_rank(ranks, TIMEOUT, Duration::from_secs(now), |rank| Some(rank) == stopped)
    }

    #[test]
    fn the_next_check_is_when_the_first_rank_would_be_overdue() {
        let ranks = [rank(0, 7, None), rank(1, 5, None)];
        assert_eq!(check(&ranks, 8, None), Verdict::Healthy(Some(Duration::from_secs(15))));
        assert_eq!(check(&[], 8, None), Verdict::Healthy(None));
    }

    #[test]
    fn a_waiting_rank_is_not_the_culprit() {
        let waiting = rank(0, 1, Some((7, Some(1))));
        assert_eq!(
            check(&[waiting, rank(1, 9, None)], 12, None),
            Verdict::Healthy(Some(Duration::from_secs(19)))
        );
        let silent = Verdict::Silent(1, Duration::from_secs(11));
        assert_eq!(check(&[waiting, rank(1, 1, None)], 12, None), silent);
        // Of two idle ranks, the one that has been idle longer.
        let ranks = [rank(0, 2, None), rank(1, 1, None)];
        assert_eq!(check(&ranks, 12, None), silent);
    }

    #[test]
    fn a_rank_stopped_while_it_waits_is_the_culprit() {
        let ranks = [rank(0, 1, Some((7, Some(1)))), rank(1, 1, Some((7, Some(0))))];
        assert_eq!(check(&ranks, 12, Some(1)), Verdict::Silent(1, Duration::from_secs(11)));
    }

    #[test]
    fn in_a_cycle_of_waits_the_rank_with_the_fewest_operations_is_the_culprit() {
        let ranks = [rank(0, 1, Some((8, Some(1)))), rank(1, 1, Some((7, Some(0))))];
        assert_eq!(check(&ranks, 12, None), Verdict::Silent(1, Duration::from_secs(11)));
        // A rank that waits for one of them is not in the cycle. In its group, it may have made fewer operations.
        let ranks = [ranks[0], ranks[1], rank(2, 1, Some((3, Some(0))))];
        assert_eq!(check(&ranks, 12, None), Verdict::Silent(1, Duration::from_secs(11)));
    }

    #[test]
    fn without_a_known_cycle_the_rank_with_the_fewest_operations_is_the_culprit() {
        let ranks = [rank(0, 1, Some((8, Some(5)))), rank(1, 1, Some((7, Some(0))))];
        assert_eq!(check(&ranks, 12, None), Verdict::Silent(1, Duration::from_secs(11)));
    }
}
