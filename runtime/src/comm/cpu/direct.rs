//! Collectives in place, over arenas that every rank maps.
//!
//! The all-reduce reads each block of all n buffers and writes the result to all n: 2·n·S bytes of memory
//! traffic, the least there is for n results. Blocks are not assigned to ranks but claimed from a shared counter,
//! so that a rank that is descheduled holds up one block at most. Who reduces a block does not matter for its
//! bits: the order of summation is that of the ranks.

use std::sync::atomic::Ordering;

use mgpu_kernels::reduce;

use super::{Call, CpuCommunicator};
use crate::Result;
use crate::comm::{Buffer, ReduceOp};

/// Largest block: n of them fit the second-level cache together.
const MAX_BLOCK: usize = 256 << 10;
/// Smallest block: below, claiming costs more than balance gains.
const MIN_BLOCK: usize = 4 << 10;

impl CpuCommunicator {
    /// Where the buffer of every rank begins.
    fn addresses(&self, buffer: &Buffer) -> Vec<*mut u8> {
        let (arena, offset) = buffer.arena().expect("a direct operation is on an arena");
        (0..self.size).map(|rank| arena.address(rank, offset)).collect()
    }

    /// Reduces `len` elements of all `sources` into all `destinations`, together with the other ranks.
    pub(super) fn reduce_together(
        &mut self,
        sources: &[*mut u8],
        destinations: &[*mut u8],
        op: ReduceOp,
        len: usize,
        call: &Call,
    ) -> Result<()> {
        let element = call.dtype.size();
        let share = (len * element / (2 * self.size as usize)).clamp(MIN_BLOCK, MAX_BLOCK);
        // Blocks begin at cache lines: no two ranks write into one.
        let block = share.next_multiple_of(64) / element;
        let blocks = len.div_ceil(block) as u32;
        let busy = &self.region.rank_line(self.rank).busy;
        busy.store(1, Ordering::Relaxed);
        loop {
            let ticket = self.region.claim().next.fetch_add(1, Ordering::Relaxed).wrapping_sub(self.claimed);
            if ticket >= blocks {
                break;
            }
            let begin = ticket as usize * block;
            let count = block.min(len - begin);
            let at = |base: &*mut u8| base.wrapping_add(begin * element);
            let sources: Vec<*const u8> = sources.iter().map(|base| at(base).cast_const()).collect();
            let destinations: Vec<*mut u8> = destinations.iter().map(at).collect();
            // SAFETY: all ranks have arrived with buffers of `len` elements and leave them alone until every
            // block is done; the ticket makes this rank the only one to touch this block of any of them.
            unsafe { reduce::reduce(call.dtype, op, &sources, &destinations, count) };
            self.region.done().count.increment();
        }
        busy.store(0, Ordering::Relaxed);
        // Every rank draws exactly one ticket too many, and does so before it arrives at the next operation.
        self.claimed = self.claimed.wrapping_add(blocks + self.size);
        self.wait_completed(blocks, call)
    }

    pub(super) fn direct_all_reduce(&mut self, buffer: &Buffer, op: ReduceOp, call: &Call) -> Result<()> {
        self.enter(call)?;
        let all = self.addresses(buffer);
        self.reduce_together(&all, &all, op, call.len, call)
    }

    pub(super) fn direct_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        root: u32,
        call: &Call,
    ) -> Result<()> {
        self.enter(call)?;
        let all = self.addresses(buffer);
        self.reduce_together(&all, &[all[root as usize]], op, call.len, call)
    }

    pub(super) fn direct_reduce_scatter(
        &mut self,
        buffer: &Buffer,
        shard: usize,
        op: ReduceOp,
        call: &Call,
    ) -> Result<()> {
        self.enter(call)?;
        let begin = self.rank as usize * shard * call.dtype.size();
        let sources: Vec<*const u8> =
            self.addresses(buffer).into_iter().map(|base| base.wrapping_add(begin).cast_const()).collect();
        let own = buffer.address().wrapping_add(begin);
        // SAFETY: all ranks have arrived; shard r of every buffer is read, and that of rank r written, by rank r
        // alone until all have left.
        unsafe { reduce::reduce(call.dtype, op, &sources, &[own], shard) };
        self.leave(call)
    }

    pub(super) fn direct_all_gather(&mut self, buffer: &Buffer, shard: usize, call: &Call) -> Result<()> {
        self.enter(call)?;
        let all = self.addresses(buffer);
        let bytes = shard * call.dtype.size();
        for peer in self.peers() {
            let begin = peer as usize * bytes;
            let (source, own) =
                (all[peer as usize].wrapping_add(begin), buffer.address().wrapping_add(begin));
            // SAFETY: all ranks have arrived; rank r's own shard is only read until all have left, and the
            // others of this buffer are written by this rank alone.
            unsafe { std::ptr::copy_nonoverlapping(source, own, bytes) };
        }
        self.leave(call)
    }

    pub(super) fn direct_broadcast(&mut self, buffer: &Buffer, root: u32, call: &Call) -> Result<()> {
        self.enter(call)?;
        if self.rank != root {
            let source = self.addresses(buffer)[root as usize];
            // SAFETY: all ranks have arrived; the root's buffer is only read until all have left.
            unsafe { std::ptr::copy_nonoverlapping(source, buffer.address(), buffer.bytes()) };
        }
        self.leave(call)
    }
}
