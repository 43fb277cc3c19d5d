//! Timelines: spans of all ranks on one clock, for a trace viewer.
//!
//! A [`Timeline`] records spans of fixed size in preallocated memory: a name, a start, an end, and one or two
//! numbers. Nothing is formatted or allocated during the training. Its capacity is fixed: when it is full, the first
//! spans are kept, and later ones are only counted. At the end [`Timeline::write`] gathers the spans of all ranks on
//! rank 0 and writes them to one file. The record of a rank that dies is lost.
//!
//! The clock is `CLOCK_MONOTONIC`, which is the same for all processes of a host, so that ranks need no clock
//! synchronisation.
//!
//! Spans come from several sources: collectives, from a communicator that was passed to [`Timeline::observe`], and from
//! its [groups](Communicator::split), whose title then follows the collective's name; steps
//! and updates, from [`DataParallel`](crate::DataParallel), which reports to its communicator's observer; stages of a
//! step on a GPU, from a [`StepTrace`](crate::device::StepTrace); and the program's own:
//!
//! ```
//! # fn main() -> mgpu::Result<()> {
//! use mgpu::timeline::{Name, Timeline};
//! let mut world = mgpu::World::from_env()?;
//! let timeline = Timeline::new(1000)?;
//! let mut comm = timeline.observe(world.communicator()?);
//! let begin = timeline.begin();
//! // … some work of the program's own …
//! timeline.end(begin, Name::new("augment"));
//! comm.all_reduce_slice(&mut [1.0f32], mgpu::ReduceOp::Sum)?;
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("timeline.json");
//! timeline.write(&mut comm, &path)?;
//! assert!(std::fs::read_to_string(&path).unwrap().contains("augment"));
//! # Ok(())
//! # }
//! ```
//!
//! A timeline also accumulates the time that its rank spends in collectives ([`Timeline::communication`]). This costs
//! two clock readings per operation, and one more for the time spent waiting for peers. (On a virtual machine where
//! reading the clock takes 40 ns, that is 130 ns per operation, and 100 ns per recorded span: for a step of `lenet5`
//! with 24 spans, 0.1% of its time.)

mod chrome;
mod gather;
mod observed;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use crate::clock::now;
use crate::comm::Communicator;
pub use crate::comm::SpanStart;
use crate::{Error, Result, memory, output_file};
use gather::gather;

/// The name of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name(NameText);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameText {
    Fixed(&'static str),
    /// Index among the names registered with the timeline.
    Registered(u32),
}

impl Name {
    /// One call of [`DataParallel::step`](crate::DataParallel::step); the number is the step, from 1.
    pub const STEP: Name = Name::new("step");
    /// The update of the parameters, including its communication.
    pub const OPTIMIZER: Name = Name::new("optimizer");
    /// The part of a collective in which this rank waits for others to arrive.
    pub const WAIT: Name = Name::new("wait for peers");
    /// The update within a [fused update + all-gather](Communicator::update_all_gather).
    pub const UPDATE: Name = Name::new("update shard");
    /// Waiting for reductions [on the background thread](crate::ReducerConfig::overlap).
    pub const WAIT_REDUCTIONS: Name = Name::new("wait for reductions");
    /// [`Communicator::all_reduce`]; the number is the bucket, if there is one.
    pub const ALL_REDUCE: Name = Name::new("all_reduce");
    /// [`Communicator::reduce_scatter`]; the number is the bucket, if there is one.
    pub const REDUCE_SCATTER: Name = Name::new("reduce_scatter");
    /// [`Communicator::all_gather`].
    pub const ALL_GATHER: Name = Name::new("all_gather");

    /// A name that is known at compile time. For others there is [`Timeline::name`].
    pub const fn new(text: &'static str) -> Self {
        Name(NameText::Fixed(text))
    }
}

/// A span: an activity of a rank with its start and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// What the rank does.
    pub name: Name,
    /// Index of the step or bucket; `None` for other spans.
    pub number: Option<u32>,
    /// Start, by [`now`].
    pub begin: u64,
    /// End, by [`now`].
    pub end: u64,
    /// Bytes of this rank's buffer; 0 without one.
    pub bytes: u64,
}

/// A recorder of spans. Clones share one record. Meant for one thread, plus the background thread of reductions:
/// spans of further threads would overlap.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    state: Option<Arc<TimelineState>>,
}

/// State shared by all clones of a timeline.
#[derive(Debug)]
struct TimelineState {
    recording: AtomicBool,
    /// Nanoseconds in collectives, and the part of them spent waiting for peers.
    communication: AtomicU64,
    waiting: AtomicU64,
    /// When the last rank arrived at the current collective; 0 if not known yet.
    arrival: Arc<AtomicU64>,
    record: Mutex<Record>,
}

/// The recorded spans.
#[derive(Debug, Default)]
struct Record {
    /// Names registered at run time.
    names: Vec<String>,
    spans: Vec<RecordedSpan>,
    most: usize,
    /// Number of spans that did not fit.
    left_out: u64,
}

#[derive(Debug, Clone, Copy)]
struct RecordedSpan {
    span: Span,
    /// Whether it belongs to the background thread.
    background: bool,
}

const NO_NUMBER: u32 = u32::MAX;

impl Timeline {
    /// A timeline that records and counts nothing, at no cost.
    pub const fn off() -> Self {
        Timeline { state: None }
    }

    /// A timeline with room for `most` spans (56 bytes each, allocated now), which starts recording. With room for
    /// none it only accumulates [`communication`](Self::communication).
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(most: usize) -> Result<Self> {
        let mut spans = Vec::new();
        let bytes = most.saturating_mul(size_of::<RecordedSpan>());
        let problem = memory::shortage(bytes)
            .or_else(|| spans.try_reserve_exact(most).err().map(|error| error.to_string()));
        if let Some(problem) = problem {
            let problem = format!("no room for {most} spans: {problem}");
            return Err(Error::InvalidArgument { operation: "timeline", problem });
        }
        let record = Record { spans, most, ..Record::default() };
        let state = TimelineState {
            recording: AtomicBool::new(most > 0),
            communication: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            arrival: Arc::default(),
            record: Mutex::new(record),
        };
        Ok(Timeline { state: Some(Arc::new(state)) })
    }

    /// Records the operations of a communicator from now on.
    pub fn observe(&self, mut comm: Communicator) -> Communicator {
        if let Some(state) = &self.state {
            comm.record_arrivals(Arc::clone(&state.arrival));
            comm.set_observer(Arc::new(self.clone()));
        }
        comm
    }

    /// Pauses or resumes recording. Counting continues.
    pub fn set_recording(&self, recording: bool) {
        if let Some(state) = &self.state {
            state.recording.store(recording && state.record().most > 0, Relaxed);
        }
    }

    /// Registers a name that is only known at run time. It allocates: call it before the training.
    pub fn name(&self, text: &str) -> Name {
        self.registered(|name| name == text, || text.to_owned())
    }

    /// The name of a group's operation, such as `all_reduce, group 1 (ranks 0, 2)`. Only the first call of each
    /// operation in each group allocates.
    fn name_in_group(&self, operation: &str, group: &str) -> Name {
        let is_it =
            |name: &str| name.strip_prefix(operation).and_then(|rest| rest.strip_prefix(", ")) == Some(group);
        self.registered(is_it, || format!("{operation}, {group}"))
    }

    /// The registered name that satisfies `is_it`, or else the new name `text`.
    fn registered(&self, is_it: impl Fn(&str) -> bool, text: impl FnOnce() -> String) -> Name {
        let Some(state) = &self.state else { return Name::new("") };
        let names = &mut state.record().names;
        let known = names.iter().position(|name| is_it(name));
        let index = known.unwrap_or_else(|| {
            names.push(text());
            names.len() - 1
        });
        Name(NameText::Registered(index as u32))
    }

    /// Starts a span.
    #[inline]
    pub fn begin(&self) -> SpanStart {
        let recording = self.state.as_ref().is_some_and(|state| state.recording.load(Relaxed));
        SpanStart(recording.then(now))
    }

    /// Ends a span.
    #[inline]
    pub fn end(&self, begin: SpanStart, name: Name) {
        self.end_of(begin, name, None);
    }

    /// As [`end`](Self::end), with a number.
    #[inline]
    pub fn end_of(&self, begin: SpanStart, name: Name, number: Option<u32>) {
        if let Some(begin) = begin.0 {
            self.record(Span { name, number, begin, end: now(), bytes: 0 });
        }
    }

    /// Records a span that was measured elsewhere.
    pub fn record(&self, span: Span) {
        self.record_on(span, false);
    }

    /// As [`record`](Self::record), on the track of reductions beside the rank's own work if `background`.
    pub(crate) fn record_on(&self, span: Span, background: bool) {
        let Some(state) = &self.state else { return };
        if !state.recording.load(Relaxed) {
            return;
        }
        let record = &mut *state.record();
        if record.spans.len() < record.most {
            let span = Span { end: span.end.max(span.begin), ..span };
            record.spans.push(RecordedSpan { span, background });
        } else {
            record.left_out += 1;
        }
    }

    /// Time that this rank has spent in collectives so far, including waiting for late ranks, but without its own
    /// updates within them; `None` if the timeline is off.
    pub fn communication(&self) -> Option<Duration> {
        self.state.as_ref().map(|state| Duration::from_nanos(state.communication.load(Relaxed)))
    }

    /// The part of [`communication`](Self::communication) before the last rank had arrived, if the backend knows it
    /// (the CPU backend does). Waiting for background reductions is not included.
    pub fn waiting(&self) -> Option<Duration> {
        self.state.as_ref().map(|state| Duration::from_nanos(state.waiting.load(Relaxed)))
    }

    /// Stops recording, and writes all ranks' spans to `path` on rank 0, in the [trace event format][format] of
    /// Perfetto and chrome://tracing: one track per rank, and one for its background reductions if there are any, in
    /// microseconds since the first span of any rank. The file is written by [`output_file`]. Collective: either all
    /// ranks have a timeline that is not [`off`](Self::off), or none has.
    ///
    /// # Errors
    /// As the communicator; if a rank sends an invalid record (the error names it). On rank 0 only:
    /// [`Error::Timeline`] if the file cannot be written; the ranks can continue.
    ///
    /// [format]: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    pub fn write(&self, comm: &mut Communicator, path: &Path) -> Result<()> {
        let Some(state) = &self.state else { return Ok(()) };
        state.recording.store(false, Relaxed);
        let record = std::mem::take(&mut *state.record());
        let tracks = gather(&record, comm)?;
        if comm.rank() > 0 {
            return Ok(());
        }
        let mut text = Vec::new();
        chrome::write(&tracks, &mut text)
            .and_then(|()| output_file::write(path, &text))
            .map_err(|error| cannot_write(path, &error))
    }

    /// Checks whether [`write`](Self::write) could write to `path`, so that a training does not fail at its end.
    ///
    /// # Errors
    /// If it could not; the error names the file.
    pub fn check(path: &Path) -> Result<()> {
        output_file::check(path).map_err(|error| cannot_write(path, &error))
    }
}

impl TimelineState {
    /// A thread that panicked while it held the lock has left the record consistent: spans are pushed whole.
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    Error::Timeline { path: path.to_owned(), problem: error.to_string() }
}

#[cfg(test)]
mod tests;
