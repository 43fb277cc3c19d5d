//! In-place collectives on arenas, which all ranks map.
//!
//! The all-reduce reads each block of all n buffers and writes the result to all n: 2·n·S bytes of memory traffic,
//! the minimum for n results. The other collectives are the same with fewer sources or destinations. Each rank has a
//! queue of blocks (see [`lines`](super::lines)) and, when done, takes blocks of late ranks, so that a descheduled
//! rank delays the others by at most one block. The bits do not depend on which rank reduces a block: the order of
//! summation is that of the ranks.

use std::ops::Range;

use mgpu_kernels::reduce;
use smallvec::SmallVec;

use super::CpuTransport;
use super::eager::Sources;
use super::stores::Stores;
use crate::Result;
use crate::comm::exchange::Partition;
use crate::comm::segments::update_blocks;
use crate::comm::signature::Signature;
use crate::comm::{Buffer, ReduceOp, Update, shard};

/// Largest block in bytes: with 4 ranks, a block of each buffer fits into the L2 cache together.
const MAX_BLOCK: usize = 256 << 10;
/// Smallest block in bytes: below, taking a ticket costs more than the balance gains.
const MIN_BLOCK: usize = 16 << 10;
/// Number of blocks of a rank's part, unless they would be too large or too small.
const BLOCKS: usize = 4;

/// The addresses of all ranks' buffers. No allocation up to 16 ranks.
pub(super) type Addresses = SmallVec<[*mut u8; 16]>;

/// How the elements of an operation are divided: the part of rank q begins at q·stride and ends where the next one
/// begins, or at `len`. Parts are processed in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parts {
    len: usize,
    stride: usize,
    block: usize,
}

impl Parts {
    /// Parts of `stride` elements of `element` bytes.
    pub(super) fn of_stride(len: usize, stride: usize, element: usize) -> Self {
        let bytes = (stride * element / BLOCKS).clamp(MIN_BLOCK, MAX_BLOCK);
        // Blocks begin at cache lines of the buffer, so that no two ranks write to the same line.
        Parts { len, stride, block: bytes.next_multiple_of(64) / element }
    }

    /// Equal parts that begin at cache lines; the last one may be shorter.
    pub(super) fn equal(len: usize, ranks: u32, element: usize) -> Self {
        let stride = (len.div_ceil(ranks as usize) * element).next_multiple_of(64) / element;
        Self::of_stride(len, stride, element)
    }

    /// Elements of the part of rank `queue`.
    pub(super) fn part(&self, queue: u32) -> Range<usize> {
        let begin = queue as usize * self.stride;
        begin.min(self.len)..(begin + self.stride).min(self.len)
    }

    /// Number of blocks of the part of rank `queue`.
    fn blocks(&self, queue: u32) -> u32 {
        self.part(queue).len().div_ceil(self.block) as u32
    }

    /// Elements of block `block` of the part of rank `queue`.
    fn range(&self, queue: u32, block: u32) -> Range<usize> {
        let part = self.part(queue);
        let begin = part.start + block as usize * self.block;
        begin..(begin + self.block).min(part.end)
    }
}

/// Which ranks' memory a block is read from and written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// From all ranks to all ranks.
    AllReduce(ReduceOp),
    /// From all ranks to one rank.
    Reduce(ReduceOp, u32),
    /// From all ranks to the owner of the part.
    ReduceScatter(ReduceOp),
    /// From the owner of the part to all others.
    AllGather,
    /// From one rank to all others.
    Broadcast(u32),
    /// From the owner of the part to one rank.
    Gather(u32),
    /// From one rank to the owner of the part.
    Scatter(u32),
}

impl Flow {
    /// How many times a block of the part of rank `queue` crosses from one of `ranks` ranks to another. A rank that helps
    /// counts as much as rank `queue`, so that the sum over ranks does not depend on who was late.
    fn crossings(self, queue: u32, ranks: u32) -> u32 {
        match self {
            Flow::AllReduce(_) => 2 * (ranks - 1),
            Flow::Reduce(_, root) => ranks - 1 + u32::from(queue != root),
            Flow::ReduceScatter(_) | Flow::AllGather | Flow::Broadcast(_) => ranks - 1,
            Flow::Gather(root) | Flow::Scatter(root) => u32::from(queue != root),
        }
    }
}

impl CpuTransport {
    /// Addresses of all ranks' buffers.
    fn addresses(&self, buffer: &Buffer) -> Addresses {
        let (arena, offset) = buffer.arena().expect("a direct operation is on an arena");
        self.members.world_ranks().iter().map(|rank| arena.address(*rank, offset)).collect()
    }

    /// Processes all blocks of an operation, after the arrival: first this rank's own queue, then those of late
    /// ranks. Returns once all blocks are complete.
    fn process_all_queues(
        &mut self,
        parts: Parts,
        flow: Flow,
        all: &Addresses,
        call: &Signature,
    ) -> Result<()> {
        let processed = self.process_queue(self.rank, parts, flow, all, call);
        let target = |comm: &Self, queue: u32| comm.queued[queue as usize].wrapping_add(parts.blocks(queue));
        for queue in self.peers() {
            if !self.policy.spin_briefly(self.region.lines(queue).completed(), target(self, queue)) {
                self.process_queue(queue, parts, flow, all, call);
            }
        }
        // Peers have this rank's own counter in their caches, and it does not have to look at it if none has helped.
        let helped = (processed < parts.blocks(self.rank)).then_some(self.rank);
        for queue in self.peers().chain(helped) {
            let completed = self.region.lines(queue).completed();
            self.wait(completed, target(self, queue), call, || {
                let busy = |peer: &u32| self.region.lines(*peer).busy_with() == Some(queue);
                let holders: Vec<u32> = self.peers().filter(busy).collect();
                (holders.clone(), holders)
            })?;
        }
        for queue in 0..self.size {
            self.queued[queue as usize] = target(self, queue);
        }
        Ok(())
    }

    /// Processes the remaining blocks of the queue of rank `queue`. Returns how many there were.
    fn process_queue(&self, queue: u32, parts: Parts, flow: Flow, all: &Addresses, call: &Signature) -> u32 {
        let own = self.region.lines(self.rank);
        let begin = self.queued[queue as usize];
        let results = self.result_stores(call);
        self.region.lines(queue).process((own, queue), begin, parts.blocks(queue), |block| {
            // SAFETY: all ranks have arrived with buffers of `len` elements and do not touch them until every block
            // is complete; the ticket gives this rank exclusive access to this block of all of them.
            unsafe { process_block(call, flow, queue, all, parts.range(queue, block), results) };
            self.count(parts.range(queue, block).len() * call.dtype.size(), flow.crossings(queue, self.size));
        })
    }

    #[inline(never)]
    pub(super) fn direct_all_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        self.enter(call)?;
        let parts = Parts::equal(call.len, self.size, call.dtype.size());
        self.process_all_queues(parts, Flow::AllReduce(op), &self.addresses(buffer), call)
    }

    #[inline(never)]
    pub(super) fn direct_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        root: u32,
        call: &Signature,
    ) -> Result<()> {
        self.enter(call)?;
        let parts = Parts::equal(call.len, self.size, call.dtype.size());
        self.process_all_queues(parts, Flow::Reduce(op, root), &self.addresses(buffer), call)
    }

    /// Without help: only the root reads the others' buffers.
    #[inline(never)]
    pub(super) fn direct_reduce_by_root(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        root: u32,
        call: &Signature,
    ) -> Result<()> {
        self.enter_and_write(buffer, call, |comm, all| {
            if comm.rank == root {
                let sources: Sources = all.iter().map(|buffer| buffer.cast_const()).collect();
                // SAFETY: all ranks have arrived with buffers of `len` elements and do not touch them until the root is
                // done.
                unsafe { reduce::reduce(call.dtype, op, &sources, &[buffer.address()], call.len) };
                comm.count(call.bytes(), comm.size - 1);
            }
        })
    }

    #[inline(never)]
    pub(super) fn direct_reduce_scatter(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        self.enter(call)?;
        let parts = self.shards(call);
        self.process_all_queues(parts, Flow::ReduceScatter(op), &self.addresses(buffer), call)
    }

    #[inline(never)]
    pub(super) fn direct_all_gather(
        &mut self,
        buffer: &Buffer,
        shares: Partition<'_>,
        call: &Signature,
    ) -> Result<()> {
        if let Partition::Shards { .. } = shares {
            self.enter(call)?;
            return self.process_all_queues(
                self.shards(call),
                Flow::AllGather,
                &self.addresses(buffer),
                call,
            );
        }
        let (element, own, results) = (call.dtype.size(), shares.range(self.rank), self.result_stores(call));
        self.enter_and_write(buffer, call, |comm, all| {
            let source = buffer.address().wrapping_add(own.start * element);
            for peer in comm.peers() {
                let destination = all[peer as usize].wrapping_add(own.start * element);
                // SAFETY: all ranks have arrived with buffers of `len` elements and the same counts; only this rank
                // accesses its part of any of them before it is complete; buffers of different ranks do not overlap.
                unsafe { results.copy(source, destination, own.len() * element) };
            }
            comm.count(own.len() * element, comm.size - 1);
        })
    }

    #[inline(never)]
    pub(super) fn direct_gather(&mut self, buffer: &Buffer, root: u32, call: &Signature) -> Result<()> {
        self.enter(call)?;
        self.process_all_queues(self.shards(call), Flow::Gather(root), &self.addresses(buffer), call)
    }

    #[inline(never)]
    pub(super) fn direct_scatter(&mut self, buffer: &Buffer, root: u32, call: &Signature) -> Result<()> {
        self.enter(call)?;
        self.process_all_queues(self.shards(call), Flow::Scatter(root), &self.addresses(buffer), call)
    }

    /// One of each pair of ranks swaps the shards that the two have for each other.
    #[inline(never)]
    pub(super) fn direct_all_to_all(&mut self, buffer: &Buffer, call: &Signature) -> Result<()> {
        self.enter_and_write(buffer, call, |comm, all| {
            let (own_begin, len) = comm.shard(comm.rank, call);
            for peer in comm.peers().filter(|peer| swaps(comm.rank, *peer, comm.size)) {
                let (peer_begin, _) = comm.shard(peer, call);
                let ours = all[comm.rank as usize].wrapping_add(peer_begin);
                let theirs = all[peer as usize].wrapping_add(own_begin);
                // SAFETY: all ranks have arrived with buffers of `len` elements; of the two ranks that use these
                // shards, only this one accesses them before it is complete; buffers of different ranks do not
                // overlap.
                unsafe { std::ptr::swap_nonoverlapping(ours, theirs, len * call.dtype.size()) };
                comm.count(len * call.dtype.size(), 2);
            }
        })
    }

    /// Only a rank itself can update its shards, so they form a single block that no other rank can take.
    #[inline(never)]
    pub(super) fn direct_update_all_gather(
        &mut self,
        buffer: Buffer,
        segments: &[Range<usize>],
        block: usize,
        update: &mut Update<'_>,
        call: &Signature,
    ) -> Result<Buffer> {
        self.enter(call)?;
        let (all, element, results) = (self.addresses(&buffer), call.dtype.size(), self.result_stores(call));
        let mut buffer = Some(buffer);
        self.write(call, |comm| {
            let ranks = (comm.size, comm.rank);
            buffer = buffer.take().map(|buffer| {
                update_blocks(buffer, segments, ranks, block, update, |begin, updated| {
                    for peer in comm.peers() {
                        let destination = all[peer as usize].wrapping_add(begin * element);
                        // SAFETY: all ranks have arrived with buffers of `len` elements; only this rank accesses its
                        // shards of any of them before it is complete; buffers of different ranks do not overlap.
                        unsafe { results.copy(updated.address(), destination, updated.bytes()) };
                    }
                    comm.count(updated.bytes(), comm.size - 1);
                })
            });
        })?;
        Ok(buffer.expect("the one block has put it back"))
    }

    /// Arrives, writes this rank's part of an operation as a single block, given the buffers of all ranks, and waits
    /// for the others.
    fn enter_and_write(
        &mut self,
        buffer: &Buffer,
        call: &Signature,
        write: impl Fn(&Self, &Addresses),
    ) -> Result<()> {
        self.enter(call)?;
        let all = self.addresses(buffer);
        self.write(call, |comm| write(comm, &all))
    }

    /// Writes this rank's part of an operation as a single block, after the arrival, and waits for the others.
    fn write(&mut self, call: &Signature, mut write: impl FnMut(&Self)) -> Result<()> {
        let own = self.region.lines(self.rank);
        own.process((own, self.rank), self.queued[self.rank as usize], 1, |_| write(self));
        let target = |peer: u32| self.queued[peer as usize].wrapping_add(1);
        let completed = |peer: u32| self.region.lines(peer).completed();
        self.peers().try_for_each(|peer| {
            self.wait(completed(peer), target(peer), call, || {
                let late = |peer: &u32| !completed(*peer).reached(target(*peer));
                (vec![peer], self.peers().filter(late).collect())
            })
        })?;
        self.queued.iter_mut().for_each(|count| *count = count.wrapping_add(1));
        Ok(())
    }

    /// The parts of an operation on shards.
    fn shards(&self, call: &Signature) -> Parts {
        Parts::of_stride(call.len, shard(call.len, self.size, 0).len(), call.dtype.size())
    }

    #[inline(never)]
    pub(super) fn direct_broadcast(&mut self, buffer: &Buffer, root: u32, call: &Signature) -> Result<()> {
        self.enter(call)?;
        let parts = Parts::equal(call.len, self.size, call.dtype.size());
        self.process_all_queues(parts, Flow::Broadcast(root), &self.addresses(buffer), call)
    }
}

/// Whether `rank`, and not `peer`, swaps the shards of the two. Each rank does so for half of its peers.
fn swaps(rank: u32, peer: u32, ranks: u32) -> bool {
    let distance = (peer + ranks - rank) % ranks;
    2 * distance < ranks || 2 * distance == ranks && rank < peer
}

/// Reduces or copies the elements `range` of the part of rank `queue`. Copies are written with the stores `results`.
///
/// # Safety
/// `all` are buffers of at least `range.end` elements of the call's type, and nobody else accesses these elements.
unsafe fn process_block(
    call: &Signature,
    flow: Flow,
    queue: u32,
    all: &Addresses,
    range: Range<usize>,
    results: Stores,
) {
    let (element, len) = (call.dtype.size(), range.len());
    let at = |base: &*mut u8| base.wrapping_add(range.start * element);
    let blocks: Addresses = all.iter().map(at).collect();
    let from_all_to = |op: ReduceOp, destinations: &[*mut u8]| {
        let sources: Sources = blocks.iter().map(|block| block.cast_const()).collect();
        // SAFETY: the caller's promise.
        unsafe { reduce::reduce(call.dtype, op, &sources, destinations, len) };
    };
    let copy = |from: u32, to: u32| {
        if from != to {
            // SAFETY: the caller's promise; buffers of different ranks do not overlap.
            unsafe { results.copy(blocks[from as usize], blocks[to as usize], len * element) };
        }
    };
    let from_one = |root: u32| (0..blocks.len() as u32).for_each(|rank| copy(root, rank));
    match flow {
        Flow::AllReduce(op) => from_all_to(op, &blocks),
        Flow::Reduce(op, root) => from_all_to(op, &[blocks[root as usize]]),
        Flow::ReduceScatter(op) => from_all_to(op, &[blocks[queue as usize]]),
        Flow::AllGather => from_one(queue),
        Flow::Broadcast(root) => from_one(root),
        Flow::Gather(root) => copy(queue, root),
        Flow::Scatter(root) => copy(root, queue),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn exactly_one_rank_of_each_pair_swaps() {
        for ranks in 1..10u32 {
            for rank in 0..ranks {
                let peers = || (0..ranks).filter(move |peer| *peer != rank);
                assert!(peers().all(|peer| swaps(rank, peer, ranks) != swaps(peer, rank, ranks)));
                let own = peers().filter(|peer| swaps(rank, *peer, ranks)).count() as u32;
                assert!(own == (ranks - 1) / 2 || own == ranks / 2, "{own} of {ranks}");
            }
        }
    }

    proptest! {
        #[test]
        fn blocks_cover_every_element_once(
            len in 0usize..3_000_000,
            ranks in 1u32..10,
            element in prop::sample::select(vec![1usize, 2, 4, 8]),
        ) {
            let parts = Parts::equal(len, ranks, element);
            let mut next = 0;
            for queue in 0..ranks {
                for block in 0..parts.blocks(queue) {
                    let range = parts.range(queue, block);
                    prop_assert_eq!(range.start, next);
                    prop_assert!(!range.is_empty() && range.len() * element <= MAX_BLOCK);
                    prop_assert_eq!(range.start * element % 64, 0);
                    next = range.end;
                }
            }
            prop_assert_eq!(next, len);
        }
    }
}
