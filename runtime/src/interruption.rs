//! Passes an interruption on from a thread that waits for an operation to the thread that runs it.
//!
//! Whether a wait was interrupted is known to the thread that has called the library (see
//! [`World::interrupt_when`](crate::World::interrupt_when)). If a background thread runs the operation, the caller looks for it
//! and ends the wait of that thread.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError};
use std::time::Duration;

use crate::membership::Membership;

/// How often a waiting thread looks whether it was interrupted.
const SLICE: Duration = Duration::from_millis(20);

thread_local! {
    /// Set when the thread for which this one runs operations was interrupted; `None` if this thread runs its own.
    static OF_CALLER: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Whether the thread for which this one runs operations was interrupted while it waited for them.
pub(crate) fn caller_is_interrupted() -> bool {
    OF_CALLER.with_borrow(|caller| caller.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)))
}

/// The interruption of a thread that has another one run operations.
#[derive(Debug, Clone)]
pub(crate) struct CallerInterruption {
    membership: Option<Arc<Membership>>,
    is_set: Arc<AtomicBool>,
}

impl CallerInterruption {
    pub(crate) fn new(membership: Option<Arc<Membership>>) -> Self {
        CallerInterruption { membership, is_set: Arc::default() }
    }

    /// From now on this thread runs operations for the caller.
    pub(crate) fn follow(&self) {
        OF_CALLER.set(Some(Arc::clone(&self.is_set)));
    }

    /// Waits, as the caller, for what the other thread sends. An interruption ends the operation there, and so this wait.
    pub(crate) fn receive<T>(&self, from: &Receiver<T>) -> Result<T, RecvError> {
        let received = loop {
            match from.recv_timeout(SLICE) {
                Ok(value) => break Ok(value),
                Err(RecvTimeoutError::Disconnected) => break Err(RecvError),
                Err(RecvTimeoutError::Timeout) => {
                    if self.membership.as_ref().is_some_and(|membership| membership.store().is_interrupted())
                    {
                        self.is_set.store(true, Ordering::Relaxed);
                    }
                }
            }
        };
        // It has ended this wait. If the operation was faster, it does not end a later one.
        self.is_set.store(false, Ordering::Relaxed);
        received
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn an_interruption_that_came_too_late_does_not_end_the_next_wait() {
        let interruption = CallerInterruption::new(None);
        interruption.follow();
        for is_lost in [false, true] {
            interruption.is_set.store(true, Ordering::Relaxed);
            assert!(caller_is_interrupted());
            let (sender, receiver) = channel();
            if !is_lost {
                sender.send(()).unwrap();
            }
            drop(sender);
            assert_eq!(interruption.receive(&receiver).is_err(), is_lost);
            assert!(!caller_is_interrupted());
        }
    }
}
