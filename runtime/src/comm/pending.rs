//! An operation under way.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use super::{Buffer, Observer};
use crate::clock::now;
use crate::{Error, Result};

/// An operation under way, which holds its buffer.
#[must_use = "the buffer comes back from `wait`"]
#[derive(Debug)]
pub struct Pending(State);

#[derive(Debug)]
enum State {
    Complete(Buffer),
    /// On another thread.
    UnderWay {
        result: Receiver<Result<Buffer>>,
        observer: Option<Arc<dyn Observer>>,
    },
}

impl Pending {
    /// An operation that has already completed.
    pub(crate) fn complete(buffer: Buffer) -> Self {
        Pending(State::Complete(buffer))
    }

    /// An operation whose outcome `result` will tell. `observer` is told of the wait for it.
    pub(crate) fn under_way(result: Receiver<Result<Buffer>>, observer: Option<Arc<dyn Observer>>) -> Self {
        Pending(State::UnderWay { result, observer })
    }

    /// Waits until the operation has completed and returns its buffer.
    ///
    /// # Errors
    /// As the operation's own.
    pub fn wait(self) -> Result<Buffer> {
        let (result, observer) = match self.0 {
            State::Complete(buffer) => return Ok(buffer),
            State::UnderWay { result, observer } => (result, observer),
        };
        let begin = now();
        let result = result.recv();
        if let Some(observer) = observer {
            observer.waited(begin, now());
        }
        result.unwrap_or_else(|_| {
            let reason = "the thread of reductions has ended";
            Err(Error::system("reduce in the background", reason))
        })
    }
}
