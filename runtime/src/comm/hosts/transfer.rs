//! Posted sends and receives: parts of buffers that are on their way to and from peers.

use std::collections::VecDeque;

use super::frame::{FrameKind, HEADER_BYTES, Header, PIECE_BYTES, Stamp};
use crate::comm::signature::SIGNATURE_WORDS;

/// The payload of one operation, or of one part of it. Each peer gets what is posted for it in the order of the posts:
/// both ends of a connection post in the same order, and the two posts of a piece of payload have the same length.
pub(super) struct Transfer<'a> {
    sequence: u32,
    /// The call in the headers that are sent, and the one that received headers must have.
    calls: [[u64; SIGNATURE_WORDS]; 2],
    /// By peer.
    sends: Vec<VecDeque<Send<'a>>>,
    receives: Vec<VecDeque<&'a mut [u8]>>,
    /// Bytes that were received so far.
    received: usize,
    /// Number of posts that are complete, by peer.
    sent_posts: Vec<usize>,
    received_posts: Vec<usize>,
    /// What a wire has taken and not completed, by peer; empty if none has taken any.
    in_flight: Vec<InFlight>,
}

/// Pieces that a wire has taken, and completes in the same order.
#[derive(Default)]
struct InFlight {
    bytes: usize,
    /// Whether each of them is the last of its post.
    sends: VecDeque<bool>,
    receives: VecDeque<bool>,
}

/// A posted send, cut into frames.
pub(super) struct Send<'a> {
    rest: &'a [u8],
    header: [u8; HEADER_BYTES],
    /// Bytes of the current frame's header and payload that are not written.
    header_left: usize,
    payload_left: usize,
}

impl<'a> Transfer<'a> {
    /// Nothing yet, for operation `sequence` of a communicator of `size` ranks. Frames carry `call`, and those of the
    /// peers `counterpart`.
    pub(super) fn new(
        size: u32,
        sequence: u32,
        call: [u64; SIGNATURE_WORDS],
        counterpart: [u64; SIGNATURE_WORDS],
    ) -> Self {
        let sends = (0..size).map(|_| VecDeque::new()).collect();
        let receives = (0..size).map(|_| VecDeque::new()).collect();
        Transfer {
            sequence,
            calls: [call, counterpart],
            sends,
            receives,
            received: 0,
            sent_posts: vec![0; size as usize],
            received_posts: vec![0; size as usize],
            in_flight: Vec::new(),
        }
    }

    /// Posts bytes for rank `to`.
    pub(super) fn send(&mut self, to: u32, bytes: &'a [u8]) {
        if !bytes.is_empty() {
            let header = [0; HEADER_BYTES];
            self.sends[to as usize].push_back(Send { rest: bytes, header, header_left: 0, payload_left: 0 });
        }
    }

    /// Posts memory for the next bytes of rank `from`.
    pub(super) fn receive(&mut self, from: u32, bytes: &'a mut [u8]) {
        if !bytes.is_empty() {
            self.receives[from as usize].push_back(bytes);
        }
    }

    /// Number of posts for `peer` that are sent: their memory may be used again.
    pub(super) fn sent_posts(&self, peer: u32) -> usize {
        self.sent_posts[peer as usize]
    }

    /// Number of posts for bytes of `peer` that have arrived.
    pub(super) fn received_posts(&self, peer: u32) -> usize {
        self.received_posts[peer as usize]
    }

    /// Number of all posts that are complete.
    pub(super) fn completed(&self) -> usize {
        self.sent_posts.iter().chain(&self.received_posts).sum()
    }

    /// Whether nothing is left to send to `peer` or to receive from it.
    pub(super) fn is_done_with(&self, peer: u32) -> bool {
        let in_flight = self.in_flight.get(peer as usize).is_some_and(|pieces| pieces.bytes > 0);
        self.sends[peer as usize].is_empty() && self.receives[peer as usize].is_empty() && !in_flight
    }

    /// Whether memory is posted for more bytes of `peer`.
    pub(super) fn expects_from(&self, peer: u32) -> bool {
        !self.receives[peer as usize].is_empty()
    }

    /// Whether something is left to send to `peer`.
    pub(super) fn has_for(&self, peer: u32) -> bool {
        !self.sends[peer as usize].is_empty()
    }

    /// Bytes that were received.
    pub(super) fn received(&self) -> usize {
        self.received
    }

    /// Bytes that are left to send and to receive.
    pub(super) fn left(&self) -> usize {
        let sends = self.sends.iter().flatten().map(|send| send.rest.len() + send.header_left);
        let receives = self.receives.iter().flatten().map(|bytes| bytes.len());
        sends.chain(receives).chain(self.in_flight.iter().map(|pieces| pieces.bytes)).sum()
    }

    /// Header and payload of the frame to write next to `peer`, as far as they are not written. `position` is the number
    /// of bytes of payload before it.
    pub(super) fn next_frame(&mut self, peer: u32, stamp: Stamp, position: u64) -> Option<[&[u8]; 2]> {
        let send = self.sends[peer as usize].front_mut()?;
        if send.header_left + send.payload_left == 0 {
            send.payload_left = send.rest.len().min(PIECE_BYTES);
            send.header_left = HEADER_BYTES;
            let header = Header::new(FrameKind::Data, self.sequence, self.calls[0]).with_argument(position);
            send.header = header.with_payload(&send.rest[..send.payload_left]).encode(stamp);
        }
        Some([&send.header[HEADER_BYTES - send.header_left..], &send.rest[..send.payload_left]])
    }

    /// Notes that `bytes` bytes of the [next frame](Self::next_frame) were written. Returns whether it is within a
    /// frame now.
    pub(super) fn advance(&mut self, peer: u32, bytes: usize) -> bool {
        let sends = &mut self.sends[peer as usize];
        let Some(send) = sends.front_mut() else { return false };
        let of_header = bytes.min(send.header_left);
        send.header_left -= of_header;
        send.payload_left -= bytes - of_header;
        send.rest = &send.rest[bytes - of_header..];
        let within_frame = send.header_left + send.payload_left > 0;
        if send.rest.is_empty() {
            sends.pop_front();
            self.sent_posts[peer as usize] += 1;
        }
        within_frame
    }

    /// Checks the header of a piece.
    ///
    /// # Errors
    /// If it belongs to another operation.
    pub(super) fn check(&self, header: &Header) -> Result<(), String> {
        match (header.sequence, header.call) == (self.sequence, self.calls[1]) {
            true => Ok(()),
            false => Err(format!(
                "a piece of operation {} where one of operation {} is expected",
                header.sequence, self.sequence
            )),
        }
    }

    /// The memory for the next bytes from `peer`.
    pub(super) fn target(&mut self, peer: u32) -> Option<&mut [u8]> {
        self.receives[peer as usize].front_mut().map(|bytes| &mut **bytes)
    }

    /// Notes that `bytes` bytes were written to the [target](Self::target).
    pub(super) fn fill(&mut self, peer: u32, bytes: usize) {
        self.received += bytes;
        let receives = &mut self.receives[peer as usize];
        if let Some(target) = receives.pop_front() {
            let (_, rest) = target.split_at_mut(bytes);
            if rest.is_empty() {
                self.received_posts[peer as usize] += 1;
            } else {
                receives.push_front(rest);
            }
        }
    }

    /// Takes the next bytes for `peer`, at most `most`, for a wire that sends from where they are. They count as left
    /// until they are [completed](Self::complete_send).
    pub(super) fn take_send(&mut self, peer: u32, most: usize) -> Option<&'a [u8]> {
        let sends = &mut self.sends[peer as usize];
        let send = sends.pop_front()?;
        let (bytes, rest) = send.rest.split_at(send.rest.len().min(most));
        let is_last = rest.is_empty();
        if !is_last {
            sends.push_front(Send { rest, ..send });
        }
        self.begin(peer, bytes.len()).sends.push_back(is_last);
        Some(bytes)
    }

    /// Takes the memory for the next bytes from `peer`, at most `most`. As both ends post the same lengths, both get the
    /// same pieces.
    pub(super) fn take_receive(&mut self, peer: u32, most: usize) -> Option<&'a mut [u8]> {
        let receives = &mut self.receives[peer as usize];
        let target = receives.pop_front()?;
        let (bytes, rest) = target.split_at_mut(target.len().min(most));
        let is_last = rest.is_empty();
        if !is_last {
            receives.push_front(rest);
        }
        self.begin(peer, bytes.len()).receives.push_back(is_last);
        Some(bytes)
    }

    fn begin(&mut self, peer: u32, bytes: usize) -> &mut InFlight {
        self.in_flight.resize_with(self.sends.len(), InFlight::default);
        let pieces = &mut self.in_flight[peer as usize];
        pieces.bytes += bytes;
        pieces
    }

    /// Notes that bytes that were [taken](Self::take_send) do not need their memory any more.
    pub(super) fn complete_send(&mut self, peer: u32, bytes: usize) {
        let pieces = &mut self.in_flight[peer as usize];
        pieces.bytes -= bytes;
        self.sent_posts[peer as usize] += usize::from(pieces.sends.pop_front() == Some(true));
    }

    /// Notes that memory that was [taken](Self::take_receive) is filled.
    pub(super) fn complete_receive(&mut self, peer: u32, bytes: usize) {
        let pieces = &mut self.in_flight[peer as usize];
        pieces.bytes -= bytes;
        self.received_posts[peer as usize] += usize::from(pieces.receives.pop_front() == Some(true));
        self.received += bytes;
    }

    /// The header of pieces that are sent, without their length.
    pub(super) fn header(&self) -> Header {
        Header::new(FrameKind::Data, self.sequence, self.calls[0])
    }
}
