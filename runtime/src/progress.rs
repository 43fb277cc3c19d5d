//! The progress page: what every rank of a run is doing, in memory that all of them and the launcher map.
//!
//! The server of the rendezvous makes the page and hands it to each rank that joins. A rank writes its own slot;
//! the server writes how a rank ended. A rank that waits for a peer looks here whether the peer is still there:
//! no message, no thread and no signal is needed to learn of a death, and what a rank did last can be read after
//! it has been killed or stopped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::shm::{Shared, SharedMemory, reserve};
use crate::{Error, Result};

/// A text in shared memory. Written once; readers see it whole because the length is stored last.
#[repr(C)]
struct SharedText {
    len: AtomicU32,
    bytes: [AtomicU8; SharedText::CAPACITY],
}

impl SharedText {
    const CAPACITY: usize = 380;

    /// Stores `text`, cut at the capacity, unless there is one already: the first cause stays.
    fn set_once(&self, text: &str) {
        if self.len.load(Ordering::Acquire) != 0 {
            return;
        }
        let mut end = text.len().min(Self::CAPACITY);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        for (slot, byte) in self.bytes.iter().zip(&text.as_bytes()[..end]) {
            slot.store(*byte, Ordering::Relaxed);
        }
        self.len.store(end as u32, Ordering::Release);
    }

    /// The text, empty if none was set. Bytes of a misbehaving writer that are no UTF-8 come out as U+FFFD.
    fn get(&self) -> String {
        let len = (self.len.load(Ordering::Acquire) as usize).min(Self::CAPACITY);
        let bytes: Vec<u8> = self.bytes[..len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Where a rank is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankState {
    /// Not yet heard of.
    Absent,
    /// Member of the run.
    Joined,
    /// Ended as it should: said goodbye, or exited with code 0.
    Left,
    /// Ended otherwise.
    Failed,
}

/// How a rank ended. A later variant says more than an earlier one and replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending<'a> {
    /// It said goodbye.
    Left,
    /// Its process exited with code 0.
    Finished,
    /// Otherwise, as a predicate: "exited with code 3".
    Failed(&'a str),
}

// The numbers of a slot's state.
const JOINED: u32 = 1;
const LEFT: u32 = 2;
const FINISHED: u32 = 3;
const FAILED: u32 = 4;

impl RankState {
    fn from_number(number: u32) -> Self {
        match number {
            JOINED => RankState::Joined,
            LEFT | FINISHED => RankState::Left,
            FAILED => RankState::Failed,
            _ => RankState::Absent,
        }
    }
}

/// One rank's slot: a multiple of the cache line, so that no rank's writes disturb another's.
#[repr(C, align(128))]
struct Slot {
    state: AtomicU32,
    pid: AtomicU32,
    /// Last collective entered: its number in its communicator, from 1.
    sequence: AtomicU64,
    /// Payload of that collective in bytes.
    bytes: AtomicU64,
    /// Training step, from 1.
    step: AtomicU64,
    /// Culprit's rank plus one, 0 while nobody is blamed; bit 31 marks a timeout.
    blamed: AtomicU32,
    blame: SharedText,
    failure: SharedText,
}

// SAFETY: atomics and arrays of atomics only.
unsafe impl Shared for Slot {}

const TIMED_OUT: u32 = 1 << 31;

/// Whom a failing rank holds responsible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blame {
    /// The rank held responsible.
    pub culprit: u32,
    /// True when the culprit was silent past a deadline, false when it was gone or at odds.
    pub timed_out: bool,
    /// The failing rank's error.
    pub message: String,
}

/// What a rank was last seen doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Where the rank is in its life.
    pub state: RankState,
    /// Its process, 0 before it joined.
    pub pid: u32,
    /// Number of the last collective it entered, 0 for none.
    pub sequence: u64,
    /// Payload of that collective in bytes.
    pub bytes: u64,
    /// Training step it is in, 0 before the first.
    pub step: u64,
}

/// The slots of all ranks.
#[derive(Debug)]
pub struct ProgressPage {
    memory: SharedMemory,
    world_size: u32,
}

impl ProgressPage {
    fn bytes(world_size: u32) -> usize {
        (world_size as usize * size_of::<Slot>()).next_multiple_of(4096)
    }

    /// A page for `world_size` ranks, and the descriptor to hand to them.
    pub(crate) fn create(world_size: u32) -> Result<(Self, OwnedFd)> {
        let (memory, fd) = SharedMemory::create("mgpu-progress", Self::bytes(world_size))?;
        reserve("the progress page", &memory, fd.as_fd(), 0, memory.len())?;
        Ok((ProgressPage { memory, world_size }, fd))
    }

    /// Maps a page received from the server.
    pub(crate) fn open(fd: BorrowedFd<'_>, world_size: u32) -> Result<Self> {
        let memory = SharedMemory::open("the progress page", fd, Self::bytes(world_size))?;
        Ok(ProgressPage { memory, world_size })
    }

    fn slot(&self, rank: u32) -> &Slot {
        assert!(rank < self.world_size, "rank {rank} in a world of {}", self.world_size);
        self.memory.view(rank as usize * size_of::<Slot>())
    }

    /// Number of ranks.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// What `rank` was last seen doing.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn progress(&self, rank: u32) -> Progress {
        let slot = self.slot(rank);
        Progress {
            state: self.state(rank),
            pid: slot.pid.load(Ordering::Relaxed),
            sequence: slot.sequence.load(Ordering::Relaxed),
            bytes: slot.bytes.load(Ordering::Relaxed),
            step: slot.step.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn state(&self, rank: u32) -> RankState {
        RankState::from_number(self.slot(rank).state.load(Ordering::Acquire))
    }

    pub(crate) fn join(&self, rank: u32, pid: u32) {
        let slot = self.slot(rank);
        slot.pid.store(pid, Ordering::Relaxed);
        // A rank that the launcher has already seen end does not come back to life.
        let _ = slot.state.compare_exchange(0, JOINED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Records that `rank` ended. Of two failures the first stays.
    pub(crate) fn depart(&self, rank: u32, ending: Ending<'_>) {
        let slot = self.slot(rank);
        let number = match ending {
            Ending::Left => LEFT,
            Ending::Finished => FINISHED,
            Ending::Failed(how) => {
                slot.failure.set_once(how);
                FAILED
            }
        };
        slot.state.fetch_max(number, Ordering::AcqRel);
    }

    /// How `rank` ended, as a predicate; empty if it has not.
    pub(crate) fn departure(&self, rank: u32) -> String {
        let slot = self.slot(rank);
        match slot.state.load(Ordering::Acquire) {
            LEFT => "left the run".into(),
            FINISHED => "exited with code 0".into(),
            FAILED => slot.failure.get(),
            _ => String::new(),
        }
    }

    pub(crate) fn enter(&self, rank: u32, sequence: u32, bytes: usize) {
        let slot = self.slot(rank);
        slot.sequence.store(u64::from(sequence), Ordering::Relaxed);
        slot.bytes.store(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn set_step(&self, rank: u32, step: u64) {
        self.slot(rank).step.store(step, Ordering::Relaxed);
    }

    /// Records `error` as the reason why `rank` is about to fail, if it names a culprit. The first one stays.
    pub(crate) fn blame(&self, rank: u32, error: &Error) {
        let Some(culprit) = error.culprit() else { return };
        let slot = self.slot(rank);
        slot.blame.set_once(&error.to_string());
        let timed_out = if error.is_timeout() { TIMED_OUT } else { 0 };
        let value = (culprit + 1) | timed_out;
        let _ = slot.blamed.compare_exchange(0, value, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Whom `rank` held responsible before it failed.
    pub fn blame_of(&self, rank: u32) -> Option<Blame> {
        let slot = self.slot(rank);
        let blamed = slot.blamed.load(Ordering::Acquire);
        let culprit = (blamed & !TIMED_OUT).checked_sub(1)?;
        (culprit < self.world_size).then(|| Blame {
            culprit,
            timed_out: blamed & TIMED_OUT != 0,
            message: slot.blame.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_worst_ending_and_the_first_blame_stay() {
        let (page, fd) = ProgressPage::create(3).unwrap();
        let other = ProgressPage::open(fd.as_fd(), 3).unwrap();
        page.join(2, 41);
        assert_eq!(other.progress(2).state, RankState::Joined);
        assert_eq!(other.progress(2).pid, 41);
        page.depart(2, Ending::Left);
        assert_eq!((other.state(2), other.departure(2).as_str()), (RankState::Left, "left the run"));
        page.depart(2, Ending::Failed("exited with code 3"));
        page.depart(2, Ending::Failed("was killed by SIGKILL"));
        page.depart(2, Ending::Finished);
        assert_eq!((other.state(2), other.departure(2).as_str()), (RankState::Failed, "exited with code 3"));
        page.join(2, 42);
        assert_eq!(other.state(2), RankState::Failed);

        assert_eq!(page.blame_of(0), None);
        for waited_for in [vec![1], vec![2]] {
            let after = Duration::from_secs(2);
            other.blame(0, &Error::Timeout { rank: 0, waited_for, operation: "barrier".into(), after });
        }
        let blame = page.blame_of(0).unwrap();
        assert_eq!((blame.culprit, blame.timed_out), (1, true));
        assert!(blame.message.contains("waited 2.0 s for rank 1 in barrier"), "{}", blame.message);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let (page, _fd) = ProgressPage::create(1).unwrap();
        page.depart(0, Ending::Failed(&"é".repeat(300)));
        assert_eq!(page.departure(0), "é".repeat(SharedText::CAPACITY / 2));
    }
}
