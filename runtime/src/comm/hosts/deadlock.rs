//! Ranks that wait for each other in a cycle: their calls can never meet.
//!
//! A rank that has waited for a while sends a *probe* to each rank that it waits for. A rank that receives a probe while
//! it waits itself passes it on to the ranks that it waits for, once. A probe that comes back has gone around a cycle,
//! and its sender reports the calls (edge chasing, Chandy, Misra and Haas 1983).
//!
//! Waits may end while a probe is on its way. So a probe carries what the rank that passes it on waits for, and the
//! next one drops it if it has sent that already: then that wait is about to end. All frames between two ranks arrive
//! in their order, so a probe that has come back proves that all waits of the cycle still last.
//!
//! Ranks that wait for a rank of a cycle, but are not part of it, learn from its abort that calls differ.
//!
//! Ranks that transfer a payload have agreed on what they do, and may well wait for each other in a cycle. Probes pass them
//! all the same, again and again: every rank that receives one tells its origin whom it waits for, so that a rank which waits
//! for a neighbour in a chain can name the one that blocks the chain. The same holds when all ranks have arrived at a
//! collective, and some wait for what others know of it.
//!
//! A rank may have left a collective although another one does not know that it has arrived. It answers a probe with a note
//! that it waits for itself: whoever should have told of its arrival is late.

use std::time::{Duration, Instant};

use super::HostsTransport;
use super::frame::{FrameKind, Header};
use super::wait::{Awaited, Wait};
use crate::comm::signature::SIGNATURE_WORDS;
use crate::{Error, Result};

/// Time between two probes of a wait for payload.
const PAUSE: Duration = Duration::from_millis(250);

/// Probes of fewer waits of a rank than this are on their way at the same time.
const WAITS_AT_ONCE: u32 = 1 << 20;

/// A probe that arrives: whose, and where it has been. The header's call is that of the rank `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Probe {
    /// The rank that began it, and the number of its wait.
    origin: u32,
    wait: u32,
    /// The rank that received it first.
    first: u32,
    /// What the rank that sent it now waits for.
    awaited: Expected,
}

/// What one rank expects from another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Arrival(u32),
    Message(u32),
    Accept(u32),
    /// Payload, the end of another rank's transfer, or what it knows of the arrivals of others.
    Payload,
}

impl Probe {
    fn encode(self) -> [u8; 20] {
        let (kind, number) = match self.awaited {
            Expected::Arrival(number) => (0, number),
            Expected::Message(number) => (1, number),
            Expected::Accept(number) => (2, number),
            Expected::Payload => (3, 0),
        };
        let mut bytes = [0; 20];
        let numbers = [self.origin, self.wait, self.first, kind, number];
        for (number, at) in numbers.iter().zip(bytes.chunks_exact_mut(4)) {
            at.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Reverses [`encode`](Self::encode), for a communicator of `size` ranks.
    fn decode(bytes: &[u8], size: u32) -> Option<Self> {
        let bytes: &[u8; 20] = bytes.try_into().ok()?;
        let number = |index: usize| u32::from_le_bytes(std::array::from_fn(|at| bytes[4 * index + at]));
        let awaited = match number(3) {
            0 => Expected::Arrival(number(4)),
            1 => Expected::Message(number(4)),
            2 => Expected::Accept(number(4)),
            3 => Expected::Payload,
            _ => return None,
        };
        let probe = Probe { origin: number(0), wait: number(1), first: number(2), awaited };
        (probe.origin < size && probe.first < size).then_some(probe)
    }
}

/// Whether a counter that wraps has reached `target`.
fn has_reached(counter: u32, target: u32) -> bool {
    counter.wrapping_sub(target) as i32 >= 0
}

/// Whether a probe of this wait is not to be passed on after one of wait `last` of the same rank. On a slow link probes of
/// several waits are on their way, and if each of them were new after the others they would go around without end.
fn is_old(last: u32, wait: u32) -> bool {
    last.wrapping_sub(wait) < WAITS_AT_ONCE
}

impl HostsTransport {
    /// What this rank expects from each rank that it waits for.
    fn expected(&self, awaited: Awaited) -> Option<Expected> {
        let peer = |rank: u32| &self.peers[rank as usize];
        match awaited {
            Awaited::Arrivals if self.have_all_announced() => Some(Expected::Payload),
            Awaited::Arrivals => Some(Expected::Arrival(self.sequence)),
            Awaited::Message { from } => Some(Expected::Message(peer(from).taken.wrapping_add(1))),
            Awaited::Accept { by } => Some(Expected::Accept(peer(by).sent)),
            Awaited::Transfer | Awaited::Change { .. } | Awaited::House => Some(Expected::Payload),
            Awaited::Room { .. } => None,
        }
    }

    /// Whether all ranks are known to have arrived at the current collective, with their contributions or without.
    fn have_all_announced(&self) -> bool {
        self.others().all(|peer| self.peers[peer as usize].arrivals.at(self.sequence).is_some())
    }

    /// Sends a probe to the ranks that this rank waits for, once in a wait; again and again in one for payload.
    pub(super) fn search_deadlock(&mut self, absent: &[u32]) {
        let Some(wait) = self.waiting else { return };
        let Some(awaited) = self.expected(wait.awaited) else { return };
        // Ranks that were late have arrived: what others have said of them before is no longer true.
        let has_changed = wait.awaited == Awaited::Arrivals && self.blocked_by != absent;
        self.blocked_by.clear();
        self.blocked_by.extend_from_slice(absent);
        let is_new = wait.number != self.probed.0;
        let is_late = || has_changed || self.probed.1.is_none_or(|at| at.elapsed() >= PAUSE);
        let is_due = awaited == Expected::Payload && is_late();
        if !is_new && !is_due {
            return;
        }
        if !is_new {
            // What is known of this wait may no longer be true.
            self.waits = self.waits.wrapping_add(1);
            self.waiting = Some(Wait { number: self.waits, ..wait });
        }
        self.probed = (self.waits, Some(Instant::now()));
        for peer in absent {
            let probe = Probe { origin: self.members.rank(), wait: self.waits, first: *peer, awaited };
            let header = Header::new(FrameKind::Probe, 0, [0; SIGNATURE_WORDS]);
            self.wire.sender().queue(*peer, header, &probe.encode());
        }
    }

    /// Handles a probe from `from`.
    ///
    /// # Errors
    /// If it is invalid.
    pub(super) fn receive_probe(&mut self, from: u32, header: &Header, payload: &[u8]) -> Result<(), String> {
        let probe = Probe::decode(payload, self.members.size()).ok_or("an invalid probe")?;
        let (own, peer) = (self.members.rank(), &self.peers[from as usize]);
        let is_sent = match probe.awaited {
            Expected::Arrival(number) => {
                let is_there = self.waiting.is_some_and(|wait| wait.awaited == Awaited::Arrivals)
                    && self.sequence == number;
                let has_arrived = has_reached(self.sequence, number);
                // A rank that is there announces its call soon, and one that is further on does not.
                if has_arrived && !is_there && probe.origin == from {
                    let note = Header::new(FrameKind::Waiting, probe.wait, [0; SIGNATURE_WORDS]);
                    self.wire.sender().queue(from, note.with_argument(own.into()), &[]);
                }
                has_arrived
            }
            Expected::Message(number) => has_reached(peer.sent, number),
            Expected::Accept(number) => has_reached(peer.taken, number),
            Expected::Payload => false,
        };
        let Some(wait) = self.waiting.filter(|_| !is_sent) else { return Ok(()) };
        let Some(awaited) = self.expected(wait.awaited) else { return Ok(()) };
        let is_of_payload = [probe.awaited, awaited].contains(&Expected::Payload);
        if probe.origin == own {
            if probe.wait == wait.number && !is_of_payload {
                self.cycle = Some((probe.first, header.call));
            }
            return Ok(());
        }
        let last_probe = &mut self.peers[probe.origin as usize].last_probe;
        if is_old(*last_probe, probe.wait) {
            return Ok(());
        }
        *last_probe = probe.wait;
        let call = if from == probe.origin { wait.call } else { header.call };
        let passed_on =
            Probe { awaited: if is_of_payload { Expected::Payload } else { awaited }, ..probe }.encode();
        let absent = match wait.awaited {
            Awaited::Transfer | Awaited::Change { .. } | Awaited::House => self.blocked_by.clone(),
            awaited => self.absent(awaited, &self.empty_transfer()),
        };
        let sender = self.wire.sender();
        if let Some(peer) = absent.first() {
            let note = Header::new(FrameKind::Waiting, probe.wait, wait.call);
            sender.queue(probe.origin, note.with_argument((*peer).into()), &[]);
        }
        for peer in absent {
            sender.queue(peer, Header::new(FrameKind::Probe, 0, call), &passed_on);
        }
        Ok(())
    }

    /// Notes that `from` waits for another rank, as an answer to a probe.
    ///
    /// # Errors
    /// If there is no such rank.
    pub(super) fn receive_waiting(&mut self, from: u32, header: &Header) -> Result<(), String> {
        let awaited = u32::try_from(header.argument).ok().filter(|rank| *rank < self.members.size());
        let awaited = awaited.ok_or_else(|| format!("that it waits for rank {}", header.argument))?;
        self.peers[from as usize].waits_for = Some((header.sequence, awaited));
        Ok(())
    }

    /// Those of `absent` that block the others: not the ranks that are late because they wait for another one, or for this
    /// rank. A rank that has to wait for a single one gets the rank that blocks that one.
    ///
    /// If one of them is further on, all have arrived: those block that should have told so.
    pub(super) fn blocking(&self, absent: &[u32]) -> Vec<u32> {
        let is_ahead = |peer: &u32| self.peers[*peer as usize].waits_for == Some((self.waits, *peer));
        let sources = match absent.iter().any(is_ahead) {
            true => self.waiting.and_then(|wait| self.sources(wait.awaited)).unwrap_or_default(),
            false => Vec::new(),
        };
        let absent = if sources.is_empty() { absent } else { &sources };
        if let [peer] = absent {
            return vec![self.end_of_wait_chain(*peer).unwrap_or(*peer)];
        }
        let is_end = |peer: &u32| self.end_of_wait_chain(*peer) == Some(*peer);
        let blocking: Vec<u32> = absent.iter().copied().filter(is_end).collect();
        if !blocking.is_empty() {
            return blocking;
        }
        // All of them wait for others.
        let mut ends: Vec<u32> = absent.iter().filter_map(|peer| self.end_of_wait_chain(*peer)).collect();
        ends.sort_unstable();
        ends.dedup();
        if ends.is_empty() { absent.to_vec() } else { ends }
    }

    /// Follows what peers have said in this wait from `peer` to the rank that it waits for, and so on. `None` if that is
    /// this rank.
    fn end_of_wait_chain(&self, peer: u32) -> Option<u32> {
        let (mut last, current) = (peer, self.waits);
        for _ in 0..self.members.size() {
            match self.peers[last as usize].waits_for {
                Some((wait, next)) if wait == current && next == self.members.rank() => return None,
                Some((_, next)) if next == last => break,
                Some((wait, next)) if wait == current => last = next,
                _ => break,
            }
        }
        Some(last)
    }

    /// The error of a cycle, if one was found in this wait.
    pub(super) fn check_cycle(&mut self, call: &crate::comm::signature::Signature) -> Result<(), Error> {
        let Some((peer, theirs)) = self.cycle.take() else { return Ok(()) };
        // Messages have no sequence number; report that of the next collective.
        let sequence = if call.is_collective() { self.sequence } else { self.sequence.wrapping_add(1) };
        Err(self.mismatch_error(peer, sequence, call, theirs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_survive_the_wire() {
        for awaited in
            [Expected::Arrival(1), Expected::Message(u32::MAX), Expected::Accept(7), Expected::Payload]
        {
            let probe = Probe { origin: 2, wait: 9, first: 1, awaited };
            assert_eq!(Probe::decode(&probe.encode(), 3), Some(probe));
            assert_eq!(Probe::decode(&probe.encode(), 2), None);
            assert_eq!(Probe::decode(&probe.encode()[1..], 3), None);
        }
        assert_eq!(Probe::decode(&[3; 20], 9), None);
    }

    /// Probes of several waits of one rank, which every rank passes on to all others, are gone in the end.
    #[test]
    fn probes_that_overtake_each_other_do_not_go_around_without_end() {
        const RANKS: usize = 4;
        let mut last = [0; RANKS];
        // Of rank 0. Newer ones come first, then both kinds alternate.
        let mut on_the_way: std::collections::VecDeque<(usize, u32)> =
            [2, 1, 2, 1].into_iter().flat_map(|wait| (1..RANKS).map(move |to| (to, wait))).collect();
        let mut passed_on = 0;
        while let Some((at, wait)) = on_the_way.pop_front() {
            if at == 0 || is_old(last[at], wait) {
                continue;
            }
            last[at] = wait;
            passed_on += 1;
            assert!(passed_on < 100, "they go around");
            on_the_way.extend((0..RANKS).filter(|to| *to != at).map(|to| (to, wait)));
        }
        assert_eq!(passed_on, RANKS - 1);
        // Waits are numbered without end.
        assert!(is_old(3, u32::MAX) && !is_old(u32::MAX, 3) && !is_old(5, 5 + (1 << 31)));
    }

    #[test]
    fn counters_compare_across_wrapping() {
        assert!(has_reached(5, 5) && has_reached(5, 4) && !has_reached(5, 6));
        assert!(has_reached(2, u32::MAX) && !has_reached(u32::MAX, 2));
    }
}
