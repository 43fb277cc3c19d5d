//! The barriers that ranks of several nodes wait in, as the hub sees them. Pure.
//!
//! A rank waits in one barrier at a time. Its place is kept after its deadline while others still wait there: two ranks
//! that time out in the same barrier have both arrived, and neither may be named as missing to the other.

use std::collections::{BTreeMap, HashMap};

/// The barriers with at least one waiting rank.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    by_name: HashMap<String, Barrier>,
    /// The barrier in which each rank waits.
    of_rank: HashMap<u32, String>,
}

#[derive(Debug)]
struct Barrier {
    participants: Participants,
    /// The ranks that have arrived; `false` for those whose deadline has passed.
    arrived: BTreeMap<u32, bool>,
    /// How many of them still wait.
    waiting: usize,
}

/// Who takes part in a barrier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Participants {
    /// All ranks of a world of this size.
    Everyone(u32),
    /// These ranks, in ascending order.
    Ranks(Vec<u32>),
}

impl Participants {
    /// The participants that a message names.
    pub(super) fn of(ranks: Option<Vec<u32>>, world_size: u32) -> Result<Self, String> {
        let Some(mut ranks) = ranks else { return Ok(Participants::Everyone(world_size)) };
        ranks.sort_unstable();
        ranks.dedup();
        match ranks.last() {
            Some(last) if *last >= world_size => {
                Err(format!("rank {last} in a barrier of {world_size} ranks"))
            }
            _ => Ok(Participants::Ranks(ranks)),
        }
    }

    pub(super) fn contains(&self, rank: u32) -> bool {
        match self {
            Participants::Everyone(world_size) => rank < *world_size,
            Participants::Ranks(ranks) => ranks.binary_search(&rank).is_ok(),
        }
    }

    pub(super) fn iter(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            Participants::Everyone(world_size) => Box::new(0..*world_size),
            Participants::Ranks(ranks) => Box::new(ranks.iter().copied()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Participants::Everyone(world_size) => *world_size as usize,
            Participants::Ranks(ranks) => ranks.len(),
        }
    }
}

/// What the arrival of a rank leads to.
#[derive(Debug, PartialEq)]
pub(super) enum Arrival {
    /// Other ranks are missing.
    Waits,
    /// All participants have arrived, and the barrier is over.
    Completes,
    /// This rank waits there already, and has named other participants.
    Differs(u32),
}

impl Barriers {
    /// Notes that a participant has arrived. If it waited elsewhere, it does not any more.
    pub(super) fn arrive(&mut self, name: &str, participants: &Participants, rank: u32) -> Arrival {
        self.withdraw(rank);
        let barrier = self.by_name.entry(name.to_owned()).or_insert_with(|| Barrier {
            participants: participants.clone(),
            arrived: BTreeMap::new(),
            waiting: 0,
        });
        if barrier.participants != *participants {
            // A barrier exists only while a rank waits in it.
            let other = barrier.arrived.iter().find(|(_, waits)| **waits).map_or(rank, |(other, _)| *other);
            return Arrival::Differs(other);
        }
        barrier.arrived.insert(rank, true);
        barrier.waiting += 1;
        if barrier.waiting < participants.len() {
            self.of_rank.insert(rank, name.to_owned());
            return Arrival::Waits;
        }
        self.remove(name);
        Arrival::Completes
    }

    /// The missing ranks of a barrier in which the deadline of `rank` has passed; `None` if it does not wait there: then
    /// the barrier has ended in the meantime, and the node of the rank will learn how.
    pub(super) fn expire(&mut self, name: &str, rank: u32) -> Option<Vec<u32>> {
        if self.of_rank.get(&rank).is_none_or(|waits_in| waits_in != name) {
            return None;
        }
        let barrier = &self.by_name[name];
        let missing =
            barrier.participants.iter().filter(|rank| !barrier.arrived.contains_key(rank)).collect();
        self.withdraw(rank);
        Some(missing)
    }

    /// Notes that `rank` does not wait any more. A barrier in which nobody waits is forgotten.
    fn withdraw(&mut self, rank: u32) {
        let Some(name) = self.of_rank.remove(&rank) else { return };
        let Some(barrier) = self.by_name.get_mut(&name) else { return };
        barrier.arrived.insert(rank, false);
        barrier.waiting -= 1;
        if barrier.waiting == 0 {
            self.by_name.remove(&name);
        }
    }

    /// Forgets the barriers of `rank`, which has ended: nobody can complete them, and servers know that, too.
    pub(super) fn forget_those_of(&mut self, rank: u32) {
        let hopeless: Vec<String> = self
            .by_name
            .iter()
            .filter(|(_, barrier)| barrier.participants.contains(rank))
            .map(|(name, _)| name.clone())
            .collect();
        hopeless.iter().for_each(|name| self.remove(name));
    }

    /// Forgets all barriers.
    pub(super) fn clear(&mut self) {
        *self = Barriers::default();
    }

    fn remove(&mut self, name: &str) {
        let Some(barrier) = self.by_name.remove(name) else { return };
        for (rank, _) in barrier.arrived.iter().filter(|(_, waits)| **waits) {
            self.of_rank.remove(rank);
        }
    }

    /// Number of places that are kept, for tests of the bound.
    #[cfg(test)]
    pub(super) fn places(&self) -> usize {
        assert!(self.by_name.values().all(|barrier| barrier.waiting > 0));
        assert_eq!(self.by_name.values().map(|barrier| barrier.waiting).sum::<usize>(), self.of_rank.len());
        self.by_name.values().map(|barrier| barrier.arrived.len()).sum()
    }
}
