//! Entries of the progress page that another host is told.
//!
//! The page of node 0 shows the whole job. The other nodes send what their ranks do, as far as it has changed. Hosts have
//! different clocks, so an entry says how long ago the rank's last change was. How a rank ended, and which rank it
//! blames, is announced apart from that and at once.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{LastOperation, Operation, Phase, Progress, ProgressPage, RUNNING, RankState, milliseconds, now};

/// What a rank does, for another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Numbers", try_from = "Numbers")]
pub struct ProgressEntry {
    /// Its state in the run.
    pub state: RankState,
    /// Its process id on its own host, 0 before it joined.
    pub pid: u32,
    /// Its phase.
    pub phase: Phase,
    /// Its current training step, 0 before the first.
    pub step: u64,
    /// Number of steps it has begun since it was started.
    pub steps_begun: u64,
    /// The last operation it entered.
    pub operation: Option<LastOperation>,
    /// Time since its last change, in whole milliseconds.
    pub idle: Duration,
}

/// An entry in a message: state, process, phase, step, steps begun; operation (0: none), its sequence, its bytes, 1 while
/// it runs, the rank it waits for plus one; milliseconds since the last change. An agent sends them every second, and
/// one reads those of all others: names of fields would be most of the work.
type Numbers = (u8, u32, u32, u64, u64, u8, u64, u64, u8, u32, u64);

const STATES: [RankState; 4] = [RankState::Absent, RankState::Joined, RankState::Left, RankState::Failed];

impl From<ProgressEntry> for Numbers {
    fn from(entry: ProgressEntry) -> Numbers {
        let state = STATES.iter().position(|state| *state == entry.state).unwrap_or_default() as u8;
        let last = entry.operation;
        (
            state,
            entry.pid,
            entry.phase as u32,
            entry.step,
            entry.steps_begun,
            last.map_or(0, |last| last.operation as u8),
            last.map_or(0, |last| last.sequence),
            last.map_or(0, |last| last.bytes),
            last.map_or(0, |last| u8::from(last.running)),
            last.and_then(|last| last.waits_for).map_or(0, |rank| rank.saturating_add(1)),
            milliseconds(entry.idle),
        )
    }
}

impl TryFrom<Numbers> for ProgressEntry {
    type Error = String;

    fn try_from(numbers: Numbers) -> Result<Self, String> {
        let (state, pid, phase, step, steps_begun, operation, sequence, bytes, running, waits_for, idle) =
            numbers;
        let unknown = |what, number| format!("a progress entry with {what} {number}");
        let state = *STATES.get(usize::from(state)).ok_or_else(|| unknown("state", state.into()))?;
        let operation = match operation {
            0 => None,
            number => Some(LastOperation {
                operation: Operation::from_number(number)
                    .ok_or_else(|| unknown("operation", number.into()))?,
                sequence,
                bytes,
                running: running != 0,
                waits_for: waits_for.checked_sub(1),
            }),
        };
        if Phase::from_number(phase) as u32 != phase {
            return Err(unknown("phase", phase));
        }
        let (phase, idle) = (Phase::from_number(phase), Duration::from_millis(idle));
        Ok(ProgressEntry { state, pid, phase, step, steps_begun, operation, idle })
    }
}

/// The progress of some ranks when it was last sent.
#[derive(Debug)]
pub struct Snapshot {
    ranks: Range<u32>,
    sent: Vec<Option<Progress>>,
}

impl Snapshot {
    /// Nothing of these ranks was sent.
    pub fn of(ranks: Range<u32>) -> Self {
        Snapshot { sent: vec![None; ranks.len()], ranks }
    }
}

impl ProgressPage {
    /// What `rank` does, for another host.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn entry(&self, rank: u32) -> ProgressEntry {
        entry_at(&self.progress(rank), now())
    }

    /// The entries of the snapshot's ranks that have changed since they were last sent; the snapshot then holds them.
    ///
    /// # Panics
    /// If a rank of the snapshot does not exist.
    pub fn changes_since(&self, snapshot: &mut Snapshot) -> Vec<(u32, ProgressEntry)> {
        let now = now();
        let changed = snapshot.ranks.clone().zip(&mut snapshot.sent).filter_map(|(rank, sent)| {
            let progress = self.progress(rank);
            (sent.replace(progress) != Some(progress)).then(|| (rank, entry_at(&progress, now)))
        });
        changed.collect()
    }

    /// Records what `rank` of another host does. An end is not recorded from an entry, except for a goodbye: how a rank
    /// ended is announced with its reason.
    ///
    /// # Errors
    /// If the rank, or the one it waits for, does not exist.
    pub fn apply(&self, rank: u32, entry: &ProgressEntry) -> Result<(), String> {
        let waits_for = entry.operation.and_then(|last| last.waits_for);
        if let Some(other) =
            [Some(rank), waits_for].into_iter().flatten().find(|rank| *rank >= self.world_size)
        {
            return Err(format!("a progress entry with rank {other} in a world of {}", self.world_size));
        }
        let record = self.record(rank);
        record.pid.store(entry.pid, Ordering::Relaxed);
        record.phase.store(entry.phase as u32, Ordering::Relaxed);
        record.step.store(entry.step, Ordering::Relaxed);
        record.steps_begun.store(entry.steps_begun, Ordering::Relaxed);
        if let Some(last) = entry.operation {
            record.sequence.store(last.sequence, Ordering::Relaxed);
            record.bytes.store(last.bytes, Ordering::Relaxed);
            let running = if last.running { RUNNING } else { 0 };
            record.operation.store(last.operation as u32 | running, Ordering::Relaxed);
        }
        record.waits_for.store(waits_for.map_or(0, |rank| rank + 1), Ordering::Relaxed);
        record.changed.store(milliseconds(now().saturating_sub(entry.idle)), Ordering::Relaxed);
        match entry.state {
            RankState::Joined => self.note_joined(rank),
            RankState::Left => self.record_end(rank, super::Ending::Left),
            RankState::Absent | RankState::Failed => {}
        }
        Ok(())
    }
}

fn entry_at(progress: &Progress, now: Duration) -> ProgressEntry {
    let Progress { state, pid, phase, step, steps_begun, operation, changed } = *progress;
    let idle = match changed.is_zero() {
        // It has done nothing yet.
        true => Duration::ZERO,
        false => now.saturating_sub(changed),
    };
    ProgressEntry { state, pid, phase, step, steps_begun, operation, idle }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Ending;
    use super::*;

    /// Carries all changes of `from` to `to` as bytes; returns the ranks that had changed.
    fn carry(from: &ProgressPage, snapshot: &mut Snapshot, to: &ProgressPage) -> Vec<u32> {
        let bytes = serde_json::to_vec(&from.changes_since(snapshot)).unwrap();
        let changes: Vec<(u32, ProgressEntry)> = serde_json::from_slice(&bytes).unwrap();
        changes.iter().for_each(|(rank, entry)| to.apply(*rank, entry).unwrap());
        changes.into_iter().map(|(rank, _)| rank).collect()
    }

    #[test]
    fn only_what_changed_is_carried_to_another_page() {
        let ((here, _), (there, _)) = (ProgressPage::create(4).unwrap(), ProgressPage::create(4).unwrap());
        let mut snapshot = Snapshot::of(2..4);
        assert_eq!(carry(&here, &mut snapshot, &there), [2, 3]);
        assert_eq!((there.state(2), there.progress(3).operation), (RankState::Absent, None));
        assert_eq!(carry(&here, &mut snapshot, &there), []);

        here.join(3, 42);
        here.begin_step(3, 100);
        here.enter(3, Operation::AllReduce, 7, 4096);
        here.wait(3, 0);
        assert_eq!(carry(&here, &mut snapshot, &there), [3]);
        assert_eq!(carry(&here, &mut snapshot, &there), []);
        let without_time = |page: &ProgressPage| Progress { changed: Duration::ZERO, ..page.progress(3) };
        assert_eq!(without_time(&there), without_time(&here));
        assert_eq!(there.progress(3).operation.unwrap().waits_for, Some(0));

        here.leave(3);
        here.record_end(3, Ending::Left);
        here.record_end(2, Ending::Failed("exited with code 3"));
        assert_eq!(carry(&here, &mut snapshot, &there), [2, 3]);
        assert_eq!(without_time(&there), without_time(&here));
        // Its reason is announced apart.
        assert_eq!((there.state(2), there.state(3)), (RankState::Absent, RankState::Left));
    }

    #[test]
    fn the_time_of_a_change_is_translated_to_the_local_clock() {
        let (page, _) = ProgressPage::create(2).unwrap();
        page.join(0, 1);
        let idle = Duration::from_secs(40);
        page.apply(1, &ProgressEntry { idle, ..page.entry(0) }).unwrap();
        let ago = now() - page.progress(1).changed;
        assert!(ago >= idle && ago < idle + Duration::from_secs(10), "{ago:?}");
        // Longer than this host has been running.
        page.apply(1, &ProgressEntry { idle: Duration::MAX, ..page.entry(0) }).unwrap();
        assert_eq!(page.progress(1).changed, Duration::ZERO);
    }

    #[test]
    fn entries_of_ranks_that_do_not_exist_are_refused() {
        let (page, _) = ProgressPage::create(2).unwrap();
        page.enter(0, Operation::Barrier, 1, 0);
        page.wait(0, 1);
        let entry = page.entry(0);
        let alone = ProgressPage::create(1).unwrap().0;
        for (rank, problem) in
            [(0, "a progress entry with rank 1 in"), (7, "a progress entry with rank 7 in")]
        {
            let refusal = alone.apply(rank, &entry).unwrap_err();
            assert!(refusal.starts_with(problem), "{refusal}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_numbers_never_panic(state in 0..6u8, phase in 0..8u32, operation in 0..20u8, rest: [u64; 4], waits_for: u32) {
            let [step, steps_begun, bytes, idle] = rest;
            let numbers: Numbers = (state, 7, phase, step, steps_begun, operation, 1, bytes, 1, waits_for, idle);
            let json = serde_json::to_vec(&numbers).unwrap();
            if let Ok(entry) = serde_json::from_slice::<ProgressEntry>(&json) {
                let (page, _) = ProgressPage::create(1).unwrap();
                let _ = page.apply(0, &entry);
                let again: Numbers = entry.into();
                prop_assert_eq!((again.0, again.2, again.5, again.10), (state, phase, operation, idle));
            }
        }
    }
}
