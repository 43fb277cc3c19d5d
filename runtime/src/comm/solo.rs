//! A world of one: every collective is the identity.

use std::sync::Arc;

use super::{Algorithm, Buffer, DType, Pending, ReduceOp, Transport};
use crate::inject::Moment;
use crate::membership::Membership;
use crate::progress::Operation;
use crate::{Error, Result, memory};

/// The communicator of a single rank.
#[derive(Debug)]
pub(crate) struct Solo {
    /// Where there is a launcher, it is told what the rank does.
    membership: Option<Arc<Membership>>,
    sequence: u32,
}

impl Solo {
    pub(crate) fn new(membership: Option<Arc<Membership>>) -> Self {
        Solo { membership, sequence: 0 }
    }

    /// Every operation is over when it begins.
    fn note(&mut self, operation: Operation, bytes: usize) {
        self.sequence = self.sequence.wrapping_add(1);
        let Some(membership) = self.membership.as_ref().filter(|it| it.check_process().is_ok()) else {
            return;
        };
        if self.sequence == 1 {
            membership.come_to(Moment::Collective);
        }
        membership.page().enter(membership.rank(), operation, self.sequence, bytes);
        membership.page().leave(membership.rank());
    }
}

fn only_rank_0(operation: &'static str, rank: u32) -> Result<()> {
    if rank == 0 {
        return Ok(());
    }
    Err(Error::InvalidArgument { operation, problem: format!("there is no rank {rank} in a world of 1") })
}

fn no_peer(operation: &'static str, peer: u32) -> Result<Pending> {
    Err(Error::InvalidArgument { operation, problem: format!("rank 0 has no peer {peer} in a world of 1") })
}

impl Transport for Solo {
    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn backend(&self) -> &'static str {
        "solo"
    }

    fn set_algorithm(&mut self, _: Algorithm) {}

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = super::bytes_of(dtype, len)?;
        if let Some(problem) = memory::shortage(bytes) {
            return Err(Error::InvalidArgument { operation: "allocate", problem });
        }
        Ok(Buffer::zeroed_of(dtype, len))
    }

    fn all_reduce(&mut self, buffer: Buffer, _: ReduceOp) -> Result<Pending> {
        self.note(Operation::AllReduce, buffer.bytes());
        Ok(Pending::complete(buffer))
    }

    fn reduce_scatter(&mut self, buffer: Buffer, _: ReduceOp) -> Result<Pending> {
        self.note(Operation::ReduceScatter, buffer.bytes());
        Ok(Pending::complete(buffer))
    }

    fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.note(Operation::AllGather, buffer.bytes());
        Ok(Pending::complete(buffer))
    }

    fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        only_rank_0("broadcast", root)?;
        self.note(Operation::Broadcast, buffer.bytes());
        Ok(Pending::complete(buffer))
    }

    fn reduce(&mut self, buffer: Buffer, _: ReduceOp, root: u32) -> Result<Pending> {
        only_rank_0("reduce", root)?;
        self.note(Operation::Reduce, buffer.bytes());
        Ok(Pending::complete(buffer))
    }

    fn send(&mut self, _: Buffer, to: u32) -> Result<Pending> {
        no_peer("send", to)
    }

    fn recv(&mut self, _: Buffer, from: u32) -> Result<Pending> {
        no_peer("recv", from)
    }

    fn barrier(&mut self) -> Result<()> {
        self.note(Operation::Barrier, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        for len in [1 << 43, usize::MAX] {
            let error = Solo::new(None).allocate(DType::F64, len).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { operation: "allocate", .. }), "{error}");
        }
        assert_eq!(Solo::new(None).allocate(DType::F64, 3).unwrap().len(), 3);
    }
}
