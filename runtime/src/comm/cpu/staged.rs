//! Collectives on private buffers: block by block through the slots of a [`stream`](super::stream).
//!
//! | collective | fill | work | fetch |
//! |---|---|---|---|
//! | all-reduce of two ranks, or a small one | the block | reduces the whole block | |
//! | all-reduce | the parts that peers reduce | reduces its part, for its buffer and its slot | the peers' parts |
//! | reduce | the block | the root reduces | |
//! | reduce-scatter, exchanges | a piece for each peer | reduces or copies its pieces | |
//! | all-gather, gather | its part | copies the peers' parts | |
//! | broadcast | the root: the block | copies it | |
//!
//! A rank reads its own elements from its own buffer.

use std::ops::Range;

use mgpu_kernels::reduce;

use super::CpuTransport;
use super::direct::{Addresses, Parts};
use super::eager::Sources;
use super::region::SLOT_BYTES;
use super::stores::Stores;
use super::stream::{NoFetch, Slots, Stages};
use crate::Result;
use crate::comm::exchange::{Exchange, Partition};
use crate::comm::signature::Signature;
use crate::comm::{Buffer, ReduceOp};

/// Bytes of all ranks' payloads that every rank reduces whole: what it reads in addition takes less time than waiting for
/// peers once more.
const EXCHANGED_BYTES: usize = 64 << 10;

/// Cuts `0..len` into ranges of at most `most`; at least one, so that an empty operation synchronises, too.
#[derive(Debug, Clone, Copy)]
struct Blocks {
    len: usize,
    most: usize,
}

impl Blocks {
    fn count(self) -> usize {
        self.len.div_ceil(self.most).max(1)
    }

    fn range(self, index: usize) -> Range<usize> {
        index * self.most..self.len.min((index + 1) * self.most)
    }

    /// The slots for blocks of elements of `element` bytes.
    fn slots(self, element: usize) -> Slots {
        Slots { count: self.count(), bytes: self.len.min(self.most) * element }
    }
}

/// Messages of up to `len` elements from each of `ranks` ranks to each other, in pieces. A slot has a piece for every rank.
#[derive(Debug, Clone, Copy)]
struct Pieces {
    ranks: u32,
    /// The blocks of each message.
    blocks: Blocks,
    /// Distance between two pieces in bytes.
    stride: usize,
}

impl Pieces {
    fn new(len: usize, ranks: u32, element: usize) -> Self {
        // Each piece begins at a cache line.
        let most = (SLOT_BYTES / ranks as usize) & !63;
        let stride = most.min((len * element).next_multiple_of(64));
        Pieces { ranks, blocks: Blocks { len, most: most / element }, stride }
    }

    /// The piece for `rank` in a slot.
    fn of(self, rank: u32, slot: *mut u8) -> *mut u8 {
        slot.wrapping_add(rank as usize * self.stride)
    }

    fn slots(self) -> Slots {
        Slots { count: self.blocks.count(), bytes: self.ranks as usize * self.stride }
    }
}

/// The elements `block` of the elements `range`, truncated at its end.
fn within(range: &Range<usize>, block: &Range<usize>) -> Range<usize> {
    let at = |element: usize| range.end.min(range.start + element);
    at(block.start)..at(block.end)
}

/// This rank's buffer, cut into blocks.
struct Payload {
    address: *mut u8,
    element: usize,
    blocks: Blocks,
}

impl Payload {
    fn new(buffer: &Buffer, call: &Signature) -> Self {
        let element = call.dtype.size();
        let blocks = Blocks { len: call.len, most: SLOT_BYTES / element };
        Payload { address: buffer.address(), element, blocks }
    }

    /// Address and number of elements of a block.
    fn block(&self, index: usize) -> (*mut u8, usize) {
        let range = self.blocks.range(index);
        (self.address.wrapping_add(range.start * self.element), range.len())
    }

    /// The part of a block that rank `rank` of `ranks` reduces: first byte within the block, and number of elements.
    fn part(&self, index: usize, ranks: u32, rank: u32) -> (usize, usize) {
        let part = Parts::equal(self.blocks.range(index).len(), ranks, self.element).part(rank);
        (part.start * self.element, part.len())
    }
}

/// The memory that a reduction reads: the slots of all ranks from byte `at` on, but `own` for rank `rank`.
fn sources(slots: &Addresses, at: usize, rank: u32, own: *mut u8) -> Sources {
    let mut sources: Sources = slots.iter().map(|slot| slot.wrapping_add(at).cast_const()).collect();
    sources[rank as usize] = own;
    sources
}

impl CpuTransport {
    #[inline(never)]
    pub(super) fn staged_all_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        if self.size == 2 || call.bytes() * self.size as usize <= EXCHANGED_BYTES {
            self.exchange_and_reduce(buffer, op, call)
        } else {
            self.reduce_parts(buffer, op, call)
        }
    }

    /// An all-reduce in which each rank reads everything and reduces everything: nobody waits for results, and with two ranks
    /// no more bytes cross than in any other way.
    fn exchange_and_reduce(&mut self, buffer: &Buffer, op: ReduceOp, call: &Signature) -> Result<()> {
        let payload = Payload::new(buffer, call);
        let stages = Stages {
            reads: true,
            fill: |_: &Self, index: usize, slot: *mut u8, stores: Stores| {
                let (own, len) = payload.block(index);
                // SAFETY: the block is within our buffer and fits into the slot, which nobody else accesses now.
                unsafe { stores.copy(own, slot, len * payload.element) };
            },
            work: |comm: &Self, index: usize, slots: &Addresses, _| {
                let (own, len) = payload.block(index);
                let sources = sources(slots, 0, comm.rank, own);
                // SAFETY: all ranks have filled their slots with this block and do not write them now; our own block was
                // copied before.
                unsafe { reduce::reduce(call.dtype, op, &sources, &[own], len) };
                comm.count(len * payload.element, comm.size - 1);
            },
            fetch: None::<NoFetch>,
        };
        self.stream(call, payload.blocks.slots(payload.element), &stages)
    }

    /// An all-reduce in which rank r reduces part r of every block.
    fn reduce_parts(&mut self, buffer: &Buffer, op: ReduceOp, call: &Signature) -> Result<()> {
        let payload = Payload::new(buffer, call);
        let stages = Stages {
            reads: true,
            fill: |comm: &Self, index: usize, slot: *mut u8, stores: Stores| {
                let (own, _) = payload.block(index);
                for peer in comm.peers() {
                    let (at, len) = payload.part(index, comm.size, peer);
                    // SAFETY: as in `exchange_and_reduce`.
                    unsafe {
                        stores.copy(own.wrapping_add(at), slot.wrapping_add(at), len * payload.element);
                    }
                }
            },
            work: |comm: &Self, index: usize, slots: &Addresses, stores: Stores| {
                let (block, _) = payload.block(index);
                let (at, len) = payload.part(index, comm.size, comm.rank);
                let own = block.wrapping_add(at);
                let sources = sources(slots, at, comm.rank, own);
                let slot = slots[comm.rank as usize].wrapping_add(at);
                // SAFETY: all ranks have filled their slots, and only this rank accesses its part of any of them before it
                // has worked.
                unsafe {
                    if stores == Stores::Cached {
                        reduce::reduce(call.dtype, op, &sources, &[own, slot], len);
                    } else {
                        reduce::reduce(call.dtype, op, &sources, &[own], len);
                        stores.copy(own, slot, len * payload.element);
                    }
                }
                comm.count(len * payload.element, comm.size - 1);
            },
            fetch: Some(|comm: &Self, index: usize, slots: &Addresses| {
                let (own, _) = payload.block(index);
                for peer in comm.peers() {
                    let (at, len) = payload.part(index, comm.size, peer);
                    let bytes = len * payload.element;
                    // SAFETY: the peer has put its part of the result into its slot, and does not write that now.
                    unsafe {
                        let result = slots[peer as usize].wrapping_add(at);
                        Stores::Cached.copy(result, own.wrapping_add(at), bytes);
                    }
                    comm.count(bytes, 1);
                }
            }),
        };
        self.stream(call, payload.blocks.slots(payload.element), &stages)
    }

    #[inline(never)]
    pub(super) fn staged_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        root: u32,
        call: &Signature,
    ) -> Result<()> {
        let payload = Payload::new(buffer, call);
        let stages = Stages {
            reads: self.rank == root,
            fill: |comm: &Self, index: usize, slot: *mut u8, stores: Stores| {
                if comm.rank != root {
                    let (own, len) = payload.block(index);
                    // SAFETY: as in `exchange_and_reduce`.
                    unsafe { stores.copy(own, slot, len * payload.element) };
                }
            },
            work: |comm: &Self, index: usize, slots: &Addresses, _| {
                if comm.rank == root {
                    let (own, len) = payload.block(index);
                    // SAFETY: as in `exchange_and_reduce`.
                    unsafe { reduce::reduce(call.dtype, op, &sources(slots, 0, root, own), &[own], len) };
                    comm.count(len * payload.element, comm.size - 1);
                }
            },
            fetch: None::<NoFetch>,
        };
        self.stream(call, payload.blocks.slots(payload.element), &stages)
    }

    #[inline(never)]
    pub(super) fn staged_reduce_scatter(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        let element = call.dtype.size();
        let pieces = Pieces::new(self.shard(0, call).1, self.size, element);
        let blocks = pieces.blocks;
        let stages = Stages {
            reads: true,
            fill: |comm: &Self, index: usize, slot: *mut u8, stores: Stores| {
                for peer in comm.peers() {
                    let (at, len) = comm.shard_block(buffer, peer, &blocks.range(index), call);
                    // SAFETY: as in `exchange_and_reduce`; piece `peer` of the slot is within it.
                    unsafe { stores.copy(at, pieces.of(peer, slot), len * element) };
                }
            },
            work: |comm: &Self, index: usize, slots: &Addresses, _| {
                let (own, len) = comm.shard_block(buffer, comm.rank, &blocks.range(index), call);
                let sources = sources(slots, comm.rank as usize * pieces.stride, comm.rank, own);
                // SAFETY: all ranks have filled our piece of their slots and do not write them now.
                unsafe { reduce::reduce(call.dtype, op, &sources, &[own], len) };
                comm.count(len * element, comm.size - 1);
            },
            fetch: None::<NoFetch>,
        };
        self.stream(call, pieces.slots(), &stages)
    }

    /// Gathers the parts of all ranks on all ranks, or only on `root`.
    #[inline(never)]
    pub(super) fn staged_gather(
        &mut self,
        buffer: &Buffer,
        shares: Partition<'_>,
        root: Option<u32>,
        call: &Signature,
    ) -> Result<()> {
        let (element, results) = (call.dtype.size(), self.result_stores(call));
        let blocks = Blocks { len: shares.longest(), most: SLOT_BYTES / element };
        let part = |rank: u32, index: usize| {
            let part = within(&shares.range(rank), &blocks.range(index));
            (buffer.address().wrapping_add(part.start * element), part.len() * element)
        };
        let stages = Stages {
            reads: root.is_none_or(|root| root == self.rank),
            fill: |comm: &Self, index: usize, slot: *mut u8, stores: Stores| {
                let (at, bytes) = part(comm.rank, index);
                // SAFETY: as in `exchange_and_reduce`.
                unsafe { stores.copy(at, slot, bytes) };
            },
            work: |comm: &Self, index: usize, slots: &Addresses, _| {
                if root.is_some_and(|root| root != comm.rank) {
                    return;
                }
                for peer in comm.peers() {
                    let (at, bytes) = part(peer, index);
                    // SAFETY: the peer has filled its slot with its block and does not write it now.
                    unsafe { results.copy(slots[peer as usize], at, bytes) };
                    comm.count(bytes, 1);
                }
            },
            fetch: None::<NoFetch>,
        };
        self.stream(call, blocks.slots(element), &stages)
    }

    /// Transfers the messages of an exchange from one buffer to another, or within one.
    #[inline(never)]
    pub(super) fn staged_exchange(
        &mut self,
        from: &Buffer,
        to: &Buffer,
        exchange: &Exchange,
        call: &Signature,
    ) -> Result<()> {
        let element = call.dtype.size();
        let is_in_place = from.address() == to.address();
        // What is overwritten was read for the same block.
        let results = if is_in_place { Stores::Cached } else { Stores::of_results(to.bytes(), self.size) };
        let pieces = Pieces::new(exchange.longest, self.size, element);
        let blocks = pieces.blocks;
        let stages = Stages {
            reads: true,
            fill: |_: &Self, index: usize, slot: *mut u8, stores: Stores| {
                for (message, rank) in exchange.send.iter().zip(0..) {
                    let part = within(message, &blocks.range(index));
                    let source = from.address().wrapping_add(part.start * element);
                    // SAFETY: as in `exchange_and_reduce`; piece `rank` of the slot is within it.
                    unsafe { stores.copy(source, pieces.of(rank, slot), part.len() * element) };
                }
            },
            work: |comm: &Self, index: usize, slots: &Addresses, _| {
                for (message, slot) in exchange.receive.iter().zip(slots) {
                    let part = within(message, &blocks.range(index));
                    let source = pieces.of(comm.rank, *slot);
                    let destination = to.address().wrapping_add(part.start * element);
                    // SAFETY: the peer has filled our piece of its slot with as many bytes and does not write it now; the
                    // destination elements are not sent by any later block.
                    unsafe { results.copy(source, destination, part.len() * element) };
                    comm.count(part.len() * element, 1);
                }
            },
            fetch: None::<NoFetch>,
        };
        self.stream(call, pieces.slots(), &stages)
    }

    #[inline(never)]
    pub(super) fn staged_broadcast(&mut self, buffer: &Buffer, root: u32, call: &Signature) -> Result<()> {
        let (payload, results) = (Payload::new(buffer, call), self.result_stores(call));
        let stages = Stages {
            reads: self.rank != root,
            fill: |comm: &Self, index: usize, slot: *mut u8, stores: Stores| {
                if comm.rank == root {
                    let (own, len) = payload.block(index);
                    // SAFETY: as in `exchange_and_reduce`.
                    unsafe { stores.copy(own, slot, len * payload.element) };
                }
            },
            work: |comm: &Self, index: usize, slots: &Addresses, _| {
                if comm.rank != root {
                    let (own, len) = payload.block(index);
                    // SAFETY: the root has filled its slot with this block and does not write it now.
                    unsafe { results.copy(slots[root as usize], own, len * payload.element) };
                    comm.count(len * payload.element, 1);
                }
            },
            fetch: None::<NoFetch>,
        };
        self.stream(call, payload.blocks.slots(payload.element), &stages)
    }

    /// Address and length of the elements `block` of the shard of `rank`.
    fn shard_block(
        &self,
        buffer: &Buffer,
        rank: u32,
        block: &Range<usize>,
        call: &Signature,
    ) -> (*mut u8, usize) {
        let (begin, len) = self.shard(rank, call);
        let begin = begin + block.start * call.dtype.size();
        (buffer.address().wrapping_add(begin), len.min(block.end).saturating_sub(block.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_elements_once_and_there_is_at_least_one() {
        for (len, most) in [(0, 4), (1, 4), (4, 4), (5, 4), (12, 4), (13, 4)] {
            let blocks = Blocks { len, most };
            let ranges: Vec<_> = (0..blocks.count()).map(|index| blocks.range(index)).collect();
            assert!(!ranges.is_empty());
            assert!(ranges.iter().all(|range| range.len() <= most));
            assert_eq!(ranges.into_iter().flatten().collect::<Vec<_>>(), (0..len).collect::<Vec<_>>());
        }
    }
}
