//! Times of a step's stages on the GPU.
//!
//! While a trace is recorded, timed events are put between the stages of a step: by the model between its layers, by
//! the step around reductions, waits and the update. In a captured step the events are nodes of its graph, so their
//! times include no launches. When the step is done, a trace gives one span per stage.
//!
//! The clock of a GPU is not the host's. A [`DeviceClock`] relates the two: the host notes the time just before and
//! just after an event on an idle stream. Clocks drift by some millionths, so a relation is used only for a while.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use mgpu_kernels::cuda::{Device, Stream, TimedEvent, View};

use super::DeviceDataParallel;
use crate::comm::ReduceOp;
use crate::timeline::{Name, Span, Timeline, now};
use crate::{Error, Result};

/// How long a relation of the clocks is used. A drift of 50 millionths is then 5 µs, about as exact as the relation.
const RELATED_NS: u64 = 100_000_000;
/// Number of attempts to relate the clocks, of which the one with the shortest interval counts.
const ATTEMPTS: usize = 3;

/// A point of a step, of which a trace knows the time; empty while no trace is recorded.
#[derive(Debug, Clone, Copy)]
#[must_use = "a span is recorded when it ends"]
pub struct TracePoint(Option<usize>);

/// The times of one step.
#[derive(Debug)]
pub struct StepTrace {
    device: Arc<Device>,
    /// The first one is at the beginning of the step.
    events: Vec<TimedEvent>,
    spans: Vec<TracedSpan>,
}

#[derive(Debug)]
struct TracedSpan {
    name: Name,
    number: Option<u32>,
    bytes: u64,
    /// Indices of its events.
    begin: usize,
    end: usize,
    /// Whether it is on the stream of the exchanges.
    exchange: bool,
}

/// A span of a step that was executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSpan {
    /// What the GPU did.
    pub name: Name,
    /// Index of the bucket; `None` for other spans.
    pub number: Option<u32>,
    /// Bytes of this rank's buffer; 0 without one.
    pub bytes: u64,
    /// When, since the beginning of the step.
    pub time: Range<Duration>,
    /// Whether it ran beside the other spans, on the stream of the exchanges.
    pub exchange: bool,
}

/// The relation between a GPU's clock and [`now`].
#[derive(Debug)]
pub struct DeviceClock {
    event: TimedEvent,
    /// When the event was, by the host's clock.
    at: u64,
}

impl DeviceClock {
    /// Relates the clocks. Waits for the work on `stream`: call it when the stream is idle.
    ///
    /// # Errors
    /// If the driver returns an error.
    pub fn new(stream: &Stream) -> Result<Self> {
        let attempt = || -> Result<(u64, DeviceClock)> {
            let event = TimedEvent::new(stream.device())?;
            let begin = now();
            stream.record_time(&event)?;
            stream.synchronize()?;
            let interval = now() - begin;
            Ok((interval, DeviceClock { event, at: begin + interval / 2 }))
        };
        let attempts = (0..ATTEMPTS).map(|_| attempt()).collect::<Result<Vec<_>>>()?;
        let best = attempts.into_iter().min_by_key(|(interval, _)| *interval);
        Ok(best.expect("there is an attempt").1)
    }

    /// Whether the clocks were related too long ago.
    pub fn is_outdated(&self) -> bool {
        now().saturating_sub(self.at) > RELATED_NS
    }
}

impl StepTrace {
    /// The spans of the last execution, in the order of their ends on each stream. Inner spans come before outer ones.
    ///
    /// # Errors
    /// If the step has not been executed.
    pub fn read(&self) -> Result<Vec<DeviceSpan>> {
        let since_begin = |event: &TimedEvent| event.since(&self.events[0]);
        let times = self.events.iter().map(since_begin).collect::<mgpu_kernels::cuda::Result<Vec<_>>>()?;
        let span = |&TracedSpan { name, number, bytes, begin, end, exchange }: &TracedSpan| DeviceSpan {
            name,
            number,
            bytes,
            time: times[begin]..times[end],
            exchange,
        };
        Ok(self.spans.iter().map(span).collect())
    }

    /// Records `spans` of the last execution on `timeline`. That of the step gets the number `step`. The step ran
    /// within `limits` of the host's clock: where the relation of the clocks is too inexact for that, all spans are
    /// moved by the same time.
    ///
    /// # Errors
    /// If the step has not been executed.
    pub fn record(
        &self,
        spans: &[DeviceSpan],
        step: u32,
        (clock, limits): (&DeviceClock, Range<u64>),
        timeline: &Timeline,
    ) -> Result<()> {
        let Some(first) = self.events.first() else { return Ok(()) };
        let duration = spans.iter().map(|span| span.time.end).max().unwrap_or_default();
        let begin = clock.at + first.since(&clock.event)?.as_nanos() as u64;
        let begin = begin_within(begin, duration.as_nanos() as u64, &limits);
        let host = |time: Duration| (begin + time.as_nanos() as u64).min(limits.end);
        for DeviceSpan { name, number, bytes, time, exchange } in spans {
            let number = if *name == Name::STEP { Some(step) } else { *number };
            let (begin, end) = (host(time.start), host(time.end));
            timeline.record_on(Span { name: *name, number, begin, end, bytes: *bytes }, *exchange);
        }
        Ok(())
    }

    /// Records the time of a point of `stream`.
    fn point(&mut self, stream: &Stream) -> Result<usize> {
        let event = TimedEvent::new(&self.device)?;
        stream.record_time(&event)?;
        self.events.push(event);
        Ok(self.events.len() - 1)
    }
}

/// The time nearest to `begin` from which a step of `duration` is within `limits`. A step that is longer than they are
/// begins where they begin.
fn begin_within(begin: u64, duration: u64, limits: &Range<u64>) -> u64 {
    begin.min(limits.end.saturating_sub(duration)).max(limits.start)
}

impl DeviceDataParallel {
    /// Records a trace of the next step, executed or captured, until [`take_trace`](Self::take_trace).
    pub fn start_trace(&mut self) {
        let device = Arc::clone(self.compute.device());
        self.trace = RefCell::new(Some(StepTrace { device, events: Vec::new(), spans: Vec::new() }));
    }

    /// Ends the trace that [`start_trace`](Self::start_trace) has started.
    ///
    /// # Errors
    /// If no trace was started, or no step was made since.
    pub fn take_trace(&mut self) -> Result<StepTrace> {
        self.trace.get_mut().take().filter(|trace| !trace.events.is_empty()).ok_or_else(|| {
            let problem = "no step was made since a trace was started".to_owned();
            Error::InvalidArgument { operation: "trace", problem }
        })
    }

    /// Begins a span of the model on its stream, within a step.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn begin_span(&self) -> Result<TracePoint> {
        self.begin_span_on(&self.compute)
    }

    /// Ends a span of the model. Returns the point of its end, where the next one may begin.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn end_span(&self, from: TracePoint, name: Name) -> Result<TracePoint> {
        self.end_span_on(&self.compute, from, (name, None, 0))
    }

    /// Adds a span of the model between two points that are known.
    pub fn add_span(&self, from: TracePoint, to: TracePoint, name: Name) {
        if let (Some(trace), Some(begin), Some(end)) = (&mut *self.trace.borrow_mut(), from.0, to.0) {
            trace.spans.push(TracedSpan { name, number: None, bytes: 0, begin, end, exchange: false });
        }
    }

    /// The point at the beginning of the step.
    pub(super) fn step_begin(&self) -> TracePoint {
        TracePoint(self.trace.borrow().as_ref().filter(|trace| !trace.events.is_empty()).map(|_| 0))
    }

    pub(super) fn begin_span_on(&self, stream: &Stream) -> Result<TracePoint> {
        self.trace.borrow_mut().as_mut().map(|trace| trace.point(stream)).transpose().map(TracePoint)
    }

    pub(super) fn end_span_on(
        &self,
        stream: &Stream,
        from: TracePoint,
        (name, number, bytes): (Name, Option<u32>, usize),
    ) -> Result<TracePoint> {
        let (Some(trace), Some(begin)) = (&mut *self.trace.borrow_mut(), from.0) else { return Ok(from) };
        let (end, bytes) = (trace.point(stream)?, bytes as u64);
        let exchange = stream.raw() == self.exchange.raw();
        trace.spans.push(TracedSpan { name, number, bytes, begin, end, exchange });
        Ok(TracePoint(Some(end)))
    }

    /// An all-reduce in the order of the compute stream.
    pub(super) fn all_reduce_in_order(&self, values: View<'_>, op: ReduceOp) -> Result<()> {
        let begin = self.begin_span()?;
        self.comm.all_reduce(&self.compute, values, op)?;
        let _ = self.end_span_on(&self.compute, begin, (Name::ALL_REDUCE, None, values.bytes()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::begin_within;

    #[test]
    fn a_step_is_moved_as_a_whole_into_its_limits() {
        let limits = 1_000..1_500;
        for (begin, duration, moved) in [
            (1_100, 400, 1_100),
            // The GPU's clock was related too early, or too late.
            (900, 400, 1_000),
            (1_300, 400, 1_100),
            // The clocks drift: the step seems longer than its limits.
            (900, 501, 1_000),
            (1_200, 501, 1_000),
            (1_200, 2_000, 1_000),
        ] {
            assert_eq!(begin_within(begin, duration, &limits), moved, "{begin} for {duration}");
        }
    }
}
