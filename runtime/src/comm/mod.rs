//! The communicator: collectives over the ranks of a world.
//!
//! # The contract of every backend
//! - **Collective.** All ranks call the same operations in the same order, with the same element type, length,
//!   reduction and root. A rank that does not is named in an [`Error::Mismatch`] on every
//!   rank. [`send`] and [`recv`] concern two ranks only; where one can never meet its other side, because that waits in another
//!   call, this is a mismatch, too, named by those that wait for it. (Under `nccl` a message that meets a collective is; messages
//!   that wait for each other around a circle of ranks wait for the deadline.)
//! - **Ownership.** An operation takes its [`Buffer`] and returns a [`Pending`] that gives it back. Until then
//!   peers may read and write it. Dropping the handle is sound: the buffer is freed once nobody uses it.
//! - **Result.** Reductions combine in rank order 0…n−1 for every element (see
//!   [`mgpu_kernels::reduce`]): the same bits on every rank, from run to run, with every algorithm. Under `nccl` the order
//!   is NCCL's, and each step is rounded to the element type: an all-reduce leaves the same bits on every rank, but not
//!   those of the other backends; sums of integers wrap before an average divides them.
//! - **Failure.** A lost peer, a mismatch or a passed deadline makes the communicator unusable: the call returns
//!   an error that names the rank, the buffer is gone (a peer may still be writing to it), and every later call
//!   returns [`Error::Poisoned`]. No call waits longer than the world's timeout without
//!   any peer making progress. Invalid arguments are told before anything is sent and poison nothing. Of an operation on another
//!   thread ([`DataParallelConfig::overlap`](crate::DataParallelConfig::overlap)) all of this is told by [`Pending::wait`].
//! - **Messages.** Under `nccl`, [`send`] returns when the message has been received: two ranks that both send first wait
//!   for each other until the deadline. A communicator's end is collective there: all ranks come together in its drop.
//! - **Buffers.** Memory from [`allocate`] is fastest, since peers reach it in place; for that, all ranks pass
//!   the same part of the same allocation, or all pass private buffers. It is for the rank that allocated it, with any
//!   communicator of the same world: others refuse it.
//!
//! [`send`]: Communicator::send
//! [`recv`]: Communicator::recv
//! [`allocate`]: Communicator::allocate

mod background;
mod buffer;
mod communicator;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
mod solo;

pub(crate) use background::Background;
pub use buffer::Buffer;
pub use communicator::Communicator;
pub use mgpu_kernels::{DType, Element, ReduceOp};
#[cfg(feature = "cuda")]
pub use nccl::{Awaited, Captured, DeviceCommunicator, Group};
pub(crate) use solo::Solo;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::Receiver;

use crate::timeline::{self, Timeline};
use crate::{Error, Result};

/// How an all-reduce is carried out. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// By size and kind of buffer.
    #[default]
    Auto,
    /// One synchronisation, payload copied through small slots; for up to 16 KiB.
    Eager,
    /// Every block is read from all ranks and written to all ranks by whichever rank comes first.
    Direct,
    /// Blocks travel from rank to rank: the schedule for hosts that share no memory.
    Ring,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Algorithm; 4] = [Algorithm::Auto, Algorithm::Eager, Algorithm::Direct, Algorithm::Ring];

    /// The name used on command lines: `auto`, `ring`, …
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Auto => "auto",
            Algorithm::Eager => "eager",
            Algorithm::Direct => "direct",
            Algorithm::Ring => "ring",
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == text).ok_or_else(|| {
            let known = Algorithm::ALL.map(Algorithm::name).join(", ");
            format!("unknown algorithm `{text}`; known are {known}")
        })
    }
}

/// Largest buffer of a rank, in bytes.
const MOST_BYTES: usize = 1 << 46;

/// Bytes of `len` elements, unless no machine has so many.
fn bytes_of(dtype: DType, len: usize) -> Result<usize> {
    len.checked_mul(dtype.size()).filter(|bytes| *bytes <= MOST_BYTES).ok_or_else(|| {
        let problem = format!("{len} elements of {dtype} are more than any machine has memory for");
        crate::Error::InvalidArgument { operation: "allocate", problem }
    })
}

/// The elements of the shard of `rank`, where `len` elements are cut into shards for `ranks` ranks: all of ⌈len/n⌉
/// elements, but for the last ones, which may be shorter or empty.
///
/// # Panics
/// If there are no ranks.
///
/// ```
/// use mgpu::comm::shard;
/// assert_eq!([0, 1, 2].map(|rank| shard(10, 3, rank)), [0..4, 4..8, 8..10]);
/// assert!(shard(2, 3, 2).is_empty());
/// ```
pub fn shard(len: usize, ranks: u32, rank: u32) -> Range<usize> {
    let most = len.div_ceil(ranks as usize);
    let begin = |rank: u32| (rank as usize * most).min(len);
    begin(rank)..begin(rank + 1)
}

/// Makes elements of this rank's shard of a segment: given the segment's index, and the block of elements that begins at
/// this element of the whole buffer.
pub type Update<'a> = dyn FnMut(usize, usize, &mut Buffer) + 'a;

/// An operation under way, which holds its buffer.
#[must_use = "the buffer comes back from `wait`"]
#[derive(Debug)]
pub struct Pending(State);

#[derive(Debug)]
enum State {
    Complete(Buffer),
    /// On another thread.
    UnderWay {
        result: Receiver<Result<Buffer>>,
        timeline: Timeline,
    },
}

impl Pending {
    /// An operation that has already completed.
    pub(crate) fn complete(buffer: Buffer) -> Self {
        Pending(State::Complete(buffer))
    }

    /// One of which `result` tells. Waiting for it is noted in `timeline`.
    pub(crate) fn under_way(result: Receiver<Result<Buffer>>, timeline: &Timeline) -> Self {
        Pending(State::UnderWay { result, timeline: timeline.clone() })
    }

    /// Waits until the operation has completed and returns its buffer.
    ///
    /// # Errors
    /// As the operation's own.
    pub fn wait(self) -> Result<Buffer> {
        match self.0 {
            State::Complete(buffer) => Ok(buffer),
            State::UnderWay { result, timeline } => {
                let begin = timeline::now();
                let result = result.recv();
                timeline.note_wait(begin, timeline::now());
                result.unwrap_or_else(|_| {
                    let reason = "the thread of reductions has ended";
                    Err(Error::system("reduce in the background", reason))
                })
            }
        }
    }
}

/// Whether segments of `buffer` ascend, do not overlap and are within it, and can be cut into blocks.
fn check_segments(buffer: &Buffer, segments: &[Range<usize>], block: usize) -> Result<()> {
    let mut end = 0;
    let fits = |segment: &Range<usize>| {
        let fits = end <= segment.start && segment.start <= segment.end && segment.end <= buffer.len();
        end = segment.end;
        fits
    };
    let problem = if block == 0 {
        "a block has at least one element".to_owned()
    } else if !segments.iter().all(fits) {
        format!("segments {segments:?} are not ascending parts of a buffer of {} elements", buffer.len())
    } else {
        return Ok(());
    };
    Err(Error::InvalidArgument { operation: "all_gather", problem })
}

/// Has `make` change the shards of `rank` of `ranks`, block by block, and shows each to `made`.
fn make_blocks(
    buffer: Buffer,
    segments: &[Range<usize>],
    (ranks, rank): (u32, u32),
    block: usize,
    make: &mut Update<'_>,
    mut made: impl FnMut(usize, &Buffer),
) -> Buffer {
    let (mut done, mut rest) = buffer.split_at(0);
    for (index, segment) in segments.iter().enumerate() {
        let own = shard(segment.len(), ranks, rank);
        let (begin, end) = (segment.start + own.start, segment.start + own.end);
        let (before, behind) = rest.split_at(begin - done.len());
        (done, rest) = (done.join(before), behind);
        while done.len() < end {
            let begin = done.len();
            let (mut next, behind) = rest.split_at(block.min(end - begin));
            make(index, begin, &mut next);
            made(begin, &next);
            (done, rest) = (done.join(next), behind);
        }
    }
    done.join(rest)
}

/// Has `gather` do with each of the segments what it does.
fn gather_segments(
    buffer: Buffer,
    segments: &[Range<usize>],
    mut gather: impl FnMut(Buffer) -> Result<Buffer>,
) -> Result<Buffer> {
    let (mut done, mut rest) = buffer.split_at(0);
    for segment in segments {
        let (before, behind) = rest.split_at(segment.start - done.len());
        let (shards, behind) = behind.split_at(segment.len());
        (done, rest) = (done.join(before).join(gather(shards)?), behind);
    }
    Ok(done.join(rest))
}

/// What a backend does of a communicator.
pub(crate) trait Transport: Send {
    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// `solo`, `cpu` or `nccl`.
    fn backend(&self) -> &'static str;

    /// The timeline that operations are recorded in: [off](Timeline::off), unless one [observes](Timeline::observe).
    fn timeline(&self) -> &Timeline {
        &timeline::OFF
    }

    /// Has every operation of all ranks note in `at`, where that is 0, when the last one had come to it, by
    /// [`timeline::now`]. Backends that cannot tell leave it alone, and so do [`send`](Self::send) and [`recv`](Self::recv).
    fn note_arrivals(&mut self, at: Arc<AtomicU64>) {
        drop(at);
    }

    /// Tells the launcher, if there is one, whom `error` holds responsible, because this rank is about to end with it: it
    /// names that rank even if this one ends first. The first error told stays.
    fn blame(&mut self, error: &Error) {
        let _ = error;
    }

    /// From now on other threads compute on the cores of the ranks while they wait here, so they are to give way soon. On all
    /// ranks alike.
    fn set_oversubscribed(&mut self) {}

    /// Chooses how the following all-reduces are carried out, on all ranks alike.
    fn set_algorithm(&mut self, algorithm: Algorithm);

    /// Memory for `len` zeroed elements that peers reach in place. Collective.
    ///
    /// # Errors
    /// If memory is short, or as in the [contract](self).
    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer>;

    /// Every rank's buffer becomes the reduction of all ranks' buffers.
    ///
    /// # Errors
    /// As in the [contract](self).
    fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending>;

    /// The buffer consists of n [shards](shard). Shard r of rank r becomes the reduction of all ranks' shards r; the
    /// other shards hold unspecified values afterwards.
    ///
    /// # Errors
    /// As in the [contract](self).
    fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending>;

    /// The buffer consists of n [shards](shard). Shard r of every rank becomes that of rank r.
    ///
    /// # Errors
    /// As in the [contract](self).
    fn all_gather(&mut self, buffer: Buffer) -> Result<Pending>;

    /// [All-gathers](Communicator::all_gather) segments of the buffer, which ascend and do not overlap, by shards that are
    /// changed first (the same segments on all ranks): `make` is handed this rank's own ones, front to back in blocks of at most `block` elements. A backend
    /// whose ranks reach each other's memory passes every block on while it is in the cache, and ranks wait for each other
    /// once before and once after all segments.
    ///
    /// # Errors
    /// If `block` is 0, or the segments are not as they should be; or as in the [contract](self).
    fn update_all_gather(
        &mut self,
        buffer: Buffer,
        segments: &[Range<usize>],
        block: usize,
        make: &mut Update<'_>,
    ) -> Result<Pending> {
        check_segments(&buffer, segments, block)?;
        let made = make_blocks(buffer, segments, (self.size(), self.rank()), block, make, |_, _| ());
        gather_segments(made, segments, |shards| self.all_gather(shards)?.wait()).map(Pending::complete)
    }

    /// Every rank's buffer becomes a copy of that of rank `root`.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](self).
    fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending>;

    /// The buffer of rank `root` becomes the reduction of all ranks' buffers; the others stay as they are.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](self).
    fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending>;

    /// Sends a copy of the buffer to rank `to`, which calls [`recv`](Communicator::recv). Messages between two
    /// ranks arrive in the order they were sent.
    ///
    /// # Errors
    /// If `to` is this rank or none, or as in the [contract](self).
    fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending>;

    /// Fills the buffer with the next message of rank `from`.
    ///
    /// # Errors
    /// If `from` is this rank or none, the message has another type or length, or as in the [contract](self).
    fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending>;

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// As in the [contract](self).
    fn barrier(&mut self) -> Result<()>;
}
