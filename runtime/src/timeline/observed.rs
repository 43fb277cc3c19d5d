//! A communicator that has another one do everything, and looks at the clock.
//!
//! Every operation of every backend is over when its call returns ([`Pending`] only hands the buffer back), so a call's
//! beginning and end are the operation's. Where operations go on behind the caller's back (`comm::background`), it is the thread
//! there that calls.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{IN_BACKGROUND, Name, Shared, Span, Timeline, now};
use crate::comm::{Algorithm, Buffer, Communicator, DType, Pending, ReduceOp, Transport, Update};
use crate::{Error, Result};

/// See the [module](self).
pub(super) struct Observed {
    comm: Communicator,
    timeline: Timeline,
}

impl Observed {
    pub(super) fn new(mut comm: Communicator, timeline: Timeline) -> Self {
        if let Some(shared) = &timeline.shared {
            comm.note_arrivals(Arc::clone(&shared.arrival));
        }
        Observed { comm, timeline }
    }

    /// Has `operate` done, and records it as an operation on `bytes` bytes.
    fn record<R>(
        &mut self,
        name: Name,
        bytes: usize,
        operate: impl FnOnce(&mut Communicator) -> Result<R>,
    ) -> Result<R> {
        self.record_with(name, bytes, |comm, _| operate(comm))
    }

    /// As [`record`](Self::record), of an operation that notes what was made within.
    fn record_with<R>(
        &mut self,
        name: Name,
        bytes: usize,
        operate: impl FnOnce(&mut Communicator, &mut Made) -> Result<R>,
    ) -> Result<R> {
        let Some(shared) = &self.timeline.shared else {
            return operate(&mut self.comm, &mut Made::default());
        };
        shared.arrival.store(0, Relaxed);
        let (mut made, begin) = (Made::default(), now());
        let result = operate(&mut self.comm, &mut made);
        let end = now();
        let wait = waited(shared, begin, &made);
        // What goes on beside the rank's own work counts as far as that waits for it.
        if !IN_BACKGROUND.get() {
            shared.communication.fetch_add((end - begin).saturating_sub(made.took), Relaxed);
            shared.waiting.fetch_add(wait.end - wait.start, Relaxed);
        }
        let number = self.timeline.take_bucket();
        for (name, part) in [(Name::WAIT, wait), (Name::MAKE, made.from..made.to)] {
            if !part.is_empty() {
                self.timeline.record(Span { name, number: None, begin: part.start, end: part.end, bytes: 0 });
            }
        }
        self.timeline.record(Span { name, number, begin, end, bytes: bytes as u64 });
        result
    }
}

/// What was made in the course of an operation: none of it is communication.
#[derive(Debug, Default)]
struct Made {
    /// Nanoseconds it took.
    took: u64,
    /// When its first part was begun and its last one done.
    from: u64,
    to: u64,
}

impl Made {
    fn note(&mut self, begin: u64, end: u64) {
        self.from = if self.to == 0 { begin } else { self.from };
        self.to = end;
        self.took += end - begin;
    }
}

/// When this rank waited for the others to come, as far as the backend told.
fn waited(shared: &Shared, begin: u64, made: &Made) -> Range<u64> {
    let arrival = shared.arrival.load(Relaxed);
    // Some backends make everything before they meet the others.
    let from = if made.to < arrival { begin.max(made.to) } else { begin };
    from..arrival.max(from)
}

impl Transport for Observed {
    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn size(&self) -> u32 {
        self.comm.size()
    }

    fn backend(&self) -> &'static str {
        self.comm.backend()
    }

    fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    fn note_arrivals(&mut self, at: Arc<AtomicU64>) {
        self.comm.note_arrivals(at);
    }

    fn blame(&mut self, error: &Error) {
        self.comm.blame(error);
    }

    fn set_oversubscribed(&mut self) {
        self.comm.set_oversubscribed();
    }

    fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.comm.set_algorithm(algorithm);
    }

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.record(Name::new("allocate"), len.saturating_mul(dtype.size()), |comm| comm.allocate(dtype, len))
    }

    fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.record(Name::ALL_REDUCE, buffer.bytes(), |comm| comm.all_reduce(buffer, op))
    }

    fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.record(Name::REDUCE_SCATTER, buffer.bytes(), |comm| comm.reduce_scatter(buffer, op))
    }

    fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.record(Name::ALL_GATHER, buffer.bytes(), |comm| comm.all_gather(buffer))
    }

    fn update_all_gather(
        &mut self,
        buffer: Buffer,
        segments: &[Range<usize>],
        block: usize,
        make: &mut Update<'_>,
    ) -> Result<Pending> {
        let bytes = segments.iter().map(Range::len).sum::<usize>() * buffer.dtype().size();
        self.record_with(Name::ALL_GATHER, bytes, |comm, made| {
            comm.update_all_gather(buffer, segments, block, &mut |segment, element, block| {
                let begin = now();
                make(segment, element, block);
                made.note(begin, now());
            })
        })
    }

    fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.record(Name::new("broadcast"), buffer.bytes(), |comm| comm.broadcast(buffer, root))
    }

    fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending> {
        self.record(Name::new("reduce"), buffer.bytes(), |comm| comm.reduce(buffer, op, root))
    }

    fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending> {
        self.record(Name::new("send"), buffer.bytes(), |comm| comm.send(buffer, to))
    }

    fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending> {
        self.record(Name::new("recv"), buffer.bytes(), |comm| comm.recv(buffer, from))
    }

    fn barrier(&mut self) -> Result<()> {
        self.record(Name::new("barrier"), 0, |comm| comm.barrier())
    }
}
