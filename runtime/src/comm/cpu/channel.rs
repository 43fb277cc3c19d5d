//! Channels between pairs of ranks: two chunks of shared memory, filled and emptied in turn.
//!
//! Point-to-point messages and the ring travel on them. The sender notes beside each chunk what it belongs to, so
//! that a receiver that expects something else finds out.

use std::sync::atomic::Ordering;

use super::{Call, CpuCommunicator, Kind, Path};
use crate::Result;
use crate::comm::Buffer;

impl CpuCommunicator {
    /// Sends the next chunk to rank `to`, once there is room for it; `fill` writes it.
    pub(super) fn send_chunk(&mut self, to: u32, call: &Call, fill: impl FnOnce(*mut u8)) -> Result<()> {
        let count = self.sent[to as usize];
        // Two chunks may be under way: this one replaces chunk `count - 2`.
        let taken = &self.region.taken(self.rank, to).count;
        self.wait(taken, count.wrapping_sub(1), Some(to), call, || vec![to])?;
        fill(self.region.chunk(self.rank, to, count));
        let sent = self.region.sent(self.rank, to);
        for (slot, word) in sent.calls[(count % 2) as usize].iter().zip(call.encode()) {
            slot.store(word, Ordering::Relaxed);
        }
        self.sent[to as usize] = count.wrapping_add(1);
        sent.count.publish(self.sent[to as usize]);
        Ok(())
    }

    /// Waits for the next chunk of rank `from`; it stays valid until [`release_chunk`](Self::release_chunk).
    pub(super) fn receive_chunk(&mut self, from: u32, call: &Call) -> Result<*mut u8> {
        let count = self.received[from as usize];
        let sent = self.region.sent(from, self.rank);
        self.wait(&sent.count, count.wrapping_add(1), Some(from), call, || vec![from])?;
        let theirs =
            [0, 1, 2].map(|index: usize| sent.calls[(count % 2) as usize][index].load(Ordering::Relaxed));
        self.compare(from, count.wrapping_add(1), call.encode(), theirs)?;
        Ok(self.region.chunk(from, self.rank, count))
    }

    /// Gives the chunk received last back to its sender.
    pub(super) fn release_chunk(&mut self, from: u32) {
        let count = &mut self.received[from as usize];
        *count = count.wrapping_add(1);
        self.region.taken(from, self.rank).count.publish(*count);
    }

    /// Byte ranges of a message's chunks; at least one, so that an empty message is one too.
    fn message_chunks(&self, bytes: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let most = self.region.chunk_bytes();
        (0..bytes.div_ceil(most).max(1)).map(move |index| (index * most, most.min(bytes - index * most)))
    }

    fn message(buffer: &Buffer) -> Call {
        Call::plain(Kind::Message, buffer.dtype(), buffer.len()).via(Path::None)
    }

    pub(super) fn send_message(&mut self, buffer: &Buffer, to: u32) -> Result<()> {
        let call = Self::message(buffer);
        for (begin, bytes) in self.message_chunks(buffer.bytes()) {
            let source = buffer.address().wrapping_add(begin);
            self.send_chunk(to, &call, |chunk| {
                // SAFETY: the range lies within the buffer, and the receiver has released the chunk.
                unsafe { std::ptr::copy_nonoverlapping(source, chunk, bytes) };
            })?;
        }
        Ok(())
    }

    pub(super) fn receive_message(&mut self, buffer: &Buffer, from: u32) -> Result<()> {
        let call = Self::message(buffer);
        for (begin, bytes) in self.message_chunks(buffer.bytes()) {
            let chunk = self.receive_chunk(from, &call)?;
            // SAFETY: the range lies within the buffer, and the sender leaves the chunk until its release.
            unsafe { std::ptr::copy_nonoverlapping(chunk, buffer.address().wrapping_add(begin), bytes) };
            self.release_chunk(from);
        }
        Ok(())
    }
}
