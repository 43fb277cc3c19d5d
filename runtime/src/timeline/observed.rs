//! Turns operations of a communicator into spans.
//!
//! Every operation of every transport ends within its call ([`Pending`](crate::comm::Pending) only returns the
//! buffer), so the start and end of the call are those of the operation. Operations on the background thread are
//! called by that thread.

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

    fn operation_ended(&self, operation: &ObservedOperation<'_>) {
        let Some(state) = &self.state else { return };
        let &ObservedOperation { tag, begin, end, bytes, background, ref updating, .. } = operation;
        let wait = waited(state, begin, updating);
        // Operations on the background thread only count as far as the rank's own thread waits for them.
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
        if !state.recording.load(Relaxed) {
            return;
        }
        let name = match operation.operation {
            // The update within it has a span of its own.
            Operation::UpdateAllGather => Operation::AllGather,
            other => other,
        };
        let name = match operation.group {
            None => Name::new(name.name()),
            Some(group) => self.name_in_group(name.name(), group),
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

/// When this rank waited for others to arrive, if the transport knows it.
fn waited(state: &TimelineState, begin: u64, updating: &UpdateTiming) -> Range<u64> {
    let arrival = state.arrival.load(Relaxed);
    // Some transports update everything before they synchronise.
    let from = if updating.span.end < arrival { begin.max(updating.span.end) } else { begin };
    from..arrival.max(from)
}
