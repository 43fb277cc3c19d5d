//! UCX: two endpoints to every other rank of a communicator, driven by polling and sleeping on one descriptor.
//!
//! | endpoint | carries |
//! |---|---|
//! | control | small frames, in order; two shorter messages: a *hello* of one byte, and an empty *end* |
//! | payload | pieces of posted buffers, directly from and to their memory; made for the first of them |
//!
//! Each piece of payload has a frame of kind [`Data`](FrameKind::Data) on the control endpoint: the header with epoch,
//! communicator, sequence number and call, whose argument is the length of the piece. The n-th header belongs to the n-th
//! piece, and a piece counts as received once both are there and agree.
//!
//! UCX writes to posted memory until an operation has ended, and one whose peer never answers ends only with its
//! endpoint. Thus there are two: [`abandon`](Wire::abandon) closes the endpoints of payload, and the abort frames that
//! follow take the others. Payload is given to UCX in two places, [`post_sends`] and [`post_receives`]; each post is kept
//! in a [`Peer`] until it has ended.
//!
//! Nothing progresses here but while a rank is in some operation, except for what the devices do.

mod connect;
mod links;
mod tags;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ucx_sys::{Request, Tested, UcxError, Worker};

pub(in super::super) use connect::{connect, open};
use links::{Links, UcxSender, lost};

use super::spin::Spinner;
use super::{BadFrame, Ended, Frame, Sender, Watch, Wire};
use crate::comm::hosts::frame::{FrameKind, Header};
use crate::comm::hosts::transfer::Transfer;

/// Largest piece of payload: few enough headers, and progress is seen in a transfer of minutes.
const PIECE_BYTES: usize = 4 << 20;
/// Longest sleep of a wait that watches a board, while messages are not sent.
const FLUSH_PATIENCE: Duration = Duration::from_millis(1);
/// How long abandoned operations may take to end, before the worker is destroyed.
const ABANDON_PATIENCE: Duration = Duration::from_secs(1);

/// The connections of one rank.
pub(in super::super) struct UcxWire {
    links: Arc<UcxSender>,
    /// The same.
    sender: Arc<dyn Sender>,
    spinner: Spinner,
    /// By rank.
    peers: Vec<Peer>,
    /// Frames that are no headers of pieces.
    received: VecDeque<Frame>,
}

/// The payload on its way to and from one peer.
#[derive(Default)]
struct Peer {
    ended: Option<Ended>,
    /// Number of pieces that were posted so far, by direction.
    sent: u64,
    expected: u64,
    sends: VecDeque<Piece>,
    receives: VecDeque<Piece>,
    /// The headers of pieces that are expected next, as they have arrived.
    headers: VecDeque<Header>,
}

/// A posted piece.
struct Piece {
    bytes: usize,
    /// Where they are.
    address: usize,
    state: State,
}

enum State {
    Posted(Request),
    Done,
    /// The connection has ended.
    Lost,
}

impl Piece {
    /// Tests whether it has ended. Returns the result at the first time.
    fn test<T>(&mut self, test: impl FnOnce(Request) -> Tested<T>) -> Option<Result<T, UcxError>> {
        let request = match std::mem::replace(&mut self.state, State::Done) {
            State::Posted(request) => request,
            state => {
                self.state = state;
                return None;
            }
        };
        match test(request) {
            Tested::Pending(request) => {
                self.state = State::Posted(request);
                None
            }
            Tested::Done(result) => {
                if result.is_err() {
                    self.state = State::Lost;
                }
                Some(result)
            }
        }
    }
}

impl Peer {
    /// Notes how the connection has ended, unless that is known.
    fn end(&mut self, error: &UcxError) {
        self.ended.get_or_insert_with(|| lost(&error.message));
    }

    /// Whether UCX may use memory of payload.
    fn uses_memory(&self) -> bool {
        let pieces = || self.sends.iter().chain(&self.receives);
        pieces().any(|piece| matches!(piece.state, State::Posted(_)))
    }

    /// Tests all pieces. Returns whether one has ended.
    ///
    /// # Errors
    /// If one has another length than was posted.
    fn test(&mut self, worker: &mut Worker, transfer: &mut Transfer<'_>, rank: u32) -> Result<bool, String> {
        let mut failure = None;
        let mut any = false;
        for piece in &mut self.sends {
            if let Some(Err(error)) = piece.test(|request| worker.test_send(request)) {
                failure = Some(error);
            }
        }
        while let Some(Piece { state: State::Done, bytes, .. }) = self.sends.front() {
            any = true;
            transfer.complete_send(rank, *bytes);
            self.sends.pop_front();
        }
        for piece in &mut self.receives {
            let bytes = match piece.test(|request| worker.test_receive(request)) {
                None => continue,
                Some(Ok(bytes)) => bytes,
                Some(Err(error)) if error.is_truncated() => usize::MAX,
                Some(Err(error)) => {
                    failure = Some(error);
                    continue;
                }
            };
            any = true;
            match bytes.cmp(&piece.bytes) {
                std::cmp::Ordering::Equal => {}
                std::cmp::Ordering::Less => return Err(wrong_length(&bytes.to_string(), piece.bytes)),
                std::cmp::Ordering::Greater => return Err(wrong_length("more", piece.bytes)),
            }
        }
        if let Some(error) = failure {
            self.end(&error);
        }
        Ok(any)
    }

    /// Completes the received pieces that have their header, in order.
    ///
    /// # Errors
    /// If a header belongs to another operation, or another length.
    fn match_headers(&mut self, transfer: &mut Transfer<'_>, rank: u32) -> Result<(), String> {
        while let (Some(Piece { state: State::Done, bytes, address }), Some(header)) =
            (self.receives.front(), self.headers.front())
        {
            transfer.check(header)?;
            let Argument { length, checksum } = Argument::decode(header.argument);
            if length as usize != *bytes {
                return Err(wrong_length(&length.to_string(), *bytes));
            }
            // SAFETY: UCX has filled this memory, and the transfer borrows it until the piece is complete.
            let payload = unsafe { std::slice::from_raw_parts(*address as *const u8, *bytes) };
            Header { length, checksum, ..*header }.check_payload(payload)?;
            transfer.complete_receive(rank, *bytes);
            self.headers.pop_front();
            self.receives.pop_front();
        }
        Ok(())
    }
}

/// What the header of a piece says of it: the header itself has no payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Argument {
    length: u32,
    checksum: u32,
}

impl Argument {
    fn encode(self) -> u64 {
        u64::from(self.checksum) << 32 | u64::from(self.length)
    }

    fn decode(argument: u64) -> Self {
        Argument { length: argument as u32, checksum: (argument >> 32) as u32 }
    }
}

fn wrong_length(found: &str, expected: usize) -> String {
    format!("a piece of {found} bytes where one of {expected} is expected")
}

impl UcxWire {
    fn new(links: Arc<UcxSender>, spinner: Spinner) -> Self {
        let peers = (0..links.size()).map(|_| Peer::default()).collect();
        let sender: Arc<dyn Sender> = links.clone();
        UcxWire { links, sender, spinner, peers, received: VecDeque::new() }
    }

    /// Posts what is new in `transfer`.
    fn post(&mut self, transfer: &mut Transfer<'_>) {
        for peer in 0..self.links.size() {
            if !transfer.expects_from(peer) && !transfer.has_for(peer) {
                continue;
            }
            let mut links = self.links.lock();
            if links.is_closed() {
                return;
            }
            let state = &mut self.peers[peer as usize];
            // Both ends make it before they post, so that either can close it.
            if links.open_payload(peer).is_none() {
                state.ended.get_or_insert_with(|| lost("UCX makes no endpoint"));
                return;
            }
            post_receives(&mut links, peer, state, transfer);
            post_sends(&mut links, peer, state, transfer, self.links.stamp);
        }
    }

    /// Progresses everything, and takes what has arrived or has ended. Returns whether there was anything.
    fn turn(&mut self, transfer: &mut Transfer<'_>) -> Result<bool, BadFrame> {
        let mut links = self.links.lock();
        let mut any = links.progress();
        while let Some((from, message)) = links.next_message() {
            let decoded = links::decode(&message, self.links.stamp);
            let (header, payload) = decoded.map_err(|problem| BadFrame { from, problem })?;
            match header.kind {
                FrameKind::Data => self.peers[from as usize].headers.push_back(header),
                _ => self.received.push_back(Frame { from, header, payload: payload.to_vec() }),
            }
            any = true;
        }
        for (rank, peer) in (0..).zip(&mut self.peers) {
            if peer.ended.is_none() {
                peer.ended = links.end_of(rank);
                any |= peer.ended.is_some();
            }
            let Some(worker) = links.worker() else { continue };
            let bad = |problem| BadFrame { from: rank, problem };
            any |= peer.test(worker, transfer, rank).map_err(bad)?;
            peer.match_headers(transfer, rank).map_err(bad)?;
        }
        Ok(any)
    }
}

fn post_receives(links: &mut Links, rank: u32, peer: &mut Peer, transfer: &mut Transfer<'_>) {
    let (_, ticket) = links.tickets(rank);
    let Some(worker) = links.worker() else { return };
    while let Some(memory) = transfer.take_receive(rank, PIECE_BYTES) {
        let tag = tags::piece(ticket, peer.expected);
        peer.expected = peer.expected.wrapping_add(1);
        let (bytes, address) = (memory.len(), memory.as_ptr().addr());
        // SAFETY: the transfer borrows the memory, and whoever owns the transfer drives this wire until the request has
        // ended, or abandons it, which waits for the same. Nobody else has a reference: it was taken.
        let state = match unsafe { worker.receive(tag, memory.as_mut_ptr(), bytes) } {
            Ok(request) => State::Posted(request),
            Err(error) => {
                peer.end(&error);
                State::Lost
            }
        };
        peer.receives.push_back(Piece { bytes, address, state });
    }
}

fn post_sends(
    links: &mut Links,
    rank: u32,
    peer: &mut Peer,
    transfer: &mut Transfer<'_>,
    stamp: crate::comm::hosts::frame::Stamp,
) {
    let (ticket, _) = links.tickets(rank);
    while let Some(memory) = transfer.take_send(rank, PIECE_BYTES) {
        let (bytes, address) = (memory.len(), memory.as_ptr().addr());
        let Header { length, checksum, .. } = transfer.header().with_payload(memory);
        let argument = Argument { length, checksum }.encode();
        links.send_frame(rank, stamp, transfer.header().with_argument(argument), &[]);
        let tag = tags::piece(ticket, peer.sent);
        peer.sent = peer.sent.wrapping_add(1);
        let endpoint = links.open_payload(rank);
        let (Some(endpoint), Some(worker)) = (endpoint, links.worker()) else { return };
        // SAFETY: as for receives; the references to the memory that others may have are shared ones.
        let state = match unsafe { worker.send(endpoint, tag, memory.as_ptr(), bytes) } {
            Ok(request) => request.map_or(State::Done, State::Posted),
            // Its bytes stay missing.
            Err(error) => {
                peer.end(&error);
                State::Lost
            }
        };
        peer.sends.push_back(Piece { bytes, address, state });
    }
}

impl Wire for UcxWire {
    fn sender(&self) -> &Arc<dyn Sender> {
        &self.sender
    }

    fn advance(&mut self, transfer: &mut Transfer<'_>) -> Result<(), BadFrame> {
        self.post(transfer);
        self.turn(transfer).map(drop)
    }

    fn poll(
        &mut self,
        transfer: &mut Transfer<'_>,
        patience: Duration,
        watch: &Watch<'_>,
    ) -> Result<bool, BadFrame> {
        if patience.is_zero() {
            return self.turn(transfer);
        }
        let mut spin = self.spinner.begin(patience);
        while !watch.is_over() && !self.turn(transfer)? {
            if !self.spinner.again(&mut spin) {
                match !watch.is_idle() && self.links.is_flushed() {
                    true => watch.sleep(patience),
                    false if watch.is_idle() => self.links.sleep(patience),
                    false => self.links.sleep(patience.min(FLUSH_PATIENCE)),
                }
                return self.turn(transfer);
            }
        }
        Ok(true)
    }

    fn set_oversubscribed(&mut self) {
        self.spinner.stop();
    }

    fn next_frame(&mut self) -> Option<Frame> {
        self.received.pop_front()
    }

    fn ended(&self, peer: u32) -> Option<&Ended> {
        self.peers[peer as usize].ended.as_ref()
    }

    /// Cancels the receives, and closes the endpoints of payload, which ends the rest. Should UCX not say so in time, it
    /// loses the worker.
    fn abandon(&mut self, transfer: &mut Transfer<'_>) {
        let uses_memory = |peers: &[Peer]| peers.iter().any(Peer::uses_memory);
        if !uses_memory(&self.peers) {
            return;
        }
        let mut links = self.links.lock();
        for (rank, peer) in (0..).zip(&self.peers).filter(|(_, peer)| peer.uses_memory()) {
            for piece in &peer.receives {
                if let (State::Posted(request), Some(worker)) = (&piece.state, links.worker()) {
                    worker.cancel(request);
                }
            }
            links.close_payload(rank);
        }
        drop(links);
        let deadline = Instant::now() + ABANDON_PATIENCE;
        while uses_memory(&self.peers) && Instant::now() < deadline {
            let mut links = self.links.lock();
            let any = links.progress();
            for (rank, peer) in (0..).zip(&mut self.peers) {
                // Another error is known already.
                let _ = links.worker().map(|worker| peer.test(worker, transfer, rank));
            }
            drop(links);
            if !any && uses_memory(&self.peers) {
                self.links.sleep(Duration::from_millis(1));
            }
        }
        if uses_memory(&self.peers) {
            self.links.lock().destroy();
        }
        for peer in &mut self.peers {
            (peer.sends, peer.receives) = Default::default();
        }
    }
}
