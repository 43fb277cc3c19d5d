//! Groups of operations: arguments are checked, and calls collected, before they are enqueued together.

use mgpu_kernels::cuda::{Stream, View};
use smallvec::SmallVec;

use super::DeviceCommunicator;
use super::call::{NcclCall, NcclOp, RawStream};
use crate::comm::call::Call;
use crate::comm::{DType, ReduceOp};
use crate::{Error, Result};

/// Operations that are enqueued together: sends and receives in a group do not wait for each other, and small
/// collectives are cheaper together. Created by [`DeviceCommunicator::group`].
///
/// The methods are those of [`DeviceCommunicator`]. Their arguments are borrowed until the group is enqueued.
#[derive(Debug)]
pub struct Group<'a> {
    comm: &'a DeviceCommunicator,
    pub(super) calls: Calls,
    pub(super) copies: Copies<'a>,
}

/// Calls that are enqueued together.
pub(super) type Calls = SmallVec<[NcclCall; 2]>;

/// Equivalent of operations without NCCL, in a world of one: copies with source, destination and stream.
pub(super) type Copies<'a> = SmallVec<[(View<'a>, View<'a>, &'a Stream); 2]>;

fn invalid<T>(operation: &'static str, problem: String) -> Result<T> {
    Err(Error::InvalidArgument { operation, problem })
}

impl<'a> Group<'a> {
    pub(super) fn new(comm: &'a DeviceCommunicator) -> Self {
        Group { comm, calls: SmallVec::new(), copies: SmallVec::new() }
    }

    /// As [`DeviceCommunicator::all_reduce`].
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce(&mut self, stream: &'a Stream, buffer: View<'a>, op: ReduceOp) -> Result<()> {
        self.all_reduce_into(stream, buffer, buffer, op)
    }

    /// As [`DeviceCommunicator::all_reduce_into`].
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce_into(
        &mut self,
        stream: &'a Stream,
        from: View<'a>,
        to: View<'a>,
        op: ReduceOp,
    ) -> Result<()> {
        self.check_lengths("all_reduce", from, 1, to, 1)?;
        self.add("all_reduce", NcclOp::AllReduce(op), stream, from, to, from.len())
    }

    /// As [`DeviceCommunicator::reduce_scatter`].
    ///
    /// # Errors
    /// As there.
    pub fn reduce_scatter(
        &mut self,
        stream: &'a Stream,
        from: View<'a>,
        to: View<'a>,
        op: ReduceOp,
    ) -> Result<()> {
        self.check_lengths("reduce_scatter", from, 1, to, self.comm.size() as usize)?;
        self.add("reduce_scatter", NcclOp::ReduceScatter(op), stream, from, to, to.len())
    }

    /// As [`DeviceCommunicator::all_gather`].
    ///
    /// # Errors
    /// As there.
    pub fn all_gather(&mut self, stream: &'a Stream, from: View<'a>, to: View<'a>) -> Result<()> {
        self.check_lengths("all_gather", from, self.comm.size() as usize, to, 1)?;
        self.add("all_gather", NcclOp::AllGather, stream, from, to, from.len())
    }

    /// As [`DeviceCommunicator::broadcast`].
    ///
    /// # Errors
    /// As there.
    pub fn broadcast(&mut self, stream: &'a Stream, buffer: View<'a>, root: u32) -> Result<()> {
        self.check(&Call::Broadcast { root }, buffer)?;
        self.add("broadcast", NcclOp::Broadcast { root }, stream, buffer, buffer, buffer.len())
    }

    /// As [`DeviceCommunicator::reduce`].
    ///
    /// # Errors
    /// As there.
    pub fn reduce(&mut self, stream: &'a Stream, buffer: View<'a>, op: ReduceOp, root: u32) -> Result<()> {
        self.check(&Call::Reduce { op, root, by_root: false }, buffer)?;
        self.add("reduce", NcclOp::Reduce { op, root }, stream, buffer, buffer, buffer.len())
    }

    /// As [`DeviceCommunicator::send`].
    ///
    /// # Errors
    /// As there.
    pub fn send(&mut self, stream: &'a Stream, buffer: View<'a>, to: u32) -> Result<()> {
        self.check(&Call::Send { to }, buffer)?;
        self.add("send", NcclOp::Send { to }, stream, buffer, buffer, buffer.len())
    }

    /// As [`DeviceCommunicator::recv`].
    ///
    /// # Errors
    /// As there.
    pub fn recv(&mut self, stream: &'a Stream, buffer: View<'a>, from: u32) -> Result<()> {
        self.check(&Call::Recv { from }, buffer)?;
        self.add("recv", NcclOp::Recv { from }, stream, buffer, buffer, buffer.len())
    }

    /// Collects a call; without NCCL, the equivalent copy.
    fn add(
        &mut self,
        operation: &'static str,
        kind: NcclOp,
        stream: &'a Stream,
        from: View<'a>,
        to: View<'a>,
        count: usize,
    ) -> Result<()> {
        if stream.device().uuid() != self.comm.device().uuid() {
            let (ours, theirs) = (self.comm.device().ordinal(), stream.device().ordinal());
            return invalid(
                operation,
                format!("the stream belongs to GPU {theirs}, the communicator to GPU {ours}"),
            );
        }
        if !self.comm.uses_nccl() {
            if from.address() != to.address() && !from.is_empty() {
                self.copies.push((from, to, stream));
            }
            return Ok(());
        }
        if stream.is_capturing()? {
            self.comm.note_capture();
        }
        self.push(kind, stream, (from.address(), to.address()), count, from.dtype());
        Ok(())
    }

    /// Collects a call with valid arguments. The addresses have room for its elements.
    pub(super) fn push(
        &mut self,
        kind: NcclOp,
        stream: &'a Stream,
        (from, to): (u64, u64),
        count: usize,
        dtype: DType,
    ) {
        self.calls.push(NcclCall { kind, from, to, count, dtype, stream: RawStream(stream.raw().cast()) });
    }

    /// Checks root and peer by the rules of host buffers.
    fn check(&self, call: &Call<'_>, buffer: View<'_>) -> Result<()> {
        call.check(self.comm.rank(), self.comm.size(), buffer.len())
    }

    /// Checks that both views have the same type, and that `from_times` as many elements as `from` has are `to_times`
    /// as many as `to` has.
    fn check_lengths(
        &self,
        operation: &'static str,
        from: View<'_>,
        from_times: usize,
        to: View<'_>,
        to_times: usize,
    ) -> Result<()> {
        if from.dtype() != to.dtype() {
            return invalid(
                operation,
                format!("from {} to {}, which have different types", from.dtype(), to.dtype()),
            );
        }
        if from.len() * from_times != to.len() * to_times {
            let (from, to, ranks) = (from.len(), to.len(), self.comm.size());
            return invalid(
                operation,
                format!("from {from} elements to {to} are incompatible with {ranks} ranks"),
            );
        }
        Ok(())
    }
}
