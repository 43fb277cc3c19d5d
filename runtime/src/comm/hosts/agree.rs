//! How ranks agree on a collective: every rank gets the calls of all others, and compares them with its own.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use super::HostsTransport;
use super::arrivals::{Arrival, Arrivals};
use super::frame::{FrameKind, Header};
use super::messages::Incoming;
use super::wait::{Aborted, Awaited};
use super::wire::Frame;
use crate::clock::now;
use crate::comm::signature::{SIGNATURE_WORDS, Signature, describe};
use crate::{Error, Result};

/// What is known of a peer.
#[derive(Default)]
pub(super) struct Peer {
    /// Its calls and contributions at the current collective and, if it is ahead, the next one.
    pub(super) arrivals: Arrivals,
    /// Its messages that were not received.
    pub(super) incoming: VecDeque<Incoming>,
    /// Number of its messages that were received.
    pub(super) taken: u32,
    /// Number of messages to it, and the sizes of the small ones among them that it has not taken.
    pub(super) sent: u32,
    pub(super) in_flight: VecDeque<(u32, usize)>,
    /// Number of messages that it has taken.
    pub(super) accepted: u32,
    /// The last probe of this rank's waits that was passed on.
    pub(super) last_probe: u32,
    /// In which wait of ours it has said that it waits, and for whom.
    pub(super) waits_for: Option<(u32, u32)>,
    pub(super) aborted: Option<Aborted>,
    /// Identifies its buffer of the current collective to the ranks of its host; 0 for private memory.
    pub(super) location: u64,
}

impl HostsTransport {
    /// Arrives at the next collective and waits until all ranks have arrived with the same call. `payload` is what this
    /// rank has for all others, of at most [`small_bytes`](Self::small_bytes) bytes. Returns what the others have for this
    /// rank; nothing at its own place.
    pub(super) fn enter(&mut self, call: &Signature, payload: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.enter_at(call, 0, payload)
    }

    /// The same, and tells them where this rank's buffer is (see [`location`](Self::location)).
    pub(super) fn enter_at(
        &mut self,
        call: &Signature,
        location: u64,
        payload: &[u8],
    ) -> Result<Vec<Vec<u8>>> {
        self.sequence = self.sequence.wrapping_add(1);
        self.arrive(call, location, payload);
        self.meet(call)
    }

    /// The same with `payload` for each rank, of at most [`part_bytes`](Self::part_bytes) bytes.
    pub(super) fn enter_for_each<'a>(
        &mut self,
        call: &Signature,
        payload: impl Fn(u32) -> &'a [u8],
    ) -> Result<Vec<Vec<u8>>> {
        self.sequence = self.sequence.wrapping_add(1);
        self.arrive_directly(call.encode(), 0, payload);
        self.meet(call)
    }

    /// Waits for all ranks at the collective at which this one has arrived.
    fn meet(&mut self, call: &Signature) -> Result<Vec<Vec<u8>>> {
        let mut nothing = self.empty_transfer();
        self.wait(Awaited::Arrivals, call, &mut nothing)?;
        if let Some(arrival) = &self.arrival {
            // If an operation has several rounds, the first one counts.
            let _ = arrival.compare_exchange(0, now(), Relaxed, Relaxed);
        }
        let (rank, sequence) = (self.members.rank(), self.sequence);
        let arrived = |(peer, state): (u32, &mut Peer)| {
            let arrival = state.arrivals.take(sequence).filter(|_| peer != rank);
            let Some(arrival) = arrival else { return Vec::new() };
            state.location = arrival.location;
            arrival.payload.unwrap_or_default()
        };
        let payloads: Vec<Vec<u8>> = (0..).zip(&mut self.peers).map(arrived).collect();
        self.received_bytes += payloads.iter().map(Vec::len).sum::<usize>() as u64;
        Ok(payloads)
    }

    /// Handles a small frame.
    ///
    /// # Errors
    /// If it is invalid.
    pub(super) fn handle(&mut self, Frame { from, header, payload }: Frame) -> Result<(), String> {
        match header.kind {
            FrameKind::Arrival => self.receive_arrival(from, &header, Some(payload)),
            FrameKind::Announcement => self.receive_arrival(from, &header, None),
            FrameKind::Bundle => self.receive_bundle(from, &header, &payload),
            FrameKind::Message | FrameKind::Offer => self.receive_incoming(from, &header, payload),
            FrameKind::Accept => self.receive_accept(from, header.sequence),
            FrameKind::Probe => self.receive_probe(from, &header, &payload),
            FrameKind::Waiting => self.receive_waiting(from, &header),
            FrameKind::Abort => {
                self.note_abort(from, &header, &payload);
                Ok(())
            }
            FrameKind::Data => Err("a piece of no transfer".into()),
        }
    }

    fn receive_arrival(
        &mut self,
        from: u32,
        header: &Header,
        payload: Option<Vec<u8>>,
    ) -> Result<(), String> {
        let Header { sequence, call, argument: location, .. } = *header;
        self.note_arrival(from, Arrival { sequence, call, location, payload })
    }

    /// Notes the arrival of a rank.
    ///
    /// # Errors
    /// If it cannot be.
    pub(super) fn note_arrival(&mut self, rank: u32, arrival: Arrival) -> Result<(), String> {
        let waiting = self.waiting.is_some_and(|wait| wait.awaited == Awaited::Arrivals);
        let first = if waiting { self.sequence } else { self.sequence.wrapping_add(1) };
        self.peers[rank as usize].arrivals.note(arrival, first)
    }

    /// The error of a peer whose call differs from `call`, if that is known: from its arrival, from a cycle of waits, or
    /// because it has said so.
    pub(super) fn check_disagreement(&mut self, call: &Signature) -> Result<()> {
        self.check_cycle(call)?;
        let Some(wait) = self.waiting else { return Ok(()) };
        let words = call.encode();
        for peer in self.others() {
            let Peer { arrivals, aborted, .. } = &self.peers[peer as usize];
            let arrival = arrivals.at(self.sequence);
            if let Some(arrival) = arrival.filter(|arrival| call.is_collective() && arrival.call != words) {
                return Err(self.mismatch_error(peer, self.sequence, call, arrival.call));
            }
            let is_awaited = arrival.is_none() && self.is_awaited(peer, wait.awaited);
            let theirs = aborted.and_then(|aborted| aborted.differing_call).filter(|_| is_awaited);
            if let Some(theirs) =
                theirs.filter(|theirs| *theirs != call.counterpart(self.members.rank()).encode())
            {
                let sequence =
                    if call.is_collective() { self.sequence } else { self.sequence.wrapping_add(1) };
                return Err(self.mismatch_error(peer, sequence, call, theirs));
            }
        }
        Ok(())
    }

    /// The same after all frames that have arrived are noted, if the calls that are known differ: who is at fault depends on
    /// what most ranks call.
    pub(super) fn check_calls(&mut self, call: &Signature) -> Result<()> {
        let words = call.encode();
        let differs = |peer: u32| {
            self.peers[peer as usize].arrivals.at(self.sequence).is_some_and(|arrival| arrival.call != words)
        };
        let is_in_arrival = self.waiting.is_some_and(|wait| wait.awaited == Awaited::Arrivals);
        if is_in_arrival && self.others().any(differs) {
            self.note_arrived(call)?;
        }
        self.check_disagreement(call)
    }

    /// Whether the wait needs a frame of `peer` that depends on its call.
    fn is_awaited(&self, peer: u32, awaited: Awaited) -> bool {
        match awaited {
            Awaited::Arrivals => true,
            Awaited::Message { from: needed } | Awaited::Accept { by: needed } => peer == needed,
            Awaited::Transfer | Awaited::Change { .. } | Awaited::House | Awaited::Room { .. } => false,
        }
    }

    /// The error of calling something else than `peer`.
    pub(super) fn mismatch_error(
        &self,
        peer: u32,
        sequence: u32,
        ours: &Signature,
        theirs: [u64; SIGNATURE_WORDS],
    ) -> Error {
        self.in_minority.set(self.is_in_minority(ours));
        self.differing_call.set(Some(ours.encode()));
        let (ours, mut theirs) = (ours.to_string(), describe(theirs));
        if self.is_group() {
            theirs = format!("{theirs}, in {}", self.title);
        }
        let (rank, peer) = (self.membership.rank(), self.members.world_rank(peer));
        Error::Mismatch { rank, peer, sequence, ours, theirs }
    }

    /// Whether some other call was made by more ranks than `ours`, among the ranks that have arrived at the current
    /// collective.
    fn is_in_minority(&self, ours: &Signature) -> bool {
        let arrival = |peer: u32| self.peers[peer as usize].arrivals.at(self.sequence);
        let arrivals = self.others().filter(|_| ours.is_collective()).filter_map(arrival);
        let calls: Vec<_> = arrivals.map(|arrival| arrival.call).collect();
        let count = |call: &[u64; SIGNATURE_WORDS]| calls.iter().filter(|other| *other == call).count();
        let ours = ours.encode();
        calls.iter().filter(|call| **call != ours).map(count).max() > Some(1 + count(&ours))
    }
}
