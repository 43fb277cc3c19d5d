//! Reductions: which way they take.
//!
//! | payload | way |
//! |---|---|
//! | small | with the arrival, to every rank that needs it: one message time |
//! | large, several ranks on some host | along a [`chain`](super::chain) of the hosts |
//! | large, one rank on each host | [directly](super::direct) to the rank that combines a part |
//!
//! One kernel combines the elements of all ranks, in rank order, in an accumulator that is rounded once. So the bits do
//! not depend on how the ranks are divided over hosts, nor on the way.

use std::ops::Range;

use mgpu_kernels::reduce;
use smallvec::SmallVec;

use super::HostsTransport;
use super::direct::Goal;
use super::frame::SMALL_BYTES;
use crate::Result;
use crate::comm::signature::Signature;
use crate::comm::{Buffer, DType, ReduceOp, shard};

/// Up to this size, ranks that send bundles put whole payloads into them, although others need a part or nothing: fewer
/// messages cost less.
const WHOLE_BYTES: usize = 1 << 10;

/// Replaces `own`, the contribution of `rank`, by the reduction of it and those of the other ranks, which are given in
/// rank order.
pub(super) fn reduce_part(dtype: DType, op: ReduceOp, rank: u32, own: &mut [u8], others: &[&[u8]]) {
    let element = dtype.size();
    let address = own.as_mut_ptr();
    let fits = |part: &[u8]| part.len() == own.len() && part.as_ptr().addr().is_multiple_of(element);
    assert!(others.iter().all(|part| fits(part)) && address.addr().is_multiple_of(element));
    let mut sources: SmallVec<[*const u8; 16]> = others.iter().map(|part| part.as_ptr()).collect();
    sources.insert(rank as usize, address.cast_const());
    // SAFETY: all parts have the same length in elements and are aligned to them, which was checked; any bytes are
    // elements. Only the destination is written, and of the sources only `own` is in the same place.
    unsafe { reduce::reduce(dtype, op, &sources, &[address], own.len() / element) };
}

impl HostsTransport {
    /// At least `bytes` bytes, if possible those of the operation before.
    pub(super) fn take_memory(&mut self, bytes: usize) -> Buffer {
        let memory = self.staging.take().filter(|memory| memory.len() >= bytes);
        memory.unwrap_or_else(|| Buffer::zeroed::<u8>(bytes))
    }

    pub(super) fn all_reduce(&mut self, buffer: &mut Buffer, op: ReduceOp, call: &Signature) -> Result<()> {
        if buffer.bytes() <= self.small_bytes() {
            return self.small_reduction(buffer, op, Goal::All, call);
        }
        if !self.runs.are_single() {
            return self.chain_all_reduce(buffer, op, call);
        }
        self.enter(call, &[])?;
        self.direct_reduction(buffer, op, Goal::All, call)
    }

    pub(super) fn reduce_scatter(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        let ranks = self.members.size();
        if shard(buffer.len(), ranks, 0).len() * buffer.dtype().size() <= SMALL_BYTES {
            return self.small_reduction(buffer, op, Goal::Shards, call);
        }
        if self.runs.are_single() {
            self.enter(call, &[])?;
        } else if self.chain_reduce(buffer, op, None, call)? {
            return Ok(());
        }
        self.direct_reduction(buffer, op, Goal::Shards, call)
    }

    pub(super) fn reduce(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        root: u32,
        call: &Signature,
    ) -> Result<()> {
        if buffer.bytes() <= SMALL_BYTES {
            return self.small_reduction(buffer, op, Goal::One(root), call);
        }
        if self.runs.are_single() {
            self.enter(call, &[])?;
        } else if self.chain_reduce(buffer, op, Some(root), call)? {
            return Ok(());
        }
        self.direct_reduction(buffer, op, Goal::One(root), call)
    }

    /// Each rank that needs a result gets the reduction of its part of all ranks' buffers, from parts that arrive with the
    /// calls.
    fn small_reduction(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        goal: Goal,
        call: &Signature,
    ) -> Result<()> {
        let (rank, ranks, dtype, len) =
            (self.members.rank(), self.members.size(), buffer.dtype(), buffer.len());
        let element = dtype.size();
        let part = |rank: u32| {
            let Range { start, end } = match goal {
                Goal::All => 0..len,
                Goal::Shards => shard(len, ranks, rank),
                Goal::One(root) => 0..if rank == root { len } else { 0 },
            };
            start * element..end * element
        };
        let bytes = buffer.as_bytes();
        let is_whole =
            goal == Goal::All || self.bundles() && bytes.len() <= WHOLE_BYTES.min(self.small_bytes());
        let payloads = match is_whole {
            true => self.enter(call, bytes)?,
            false => self.enter_for_each(call, |peer| &bytes[part(peer)])?,
        };
        let own = part(rank);
        if own.is_empty() {
            return Ok(());
        }
        let (wanted, length) = if is_whole { (own.clone(), bytes.len()) } else { (0..own.len(), own.len()) };
        // Payloads are not aligned.
        let stride = own.len().next_multiple_of(64);
        let mut memory = self.take_memory((ranks as usize - 1) * stride);
        let peers = (0..ranks).filter(|peer| *peer != rank);
        for (peer, slot) in peers.zip(memory.as_bytes_mut().chunks_exact_mut(stride)) {
            let payload = payloads[peer as usize].as_slice();
            if payload.len() != length {
                return Err(self.short_payload(peer));
            }
            slot[..own.len()].copy_from_slice(&payload[wanted.clone()]);
        }
        let target = &mut buffer.as_bytes_mut()[own.clone()];
        let slots = memory.as_bytes().chunks_exact(stride).take(ranks as usize - 1);
        let contributions: SmallVec<[&[u8]; 16]> = slots.map(|slot| &slot[..own.len()]).collect();
        reduce_part(dtype, op, rank, target, &contributions);
        drop(contributions);
        self.staging = Some(memory);
        Ok(())
    }
}
