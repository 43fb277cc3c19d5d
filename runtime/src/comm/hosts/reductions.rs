//! Reductions: parts of all ranks are exchanged raw, and combined in rank order by the rank that needs the result.
//!
//! | payload | way |
//! |---|---|
//! | small | with the arrival, from every rank to every rank that needs it: one message time |
//! | large all-reduce, one rank a host | in chunks with a part for each rank, which that rank reduces and sends back |
//! | large all-reduce, several ranks on some host | along a [`chain`](super::chain) of the hosts |
//! | large reduce-scatter, reduce | in pieces, to the rank that needs the result |
//!
//! In a large all-reduce the results of a chunk and the raw parts of the next one are on their way at the same time.
//!
//! One kernel combines the elements of all ranks, in rank order, in an accumulator that is rounded once. So the bits do
//! not depend on how the ranks are divided over hosts, nor on the way.

use std::ops::Range;

use mgpu_kernels::reduce;
use smallvec::SmallVec;

use super::HostsTransport;
use super::frame::{PIECE_BYTES, SMALL_BYTES};
use super::transfer::Transfer;
use super::wait::Awaited;
use crate::Result;
use crate::comm::signature::Signature;
use crate::comm::{Buffer, DType, ReduceOp, shard};

/// Most bytes of staging memory, unless there are more ranks than cache lines in it.
const STAGE_BYTES: usize = 8 << 20;

/// Cuts `0..len` into ranges of at most `most`; none if `len` is 0.
fn pieces(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.div_ceil(most)).map(move |index| index * most..len.min((index + 1) * most))
}

/// The shard of `rank` of `bytes` bytes of elements, in bytes.
fn byte_shard(bytes: usize, dtype: DType, ranks: u32, rank: u32) -> Range<usize> {
    let shard = shard(bytes / dtype.size(), ranks, rank);
    shard.start * dtype.size()..shard.end * dtype.size()
}

/// The contributions of all other ranks to one part of the result, as they arrive.
struct Stage {
    memory: Buffer,
    peers: usize,
    /// Bytes of memory for each contribution.
    stride: usize,
}

impl Stage {
    /// Largest part that `ranks` ranks reduce at once, in bytes.
    fn stride_for(ranks: u32) -> usize {
        (STAGE_BYTES / ranks as usize).clamp(64, PIECE_BYTES) & !63
    }

    /// Memory for `bytes` bytes of each peer of `rank`, in rank order.
    fn slots(&mut self, rank: u32, bytes: usize) -> impl Iterator<Item = (u32, &mut [u8])> {
        let peers = (0..).filter(move |peer| *peer != rank).take(self.peers);
        let slots = self.memory.as_bytes_mut().chunks_exact_mut(self.stride);
        peers.zip(slots).map(move |(peer, slot)| (peer, &mut slot[..bytes]))
    }

    /// The first `bytes` bytes of each peer's contribution.
    fn contributions(&self, bytes: usize) -> SmallVec<[&[u8]; 16]> {
        let slots = self.memory.as_bytes().chunks_exact(self.stride);
        slots.take(self.peers).map(|slot| &slot[..bytes]).collect()
    }
}

/// Replaces `own`, the contribution of `rank`, by the reduction of it and those of the other ranks, which are given in
/// rank order.
fn reduce_part(dtype: DType, op: ReduceOp, rank: u32, own: &mut [u8], others: &[&[u8]]) {
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
    /// Memory for contributions of at most `stride` bytes.
    fn take_stage(&mut self, stride: usize) -> Stage {
        let peers = self.members.size() as usize - 1;
        Stage { memory: self.take_memory(peers * stride), peers, stride }
    }

    /// At least `bytes` bytes, if possible those of the operation before.
    pub(super) fn take_memory(&mut self, bytes: usize) -> Buffer {
        let memory = self.staging.take().filter(|memory| memory.len() >= bytes);
        memory.unwrap_or_else(|| Buffer::zeroed::<u8>(bytes))
    }

    /// Keeps the memory for the next reduction.
    fn put_back(&mut self, stage: Stage) {
        self.staging = Some(stage.memory);
    }

    pub(super) fn all_reduce(&mut self, buffer: &mut Buffer, op: ReduceOp, call: &Signature) -> Result<()> {
        if buffer.bytes() <= SMALL_BYTES {
            return self.small_reduction(buffer, op, call, |_| true, |_, len| 0..len);
        }
        if !self.runs.are_single() {
            return self.chain_all_reduce(buffer, op, call);
        }
        self.enter(call, |_| &[])?;
        let (rank, ranks, dtype) = (self.members.rank(), self.members.size(), buffer.dtype());
        let mut stage = self.take_stage(Stage::stride_for(ranks));
        let mut chunks = buffer.as_bytes_mut().chunks_mut(stage.stride * ranks as usize);
        let mut reduced = None;
        loop {
            let chunk = chunks.next();
            let mut transfer = self.transfer(call);
            if let Some(chunk) = &chunk {
                let part = |rank: u32| byte_shard(chunk.len(), dtype, ranks, rank);
                self.others().for_each(|peer| transfer.send(peer, &chunk[part(peer)]));
                let own = part(rank).len();
                stage.slots(rank, own).for_each(|(peer, slot)| transfer.receive(peer, slot));
            }
            if let Some(reduced) = reduced.take() {
                self.post_results(&mut transfer, reduced, dtype);
            }
            self.wait(Awaited::Transfer, call, &mut transfer)?;
            drop(transfer);
            let Some(chunk) = chunk else { break };
            let own = byte_shard(chunk.len(), dtype, ranks, rank);
            let own = &mut chunk[own];
            reduce_part(dtype, op, rank, own, &stage.contributions(own.len()));
            self.membership.page().touch(self.membership.rank());
            reduced = Some(chunk);
        }
        self.put_back(stage);
        Ok(())
    }

    /// Posts the exchange of the parts of a chunk that each rank has reduced.
    fn post_results<'a>(&self, transfer: &mut Transfer<'a>, chunk: &'a mut [u8], dtype: DType) {
        let (ranks, bytes) = (self.members.size(), chunk.len());
        let mut rest = chunk;
        let mut parts: Vec<&'a mut [u8]> = Vec::with_capacity(ranks as usize);
        for rank in 0..ranks {
            let (part, behind) = rest.split_at_mut(byte_shard(bytes, dtype, ranks, rank).len());
            parts.push(part);
            rest = behind;
        }
        let own: &'a [u8] = &*std::mem::take(&mut parts[self.members.rank() as usize]);
        for peer in self.others() {
            transfer.send(peer, own);
            transfer.receive(peer, std::mem::take(&mut parts[peer as usize]));
        }
    }

    pub(super) fn reduce_scatter(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        let ranks = self.members.size();
        let range = |rank: u32, len: usize| shard(len, ranks, rank);
        if shard(buffer.len(), ranks, 0).len() * buffer.dtype().size() <= SMALL_BYTES {
            return self.small_reduction(buffer, op, call, |_| true, range);
        }
        self.large_reduction(buffer, op, call, range)
    }

    pub(super) fn reduce(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        root: u32,
        call: &Signature,
    ) -> Result<()> {
        if buffer.bytes() <= SMALL_BYTES {
            return self.small_reduction(buffer, op, call, |rank| rank == root, |_, len| 0..len);
        }
        self.large_reduction(buffer, op, call, |rank, len| if rank == root { 0..len } else { 0..0 })
    }

    /// Each rank that `needs` a result gets the reduction of its part of all ranks' buffers, from parts that arrive
    /// with the calls.
    fn small_reduction(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        call: &Signature,
        needs: impl Fn(u32) -> bool,
        part: impl Fn(u32, usize) -> Range<usize>,
    ) -> Result<()> {
        let (rank, element, len) = (self.members.rank(), buffer.dtype().size(), buffer.len());
        let part = |rank: u32| {
            let part = part(rank, len);
            part.start * element..part.end * element
        };
        let bytes = buffer.as_bytes();
        let payloads = self.enter(call, |peer| if needs(peer) { &bytes[part(peer)] } else { &[] })?;
        if !needs(rank) {
            return Ok(());
        }
        let own = part(rank).len();
        // Payloads are not aligned.
        let mut stage = self.take_stage(own.next_multiple_of(64).max(64));
        for (peer, slot) in stage.slots(rank, own) {
            let payload = payloads[peer as usize].as_slice();
            if payload.len() != own {
                return Err(self.short_payload(peer));
            }
            slot.copy_from_slice(payload);
        }
        let dtype = buffer.dtype();
        let target = &mut buffer.as_bytes_mut()[part(rank)];
        reduce_part(dtype, op, rank, target, &stage.contributions(own));
        self.put_back(stage);
        Ok(())
    }

    /// Each rank gets the reduction of its part of all ranks' buffers, piece by piece.
    fn large_reduction(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        call: &Signature,
        part: impl Fn(u32, usize) -> Range<usize>,
    ) -> Result<()> {
        self.enter(call, |_| &[])?;
        let (rank, ranks) = (self.members.rank(), self.members.size());
        let (dtype, len) = (buffer.dtype(), buffer.len());
        let element = dtype.size();
        let mut stage = self.take_stage(Stage::stride_for(ranks));
        let longest = (0..ranks).map(|rank| part(rank, len).len()).max().unwrap_or_default();
        for piece in pieces(longest, stage.stride / element) {
            let within = |rank: u32| {
                let Range { start, end } = part(rank, len);
                let at = |index: usize| end.min(start + index) * element;
                at(piece.start)..at(piece.end)
            };
            let bytes = buffer.as_bytes();
            let mut transfer = self.transfer(call);
            self.others().for_each(|peer| transfer.send(peer, &bytes[within(peer)]));
            let own = within(rank);
            stage.slots(rank, own.len()).for_each(|(peer, slot)| transfer.receive(peer, slot));
            self.wait(Awaited::Transfer, call, &mut transfer)?;
            drop(transfer);
            let own = &mut buffer.as_bytes_mut()[own];
            reduce_part(dtype, op, rank, own, &stage.contributions(own.len()));
            self.membership.page().touch(self.membership.rank());
        }
        self.put_back(stage);
        Ok(())
    }
}
