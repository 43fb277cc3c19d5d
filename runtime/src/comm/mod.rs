//! The communicator: collectives over the ranks of a world.
//!
//! # The contract of every backend
//! - **Collective.** All ranks call the same operations in the same order, with the same element type, length,
//!   reduction and root. Otherwise every rank gets an [`Error::Mismatch`](crate::Error::Mismatch) that names a rank
//!   that differs. On shared memory the ranks of a broadcast of at most 4 KiB (in allocated memory: 1 KiB, or 2 KiB with
//!   more ranks than cores) only wait for the root, which may be up to 8 broadcasts ahead: whoever has left one before a
//!   mismatch shows gets the error in a later call. [`send`] and [`recv`] only concern two ranks. A message that can
//!   never match, because the other rank waits in another call, is a mismatch, too, reported by the ranks that wait for
//!   it. (Under `nccl` this is detected if the other rank waits in a collective; cyclic waits of messages time out.)
//! - **Ownership.** An operation takes its [`Buffer`] and returns a [`Pending`] that gives it back. Until then peers
//!   may read and write it. Dropping the handle is sound: the buffer is freed once nobody uses it.
//! - **Result.** Reductions combine in rank order 0…n−1 for every element (see [`mgpu_kernels::reduce`]): the same
//!   bits on every rank, in every run, with every algorithm. Under `nccl` the order is NCCL's, and each step is
//!   rounded to the element type: an all-reduce leaves the same bits on every rank, but not those of the other
//!   backends; sums of integers wrap before an average divides them.
//! - **Failure.** A lost peer, a mismatch or a timeout poisons the communicator: the call returns an error that names
//!   the rank, the buffer is lost (a peer may still be writing to it), and every later call returns
//!   [`Error::Poisoned`](crate::Error::Poisoned). No call waits longer than the world's timeout while no peer makes
//!   progress. Invalid arguments are reported before anything is sent and do not poison. For an operation on the
//!   background thread ([`ReducerConfig::overlap`](crate::ReducerConfig::overlap)), [`Pending::wait`] returns the
//!   error.
//! - **Messages.** Under `nccl`, [`send`] returns when the message has been received: two ranks that both send first
//!   wait for each other until the timeout. Dropping a communicator is collective there: all ranks synchronise before
//!   it ends. Between hosts, [`send`] of more than 16 KiB returns when the message has been sent to a rank that is
//!   receiving it.
//! - **Buffers.** Memory from [`allocate`] is fastest, since peers access it in place; for that, all ranks pass the
//!   same part of the same allocation. Or all ranks pass private buffers. Allocated memory can only be used by the
//!   rank that allocated it, with any communicator of the same world whose ranks all took part in the allocation.
//!   Memory that exists already can become such memory: [`adopt`](Communicator::adopt),
//!   [`adopt_in_place`](Communicator::adopt_in_place).
//! - **Groups.** [`split`] creates a communicator for the ranks with the same colour, ordered by key. Ranks that are
//!   passed to it, such as a root, and its own [`rank`](Communicator::rank) count the members of the group; errors name
//!   ranks of the world. An error in a communicator also makes the groups that were split from it unusable, and the
//!   reverse, on all ranks: whoever waits for a rank that has failed in another group gets an error that names the
//!   rank at fault.
//! - **Threads.** One thread at a time uses a communicator; several threads may use communicators of their own at once. But a
//!   process creates communicators, groups and allocated memory one after the other, in the same order on all ranks.
//!
//! # Modules
//! | file | question |
//! |---|---|
//! | `communicator` | what can a program call, and which rules apply to every call? |
//! | `call` | what does a call consist of, and are its arguments valid? |
//! | `rules` | fault injection, progress page, poisoning: for host buffers and device memory |
//! | `observer` | how are operations traced? |
//! | `adopt` | how does memory of the program's own become reachable for peers? |
//! | `transport` | what does a backend supply? `solo`, `cpu`, `hosts`, `nccl` and `background` do |
//! | `signature` | which properties of a call must be the same on all ranks? |
//! | `exchange` | which elements go from which rank to which? |
//! | `split` | which ranks form which group? |
//!
//! [`send`]: Communicator::send
//! [`recv`]: Communicator::recv
//! [`allocate`]: Communicator::allocate
//! [`split`]: Communicator::split

mod adopt;
mod background;
mod buffer;
mod call;
mod communicator;
pub(crate) mod cpu;
mod exchange;
pub(crate) mod hosts;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
mod observer;
mod pending;
mod rules;
mod segments;
mod signature;
mod solo;
mod split;
mod transport;
mod values;

use std::ops::Range;

pub use adopt::AdoptedMemory;
pub use buffer::Buffer;
pub use call::Update;
pub use communicator::Communicator;
#[doc(hidden)]
pub use hosts::Net;
pub use mgpu_kernels::{DType, Element, ReduceOp};
#[cfg(feature = "cuda")]
pub use nccl::{BufferAccess, CapturedGroup, DeviceCommunicator, Group, Registration, Waitable};
pub use observer::{ObservedOperation, Observer, SpanStart, UpdateTiming};
pub use pending::Pending;
pub(crate) use rules::Rules;
pub(crate) use segments::gather_segments;
pub(crate) use split::Members;
pub use transport::Capabilities;
use transport::Transport;

use crate::Result;

/// Algorithm of an all-reduce. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// Chosen by size and kind of buffer.
    #[default]
    Auto,
    /// One synchronisation; the payload is copied through small slots. Up to 16 KiB.
    Eager,
    /// Every block is reduced in place, from all ranks' buffers to all ranks' buffers, by whichever rank takes it
    /// first.
    Direct,
    /// Blocks move from rank to rank: the schedule for hosts without shared memory.
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
const MAX_BYTES: usize = 1 << 46;

/// Size of `len` elements in bytes, or an error if no machine has that much memory.
fn bytes_of(dtype: DType, len: usize) -> Result<usize> {
    len.checked_mul(dtype.size()).filter(|bytes| *bytes <= MAX_BYTES).ok_or_else(|| {
        let problem = format!("{len} elements of {dtype} are more than any machine has memory for");
        crate::Error::InvalidArgument { operation: "allocate", problem }
    })
}

/// The shard of `rank` if `len` elements are divided among `ranks` ranks: ⌈len/n⌉ elements each, except that the last
/// shards may be shorter or empty.
///
/// # Panics
/// If `ranks` is 0.
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
