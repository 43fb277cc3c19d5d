//! The links of a communicator to its other ranks, their control messages, and who may use the worker when.
//!
//! A worker is used by one thread at a time: whoever holds the lock of [`UcxSender`]. Nobody sleeps with it. A thread
//! that sends while another one sleeps wakes it, because what it has begun may need progress.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ucx_sys::{EndpointId, Request, Tested, Worker};

use super::tags;
use crate::comm::hosts::frame::{ARRIVAL_BYTES, BUNDLE_BYTES, HEADER_BYTES, Header, Stamp};
use crate::comm::hosts::wire::{Ended, Sender};

/// How long an abort waits until its frames are sent.
const ABORT_PATIENCE: Duration = Duration::from_millis(200);
/// How long a communicator that is dropped waits for the ends of its peers, once all it has sent has been taken.
const END_PATIENCE: Duration = Duration::from_secs(1);
/// Longest sleep while connections are closed.
const CLOSE_SLICE: Duration = Duration::from_millis(5);
/// How often a worker progresses before what has arrived is used.
const ROUNDS: usize = 16;
/// The longest message on a control endpoint.
const MOST_BYTES: usize =
    HEADER_BYTES + if ARRIVAL_BYTES > BUNDLE_BYTES { ARRIVAL_BYTES } else { BUNDLE_BYTES };
/// Says that the sender has connected.
const HELLO: &[u8] = &[1];
/// Says that the sender sends nothing more.
const END: &[u8] = &[];

/// The links of one communicator, for its own thread and whoever shares the sending side.
pub(super) struct UcxSender {
    pub(super) stamp: Stamp,
    size: u32,
    /// A copy of the worker's descriptor, to sleep on without the lock.
    events: OwnedFd,
    links: Mutex<Links>,
}

/// See the [module](self).
pub(super) struct Links {
    /// `None` once all connections are closed.
    worker: Option<Worker>,
    /// By rank; none at the own one.
    links: Vec<Option<Link>>,
    /// The ranks whose messages have these tickets.
    senders: HashMap<u64, u32>,
    outgoing: Vec<Outgoing>,
    /// Frames that have arrived, with their ranks.
    arrived: VecDeque<(u32, Vec<u8>)>,
    /// Nothing is sent any more.
    closed: bool,
    /// Number of threads that sleep on the descriptor.
    sleepers: u32,
}

/// The link to one peer.
struct Link {
    /// The address of its worker.
    address: Vec<u8>,
    control: EndpointId,
    payload: Option<EndpointId>,
    /// The tickets of messages to it and from it.
    ticket_to: u64,
    ticket_from: u64,
    /// Number of messages to it that are not sent.
    unsent: usize,
    /// Messages of which only the beginning has arrived, and those behind them.
    arriving: VecDeque<Arriving>,
    has_greeted: bool,
    has_ended: bool,
}

/// A message that is being sent. UCX reads its bytes.
struct Outgoing {
    peer: u32,
    bytes: Vec<u8>,
    request: Request,
}

/// A message that is being received. UCX writes its bytes.
struct Arriving {
    bytes: Vec<u8>,
    /// `None` once it is there.
    request: Option<Request>,
}

/// What a rank must know of a peer to connect.
pub(super) struct Contact {
    pub(super) address: Vec<u8>,
    pub(super) ticket_to: u64,
    pub(super) ticket_from: u64,
}

/// Header and payload of a frame.
///
/// # Errors
/// What is wrong with the bytes.
pub(super) fn decode(message: &[u8], stamp: Stamp) -> Result<(Header, &[u8]), String> {
    let (header, payload) = message
        .split_first_chunk::<HEADER_BYTES>()
        .ok_or_else(|| format!("a message of {} bytes, which is no frame", message.len()))?;
    let header = Header::decode(header, stamp)?;
    if header.length as usize != payload.len() {
        return Err(format!("a frame of {} bytes where its header says {}", payload.len(), header.length));
    }
    header.check_payload(payload)?;
    Ok((header, payload))
}

impl Links {
    /// Connects `worker` with the peers that have a contact, by rank.
    ///
    /// # Errors
    /// The rank for which UCX refuses, and its reason.
    pub(super) fn connect(
        mut worker: Worker,
        contacts: Vec<Option<Contact>>,
    ) -> Result<Self, (u32, ucx_sys::UcxError)> {
        let mut senders = HashMap::new();
        let mut links = Vec::with_capacity(contacts.len());
        for (rank, contact) in (0..).zip(contacts) {
            let Some(Contact { address, ticket_to, ticket_from }) = contact else {
                links.push(None);
                continue;
            };
            // SAFETY: the address was published by a rank of this run, whose UCX is compatible, with a checksum.
            let control = unsafe { worker.connect(&address) }.map_err(|error| (rank, error))?;
            senders.insert(ticket_from, rank);
            links.push(Some(Link {
                address,
                control,
                payload: None,
                ticket_to,
                ticket_from,
                unsent: 0,
                arriving: VecDeque::new(),
                has_greeted: false,
                has_ended: false,
            }));
        }
        let (outgoing, arrived) = (Vec::new(), VecDeque::new());
        Ok(Links { worker: Some(worker), links, senders, outgoing, arrived, closed: false, sleepers: 0 })
    }

    /// Nothing can be sent any more.
    pub(super) fn is_closed(&self) -> bool {
        self.closed || self.worker.is_none()
    }

    /// The worker, unless all connections are closed.
    pub(super) fn worker(&mut self) -> Option<&mut Worker> {
        self.worker.as_mut()
    }

    /// The ranks with a link.
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let present: Vec<bool> = self.links.iter().map(Option::is_some).collect();
        (0..).zip(present).filter_map(|(rank, present)| present.then_some(rank))
    }

    fn link(&mut self, peer: u32) -> &mut Link {
        self.links[peer as usize].as_mut().expect("a link to every other rank")
    }

    /// The tickets of messages to `peer` and from it.
    pub(super) fn tickets(&mut self, peer: u32) -> (u64, u64) {
        let link = self.link(peer);
        (link.ticket_to, link.ticket_from)
    }

    /// The endpoint of payload to `peer`, which is made now if there is none. `None` if there can be none.
    pub(super) fn open_payload(&mut self, peer: u32) -> Option<EndpointId> {
        let link = self.links[peer as usize].as_mut()?;
        if link.payload.is_none() {
            // SAFETY: as for the control endpoint.
            link.payload = unsafe { self.worker.as_mut()?.connect(&link.address) }.ok();
        }
        link.payload
    }

    /// Closes the endpoint of payload to `peer`, so that its operations end.
    pub(super) fn close_payload(&mut self, peer: u32) {
        let payload = self.link(peer).payload;
        if let (Some(worker), Some(payload)) = (&mut self.worker, payload) {
            worker.close(payload);
        }
    }

    /// Sends a frame after those that were sent before. It is lost if the connection has ended.
    pub(super) fn send_frame(&mut self, peer: u32, stamp: Stamp, header: Header, payload: &[u8]) {
        let header = header.with_payload(payload).encode(stamp);
        self.send(peer, [&header[..], payload].concat());
    }

    /// Greets all peers, which proves to them that the connection works.
    pub(super) fn greet(&mut self) {
        self.peers().for_each(|peer| self.send(peer, HELLO.to_vec()));
    }

    fn send(&mut self, peer: u32, bytes: Vec<u8>) {
        if self.is_closed() {
            return;
        }
        let link = self.links[peer as usize].as_mut().expect("a link to every other rank");
        let Some(worker) = &mut self.worker else { return };
        // SAFETY: the bytes are on the heap. If the operation goes on they are kept in `outgoing` until it is done; and if
        // that ends before, the worker is dropped first, or both are leaked.
        let sent = unsafe { worker.send(link.control, link.ticket_to, bytes.as_ptr(), bytes.len()) };
        // Otherwise it is sent, or the connection has ended, which is noted elsewhere.
        if let Ok(Some(request)) = sent {
            link.unsent += 1;
            self.outgoing.push(Outgoing { peer, bytes, request });
        }
        if self.sleepers > 0 {
            worker.signal();
        }
    }

    /// Progresses all operations, and takes what has arrived. Returns whether anything has happened.
    pub(super) fn progress(&mut self) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        let rounds = (0..ROUNDS).take_while(|_| worker.progress()).count();
        let any = self.take_messages() || rounds > 0;
        if any {
            self.finish_messages();
            self.forget_sent();
        }
        any
    }

    /// Begins to receive the messages in the worker's queue.
    fn take_messages(&mut self) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        let mut any = false;
        while let Some(message) = worker.probe(0, tags::PAYLOAD) {
            any = true;
            let sender = self.senders.get(&message.tag).copied();
            // A longer message, or one of an unauthenticated process, is received in part, which is an error.
            let most = if sender.is_some() { message.bytes.min(MOST_BYTES + 1) } else { 0 };
            let mut bytes = vec![0; most];
            // SAFETY: the bytes are on the heap, and are kept in `arriving`, as those in `outgoing`. No byte of an
            // unknown sender is written.
            let request = unsafe { worker.receive_message(message, bytes.as_mut_ptr(), most) };
            let Ok(request) = request else { continue };
            match sender.and_then(|sender| self.links[sender as usize].as_mut()) {
                Some(link) => link.arriving.push_back(Arriving { bytes, request: Some(request) }),
                // SAFETY: there is no memory.
                None => unsafe { worker.forget(request) },
            }
        }
        any
    }

    /// Hands over the messages that are there, in the order of each peer.
    fn finish_messages(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        for (rank, link) in (0..).zip(&mut self.links) {
            let Some(link) = link else { continue };
            for message in &mut link.arriving {
                let Some(request) = message.request.take() else { continue };
                match worker.test_receive(request) {
                    Tested::Pending(request) => message.request = Some(request),
                    Tested::Done(Ok(length)) => message.bytes.truncate(length),
                    // It was too long: still so long that it is refused. Or the connection has ended.
                    Tested::Done(Err(_)) => {}
                }
            }
            while let Some(Arriving { request: None, bytes }) = link.arriving.front_mut() {
                let bytes = std::mem::take(bytes);
                link.arriving.pop_front();
                match bytes.as_slice() {
                    END => link.has_ended = true,
                    HELLO => link.has_greeted = true,
                    _ => self.arrived.push_back((rank, bytes)),
                }
            }
        }
    }

    /// Drops the messages that are sent.
    fn forget_sent(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        for Outgoing { peer, bytes, request } in std::mem::take(&mut self.outgoing) {
            match worker.test_send(request) {
                Tested::Pending(request) => self.outgoing.push(Outgoing { peer, bytes, request }),
                Tested::Done(_) => {
                    if let Some(link) = &mut self.links[peer as usize] {
                        link.unsent -= 1;
                    }
                }
            }
        }
    }

    /// The next frame that has arrived, with its rank.
    pub(super) fn next_message(&mut self) -> Option<(u32, Vec<u8>)> {
        self.arrived.pop_front()
    }

    /// Whether all messages are sent.
    pub(super) fn has_sent_all(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// The peers that have not greeted.
    pub(super) fn silent_peers(&self) -> Vec<u32> {
        let silent = |link: &Option<Link>| link.as_ref().is_some_and(|link| !link.has_greeted);
        (0..).zip(&self.links).filter_map(|(rank, link)| silent(link).then_some(rank)).collect()
    }

    /// Why the connection to `peer` cannot be used any more, if so.
    pub(super) fn failure(&self, peer: u32) -> Option<String> {
        let (worker, link) = (self.worker.as_ref()?, self.links[peer as usize].as_ref()?);
        worker.failure(link.control).or_else(|| worker.failure(link.payload?))
    }

    /// How the connection to `peer` has ended, if it has.
    pub(super) fn end_of(&self, peer: u32) -> Option<Ended> {
        let link = self.links[peer as usize].as_ref()?;
        if link.has_ended {
            return Some(Ended::now("closed its connection"));
        }
        self.failure(peer).map(|failure| lost(&failure))
    }

    /// Ends all connections at once, and with them all use of memory.
    pub(super) fn destroy(&mut self) {
        // First: UCX uses the bytes of messages until then.
        drop(self.worker.take());
        self.outgoing.clear();
        self.links.iter_mut().flatten().for_each(|link| link.arriving.clear());
    }

    /// Leaves the connections to the end of the process, with the bytes of their messages.
    fn leak(&mut self) {
        std::mem::forget(self.worker.take());
        std::mem::forget(std::mem::take(&mut self.outgoing));
        for link in self.links.iter_mut().flatten() {
            std::mem::forget(std::mem::take(&mut link.arriving));
        }
    }
}

impl Drop for Links {
    /// They were not closed: this is a forked child, and they are the parent's; or the rank has failed to connect.
    fn drop(&mut self) {
        self.leak();
    }
}

/// The end of a connection that has failed.
pub(super) fn lost(failure: &str) -> Ended {
    Ended::now(format!("has lost its connection ({failure})"))
}

impl UcxSender {
    /// `events` is a copy of the worker's descriptor.
    pub(super) fn new(stamp: Stamp, events: OwnedFd, links: Links) -> Self {
        let size = links.links.len() as u32;
        UcxSender { stamp, size, events, links: Mutex::new(links) }
    }

    /// Number of ranks.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Whether all messages are sent.
    pub(super) fn is_flushed(&self) -> bool {
        self.lock().has_sent_all()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until there is something to progress, for at most `patience`.
    pub(super) fn sleep(&self, patience: Duration) {
        {
            let mut links = self.lock();
            match links.worker.as_mut().map(Worker::arm) {
                Some(Ok(false)) => return,
                // Without events, time passes.
                Some(Ok(true) | Err(_)) | None => links.sleepers += 1,
            }
        }
        // Rounded up: a wait of less than a millisecond must not become a busy loop.
        let milliseconds = u16::try_from(patience.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        let mut fds = [PollFd::new(self.events.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut fds, PollTimeout::from(milliseconds));
        self.lock().sleepers -= 1;
    }

    /// Progresses until `done`, for at most `patience`. Returns whether it is done.
    pub(super) fn drive(&self, patience: Duration, done: impl Fn(&Links) -> bool) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            let mut links = self.lock();
            let any = links.progress();
            if done(&links) {
                return true;
            }
            drop(links);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if !any {
                self.sleep(left.min(CLOSE_SLICE));
            }
        }
    }
}

impl Sender for UcxSender {
    fn queue(&self, peer: u32, header: Header, payload: &[u8]) {
        self.lock().send_frame(peer, self.stamp, header, payload);
    }

    fn is_flushed(&self, peer: u32) -> bool {
        self.lock().link(peer).unsent == 0
    }

    fn abort(&self, header: Header, payload: &[u8]) {
        let mut links = self.lock();
        for peer in links.peers() {
            links.send_frame(peer, self.stamp, header, payload);
            links.send(peer, END.to_vec());
        }
        links.closed = true;
        drop(links);
        self.drive(ABORT_PATIENCE, Links::has_sent_all);
    }

    /// A worker that is destroyed takes with it what its host has not delivered, and only the peer's program can say that
    /// it was. So this waits for the end of every peer. One that is busy may take longer than `patience`: then the
    /// connections stay open until the process ends.
    fn close(&self, patience: Duration) {
        let mut links = self.lock();
        links.peers().for_each(|peer| links.send(peer, END.to_vec()));
        links.closed = true;
        drop(links);
        let is_sent = self.drive(patience, |links| links.outgoing.is_empty());
        let is_over = is_sent
            && self.drive(patience.min(END_PATIENCE), |links| {
                links.peers().all(|peer| links.end_of(peer).is_some())
            });
        let mut links = self.lock();
        if is_over { links.destroy() } else { links.leak() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::hosts::frame::FrameKind;

    #[test]
    fn messages_that_are_no_frames_are_refused() {
        let stamp = Stamp { epoch: 1, communicator: 2 };
        let header = Header::new(FrameKind::Arrival, 3, [0; 4]).with_payload(b"abcde");
        let bytes = [&header.encode(stamp)[..], b"abcde"].concat();
        assert_eq!(decode(&bytes, stamp), Ok((header, &b"abcde"[..])));
        let other = Stamp { epoch: 2, ..stamp };
        for (bytes, stamp, problem) in [
            (&bytes[..2], stamp, "a message of 2 bytes"),
            (&bytes[..HEADER_BYTES + 4], stamp, "a frame of 4 bytes where its header says 5"),
            (&bytes, other, "after restart 1"),
            (&[7; 100], stamp, "its bytes are not a frame"),
        ] {
            let error = decode(bytes, stamp).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
