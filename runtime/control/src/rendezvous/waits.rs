//! The pending waits of ranks, with their deadlines. Pure: no I/O.
//!
//! A rank waits for one thing at a time, so there are never more waits than ranks, and a linear search is fast enough.

use std::time::Instant;

/// What a rank waits for.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum WaitFor {
    /// A value that rank `from` will set.
    Key { key: String, from: u32 },
    /// The other `ranks`, as rank `rank`.
    Barrier { name: String, rank: u32, ranks: Vec<u32> },
    /// A value that a rank of another node will set; `number` distinguishes the waits.
    RemoteKey { key: String, from: u32, number: u64 },
    /// A barrier that the hub completes, because it has participants on other nodes; `None` for all ranks.
    RemoteBarrier { name: String, rank: u32, ranks: Option<Vec<u32>> },
}

#[derive(Debug)]
struct Wait {
    peer: u64,
    what: WaitFor,
    /// `None` once it has passed and the hub was asked who is missing.
    deadline: Option<Instant>,
}

/// The waits of all peers, in the order in which they began.
#[derive(Debug, Default)]
pub(super) struct Waits(Vec<Wait>);

impl Waits {
    pub(super) fn add(&mut self, peer: u64, what: WaitFor, deadline: Instant) {
        self.0.push(Wait { peer, what, deadline: Some(deadline) });
    }

    pub(super) fn has(&self, peer: u64) -> bool {
        self.0.iter().any(|wait| wait.peer == peer)
    }

    /// Removes and returns what `peer` waits for.
    pub(super) fn forget(&mut self, peer: u64) -> Option<WaitFor> {
        self.take_one(|wait| wait.peer == peer)
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.0.iter().filter_map(|wait| wait.deadline).min()
    }

    /// Removes and returns the peer that has waited longest for `key`.
    pub(super) fn take_reader(&mut self, wanted: &str) -> Option<u64> {
        let is_reader = |wait: &Wait| matches!(&wait.what, WaitFor::Key { key, .. } if key == wanted);
        let position = self.0.iter().position(is_reader)?;
        Some(self.0.remove(position).peer)
    }

    /// Number of the wait of `peer` for the value `wanted` of another node, and the rank that sets it.
    pub(super) fn remote_key(&self, peer: u64, wanted: &str) -> Option<(u64, u32)> {
        self.0.iter().find(|wait| wait.peer == peer).and_then(|wait| match &wait.what {
            WaitFor::RemoteKey { key, from, number } if key == wanted => Some((*number, *from)),
            _ => None,
        })
    }

    /// Removes and returns the peers in a barrier that the hub has completed.
    pub(super) fn take_released(&mut self, wanted: &str) -> Vec<u64> {
        self.take(|wait| matches!(&wait.what, WaitFor::RemoteBarrier { name, .. } if name == wanted))
    }

    /// Removes the wait of `peer` in a barrier that the hub completes. `false`: it does not wait there.
    pub(super) fn take_unreleased(&mut self, peer: u64, wanted: &str) -> bool {
        let is_it = |wait: &Wait| {
            wait.peer == peer && matches!(&wait.what, WaitFor::RemoteBarrier { name, .. } if name == wanted)
        };
        self.take_one(is_it).is_some()
    }

    /// The ranks whose deadline has passed in a barrier that the hub completes, with its name. They keep waiting until
    /// the hub says which ranks are missing, and are returned once.
    pub(super) fn expired_at_hub(&mut self, now: Instant) -> Vec<(u32, String)> {
        let late = self.0.iter_mut().filter(|wait| wait.deadline.is_some_and(|deadline| deadline <= now));
        let asked = late.filter_map(|wait| match &wait.what {
            WaitFor::RemoteBarrier { name, rank, .. } => {
                wait.deadline = None;
                Some((*rank, name.clone()))
            }
            _ => None,
        });
        asked.collect()
    }

    /// The ranks in the barrier `wanted`.
    pub(super) fn in_barrier(&self, wanted: &str) -> Vec<u32> {
        let rank_of = |wait: &Wait| match &wait.what {
            WaitFor::Barrier { name, rank, .. } if name == wanted => Some(*rank),
            _ => None,
        };
        self.0.iter().filter_map(rank_of).collect()
    }

    /// Removes and returns the peers in the barrier `wanted` that are among `ranks`, if all of those are in it.
    pub(super) fn take_barrier(&mut self, wanted: &str, ranks: &[u32]) -> Vec<u64> {
        let inside = self.in_barrier(wanted);
        if !ranks.iter().all(|rank| inside.contains(rank)) {
            return Vec::new();
        }
        self.take(|wait| {
            matches!(&wait.what, WaitFor::Barrier { name, rank, .. } if name == wanted && ranks.contains(rank))
        })
    }

    /// Removes and returns the peers whose waits cannot be satisfied because `gone` has ended: waits for its values, in
    /// its barriers, or, after a failure, all waits. Only its own node knows whether a remote rank has set a value.
    pub(super) fn take_unsatisfiable(&mut self, gone: u32, failed: bool) -> Vec<u64> {
        self.take(|wait| {
            failed
                || match &wait.what {
                    WaitFor::Key { from, .. } => *from == gone,
                    WaitFor::Barrier { ranks, .. } => ranks.contains(&gone),
                    WaitFor::RemoteKey { .. } => false,
                    WaitFor::RemoteBarrier { ranks, .. } => {
                        ranks.as_ref().is_none_or(|ranks| ranks.contains(&gone))
                    }
                }
        })
    }

    /// Removes and returns the waits whose deadline has passed, with their peers and the ranks that did not arrive; but
    /// not those in barriers that the hub completes. The missing ranks are determined before any wait is removed: two
    /// ranks that time out in the same barrier have both arrived.
    pub(super) fn take_expired(&mut self, now: Instant) -> Vec<(u64, Vec<u32>, WaitFor)> {
        let missing = |wait: &Wait| match &wait.what {
            WaitFor::Key { from, .. } | WaitFor::RemoteKey { from, .. } => Some(vec![*from]),
            WaitFor::Barrier { name, ranks, .. } => {
                let inside = self.in_barrier(name);
                Some(ranks.iter().copied().filter(|rank| !inside.contains(rank)).collect())
            }
            WaitFor::RemoteBarrier { .. } => None,
        };
        let late =
            self.0.iter().enumerate().filter(|(_, wait)| wait.deadline.is_some_and(|late| late <= now));
        let late: Vec<_> = late.filter_map(|(position, wait)| Some((position, missing(wait)?))).collect();
        // From the end, so that the positions stay valid.
        let taken = late.into_iter().rev().map(|(position, missing)| {
            let wait = self.0.remove(position);
            (wait.peer, missing, wait.what)
        });
        let mut taken: Vec<_> = taken.collect();
        taken.reverse();
        taken
    }

    fn take(&mut self, is_wanted: impl Fn(&Wait) -> bool) -> Vec<u64> {
        self.0.extract_if(.., |wait| is_wanted(wait)).map(|wait| wait.peer).collect()
    }

    fn take_one(&mut self, is_wanted: impl Fn(&Wait) -> bool) -> Option<WaitFor> {
        let position = self.0.iter().position(is_wanted)?;
        Some(self.0.remove(position).what)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    /// A wait of a rank for a key (of some rank) or in a barrier, and its deadline in seconds.
    fn wait() -> impl Strategy<Value = (bool, u8, u32, u64)> {
        (any::<bool>(), 0..3u8, 0..5u32, 0..4u64)
    }

    proptest! {
        #[test]
        fn every_wait_is_removed_exactly_once(waits in prop::collection::vec(wait(), 0..5), gone in 0..5u32, now in 0..4u64) {
            // Barriers of the name "1" have no rank 4.
            let participants = |name: u8| -> Vec<u32> { (0..if name == 1 { 4 } else { 5 }).collect() };
            let start = Instant::now();
            let mut pending = Waits::default();
            for (rank, (is_key, name, from, seconds)) in waits.iter().enumerate() {
                let what = match is_key {
                    true => WaitFor::Key { key: name.to_string(), from: *from },
                    false => {
                        let ranks = participants(*name);
                        WaitFor::Barrier { name: name.to_string(), rank: rank as u32, ranks }
                    }
                };
                pending.add(rank as u64, what, start + Duration::from_secs(*seconds));
            }
            let next = waits.iter().map(|wait| start + Duration::from_secs(wait.3)).min();
            prop_assert_eq!(pending.next_deadline(), next);

            let mut seen: Vec<u64> = Vec::new();
            for (peer, missing, _) in pending.take_expired(start + Duration::from_secs(now)) {
                let (is_key, name, from, seconds) = &waits[peer as usize];
                prop_assert!(*seconds <= now);
                let inside = |rank: &u32| waits.get(*rank as usize).is_some_and(|wait| !wait.0 && wait.1 == *name);
                let expected = match is_key {
                    true => vec![*from],
                    false => participants(*name).into_iter().filter(|rank| !inside(rank)).collect(),
                };
                prop_assert_eq!(missing, expected);
                seen.push(peer);
            }
            if let Some(peer) = pending.take_reader("0") {
                prop_assert!(waits[peer as usize].0 && waits[peer as usize].1 == 0);
                seen.push(peer);
            }
            // A barrier opens for the ranks that are in it, and not while one of its participants is missing.
            let inside = pending.in_barrier("1");
            let missing = (0..5).find(|rank| !inside.contains(rank));
            let too_many: Vec<u32> = inside.iter().copied().chain(missing).collect();
            prop_assert!(missing.is_none() || pending.take_barrier("1", &too_many).is_empty());
            let opened = pending.take_barrier("1", &inside);
            prop_assert_eq!(inside.len(), opened.len());
            prop_assert!(pending.in_barrier("1").is_empty());
            seen.extend(opened);
            for peer in pending.take_unsatisfiable(gone, false) {
                let (is_key, name, from, _) = waits[peer as usize];
                let needs_it = if is_key { from == gone } else { participants(name).contains(&gone) };
                prop_assert!(needs_it);
                prop_assert!(!seen.contains(&peer) && !pending.has(peer));
                seen.push(peer);
            }
            let left = pending.take_unsatisfiable(gone, true);
            let is_independent = |(is_key, name, from, _): (bool, u8, u32, u64)| match is_key {
                true => from != gone,
                false => !participants(name).contains(&gone),
            };
            prop_assert!(left.iter().all(|peer| is_independent(waits[*peer as usize]) && !seen.contains(peer)));
            prop_assert!(pending.next_deadline().is_none());
        }
    }
}
