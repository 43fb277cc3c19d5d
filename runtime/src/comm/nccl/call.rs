//! An NCCL call as data: created by the caller, executed by the thread that owns the communicator.

use std::ffi::{c_int, c_void};
use std::fmt;

use nccl_sys::{Library, NcclError, Progress, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};

use crate::comm::signature::Signature;
use crate::comm::{DType, ReduceOp};
use crate::progress::Operation;

/// The NCCL function, with the arguments that are specific to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NcclOp {
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    AllGather,
    Broadcast { root: u32 },
    Reduce { op: ReduceOp, root: u32 },
    Send { to: u32 },
    Recv { from: u32 },
}

/// A CUDA stream, to be passed to the owner's thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawStream(pub(super) cudaStream_t);

// SAFETY: a handle that the driver accepts on all threads. It is only used while the caller that lent it waits for
// the reply, or not at all: see `OwnerState::guarded`.
unsafe impl Send for RawStream {}

/// One operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct NcclCall {
    pub(super) kind: NcclOp,
    /// Address of the send buffer; ignored if there is none.
    pub(super) from: u64,
    /// Address of the receive buffer; ignored if there is none.
    pub(super) to: u64,
    /// Number of elements as NCCL counts them for the operation: those of a shard if there are shards.
    pub(super) count: usize,
    pub(super) dtype: DType,
    pub(super) stream: RawStream,
}

impl NcclCall {
    /// The operation, as recorded on the progress page.
    pub(super) fn operation(&self) -> Operation {
        match self.kind {
            NcclOp::AllReduce(_) => Operation::AllReduce,
            NcclOp::ReduceScatter(_) => Operation::ReduceScatter,
            NcclOp::AllGather => Operation::AllGather,
            NcclOp::Broadcast { .. } => Operation::Broadcast,
            NcclOp::Reduce { .. } => Operation::Reduce,
            NcclOp::Send { .. } => Operation::Send,
            NcclOp::Recv { .. } => Operation::Recv,
        }
    }

    /// Name of the NCCL function.
    pub(super) fn function(&self) -> &'static str {
        match self.kind {
            NcclOp::AllReduce(_) => "ncclAllReduce",
            NcclOp::ReduceScatter(_) => "ncclReduceScatter",
            NcclOp::AllGather => "ncclAllGather",
            NcclOp::Broadcast { .. } => "ncclBroadcast",
            NcclOp::Reduce { .. } => "ncclReduce",
            NcclOp::Send { .. } => "ncclSend",
            NcclOp::Recv { .. } => "ncclRecv",
        }
    }

    /// False for messages, in which only two ranks take part.
    pub(super) fn is_collective(&self) -> bool {
        !matches!(self.kind, NcclOp::Send { .. } | NcclOp::Recv { .. })
    }

    /// Payload of this rank in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Enqueues the operation on its stream.
    ///
    /// # Safety
    /// The contract of [`Library`]'s calls: `comm` is alive and owned by this thread; the addresses have room for the
    /// elements.
    pub(super) unsafe fn enqueue(&self, nccl: &Library, comm: ncclComm_t) -> Result<Progress, NcclError> {
        let NcclCall { count, stream: RawStream(stream), .. } = *self;
        let (from, to) = (self.from as *const c_void, self.to as *mut c_void);
        let dtype = data_type(self.dtype);
        // SAFETY: the caller vouches for the communicator, the addresses and the stream.
        unsafe {
            match self.kind {
                NcclOp::AllReduce(op) => nccl.all_reduce(from, to, count, dtype, reduction(op), comm, stream),
                NcclOp::ReduceScatter(op) => {
                    nccl.reduce_scatter(from, to, count, dtype, reduction(op), comm, stream)
                }
                NcclOp::AllGather => nccl.all_gather(from, to, count, dtype, comm, stream),
                NcclOp::Broadcast { root } => {
                    nccl.broadcast(from, to, count, dtype, rank(root), comm, stream)
                }
                NcclOp::Reduce { op, root } => {
                    nccl.reduce(from, to, count, dtype, reduction(op), rank(root), comm, stream)
                }
                NcclOp::Send { to } => nccl.send(from, count, dtype, rank(to), comm, stream),
                NcclOp::Recv { from } => nccl.recv(to, count, dtype, rank(from), comm, stream),
            }
        }
    }
}

impl fmt::Display for NcclCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (op, detail) = match self.kind {
            NcclOp::AllReduce(op) | NcclOp::ReduceScatter(op) => (Some(op), 0),
            NcclOp::AllGather => (None, 0),
            NcclOp::Broadcast { root } => (None, root),
            NcclOp::Reduce { op, root } => (Some(op), root),
            NcclOp::Send { to: peer } | NcclOp::Recv { from: peer } => (None, peer),
        };
        Signature { op, detail, ..Signature::plain(self.operation(), self.dtype, self.count) }.fmt(f)
    }
}

fn rank(rank: u32) -> c_int {
    rank as c_int
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U8 => ncclDataType_t::ncclUint8,
    }
}

fn reduction(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Avg => ncclRedOp_t::ncclAvg,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Prod => ncclRedOp_t::ncclProd,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_described() {
        let stream = RawStream(std::ptr::null_mut());
        let call = |kind| NcclCall { kind, from: 0, to: 0, count: 10, dtype: DType::F32, stream };
        for (kind, text) in [
            (NcclOp::AllReduce(ReduceOp::Avg), "all_reduce(10 f32, avg)"),
            (NcclOp::AllGather, "all_gather(10 f32)"),
            (NcclOp::Reduce { op: ReduceOp::Max, root: 2 }, "reduce(10 f32, max, root 2)"),
            (NcclOp::Recv { from: 1 }, "recv(10 f32, from rank 1)"),
        ] {
            assert_eq!(call(kind).to_string(), text);
        }
        assert_eq!(call(NcclOp::AllGather).bytes(), 40);
    }
}
