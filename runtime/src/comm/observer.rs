//! What tracing has to do with a communicator: it is told of operations, and of spans of those who use the communicator.
//!
//! The runtime's own observer is the [`Timeline`](crate::timeline::Timeline).

use std::fmt;
use std::ops::Range;

use crate::progress::Operation;

/// When a span of the caller's own began; nothing, where nobody records.
#[derive(Debug, Clone, Copy)]
#[must_use = "a span is recorded when it ends"]
pub struct SpanStart(pub(crate) Option<u64>);

/// Is told what a communicator does and what is done with it. Times are nanoseconds of
/// [`timeline::now`](crate::timeline::now). Set by [`Communicator::set_observer`](super::Communicator::set_observer).
pub trait Observer: fmt::Debug + Send + Sync {
    /// An operation is about to begin.
    fn operation_begins(&self);

    /// The operation has ended, with an error or without.
    fn operation_ended(&self, operation: &ObservedOperation);

    /// The rank's own thread has waited for an operation on another thread.
    fn waited(&self, begin: u64, end: u64);

    /// A span of the caller's own begins.
    fn begin(&self) -> SpanStart;

    /// The span that began then has ended: `number` tells which of several, such as the step.
    fn end(&self, begin: SpanStart, name: &'static str, number: Option<u32>);
}

/// An operation that has ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ObservedOperation {
    /// Which.
    pub operation: Operation,
    /// The caller's number of it: the bucket's.
    pub tag: Option<u32>,
    /// When it began.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
    /// Bytes of this rank's buffer.
    pub bytes: usize,
    /// What was updated in the course of it, which is no communication.
    pub updating: UpdateTiming,
    /// Whether it ran on a thread beside the rank's own.
    pub background: bool,
}

/// The update within a fused update + all-gather.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct UpdateTiming {
    /// Nanoseconds it took.
    pub duration: u64,
    /// From the begin of the first block to the end of the last; empty where nothing was updated.
    pub span: Range<u64>,
}

impl UpdateTiming {
    /// Counts a block.
    pub(super) fn note(&mut self, begin: u64, end: u64) {
        self.span = if self.span.end == 0 { begin } else { self.span.start }..end;
        self.duration += end - begin;
    }
}

/// The observer of a communicator that has none.
#[derive(Debug)]
pub(super) struct NoObserver;

impl Observer for NoObserver {
    fn operation_begins(&self) {}

    fn operation_ended(&self, _: &ObservedOperation) {}

    fn waited(&self, _: u64, _: u64) {}

    fn begin(&self) -> SpanStart {
        SpanStart(None)
    }

    fn end(&self, _: SpanStart, _: &'static str, _: Option<u32>) {}
}
