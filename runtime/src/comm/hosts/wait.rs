//! How a rank waits for its peers without ever hanging.
//!
//! A wait drives all connections until nothing is missing. At least every 20 ms it checks whether that can still
//! happen: the progress page says which ranks have ended, on any host; a peer that fails says so in every connection;
//! and the end of a connection is an error, if the page does not name a culprit within a second.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use super::HostsTransport;
use super::agree::Peer;
use super::frame::{FrameKind, Header};
use super::transfer::Transfer;
use super::wire::{BadFrame, Watch};
use crate::comm::signature::{SIGNATURE_WORDS, Signature};
use crate::progress::Blame;
use crate::{Error, Result};

/// Longest time between two checks of the progress page.
const SLICE: Duration = Duration::from_millis(20);
/// How long the launcher has to say how the rank at the end of a lost connection has ended.
const GRACE: Duration = Duration::from_secs(1);

/// What a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// All ranks at the current collective.
    Arrivals,
    /// A message from this rank.
    Message { from: u32 },
    /// That this rank accepts the last message to it.
    Accept { by: u32 },
    /// The rest of a transfer, and room for what is queued.
    Transfer,
    /// That another post of a transfer is complete, after this number of them.
    Change { after: usize },
    /// The other ranks of the house, at its barrier.
    House,
    /// Room for what is queued for this rank.
    Room { of: u32 },
}

/// A wait in progress.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    pub(super) awaited: Awaited,
    /// Number of the wait among those of this rank.
    pub(super) number: u32,
    pub(super) call: [u64; SIGNATURE_WORDS],
}

/// What a peer has said before it stopped using the communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Aborted {
    at: Instant,
    /// The call with which it differs from another rank, if that was its error.
    pub(super) differing_call: Option<[u64; SIGNATURE_WORDS]>,
}

impl HostsTransport {
    /// Drives the connections until what is `awaited` is there.
    pub(super) fn wait(
        &mut self,
        awaited: Awaited,
        call: &Signature,
        transfer: &mut Transfer<'_>,
    ) -> Result<()> {
        self.waits = self.waits.wrapping_add(1);
        self.cycle = None;
        self.blocked_by.clear();
        self.waiting = Some(Wait { awaited, number: self.waits, call: call.encode() });
        let result = self.with_transfer(transfer, |comm, transfer| comm.drive(awaited, call, transfer));
        self.waiting = None;
        if std::mem::take(&mut self.has_noted_wait) {
            self.membership.page().stop_waiting(self.membership.rank());
        }
        result
    }

    /// Sends what there is room for, without waiting.
    pub(super) fn advance(&mut self, call: &Signature, transfer: &mut Transfer<'_>) -> Result<()> {
        self.with_transfer(transfer, |comm, transfer| {
            comm.wire.advance(transfer).map_err(|bad| comm.bad_frame(bad, call))?;
            comm.handle_received(call)
        })
    }

    /// Drives a transfer. After an error no wire uses its memory any more, nor after a panic.
    fn with_transfer<'a>(
        &mut self,
        transfer: &mut Transfer<'a>,
        drive: impl FnOnce(&mut Self, &mut Transfer<'a>) -> Result<()>,
    ) -> Result<()> {
        let before = transfer.received();
        let result = catch_unwind(AssertUnwindSafe(|| drive(self, transfer)));
        if !matches!(result, Ok(Ok(()))) {
            self.wire.abandon(transfer);
        }
        self.received_bytes += (transfer.received() - before) as u64;
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Handles what has arrived, without waiting.
    pub(super) fn read_arrived(&mut self, call: &Signature) -> Result<()> {
        let mut nothing = self.empty_transfer();
        self.poll(&mut nothing, Duration::ZERO, Awaited::Transfer, call).map(drop)
    }

    /// Waits for at most `patience` until anything moves, and handles what has arrived. Returns whether there was anything.
    fn poll(
        &mut self,
        transfer: &mut Transfer<'_>,
        patience: Duration,
        awaited: Awaited,
        call: &Signature,
    ) -> Result<bool> {
        let watched = self.watched(awaited);
        let watch = self.house.as_ref().map(|house| house.watch(watched)).unwrap_or_default();
        let polled = self.wire.poll(transfer, patience, &watch);
        drop(watch);
        let any = polled.map_err(|bad| self.bad_frame(bad, call))?;
        self.handle_received(call)?;
        Ok(any)
    }

    /// Uses what is still in the connections after an error that blames `culprit`: what is needed may be there, and calls
    /// that differ are the better error, because a peer may have ended for them. Returns whether the wait is over.
    fn drain(
        &mut self,
        awaited: Awaited,
        call: &Signature,
        transfer: &mut Transfer<'_>,
        culprit: Option<u32>,
    ) -> Result<bool> {
        let culprit = self.others().find(|peer| Some(self.members.world_rank(*peer)) == culprit);
        let begun = Instant::now();
        loop {
            let any = self.poll(transfer, Duration::ZERO, awaited, call)?;
            self.wire.advance(transfer).map_err(|bad| self.bad_frame(bad, call))?;
            self.handle_received(call)?;
            self.gather(awaited, call)?;
            if self.is_over(awaited, transfer) {
                return Ok(true);
            }
            let has_ended = culprit.is_some_and(|peer| self.wire.ended(peer).is_some());
            if !any || has_ended || begun.elapsed() >= GRACE {
                return Ok(false);
            }
        }
    }

    fn drive(&mut self, awaited: Awaited, call: &Signature, transfer: &mut Transfer<'_>) -> Result<()> {
        let mut checked = Instant::now();
        let mut patience = Patience::new(checked);
        // Peers may have come before this rank.
        self.check_calls(call)?;
        loop {
            self.wire.advance(transfer).map_err(|bad| self.bad_frame(bad, call))?;
            self.handle_received(call)?;
            self.gather(awaited, call)?;
            if self.is_over(awaited, transfer) {
                return Ok(());
            }
            self.poll(transfer, SLICE, awaited, call)?;
            let now = Instant::now();
            if now.duration_since(checked) < SLICE || self.is_over(awaited, transfer) {
                continue;
            }
            checked = now;
            if awaited == Awaited::Arrivals {
                self.read_neighbours(call)?;
            }
            let absent = self.absent(awaited, transfer);
            let needed = self.sources(awaited).unwrap_or_else(|| absent.clone());
            let waited = patience.waited(now, (transfer.left(), &absent));
            if waited.is_zero() && transfer.left() > 0 {
                self.membership.page().touch(self.membership.rank());
            }
            if let Err(error) = self.check_peers((&absent, &needed), call, waited) {
                if self.drain(awaited, call, transfer, error.culprit())? {
                    return Ok(());
                }
                // A rank may leave after it has given what was needed of it.
                let has_given = self.sources(awaited).is_some_and(|sources| sources != needed);
                if !has_given || matches!(error, Error::Timeout { .. }) {
                    return Err(error);
                }
            }
        }
    }

    fn is_over(&self, awaited: Awaited, transfer: &Transfer<'_>) -> bool {
        match awaited {
            Awaited::Message { from } => !self.peers[from as usize].incoming.is_empty(),
            Awaited::Accept { by } => self.peers[by as usize].is_accepted(),
            Awaited::Room { of } => self.wire.sender().is_flushed(of),
            Awaited::Change { after } => transfer.completed() != after,
            Awaited::Arrivals => self.others().all(|peer| {
                let Peer { arrivals, .. } = &self.peers[peer as usize];
                arrivals.is_complete(self.sequence) && self.wire.sender().is_flushed(peer)
            }),
            Awaited::Transfer | Awaited::House => {
                self.others().all(|peer| !self.is_absent(peer, awaited, transfer))
            }
        }
    }

    fn is_absent(&self, peer: u32, awaited: Awaited, transfer: &Transfer<'_>) -> bool {
        let is_done = || transfer.is_done_with(peer) && self.wire.sender().is_flushed(peer);
        match awaited {
            Awaited::Arrivals => self.peers[peer as usize].arrivals.at(self.sequence).is_none() || !is_done(),
            Awaited::Transfer | Awaited::Change { .. } => !is_done(),
            Awaited::House => !self.has_come_home(peer) || !is_done(),
            Awaited::Message { from: needed } | Awaited::Accept { by: needed } => peer == needed,
            Awaited::Room { of } => peer == of,
        }
    }

    /// The peers without which the wait cannot end.
    pub(super) fn absent(&self, awaited: Awaited, transfer: &Transfer<'_>) -> Vec<u32> {
        let absent: Vec<u32> =
            self.others().filter(|peer| self.is_absent(*peer, awaited, transfer)).collect();
        match absent.is_empty() {
            // All have arrived, and some have not passed on what they know of others.
            true => self.sources(awaited).unwrap_or_default(),
            false => absent,
        }
    }

    /// Handles the frames that are in the connections, and does not compare calls.
    pub(super) fn note_arrived(&mut self, call: &Signature) -> Result<()> {
        let mut nothing = self.empty_transfer();
        let polled = self.wire.poll(&mut nothing, Duration::ZERO, &Watch::default());
        polled.map_err(|bad| self.bad_frame(bad, call))?;
        self.note_received(call).map(drop)
    }

    /// Handles all small frames that have arrived, and compares calls.
    fn handle_received(&mut self, call: &Signature) -> Result<()> {
        if self.note_received(call)? { self.check_disagreement(call) } else { Ok(()) }
    }

    /// Handles all small frames that have arrived. Returns whether there were any.
    fn note_received(&mut self, call: &Signature) -> Result<bool> {
        let mut any = false;
        while let Some(frame) = self.wire.next_frame() {
            let from = frame.from;
            self.handle(frame).map_err(|problem| self.bad_frame(BadFrame { from, problem }, call))?;
            any = true;
        }
        Ok(any)
    }

    /// The error of a peer that sends something invalid.
    #[cold]
    pub(super) fn bad_frame(&self, BadFrame { from, problem }: BadFrame, call: &Signature) -> Error {
        Error::PeerLost {
            rank: self.membership.rank(),
            peer: self.members.world_rank(from),
            operation: self.operation(call),
            how: format!("sent a bad message: {problem}"),
            silent: false,
        }
    }

    /// What this rank does, for errors.
    pub(super) fn operation(&self, call: &Signature) -> String {
        match call.is_collective() {
            true => format!("operation {} of {}, {call}", self.sequence, self.title),
            false => format!("{call} of {}", self.title),
        }
    }

    /// Notes whom this rank waits for, checks whether the wait for `absent` can still succeed, and times out.
    #[cold]
    fn check_peers(
        &mut self,
        (absent, needed): (&[u32], &[u32]),
        call: &Signature,
        waited: Duration,
    ) -> Result<()> {
        let rank = self.membership.rank();
        let mut waited_for: Vec<u32> =
            self.blocking(absent).iter().map(|peer| self.members.world_rank(*peer)).collect();
        // Just after the announcements, who is absent is not known: others announce themselves now.
        if !self.announce(call) {
            if let Some(peer) = waited_for.first() {
                self.has_noted_wait = true;
                self.membership.page().wait(rank, *peer);
            }
            self.search_deadlock(absent);
        }
        let world_ranks: Vec<u32> = needed.iter().map(|peer| self.members.world_rank(*peer)).collect();
        if let Some(error) = self.membership.lost_peer(&world_ranks, || self.operation(call)) {
            return Err(error);
        }
        // A rank that has all it needs waits until its frames are sent.
        let mut used = needed.to_vec();
        used.extend(self.unsent().filter(|peer| !needed.contains(peer)));
        self.check_connections(&used, call)?;
        if waited < self.timeout {
            return Ok(());
        }
        let is_at_home = self.waiting.is_some_and(|wait| wait.awaited == Awaited::House);
        if is_at_home && waited_for.iter().any(|rank| self.membership.idle_time(*rank) < self.timeout) {
            // It still transfers.
            return Ok(());
        }
        if self.membership.has_groups() {
            // A rank may be late because it works in another group, or waits there.
            waited_for.iter_mut().for_each(|rank| *rank = self.membership.end_of_wait_chain(*rank));
            if waited_for.iter().any(|rank| self.membership.idle_time(*rank) < self.timeout) {
                return Ok(());
            }
        }
        waited_for.sort_unstable();
        waited_for.dedup();
        Err(Error::Timeout { rank, waited_for, operation: self.operation(call), after: waited })
    }

    /// The peers for which frames are queued.
    fn unsent(&self) -> impl Iterator<Item = u32> + '_ {
        self.others().filter(|peer| !self.wire.sender().is_flushed(*peer))
    }

    /// Whether frames are queued for any peer.
    pub(super) fn has_unsent(&self) -> bool {
        self.unsent().next().is_some()
    }

    /// Checks that the connections to `needed` are usable.
    fn check_connections(&self, needed: &[u32], call: &Signature) -> Result<()> {
        let words = call.encode();
        let has_aborted = |peer: &&u32| {
            // Some other rank differs from a peer with this rank's call: it says so itself, just now.
            let agrees =
                |aborted: Aborted| aborted.differing_call == Some(words) && aborted.at.elapsed() < GRACE;
            self.peers[**peer as usize].aborted.is_some_and(|aborted| !agrees(aborted))
        };
        if let Some(peer) = needed.iter().find(has_aborted) {
            let peer = self.members.world_rank(*peer);
            return Err(self.membership.lost_error(peer, self.operation(call)));
        }
        for peer in needed {
            let Some(ended) = self.wire.ended(*peer).filter(|ended| ended.at.elapsed() >= GRACE) else {
                continue;
            };
            return Err(Error::PeerLost {
                rank: self.membership.rank(),
                peer: self.members.world_rank(*peer),
                operation: self.operation(call),
                how: ended.how.clone(),
                silent: false,
            });
        }
        Ok(())
    }

    /// Tells all peers of this communicator and its relatives that this rank cannot use them any more, and whom it
    /// blames.
    pub(super) fn announce_abort(&self) {
        let (rank, page) = (self.membership.rank(), self.membership.page());
        let blame = page.blame_of(rank).map(|blame| {
            // A rank that is blamed blames its accuser: the others need to know the first blame.
            let accusation = page.blame_of(blame.culprit).filter(|accusation| accusation.culprit == rank);
            accusation.unwrap_or(blame)
        });
        let payload = encode_blame(blame.as_ref());
        let differing_call = self.differing_call.get();
        for sender in self.family.senders() {
            let own = std::sync::Arc::ptr_eq(&sender, self.wire.sender());
            let call = differing_call.filter(|_| own);
            let header = Header::new(FrameKind::Abort, 0, call.unwrap_or_default());
            sender.abort(header.with_argument(call.is_some().into()), &payload);
        }
    }

    /// Notes that `from` cannot use the communicator any more. Its blame goes to this host's progress page, where
    /// [`lost_error`](crate::membership::Membership::lost_error) follows it as that of a rank of this host.
    pub(super) fn note_abort(&mut self, from: u32, header: &Header, payload: &[u8]) {
        if let Some(blame) = decode_blame(payload) {
            self.membership.page().blame(self.members.world_rank(from), &blame);
        }
        let differing_call = (header.argument != 0).then_some(header.call);
        self.peers[from as usize].aborted = Some(Aborted { at: Instant::now(), differing_call });
    }
}

/// Measures how long nothing that is missing has come.
struct Patience {
    since: Instant,
    /// Bytes, and the ranks that are waited for.
    missing: Option<(usize, Vec<u32>)>,
}

impl Patience {
    fn new(now: Instant) -> Self {
        Patience { since: now, missing: None }
    }

    fn waited(&mut self, now: Instant, (bytes, ranks): (usize, &[u32])) -> Duration {
        let is_same = |missing: &(usize, Vec<u32>)| missing.0 == bytes && missing.1 == ranks;
        if !self.missing.as_ref().is_some_and(is_same) {
            if self.missing.is_some() {
                self.since = now;
            }
            self.missing = Some((bytes, ranks.to_vec()));
        }
        now.duration_since(self.since)
    }
}

/// Culprit, whether it timed out, and the message; nothing if there is no blame.
fn encode_blame(blame: Option<&Blame>) -> Vec<u8> {
    blame.map_or_else(Vec::new, |blame| {
        [&blame.culprit.to_le_bytes()[..], &[blame.timed_out.into()], blame.message.as_bytes()].concat()
    })
}

fn decode_blame(bytes: &[u8]) -> Option<Blame> {
    let (culprit, rest) = bytes.split_first_chunk::<4>()?;
    let (timed_out, message) = rest.split_first()?;
    Some(Blame {
        culprit: u32::from_le_bytes(*culprit),
        timed_out: *timed_out != 0,
        message: String::from_utf8_lossy(message).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blame_survives_the_wire() {
        let blame = Blame { culprit: 7, timed_out: true, message: "rank 1 waited".into() };
        assert_eq!(decode_blame(&encode_blame(Some(&blame))), Some(blame));
        assert_eq!(decode_blame(&encode_blame(None)), None);
        assert_eq!(decode_blame(&[1, 0, 0, 0]), None);
    }

    #[test]
    fn patience_begins_again_when_something_comes() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut patience = Patience::new(start);
        let waits: [(usize, &[u32]); 8] = [
            (10, &[1, 2]),
            (10, &[1, 2]),
            (9, &[1, 2]),
            (9, &[1, 2]),
            (9, &[1]),
            (9, &[1]),
            // Another rank, as many as before.
            (9, &[2]),
            (9, &[2]),
        ];
        let waited =
            (1..).zip(waits).map(|(seconds, missing)| patience.waited(at(seconds), missing).as_secs());
        assert!(waited.eq([1, 2, 0, 1, 0, 1, 0, 1]));
    }
}
