//! An operation under way.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use super::{Buffer, Observer};
use crate::clock::now;
use crate::{Error, Result};

/// An operation under way, which holds its buffer.
#[must_use = "the buffer comes back from `wait`"]
#[derive(Debug)]
pub struct Pending {
    /// That of a completed operation. A field of its own, which is handed on as it is: small operations notice the difference.
    buffer: Buffer,
    in_flight: Option<Box<InFlight>>,
}

/// An operation on another thread, which has the buffer.
#[derive(Debug)]
struct InFlight {
    result: Receiver<Result<Buffer>>,
    observer: Option<Arc<dyn Observer>>,
}

impl Pending {
    /// An operation that has already completed.
    #[inline]
    pub(crate) fn complete(buffer: Buffer) -> Self {
        Pending { buffer, in_flight: None }
    }

    /// One whose outcome `result` will tell, and that has left `rest` of its buffer, which is empty. `observer` is told of the
    /// wait for it.
    pub(crate) fn in_flight(
        rest: Buffer,
        result: Receiver<Result<Buffer>>,
        observer: Option<Arc<dyn Observer>>,
    ) -> Self {
        Pending { buffer: rest, in_flight: Some(Box::new(InFlight { result, observer })) }
    }

    /// Waits until the operation has completed and returns its buffer.
    ///
    /// # Errors
    /// As the operation's own.
    #[inline]
    pub fn wait(self) -> Result<Buffer> {
        match self.in_flight {
            None => Ok(self.buffer),
            Some(in_flight) => in_flight.wait(),
        }
    }
}

impl InFlight {
    #[cold]
    fn wait(self) -> Result<Buffer> {
        let InFlight { result, observer } = self;
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
