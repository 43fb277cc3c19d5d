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
}

#[derive(Debug)]
struct Wait {
    peer: u64,
    what: WaitFor,
    deadline: Instant,
}

/// The waits of all peers, in the order in which they began.
#[derive(Debug, Default)]
pub(super) struct Waits(Vec<Wait>);

impl Waits {
    pub(super) fn add(&mut self, peer: u64, what: WaitFor, deadline: Instant) {
        self.0.push(Wait { peer, what, deadline });
    }

    pub(super) fn has(&self, peer: u64) -> bool {
        self.0.iter().any(|wait| wait.peer == peer)
    }

    pub(super) fn forget(&mut self, peer: u64) {
        self.0.retain(|wait| wait.peer != peer);
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.0.iter().map(|wait| wait.deadline).min()
    }

    /// Removes and returns the peer that has waited longest for `key`.
    pub(super) fn take_reader(&mut self, wanted: &str) -> Option<u64> {
        let is_reader = |wait: &Wait| matches!(&wait.what, WaitFor::Key { key, .. } if key == wanted);
        let position = self.0.iter().position(is_reader)?;
        Some(self.0.remove(position).peer)
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
    /// its barriers, or, after a failure, all waits.
    pub(super) fn take_unsatisfiable(&mut self, gone: u32, failed: bool) -> Vec<u64> {
        self.take(|wait| {
            failed
                || match &wait.what {
                    WaitFor::Key { from, .. } => *from == gone,
                    WaitFor::Barrier { ranks, .. } => ranks.contains(&gone),
                }
        })
    }

    /// Removes and returns the peers whose deadline has passed, with the ranks that did not arrive. The missing ranks are
    /// determined before any wait is removed: two ranks that time out in the same barrier have both arrived.
    pub(super) fn take_expired(&mut self, now: Instant) -> Vec<(u64, Vec<u32>)> {
        let missing = |wait: &Wait| match &wait.what {
            WaitFor::Key { from, .. } => vec![*from],
            WaitFor::Barrier { name, ranks, .. } => {
                let inside = self.in_barrier(name);
                ranks.iter().copied().filter(|rank| !inside.contains(rank)).collect()
            }
        };
        let late = self.0.iter().filter(|wait| wait.deadline <= now);
        let late = late.map(|wait| (wait.peer, missing(wait))).collect();
        self.0.retain(|wait| wait.deadline > now);
        late
    }

    fn take(&mut self, is_wanted: impl Fn(&Wait) -> bool) -> Vec<u64> {
        self.0.extract_if(.., |wait| is_wanted(wait)).map(|wait| wait.peer).collect()
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
            for (peer, missing) in pending.take_expired(start + Duration::from_secs(now)) {
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
