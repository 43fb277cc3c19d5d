//! Channels between two ranks: two chunks of shared memory, filled and emptied alternately.
//!
//! Every rank has a channel to each peer for messages, and one to the next rank for the ring. The sender stores its
//! call with each chunk, so that the receiver detects a mismatch.

use std::sync::atomic::Ordering;

use mgpu_kernels::copy::copy;

use super::CpuTransport;
use crate::Result;
use crate::clock::now;
use crate::comm::Buffer;
use crate::comm::signature::Signature;

/// One channel of `from`. Its index among the sender's channels is the receiver's rank; the sender's own index is
/// used for the ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct Channel {
    pub(super) from: u32,
    pub(super) to: u32,
    index: u32,
}

impl Channel {
    /// Carries messages.
    fn of_messages(from: u32, to: u32) -> Self {
        Channel { from, to, index: to }
    }

    /// Carries the blocks of a ring of `size` ranks that leave rank `from`.
    pub(super) fn of_ring(from: u32, size: u32) -> Self {
        Channel { from, to: (from + 1) % size, index: from }
    }
}

impl CpuTransport {
    /// Sends the next chunk, after waiting for a free one; `fill` writes it.
    pub(super) fn send_chunk(
        &mut self,
        channel: Channel,
        call: &Signature,
        fill: impl FnOnce(*mut u8),
    ) -> Result<()> {
        let Channel { from, to, index } = channel;
        let count = self.sent[index as usize];
        // Two chunks may be in flight: this one replaces chunk `count - 2`.
        let released = &self.region.released(from, index).count;
        self.wait(released, count.wrapping_sub(1), call, || (vec![to], vec![self.end_of_wait_chain(to)]))?;
        if count == 0 {
            self.region.reserve_channel(from, index)?;
        }
        fill(self.region.chunk(from, index, count));
        let sent = self.region.sent(from, index);
        for (slot, word) in sent.calls[(count % 2) as usize].iter().zip(call.encode()) {
            slot.store(word, Ordering::Relaxed);
        }
        self.sent[index as usize] = count.wrapping_add(1);
        sent.count.publish(count.wrapping_add(1), self.policy);
        Ok(())
    }

    /// Number of chunks received on a channel.
    fn received(&mut self, channel: Channel) -> &mut u32 {
        let ring = channel.index == channel.from;
        &mut self.received[if ring { self.rank } else { channel.from } as usize]
    }

    /// Waits for the next chunk, which is valid until [`release_chunk`](Self::release_chunk).
    pub(super) fn receive_chunk(&mut self, channel: Channel, call: &Signature) -> Result<*mut u8> {
        let Channel { from, index, .. } = channel;
        let count = *self.received(channel);
        let sent = self.region.sent(from, index);
        self.wait(&sent.count, count.wrapping_add(1), call, || {
            (vec![from], vec![self.end_of_wait_chain(from)])
        })?;
        let calls = &sent.calls[(count % 2) as usize];
        let theirs = std::array::from_fn(|index| calls[index].load(Ordering::Relaxed));
        if theirs != call.counterpart(self.rank).encode() {
            return Err(self.mismatch_error(from, count.wrapping_add(1), call, theirs));
        }
        Ok(self.region.chunk(from, index, count))
    }

    /// Releases the last received chunk to its sender.
    pub(super) fn release_chunk(&mut self, channel: Channel) {
        let count = self.received(channel);
        *count = count.wrapping_add(1);
        let count = *count;
        self.region.released(channel.from, channel.index).count.publish(count, self.policy);
    }

    /// Byte ranges of a message's chunks; at least one, so that an empty message synchronises, too.
    fn message_chunks(&self, bytes: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let most = self.region.chunk_bytes();
        (0..bytes.div_ceil(most).max(1)).map(move |index| (index * most, most.min(bytes - index * most)))
    }

    /// Records that the peer of a message has come: until then this rank has waited for it.
    fn record_peer(&self) {
        if let Some(arrival) = &self.arrival {
            let _ = arrival.compare_exchange(0, now(), Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    pub(super) fn send_message(&mut self, buffer: &Buffer, to: u32, call: &Signature) -> Result<()> {
        self.membership.page().touch(self.membership.rank());
        let channel = Channel::of_messages(self.rank, to);
        for (index, (begin, bytes)) in self.message_chunks(buffer.bytes()).enumerate() {
            let source = buffer.address().wrapping_add(begin);
            self.send_chunk(channel, call, |chunk| {
                // SAFETY: the range is within the buffer, and the receiver has released the chunk.
                unsafe { copy(source, chunk, bytes) };
            })?;
            // The first two chunks need no receiver.
            if index == 2 {
                self.record_peer();
            }
        }
        Ok(())
    }

    pub(super) fn receive_message(&mut self, buffer: &Buffer, from: u32, call: &Signature) -> Result<()> {
        self.membership.page().touch(self.membership.rank());
        let (channel, results) = (Channel::of_messages(from, self.rank), self.result_stores(call));
        for (begin, bytes) in self.message_chunks(buffer.bytes()) {
            let chunk = self.receive_chunk(channel, call)?;
            self.record_peer();
            // SAFETY: the range is within the buffer, and the sender does not write the chunk before its release.
            unsafe { results.copy(chunk, buffer.address().wrapping_add(begin), bytes) };
            self.count(bytes, 1);
            self.release_chunk(channel);
        }
        Ok(())
    }

    /// Sends `from` to `peer` and receives as many bytes of it, a chunk each in turn: a peer that has sent a chunk has
    /// released all but the last one.
    pub(super) fn send_and_receive(
        &mut self,
        from: &Buffer,
        buffer: &Buffer,
        peer: u32,
        call: &Signature,
    ) -> Result<()> {
        self.membership.page().touch(self.membership.rank());
        let (to, back) = (Channel::of_messages(self.rank, peer), Channel::of_messages(peer, self.rank));
        let results = self.result_stores(call);
        for (begin, bytes) in self.message_chunks(buffer.bytes()) {
            let source = from.address().wrapping_add(begin);
            self.send_chunk(to, call, |chunk| {
                // SAFETY: both buffers have the same length, the range is within it, and the peer has released the chunk.
                unsafe { copy(source, chunk, bytes) };
            })?;
            let chunk = self.receive_chunk(back, call)?;
            self.record_peer();
            // SAFETY: the range is within the buffer, and the peer does not write the chunk before its release.
            unsafe { results.copy(chunk, buffer.address().wrapping_add(begin), bytes) };
            self.count(bytes, 1);
            self.release_chunk(back);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::{Buffer, World};

    #[test]
    fn a_message_mismatch_names_send_and_recv() {
        let mut worlds = World::threads(2).unwrap();
        worlds.iter_mut().for_each(|world| world.set_timeout(Duration::from_millis(50)));
        let [mut first, mut second] = <[World; 2]>::try_from(worlds).unwrap();
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut comm = first.communicator().unwrap();
                comm.send(Buffer::zeroed::<f32>(8), 1).unwrap().wait().unwrap();
                comm.barrier().unwrap_err();
            });
            let mut comm = second.communicator().unwrap();
            comm.recv(Buffer::zeroed::<f32>(4), 0).unwrap_err().to_string()
        });
        let both = "rank 1 calls recv(4 f32, from rank 0), rank 0 calls send(8 f32, to rank 1)";
        assert!(error.contains(both), "{error}");
    }
}
