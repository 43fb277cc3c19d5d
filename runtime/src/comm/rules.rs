//! Rules of every operation of every communicator, on host buffers and on device memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::split::SplitGroup;
use crate::inject::InjectionPoint;
use crate::membership::Membership;
use crate::progress::{NewCollective, OpenRecord, Operation, RecordedCommunicator};
use crate::{Error, Result};

/// Fault injection, the progress page, ranges for profilers and poisoning. Every operation calls [`begin`](Self::begin) and
/// [`end`](Self::end).
#[derive(Debug)]
pub(crate) struct Rules {
    /// `None` without a launcher.
    membership: Option<Arc<Membership>>,
    rank: u32,
    /// Whether the transport touches the progress page in each operation.
    transport_touches: bool,
    /// The communicator, for the flight recorder.
    communicator: AtomicU64,
    /// Whether any operation has begun.
    begun: AtomicBool,
    /// Shared by a communicator and all groups that were split from it: an error in one makes all unusable.
    poison: Arc<Poison>,
    /// The profiler that records ranges of operations.
    profiler: Option<&'static nvtx::Profiler>,
}

/// The state of a communicator that an error makes unusable.
#[derive(Debug, Default)]
struct Poison {
    /// The error.
    cause: OnceLock<String>,
    /// Locked while the communicator is being aborted because of that.
    failing: Mutex<()>,
}

/// An operation as recorded on the progress page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProgressEntry {
    pub(crate) operation: Operation,
    pub(crate) number: u32,
    pub(crate) bytes: usize,
    /// The caller's tag: the index of the bucket.
    pub(crate) tag: Option<u32>,
    /// The operation is enqueued for a GPU.
    pub(crate) on_device: bool,
}

/// An operation that has begun.
#[derive(Debug)]
#[must_use = "an operation runs until it ends"]
pub(crate) struct Begun {
    /// Its record; `None` if none is kept.
    record: Option<OpenRecord>,
    /// Its range in a profiler, which ends with it.
    _range: nvtx::Range,
}

impl Begun {
    /// An operation that is only [noted](Rules::note).
    pub(crate) const NOTED: Begun = Begun { record: None, _range: nvtx::Range::NONE };
}

impl ProgressEntry {
    /// Its range in a profiler, named by the operation, and the bucket if it has one.
    #[cold]
    fn range(&self, profiler: &'static nvtx::Profiler) -> nvtx::Range {
        let name = self.operation.name();
        let name = self.tag.map_or_else(|| name.to_owned(), |tag| format!("{name}, bucket {tag}"));
        profiler.range(name, Some(self.bytes as u64))
    }
}

/// What a transport does on a failure. Most do nothing.
pub(crate) trait FailureHandler {
    /// Whether this rank is the one that differs from its peers, so that it must not blame one of them.
    fn is_at_fault(&self, _: &Error) -> bool {
        false
    }

    /// Starts no further operation. Called before anybody sees the error.
    fn stop(&self) {}

    /// Aborts operations in flight. Called after the error was recorded.
    fn abort(&self) {}
}

impl Rules {
    pub(crate) fn new(membership: Option<Arc<Membership>>, rank: u32) -> Self {
        let number = membership.as_ref().map_or(1, |membership| membership.count_communicator());
        Rules {
            membership,
            rank,
            transport_touches: false,
            communicator: AtomicU64::new(RecordedCommunicator::World(number).to_word()),
            begun: AtomicBool::new(false),
            poison: Arc::default(),
            profiler: nvtx::profiler(),
        }
    }

    /// The rules of a group that is split from this communicator.
    pub(crate) fn for_group(&self, group: &SplitGroup) -> Self {
        if let Some(membership) = &self.membership {
            membership.count_communicator();
        }
        let recorded =
            RecordedCommunicator::Group { number: group.number, first: group.members.world_rank(0) };
        Rules {
            communicator: AtomicU64::new(recorded.to_word()),
            membership: self.membership.clone(),
            rank: self.rank,
            transport_touches: false,
            begun: AtomicBool::new(true),
            poison: Arc::clone(&self.poison),
            profiler: self.profiler,
        }
    }

    /// The same, for a transport that [touches](crate::progress::ProgressPage::touch) the progress page itself in each
    /// operation. It can read the clock after it has published what its peers wait for.
    pub(crate) fn touched_by_transport(self) -> Self {
        Rules { transport_touches: true, ..self }
    }

    pub(crate) fn membership(&self) -> Option<&Arc<Membership>> {
        self.membership.as_ref()
    }

    /// Sets the number of this communicator among the world's, which is the same on all ranks.
    pub(crate) fn set_number(&self, number: u32) {
        self.communicator.store(RecordedCommunicator::World(number).to_word(), Ordering::Relaxed);
    }

    /// Begins an operation with valid arguments: injects a planned fault, and updates the progress page.
    ///
    /// Inlined, but not the functions that it calls, whose results fit registers: a small operation notices it if the whole
    /// result passes through memory.
    ///
    /// # Errors
    /// If this process is a forked child, or an earlier error has poisoned the communicator.
    #[inline(always)]
    pub(crate) fn begin(&self, entry: ProgressEntry) -> Result<Begun> {
        self.check_usable()?;
        let range = self.profiler.map_or(nvtx::Range::NONE, |profiler| entry.range(profiler));
        Ok(Begun { record: self.start(entry), _range: range })
    }

    /// Injects a planned fault before the first operation, and updates the progress page.
    #[inline(never)]
    fn start(&self, entry: ProgressEntry) -> Option<OpenRecord> {
        let membership = self.membership.as_ref()?;
        if !self.begun.load(Ordering::Relaxed) && !self.begun.swap(true, Ordering::Relaxed) {
            membership.inject_faults(InjectionPoint::Collective);
        }
        self.note(entry);
        self.record(entry)
    }

    /// Begins a record of the flight recorder.
    #[inline]
    fn record(&self, entry: ProgressEntry) -> Option<OpenRecord> {
        let ProgressEntry { operation, number, bytes, tag, on_device } = entry;
        let communicator = self.communicator.load(Ordering::Relaxed);
        let new = NewCollective { communicator, operation, sequence: number, bytes, tag, on_device };
        let membership = self.membership.as_ref()?;
        let is_alone = membership.has_one_communicator();
        Some(membership.page().begin_collective(self.rank, &new, is_alone))
    }

    /// Records something that has begun and ended, without changing what the rank waits in.
    #[cfg(feature = "cuda")]
    pub(crate) fn record_ended(&self, entry: ProgressEntry) {
        if let (Some(membership), Some(record)) = (&self.membership, self.record(entry)) {
            membership.page().end_collective(self.rank, record);
        }
    }

    /// Records on the progress page what the rank waits in, until it [ends](Self::end).
    #[inline]
    pub(crate) fn note(&self, entry: ProgressEntry) {
        if let Some(membership) = &self.membership {
            let page = membership.page();
            page.announce(self.rank, entry.operation, entry.number, entry.bytes);
            if !self.transport_touches {
                page.touch(self.rank);
            }
        }
    }

    /// Ends the operation that has [begun](Self::begin). Its error poisons the communicator, unless it is about the
    /// arguments.
    #[inline]
    pub(crate) fn end<R>(
        &self,
        begun: Begun,
        result: Result<R>,
        transport: &(impl FailureHandler + ?Sized),
    ) -> Result<R> {
        match result {
            Ok(value) => {
                self.complete(begun);
                Ok(value)
            }
            // Its record stays that of a running one: it shows in which operation the rank has failed.
            Err(error) => Err(self.fail(error, transport)),
        }
    }

    /// Ends the operation that has [begun](Self::begin) and succeeded.
    #[inline(always)]
    pub(crate) fn complete(&self, begun: Begun) {
        match (&self.membership, begun.record) {
            (Some(membership), Some(record)) => membership.page().leave_collective(self.rank, record),
            _ => self.leave(),
        }
    }

    #[inline]
    fn leave(&self) {
        if let Some(membership) = &self.membership {
            membership.page().leave(self.rank);
        }
    }

    /// Aborts the communicator because of `error`, and blames the rank that it names.
    #[cold]
    pub(crate) fn fail(&self, error: Error, transport: &(impl FailureHandler + ?Sized)) -> Error {
        match error {
            Error::Poisoned { .. } => return error,
            Error::InvalidArgument { .. } => {
                self.leave();
                return error;
            }
            _ => {}
        }
        // If another thread fails at the same time, wait for it.
        let failing = self.failing();
        if self.poison.cause.get().is_some() {
            return error;
        }
        transport.stop();
        let _ = self.poison.cause.set(error.to_string());
        let membership = self.membership.as_ref();
        // Before the abort, which may take long: the launcher should see the cause as early as possible.
        if let Some(membership) = membership.filter(|_| !transport.is_at_fault(&error)) {
            membership.record_blame(&error);
        }
        transport.abort();
        drop(failing);
        if let Some(membership) = membership {
            membership.delay_error(&error);
        }
        error
    }

    /// Aborts the communicator without an error to report.
    #[cfg(feature = "cuda")]
    pub(crate) fn force_abort(&self, why: &str, transport: &impl FailureHandler) {
        let _failing = self.failing();
        if self.poison.cause.get().is_some() {
            return;
        }
        transport.stop();
        let _ = self.poison.cause.set(why.to_owned());
        transport.abort();
    }

    /// Returns the error of a poisoned communicator, once it was aborted: the caller may then free memory that the
    /// transport was using.
    #[inline]
    pub(crate) fn check_usable(&self) -> Result<()> {
        if let Some(membership) = &self.membership {
            membership.check_process()?;
        }
        let Some(cause) = self.poison.cause.get() else { return Ok(()) };
        drop(self.failing());
        Err(Error::Poisoned { rank: self.rank, cause: cause.clone() })
    }

    /// Whether an error has poisoned the communicator.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_poisoned(&self) -> bool {
        self.poison.cause.get().is_some()
    }

    fn failing(&self) -> MutexGuard<'_, ()> {
        self.poison.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Records the calls, and whether the error was visible at that time.
    struct Recorder<'a>(&'a Rules, RefCell<Vec<(&'static str, bool)>>);

    impl Recorder<'_> {
        fn note(&self, what: &'static str) {
            self.1.borrow_mut().push((what, self.0.poison.cause.get().is_some()));
        }
    }

    impl FailureHandler for Recorder<'_> {
        fn stop(&self) {
            self.note("stop");
        }

        fn abort(&self) {
            self.note("abort");
        }
    }

    #[test]
    fn the_first_error_poisons_and_aborts_the_transport_once() {
        let rules = Rules::new(None, 3);
        let transport = Recorder(&rules, RefCell::default());
        let operation = Operation::Barrier;
        let entry = ProgressEntry { operation, number: 1, bytes: 0, tag: None, on_device: false };
        let refusal = Error::InvalidArgument { operation: "broadcast", problem: "no".into() };
        let begun = rules.begin(entry).unwrap();
        assert!(rules.end::<()>(begun, Err(refusal), &transport).is_err());
        // Invalid arguments do not poison.
        let begun = rules.begin(entry).unwrap();
        assert_eq!(rules.end(begun, Ok(7), &transport).unwrap(), 7);
        for reason in ["first", "second"] {
            let error =
                rules.end::<()>(Begun::NOTED, Err(Error::system("wait", reason)), &transport).unwrap_err();
            assert!(error.to_string().contains(reason));
        }
        assert_eq!(*transport.1.borrow(), [("stop", false), ("abort", true)]);
        let error = rules.begin(entry).unwrap_err().to_string();
        assert!(error.contains("rank 3") && error.contains("first"), "{error}");
    }
}
