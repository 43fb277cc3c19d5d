//! How operations of a communicator become spans.
//!
//! Every operation of every transport is over when its call returns ([`Pending`](crate::comm::Pending) only hands the buffer
//! back), so a call's beginning and end are the operation's. Where operations go on behind the caller's back, it is the thread
//! there that calls.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::{Name, Span, Timeline, TimelineState};
use crate::comm::{ObservedOperation, Observer, SpanStart, UpdateTiming};
use crate::progress::Operation;

impl Observer for Timeline {
    fn operation_begins(&self) {
        if let Some(state) = &self.state {
            state.arrival.store(0, Relaxed);
        }
    }

    fn operation_ended(&self, operation: &ObservedOperation) {
        let Some(state) = &self.state else { return };
        let &ObservedOperation { tag, begin, end, bytes, background, ref updating, .. } = operation;
        let wait = waited(state, begin, updating);
        // What goes on beside the rank's own work counts as far as that waits for it.
        if !background {
            state.communication.fetch_add((end - begin).saturating_sub(updating.duration), Relaxed);
            state.waiting.fetch_add(wait.end - wait.start, Relaxed);
        }
        for (name, part) in [(Name::WAIT, wait), (Name::UPDATE, updating.span.clone())] {
            if !part.is_empty() {
                let span = Span { name, number: None, begin: part.start, end: part.end, bytes: 0 };
                self.record_on(span, background);
            }
        }
        let name = match operation.operation {
            // The update within has a span of its own.
            Operation::UpdateAllGather => Name::ALL_GATHER,
            other => Name::new(other.name()),
        };
        self.record_on(Span { name, number: tag, begin, end, bytes: bytes as u64 }, background);
    }

    fn waited(&self, begin: u64, end: u64) {
        if let Some(state) = &self.state {
            state.communication.fetch_add(end - begin, Relaxed);
            self.record(Span { name: Name::WAIT_REDUCTIONS, number: None, begin, end, bytes: 0 });
        }
    }

    fn begin(&self) -> SpanStart {
        Timeline::begin(self)
    }

    fn end(&self, begin: SpanStart, name: &'static str, number: Option<u32>) {
        self.end_of(begin, Name::new(name), number);
    }
}

/// When this rank waited for the others to come, as far as the transport told.
fn waited(state: &TimelineState, begin: u64, updating: &UpdateTiming) -> Range<u64> {
    let arrival = state.arrival.load(Relaxed);
    // Some transports update everything before they meet the others.
    let from = if updating.span.end < arrival { begin.max(updating.span.end) } else { begin };
    from..arrival.max(from)
}
