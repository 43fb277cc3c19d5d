//! TCP: one connection to every other rank of a communicator, driven without blocking.
//!
//! A piece of payload for which nothing is posted yet stays in the connection, which is not read until then: its sender
//! is ahead of this rank, and waits when the kernel's buffers are full.

mod sender;
mod unconfirmed;

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use smallvec::SmallVec;

use sender::TcpSender;
pub(in super::super) use sender::configure;

use super::{BadFrame, Ended, Frame, Sender, Wire};
use crate::comm::hosts::frame::{FrameKind, HEADER_BYTES, Header, SMALL_BYTES, Stamp};
use crate::comm::hosts::transfer::Transfer;

/// Size of the memory for bytes that have no other place: at least a small frame.
const INPUT_BYTES: usize = 2 * SMALL_BYTES;

/// The connections of one rank.
pub(in super::super) struct TcpWire {
    connections: Arc<TcpSender>,
    /// The same.
    sender: Arc<dyn Sender>,
    /// By peer.
    inputs: Vec<Input>,
    /// Frames that are no pieces of a transfer, in the order of their arrival.
    received: VecDeque<Frame>,
}

/// What was read from one peer.
#[derive(Default)]
struct Input {
    /// Bytes `begin..end` were read and not used.
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
    /// Bytes of the current piece that are still to come.
    piece_left: usize,
    /// The next frame is a piece for which nothing is posted.
    stalled: bool,
    ended: Option<Ended>,
    /// Nothing can be written any more, for this reason, although there may be bytes to read.
    deaf: Option<Ended>,
}

impl Input {
    fn available(&self) -> usize {
        self.end - self.begin
    }

    /// Notes how the connection has ended, unless that is known.
    fn end(&mut self, how: impl FnOnce() -> String) {
        self.ended.get_or_insert_with(|| Ended::now(how()));
    }

    /// Reads more bytes, if there is room. Returns whether the kernel may have more still.
    fn read_more(&mut self, mut stream: &TcpStream) -> bool {
        if self.buffer.is_empty() {
            self.buffer.resize(INPUT_BYTES, 0);
        }
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.available());
        match stream.read(&mut self.buffer[self.end..]) {
            Ok(0) if self.end < self.buffer.len() => self.end(|| "closed its connection".into()),
            Ok(bytes) => {
                self.end += bytes;
                return self.end == self.buffer.len();
            }
            Err(error) => return self.note_error(&error),
        }
        false
    }

    /// Copies bytes of the current piece to where they belong. Returns whether there was anything to copy.
    fn copy_piece(&mut self, peer: u32, transfer: &mut Transfer<'_>) -> bool {
        let Some(target) = transfer.target(peer) else {
            self.stalled = true;
            return false;
        };
        let bytes = &self.buffer[self.begin..self.end];
        let count = bytes.len().min(self.piece_left).min(target.len());
        target[..count].copy_from_slice(&bytes[..count]);
        transfer.fill(peer, count);
        self.begin += count;
        self.piece_left -= count;
        count > 0
    }

    /// Takes the next frame, or begins the next piece. Returns whether there was one.
    ///
    /// # Errors
    /// If it is invalid.
    fn take_frame(
        &mut self,
        peer: u32,
        stamp: Stamp,
        transfer: &Transfer<'_>,
        received: &mut VecDeque<Frame>,
    ) -> Result<bool, String> {
        let bytes = &self.buffer[self.begin..self.end];
        let Some((header, behind)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(false) };
        let header = Header::decode(header, stamp)?;
        let length = header.length as usize;
        if header.kind == FrameKind::Data {
            self.stalled = !transfer.expects_from(peer);
            if self.stalled {
                return Ok(false);
            }
            transfer.check(&header)?;
            self.piece_left = length;
            self.begin += HEADER_BYTES;
            return Ok(true);
        }
        let Some(payload) = behind.get(..length) else { return Ok(false) };
        received.push_back(Frame { from: peer, header, payload: payload.to_vec() });
        self.begin += HEADER_BYTES + length;
        Ok(true)
    }

    /// Notes an error of reading. Returns whether it was an interruption.
    fn note_error(&mut self, error: &std::io::Error) -> bool {
        match error.kind() {
            ErrorKind::Interrupted => return true,
            ErrorKind::WouldBlock => {}
            _ => self.end(|| format!("has lost its connection ({error})")),
        }
        false
    }
}

impl TcpWire {
    /// `streams` has a connection for each peer.
    pub(in super::super) fn new(stamp: Stamp, streams: Vec<Option<TcpStream>>) -> Self {
        let inputs = streams.iter().map(|_| Input::default()).collect();
        let connections = Arc::new(TcpSender::new(stamp, streams));
        let sender: Arc<dyn Sender> = connections.clone();
        TcpWire { connections, sender, inputs, received: VecDeque::new() }
    }

    /// Reads all that has arrived from `peer`, up to a piece for which nothing is posted.
    fn read(&mut self, peer: u32, transfer: &mut Transfer<'_>) -> Result<(), BadFrame> {
        let connections = Arc::clone(&self.connections);
        loop {
            let input = &mut self.inputs[peer as usize];
            let target = transfer.target(peer).filter(|_| input.piece_left > 0 && input.available() == 0);
            let more = match target {
                Some(target) => {
                    let wanted = target.len().min(input.piece_left);
                    match connections.stream(peer).read(&mut target[..wanted]) {
                        Ok(0) => {
                            input.end(|| "closed its connection in the middle of a transfer".into());
                            false
                        }
                        Ok(bytes) => {
                            input.piece_left -= bytes;
                            transfer.fill(peer, bytes);
                            bytes == wanted
                        }
                        Err(error) => input.note_error(&error),
                    }
                }
                None => input.read_more(connections.stream(peer)),
            };
            self.parse(peer, transfer)?;
            let input = &self.inputs[peer as usize];
            if !more || input.stalled || input.ended.is_some() {
                return Ok(());
            }
        }
    }

    /// Uses the bytes in the buffer as far as possible.
    fn parse(&mut self, peer: u32, transfer: &mut Transfer<'_>) -> Result<(), BadFrame> {
        let (stamp, received) = (self.connections.stamp, &mut self.received);
        let input = &mut self.inputs[peer as usize];
        input.stalled = false;
        loop {
            let goes_on = match input.piece_left {
                0 => input.take_frame(peer, stamp, transfer, received),
                _ => Ok(input.copy_piece(peer, transfer)),
            };
            if !goes_on.map_err(|problem| BadFrame { from: peer, problem })? {
                return Ok(());
            }
        }
    }
}

impl Wire for TcpWire {
    fn sender(&self) -> &Arc<dyn Sender> {
        &self.sender
    }

    fn advance(&mut self, transfer: &mut Transfer<'_>) -> Result<(), BadFrame> {
        for peer in 0..self.connections.size() {
            if self.inputs[peer as usize].available() > 0 {
                self.parse(peer, transfer)?;
            }
        }
        let connections = Arc::clone(&self.connections);
        for peer in connections.peers() {
            if let Err(error) = connections.write(peer, transfer) {
                let how = format!("has lost its connection ({error})");
                self.inputs[peer as usize].deaf = Some(Ended::now(how));
            }
        }
        Ok(())
    }

    fn poll(&mut self, transfer: &mut Transfer<'_>, patience: Duration) -> Result<(), BadFrame> {
        let connections = Arc::clone(&self.connections);
        let mut fds: SmallVec<[PollFd<'_>; 16]> = SmallVec::new();
        let mut polled: SmallVec<[u32; 16]> = SmallVec::new();
        for peer in connections.peers() {
            let input = &self.inputs[peer as usize];
            if input.ended.is_some() {
                continue;
            }
            let mut events = PollFlags::empty();
            events.set(PollFlags::POLLIN, !input.stalled);
            let has_more = transfer.has_for(peer) || !connections.is_flushed(peer);
            events.set(PollFlags::POLLOUT, has_more && input.deaf.is_none());
            // A connection without interest would still report its end, again and again.
            if !events.is_empty() {
                fds.push(PollFd::new(connections.fd(peer), events));
                polled.push(peer);
            }
        }
        // Rounded up: a wait of less than a millisecond must not become a busy loop.
        let milliseconds = u16::try_from(patience.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        if poll(&mut fds, PollTimeout::from(milliseconds)).unwrap_or(0) == 0 {
            return Ok(());
        }
        for (fd, peer) in fds.iter().zip(polled) {
            let readable = PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR;
            if fd.revents().is_some_and(|events| events.intersects(readable)) {
                self.read(peer, transfer)?;
            }
        }
        Ok(())
    }

    fn next_frame(&mut self) -> Option<Frame> {
        self.received.pop_front()
    }

    fn ended(&self, peer: u32) -> Option<&Ended> {
        let input = &self.inputs[peer as usize];
        input.ended.as_ref().or(input.deaf.as_ref())
    }

    /// The kernel has copies of what was sent, and knows no memory to receive into.
    fn abandon(&mut self, _: &mut Transfer<'_>) {}
}
