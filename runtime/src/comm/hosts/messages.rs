//! Messages between two ranks.
//!
//! A small message is sent at once, as long as the receiver has not left too many of them: it waits at the receiver
//! until that calls `recv`. A large one is offered, and sent when the receiver has accepted it. So the memory for
//! messages is bounded, and a rank that sends to one that never receives waits, where the wait is noticed.

use super::HostsTransport;
use super::frame::{FrameKind, Header, SMALL_BYTES};
use super::transfer::Transfer;
use super::wait::Awaited;
use crate::Result;
use crate::clock::now;
use crate::comm::Buffer;
use crate::comm::signature::{SIGNATURE_WORDS, Signature};

/// Messages to one rank that it has not received: their number, and their bytes.
const MAX_IN_FLIGHT: (usize, usize) = (64, 8 * SMALL_BYTES);

/// A message that has arrived, or is offered.
pub(super) struct Incoming {
    call: [u64; SIGNATURE_WORDS],
    /// `None` if it is offered.
    payload: Option<Vec<u8>>,
}

impl super::agree::Peer {
    /// Whether it has taken all messages.
    pub(super) fn is_accepted(&self) -> bool {
        self.accepted == self.sent
    }

    /// Whether a small message of `bytes` bytes may be sent before it has taken the earlier ones.
    fn has_room_for(&self, bytes: usize) -> bool {
        let in_flight: usize = self.in_flight.iter().map(|(_, bytes)| bytes).sum();
        bytes <= SMALL_BYTES && self.in_flight.len() < MAX_IN_FLIGHT.0 && in_flight + bytes <= MAX_IN_FLIGHT.1
    }
}

impl HostsTransport {
    pub(super) fn send_message(&mut self, buffer: &Buffer, to: u32, call: &Signature) -> Result<()> {
        let (bytes, words) = (buffer.as_bytes(), call.encode());
        if bytes.len() <= SMALL_BYTES && !self.peers[to as usize].has_room_for(bytes.len()) {
            // It may have taken some meanwhile.
            self.read_arrived(call)?;
        }
        let peer = &mut self.peers[to as usize];
        peer.sent = peer.sent.wrapping_add(1);
        let number = peer.sent;
        if peer.has_room_for(bytes.len()) {
            peer.in_flight.push_back((number, bytes.len()));
            self.wire.sender().queue(to, Header::new(FrameKind::Message, number, words), bytes);
            return self.wait(Awaited::Room { of: to }, call, &mut self.empty_transfer());
        }
        self.wire.sender().queue(to, Header::new(FrameKind::Offer, number, words), &[]);
        self.wait(Awaited::Accept { by: to }, call, &mut self.empty_transfer())?;
        self.record_arrival();
        let mut transfer = Transfer::new(self.members.size(), number, words, words);
        transfer.send(to, bytes);
        self.wait(Awaited::Transfer, call, &mut transfer)
    }

    pub(super) fn receive_message(&mut self, buffer: &mut Buffer, from: u32, call: &Signature) -> Result<()> {
        let message = self.take_message(from, call)?;
        let bytes = buffer.as_bytes_mut();
        if let Some(payload) = message.payload {
            return self.finish_small(bytes, &payload, from, call);
        }
        let number = self.peers[from as usize].taken;
        let mut transfer = Transfer::new(self.members.size(), number, call.encode(), message.call);
        transfer.receive(from, bytes);
        self.wait(Awaited::Transfer, call, &mut transfer)
    }

    /// Sends `source` to `peer` and receives as many bytes of it, both at once. Both ranks offer a large message: the
    /// peer's offer says that it is here, so no rank waits until its own is accepted.
    pub(super) fn send_and_receive(
        &mut self,
        source: &Buffer,
        buffer: &mut Buffer,
        peer: u32,
        call: &Signature,
    ) -> Result<()> {
        let (source, words) = (source.as_bytes(), call.encode());
        let is_small = source.len() <= SMALL_BYTES;
        if is_small && !self.peers[peer as usize].has_room_for(source.len()) {
            // It takes all earlier messages before it can come to this one.
            self.wait(Awaited::Accept { by: peer }, call, &mut self.empty_transfer())?;
        }
        let state = &mut self.peers[peer as usize];
        state.sent = state.sent.wrapping_add(1);
        let sent = state.sent;
        let kind = if is_small { FrameKind::Message } else { FrameKind::Offer };
        if is_small {
            state.in_flight.push_back((sent, source.len()));
        }
        self.wire.sender().queue(peer, Header::new(kind, sent, words), if is_small { source } else { &[] });
        let message = self.take_message(peer, call)?;
        let bytes = buffer.as_bytes_mut();
        if let Some(payload) = message.payload {
            return self.finish_small(bytes, &payload, peer, call);
        }
        // The same on both ranks, whatever other messages they have exchanged.
        let number = sent.wrapping_add(self.peers[peer as usize].taken);
        let mut transfer = Transfer::new(self.members.size(), number, words, message.call);
        transfer.send(peer, source);
        transfer.receive(peer, bytes);
        self.wait(Awaited::Transfer, call, &mut transfer)
    }

    /// Waits for the next message of `from`, which must be the counterpart of `call`, and accepts it.
    fn take_message(&mut self, from: u32, call: &Signature) -> Result<Incoming> {
        self.wait(Awaited::Message { from }, call, &mut self.empty_transfer())?;
        self.record_arrival();
        let peer = &mut self.peers[from as usize];
        let number = peer.taken.wrapping_add(1);
        let message = peer.incoming.pop_front().expect("the wait was for a message");
        if message.call != call.counterpart(self.members.rank()).encode() {
            return Err(self.mismatch_error(from, number, call, message.call));
        }
        peer.taken = number;
        self.wire.sender().queue(from, Header::new(FrameKind::Accept, number, call.encode()), &[]);
        Ok(message)
    }

    /// Fills `target` with a small message, and waits until `from` has been sent all that is queued for it.
    fn finish_small(&mut self, target: &mut [u8], payload: &[u8], from: u32, call: &Signature) -> Result<()> {
        // A payload has the length that its call says (see `receive_incoming`).
        target.copy_from_slice(payload);
        self.received_bytes += payload.len() as u64;
        self.wait(Awaited::Room { of: from }, call, &mut self.empty_transfer())
    }

    /// Records that the peer of a message has come: until then this rank has waited for it.
    fn record_arrival(&self) {
        if let Some(arrival) = &self.arrival {
            use std::sync::atomic::Ordering::Relaxed;
            let _ = arrival.compare_exchange(0, now(), Relaxed, Relaxed);
        }
    }

    /// Handles a small message, or the offer of a large one.
    ///
    /// # Errors
    /// If it is invalid.
    pub(super) fn receive_incoming(
        &mut self,
        from: u32,
        header: &Header,
        payload: Vec<u8>,
    ) -> Result<(), String> {
        let peer = &mut self.peers[from as usize];
        let expected = peer.taken.wrapping_add(peer.incoming.len() as u32).wrapping_add(1);
        if header.sequence != expected {
            return Err(format!("message {} where message {expected} is expected", header.sequence));
        }
        // After an offer its sender waits.
        if peer.incoming.len() > MAX_IN_FLIGHT.0 {
            return Err(format!("more than {} messages that were not received", MAX_IN_FLIGHT.0));
        }
        let payload = match header.kind {
            FrameKind::Message if Signature::bytes_of(header.call) != Some(payload.len()) => {
                return Err(format!("a message of another length than its {} bytes", payload.len()));
            }
            FrameKind::Message => Some(payload),
            _ => None,
        };
        peer.incoming.push_back(Incoming { call: header.call, payload });
        Ok(())
    }

    /// Handles that `from` has taken message `number`.
    ///
    /// # Errors
    /// If there is no such message.
    pub(super) fn receive_accept(&mut self, from: u32, number: u32) -> Result<(), String> {
        let peer = &mut self.peers[from as usize];
        let expected = peer.accepted.wrapping_add(1);
        if number != expected || peer.is_accepted() {
            return Err(format!(
                "that it accepts message {number}, where {expected} of {} is next",
                peer.sent
            ));
        }
        peer.accepted = number;
        if peer.in_flight.front().is_some_and(|(first, _)| *first == number) {
            peer.in_flight.pop_front();
        }
        Ok(())
    }
}
