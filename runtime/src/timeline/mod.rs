//! What a rank did when: a record of spans, all ranks on one clock, for a viewer of traces.
//!
//! A [`Timeline`] keeps spans of fixed size in memory that was taken before: a name, a beginning, an end, and a number or
//! two. Nothing is formatted while a rank trains, and nothing allocated. It holds so many spans and no more: when it is full,
//! the first ones stay, and later ones are counted. At the end [`Timeline::write`] gathers all ranks' on rank 0 and writes
//! them as one file; what a rank has recorded when it dies is lost.
//!
//! The clock is `CLOCK_MONOTONIC`: one host has one of it, the same for all of its processes, so ranks need not agree on
//! anything to be shown side by side.
//!
//! Spans come from several places, none of which has to know of a file: the collectives from a communicator that was handed
//! to [`Timeline::observe`], steps and updates from [`DataParallel`](crate::DataParallel), which tells the observer of its
//! communicator, everything else from the program:
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
//! Beside the spans a timeline always adds up what its rank spent in collectives ([`Timeline::communication`]): two readings
//! of the clock an operation, and one more for the waiting among it. (On a virtual machine that reads its clock in 40 ns, that
//! is 130 ns an operation, and a span recorded 100 ns: of a step of `lenet5` with 24 spans, a thousandth.)

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

/// What a span is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name(NameText);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameText {
    Fixed(&'static str),
    /// Its place among those that a timeline was told.
    Registered(u32),
}

impl Name {
    /// One call of [`DataParallel::step`](crate::DataParallel::step); its number is the step's, from 1.
    pub const STEP: Name = Name::new("step");
    /// UpdateTiming the parameters, with what is exchanged for that.
    pub const OPTIMIZER: Name = Name::new("optimizer");
    /// The part of a collective in which this rank had come and another had not.
    pub const WAIT: Name = Name::new("wait for peers");
    /// The part of a [fused update + all-gather](Communicator::update_all_gather) in which what is gathered was made and passed on.
    pub const UPDATE: Name = Name::new("update shard");
    /// Waiting for reductions [on another thread](crate::ReducerConfig::overlap).
    pub const WAIT_REDUCTIONS: Name = Name::new("wait for reductions");
    /// [`Communicator::all_reduce`]; its number is the bucket's, if it is of one.
    pub const ALL_REDUCE: Name = Name::new("all_reduce");
    /// [`Communicator::reduce_scatter`]; its number is the bucket's, if it is of one.
    pub const REDUCE_SCATTER: Name = Name::new("reduce_scatter");
    /// [`Communicator::all_gather`].
    pub const ALL_GATHER: Name = Name::new("all_gather");

    /// A name that is known beforehand. For others there is [`Timeline::name`].
    pub const fn new(text: &'static str) -> Self {
        Name(NameText::Fixed(text))
    }
}

/// Something that a rank did from one moment to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// What.
    pub name: Name,
    /// Which one: a step, a bucket. `None` where that means nothing.
    pub number: Option<u32>,
    /// When it began, by [`now`].
    pub begin: u64,
    /// When it was over, by [`now`].
    pub end: u64,
    /// Bytes of this rank's buffer, where there is one.
    pub bytes: u64,
}

/// What a rank did when. Clones are of the same record. Made for one thread, and one for reductions beside it: spans of several
/// would overlap.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    state: Option<Arc<TimelineState>>,
}

/// What all clones of a timeline share.
#[derive(Debug)]
struct TimelineState {
    recording: AtomicBool,
    /// Nanoseconds in collectives, and those of them waiting for peers.
    communication: AtomicU64,
    waiting: AtomicU64,
    /// When the last rank came to the current collective; 0 where that is not known yet.
    arrival: Arc<AtomicU64>,
    record: Mutex<Record>,
}

/// What was recorded.
#[derive(Debug, Default)]
struct Record {
    /// Texts of the names that were not known beforehand.
    names: Vec<String>,
    spans: Vec<RecordedSpan>,
    most: usize,
    /// Spans that found no room.
    left_out: u64,
}

#[derive(Debug, Clone, Copy)]
struct RecordedSpan {
    span: Span,
    /// Whether it is of the rank's thread of reductions.
    background: bool,
}

const NO_NUMBER: u32 = u32::MAX;

impl Timeline {
    /// One that records and counts nothing, at no cost.
    pub const fn off() -> Self {
        Timeline { state: None }
    }

    /// One with room for `most` spans (56 bytes each, taken now), recording from now on. With room for none it only
    /// adds up [`communication`](Self::communication).
    ///
    /// # Errors
    /// If there is no memory for so many.
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

    /// The communicator, with its operations recorded from now on.
    pub fn observe(&self, mut comm: Communicator) -> Communicator {
        if let Some(state) = &self.state {
            comm.note_arrivals(Arc::clone(&state.arrival));
            comm.set_observer(Arc::new(self.clone()));
        }
        comm
    }

    /// Goes on recording, or leaves everything out until it is told to go on. Counting goes on.
    pub fn set_recording(&self, recording: bool) {
        if let Some(state) = &self.state {
            state.recording.store(recording && state.record().most > 0, Relaxed);
        }
    }

    /// A name for spans of the program's own, where it is made at run time. Allocates: before the training.
    pub fn name(&self, text: &str) -> Name {
        let Some(state) = &self.state else { return Name::new("") };
        let names = &mut state.record().names;
        let known = names.iter().position(|name| name == text);
        let place = known.unwrap_or_else(|| {
            names.push(text.to_owned());
            names.len() - 1
        });
        Name(NameText::Registered(place as u32))
    }

    /// Something begins.
    #[inline]
    pub fn begin(&self) -> SpanStart {
        let recording = self.state.as_ref().is_some_and(|state| state.recording.load(Relaxed));
        SpanStart(recording.then(now))
    }

    /// What has begun then is over.
    #[inline]
    pub fn end(&self, begin: SpanStart, name: Name) {
        self.end_of(begin, name, None);
    }

    /// As [`end`](Self::end), of one of several.
    #[inline]
    pub fn end_of(&self, begin: SpanStart, name: Name, number: Option<u32>) {
        if let Some(begin) = begin.0 {
            self.record(Span { name, number, begin, end: now(), bytes: 0 });
        }
    }

    /// Records what somebody else has measured.
    pub fn record(&self, span: Span) {
        self.record_on(span, false);
    }

    /// As [`record`](Self::record), on the track of the rank's thread of reductions if it is of that.
    fn record_on(&self, span: Span, background: bool) {
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

    /// What this rank has spent in collectives so far, without what it made for them itself; `None` if nobody counts.
    /// Waiting for peers that come later is part of it.
    pub fn communication(&self) -> Option<Duration> {
        self.state.as_ref().map(|state| Duration::from_nanos(state.communication.load(Relaxed)))
    }

    /// What of [`communication`](Self::communication) went by before the last rank had come, where the backend can tell
    /// (the CPU's can). Waiting in reductions on a thread of their own is not part of it.
    pub fn waiting(&self) -> Option<Duration> {
        self.state.as_ref().map(|state| Duration::from_nanos(state.waiting.load(Relaxed)))
    }

    /// Ends the recording and has rank 0 write all ranks' spans to `path`, in the [trace event format][format] that Perfetto
    /// and chrome://tracing open: a track for each rank, and one for its thread of reductions where it has one, microseconds from
    /// the first span of any. The file is written as [`output_file`] does. Collective: all ranks have a timeline that is not
    /// [`off`](Self::off), or none has.
    ///
    /// # Errors
    /// As the communicator's; names a rank that sent something else than a record. On rank 0 alone [`Error::Timeline`], if the
    /// file cannot be written: the ranks can go on.
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

    /// Looks whether [`write`](Self::write) could write to `path`, so that this is not found out when all is over.
    ///
    /// # Errors
    /// If not; names the file.
    pub fn check(path: &Path) -> Result<()> {
        output_file::check(path).map_err(|error| cannot_write(path, &error))
    }
}

impl TimelineState {
    /// A thread that panicked while it held the lock has left whole spans: there is no moment between.
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    Error::Timeline { path: path.to_owned(), problem: error.to_string() }
}

#[cfg(test)]
mod tests;
