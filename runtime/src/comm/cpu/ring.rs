//! The ring all-reduce.
//!
//! Terms: a *block* is the payload of one chunk. The *reduce wave* of a block runs from rank 0 to rank n−1, where
//! each rank adds its own elements to the accumulators it received. The *gather wave* carries the result from rank
//! n−1 around to rank n−2. The waves of successive blocks are one step apart, so that in the steady state every link
//! carries one block of each wave per step.
//!
//! A textbook ring starts each block at another rank. That saves nothing here and makes the order of summation differ
//! from block to block. Starting all blocks at rank 0 keeps the order fixed, and with it the bits.
//!
//! Both ends of a link derive the order of its chunks from the same schedule, which is a pure function.

use mgpu_kernels::copy::copy;
use mgpu_kernels::reduce;

use super::CpuTransport;
use super::channel::Channel;
use crate::Result;
use crate::comm::signature::Signature;
use crate::comm::{Buffer, ReduceOp};

/// What a rank does in one step: first its part of a reduce wave, then of a gather wave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RingStep {
    /// The block whose reduce wave reaches this rank.
    reduce: Option<usize>,
    /// The block whose result reaches this rank.
    gather: Option<usize>,
}

/// The steps of `rank` among `ranks` for `blocks` blocks. The reduce wave of block b is at rank r in step b + r,
/// and so ends in step b + n − 1; its gather wave is at rank r in step b + n + r.
fn schedule(rank: usize, ranks: usize, blocks: usize) -> impl Iterator<Item = RingStep> {
    let last_step = blocks + 2 * ranks - 2;
    let within = move |block: usize| (block < blocks).then_some(block);
    (0..last_step).map(move |step| RingStep {
        reduce: step.checked_sub(rank).and_then(within),
        gather: step.checked_sub(ranks + rank).and_then(within).filter(|_| rank + 1 < ranks),
    })
}

impl CpuTransport {
    #[inline(never)]
    pub(super) fn ring_all_reduce(&mut self, buffer: &Buffer, op: ReduceOp, call: &Signature) -> Result<()> {
        self.enter(call)?;
        let element = call.dtype.size();
        let block = self.region.chunk_bytes() / reduce::accumulator_size(call.dtype).max(element);
        let blocks = call.len.div_ceil(block);
        let range = |index: usize| {
            let begin = index * block;
            (buffer.address().wrapping_add(begin * element), block.min(call.len - begin))
        };
        for step in schedule(self.rank as usize, self.size as usize, blocks) {
            if let Some(index) = step.reduce {
                let (own, len) = range(index);
                self.reduce_wave(own, len, op, call)?;
            }
            if let Some(index) = step.gather {
                let (own, len) = range(index);
                self.gather_wave(own, len * element, call)?;
            }
        }
        Ok(())
    }

    /// The channels from the left and to the right neighbour.
    fn neighbours(&self) -> (Channel, Channel) {
        let left = (self.rank + self.size - 1) % self.size;
        (Channel::of_ring(left, self.size), Channel::of_ring(self.rank, self.size))
    }

    /// Adds this rank's block to the accumulators from the left and sends them to the right.
    fn reduce_wave(&mut self, own: *mut u8, len: usize, op: ReduceOp, call: &Signature) -> Result<()> {
        let (dtype, ranks, last) = (call.dtype, self.size, self.size - 1);
        let bytes = len * reduce::accumulator_size(dtype);
        let (left, right) = self.neighbours();
        if self.rank == 0 {
            // SAFETY: `len` elements of our buffer are converted to as many accumulators, which fit into the chunk.
            return self.send_chunk(right, call, |out| unsafe { reduce::start(dtype, own, out, len) });
        }
        let acc = self.receive_chunk(left, call)?;
        // SAFETY: the left neighbour has filled the chunk with `len` accumulators and does not write it before its
        // release.
        unsafe { reduce::accumulate(dtype, op, own, acc, len) };
        self.count(bytes, 1);
        if self.rank < last {
            // SAFETY: both chunks hold `len` accumulators, and we have exclusive access to them for now.
            self.send_chunk(right, call, |out| unsafe { copy(acc, out, bytes) })?;
        } else {
            // SAFETY: we have exclusive access to the chunk for now; the result goes to our own buffer.
            unsafe { reduce::finish(dtype, op, ranks, acc, own, len) };
            let bytes = len * dtype.size();
            // SAFETY: the block lies within our buffer and fits a chunk.
            self.send_chunk(right, call, |out| unsafe { copy(own, out, bytes) })?;
        }
        self.release_chunk(left);
        Ok(())
    }

    /// Stores the result from the left and sends it to the right, unless the right neighbour computed it.
    fn gather_wave(&mut self, own: *mut u8, bytes: usize, call: &Signature) -> Result<()> {
        let (left, right) = self.neighbours();
        let result = self.receive_chunk(left, call)?;
        // SAFETY: the chunk holds the block's result until its release; the block lies within our buffer.
        unsafe { copy(result, own, bytes) };
        self.count(bytes, 1);
        self.release_chunk(left);
        if self.rank + 2 < self.size {
            // SAFETY: the block lies within our buffer and fits a chunk.
            self.send_chunk(right, call, |out| unsafe { copy(own, out, bytes) })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Runs the schedule on queues: every block visits ranks 0…n−1 in order, every rank gets every result,
        /// links deliver what the receiver expects, and no link ever holds more than two chunks at a step's end.
        #[test]
        fn waves_visit_all_ranks_in_order(ranks in 2usize..10, blocks in 0usize..20) {
            let mut links: Vec<VecDeque<(usize, usize)>> = vec![VecDeque::new(); ranks];
            let mut results = vec![vec![false; blocks]; ranks];
            let mut schedules: Vec<_> = (0..ranks).map(|rank| schedule(rank, ranks, blocks)).collect();
            // One step of all ranks at a time; what is sent in a step is received in the next.
            loop {
                let steps: Vec<RingStep> = schedules.iter_mut().filter_map(Iterator::next).collect();
                if steps.is_empty() {
                    break;
                }
                let arrived: Vec<usize> = links.iter().map(VecDeque::len).collect();
                let mut taken = vec![0; ranks];
                for (rank, step) in steps.into_iter().enumerate() {
                    let left = (rank + ranks - 1) % ranks;
                    let mut receive = |links: &mut Vec<VecDeque<(usize, usize)>>| {
                        taken[left] += 1;
                        assert!(taken[left] <= arrived[left], "rank {rank} waits for its left neighbour");
                        links[left].pop_front().unwrap()
                    };
                    if let Some(block) = step.reduce {
                        let summed = if rank == 0 { 0 } else {
                            let (received, summed) = receive(&mut links);
                            prop_assert_eq!(received, block);
                            summed
                        };
                        prop_assert_eq!(summed, rank, "block {} skips a rank", block);
                        links[rank].push_back((block, rank + 1));
                        results[rank][block] |= rank + 1 == ranks;
                    }
                    if let Some(block) = step.gather {
                        prop_assert_eq!(receive(&mut links), (block, ranks));
                        results[rank][block] = true;
                        if rank + 2 < ranks {
                            links[rank].push_back((block, ranks));
                        }
                    }
                }
                prop_assert!(links.iter().all(|link| link.len() <= 2));
            }
            prop_assert!(results.iter().flatten().all(|done| *done));
            prop_assert!(links.iter().all(VecDeque::is_empty));
        }
    }
}
