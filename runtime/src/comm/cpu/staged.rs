//! Collectives on private buffers: chunk by chunk through staging memory.
//!
//! Every rank has two staging areas and alternates between them, so that the end of a chunk needs no synchronisation
//! besides the next arrival (see [`lines`](super::lines) for why two are enough). In the all-reduce, rank r reduces
//! part r of every chunk, and fills its other area with the next chunk while its peers still process this one.

use std::ops::Range;

use mgpu_kernels::reduce;

use super::CpuTransport;
use super::direct::{Addresses, Parts};
use super::eager::Sources;
use super::region::STAGE_BYTES;
use super::wait::Flag;
use crate::Result;
use crate::comm::exchange::{Exchange, Partition};
use crate::comm::signature::Signature;
use crate::comm::{Buffer, ReduceOp};

/// Cuts `0..len` into ranges of at most `most`; at least one, so that an empty operation synchronises, too.
fn chunks(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.div_ceil(most).max(1)).map(move |index| index * most..len.min((index + 1) * most))
}

/// The elements `chunk` of the elements `range`, truncated at its end.
fn within(range: &Range<usize>, chunk: &Range<usize>) -> Range<usize> {
    let at = |element: usize| range.end.min(range.start + element);
    at(chunk.start)..at(chunk.end)
}

/// Copies `bytes` bytes between private and staging memory.
///
/// # Safety
/// Both ranges are valid and do not overlap; nobody writes the source or accesses the destination meanwhile.
unsafe fn copy(source: *const u8, destination: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(source, destination, bytes) };
}

/// A chunk of an all-reduce: its address in this rank's buffer, and the parts that the ranks reduce.
struct ReduceChunk {
    address: *mut u8,
    parts: Parts,
    element: usize,
}

impl ReduceChunk {
    /// First byte and number of bytes of the part of `rank`.
    fn part(&self, rank: u32) -> (usize, usize) {
        let range = self.parts.part(rank);
        (range.start * self.element, range.len() * self.element)
    }
}

impl CpuTransport {
    /// The staging area to fill before the next arrival.
    fn own_stage(&self) -> Result<*mut u8> {
        self.region.reserve_stages(self.rank)?;
        Ok(self.region.stage(self.rank, self.next_sequence()))
    }

    /// The staging areas of all ranks, after the arrival.
    fn stages(&self) -> Addresses {
        (0..self.size).map(|rank| self.region.stage(rank, self.sequence)).collect()
    }

    #[inline(never)]
    pub(super) fn staged_all_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        let element = call.dtype.size();
        let size = self.size;
        let mut chunks = chunks(call.len, STAGE_BYTES / element)
            .map(|range| ReduceChunk {
                address: buffer.address().wrapping_add(range.start * element),
                parts: Parts::equal(range.len(), size, element),
                element,
            })
            .peekable();
        if let Some(first) = chunks.peek() {
            self.fill_stage(first)?;
        }
        while let Some(chunk) = chunks.next() {
            self.enter(call)?;
            let stages = self.stages();
            let own = self.region.lines(self.rank);
            let begin = self.queued[self.rank as usize];
            own.process((own, self.rank), begin, 1, |_| self.reduce_part(&chunk, &stages, op, call));
            if let Some(next) = chunks.peek() {
                self.fill_stage(next)?;
            }
            self.await_parts(call)?;
            self.fetch_results(&chunk, &stages);
        }
        Ok(())
    }

    /// Copies the parts of a chunk that peers will reduce into the staging area of the next operation.
    fn fill_stage(&self, chunk: &ReduceChunk) -> Result<()> {
        let stage = self.own_stage()?;
        for peer in self.peers() {
            let (at, bytes) = chunk.part(peer);
            // SAFETY: the chunk is within our buffer and fits into a staging area; nobody else accesses that area
            // before our arrival at the next operation, because all have left the operation before this one.
            unsafe { copy(chunk.address.wrapping_add(at), stage.wrapping_add(at), bytes) };
        }
        Ok(())
    }

    /// Reduces this rank's part of a chunk: its own elements directly from its buffer, those of its peers from their
    /// staging areas. The result goes to its buffer, and to its staging area for the peers.
    fn reduce_part(&self, chunk: &ReduceChunk, stages: &Addresses, op: ReduceOp, call: &Signature) {
        let (at, bytes) = chunk.part(self.rank);
        let mut sources: Sources = stages.iter().map(|stage| stage.wrapping_add(at).cast_const()).collect();
        let own = chunk.address.wrapping_add(at);
        sources[self.rank as usize] = own;
        let destinations = [own, stages[self.rank as usize].wrapping_add(at)];
        // SAFETY: all ranks have arrived with their staging areas filled, and only this rank accesses its part of any
        // of them before it is complete.
        unsafe { reduce::reduce(call.dtype, op, &sources, &destinations, bytes / chunk.element) };
        self.count(bytes, self.size - 1);
    }

    /// The flag that counts the parts that `rank` has reduced, and its value after the current chunk.
    fn reduced(&self, rank: u32) -> (&Flag, u32) {
        (self.region.lines(rank).completed(), self.queued[rank as usize].wrapping_add(1))
    }

    /// Waits until every rank has reduced its part of a chunk.
    pub(super) fn await_parts(&mut self, call: &Signature) -> Result<()> {
        for peer in self.peers() {
            let (flag, target) = self.reduced(peer);
            self.wait(flag, target, call, || {
                let late = |peer: &u32| {
                    let (flag, target) = self.reduced(*peer);
                    !flag.reached(target)
                };
                (vec![peer], self.peers().filter(late).collect())
            })?;
        }
        self.queued.iter_mut().for_each(|count| *count = count.wrapping_add(1));
        Ok(())
    }

    /// Copies the parts that peers have reduced into our buffer.
    fn fetch_results(&self, chunk: &ReduceChunk, stages: &Addresses) {
        for peer in self.peers() {
            let (at, bytes) = chunk.part(peer);
            // SAFETY: the peer's staging area contains its part of the result, and is not written until the operation
            // after next.
            unsafe { copy(stages[peer as usize].wrapping_add(at), chunk.address.wrapping_add(at), bytes) };
            self.count(bytes, 1);
        }
    }

    #[inline(never)]
    pub(super) fn staged_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        root: u32,
        call: &Signature,
    ) -> Result<()> {
        let element = call.dtype.size();
        for chunk in chunks(call.len, STAGE_BYTES / element) {
            let own = buffer.address().wrapping_add(chunk.start * element);
            // SAFETY: as in `staged_all_reduce`.
            unsafe { copy(own, self.own_stage()?, chunk.len() * element) };
            self.enter(call)?;
            if self.rank == root {
                let sources: Sources = self.stages().into_iter().map(<*mut u8>::cast_const).collect();
                // SAFETY: every rank has filled its staging area with this chunk and does not write it until the
                // operation after next.
                unsafe { reduce::reduce(call.dtype, op, &sources, &[own], chunk.len()) };
                self.count(chunk.len() * element, self.size - 1);
            }
        }
        Ok(())
    }

    #[inline(never)]
    pub(super) fn staged_reduce_scatter(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        let (element, ranks) = (call.dtype.size(), self.size as usize);
        // A staging area holds one piece for every rank, each beginning at a cache line.
        let piece = (STAGE_BYTES / ranks) & !63;
        for chunk in chunks(self.shard(0, call).1, piece / element) {
            let stage = self.own_stage()?;
            for rank in 0..self.size {
                let (at, len) = self.shard_chunk(buffer, rank, &chunk, call);
                // SAFETY: as in `staged_all_reduce`; piece `rank` of the stage is within it.
                unsafe { copy(at, stage.wrapping_add(rank as usize * piece), len * element) };
            }
            self.enter(call)?;
            let own = self.rank as usize;
            let sources: Sources =
                self.stages().into_iter().map(|stage| stage.wrapping_add(own * piece).cast_const()).collect();
            let (at, len) = self.shard_chunk(buffer, self.rank, &chunk, call);
            // SAFETY: as in `staged_reduce`.
            unsafe { reduce::reduce(call.dtype, op, &sources, &[at], len) };
            self.count(len * element, self.size - 1);
        }
        Ok(())
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
        let element = call.dtype.size();
        for chunk in chunks(shares.longest(), STAGE_BYTES / element) {
            let part = |rank| {
                let part = within(&shares.range(rank), &chunk);
                (buffer.address().wrapping_add(part.start * element), part.len() * element)
            };
            let (at, bytes) = part(self.rank);
            // SAFETY: as in `staged_all_reduce`.
            unsafe { copy(at, self.own_stage()?, bytes) };
            self.enter(call)?;
            if root.is_some_and(|root| root != self.rank) {
                continue;
            }
            let stages = self.stages();
            for peer in self.peers() {
                let (at, bytes) = part(peer);
                // SAFETY: the peer has filled its staging area with its chunk and does not write it until the
                // operation after next.
                unsafe { copy(stages[peer as usize], at, bytes) };
                self.count(bytes, 1);
            }
        }
        Ok(())
    }

    /// Transfers the messages of an exchange from one buffer to another, or within one. A staging area holds one
    /// piece for every rank.
    #[inline(never)]
    pub(super) fn staged_exchange(
        &mut self,
        from: &Buffer,
        to: &Buffer,
        exchange: &Exchange,
        call: &Signature,
    ) -> Result<()> {
        let element = call.dtype.size();
        let piece = (STAGE_BYTES / self.size as usize) & !63;
        for chunk in chunks(exchange.longest, piece / element) {
            let stage = self.own_stage()?;
            for (message, rank) in exchange.send.iter().zip(0..) {
                let part = within(message, &chunk);
                let source = from.address().wrapping_add(part.start * element);
                // SAFETY: as in `staged_all_reduce`; piece `rank` of the stage is within it.
                unsafe { copy(source, stage.wrapping_add(rank * piece), part.len() * element) };
            }
            self.enter(call)?;
            for (message, stage) in exchange.receive.iter().zip(self.stages()) {
                let part = within(message, &chunk);
                let (source, destination) = (
                    stage.wrapping_add(self.rank as usize * piece),
                    to.address().wrapping_add(part.start * element),
                );
                // SAFETY: the peer has filled our piece of its staging area with as many bytes and does not write it
                // until the operation after next; the destination elements are not sent by any later chunk.
                unsafe { copy(source, destination, part.len() * element) };
                self.count(part.len() * element, 1);
            }
        }
        Ok(())
    }

    /// Address and length of the elements `chunk` of the shard of `rank`.
    fn shard_chunk(
        &self,
        buffer: &Buffer,
        rank: u32,
        chunk: &Range<usize>,
        call: &Signature,
    ) -> (*mut u8, usize) {
        let (begin, len) = self.shard(rank, call);
        let begin = begin + chunk.start * call.dtype.size();
        (buffer.address().wrapping_add(begin), len.min(chunk.end).saturating_sub(chunk.start))
    }

    #[inline(never)]
    pub(super) fn staged_broadcast(&mut self, buffer: &Buffer, root: u32, call: &Signature) -> Result<()> {
        let element = call.dtype.size();
        for chunk in chunks(call.len, STAGE_BYTES / element) {
            let bytes = chunk.len() * element;
            let own = buffer.address().wrapping_add(chunk.start * element);
            if self.rank == root {
                // SAFETY: as in `staged_all_reduce`.
                unsafe { copy(own, self.own_stage()?, bytes) };
            }
            self.enter(call)?;
            if self.rank != root {
                // SAFETY: the root has filled its staging area with this chunk and does not write it until the
                // operation after next.
                unsafe { copy(self.region.stage(root, self.sequence), own, bytes) };
                self.count(bytes, 1);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_elements_once_and_are_never_empty() {
        for (len, most) in [(0, 4), (1, 4), (4, 4), (5, 4), (12, 4), (13, 4)] {
            let ranges: Vec<_> = chunks(len, most).collect();
            assert!(!ranges.is_empty());
            assert!(ranges.iter().all(|range| range.len() <= most));
            assert_eq!(ranges.into_iter().flatten().collect::<Vec<_>>(), (0..len).collect::<Vec<_>>());
        }
    }
}
