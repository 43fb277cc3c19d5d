//! Small all-reduces: one synchronisation.
//!
//! A rank copies its payload beside its arrival flag, or into its slot, before it publishes its arrival. Once all
//! have arrived, every rank reduces all payloads by itself: n·S bytes read instead of a second synchronisation.

use std::sync::atomic::Ordering;

use mgpu_kernels::reduce;

use super::region::INLINE_BYTES;
use super::{Call, CpuCommunicator};
use crate::Result;
use crate::comm::{Buffer, ReduceOp};

const WORDS: usize = INLINE_BYTES / 8;

impl CpuCommunicator {
    pub(super) fn inline_all_reduce(&mut self, buffer: &Buffer, op: ReduceOp, call: &Call) -> Result<()> {
        let mut words = [0u64; WORDS];
        let bytes = buffer.bytes();
        // SAFETY: `bytes` is at most the size of `words` (the path was chosen so), and the buffer is ours.
        unsafe { std::ptr::copy_nonoverlapping(buffer.address(), words.as_mut_ptr().cast(), bytes) };
        let line = self.region.arrival(self.rank, self.next_sequence());
        for (slot, word) in line.payload.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        self.enter(call)?;
        let payloads: Vec<[u64; WORDS]> = (0..self.size)
            .map(|rank| {
                let line = self.region.arrival(rank, self.sequence);
                std::array::from_fn(|index| line.payload[index].load(Ordering::Relaxed))
            })
            .collect();
        let sources: Vec<*const u8> = payloads.iter().map(|words| words.as_ptr().cast()).collect();
        // SAFETY: every source holds the payload of one rank, of which there are as many elements as in the
        // buffer (all calls agree); u64 is aligned enough for every element type, and the buffer is ours.
        unsafe { reduce::reduce(call.dtype, op, &sources, &[buffer.address()], call.len) };
        Ok(())
    }

    pub(super) fn eager_all_reduce(&mut self, buffer: &Buffer, op: ReduceOp, call: &Call) -> Result<()> {
        let slot = self.region.eager(self.rank, self.next_sequence());
        // SAFETY: the payload fits a slot (the path was chosen so); nobody reads this slot before the arrival
        // that `enter` publishes, nor any more since the operation before the last (see `region`).
        unsafe { std::ptr::copy_nonoverlapping(buffer.address(), slot, buffer.bytes()) };
        self.enter(call)?;
        let sources: Vec<*const u8> =
            (0..self.size).map(|rank| self.region.eager(rank, self.sequence).cast_const()).collect();
        // SAFETY: all ranks have filled their slots with `len` elements and leave them until the operation after
        // next; slots are aligned to pages, and the buffer is ours.
        unsafe { reduce::reduce(call.dtype, op, &sources, &[buffer.address()], call.len) };
        Ok(())
    }
}
