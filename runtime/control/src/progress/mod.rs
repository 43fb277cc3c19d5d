//! The progress page: what every rank of a run is doing, in memory that all of them and the launcher map.
//!
//! The server of the rendezvous makes the page and hands it to each rank that joins. A rank writes its own slot;
//! the server writes how a rank ended. A rank that waits for a peer looks here whether the peer is still there:
//! no message, no thread and no signal is needed to learn of a death, and what a rank did last can be read after
//! it has been killed or stopped. An outsider of the same user can look at a run, too ([`ProgressPage::inspect`]):
//! the page has no name, but its launcher's descriptors are in `/proc`.

mod text;
mod view;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use text::SharedText;
pub use view::Ending;
pub use view::{Blame, LastOperation, Operation, Phase, Progress, RankState, now};

use crate::shm::{Shared, SharedMemory, reserve};
use crate::{Error, Result};

/// Name of the page's memory, as `/proc/PID/fd` shows it.
pub const PAGE_NAME: &str = "mgpu-progress";

// The numbers of a slot's state.
const JOINED: u32 = 1;
const LEFT: u32 = 2;
const FINISHED: u32 = 3;
const FAILED: u32 = 4;

fn state_of(number: u32) -> RankState {
    match number {
        JOINED => RankState::Joined,
        LEFT | FINISHED => RankState::Left,
        FAILED => RankState::Failed,
        _ => RankState::Absent,
    }
}

/// What the page is of. Its bytes change with the layout of the page, so that no other version misreads it.
#[repr(C, align(128))]
struct Header {
    magic: AtomicU64,
    launcher: AtomicU32,
    restarts: AtomicU32,
    world_size: AtomicU32,
    /// The first rank that failed, plus one; 0 while none has.
    first_failed: AtomicU32,
    /// In milliseconds of [`now`].
    started: AtomicU64,
    program: SharedText,
}

/// Tells a page of this layout from other memory.
const MAGIC: u64 = 0x6d67_7075_0000_0005;

/// One rank's slot: a multiple of the cache line, so that no rank's writes disturb another's.
#[repr(C, align(128))]
struct Slot {
    /// Last collective entered: its number in its communicator, from 1.
    sequence: AtomicU64,
    /// Payload of that collective in bytes.
    bytes: AtomicU64,
    /// Its [`Operation`], with [`RUNNING`] while the rank is in it; 0 before the first.
    operation: AtomicU32,
    /// The rank it waits for, plus one; 0 while it does not.
    waits_for: AtomicU32,
    /// The [`Place`] that it waits for a peer in; 0 while it does not.
    waits_in: AtomicU64,
    /// The [`Place`] of the message that it waits for a peer in; 0 while it does not.
    message: AtomicU64,
    /// The [`Place`] at which it came to the end of a communicator last; 0 before the first.
    ends_at: AtomicU64,
    /// When something changed last, in milliseconds of [`now`].
    changed: AtomicU64,
    /// Training step, from 1.
    step: AtomicU64,
    steps_begun: AtomicU64,
    /// Injected faults that the rank has come to: a bit for each, by its place in the list of them.
    faults: AtomicU64,
    phase: AtomicU32,
    state: AtomicU32,
    /// The process that joined; 0 before.
    pid: AtomicU32,
    /// The process that the launcher started.
    started: AtomicU32,
    /// Culprit's rank plus one, 0 while nobody is blamed; bit 31 marks a timeout.
    blamed: AtomicU32,
    blame: SharedText,
    failure: SharedText,
}

// SAFETY: atomics and arrays and structs of atomics only.
unsafe impl Shared for Header {}
// SAFETY: as above.
unsafe impl Shared for Slot {}

/// Bit of a slot's operation.
const RUNNING: u32 = 1 << 31;
const TIMED_OUT: u32 = 1 << 31;

/// How far a rank is in a communicator whose peers cannot see that for themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The communicator's number, from 1.
    pub communicator: u32,
    /// Collectives that the rank has begun in it; of a message, those exchanged with that peer.
    pub turns: u32,
}

impl Place {
    fn to_number(self) -> u64 {
        u64::from(self.communicator) << 32 | u64::from(self.turns)
    }

    fn from_number(number: u64) -> Option<Self> {
        (number != 0).then_some(Place { communicator: (number >> 32) as u32, turns: number as u32 })
    }
}

/// The slots of all ranks.
#[derive(Debug)]
pub struct ProgressPage {
    memory: SharedMemory,
    world_size: u32,
}

/// Which run a page is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunInfo {
    /// The launcher's process.
    pub launcher: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// How often the ranks have been restarted.
    pub restarts: u32,
    /// When the ranks were started, as [`now`].
    pub started: Duration,
    /// What they run.
    pub program: String,
}

impl ProgressPage {
    fn bytes(world_size: u32) -> usize {
        (size_of::<Header>() + world_size as usize * size_of::<Slot>()).next_multiple_of(4096)
    }

    /// A page for `world_size` ranks, and the descriptor to hand to them.
    pub fn create(world_size: u32) -> Result<(Self, OwnedFd)> {
        let (memory, fd) = SharedMemory::create(PAGE_NAME, Self::bytes(world_size))?;
        reserve("the progress page", &memory, fd.as_fd(), 0, memory.size())?;
        let header = memory.view::<Header>(0);
        header.launcher.store(std::process::id(), Ordering::Relaxed);
        header.world_size.store(world_size, Ordering::Relaxed);
        header.started.store(milliseconds(now()), Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((ProgressPage { memory, world_size }, fd))
    }

    /// Maps a page received from the server.
    pub fn open(fd: BorrowedFd<'_>, world_size: u32) -> Result<Self> {
        let memory = SharedMemory::open("the progress page", fd, Self::bytes(world_size))?;
        Ok(ProgressPage { memory, world_size })
    }

    /// Maps the page of a run that this process does not belong to, for reading.
    ///
    /// # Errors
    /// If the descriptor is not of a page, or of one of another version.
    pub fn inspect(fd: BorrowedFd<'_>) -> Result<Self> {
        let memory = SharedMemory::open_for_reading("a progress page", fd)?;
        let other = || Error::system("read a progress page", "it is of another version of mgpurun");
        if memory.size() < size_of::<Header>() {
            return Err(other());
        }
        let header = memory.view::<Header>(0);
        let world_size = header.world_size.load(Ordering::Relaxed);
        if header.magic.load(Ordering::Acquire) != MAGIC || memory.size() != Self::bytes(world_size) {
            return Err(other());
        }
        Ok(ProgressPage { memory, world_size })
    }

    fn header(&self) -> &Header {
        self.memory.view(0)
    }

    #[inline]
    fn slot(&self, rank: u32) -> &Slot {
        assert!(rank < self.world_size, "rank {rank} in a world of {}", self.world_size);
        self.memory.view(size_of::<Header>() + rank as usize * size_of::<Slot>())
    }

    /// Notes what the ranks run, and how often they have been restarted.
    pub fn describe(&self, program: &str, restarts: u32) {
        self.header().restarts.store(restarts, Ordering::Relaxed);
        self.header().program.set_once(program);
    }

    /// Which run this is.
    pub fn run(&self) -> RunInfo {
        let header = self.header();
        RunInfo {
            launcher: header.launcher.load(Ordering::Relaxed),
            world_size: self.world_size,
            restarts: header.restarts.load(Ordering::Relaxed),
            started: Duration::from_millis(header.started.load(Ordering::Relaxed)),
            program: header.program.get(),
        }
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
        let operation = slot.operation.load(Ordering::Relaxed);
        let last = Operation::from_number(operation as u8).map(|which| LastOperation {
            operation: which,
            sequence: slot.sequence.load(Ordering::Relaxed),
            bytes: slot.bytes.load(Ordering::Relaxed),
            running: operation & RUNNING != 0,
            waits_for: slot.waits_for.load(Ordering::Relaxed).checked_sub(1),
        });
        Progress {
            state: self.state(rank),
            pid: slot.pid.load(Ordering::Relaxed),
            phase: Phase::from_number(slot.phase.load(Ordering::Relaxed)),
            step: slot.step.load(Ordering::Relaxed),
            steps_begun: slot.steps_begun.load(Ordering::Relaxed),
            operation: last,
            changed: Duration::from_millis(slot.changed.load(Ordering::Relaxed)),
        }
    }

    /// Whether `rank` has joined, and how it ended.
    pub fn state(&self, rank: u32) -> RankState {
        state_of(self.slot(rank).state.load(Ordering::Acquire))
    }

    /// Notes the process that was started as `rank`, which may never join.
    pub fn start(&self, rank: u32, pid: u32) {
        self.slot(rank).started.store(pid, Ordering::Relaxed);
    }

    /// The process of `rank`: the one that joined, or else the one that its launcher started, if it told.
    pub fn process(&self, rank: u32) -> Option<u32> {
        let slot = self.slot(rank);
        let processes = [&slot.pid, &slot.started].map(|pid| pid.load(Ordering::Relaxed));
        processes.into_iter().find(|pid| *pid != 0)
    }

    /// Notes that `rank` has joined, as this process.
    pub fn join(&self, rank: u32, pid: u32) {
        let slot = self.slot(rank);
        slot.pid.store(pid, Ordering::Relaxed);
        slot.touch();
        // A rank that the launcher has already seen end does not come back to life.
        let _ = slot.state.compare_exchange(0, JOINED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Records that `rank` ended. Of two failures the first stays.
    pub fn depart(&self, rank: u32, ending: Ending<'_>) {
        let slot = self.slot(rank);
        let number = match ending {
            Ending::Left => LEFT,
            Ending::Finished => FINISHED,
            Ending::Failed(how) => {
                slot.failure.set_once(how);
                let first = &self.header().first_failed;
                let _ = first.compare_exchange(0, rank + 1, Ordering::AcqRel, Ordering::Relaxed);
                FAILED
            }
        };
        slot.state.fetch_max(number, Ordering::AcqRel);
    }

    /// The rank that failed before all others: what became of those may be its doing.
    pub fn first_failed(&self) -> Option<u32> {
        let rank = self.header().first_failed.load(Ordering::Acquire).checked_sub(1)?;
        (rank < self.world_size && self.state(rank) == RankState::Failed).then_some(rank)
    }

    /// How `rank` ended, as a predicate; empty if it has not.
    pub fn departure(&self, rank: u32) -> String {
        let slot = self.slot(rank);
        match slot.state.load(Ordering::Acquire) {
            LEFT => "left the run".into(),
            FINISHED => "exited with code 0".into(),
            FAILED => slot.failure.get(),
            _ => String::new(),
        }
    }

    /// How the process of `rank` ended, as a predicate; `None` if it has not, as far as its launcher knows.
    pub fn ended(&self, rank: u32) -> Option<String> {
        let has_ended = matches!(self.slot(rank).state.load(Ordering::Acquire), FINISHED | FAILED);
        has_ended.then(|| self.departure(rank))
    }

    /// Notes that `rank` enters an operation.
    #[inline]
    pub fn enter(&self, rank: u32, operation: Operation, sequence: u32, bytes: usize) {
        self.announce(rank, operation, sequence, bytes);
        self.touch(rank);
    }

    /// Notes which operation `rank` enters, and leaves the time to a [`touch`](Self::touch) that follows: reading the clock takes
    /// a tenth of the time of a small operation.
    #[inline]
    pub fn announce(&self, rank: u32, operation: Operation, sequence: u32, bytes: usize) {
        let slot = self.slot(rank);
        slot.sequence.store(u64::from(sequence), Ordering::Relaxed);
        slot.bytes.store(bytes as u64, Ordering::Relaxed);
        slot.operation.store(operation as u32 | RUNNING, Ordering::Relaxed);
    }

    /// Notes that `rank` has begun another part of its operation.
    #[inline]
    pub fn touch(&self, rank: u32) {
        self.slot(rank).touch();
    }

    /// Notes that `rank` has waited for `peer` for more than a moment.
    pub fn wait(&self, rank: u32, peer: u32) {
        self.slot(rank).waits_for.store(peer + 1, Ordering::Relaxed);
    }

    /// Notes how far `rank` is in the communicator that it [waits](Self::wait) in.
    pub fn wait_in(&self, rank: u32, place: Place) {
        self.slot(rank).waits_in.store(place.to_number(), Ordering::Relaxed);
    }

    /// How far `rank` is in the communicator that it has waited in for more than a moment.
    pub fn waits_in(&self, rank: u32) -> Option<Place> {
        Place::from_number(self.slot(rank).waits_in.load(Ordering::Relaxed))
    }

    /// Notes which message, of those with the peer that `rank` [waits](Self::wait) for, it waits in.
    pub fn wait_in_message(&self, rank: u32, place: Place) {
        self.slot(rank).message.store(place.to_number(), Ordering::Release);
    }

    /// The message with `peer` that `rank` has waited in for more than a moment, if it does.
    pub fn waits_in_message(&self, rank: u32, peer: u32) -> Option<Place> {
        let slot = self.slot(rank);
        let message = slot.message.load(Ordering::Acquire);
        let is_for_peer = slot.waits_for.load(Ordering::Acquire) == peer + 1;
        // Read twice: of one wait, and not of two.
        let is_same = slot.message.load(Ordering::Relaxed) == message;
        Place::from_number(message).filter(|_| is_for_peer && is_same)
    }

    /// Notes that `rank` has come to the end of a communicator: it begins no more operations in it.
    pub fn end_at(&self, rank: u32, place: Place) {
        self.slot(rank).ends_at.store(place.to_number(), Ordering::Relaxed);
    }

    /// Where `rank` came to the end of a communicator last.
    pub fn ends_at(&self, rank: u32) -> Option<Place> {
        Place::from_number(self.slot(rank).ends_at.load(Ordering::Relaxed))
    }

    /// Notes that `rank` has left the operation.
    #[inline]
    pub fn leave(&self, rank: u32) {
        let slot = self.slot(rank);
        slot.operation.store(slot.operation.load(Ordering::Relaxed) & !RUNNING, Ordering::Relaxed);
        // A short operation was entered a moment ago: the clock need not be read again.
        if slot.waits_for.load(Ordering::Relaxed) != 0 {
            slot.message.store(0, Ordering::Relaxed);
            slot.waits_for.store(0, Ordering::Release);
            slot.waits_in.store(0, Ordering::Relaxed);
            slot.touch();
        }
    }

    /// Notes that `rank` begins a training step (from 1).
    pub fn begin_step(&self, rank: u32, step: u64) {
        let slot = self.slot(rank);
        slot.step.store(step, Ordering::Relaxed);
        slot.steps_begun.fetch_add(1, Ordering::Relaxed);
        self.set_phase(rank, Phase::Step);
    }

    /// Notes that `rank` commits the fault of this number. Those past the 64th are not noted.
    pub fn note_fault(&self, rank: u32, number: usize) {
        if number < u64::BITS as usize {
            self.slot(rank).faults.fetch_or(1 << number, Ordering::Relaxed);
        }
    }

    /// True if `rank` has committed the injected fault of this number, and for numbers past the 64th.
    pub fn has_committed(&self, rank: u32, number: usize) -> bool {
        number >= u64::BITS as usize || self.slot(rank).faults.load(Ordering::Relaxed) >> number & 1 == 1
    }

    /// Notes that `rank` begins another part of its work.
    pub fn set_phase(&self, rank: u32, phase: Phase) {
        let slot = self.slot(rank);
        slot.phase.store(phase as u32, Ordering::Relaxed);
        slot.touch();
    }

    /// Records whom `rank` holds responsible, and why, because it is about to fail. The first one stays.
    pub fn blame(&self, rank: u32, blame: &Blame) {
        let slot = self.slot(rank);
        slot.blame.set_once(&blame.message);
        let timed_out = if blame.timed_out { TIMED_OUT } else { 0 };
        let value = (blame.culprit + 1) | timed_out;
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

impl Slot {
    #[inline]
    fn touch(&self) {
        self.changed.store(milliseconds(now()), Ordering::Relaxed);
    }
}

fn milliseconds(time: Duration) -> u64 {
    time.as_millis() as u64
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
        page.depart(0, Ending::Failed("was killed by SIGTERM"));
        assert_eq!(other.first_failed(), Some(2));

        assert_eq!(page.blame_of(0), None);
        for waited_for in [vec![1], vec![2]] {
            let culprit = waited_for[0];
            let (after, operation) = (Duration::from_secs(2), "barrier".into());
            let message = Error::Timeout { rank: 0, waited_for, operation, after }.to_string();
            other.blame(0, &Blame { culprit, timed_out: true, message });
        }
        let blame = page.blame_of(0).unwrap();
        assert_eq!((blame.culprit, blame.timed_out), (1, true));
        assert!(blame.message.contains("waited 2.0 s for rank 1 in barrier"), "{}", blame.message);
    }

    #[test]
    fn a_stranger_reads_what_a_rank_does() {
        let (page, fd) = ProgressPage::create(2).unwrap();
        page.describe("train", 3);
        page.join(1, 42);
        page.begin_step(1, 100);
        page.enter(1, Operation::AllReduce, 7, 4096);
        page.wait(1, 0);
        let stranger = ProgressPage::inspect(fd.as_fd()).unwrap();
        let run = stranger.run();
        assert_eq!((run.launcher, run.world_size, run.restarts), (std::process::id(), 2, 3));
        assert_eq!(run.program, "train");
        let progress = stranger.progress(1);
        assert_eq!((progress.pid, progress.phase, progress.step), (42, Phase::Step, 100));
        let all_reduce = Operation::AllReduce;
        let expected = LastOperation {
            operation: all_reduce,
            sequence: 7,
            bytes: 4096,
            running: true,
            waits_for: Some(0),
        };
        assert_eq!(progress.operation, Some(expected));
        assert!(progress.changed <= now() && progress.changed > Duration::ZERO);
        page.leave(1);
        let left = LastOperation { running: false, waits_for: None, ..expected };
        assert_eq!(stranger.progress(1).operation, Some(left));
        assert_eq!(stranger.progress(0).operation, None);
    }

    #[test]
    fn other_memory_is_no_page() {
        let (_memory, fd) = SharedMemory::create("x", 4096).unwrap();
        assert!(ProgressPage::inspect(fd.as_fd()).unwrap_err().to_string().contains("another version"));
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(ProgressPage::inspect(file.as_fd()).is_err());
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let (page, _fd) = ProgressPage::create(1).unwrap();
        page.depart(0, Ending::Failed(&"é".repeat(300)));
        assert_eq!(page.departure(0), "é".repeat(SharedText::CAPACITY / 2));
    }
}
