//! The values that ranks have set and that others have not read yet. Pure: no I/O.
//!
//! A value is kept until as many ranks have read it as its owner said. Nothing forces them to read it, so the unread
//! values of each rank are bounded: a misbehaving rank gets an error and cannot exhaust the launcher's memory or
//! descriptors.

use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of unread values of one rank.
pub(super) const MAX_KEYS_PER_RANK: usize = 1024;
/// Maximum number of descriptors in the unread values of one rank.
pub(super) const MAX_FDS_PER_RANK: usize = 256;
/// Maximum number of bytes in the unread values of one rank, with their keys.
pub(super) const MAX_BYTES_PER_RANK: usize = 4 << 20;
/// Maximum number of bytes in the unread values of all ranks.
pub(super) const MAX_BYTES_TOTAL: usize = 64 << 20;

/// Size of the unread values of one rank, or of all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Usage {
    keys: usize,
    fds: usize,
    bytes: usize,
}

impl Usage {
    fn add(&mut self, other: Usage) {
        self.keys += other.keys;
        self.fds += other.fds;
        self.bytes += other.bytes;
    }

    fn remove(&mut self, other: Usage) {
        self.keys -= other.keys;
        self.fds -= other.fds;
        self.bytes -= other.bytes;
    }
}

struct Entry<F> {
    owner: u32,
    value: Vec<u8>,
    fds: Arc<[F]>,
    readers: u32,
}

impl<F> Entry<F> {
    fn usage(&self, key: &str) -> Usage {
        Usage { keys: 1, fds: self.fds.len(), bytes: key.len() + self.value.len() }
    }
}

/// Values by their keys, with descriptors of type `F`.
pub(super) struct Entries<F> {
    by_key: HashMap<String, Entry<F>>,
    by_owner: HashMap<u32, Usage>,
    all: Usage,
}

impl<F> Default for Entries<F> {
    fn default() -> Self {
        Entries { by_key: HashMap::new(), by_owner: HashMap::new(), all: Usage::default() }
    }
}

impl<F> Entries<F> {
    /// True if `key` is set.
    pub(super) fn contains(&self, key: &str) -> bool {
        self.by_key.contains_key(key)
    }

    /// True if `key` is set, with descriptors.
    pub(super) fn has_fds(&self, key: &str) -> bool {
        self.by_key.get(key).is_some_and(|entry| !entry.fds.is_empty())
    }

    /// Keeps a value of rank `owner` until `readers` ranks have read it.
    ///
    /// # Errors
    /// If the key is already set, or a bound on unread values is exceeded. Nothing changes then.
    pub(super) fn set(
        &mut self,
        owner: u32,
        key: String,
        value: Vec<u8>,
        fds: Vec<F>,
        readers: u32,
    ) -> Result<(), String> {
        if let Some(entry) = self.by_key.get(&key) {
            return Err(format!(
                "key `{key}` is already set by rank {}, and {} more ranks have to read it",
                entry.owner, entry.readers
            ));
        }
        if readers == 0 {
            return Ok(());
        }
        let entry = Entry { owner, value, fds: fds.into(), readers };
        let usage = entry.usage(&key);
        let (mut own, mut all) = (self.by_owner.get(&owner).copied().unwrap_or_default(), self.all);
        own.add(usage);
        all.add(usage);
        let bounds = [
            (own.keys, MAX_KEYS_PER_RANK, "keys"),
            (own.fds, MAX_FDS_PER_RANK, "descriptors"),
            (own.bytes, MAX_BYTES_PER_RANK, "bytes"),
        ];
        if let Some((count, most, what)) = bounds.into_iter().find(|(count, most, _)| count > most) {
            return Err(format!(
                "with key `{key}` rank {owner} would have {count} unread {what}; the maximum is {most}"
            ));
        }
        if all.bytes > MAX_BYTES_TOTAL {
            return Err(format!(
                "with key `{key}` of rank {owner} all ranks would have {} unread bytes; the maximum is \
                 {MAX_BYTES_TOTAL}",
                all.bytes
            ));
        }
        self.by_owner.insert(owner, own);
        self.all = all;
        self.by_key.insert(key, entry);
        Ok(())
    }

    /// Reads a value for one of its readers. The last reader removes it.
    pub(super) fn read(&mut self, key: &str) -> Option<(Vec<u8>, Arc<[F]>)> {
        let entry = self.by_key.get_mut(key)?;
        entry.readers -= 1;
        if entry.readers > 0 {
            return Some((entry.value.clone(), entry.fds.clone()));
        }
        let entry = self.by_key.remove(key)?;
        let usage = entry.usage(key);
        self.all.remove(usage);
        if let Some(own) = self.by_owner.get_mut(&entry.owner) {
            own.remove(usage);
            if *own == Usage::default() {
                self.by_owner.remove(&entry.owner);
            }
        }
        Some((entry.value, entry.fds))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Set { owner: u32, key: u8, bytes: usize, fds: usize, readers: u32 },
        Read { key: u8 },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let set = (0..3u32, 0..6u8, 0..3usize, 0..5usize, 0..4u32)
            .prop_map(|(owner, key, bytes, fds, readers)| Step::Set { owner, key, bytes, fds, readers });
        let read = (0..6u8).prop_map(|key| Step::Read { key });
        prop::collection::vec(prop_oneof![set, read], 0..60)
    }

    proptest! {
        #[test]
        fn a_value_is_read_by_as_many_readers_as_announced(steps in steps()) {
            let mut entries = Entries::default();
            // Key → value and remaining reads.
            let mut model: HashMap<String, (Vec<u8>, usize, u32)> = HashMap::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Set { owner, key, bytes, fds, readers } => {
                        let (key, value) = (key.to_string(), vec![number as u8; bytes]);
                        let set = entries.set(owner, key.clone(), value.clone(), vec![(); fds], readers);
                        prop_assert_eq!(set.is_err(), model.contains_key(&key));
                        if set.is_ok() && readers > 0 {
                            model.insert(key, (value, fds, readers));
                        }
                    }
                    Step::Read { key } => {
                        let key = key.to_string();
                        let read = entries.read(&key).map(|(value, fds)| (value, fds.len()));
                        let expected = model.get_mut(&key).map(|(value, fds, readers)| {
                            *readers -= 1;
                            (value.clone(), *fds)
                        });
                        prop_assert_eq!(read, expected);
                        model.retain(|_, (_, _, readers)| *readers > 0);
                    }
                }
                prop_assert!(model.keys().all(|key| entries.contains(key)));
                let bytes = model.iter().map(|(key, (value, _, _))| key.len() + value.len()).sum();
                let fds = model.values().map(|(_, fds, _)| fds).sum();
                prop_assert_eq!(entries.all, Usage { keys: model.len(), fds, bytes });
                prop_assert_eq!(entries.by_owner.values().map(|own| own.keys).sum::<usize>(), model.len());
            }
        }
    }

    /// Sets keys of rank `owner` until one is denied; returns the number of keys set and the reason of the denial.
    fn fill(entries: &mut Entries<()>, owner: u32, bytes: usize, fds: usize) -> (usize, String) {
        for number in 0.. {
            let key = format!("{owner}/{number:05}");
            if let Err(why) = entries.set(owner, key, vec![0; bytes], vec![(); fds], 1) {
                return (number, why);
            }
        }
        unreachable!("the numbers do not end");
    }

    #[test]
    fn the_unread_values_of_a_rank_are_bounded() {
        for (bytes, fds, most, what) in [
            (0, 0, MAX_KEYS_PER_RANK, "1025 unread keys"),
            (0, 4, MAX_FDS_PER_RANK / 4, "260 unread descriptors"),
            (12 << 10, 0, 341, "bytes"),
        ] {
            let mut entries = Entries::default();
            let (taken, why) = fill(&mut entries, 3, bytes, fds);
            assert_eq!(taken, most);
            assert!(why.contains("rank 3") && why.contains(what), "{why}");
            // Other ranks can still set values, and so can this one after a value was read.
            assert!(entries.set(4, "other".into(), vec![], vec![], 1).is_ok());
            assert!(entries.read("3/00000").is_some());
            assert!(entries.set(3, "again".into(), vec![0; bytes], vec![(); fds], 1).is_ok());
        }
    }

    #[test]
    fn the_unread_values_of_all_ranks_are_bounded() {
        let mut entries = Entries::default();
        let refusals: Vec<String> = (0..17).map(|owner| fill(&mut entries, owner, 12 << 10, 0).1).collect();
        assert!(refusals[16].contains("of rank 16 all ranks would have "), "{}", refusals[16]);
    }
}
