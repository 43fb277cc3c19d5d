//! The ranks of other nodes that wait for values of this node. Pure: no I/O.
//!
//! A rank waits for one value at a time, so there is at most one wait for each of them. Their own servers keep the
//! deadlines, and cancel a wait whose deadline has passed.

use std::collections::{BTreeSet, HashMap};

/// A rank of another node that waits for a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteReader {
    pub(super) rank: u32,
    /// Number of the wait on its own node.
    pub(super) number: u64,
    pub(super) key: String,
    /// The rank of this node that will set the value.
    pub(super) from: u32,
}

/// The waits of remote ranks, by their ranks and by their keys.
#[derive(Debug, Default)]
pub(super) struct RemoteReaders {
    by_rank: HashMap<u32, RemoteReader>,
    by_key: HashMap<String, BTreeSet<u32>>,
}

impl RemoteReaders {
    /// Adds a wait, in place of an earlier one of the same rank.
    pub(super) fn add(&mut self, reader: RemoteReader) {
        self.remove(reader.rank);
        self.by_key.entry(reader.key.clone()).or_default().insert(reader.rank);
        self.by_rank.insert(reader.rank, reader);
    }

    /// Removes the wait `number` of `rank`, unless it was answered.
    pub(super) fn cancel(&mut self, rank: u32, number: u64) {
        if self.by_rank.get(&rank).is_some_and(|reader| reader.number == number) {
            self.remove(rank);
        }
    }

    /// Removes and returns a reader of `key`.
    pub(super) fn take(&mut self, key: &str) -> Option<RemoteReader> {
        let rank = *self.by_key.get(key)?.first()?;
        self.remove(rank)
    }

    /// Removes and returns the readers of rank `from`.
    pub(super) fn take_those_of(&mut self, from: u32) -> Vec<RemoteReader> {
        let of_it = self.by_rank.values().filter(|reader| reader.from == from);
        let mut ranks: Vec<u32> = of_it.map(|reader| reader.rank).collect();
        ranks.sort_unstable();
        ranks.into_iter().filter_map(|rank| self.remove(rank)).collect()
    }

    /// Removes all.
    pub(super) fn clear(&mut self) {
        *self = RemoteReaders::default();
    }

    fn remove(&mut self, rank: u32) -> Option<RemoteReader> {
        let reader = self.by_rank.remove(&rank)?;
        if let Some(ranks) = self.by_key.get_mut(&reader.key) {
            ranks.remove(&rank);
            if ranks.is_empty() {
                self.by_key.remove(&reader.key);
            }
        }
        Some(reader)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_rank_has_one_wait_and_every_wait_ends_once(
            waits in prop::collection::vec((0..4u32, 0..3u8, 8..10u32), 0..30),
            cancelled in prop::collection::vec((0..4u32, 0..30u64), 0..10),
        ) {
            let mut readers = RemoteReaders::default();
            let mut model: HashMap<u32, RemoteReader> = HashMap::new();
            for (number, (rank, key, from)) in (0..).zip(waits) {
                let reader = RemoteReader { rank, number, key: key.to_string(), from };
                readers.add(reader.clone());
                model.insert(rank, reader);
            }
            for (rank, number) in cancelled {
                readers.cancel(rank, number);
                model.retain(|_, reader| (reader.rank, reader.number) != (rank, number));
            }
            for reader in readers.take_those_of(8) {
                prop_assert_eq!(model.remove(&reader.rank), Some(reader));
            }
            prop_assert!(model.values().all(|reader| reader.from == 9));
            for key in 0..3u8 {
                while let Some(reader) = readers.take(&key.to_string()) {
                    prop_assert_eq!(&reader.key, &key.to_string());
                    prop_assert_eq!(model.remove(&reader.rank), Some(reader));
                }
            }
            prop_assert!(model.is_empty() && readers.by_rank.is_empty() && readers.by_key.is_empty());
        }
    }
}
