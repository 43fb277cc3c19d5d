//! Reductions: parts of all ranks are exchanged raw, and combined in rank order by the rank that needs the result.
//!
//! | payload | way |
//! |---|---|
//! | small | with the arrival, from every rank to every rank that needs it: one message time |
//! | large all-reduce | in chunks with a part for each rank, which that rank reduces and sends back |
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

/// The contributions of all other ranks to one part of the result, as they arrive.
struct Stage {
    memory: Buffer,
    /// Bytes of each contribution.
    stride: usize,
}

impl Stage {
    fn new(ranks: u32, stride: usize) -> Self {
        Stage { memory: Buffer::zeroed::<u8>((ranks as usize - 1) * stride), stride }
    }

    /// Largest part that `ranks` ranks reduce at once, in bytes.
    fn stride_for(ranks: u32) -> usize {
        (STAGE_BYTES / ranks as usize).clamp(64, PIECE_BYTES) & !63
    }

    /// Memory for `bytes` bytes of each peer of `rank`, in rank order.
    fn slots(&mut self, rank: u32, bytes: usize) -> impl Iterator<Item = (u32, &mut [u8])> {
        let peers = (0..).filter(move |peer| *peer != rank);
        peers
            .zip(self.memory.as_bytes_mut().chunks_exact_mut(self.stride))
            .map(move |(peer, slot)| (peer, &mut slot[..bytes]))
    }

    /// The first `bytes` bytes of each peer's contribution.
    fn contributions(&self, bytes: usize) -> SmallVec<[&[u8]; 16]> {
        self.memory.as_bytes().chunks_exact(self.stride).map(|slot| &slot[..bytes]).collect()
    }
}

/// Replaces `own`, the contribution of `rank`, by the reduction of it and those of the other ranks, which are given in
/// rank order.
fn reduce_part(dtype: DType, op: ReduceOp, rank: u32, own: &mut [u8], others: &[&[u8]]) {
    let element = dtype.size();
    let address = own.as_mut_ptr();
    let fits = |part: &&[u8]| part.len() == own.len() && part.as_ptr().addr().is_multiple_of(element);
    assert!(others.iter().all(|part| fits(&part)) && address.addr().is_multiple_of(element));
    let mut sources: SmallVec<[*const u8; 16]> = others.iter().map(|part| part.as_ptr()).collect();
    sources.insert(rank as usize, address.cast_const());
    // SAFETY: all parts have the same length in elements and are aligned to them, which was checked; any bytes are
    // elements. Only the destination is written, and of the sources only `own` is in the same place.
    unsafe { reduce::reduce(dtype, op, &sources, &[address], own.len() / element) };
}

impl HostsTransport {
    pub(super) fn all_reduce(&mut self, buffer: &mut Buffer, op: ReduceOp, call: &Signature) -> Result<()> {
        if buffer.bytes() <= SMALL_BYTES {
            return self.small_reduction(buffer, op, call, |_| true, |_, len| 0..len);
        }
        self.enter(call, |_| &[])?;
        let (rank, ranks) = (self.members.rank(), self.members.size());
        let (dtype, element) = (buffer.dtype(), buffer.dtype().size());
        let stride = Stage::stride_for(ranks);
        let mut stage = Stage::new(ranks, stride);
        // The part of `of` in a chunk of this many bytes.
        let part = |bytes: usize, of: u32| {
            let part = shard(bytes / element, ranks, of);
            part.start * element..part.end * element
        };
        let mut chunks = buffer.as_bytes_mut().chunks_mut(stride * ranks as usize);
        let mut reduced: Option<&mut [u8]> = None;
        loop {
            let chunk = chunks.next();
            let mut transfer = self.transfer(call);
            if let Some(chunk) = &chunk {
                self.others().for_each(|peer| transfer.send(peer, &chunk[part(chunk.len(), peer)]));
                let own = part(chunk.len(), rank).len();
                stage.slots(rank, own).for_each(|(peer, slot)| transfer.receive(peer, slot));
            }
            if let Some(mut rest) = reduced.take() {
                let bytes = rest.len();
                let mut parts: Vec<&mut [u8]> = Vec::with_capacity(ranks as usize);
                for peer in 0..ranks {
                    let (part, behind) = rest.split_at_mut(part(bytes, peer).len());
                    parts.push(part);
                    rest = behind;
                }
                let own = &*std::mem::take(&mut parts[rank as usize]);
                self.others().for_each(|peer| transfer.send(peer, own));
                for peer in self.others() {
                    transfer.receive(peer, std::mem::take(&mut parts[peer as usize]));
                }
            }
            self.wait(Awaited::Transfer, call, &mut transfer)?;
            drop(transfer);
            let Some(chunk) = chunk else { return Ok(()) };
            let own = part(chunk.len(), rank);
            let own = &mut chunk[own];
            reduce_part(dtype, op, rank, own, &stage.contributions(own.len()));
            self.membership.page().touch(self.membership.rank());
            reduced = Some(chunk);
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
        let mut stage = Stage::new(self.members.size(), own.next_multiple_of(64).max(64));
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
        let stride = Stage::stride_for(ranks);
        let mut stage = Stage::new(ranks, stride);
        let longest = (0..ranks).map(|rank| part(rank, len).len()).max().unwrap_or_default();
        for piece in pieces(longest, stride / element) {
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
        Ok(())
    }
}
