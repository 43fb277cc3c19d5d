//! Large reductions of ranks of which some share a host: a chain over the hosts.
//!
//! The payload is cut into blocks, in an order that all ranks know. One rank of each run works on a block. That of the
//! first run combines the contributions of its run in rank order, and sends the accumulators to that of the next run,
//! which goes on from there. The last one has the result. In an all-reduce it stores the result in all buffers of its run
//! and sends it back along the chain, where every rank on the way stores it and sends it on; in a reduction for one rank
//! it sends the result directly to that rank's run.
//!
//! So a link between two hosts carries every block once in each direction, however many ranks the hosts have, and every
//! result is one fold in rank order, with the bits of one host. Several blocks are on their way at the same time.

use std::ops::Range;

use mgpu_kernels::copy::copy;
use mgpu_kernels::reduce::{Output, accumulator_size, reduce_from};
use smallvec::SmallVec;

use super::HostsTransport;
use super::house::{Addresses, House, STAGE_BYTES};
use super::runs::Runs;
use super::transfer::Transfer;
use super::wait::Awaited;
use crate::Result;
use crate::comm::signature::Signature;
use crate::comm::{Buffer, DType, ReduceOp, shard};

/// Largest and smallest size of a block.
const BLOCK_BYTES: usize = 128 << 10;
const MIN_BLOCK: usize = 4 << 10;
/// Bytes that a link carries in the time that a message takes by itself: about 20 µs at 25 Gbit/s.
const MESSAGE_COST: usize = 64 << 10;
/// Number of blocks for which there is memory on their way from one run to the next.
const WINDOW: usize = 4;

/// A rank, and the number of a post among those for it.
type Post = (u32, usize);

/// A block that this rank works on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    elements: Range<usize>,
    /// The rank that needs the result; `None` if all do.
    target: Option<u32>,
    /// The run before, if there is one: what it has of the block arrives from there.
    previous: Option<Post>,
    /// Where this run's accumulators go to; or the result, if this is the last run and the target is in another one.
    next: Option<Post>,
    /// Where the result comes from, unless it is computed here or goes to another run.
    result: Option<Post>,
}

/// Size of the blocks of a part of `part` bytes that passes `runs` runs, in bytes.
///
/// With m blocks of cost c each and h links there and back, the last block arrives after h + m − 1 blocks, of
/// (part/m)/bandwidth + c each. That is least for m = √(h·part/(bandwidth·c)).
fn block_bytes(part: usize, runs: usize) -> usize {
    let links = 2 * (runs - 1).max(1);
    let best = (part.saturating_mul(MESSAGE_COST) / links).isqrt();
    best.clamp(MIN_BLOCK, BLOCK_BYTES) / 64 * 64
}

/// Lists the blocks of one rank.
struct Lister<'a> {
    runs: &'a Runs,
    /// Number of posts so far, by peer.
    received: SmallVec<[Post; 4]>,
    sent: SmallVec<[Post; 4]>,
}

impl<'a> Lister<'a> {
    fn new(runs: &'a Runs) -> Self {
        Lister { runs, received: SmallVec::new(), sent: SmallVec::new() }
    }

    /// The block with these elements, on which the ranks work that work on part `part`; `None` if this rank has no part in
    /// it.
    fn block(&mut self, elements: Range<usize>, part: u32, target: Option<u32>) -> Option<Block> {
        let runs = self.runs;
        if elements.is_empty() || runs.worker(part) != runs.rank() {
            return None;
        }
        let [previous, next] = runs.neighbours(part);
        let is_here = target.is_none_or(|rank| runs.own().contains(&rank));
        let last = runs.workers(part).next_back();
        let (next, result) = match (next, target) {
            (Some(_), None) => (next, next),
            (Some(_), Some(_)) => (next, last.filter(|_| is_here)),
            (None, Some(target)) if !is_here => (Some(runs.worker_beside(target, part)), None),
            (None, _) => (None, None),
        };
        let previous = previous.map(|rank| (rank, count(&mut self.received, rank)));
        let next = next.map(|rank| (rank, count(&mut self.sent, rank)));
        let result = result.map(|rank| (rank, count(&mut self.received, rank)));
        Some(Block { elements, target, previous, next, result })
    }

    /// The blocks of an all-reduce of `len` elements of `element` bytes, or of a reduction for rank `target`, in chunks of
    /// the size of a stage.
    fn whole(mut self, len: usize, element: usize, target: Option<u32>) -> Vec<Vec<Block>> {
        let (parts, most) = (self.runs.parts(), STAGE_BYTES / element);
        let block = block_bytes(len * element / parts as usize, self.runs.count()) / element;
        let blocks_of = |begin: usize| {
            let chunk = begin..(begin + most).min(len);
            // Parts and blocks begin at cache lines.
            let stride = (chunk.len().div_ceil(parts as usize) * element).next_multiple_of(64) / element;
            let size = stride.min(block);
            let mut blocks = Vec::new();
            for at in (0..stride).step_by(size) {
                for part in 0..parts {
                    let begin = chunk.start + part as usize * stride;
                    let end = chunk.end.min(begin + stride);
                    blocks.extend(self.block(begin + at..end.min(begin + at + size), part, target));
                }
            }
            blocks
        };
        (0..len).step_by(most).map(blocks_of).collect()
    }

    /// The blocks of a reduce-scatter of `len` elements of `element` bytes over `ranks` ranks.
    fn shards(mut self, len: usize, element: usize, ranks: u32) -> Vec<Block> {
        let longest = shard(len, ranks, 0).len();
        let size = block_bytes(longest * element * self.runs.count(), self.runs.count()) / element;
        let mut blocks = Vec::new();
        for at in (0..longest).step_by(size) {
            for rank in 0..ranks {
                let Range { start, end } = shard(len, ranks, rank);
                let elements = end.min(start + at)..end.min(start + at + size);
                blocks.extend(self.block(elements, self.runs.part_of(rank), Some(rank)));
            }
        }
        blocks
    }
}

/// The number of a further post for `peer`.
fn count(posts: &mut SmallVec<[Post; 4]>, peer: u32) -> usize {
    if let Some((_, count)) = posts.iter_mut().find(|(rank, _)| *rank == peer) {
        *count += 1;
        return *count - 1;
    }
    posts.push((peer, 1));
    0
}

/// The state of one reduction on this rank.
struct Chain<'a> {
    dtype: DType,
    op: ReduceOp,
    /// Number of ranks of all hosts.
    ranks: u32,
    /// What arrives from the first run are elements, not yet accumulators.
    elements_arrive: bool,
    transfer: Transfer<'a>,
    /// Memory for accumulators: [`WINDOW`] slots for those that arrive, and as many for those that leave.
    slots: Buffer,
    slot_bytes: usize,
}

impl Chain<'_> {
    fn slot(&self, number: usize, leaves: bool) -> *mut u8 {
        let slot = number % WINDOW + if leaves { WINDOW } else { 0 };
        self.slots.address().wrapping_add(slot * self.slot_bytes)
    }

    /// Size of what is received for a block.
    fn incoming_bytes(&self, block: &Block) -> usize {
        let each = if self.elements_arrive { self.dtype.size() } else { accumulator_size(self.dtype) };
        block.elements.len() * each
    }

    /// Posts memory for what the previous run has of a block.
    fn expect(&mut self, number: usize, block: &Block) {
        let Some((previous, _)) = block.previous else { return };
        let (slot, bytes) = (self.slot(number, false), self.incoming_bytes(block));
        // SAFETY: the slot has room for a block, belongs to the chain, which outlives the transfer's use of it, and is not
        // accessed until the post is complete. A slot is posted again only when its block has been reduced.
        self.transfer.receive(previous, unsafe { std::slice::from_raw_parts_mut(slot, bytes) });
    }

    fn has_arrived(&self, post: Option<Post>) -> bool {
        post.is_none_or(|(rank, number)| self.transfer.received_posts(rank) > number)
    }

    /// Whether `blocks[number]` can be reduced: what the previous run has of it has arrived, and there is memory for the
    /// accumulators.
    fn can_reduce(&self, blocks: &[Block], number: usize) -> bool {
        let is_sent =
            |post: Option<Post>| post.is_none_or(|(rank, number)| self.transfer.sent_posts(rank) > number);
        let has_room = number.checked_sub(WINDOW).is_none_or(|before| is_sent(blocks[before].next));
        has_room && self.has_arrived(blocks[number].previous)
    }

    /// Combines the run's contributions to a block with those of the runs before, and passes them on.
    fn reduce(&mut self, number: usize, block: &Block, buffers: &RunBuffers<'_>) {
        let (len, bytes) = (block.elements.len(), block.elements.len() * self.dtype.size());
        let places: Addresses = buffers.places(block, self.dtype).collect();
        let target = &places[block.target.map_or(buffers.own, |rank| buffers.position(rank))..][..1];
        if let (Some((next, _)), None, [place]) = (block.next, block.previous, &places[..]) {
            // SAFETY: this part of the buffer is not written before the result has arrived, so not before it is sent.
            self.transfer.send(next, unsafe { std::slice::from_raw_parts(*place, bytes) });
            return self.expect_result(block, target[0], bytes);
        }
        let arrived = block.previous.map(|_| self.slot(number, false).cast_const());
        let (acc, first) = if self.elements_arrive { (None, arrived) } else { (arrived, None) };
        let sources: SmallVec<[*const u8; 16]> =
            first.into_iter().chain(places.iter().map(|place| place.cast_const())).collect();
        let slot = [self.slot(number, true)];
        let is_last = buffers.is_last;
        let destinations = match (block.next, block.target) {
            (Some(_), _) => &slot[..],
            (None, Some(_)) => target,
            (None, None) => &places[..],
        };
        let output = match is_last {
            true => Output::Elements { ranks: self.ranks, destinations },
            false => Output::Accumulators(slot[0]),
        };
        // SAFETY: all ranks of the house have arrived with buffers of this size and type, and only this rank accesses this
        // block of them until it is complete; so for the slot.
        unsafe { reduce_from(self.dtype, self.op, acc, &sources, output, len) };
        if let Some((next, _)) = block.next {
            let bytes = if is_last { bytes } else { len * accumulator_size(self.dtype) };
            // SAFETY: the slot is written again only when this post is complete.
            self.transfer.send(next, unsafe { std::slice::from_raw_parts(slot[0], bytes) });
        }
        self.expect_result(block, target[0], bytes);
    }

    /// Posts memory for the result of a block, if it comes from another run.
    fn expect_result(&mut self, block: &Block, place: *mut u8, bytes: usize) {
        if let Some((from, _)) = block.result {
            // SAFETY: this part of the buffer has been read, and nobody accesses it until the post is complete.
            self.transfer.receive(from, unsafe { std::slice::from_raw_parts_mut(place, bytes) });
        }
    }

    /// Stores a result that all ranks need, and that is in this rank's buffer, in those of the others, and passes it on.
    fn spread(&mut self, block: &Block, buffers: &RunBuffers<'_>) {
        if block.target.is_some() {
            return;
        }
        let bytes = block.elements.len() * self.dtype.size();
        let places: Addresses = buffers.places(block, self.dtype).collect();
        let own = places[buffers.own];
        for place in places.iter().filter(|place| block.result.is_some() && **place != own) {
            // SAFETY: as in `reduce`; buffers of different ranks do not overlap.
            unsafe { copy(own.cast_const(), *place, bytes) };
        }
        if let Some((previous, _)) = block.previous {
            // SAFETY: the result is not written again before the operation is over.
            self.transfer.send(previous, unsafe { std::slice::from_raw_parts(own, bytes) });
        }
    }
}

/// The buffers of the ranks of a run.
struct RunBuffers<'a> {
    /// In rank order.
    addresses: &'a [*mut u8],
    /// The element at which they begin.
    origin: usize,
    /// The first rank, and the position of this one.
    first: u32,
    own: usize,
    /// Whether this is the last run.
    is_last: bool,
}

impl RunBuffers<'_> {
    /// The position of `rank`; that of this rank if it is in another run.
    fn position(&self, rank: u32) -> usize {
        let position = rank.wrapping_sub(self.first) as usize;
        if position < self.addresses.len() { position } else { self.own }
    }

    /// Where a block is in each buffer.
    fn places(&self, block: &Block, dtype: DType) -> impl Iterator<Item = *mut u8> {
        let begin = (block.elements.start - self.origin) * dtype.size();
        self.addresses.iter().map(move |buffer| buffer.wrapping_add(begin))
    }
}

impl HostsTransport {
    pub(super) fn chain_all_reduce(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        let location = self.location(buffer);
        self.enter_at(call, location, &[])?;
        let chunks = Lister::new(&self.runs).whole(buffer.len(), buffer.dtype().size(), None);
        let mut chain = self.chain(buffer, op, call);
        match self.buffers_of_run(buffer) {
            Some(buffers) => self.chain_in_place(&mut chain, &chunks.concat(), &buffers, call)?,
            None => self.staged_chain(&mut chain, &chunks, buffer, call)?,
        }
        self.staging = Some(chain.slots);
        Ok(())
    }

    /// Reduces for rank `target`, or to the shards of all ranks, if all runs have their buffers in shared memory. Returns
    /// whether it has.
    pub(super) fn chain_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        target: Option<u32>,
        call: &Signature,
    ) -> Result<bool> {
        let location = self.location(buffer);
        self.enter_at(call, location, &[])?;
        let are_in_place = (0..self.runs.count()).all(|run| self.is_in_place(run, location));
        let Some(buffers) = self.buffers_of_run(buffer).filter(|_| are_in_place) else { return Ok(false) };
        let (len, element, lister) = (buffer.len(), buffer.dtype().size(), Lister::new(&self.runs));
        let blocks = match target {
            Some(_) => lister.whole(len, element, target).concat(),
            None => lister.shards(len, element, self.members.size()),
        };
        let mut chain = self.chain(buffer, op, call);
        self.chain_in_place(&mut chain, &blocks, &buffers, call)?;
        self.staging = Some(chain.slots);
        Ok(true)
    }

    fn chain<'a>(&mut self, buffer: &Buffer, op: ReduceOp, call: &Signature) -> Chain<'a> {
        let dtype = buffer.dtype();
        let slot_bytes = BLOCK_BYTES / dtype.size() * accumulator_size(dtype).max(dtype.size());
        Chain {
            dtype,
            op,
            ranks: self.members.size(),
            elements_arrive: self.runs.begin_with_one() && self.runs.position() == 1,
            transfer: self.transfer(call),
            slots: self.take_memory(2 * WINDOW * slot_bytes),
            slot_bytes,
        }
    }

    fn chain_in_place(
        &mut self,
        chain: &mut Chain<'_>,
        blocks: &[Block],
        buffers: &[*mut u8],
        call: &Signature,
    ) -> Result<()> {
        self.run_chain(chain, blocks, (buffers, 0), call)?;
        self.house_barrier(call)
    }

    /// Copies the payload through the stage of the house, chunk by chunk.
    fn staged_chain(
        &mut self,
        chain: &mut Chain<'_>,
        chunks: &[Vec<Block>],
        buffer: &mut Buffer,
        call: &Signature,
    ) -> Result<()> {
        let stages = self.house.as_ref().map(House::stages).unwrap_or_default();
        let own = stages[self.runs.position_in_run() as usize];
        let mut origin = 0;
        for (part, blocks) in buffer.as_bytes_mut().chunks_mut(STAGE_BYTES).zip(chunks) {
            // SAFETY: the stage has room for a chunk, and the other ranks access it between the two barriers only.
            unsafe { copy(part.as_ptr(), own, part.len()) };
            self.house_barrier(call)?;
            self.run_chain(chain, blocks, (&stages, origin), call)?;
            self.house_barrier(call)?;
            // SAFETY: as above; all blocks of the chunk are complete.
            unsafe { copy(own, part.as_mut_ptr(), part.len()) };
            origin += part.len() / chain.dtype.size();
        }
        Ok(())
    }

    /// Works on these blocks until all of them are complete. The buffers of the run begin at element `origin`.
    fn run_chain(
        &mut self,
        chain: &mut Chain<'_>,
        blocks: &[Block],
        (addresses, origin): (&[*mut u8], usize),
        call: &Signature,
    ) -> Result<()> {
        let buffers = RunBuffers {
            addresses,
            origin,
            first: self.runs.own().start,
            own: self.runs.position_in_run() as usize,
            is_last: self.runs.position() + 1 == self.runs.count(),
        };
        let (mut expected, mut reduced, mut complete) = (0, 0, 0);
        while complete < blocks.len() {
            let before = chain.transfer.completed();
            while expected < blocks.len().min(reduced + WINDOW) {
                chain.expect(expected, &blocks[expected]);
                expected += 1;
            }
            if complete < reduced && chain.has_arrived(blocks[complete].result) {
                chain.spread(&blocks[complete], &buffers);
                complete += 1;
            } else if reduced < blocks.len() && chain.can_reduce(blocks, reduced) {
                chain.reduce(reduced, &blocks[reduced], &buffers);
                reduced += 1;
                self.membership.page().touch(self.membership.rank());
            } else {
                self.wait(Awaited::Change { after: before }, call, &mut chain.transfer)?;
                continue;
            }
            self.advance(call, &mut chain.transfer)?;
        }
        self.wait(Awaited::Transfer, call, &mut chain.transfer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In every run each element is in one block of one rank; and what two ranks exchange, in each direction, are the
        /// same elements in the same order.
        #[test]
        fn ranks_agree_on_the_blocks(
            hosts in prop::collection::vec(0u32..3, 1..7),
            len in 0usize..2_000_000,
            element in prop::sample::select(vec![1usize, 2, 4, 8]),
            way in 0u32..8,
        ) {
            let ranks = hosts.len() as u32;
            let blocks_of = |runs: &Runs| match Lister::new(runs) {
                lister if way == 7 => lister.shards(len, element, ranks),
                lister => lister.whole(len, element, Some(way).filter(|rank| *rank < ranks)).concat(),
            };
            let all: Vec<(Runs, Vec<Block>)> = (0..ranks)
                .map(|rank| Runs::new(hosts.iter().copied(), rank))
                .map(|runs| { let blocks = blocks_of(&runs); (runs, blocks) })
                .collect();
            for (runs, _) in &all {
                let mut elements: Vec<_> =
                    runs.own().flat_map(|rank| &all[rank as usize].1).map(|block| block.elements.clone()).collect();
                elements.sort_by_key(|range| range.start);
                let mut end = 0;
                for range in elements {
                    prop_assert!(range.start == end && range.len() * element <= BLOCK_BYTES);
                    end = range.end;
                }
                prop_assert_eq!(end, len);
            }
            for (from, (_, sent)) in (0..).zip(&all) {
                for (to, (_, received)) in (0..).zip(&all) {
                    // What a rank sends back are the results that all need, in the order of its blocks.
                    let back = |block: &&Block| block.target.is_none() && block.previous.is_some_and(|(rank, _)| rank == to);
                    let forth = |block: &&Block| block.next.is_some_and(|(rank, _)| rank == to);
                    let sent: Vec<_> = sent.iter().filter(|block| back(block) || forth(block)).collect();
                    let is_from = |post: Option<Post>| post.is_some_and(|(rank, _)| rank == from);
                    let received: Vec<_> =
                        received.iter().filter(|block| is_from(block.previous) || is_from(block.result)).collect();
                    prop_assert_eq!(sent.len(), received.len());
                    for (number, (sent, received)) in sent.into_iter().zip(received).enumerate() {
                        prop_assert_eq!(&sent.elements, &received.elements);
                        let post = [received.previous, received.result].into_iter().find(|post| is_from(*post));
                        prop_assert_eq!(post.flatten(), Some((from, number)));
                        prop_assert!(!forth(&sent) || sent.next == Some((to, number)));
                    }
                }
            }
        }
    }
}
