//! A call of an operation, independent of the transport, and the check of its arguments.
//!
//! To add a collective, add a variant of [`Call`], the check of its arguments, a method of
//! [`Communicator`](super::Communicator), and an arm in each transport.

use std::ops::Range;

use super::exchange::Counts;
use super::{Buffer, Pending, ReduceOp};
use crate::progress::Operation;
use crate::{Error, Result};

/// Updates a block of this rank's shards. The arguments are the index of the segment, the index of the block's first
/// element in the whole buffer, and the block.
pub type Update<'a> = dyn FnMut(usize, usize, &mut Buffer) + 'a;

/// The operation, with the arguments that are specific to it.
pub(crate) enum Call<'a> {
    Barrier,
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    AllGather,
    UpdateAllGather(SegmentUpdate<'a>),
    Broadcast {
        root: u32,
    },
    Reduce {
        op: ReduceOp,
        root: u32,
        /// The root does all of the work, if ranks share memory: it reads the others' buffers, and they wait.
        by_root: bool,
    },
    AllToAll,
    Gather {
        root: u32,
    },
    Scatter {
        root: u32,
    },
    AllGatherV {
        counts: &'a [usize],
    },
    /// `from` is the send buffer; the request's buffer is the receive buffer.
    AllToAllV {
        from: &'a Buffer,
        counts: &'a Counts,
    },
    Send {
        to: u32,
    },
    Recv {
        from: u32,
    },
    /// A message in both directions at once. `from` is the send buffer; the request's buffer is the receive buffer.
    SendRecv {
        from: &'a Buffer,
        peer: u32,
    },
}

/// Arguments of a fused update + all-gather.
pub(crate) struct SegmentUpdate<'a> {
    /// Ascending, disjoint parts of the buffer. Each rank updates its shard of each.
    pub(crate) segments: &'a [Range<usize>],
    /// Largest number of elements per call of `update`.
    pub(crate) block: usize,
    pub(crate) update: &'a mut Update<'a>,
}

impl SegmentUpdate<'_> {
    /// Reborrows it.
    pub(crate) fn by_ref(&mut self) -> SegmentUpdate<'_> {
        SegmentUpdate { segments: self.segments, block: self.block, update: &mut *self.update }
    }
}

/// A call with its buffer, whose element type and length apply.
pub(crate) struct Request<'a> {
    pub(crate) call: Call<'a>,
    pub(crate) buffer: Buffer,
    /// The caller's tag for traces: the index of the bucket.
    pub(crate) tag: Option<u32>,
    /// Sequence number among the communicator's collectives, from 1; for a message, that of the next collective.
    pub(crate) number: u32,
    /// Set by a transport whose operation continues after `submit`; it then holds the buffer.
    pub(crate) pending: Option<Pending>,
}

impl Call<'_> {
    /// The operation, as recorded on the progress page.
    #[inline(always)]
    pub(crate) fn operation(&self) -> Operation {
        match self {
            Call::Barrier => Operation::Barrier,
            Call::AllReduce(_) => Operation::AllReduce,
            Call::ReduceScatter(_) => Operation::ReduceScatter,
            Call::AllGather => Operation::AllGather,
            Call::UpdateAllGather(_) => Operation::UpdateAllGather,
            Call::Broadcast { .. } => Operation::Broadcast,
            Call::Reduce { .. } => Operation::Reduce,
            Call::AllToAll => Operation::AllToAll,
            Call::Gather { .. } => Operation::Gather,
            Call::Scatter { .. } => Operation::Scatter,
            Call::AllGatherV { .. } => Operation::AllGatherV,
            Call::AllToAllV { .. } => Operation::AllToAllV,
            Call::Send { .. } => Operation::Send,
            Call::Recv { .. } => Operation::Recv,
            Call::SendRecv { .. } => Operation::SendRecv,
        }
    }

    /// Payload of this rank in bytes.
    #[inline(always)]
    pub(crate) fn bytes(&self, buffer: &Buffer) -> usize {
        match self {
            Call::UpdateAllGather(SegmentUpdate { segments, .. }) => {
                segments.iter().map(Range::len).sum::<usize>() * buffer.dtype().size()
            }
            _ => buffer.bytes(),
        }
    }

    /// False for messages, in which only two ranks take part.
    #[inline(always)]
    pub(crate) fn is_collective(&self) -> bool {
        self.peer().is_none()
    }

    /// The reduction, if the operation has one.
    #[inline]
    pub(crate) fn reduction(&self) -> Option<ReduceOp> {
        match *self {
            Call::AllReduce(op) | Call::ReduceScatter(op) | Call::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }

    /// The root, if the operation has one.
    #[inline]
    pub(crate) fn root(&self) -> Option<u32> {
        match *self {
            Call::Broadcast { root }
            | Call::Reduce { root, .. }
            | Call::Gather { root }
            | Call::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// The peer of a message.
    #[inline(always)]
    pub(crate) fn peer(&self) -> Option<u32> {
        match *self {
            Call::Send { to: peer } | Call::Recv { from: peer } | Call::SendRecv { peer, .. } => Some(peer),
            _ => None,
        }
    }

    /// Checks the arguments of a call by `rank` of `size` ranks on a buffer of `len` elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    #[inline(always)]
    pub(crate) fn check(&self, rank: u32, size: u32, len: usize) -> Result<()> {
        match self {
            Call::Barrier | Call::AllReduce(_) | Call::ReduceScatter(_) | Call::AllGather => Ok(()),
            _ => self.check_arguments(rank, size, len),
        }
    }

    fn check_arguments(&self, rank: u32, size: u32, len: usize) -> Result<()> {
        let ranks = size as usize;
        let there_is = |rank: u32| match rank < size {
            true => Ok(()),
            false => Err(format!("there is no rank {rank} in a world of {size}")),
        };
        let checked = match self {
            Call::Broadcast { root }
            | Call::Reduce { root, .. }
            | Call::Gather { root }
            | Call::Scatter { root } => there_is(*root),
            Call::Send { to: peer } | Call::Recv { from: peer } | Call::SendRecv { peer, .. } => {
                there_is(*peer).and_then(|()| {
                    if *peer == rank { Err(format!("rank {rank} cannot be its own peer")) } else { Ok(()) }
                })
            }
            Call::UpdateAllGather(SegmentUpdate { segments, block, .. }) => {
                check_segments(len, segments, *block)
            }
            Call::AllToAll if !len.is_multiple_of(ranks) => {
                Err(format!("{len} elements cannot be cut into equal shards for {size} ranks"))
            }
            Call::AllGatherV { counts } => check_counts(counts, ranks, len, "the buffer"),
            Call::AllToAllV { from, counts } => {
                let (sent, received) = (counts.sent_by(rank), counts.received_by(rank));
                check_counts(sent, ranks, from.len(), "the send buffer")
                    .and_then(|()| check_counts(received, ranks, len, "the receive buffer"))
            }
            _ => Ok(()),
        };
        checked.map_err(|problem| Error::InvalidArgument { operation: self.operation().name(), problem })
    }
}

/// Checks that segments of a buffer of `len` elements are ascending, disjoint and within it, and that blocks are not
/// empty.
fn check_segments(len: usize, segments: &[Range<usize>], block: usize) -> Result<(), String> {
    let mut end = 0;
    let fits = |segment: &Range<usize>| {
        let fits = end <= segment.start && segment.start <= segment.end && segment.end <= len;
        end = segment.end;
        fits
    };
    if block == 0 {
        return Err("a block has at least one element".to_owned());
    }
    if !segments.iter().all(fits) {
        return Err(format!("segments {segments:?} are not ascending parts of a buffer of {len} elements"));
    }
    Ok(())
}

/// Checks that there is a count for each of `ranks` ranks, and that they add up to the `len` elements of `what`.
pub(super) fn check_counts(counts: &[usize], ranks: usize, len: usize, what: &str) -> Result<(), String> {
    if counts.len() != ranks {
        return Err(format!("{} counts for {ranks} ranks", counts.len()));
    }
    let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
    if total != Some(len) {
        return Err(format!("counts {counts:?} do not add up to the {len} elements of {what}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(call: &Call<'_>, len: usize) -> String {
        match call.check(1, 3, len) {
            Ok(()) => String::new(),
            Err(Error::InvalidArgument { operation, problem }) => format!("{operation}: {problem}"),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn invalid_arguments_are_reported() {
        for (call, len, expected) in [
            (Call::Gather { root: 2 }, 5, ""),
            (Call::Gather { root: 3 }, 5, "gather: there is no rank 3 in a world of 3"),
            (Call::Send { to: 0 }, 5, ""),
            (Call::Send { to: 4 }, 5, "send: there is no rank 4 in a world of 3"),
            (Call::Recv { from: 1 }, 5, "recv: rank 1 cannot be its own peer"),
            (Call::AllToAll, 6, ""),
            (Call::AllToAll, 5, "all_to_all: 5 elements cannot be cut into equal shards for 3 ranks"),
            (Call::AllGatherV { counts: &[0, 4, 1] }, 5, ""),
            (Call::AllGatherV { counts: &[4, 1] }, 5, "all_gather_v: 2 counts for 3 ranks"),
            (
                Call::AllGatherV { counts: &[usize::MAX, 4, 2] },
                5,
                "all_gather_v: counts [18446744073709551615, 4, 2] do not add up to the 5 elements of the buffer",
            ),
        ] {
            assert_eq!(problem(&call, len), expected);
        }
    }
}
