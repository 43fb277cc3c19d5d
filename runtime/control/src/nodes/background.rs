//! Calls that block, each on a thread of its own: name lookups, and requests to the munge daemon.
//!
//! `getaddrinfo` and libmunge have no other form. They may take many seconds if a server does not answer, and nothing can
//! interrupt them. A thread whose result is no longer wanted ends when its call gives up.

use std::io::{self, PipeReader};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;

/// A call that runs.
pub(super) struct Background<T> {
    result: Receiver<T>,
    /// At its end when the thread has ended.
    end: PipeReader,
}

impl<T: Send + 'static> Background<T> {
    /// Starts the call on a thread with this name.
    pub(super) fn start(name: &str, call: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (end, held_by_thread) = io::pipe()?;
        let (sender, result) = channel();
        let call = move || {
            let _ = sender.send(call());
            drop(held_by_thread);
        };
        thread::Builder::new().name(name.into()).spawn(call)?;
        Ok(Background { result, end })
    }

    /// Becomes readable when the call has ended.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    /// The result, once; `None` while the call runs.
    ///
    /// # Errors
    /// If the call panicked.
    pub(super) fn result(&self) -> Option<Result<T, String>> {
        match self.result.try_recv() {
            Ok(result) => Some(Ok(result)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err("the call was interrupted".into())),
        }
    }
}
