//! Reductions: which way they take.
//!
//! | payload | way |
//! |---|---|
//! | small | with the arrival, to every rank that needs it: one message time |
//! | medium, one rank on each host | a shard for each rank with the arrival, results to all: two message times |
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
use super::moves::carve;
use super::wait::Awaited;
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
        if self.shards_are_small(buffer) {
            self.small_reduction(buffer, op, Goal::Shards, call)?;
            return self.gather_shards(buffer, call);
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
        if self.shards_are_small(buffer) {
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
        if buffer.bytes() <= self.part_bytes() {
            return self.small_reduction(buffer, op, Goal::One(root), call);
        }
        if self.runs.are_single() {
            self.enter(call, &[])?;
        } else if self.chain_reduce(buffer, op, Some(root), call)? {
            return Ok(());
        }
        self.direct_reduction(buffer, op, Goal::One(root), call)
    }

    /// Whether a rank's shard is sent to it with the arrival.
    fn shards_are_small(&self, buffer: &Buffer) -> bool {
        let longest = shard(buffer.len(), self.members.size(), 0).len();
        longest * buffer.dtype().size() <= self.part_bytes()
    }

    /// Sends this rank's shard to all others, and gets theirs, after the arrival.
    fn gather_shards(&mut self, buffer: &mut Buffer, call: &Signature) -> Result<()> {
        let (rank, ranks, len) = (self.members.rank(), self.members.size(), buffer.len());
        let element = buffer.dtype().size();
        let shard_of = |rank: u32| {
            let Range { start, end } = shard(len, ranks, rank);
            start * element..end * element
        };
        let peers: SmallVec<[u32; 16]> = self.others().collect();
        let targets: SmallVec<[Range<usize>; 16]> = peers.iter().map(|peer| shard_of(*peer)).collect();
        let mut carved = carve(buffer.as_bytes_mut(), &targets);
        let own = carved.read(&shard_of(rank));
        let mut transfer = self.transfer(call);
        for (peer, target) in peers.into_iter().zip(std::mem::take(&mut carved.written)) {
            transfer.send(peer, own);
            transfer.receive(peer, target);
        }
        self.wait(Awaited::Transfer, call, &mut transfer)
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
        let others = (0..ranks).filter(|peer| *peer != rank);
        if let Some(peer) = others.clone().find(|peer| payloads[*peer as usize].len() != length) {
            return Err(self.short_payload(peer));
        }
        let payloads = others.map(|peer| &payloads[peer as usize][wanted.clone()]);
        if payloads.clone().all(|payload| payload.as_ptr().addr().is_multiple_of(element)) {
            let contributions: SmallVec<[&[u8]; 16]> = payloads.collect();
            reduce_part(dtype, op, rank, &mut buffer.as_bytes_mut()[own], &contributions);
            return Ok(());
        }
        let stride = own.len().next_multiple_of(64);
        let mut memory = self.take_memory((ranks as usize - 1) * stride);
        for (payload, slot) in payloads.zip(memory.as_bytes_mut().chunks_exact_mut(stride)) {
            slot[..own.len()].copy_from_slice(payload);
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
