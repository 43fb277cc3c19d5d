//! TCP: one connection or several to every other rank of a communicator, driven without blocking.
//!
//! Small frames use the first connection to a peer. The pieces of large payloads use all of them in turn, so both ends
//! know which one carries the next piece: networks that limit each connection, as those of clouds do, carry more that
//! way. A peer whose connections do not all work has failed.
//!
//! A piece of payload for which nothing is posted yet stays in the connection, which is not read until then: its sender
//! is ahead of this rank, and waits when the kernel's buffers are full.

pub(in super::super) mod congestion;
mod dead_link;
mod input;
mod sender;
#[cfg(test)]
mod tests;
mod unconfirmed;

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use smallvec::SmallVec;

use input::{Input, Place, Turn};
use sender::TcpSender;
pub(in super::super) use sender::configure;

use super::spin::Spinner;
use super::{BadFrame, Ended, Frame, Sender, Watch, Wire};
use crate::comm::hosts::frame::{PIECE_BYTES, Stamp};
use crate::comm::hosts::transfer::Transfer;

/// With more streams than this, it is faster to ask which of them can be read than to try all.
const FEW_STREAMS: usize = 4;
/// Time between two checks whether the other hosts still answer.
const LINK_CHECK: Duration = Duration::from_millis(500);

/// A wait that watches a board reads the streams at one of so many attempts.
const WATCHED_ATTEMPTS: u32 = 16;
/// Longest sleep of such a wait while a stream has no room.
const FULL_PATIENCE: Duration = Duration::from_millis(1);

/// The connections of a rank that were just made.
pub(in super::super) struct Streams {
    /// By rank, the same number for each; none at the own rank.
    pub(in super::super) by_rank: Vec<Vec<TcpStream>>,
    pub(in super::super) spinner: Spinner,
}

/// The connections of one rank.
pub(in super::super) struct TcpWire {
    connections: Arc<TcpSender>,
    /// The same.
    sender: Arc<dyn Sender>,
    /// By rank.
    peers: Vec<Peer>,
    /// Frames that are no pieces of a transfer, in the order of their arrival.
    received: VecDeque<Frame>,
    spinner: Spinner,
    /// When the links were last checked.
    checked: Instant,
}

/// What comes from a peer, and whether something can go there.
#[derive(Default)]
struct Peer {
    /// By stream.
    inputs: SmallVec<[Input; 1]>,
    turn: Turn,
    /// Streams without room for what is to be sent.
    full: SmallVec<[usize; 2]>,
    /// Nothing can be written any more, for this reason, although there may be bytes to read.
    deaf: Option<Ended>,
}

impl Peer {
    /// The streams to read: that of small frames, and that of the next piece.
    fn readable(&self) -> impl Iterator<Item = usize> + use<> {
        let piece = Some(self.turn.stream).filter(|stream| *stream > 0);
        std::iter::once(0).take(self.inputs.len().min(1)).chain(piece)
    }

    /// Whether something may arrive on this stream that can be used.
    fn is_open(&self, stream: usize) -> bool {
        let input = &self.inputs[stream];
        !input.stalled && input.ended.is_none()
    }
}

impl TcpWire {
    pub(in super::super) fn new(stamp: Stamp, streams: Streams) -> Self {
        let Streams { by_rank, spinner } = streams;
        let inputs = |streams: &Vec<TcpStream>| streams.iter().map(|_| Input::default()).collect();
        let peers =
            by_rank.iter().map(|streams| Peer { inputs: inputs(streams), ..Peer::default() }).collect();
        let connections = Arc::new(TcpSender::new(stamp, by_rank));
        let sender: Arc<dyn Sender> = connections.clone();
        let received = VecDeque::new();
        TcpWire { connections, sender, peers, received, spinner, checked: Instant::now() }
    }

    /// Reads what has arrived on a stream, at most to the end of a piece. Returns whether there was anything.
    fn read(&mut self, peer: u32, stream: usize, transfer: &mut Transfer<'_>) -> Result<bool, BadFrame> {
        let input = &mut self.peers[peer as usize].inputs[stream];
        let bytes = input.read(peer, self.connections.stream(peer, stream), transfer);
        let has_ended = input.ended.is_some();
        if bytes > 0 {
            self.parse(peer, stream, transfer)?;
        }
        Ok(bytes > 0 || has_ended)
    }

    /// Uses the bytes that were read from a stream as far as possible.
    fn parse(&mut self, peer: u32, stream: usize, transfer: &mut Transfer<'_>) -> Result<(), BadFrame> {
        let Peer { inputs, turn, .. } = &mut self.peers[peer as usize];
        let place = Place { peer, stream, streams: inputs.len(), stamp: self.connections.stamp };
        let parsed = inputs[stream].parse(&place, turn, transfer, &mut self.received);
        parsed.map_err(|problem| BadFrame { from: peer, problem })
    }

    /// Sends as much as there is room for, a few pieces to each peer.
    fn write(&mut self, transfer: &mut Transfer<'_>) {
        for (peer, state) in (0..).zip(&mut self.peers).filter(|(_, state)| !state.inputs.is_empty()) {
            match self.connections.write(peer, transfer) {
                Ok(full) => state.full = full,
                Err(error) => {
                    state.full.clear();
                    state.deaf = Some(Ended::now(format!("has lost its connection ({error})")));
                }
            }
        }
    }

    /// Reads what has arrived. Returns whether there was anything.
    fn try_all(&mut self, transfer: &mut Transfer<'_>) -> Result<bool, BadFrame> {
        if self.peers.len() > FEW_STREAMS + 1 {
            return self.move_ready(transfer, 0);
        }
        let mut any = false;
        for peer in 0..self.peers.len() as u32 {
            let state = &self.peers[peer as usize];
            for stream in state.readable() {
                if self.peers[peer as usize].is_open(stream) {
                    any |= self.read(peer, stream, transfer)?;
                }
            }
        }
        Ok(any)
    }

    /// Waits for at most this many milliseconds until something can move, and moves it. Returns whether there was
    /// anything.
    fn move_ready(&mut self, transfer: &mut Transfer<'_>, milliseconds: u16) -> Result<bool, BadFrame> {
        let connections = Arc::clone(&self.connections);
        let mut fds: SmallVec<[PollFd<'_>; 16]> = SmallVec::new();
        let mut polled: SmallVec<[(u32, usize); 16]> = SmallVec::new();
        for (peer, state) in (0..).zip(&self.peers) {
            for stream in 0..state.inputs.len() {
                let mut events = PollFlags::empty();
                let reads = state.readable().any(|readable| readable == stream) && state.is_open(stream);
                events.set(PollFlags::POLLIN, reads);
                events.set(PollFlags::POLLOUT, state.full.contains(&stream));
                // A connection without interest would still report its end, again and again.
                if !events.is_empty() && state.inputs[stream].ended.is_none() {
                    fds.push(PollFd::new(connections.fd(peer, stream), events));
                    polled.push((peer, stream));
                }
            }
        }
        if poll(&mut fds, PollTimeout::from(milliseconds)).unwrap_or(0) == 0 {
            if milliseconds > 0 && self.checked.elapsed() >= LINK_CHECK {
                self.check_links();
            }
            return Ok(false);
        }
        let mut can_write = false;
        for (fd, (peer, stream)) in fds.iter().zip(polled) {
            let Some(events) = fd.revents() else { continue };
            can_write |= events.contains(PollFlags::POLLOUT);
            if events.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
                self.read(peer, stream, transfer)?;
            }
        }
        if can_write {
            self.write(transfer);
        }
        Ok(true)
    }
}

impl TcpWire {
    /// Notes the connections to hosts that do not answer any more.
    #[cold]
    fn check_links(&mut self) {
        self.checked = Instant::now();
        for (peer, state) in (0..).zip(&mut self.peers) {
            if state.deaf.is_some() {
                continue;
            }
            let mut inputs = state.inputs.iter_mut().enumerate();
            let silence =
                inputs.find_map(|(stream, input)| input.link.silence(self.connections.stream(peer, stream)));
            if let Some(silence) = silence {
                let seconds = silence.as_secs_f32();
                state.deaf = Some(Ended::now(format!(
                    "does not answer: its host has acknowledged nothing for {seconds:.1} s"
                )));
            }
        }
    }
}

impl Wire for TcpWire {
    fn sender(&self) -> &Arc<dyn Sender> {
        &self.sender
    }

    fn advance(&mut self, transfer: &mut Transfer<'_>) -> Result<(), BadFrame> {
        for peer in 0..self.peers.len() as u32 {
            // Pieces come from the streams in turn.
            loop {
                let before = self.peers[peer as usize].turn.position;
                for stream in 0..self.peers[peer as usize].inputs.len() {
                    if self.peers[peer as usize].inputs[stream].available() > 0 {
                        self.parse(peer, stream, transfer)?;
                    }
                }
                if self.peers[peer as usize].turn.position == before {
                    break;
                }
            }
        }
        self.write(transfer);
        Ok(())
    }

    fn poll(
        &mut self,
        transfer: &mut Transfer<'_>,
        patience: Duration,
        watch: &Watch<'_>,
    ) -> Result<bool, BadFrame> {
        // In large transfers attempts would find a little each time, which costs more than to be woken for more.
        let patience_to_spin = if transfer.left() <= PIECE_BYTES { patience } else { Duration::ZERO };
        let mut spin = self.spinner.begin(patience_to_spin);
        for attempt in 0u32.. {
            // What a watch waits for comes first; then little is of use that comes from elsewhere.
            let reads = watch.is_idle() || attempt % WATCHED_ATTEMPTS == 0;
            if watch.is_over() || reads && self.try_all(transfer)? {
                return Ok(true);
            }
            if !self.spinner.again(&mut spin) {
                break;
            }
        }
        let is_flushed = |(peer, state): (u32, &Peer)| {
            let is_empty = || !transfer.has_for(peer) && self.connections.is_flushed(peer);
            state.inputs.is_empty() || is_empty()
        };
        // What can be sent at once is sent by the next `advance`.
        let can_send = |(peer, state): (u32, &Peer)| {
            let is_open = state.full.is_empty() && state.deaf.is_none();
            is_open && !is_flushed((peer, state))
        };
        if patience.is_zero() || (0..).zip(&self.peers).any(can_send) {
            return Ok(false);
        }
        let patience = match watch.is_idle() {
            true => patience,
            false if (0..).zip(&self.peers).all(is_flushed) => {
                watch.sleep(patience);
                return Ok(true);
            }
            false => patience.min(FULL_PATIENCE),
        };
        // Rounded up: a wait of less than a millisecond must not become a busy loop.
        let milliseconds = u16::try_from(patience.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        self.move_ready(transfer, milliseconds)
    }

    fn next_frame(&mut self) -> Option<Frame> {
        self.received.pop_front()
    }

    fn ended(&self, peer: u32) -> Option<&Ended> {
        let peer = &self.peers[peer as usize];
        peer.inputs.iter().find_map(|input| input.ended.as_ref()).or(peer.deaf.as_ref())
    }

    /// The kernel has copies of what was sent, and knows no memory to receive into.
    fn abandon(&mut self, _: &mut Transfer<'_>) {}

    fn set_oversubscribed(&mut self) {
        self.spinner.stop();
    }
}
