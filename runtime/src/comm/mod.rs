//! The communicator: collectives over the ranks of a world.
//!
//! # The contract of every backend
//! - **Collective.** All ranks call the same operations in the same order, with the same element type, length,
//!   reduction and root. A rank that does not is named in an [`Error::Mismatch`](crate::Error::Mismatch) on every
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
//!   returns [`Error::Poisoned`](crate::Error::Poisoned). No call waits longer than the world's timeout without
//!   any peer making progress. Invalid arguments are told before anything is sent and poison nothing. Of an operation on another
//!   thread ([`ReducerConfig::overlap`](crate::ReducerConfig::overlap)) all of this is told by [`Pending::wait`].
//! - **Messages.** Under `nccl`, [`send`] returns when the message has been received: two ranks that both send first wait
//!   for each other until the deadline. A communicator's end is collective there: all ranks come together in its drop.
//! - **Buffers.** Memory from [`allocate`] is fastest, since peers reach it in place; for that, all ranks pass
//!   the same part of the same allocation, or all pass private buffers. It is for the rank that allocated it, with any
//!   communicator of the same world: others refuse it.
//!
//! # Who does what
//! | file | question |
//! |---|---|
//! | `communicator` | what can a program call, and which rules hold for every call? |
//! | `call` | what is asked for, and do the arguments make sense? |
//! | `rules` | fault injection, progress page, poisoning: the same for buffers of the host and of GPUs |
//! | `observer` | who is told of operations? |
//! | `transport` | what does a backend supply? `solo`, `cpu`, `nccl` and `background` do |
//! | `signature` | on what of a call do ranks have to agree? |
//! | `exchange` | which elements go from which rank to which? |
//!
//! # Where more will plug in
//! - **Groups of ranks.** `Communicator::split(colour, key)` will give the ranks that pass one colour a communicator of their
//!   own, in the order of their keys. Its rank, size, collectives' numbers and rules are its own, so that an error in a group ends
//!   that group alone; errors go on naming ranks of the world. A transport will be made for a list of the world's ranks, where
//!   `cpu::connect` and NCCL's `Link` now take all of them.
//! - **Several hosts.** One more `Transport`: it has a `cpu` transport for the ranks of its host and a connection to the next
//!   host, and passes partial sums from host to host in the order of ranks, so that the bits do not depend on where ranks are. It
//!   does not share memory, as far as its [`Capabilities`] say, and no program has to know more of it.
//!
//! [`send`]: Communicator::send
//! [`recv`]: Communicator::recv
//! [`allocate`]: Communicator::allocate

mod background;
mod buffer;
mod call;
mod communicator;
pub(crate) mod cpu;
mod exchange;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
mod observer;
mod pending;
mod rules;
mod segments;
mod signature;
mod solo;
mod transport;
mod values;

use std::ops::Range;

pub use buffer::Buffer;
pub use call::Update;
pub use communicator::Communicator;
pub use mgpu_kernels::{DType, Element, ReduceOp};
#[cfg(feature = "cuda")]
pub use nccl::{CapturedGroup, DeviceCommunicator, Group, Waitable};
pub use observer::{ObservedOperation, Observer, SpanStart, UpdateTiming};
pub use pending::Pending;
pub(crate) use rules::Rules;
pub use transport::Capabilities;
use transport::Transport;

use crate::Result;

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
const MAX_BYTES: usize = 1 << 46;

/// Bytes of `len` elements, unless no machine has so many.
fn bytes_of(dtype: DType, len: usize) -> Result<usize> {
    len.checked_mul(dtype.size()).filter(|bytes| *bytes <= MAX_BYTES).ok_or_else(|| {
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
