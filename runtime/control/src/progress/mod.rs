//! The progress page: what every rank of a run is doing, in memory that all of them and the launcher map.
//!
//! The rendezvous server creates the page and passes it to each rank that joins. A rank writes its own record; the
//! server writes how a rank ended. A rank that waits for a peer polls the page to see whether the peer is still alive:
//! it needs no message, thread or signal to learn of a death, and the last action of a rank can be read after it has
//! been killed or stopped. Other processes of the same user can inspect a run, too ([`ProgressPage::inspect`]): the
//! page has no name, but the launcher's descriptors are listed in `/proc`.

mod entry;
mod flight_recorder;
mod stop;
mod text;
mod view;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

pub use entry::{ProgressEntry, Snapshot};
use flight_recorder::Ring;
pub use flight_recorder::{
    EXACT_FROM, NewCollective, OpenRecord, RECORDED, RecordedCollective, RecordedCommunicator,
};
pub use stop::StopState;
use text::SharedText;
pub(crate) use text::truncate as truncate_text;
pub use view::Ending;
pub use view::{Blame, LastOperation, Operation, Phase, Progress, RankState, now};

use crate::shm::{Shared, SharedArray, SharedMemory, reserve};
use crate::{Error, Result};

/// Name of the page's memory in `/proc/PID/fd`.
pub const PAGE_NAME: &str = "mgpu-progress";

// Values of a record's state.
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

/// Describes the run. The magic number changes with the layout of the page, so that no other version misreads it.
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
    /// Whether the ranks are going to stop, and at which of their stop checks.
    stop: AtomicU64,
    program: SharedText,
}

/// Distinguishes a page of this layout from other memory.
const MAGIC: u64 = 0x6d67_7075_0000_000a;

/// The record of one rank. Its size is a multiple of the cache line, so that ranks do not share lines (false sharing).
#[repr(C, align(128))]
struct RankRecord {
    /// Last collective entered: its number in its communicator, from 1.
    sequence: AtomicU64,
    /// Payload of that collective in bytes.
    bytes: AtomicU64,
    /// Its [`Operation`], with [`RUNNING`] while the rank is in it; 0 before the first.
    operation: AtomicU32,
    /// The rank it waits for, plus one; 0 while it does not wait.
    waits_for: AtomicU32,
    /// The [`CollectiveCounter`] of the collective in which it waits for a peer; 0 while it does not wait.
    waiting_collective: AtomicU64,
    /// The [`CollectiveCounter`] of the message in which it waits for a peer; 0 while it does not wait.
    waiting_message: AtomicU64,
    /// The [`CollectiveCounter`] at which it finalised a communicator last; 0 before the first.
    finalised_at: AtomicU64,
    /// Communicators of the world that it has aborted: a bit for each of the first 64.
    aborted: AtomicU64,
    /// Time of the last change, in milliseconds of [`now`].
    changed: AtomicU64,
    /// That time when it first waited in its operation; 0 if it has not waited in it.
    changed_before_wait: AtomicU64,
    /// Number of collectives in its [`Ring`] so far.
    recorded: AtomicU64,
    /// Training step, from 1.
    step: AtomicU64,
    steps_begun: AtomicU64,
    /// Number of stop checks that it has begun.
    stop_checks: AtomicU64,
    /// Number of samples that it has processed, if it tells.
    samples: AtomicU64,
    /// Injected faults that the rank has triggered: a bit for each, by its index in the list of injections.
    faults: AtomicU64,
    phase: AtomicU32,
    state: AtomicU32,
    /// The process that joined; 0 before.
    pid: AtomicU32,
    /// The process that the launcher started.
    started: AtomicU32,
    /// The culprit's rank plus one, 0 while no rank is blamed; bit 31 marks a timeout.
    blamed: AtomicU32,
    blame: SharedText,
    failure: SharedText,
    /// Its host, if that is another one than that of the page.
    host: SharedText<HOST_CAPACITY>,
}

/// Longest name of a host in bytes; a longer one is truncated.
const HOST_CAPACITY: usize = 124;

// SAFETY: atomics and arrays and structs of atomics only.
unsafe impl Shared for Header {}
// SAFETY: as above.
unsafe impl Shared for RankRecord {}

/// Bit of a record's `operation`: the rank is still in it.
const RUNNING: u32 = 1 << 31;
/// Bit of a record's `blamed`.
const TIMED_OUT: u32 = 1 << 31;

/// Progress counter of a rank in a communicator whose peers cannot observe it themselves (NCCL).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveCounter {
    /// The communicator's number, from 1.
    pub communicator: u32,
    /// Collectives that the rank has begun in it; for a message, the messages exchanged with that peer.
    pub count: u32,
}

impl CollectiveCounter {
    fn to_number(self) -> u64 {
        u64::from(self.communicator) << 32 | u64::from(self.count)
    }

    fn from_number(number: u64) -> Option<Self> {
        (number != 0)
            .then_some(CollectiveCounter { communicator: (number >> 32) as u32, count: number as u32 })
    }
}

/// The progress page: a header, a record for each rank, and a ring of its last collectives for each rank.
#[derive(Debug)]
pub struct ProgressPage {
    memory: Arc<SharedMemory>,
    world_size: u32,
    records: SharedArray<RankRecord>,
    rings: SharedArray<Ring>,
}

/// The run that a page describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunInfo {
    /// The launcher's process.
    pub launcher: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// How often the ranks have been restarted.
    pub restarts: u32,
    /// Start time of the ranks, as [`now`].
    pub started: Duration,
    /// The command that they run.
    pub program: String,
}

impl ProgressPage {
    /// Offset of the rings, behind the records.
    fn rings(world_size: u32) -> usize {
        (size_of::<Header>() + world_size as usize * size_of::<RankRecord>())
            .next_multiple_of(align_of::<Ring>())
    }

    fn bytes(world_size: u32) -> usize {
        Self::rings(world_size) + world_size as usize * size_of::<Ring>()
    }

    /// Creates a page for `world_size` ranks; also returns the descriptor to pass to them.
    pub fn create(world_size: u32) -> Result<(Self, OwnedFd)> {
        let (memory, fd) = SharedMemory::create(PAGE_NAME, Self::bytes(world_size))?;
        // Not the rings: the memory of a ring is allocated when its rank records the first collective, if ever.
        reserve("the progress page", &memory, fd.as_fd(), 0, Self::rings(world_size))?;
        let header = memory.view::<Header>(0);
        header.launcher.store(std::process::id(), Ordering::Relaxed);
        header.world_size.store(world_size, Ordering::Relaxed);
        header.started.store(milliseconds(now()), Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((Self::new(memory, world_size), fd))
    }

    /// The page in `memory`, which has the size of one.
    fn new(memory: SharedMemory, world_size: u32) -> Self {
        let memory = Arc::new(memory);
        let records = SharedArray::new(&memory, size_of::<Header>(), world_size as usize);
        let rings = SharedArray::new(&memory, Self::rings(world_size), world_size as usize);
        ProgressPage { memory, world_size, records, rings }
    }

    /// Maps a page received from the server.
    pub fn open(fd: BorrowedFd<'_>, world_size: u32) -> Result<Self> {
        let memory = SharedMemory::open("the progress page", fd, Self::bytes(world_size))?;
        Ok(Self::new(memory, world_size))
    }

    /// Maps the page of a run that this process does not belong to, read-only.
    ///
    /// # Errors
    /// If the descriptor does not refer to a progress page, or to one of another version.
    pub fn inspect(fd: BorrowedFd<'_>) -> Result<Self> {
        let memory = SharedMemory::open_for_reading("a progress page", fd)?;
        let other = || Error::system("read a progress page", "it was made by another version of mgpurun");
        if memory.size() < size_of::<Header>() {
            return Err(other());
        }
        let header = memory.view::<Header>(0);
        let world_size = header.world_size.load(Ordering::Relaxed);
        if header.magic.load(Ordering::Acquire) != MAGIC || memory.size() != Self::bytes(world_size) {
            return Err(other());
        }
        Ok(Self::new(memory, world_size))
    }

    fn header(&self) -> &Header {
        self.memory.view(0)
    }

    #[inline]
    fn record(&self, rank: u32) -> &RankRecord {
        &self.records[rank]
    }

    /// Notes that a rank runs on another host than that of the page: its process ids mean nothing here.
    pub fn set_host(&self, rank: u32, host: &str) {
        self.record(rank).host.set_once(host);
    }

    /// The host of a rank, if that is another one than that of the page.
    pub fn host(&self, rank: u32) -> Option<String> {
        Some(self.record(rank).host.get()).filter(|host| !host.is_empty())
    }

    /// Sets the command that the ranks run and their number of restarts.
    pub fn describe(&self, program: &str, restarts: u32) {
        self.header().restarts.store(restarts, Ordering::Relaxed);
        self.header().program.set_once(program);
    }

    /// The run that this page describes.
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

    /// The last known progress of `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn progress(&self, rank: u32) -> Progress {
        let record = self.record(rank);
        let operation = record.operation.load(Ordering::Relaxed);
        let last = Operation::from_number(operation as u8).map(|which| LastOperation {
            operation: which,
            sequence: record.sequence.load(Ordering::Relaxed),
            bytes: record.bytes.load(Ordering::Relaxed),
            running: operation & RUNNING != 0,
            waits_for: record.waits_for.load(Ordering::Relaxed).checked_sub(1),
        });
        Progress {
            state: self.state(rank),
            pid: record.pid.load(Ordering::Relaxed),
            phase: Phase::from_number(record.phase.load(Ordering::Relaxed)),
            step: record.step.load(Ordering::Relaxed),
            steps_begun: record.steps_begun.load(Ordering::Relaxed),
            operation: last,
            changed: Duration::from_millis(record.changed.load(Ordering::Relaxed)),
        }
    }

    /// Whether `rank` has joined, and how it ended.
    pub fn state(&self, rank: u32) -> RankState {
        state_of(self.record(rank).state.load(Ordering::Acquire))
    }

    /// Sets the process that was started as `rank`; it may never join.
    pub fn start(&self, rank: u32, pid: u32) {
        self.record(rank).started.store(pid, Ordering::Relaxed);
    }

    /// The process of `rank`: the one that joined, or else the one that its launcher started, if it is known.
    pub fn process(&self, rank: u32) -> Option<u32> {
        let record = self.record(rank);
        let processes = [&record.pid, &record.started].map(|pid| pid.load(Ordering::Relaxed));
        processes.into_iter().find(|pid| *pid != 0)
    }

    /// Notes that `rank` has joined as process `pid`.
    pub fn join(&self, rank: u32, pid: u32) {
        let record = self.record(rank);
        record.pid.store(pid, Ordering::Relaxed);
        record.touch();
        self.note_joined(rank);
    }

    /// A rank whose end the launcher has already recorded stays ended.
    fn note_joined(&self, rank: u32) {
        let state = &self.record(rank).state;
        let _ = state.compare_exchange(0, JOINED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Records how `rank` ended. The first failure is kept.
    pub fn record_end(&self, rank: u32, ending: Ending<'_>) {
        let record = self.record(rank);
        let number = match ending {
            Ending::Left => LEFT,
            Ending::Finished => FINISHED,
            Ending::Failed(how) => {
                record.failure.set_once(how);
                let first = &self.header().first_failed;
                let _ = first.compare_exchange(0, rank + 1, Ordering::AcqRel, Ordering::Relaxed);
                FAILED
            }
        };
        record.state.fetch_max(number, Ordering::AcqRel);
    }

    /// The first rank that failed: it may be the cause of the other failures.
    pub fn first_failed(&self) -> Option<u32> {
        let rank = self.header().first_failed.load(Ordering::Acquire).checked_sub(1)?;
        (rank < self.world_size && self.state(rank) == RankState::Failed).then_some(rank)
    }

    /// How `rank` ended, as a predicate; empty if it has not ended.
    pub fn end_description(&self, rank: u32) -> String {
        let record = self.record(rank);
        match record.state.load(Ordering::Acquire) {
            LEFT => "left the run".into(),
            FINISHED => "exited with code 0".into(),
            FAILED => record.failure.get(),
            _ => String::new(),
        }
    }

    /// How the process of `rank` ended, as a predicate; `None` if it has not ended as far as its launcher knows.
    pub fn process_end_description(&self, rank: u32) -> Option<String> {
        let has_ended = matches!(self.record(rank).state.load(Ordering::Acquire), FINISHED | FAILED);
        has_ended.then(|| self.end_description(rank))
    }

    /// Notes that `rank` enters an operation.
    #[inline]
    pub fn enter(&self, rank: u32, operation: Operation, sequence: u32, bytes: usize) {
        self.announce(rank, operation, sequence, bytes);
        self.touch(rank);
    }

    /// Notes that `rank` enters an operation, without the time, which a [`touch`](Self::touch) adds: reading the clock takes a
    /// tenth of the time of a small operation.
    #[inline]
    pub fn announce(&self, rank: u32, operation: Operation, sequence: u32, bytes: usize) {
        let record = self.record(rank);
        record.sequence.store(u64::from(sequence), Ordering::Relaxed);
        record.bytes.store(bytes as u64, Ordering::Relaxed);
        record.changed_before_wait.store(0, Ordering::Relaxed);
        record.operation.store(operation as u32 | RUNNING, Ordering::Relaxed);
    }

    /// Updates the time of the last change: `rank` has begun another part of its operation.
    #[inline]
    pub fn touch(&self, rank: u32) {
        self.record(rank).touch();
    }

    /// Notes that `rank` waits for `peer`; called only if the wait takes longer than usual.
    pub fn wait(&self, rank: u32, peer: u32) {
        let record = self.record(rank);
        if record.changed_before_wait.load(Ordering::Relaxed) == 0 {
            record.changed_before_wait.store(record.changed.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        record.waits_for.store(peer + 1, Ordering::Relaxed);
    }

    /// Notes the progress counter of `rank` in the communicator in which it [waits](Self::wait).
    pub fn note_waiting_collective(&self, rank: u32, counter: CollectiveCounter) {
        self.record(rank).waiting_collective.store(counter.to_number(), Ordering::Relaxed);
    }

    /// The progress counter of `rank` in the communicator in which it [waits](Self::wait), if it waits.
    pub fn waiting_collective(&self, rank: u32) -> Option<CollectiveCounter> {
        CollectiveCounter::from_number(self.record(rank).waiting_collective.load(Ordering::Relaxed))
    }

    /// Notes the message in which `rank` [waits](Self::wait) for its peer.
    pub fn note_waiting_message(&self, rank: u32, counter: CollectiveCounter) {
        self.record(rank).waiting_message.store(counter.to_number(), Ordering::Release);
    }

    /// The message in which `rank` [waits](Self::wait) for `peer`, if it does.
    pub fn waiting_message(&self, rank: u32, peer: u32) -> Option<CollectiveCounter> {
        let record = self.record(rank);
        let message = record.waiting_message.load(Ordering::Acquire);
        let is_for_peer = record.waits_for.load(Ordering::Acquire) == peer + 1;
        // Read twice: message and peer must belong to the same wait.
        let is_same = record.waiting_message.load(Ordering::Relaxed) == message;
        CollectiveCounter::from_number(message).filter(|_| is_for_peer && is_same)
    }

    /// Notes that `rank` finalises a communicator: it begins no more operations in it.
    pub fn note_finalised(&self, rank: u32, counter: CollectiveCounter) {
        self.record(rank).finalised_at.store(counter.to_number(), Ordering::Relaxed);
    }

    /// The progress counter at which `rank` last finalised a communicator.
    pub fn finalised_at(&self, rank: u32) -> Option<CollectiveCounter> {
        CollectiveCounter::from_number(self.record(rank).finalised_at.load(Ordering::Relaxed))
    }

    /// Notes that `rank` has aborted the world's communicator of this number (from 1) because of an error, with all groups
    /// that were split from it. Communicators after the 64th are not noted.
    pub fn note_aborted(&self, rank: u32, communicator: u32) {
        self.record(rank).aborted.fetch_or(communicator_bit(communicator), Ordering::Release);
    }

    /// Whether `rank` has aborted the world's communicator of this number.
    pub fn has_aborted(&self, rank: u32, communicator: u32) -> bool {
        self.record(rank).aborted.load(Ordering::Acquire) & communicator_bit(communicator) != 0
    }

    /// Notes that `rank` has left the operation.
    #[inline]
    pub fn leave(&self, rank: u32) {
        let record = self.record(rank);
        record.operation.store(record.operation.load(Ordering::Relaxed) & !RUNNING, Ordering::Relaxed);
        // An operation without a wait was entered just now: the clock need not be read again.
        let has_waited = record.changed_before_wait.load(Ordering::Relaxed) != 0;
        if has_waited || record.waits_for.load(Ordering::Relaxed) != 0 {
            record.changed_before_wait.store(0, Ordering::Relaxed);
            self.stop_waiting(rank);
            record.touch();
        }
    }

    /// Notes that `rank` does not wait for a peer any more, although it has not left its operation.
    pub fn stop_waiting(&self, rank: u32) {
        let record = self.record(rank);
        record.waiting_message.store(0, Ordering::Relaxed);
        record.waits_for.store(0, Ordering::Release);
        record.waiting_collective.store(0, Ordering::Relaxed);
    }

    /// Notes that `rank` begins a training step (from 1).
    pub fn begin_step(&self, rank: u32, step: u64) {
        let record = self.record(rank);
        record.step.store(step, Ordering::Relaxed);
        record.steps_begun.fetch_add(1, Ordering::Relaxed);
        self.set_phase(rank, Phase::Step);
    }

    /// Counts `samples` that `rank` has processed: images, sentences.
    pub fn count_samples(&self, rank: u32, samples: u64) {
        self.record(rank).samples.fetch_add(samples, Ordering::Relaxed);
    }

    /// The samples that `rank` has processed; 0 if it does not tell, or runs on another host.
    pub fn samples(&self, rank: u32) -> u64 {
        self.record(rank).samples.load(Ordering::Relaxed)
    }

    /// Notes that `rank` triggers the fault with this index. Faults after the 64th are not noted.
    pub fn note_fault(&self, rank: u32, number: usize) {
        if number < u64::BITS as usize {
            self.record(rank).faults.fetch_or(1 << number, Ordering::Relaxed);
        }
    }

    /// True if `rank` has triggered the injected fault with this index; always true after the 64th.
    pub fn was_triggered(&self, rank: u32, number: usize) -> bool {
        number >= u64::BITS as usize || self.record(rank).faults.load(Ordering::Relaxed) >> number & 1 == 1
    }

    /// Notes that `rank` begins another phase.
    pub fn set_phase(&self, rank: u32, phase: Phase) {
        let record = self.record(rank);
        record.phase.store(phase as u32, Ordering::Relaxed);
        record.touch();
    }

    /// Records which rank a failing `rank` blames, and why. The first blame is kept.
    pub fn blame(&self, rank: u32, blame: &Blame) {
        let record = self.record(rank);
        record.blame.set_once(&blame.message);
        let timed_out = if blame.timed_out { TIMED_OUT } else { 0 };
        let value = (blame.culprit + 1) | timed_out;
        let _ = record.blamed.compare_exchange(0, value, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// The rank that `rank` blamed before it failed.
    pub fn blame_of(&self, rank: u32) -> Option<Blame> {
        let record = self.record(rank);
        let blamed = record.blamed.load(Ordering::Acquire);
        let culprit = (blamed & !TIMED_OUT).checked_sub(1)?;
        (culprit < self.world_size).then(|| Blame {
            culprit,
            timed_out: blamed & TIMED_OUT != 0,
            message: record.blame.get(),
        })
    }
}

impl RankRecord {
    #[inline]
    fn touch(&self) {
        self.changed.store(milliseconds(now()), Ordering::Relaxed);
    }

    /// When its operation began, in milliseconds of [`now`]: at its last change, or at the one before its first wait, since
    /// operations of several rounds [touch](ProgressPage::touch) the record after a wait.
    #[inline]
    fn operation_began(&self) -> u64 {
        match self.changed_before_wait.load(Ordering::Relaxed) {
            0 => self.changed.load(Ordering::Relaxed),
            began => began,
        }
    }
}

fn communicator_bit(communicator: u32) -> u64 {
    1u64.checked_shl(communicator - 1).unwrap_or_default()
}

fn milliseconds(time: Duration) -> u64 {
    time.as_millis() as u64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_first_failure_and_the_first_blame_are_kept() {
        let (page, fd) = ProgressPage::create(3).unwrap();
        let other = ProgressPage::open(fd.as_fd(), 3).unwrap();
        page.join(2, 41);
        assert_eq!(other.progress(2).state, RankState::Joined);
        assert_eq!(other.progress(2).pid, 41);
        page.record_end(2, Ending::Left);
        assert_eq!((other.state(2), other.end_description(2).as_str()), (RankState::Left, "left the run"));
        page.record_end(2, Ending::Failed("exited with code 3"));
        page.record_end(2, Ending::Failed("was killed by SIGKILL"));
        page.record_end(2, Ending::Finished);
        assert_eq!(
            (other.state(2), other.end_description(2).as_str()),
            (RankState::Failed, "exited with code 3")
        );
        page.join(2, 42);
        assert_eq!(other.state(2), RankState::Failed);
        page.record_end(0, Ending::Failed("was killed by SIGTERM"));
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
    fn an_observer_reads_the_progress_of_each_rank() {
        let (page, fd) = ProgressPage::create(2).unwrap();
        page.describe("train", 3);
        page.join(1, 42);
        page.begin_step(1, 100);
        page.count_samples(1, 30);
        page.count_samples(1, 2);
        page.enter(1, Operation::AllReduce, 7, 4096);
        page.wait(1, 0);
        let observer = ProgressPage::inspect(fd.as_fd()).unwrap();
        let run = observer.run();
        assert_eq!((run.launcher, run.world_size, run.restarts), (std::process::id(), 2, 3));
        assert_eq!(run.program, "train");
        assert_eq!((observer.samples(0), observer.samples(1)), (0, 32));
        let progress = observer.progress(1);
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
        page.stop_waiting(1);
        let busy = LastOperation { waits_for: None, ..expected };
        assert_eq!(observer.progress(1).operation, Some(busy));
        page.leave(1);
        let left = LastOperation { running: false, waits_for: None, ..expected };
        assert_eq!(observer.progress(1).operation, Some(left));
        assert_eq!(observer.progress(0).operation, None);
    }

    #[test]
    fn aborted_communicators_are_known_by_rank_and_number() {
        let (page, _fd) = ProgressPage::create(2).unwrap();
        for number in [1, 64, 65, u32::MAX] {
            page.note_aborted(1, number);
        }
        let aborted = |rank| [1, 2, 63, 64, 65].map(|number| page.has_aborted(rank, number));
        assert_eq!(aborted(1), [true, false, false, true, false]);
        assert_eq!(aborted(0), [false; 5]);
    }

    #[test]
    fn other_memory_is_rejected() {
        let (_memory, fd) = SharedMemory::create("x", 4096).unwrap();
        assert!(ProgressPage::inspect(fd.as_fd()).unwrap_err().to_string().contains("another version"));
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(ProgressPage::inspect(file.as_fd()).is_err());
    }

    #[test]
    fn long_texts_are_truncated_at_a_character_boundary() {
        let (page, _fd) = ProgressPage::create(1).unwrap();
        page.record_end(0, Ending::Failed(&"é".repeat(300)));
        assert_eq!(page.end_description(0), "é".repeat(text::CAPACITY / 2));
    }
}
