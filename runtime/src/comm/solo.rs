//! A world of one: every collective is the identity.

use super::call::{Call, Request, SegmentUpdate};
use super::rules::{FailureHandler, Rules};
use super::segments::update_blocks;
use super::split::SplitGroup;
use super::{Buffer, Capabilities, Communicator, DType, Transport};
use crate::{Error, Result, memory};

/// The transport of a single rank.
#[derive(Debug)]
pub(crate) struct Solo;

impl FailureHandler for Solo {}

impl Transport for Solo {
    fn backend(&self) -> &'static str {
        "solo"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shares_memory: false,
            sums_in_rank_order: true,
            device_buffers: false,
            shares_cores: false,
            crosses_network: false,
        }
    }

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        if let Some(problem) = memory::shortage(len * dtype.size()) {
            return Err(Error::InvalidArgument { operation: "allocate", problem });
        }
        Ok(Buffer::zeroed_of(dtype, len))
    }

    fn releases_memory(&self) -> bool {
        true
    }

    fn connect_group(&mut self, _: &SplitGroup, _: Rules) -> Result<Communicator> {
        unreachable!("a group of several ranks has a parent of several ranks")
    }

    fn traffic(&self) -> Option<u64> {
        Some(0)
    }

    fn submit(&mut self, request: &mut Request<'_>) -> Result<()> {
        let Request { call, buffer, .. } = request;
        match call {
            Call::UpdateAllGather(SegmentUpdate { segments, block, update }) => {
                *buffer = update_blocks(buffer.take(), segments, (1, 0), *block, *update, |_, _| ());
            }
            Call::AllToAllV { from, .. } => buffer.copy_from(0, from, 0..from.len()),
            // Rejected by the check of the arguments: a message needs two ranks.
            Call::Send { .. } | Call::Recv { .. } | Call::SendRecv { .. } => {}
            Call::Barrier
            | Call::AllReduce(_)
            | Call::ReduceScatter(_)
            | Call::AllGather
            | Call::Broadcast { .. }
            | Call::Reduce { .. }
            | Call::AllToAll
            | Call::Gather { .. }
            | Call::Scatter { .. }
            | Call::AllGatherV { .. } => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Communicator;
    use super::*;

    #[test]
    fn allocations_beyond_memory_are_rejected() {
        for len in [1 << 43, usize::MAX] {
            let error = Communicator::alone(None).allocate(DType::F64, len).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { operation: "allocate", .. }), "{error}");
        }
        assert_eq!(Communicator::alone(None).allocate(DType::F64, 3).unwrap().len(), 3);
    }
}
