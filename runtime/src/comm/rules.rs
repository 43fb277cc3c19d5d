//! Rules of every operation of every communicator, on host buffers and on device memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::inject::InjectionPoint;
use crate::membership::Membership;
use crate::progress::Operation;
use crate::{Error, Result};

/// Fault injection, the progress page and poisoning. Every operation calls [`begin`](Self::begin) and
/// [`end`](Self::end).
#[derive(Debug)]
pub(crate) struct Rules {
    /// `None` without a launcher.
    membership: Option<Arc<Membership>>,
    rank: u32,
    /// Whether the transport touches the progress page in each operation.
    transport_touches: bool,
    /// Whether any operation has begun.
    begun: AtomicBool,
    /// Shared by a communicator and all groups that were split from it: an error in one makes all unusable.
    poison: Arc<Poison>,
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
        Rules {
            membership,
            rank,
            transport_touches: false,
            begun: AtomicBool::new(false),
            poison: Arc::default(),
        }
    }

    /// The rules of a group that is split from this communicator.
    pub(crate) fn for_group(&self) -> Self {
        Rules {
            membership: self.membership.clone(),
            rank: self.rank,
            transport_touches: false,
            begun: AtomicBool::new(true),
            poison: Arc::clone(&self.poison),
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

    /// Begins an operation with valid arguments: injects a planned fault, and updates the progress page.
    ///
    /// # Errors
    /// If this process is a forked child, or an earlier error has poisoned the communicator.
    #[inline]
    pub(crate) fn begin(&self, entry: ProgressEntry) -> Result<()> {
        self.check_usable()?;
        let Some(membership) = &self.membership else { return Ok(()) };
        if !self.begun.load(Ordering::Relaxed) && !self.begun.swap(true, Ordering::Relaxed) {
            membership.inject_faults(InjectionPoint::Collective);
        }
        self.note(entry);
        Ok(())
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
    pub(crate) fn end<R>(&self, result: Result<R>, transport: &(impl FailureHandler + ?Sized)) -> Result<R> {
        match result {
            Ok(value) => {
                self.leave();
                Ok(value)
            }
            Err(error) => Err(self.fail(error, transport)),
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
        let entry = ProgressEntry { operation: Operation::Barrier, number: 1, bytes: 0 };
        let refusal = Error::InvalidArgument { operation: "broadcast", problem: "no".into() };
        rules.begin(entry).unwrap();
        assert!(rules.end::<()>(Err(refusal), &transport).is_err());
        // Invalid arguments do not poison.
        rules.begin(entry).unwrap();
        assert_eq!(rules.end(Ok(7), &transport).unwrap(), 7);
        for reason in ["first", "second"] {
            let error = rules.end::<()>(Err(Error::system("wait", reason)), &transport).unwrap_err();
            assert!(error.to_string().contains(reason));
        }
        assert_eq!(*transport.1.borrow(), [("stop", false), ("abort", true)]);
        let error = rules.begin(entry).unwrap_err().to_string();
        assert!(error.contains("rank 3") && error.contains("first"), "{error}");
    }
}
