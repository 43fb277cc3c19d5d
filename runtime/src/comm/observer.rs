//! Tracing of a communicator: an observer is told about operations, and about spans of the communicator's users.
//!
//! The runtime's own observer is the [`Timeline`](crate::timeline::Timeline).

use std::fmt;
use std::ops::Range;

use crate::progress::Operation;

/// The start of a span; empty if nothing is recorded.
#[derive(Debug, Clone, Copy)]
#[must_use = "a span is recorded when it ends"]
pub struct SpanStart(pub(crate) Option<u64>);

/// Receives the operations of a communicator and the spans of its users. Times are nanoseconds of
/// [`timeline::now`](crate::timeline::now). Set by [`Communicator::set_observer`](super::Communicator::set_observer).
pub trait Observer: fmt::Debug + Send + Sync {
    /// An operation is about to begin.
    fn operation_begins(&self);

    /// The operation has ended, successfully or not.
    fn operation_ended(&self, operation: &ObservedOperation<'_>);

    /// The rank's own thread has waited for an operation on the background thread.
    fn waited(&self, begin: u64, end: u64);

    /// Starts a span of the caller.
    fn begin(&self) -> SpanStart;

    /// Ends a span; `number` distinguishes spans of the same name, such as the step.
    fn end(&self, begin: SpanStart, name: &'static str, number: Option<u32>);
}

/// An operation that has ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ObservedOperation<'a> {
    /// Kind of the operation.
    pub operation: Operation,
    /// The [group](super::Communicator::split) that it is in, with its number and world ranks: `group 1 (ranks 0, 2)`.
    pub group: Option<&'a str>,
    /// The caller's tag: the index of the bucket.
    pub tag: Option<u32>,
    /// When it began.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
    /// Bytes of this rank's buffer.
    pub bytes: usize,
    /// The update within a fused update + all-gather, which is not communication.
    pub updating: UpdateTiming,
    /// Whether it ran on the background thread.
    pub background: bool,
}

/// Timing of the update within a fused update + all-gather.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct UpdateTiming {
    /// Total time of the updates, in nanoseconds.
    pub duration: u64,
    /// From the start of the first block to the end of the last; empty if nothing was updated.
    pub span: Range<u64>,
}

impl UpdateTiming {
    /// Adds a block.
    pub(super) fn note(&mut self, begin: u64, end: u64) {
        self.span = if self.span.end == 0 { begin } else { self.span.start }..end;
        self.duration += end - begin;
    }
}

/// The observer of a communicator without one; it records nothing.
#[derive(Debug)]
pub(super) struct NoObserver;

impl Observer for NoObserver {
    fn operation_begins(&self) {}

    fn operation_ended(&self, _: &ObservedOperation<'_>) {}

    fn waited(&self, _: u64, _: u64) {}

    fn begin(&self) -> SpanStart {
        SpanStart(None)
    }

    fn end(&self, _: SpanStart, _: &'static str, _: Option<u32>) {}
}
