//! Large all-reduces of ranks of which some share a host: a chain over the hosts.
//!
//! The payload is cut into blocks, in an order that all ranks know. One rank of each run works on a block. That of the
//! first run combines the contributions of its run in rank order, and sends the accumulators to that of the next run,
//! which goes on from there. The last one has the result, stores it in all buffers of its run, and sends it back; every
//! rank on the way stores it, and sends it on.
//!
//! So a link between two hosts carries every block once in each direction, however many ranks the hosts have, and every
//! sum is one fold in rank order, with the bits of one host. Several blocks are on their way at the same time.

use std::ops::Range;

use mgpu_kernels::reduce::{Output, accumulator_size, reduce_from};
use smallvec::SmallVec;

use super::HostsTransport;
use super::house::{Addresses, STAGE_BYTES, location};
use super::runs::Runs;
use super::transfer::Transfer;
use super::wait::Awaited;
use crate::Result;
use crate::comm::signature::Signature;
use crate::comm::{Buffer, DType, ReduceOp};

/// Size of a block.
const BLOCK_BYTES: usize = 128 << 10;
/// Number of blocks for which there is memory on their way from one run to the next.
const WINDOW: usize = 4;

/// A block that this rank works on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    elements: Range<usize>,
    /// The ranks that work on it in the run before and in the run after.
    previous: Option<u32>,
    next: Option<u32>,
    /// Its number among the blocks with the same previous rank, and with the same next rank.
    from_previous: usize,
    to_next: usize,
}

/// Cuts `len` elements of `element` bytes into chunks of the size of a stage: `chunks[i]` has the blocks of chunk i that
/// this rank works on.
fn chunks(runs: &Runs, len: usize, element: usize) -> Vec<Vec<Block>> {
    let (parts, own) = (runs.parts(), runs.own());
    let rank = own.start + runs.position_in_run();
    let own_parts: Vec<u32> = (0..parts).filter(|part| runs.worker(*part) == rank).collect();
    let mut counts: SmallVec<[(u32, usize); 4]> = SmallVec::new();
    let mut number = |peer: Option<u32>| {
        let Some(peer) = peer else { return 0 };
        let at = counts.iter().position(|(rank, _)| *rank == peer).unwrap_or_else(|| {
            counts.push((peer, 0));
            counts.len() - 1
        });
        counts[at].1 += 1;
        counts[at].1 - 1
    };
    let most = STAGE_BYTES / element;
    let blocks_of = |begin: usize| {
        let chunk = begin..(begin + most).min(len);
        // Parts and blocks begin at cache lines.
        let stride = (chunk.len().div_ceil(parts as usize) * element).next_multiple_of(64) / element;
        let block = stride.min(BLOCK_BYTES / element);
        let mut blocks = Vec::new();
        for at in (0..stride).step_by(block.max(1)) {
            for part in &own_parts {
                let part_begin = chunk.start + *part as usize * stride;
                let part_end = chunk.end.min(part_begin + stride);
                let elements = part_begin + at..part_end.min(part_begin + at + block);
                if !elements.is_empty() {
                    let [previous, next] = runs.neighbours(*part);
                    let (from_previous, to_next) = (number(previous), number(next));
                    blocks.push(Block { elements, previous, next, from_previous, to_next });
                }
            }
        }
        blocks
    };
    (0..len).step_by(most).map(blocks_of).collect()
}

/// The state of one all-reduce on this rank.
struct Chain<'a> {
    dtype: DType,
    op: ReduceOp,
    /// Of all hosts.
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
        let Some(previous) = block.previous else { return };
        let (slot, bytes) = (self.slot(number, false), self.incoming_bytes(block));
        // SAFETY: the slot has room for a block, belongs to the chain, which outlives the transfer's use of it, and is not
        // accessed until the post is complete. A slot is posted again only when its block has been reduced.
        self.transfer.receive(previous, unsafe { std::slice::from_raw_parts_mut(slot, bytes) });
    }

    /// Whether `blocks[number]` can be reduced: what the previous run has of it has arrived, and there is memory for the
    /// accumulators.
    fn can_reduce(&self, blocks: &[Block], number: usize) -> bool {
        let block = &blocks[number];
        let has_arrived =
            block.previous.is_none_or(|rank| self.transfer.received_posts(rank) > block.from_previous);
        let is_sent =
            |before: &Block| before.next.is_none_or(|rank| self.transfer.sent_posts(rank) > before.to_next);
        has_arrived && number.checked_sub(WINDOW).is_none_or(|before| is_sent(&blocks[before]))
    }

    /// Combines the run's contributions to a block with those of the runs before, and passes them on: to the next run, or,
    /// as the result, back to the previous one. `buffers` begin at element `origin`.
    fn reduce(&mut self, number: usize, block: &Block, buffers: &[*mut u8], (own, origin): (usize, usize)) {
        let (begin, len) = ((block.elements.start - origin) * self.dtype.size(), block.elements.len());
        let bytes = len * self.dtype.size();
        let at = |buffer: &*mut u8| buffer.wrapping_add(begin);
        let mut sources: SmallVec<[*const u8; 16]> =
            buffers.iter().map(|buffer| at(buffer).cast_const()).collect();
        let mut acc = None;
        if block.previous.is_some() {
            let arrived = self.slot(number, false).cast_const();
            if self.elements_arrive {
                sources.insert(0, arrived);
            } else {
                acc = Some(arrived);
            }
        }
        if let (Some(next), None, [own]) = (block.next, block.previous, buffers) {
            // SAFETY: this part of the buffer is not written before the result has arrived, so not before it is sent.
            self.transfer.send(next, unsafe { std::slice::from_raw_parts(at(own), bytes) });
            return self.expect_result(next, at(own), bytes);
        }
        let Some(next) = block.next else {
            let destinations: Addresses = buffers.iter().map(at).collect();
            let output = Output::Elements { ranks: self.ranks, destinations: &destinations };
            // SAFETY: all ranks of the house have arrived with buffers of this size and type, and only this
            // rank accesses this block of them until it is complete; so for the slot.
            unsafe { reduce_from(self.dtype, self.op, acc, &sources, output, len) };
            return;
        };
        let slot = self.slot(number, true);
        // SAFETY: as above.
        unsafe { reduce_from(self.dtype, self.op, acc, &sources, Output::Accumulators(slot), len) };
        // SAFETY: the slot is written again only when this post is complete.
        self.transfer
            .send(next, unsafe { std::slice::from_raw_parts(slot, len * accumulator_size(self.dtype)) });
        self.expect_result(next, at(&buffers[own]), bytes);
    }

    /// Posts memory for the result of a block.
    fn expect_result(&mut self, next: u32, target: *mut u8, bytes: usize) {
        // SAFETY: this part of this rank's buffer has been read, and nobody accesses it until the post is complete.
        self.transfer.receive(next, unsafe { std::slice::from_raw_parts_mut(target, bytes) });
    }

    /// Whether the result of a block that was reduced is there.
    fn has_result(&self, block: &Block) -> bool {
        block.next.is_none_or(|next| self.transfer.received_posts(next) > block.to_next)
    }

    /// Stores the result of a block, which is in this rank's buffer, in those of the others, and passes it on.
    fn spread(&mut self, block: &Block, buffers: &[*mut u8], (own, origin): (usize, usize)) {
        let (begin, bytes) =
            ((block.elements.start - origin) * self.dtype.size(), block.elements.len() * self.dtype.size());
        let source = buffers[own].wrapping_add(begin).cast_const();
        if block.next.is_some() {
            for (_, buffer) in buffers.iter().enumerate().filter(|(rank, _)| *rank != own) {
                // SAFETY: as in `reduce`; buffers of different ranks do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(source, buffer.wrapping_add(begin), bytes) };
            }
        }
        if let Some(previous) = block.previous {
            // SAFETY: the result is not written again before the operation is over.
            self.transfer.send(previous, unsafe { std::slice::from_raw_parts(source, bytes) });
        }
    }
}

impl HostsTransport {
    pub(super) fn chain_all_reduce(
        &mut self,
        buffer: &mut Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        self.enter_with(call, location(buffer), |_| &[])?;
        let (dtype, element) = (buffer.dtype(), buffer.dtype().size());
        let chunks = chunks(&self.runs, buffer.len(), element);
        let slot_bytes = BLOCK_BYTES / element * accumulator_size(dtype).max(element);
        let mut chain = Chain {
            dtype,
            op,
            ranks: self.members.size(),
            elements_arrive: self.runs.begin_with_one() && self.runs.position() == 1,
            transfer: self.transfer(call),
            slots: self.take_memory(2 * WINDOW * slot_bytes),
            slot_bytes,
        };
        let in_place = match &self.house {
            None => Some(Addresses::from_slice(&[buffer.address()])),
            Some(_) => self.buffers_of_house(buffer),
        };
        if let Some(buffers) = in_place {
            let blocks: Vec<Block> = chunks.into_iter().flatten().collect();
            self.run_chain(&mut chain, &blocks, &buffers, 0, call)?;
            self.house_barrier(call)?;
        } else {
            self.staged_chain(&mut chain, chunks, buffer, call)?;
        }
        self.staging = Some(chain.slots);
        Ok(())
    }

    /// Copies the payload through the stage of the house, chunk by chunk.
    fn staged_chain(
        &mut self,
        chain: &mut Chain<'_>,
        chunks: Vec<Vec<Block>>,
        buffer: &mut Buffer,
        call: &Signature,
    ) -> Result<()> {
        let stages = self.house.as_ref().map(super::house::House::stages).unwrap_or_default();
        let own = stages[self.runs.position_in_run() as usize];
        let (bytes, mut element) = (buffer.as_bytes_mut(), 0);
        for (part, blocks) in bytes.chunks_mut(STAGE_BYTES).zip(chunks) {
            // SAFETY: the stage has room for a chunk, and the other ranks access it between the two barriers only.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), own, part.len()) };
            self.house_barrier(call)?;
            self.run_chain(chain, &blocks, &stages, element, call)?;
            element += part.len() / chain.dtype.size();
            self.house_barrier(call)?;
            // SAFETY: as above; all blocks of the chunk are complete.
            unsafe { std::ptr::copy_nonoverlapping(own, part.as_mut_ptr(), part.len()) };
        }
        Ok(())
    }

    /// Works on these blocks, until all of them are complete. `buffers` are those of the run, and begin at element `origin`.
    fn run_chain(
        &mut self,
        chain: &mut Chain<'_>,
        blocks: &[Block],
        buffers: &[*mut u8],
        origin: usize,
        call: &Signature,
    ) -> Result<()> {
        let place = (self.runs.position_in_run() as usize, origin);
        let (mut expected, mut reduced, mut complete) = (0, 0, 0);
        while complete < blocks.len() {
            let before = chain.transfer.completed();
            while expected < blocks.len().min(reduced + WINDOW) {
                chain.expect(expected, &blocks[expected]);
                expected += 1;
            }
            if complete < reduced && chain.has_result(&blocks[complete]) {
                chain.spread(&blocks[complete], buffers, place);
                complete += 1;
            } else if reduced < blocks.len() && chain.can_reduce(blocks, reduced) {
                chain.reduce(reduced, &blocks[reduced], buffers, place);
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
        /// In every run each element is in one block of one rank; and two ranks that exchange blocks agree on them.
        #[test]
        fn ranks_agree_on_the_blocks(
            hosts in prop::collection::vec(0u32..3, 1..7),
            len in 0usize..2_000_000,
            element in prop::sample::select(vec![1usize, 2, 4, 8]),
        ) {
            let ranks = hosts.len() as u32;
            let all: Vec<(Runs, Vec<Block>)> = (0..ranks)
                .map(|rank| Runs::new(hosts.iter().copied(), rank))
                .map(|runs| (runs.clone(), chunks(&runs, len, element).concat()))
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
            for (rank, (_, blocks)) in (0..).zip(&all) {
                for block in blocks {
                    let Some(next) = block.next else { continue };
                    let theirs = all[next as usize].1.iter().filter(|theirs| theirs.previous == Some(rank));
                    let theirs = theirs.clone().nth(block.to_next).expect("a block for each that is sent");
                    prop_assert_eq!((&theirs.elements, theirs.from_previous), (&block.elements, block.to_next));
                }
            }
        }
    }
}
