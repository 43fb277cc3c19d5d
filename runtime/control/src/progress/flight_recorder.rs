//! The flight recorder: the last collectives of every rank, in a ring behind the records of the progress page.
//!
//! A rank writes its own ring and nobody else does. Readers take no lock and ask nobody, so the ring can also be read
//! after its rank has been killed. A record that is being written while it is read is left out: its stamp is 0, or
//! differs before and after.
//!
//! Reading the exact clock twice would cost a short collective several per cent, so only collectives of
//! [`EXACT_FROM`] bytes and more are timed exactly. For the others a record repeats the times of the rank's changes, which
//! the rank has read anyway, with the resolution of the coarse clock: one at the begin, and one after a wait.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::{Operation, ProgressPage, RankRecord};
use crate::shm::Shared;

/// Number of collectives that a ring holds.
pub const RECORDED: usize = 64;

/// From this payload on, in bytes, a collective takes so long that two readings of the exact clock do not count.
pub const EXACT_FROM: usize = 1 << 20;

/// One collective: one cache line.
#[repr(C, align(64))]
struct Slot {
    /// The number of the collective among all of this rank, from 1; 0 while the slot is being written.
    stamp: AtomicU64,
    /// The [`RecordedCommunicator`].
    communicator: AtomicU64,
    /// The sequence number in the upper half, the tag in the lower one.
    sequence_and_tag: AtomicU64,
    bytes: AtomicU64,
    /// The [`Operation`] and flags.
    operation: AtomicU64,
    /// By the monotonic clock, in nanoseconds if it is exact and otherwise in milliseconds; 0 if it is not known yet.
    begin: AtomicU64,
    /// As above; 0 while the collective runs.
    end: AtomicU64,
}

/// The last collectives of one rank: 4 KiB, so that ranks do not share pages of memory.
#[repr(C, align(4096))]
pub(super) struct Ring {
    slots: [Slot; RECORDED],
}

// SAFETY: an array of structs of atomics only.
unsafe impl Shared for Ring {}

// Bits of a slot's `operation`.
const OPERATION: u64 = 0xff;
const HAS_TAG: u64 = 1 << 8;
const ON_DEVICE: u64 = 1 << 9;
const EXACT: u64 = 1 << 10;

/// Which communicator of a rank a collective belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordedCommunicator {
    /// One of all ranks, by its number, from 1.
    World(u32),
    /// A group. Groups of the same number have no rank in common; the first rank tells them apart.
    Group {
        /// The number of the split.
        number: u32,
        /// The group's rank 0, as a rank of the world.
        first: u32,
    },
}

impl RecordedCommunicator {
    /// As one word: the number, and for a group its first rank plus one.
    pub fn to_word(self) -> u64 {
        match self {
            RecordedCommunicator::World(number) => u64::from(number),
            RecordedCommunicator::Group { number, first } => {
                ((u64::from(first) + 1) << 32) | u64::from(number)
            }
        }
    }

    fn from_word(word: u64) -> Self {
        let number = word as u32;
        match ((word >> 32) as u32).checked_sub(1) {
            None => RecordedCommunicator::World(number),
            Some(first) => RecordedCommunicator::Group { number, first },
        }
    }
}

/// A collective, or a message, that a rank begins.
#[derive(Debug, Clone, Copy)]
pub struct NewCollective {
    /// The [communicator](RecordedCommunicator), as a word.
    pub communicator: u64,
    /// The operation.
    pub operation: Operation,
    /// Its number in its communicator, from 1; for a message that of the next collective.
    pub sequence: u32,
    /// Its payload in bytes.
    pub bytes: usize,
    /// The caller's tag: the index of the bucket.
    pub tag: Option<u32>,
    /// It is enqueued for a GPU: its end is the end of the enqueuing.
    pub on_device: bool,
}

/// The record of a collective that a rank has begun.
#[derive(Debug, Clone, Copy)]
#[must_use = "the collective is recorded as running until it ends"]
pub struct OpenRecord {
    number: u64,
    is_exact: bool,
}

/// A collective, or a message, as it was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedCollective {
    /// Its number among all of its rank, from 1.
    pub number: u64,
    /// Its communicator.
    pub communicator: RecordedCommunicator,
    /// The operation.
    pub operation: Operation,
    /// Its number in its communicator, from 1; for a message that of the next collective.
    pub sequence: u32,
    /// Its payload in bytes.
    pub bytes: u64,
    /// The caller's tag: the index of the bucket.
    pub tag: Option<u32>,
    /// It was enqueued for a GPU: its end is the end of the enqueuing.
    pub on_device: bool,
    /// When it began, as [`now`](super::now).
    pub begin: Duration,
    /// When it ended; `None` if it had not ended.
    pub end: Option<Duration>,
    /// Whether the times are exact; otherwise they have a resolution of some milliseconds.
    pub is_exact: bool,
}

impl RecordedCollective {
    /// False for messages, in which only two ranks take part.
    pub fn is_collective(&self) -> bool {
        !matches!(self.operation, Operation::Send | Operation::Recv | Operation::SendRecv)
    }
}

impl Slot {
    #[inline]
    fn write(&self, number: u64, new: &NewCollective) {
        let is_exact = new.bytes >= EXACT_FROM;
        let flag = |flag: u64, is_set: bool| flag * u64::from(is_set);
        let operation = new.operation as u64
            | flag(HAS_TAG, new.tag.is_some())
            | flag(ON_DEVICE, new.on_device)
            | flag(EXACT, is_exact);
        self.stamp.store(0, Ordering::Relaxed);
        // A reader that sees any of the following stores sees the 0, too.
        fence(Ordering::Release);
        self.communicator.store(new.communicator, Ordering::Relaxed);
        let sequence_and_tag = (u64::from(new.sequence) << 32) | u64::from(new.tag.unwrap_or_default());
        self.sequence_and_tag.store(sequence_and_tag, Ordering::Relaxed);
        self.bytes.store(new.bytes as u64, Ordering::Relaxed);
        self.operation.store(operation, Ordering::Relaxed);
        self.begin.store(if is_exact { exact_now() } else { 0 }, Ordering::Relaxed);
        self.end.store(0, Ordering::Relaxed);
        self.stamp.store(number, Ordering::Release);
    }

    /// The record with this number; `None` if the slot holds another one, or is being written. `began` is the time at which
    /// the rank's operation began: a running collective below [`EXACT_FROM`] has begun then.
    fn read(&self, number: u64, began: Duration) -> Option<RecordedCollective> {
        if self.stamp.load(Ordering::Acquire) != number {
            return None;
        }
        let values = [
            &self.communicator,
            &self.sequence_and_tag,
            &self.bytes,
            &self.operation,
            &self.begin,
            &self.end,
        ];
        let [communicator, sequence_and_tag, bytes, operation, begin, end] =
            values.map(|value| value.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if self.stamp.load(Ordering::Relaxed) != number {
            return None;
        }
        let is_exact = operation & EXACT != 0;
        let time = |time| {
            let duration = if is_exact { Duration::from_nanos(time) } else { Duration::from_millis(time) };
            (time != 0).then_some(duration)
        };
        Some(RecordedCollective {
            number,
            communicator: RecordedCommunicator::from_word(communicator),
            operation: Operation::from_number((operation & OPERATION) as u8)?,
            sequence: (sequence_and_tag >> 32) as u32,
            bytes,
            tag: (operation & HAS_TAG != 0).then_some(sequence_and_tag as u32),
            on_device: operation & ON_DEVICE != 0,
            begin: time(begin).unwrap_or(began),
            end: time(end),
            is_exact,
        })
    }
}

impl ProgressPage {
    /// Records that `rank` begins a collective. `is_alone`: no other thread of the rank records one at the same time.
    #[inline]
    pub fn begin_collective(&self, rank: u32, new: &NewCollective, is_alone: bool) -> OpenRecord {
        let counter = &self.record(rank).recorded;
        let earlier = if is_alone {
            // An atomic addition would wait until all earlier stores of this core are visible to its peers.
            let earlier = counter.load(Ordering::Relaxed);
            counter.store(earlier.wrapping_add(1), Ordering::Relaxed);
            earlier
        } else {
            counter.fetch_add(1, Ordering::Relaxed)
        };
        let number = earlier.wrapping_add(1);
        self.slot(rank, number).write(number, new);
        OpenRecord { number, is_exact: new.bytes >= EXACT_FROM }
    }

    /// Records that a collective has ended, without [leaving](Self::leave) the operation that the rank is in.
    #[inline]
    pub fn end_collective(&self, rank: u32, open: OpenRecord) {
        self.record_times(rank, open, self.record(rank).operation_began());
    }

    /// [Leaves](Self::leave) the operation of a collective, and records that the collective has ended.
    pub fn leave_collective(&self, rank: u32, open: OpenRecord) {
        // After a wait, leaving replaces the time.
        let began = self.record(rank).operation_began();
        self.leave(rank);
        self.record_times(rank, open, began);
    }

    /// Records when a collective ended, and if its time is not exact, that it `began` at this time in milliseconds.
    #[inline]
    fn record_times(&self, rank: u32, open: OpenRecord, began: u64) {
        let slot = self.slot(rank, open.number);
        if slot.stamp.load(Ordering::Relaxed) != open.number {
            // Other threads of the rank have recorded a whole ring of collectives meanwhile.
            return;
        }
        if open.is_exact {
            slot.end.store(exact_now(), Ordering::Relaxed);
            return;
        }
        let changed = self.record(rank).changed.load(Ordering::Relaxed);
        slot.begin.store(began, Ordering::Relaxed);
        // Another thread of the rank may have stored an earlier time.
        slot.end.store(changed.max(began).max(1), Ordering::Relaxed);
    }

    /// The last collectives of `rank`, oldest first, at most [`RECORDED`]. Those that the rank is writing at the moment
    /// are left out. Empty if the rank runs on another host, whose page has them.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn collectives(&self, rank: u32) -> Vec<RecordedCollective> {
        let record: &RankRecord = self.record(rank);
        let last = record.recorded.load(Ordering::Relaxed);
        // The first access to a ring allocates its memory.
        if last == 0 {
            return Vec::new();
        }
        let began = Duration::from_millis(record.operation_began());
        let first = last.saturating_sub(RECORDED as u64) + 1;
        (first..=last).filter_map(|number| self.slot(rank, number).read(number, began)).collect()
    }

    /// Number of collectives that `rank` has begun.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn recorded(&self, rank: u32) -> u64 {
        self.record(rank).recorded.load(Ordering::Relaxed)
    }

    /// The slot of the collective with this number.
    #[inline]
    fn slot(&self, rank: u32, number: u64) -> &Slot {
        &self.rings[rank].slots[number as usize % RECORDED]
    }
}

/// Nanoseconds of the monotonic clock, which the coarse clock follows.
fn exact_now() -> u64 {
    // This clock exists on every Linux.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| Duration::from(time).as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicBool;

    use super::super::now;
    use super::*;

    fn new(sequence: u32, bytes: usize) -> NewCollective {
        NewCollective {
            communicator: RecordedCommunicator::World(1).to_word(),
            operation: Operation::AllReduce,
            sequence,
            bytes,
            tag: sequence.is_multiple_of(2).then_some(sequence),
            on_device: false,
        }
    }

    #[test]
    fn the_last_collectives_of_each_rank_are_kept_in_order() {
        let (page, fd) = ProgressPage::create(3).unwrap();
        let observer = ProgressPage::inspect(fd.as_fd()).unwrap();
        assert!((0..3).all(|rank| observer.collectives(rank).is_empty()));
        for sequence in 1..=150 {
            page.touch(1);
            let bytes = if sequence % 3 == 0 { EXACT_FROM } else { 12 };
            let slot = page.begin_collective(1, &new(sequence, bytes), sequence % 5 != 0);
            if sequence < 150 {
                page.end_collective(1, slot);
            }
        }
        let seen = observer.collectives(1);
        assert_eq!((seen.len(), observer.recorded(1)), (RECORDED, 150));
        for (record, sequence) in seen.iter().zip(87u32..) {
            assert_eq!((record.number, record.sequence), (u64::from(sequence), sequence));
            assert_eq!(record.tag, sequence.is_multiple_of(2).then_some(sequence));
            assert_eq!(record.is_exact, sequence % 3 == 0);
            assert_eq!(record.end.is_none(), sequence == 150, "{record:?}");
            assert!(record.begin > Duration::ZERO && record.end.is_none_or(|end| end >= record.begin));
        }
        // One that ends after its slot was used again.
        let late = page.begin_collective(0, &new(1, 12), true);
        for sequence in 2..=65 {
            let _running = page.begin_collective(0, &new(sequence, 12), true);
        }
        page.end_collective(0, late);
        let seen = observer.collectives(0);
        assert_eq!((seen.len(), seen[63].sequence), (RECORDED, 65));
        assert!(seen.iter().all(|record| record.end.is_none()));
        assert!(observer.collectives(2).is_empty());
    }

    #[test]
    fn a_wait_in_a_short_collective_is_recorded() {
        let (page, _fd) = ProgressPage::create(2).unwrap();
        let took = |record: &RecordedCollective| record.end.map(|end| end - record.begin);
        let long = Duration::from_millis(50);
        // With rounds that touch the page after the wait, with a wait that ends in the middle, and with one wait only.
        for (touches, stops) in [(true, false), (false, true), (true, true), (false, false)] {
            page.enter(1, Operation::AllReduce, 1, 12);
            let open = page.begin_collective(1, &new(1, 12), true);
            let began = now();
            page.wait(1, 0);
            while now() < began + long {
                std::thread::yield_now();
            }
            if stops {
                page.stop_waiting(1);
            }
            if touches {
                page.touch(1);
                page.wait(1, 0);
            }
            let running = *page.collectives(1).last().unwrap();
            assert!(running.end.is_none() && running.begin <= began, "{running:?} at {began:?}");
            page.leave_collective(1, open);
            let ended = *page.collectives(1).last().unwrap();
            assert_eq!(ended.begin, running.begin);
            assert!(took(&ended).unwrap() >= long - Duration::from_millis(10), "{ended:?}");
            // The next one does not wait.
            page.enter(1, Operation::AllReduce, 2, 12);
            let open = page.begin_collective(1, &new(2, 12), true);
            page.leave_collective(1, open);
            let next = *page.collectives(1).last().unwrap();
            assert_eq!(took(&next), Some(Duration::ZERO));
            assert!(next.begin >= ended.end.unwrap());
        }
    }

    #[test]
    fn communicators_are_told_apart() {
        for communicator in [
            RecordedCommunicator::World(1),
            RecordedCommunicator::World(u32::MAX),
            RecordedCommunicator::Group { number: 1, first: 0 },
            RecordedCommunicator::Group { number: 7, first: u32::MAX - 1 },
        ] {
            assert_eq!(RecordedCommunicator::from_word(communicator.to_word()), communicator);
        }
    }

    /// Each record has its sequence number in all fields, so a mixture of two would be seen.
    #[test]
    fn a_reader_never_sees_a_mixture_of_two_records() {
        let (page, _fd) = ProgressPage::create(1).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for sequence in (1..=300_000u32).map(|number| number * 2) {
                    let record = NewCollective {
                        communicator: sequence.into(),
                        ..new(sequence, EXACT_FROM + sequence as usize)
                    };
                    let slot = page.begin_collective(0, &record, true);
                    page.end_collective(0, slot);
                }
                is_over.store(true, Ordering::Release);
            });
            let mut read = 0;
            while !is_over.load(Ordering::Acquire) || read == 0 {
                for record in page.collectives(0) {
                    let sequence = record.sequence;
                    assert_eq!(record.communicator, RecordedCommunicator::World(sequence));
                    assert_eq!(record.bytes, EXACT_FROM as u64 + u64::from(sequence));
                    assert_eq!((record.tag, record.number), (Some(sequence), u64::from(sequence / 2)));
                    read += 1;
                }
            }
        });
    }
}
