//! An operation in flight.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use super::{Buffer, Observer};
use crate::clock::now;
use crate::interruption::CallerInterruption;
use crate::{Error, Result};

/// An operation in flight, which holds its buffer.
#[must_use = "the buffer comes back from `wait`"]
#[derive(Debug)]
#[repr(C)]
pub struct Pending {
    /// The buffer of a completed operation. It is a separate field that is moved as it is, and the first one, so that whoever
    /// moves the struct loads what was stored by the same instructions: small operations are that sensitive.
    buffer: Buffer,
    in_flight: Option<Box<InFlight>>,
}

/// An operation on the background thread, which holds the buffer.
#[derive(Debug)]
struct InFlight {
    result: Receiver<Result<Buffer>>,
    interruption: CallerInterruption,
    observer: Option<Arc<dyn Observer>>,
}

impl Pending {
    /// An operation that has already completed.
    #[inline(always)]
    pub(crate) fn complete(buffer: Buffer) -> Self {
        Pending { buffer, in_flight: None }
    }

    /// An operation whose outcome arrives through `result`. `rest` is the empty remainder of its buffer. `observer`
    /// is told about the wait.
    pub(crate) fn in_flight(
        rest: Buffer,
        result: Receiver<Result<Buffer>>,
        interruption: CallerInterruption,
        observer: Option<Arc<dyn Observer>>,
    ) -> Self {
        Pending { buffer: rest, in_flight: Some(Box::new(InFlight { result, interruption, observer })) }
    }

    /// Waits until the operation has completed and returns its buffer.
    ///
    /// # Errors
    /// The error of the operation.
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
        let InFlight { result, interruption, observer } = self;
        let begin = now();
        let range = nvtx::range("wait for reductions", None);
        let result = interruption.receive(&result);
        drop(range);
        if let Some(observer) = observer {
            observer.waited(begin, now());
        }
        result.unwrap_or_else(|_| {
            let reason = "the background thread of reductions has ended";
            Err(Error::system("reduce in the background", reason))
        })
    }
}
