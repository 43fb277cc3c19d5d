//! How ranks synchronise at an operation: arrival, comparison of the calls, and waiting without ever hanging.

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::lines::{Arrival, Waiting};
use super::wait::Flag;
use super::{CpuTransport, cores, prefetch};
use crate::clock::now;
use crate::comm::signature::{SIGNATURE_WORDS, Signature, describe};
use crate::{Error, Result};

/// Bytes of a payload that are fetched while waiting for it.
pub(super) const FETCHED_BYTES: usize = 256;

/// Prefetches the first lines of a peer's slot while waiting for its arrival, so that they come together with its flag. Only
/// a few: fetching a line that the peer is about to write delays the peer.
fn fetch(slot: *const u8, call: &Signature) {
    let bytes = call.bytes().min(FETCHED_BYTES);
    (0..bytes).step_by(64).for_each(|at| prefetch::for_reading(slot.wrapping_add(at)));
}

impl CpuTransport {
    /// Sequence number of the next operation. Slots that are written before [`enter`](Self::enter) belong to it.
    pub(super) fn next_sequence(&self) -> u32 {
        self.sequence.wrapping_add(1)
    }

    /// Arrives at the next operation and waits until all ranks have arrived with the same call.
    #[inline(never)]
    pub(super) fn enter(&mut self, call: &Signature) -> Result<()> {
        self.enter_fetching(call, |_, _| std::ptr::null())
    }

    /// As [`enter`](Self::enter), and fetches the slots of the peers meanwhile.
    ///
    /// Inlined, as [`arrive`](Self::arrive) is, so that the signature stays in registers: loading it from where its parts were
    /// stored one by one delays a small operation.
    #[inline(always)]
    pub(super) fn enter_fetching(
        &mut self,
        call: &Signature,
        slot: impl Fn(&Self, u32) -> *const u8,
    ) -> Result<()> {
        debug_assert!(self.unsettled.is_empty(), "an arrival before earlier ones were compared");
        let digest = self.arrive(call);
        self.await_arrivals(digest, call, slot)?;
        self.record_arrival();
        // Peers have finished with the next arrival line: prefetch it for writing.
        let next: *const Arrival = self.region.lines(self.rank).arrival(self.next_sequence());
        prefetch::for_writing(next.cast());
        Ok(())
    }

    /// Arrives at the next operation. Returns the digest of the call.
    #[inline(always)]
    fn arrive(&mut self, call: &Signature) -> u64 {
        self.sequence = self.next_sequence();
        let digest = self.region.lines(self.rank).arrive(self.sequence, call, self.policy);
        // After the arrival was published: reading the clock then delays no peer.
        self.membership.page().touch(self.membership.rank());
        digest
    }

    /// Arrives at the next operation and waits for `root` only, which waits for nobody. The calls of the others are
    /// compared when this rank [settles](Self::settle).
    pub(super) fn enter_after(&mut self, root: u32, slot: *const u8, call: &Signature) -> Result<()> {
        let digest = self.arrive(call);
        if self.rank != root {
            self.await_arrival(root, digest, call, slot)?;
        }
        self.unsettled.push((self.sequence, call.encode()));
        self.record_arrival();
        Ok(())
    }

    /// Catches up with the comparison of calls: waits until all peers have arrived at all but the last `most` operations
    /// in which this rank did not wait for them.
    #[inline]
    pub(super) fn settle(&mut self, most: usize) -> Result<()> {
        if self.unsettled.len() > most { self.settle_unsettled(most) } else { Ok(()) }
    }

    #[cold]
    fn settle_unsettled(&mut self, most: usize) -> Result<()> {
        while self.unsettled.len() > most {
            let (sequence, words) = self.unsettled[0];
            let call = Signature::decode(words);
            // Messages name the operation of that number.
            let current = std::mem::replace(&mut self.sequence, sequence);
            let digest = Signature::digest(words);
            let settled = self.await_arrivals(digest, &call, |_, _| std::ptr::null());
            self.sequence = current;
            settled?;
            self.unsettled.remove(0);
        }
        Ok(())
    }

    fn record_arrival(&self) {
        if let Some(arrival) = &self.arrival {
            // If an operation has several rounds, the first one counts.
            let _ = arrival.compare_exchange(0, now(), Relaxed, Relaxed);
        }
    }

    /// Waits until all ranks have arrived at the current operation with the call of this digest.
    #[inline]
    fn await_arrivals(
        &self,
        digest: u64,
        call: &Signature,
        slot: impl Fn(&Self, u32) -> *const u8,
    ) -> Result<()> {
        self.peers().try_for_each(|peer| self.await_arrival(peer, digest, call, slot(self, peer)))
    }

    /// Waits until `peer` has arrived at the current operation with the call of this digest. Fetches its `slot` meanwhile,
    /// unless that is null.
    #[inline]
    fn await_arrival(&self, peer: u32, digest: u64, call: &Signature, slot: *const u8) -> Result<()> {
        let line = self.region.lines(peer).arrival(self.sequence);
        if !slot.is_null() {
            self.policy.spin_while(&line.flag, self.sequence, || fetch(slot, call));
        }
        let waited = self.wait(&line.flag, self.sequence, call, || {
            let arrived =
                |peer: &u32| self.region.lines(*peer).arrival(self.sequence).flag.reached(self.sequence);
            (vec![peer], self.blocking_ranks(self.peers().filter(|peer| !arrived(peer)).collect()))
        });
        if let Err(error) = waited {
            // Prefer the mismatch: a rank that arrived with another call may have ended because of it.
            let differs = |peer: &u32| {
                let line = self.region.lines(*peer).arrival(self.sequence);
                line.flag.reached(self.sequence) && line.digest() != digest
            };
            return Err(self.peers().find(differs).map_or(error, |peer| self.mismatch(peer, call)));
        }
        if line.digest() != digest { Err(self.mismatch(peer, call)) } else { Ok(()) }
    }

    /// The error of arriving at the current operation with another call than `peer`.
    #[cold]
    fn mismatch(&self, peer: u32, call: &Signature) -> Error {
        let theirs = self.region.lines(peer).call(self.sequence);
        self.mismatch_error(peer, self.sequence, call, theirs)
    }

    /// The error of calling something else than `peer`.
    pub(super) fn mismatch_error(
        &self,
        peer: u32,
        sequence: u32,
        ours: &Signature,
        theirs: [u64; SIGNATURE_WORDS],
    ) -> Error {
        self.in_minority.set(self.is_in_minority(sequence, ours));
        let (ours, mut theirs) = (ours.to_string(), describe(theirs));
        if self.is_group() {
            theirs = format!("{theirs}, in {}", self.title);
        }
        let (rank, peer) = (self.membership.rank(), self.members.world_rank(peer));
        Error::Mismatch { rank, peer, sequence, ours, theirs }
    }

    /// Whether it was split from another communicator.
    fn is_group(&self) -> bool {
        self.number != self.family
    }

    /// Whether some other call was made by more ranks than `ours`, among the ranks that have arrived at operation
    /// `sequence`.
    fn is_in_minority(&self, sequence: u32, ours: &Signature) -> bool {
        let has_come = |peer: &u32| self.region.lines(*peer).arrival(sequence).flag.reached(sequence);
        let calls: Vec<_> =
            self.peers().filter(has_come).map(|peer| self.region.lines(peer).call(sequence)).collect();
        let count = |call: &[u64; SIGNATURE_WORDS]| calls.iter().filter(|other| *other == call).count();
        let ours = ours.encode();
        calls.iter().filter(|call| **call != ours).map(count).max() > Some(1 + count(&ours))
    }

    /// Waits until `flag` has reached `target`. In a long wait, `absent` returns the ranks without which that cannot
    /// happen, and the ranks that are being waited for.
    #[inline]
    pub(super) fn wait(
        &self,
        flag: &Flag,
        target: u32,
        call: &Signature,
        absent: impl Fn() -> (Vec<u32>, Vec<u32>),
    ) -> Result<()> {
        let is_recorded = Cell::new(false);
        self.policy.wait(
            flag,
            target,
            || self.spread_over_cores(),
            |waited| {
                let (needed, waited_for) = absent();
                is_recorded.set(true);
                self.check_peers(flag, target, call, waited, &needed, waited_for)
            },
        )?;
        if is_recorded.get() {
            // Its target would seem to be ahead of the flag after 2³¹ more operations.
            self.region.lines(self.rank).set_waiting(None);
        }
        Ok(())
    }

    #[cold]
    fn spread_over_cores(&self) {
        if !self.policy.is_oversubscribed() {
            cores::spread(self.rank, |rank| self.region.cores(rank), self.size);
        }
    }

    /// Runs between two sleeps of a long wait: records whom this rank waits for, checks whether the wait can still
    /// succeed, and times out.
    #[cold]
    fn check_peers(
        &self,
        flag: &Flag,
        target: u32,
        call: &Signature,
        waited: Duration,
        needed: &[u32],
        waited_for: Vec<u32>,
    ) -> Result<()> {
        let operation = || match call.is_collective() {
            true => format!("operation {} of {}, {call}", self.sequence, self.title),
            false => format!("{call} of {}", self.title),
        };
        let world_ranks =
            |ranks: &[u32]| -> Vec<u32> { ranks.iter().map(|rank| self.members.world_rank(*rank)).collect() };
        let mut waited_for = world_ranks(&waited_for);
        let (flag, words) = (self.region.line_of(flag), call.encode());
        let note = needed.first().map(|peer| Waiting { peer: *peer, flag, target, call: words });
        self.region.lines(self.rank).set_waiting(note);
        if let Some(peer) = waited_for.first() {
            self.membership.page().wait(self.membership.rank(), *peer);
        }
        // Check this before lost peers: a peer that has found the same deadlock may have ended already.
        if let Some(error) = needed.first().and_then(|peer| self.deadlock(*peer, call)) {
            return Err(error);
        }
        let needed = world_ranks(needed);
        if let Some(error) = self.membership.lost_peer(&needed, operation) {
            return Err(error);
        }
        let has_failed = |peer: &&u32| self.membership.page().has_aborted(**peer, self.family);
        if let Some(peer) = needed.iter().find(has_failed) {
            return Err(self.membership.lost_error(*peer, operation()));
        }
        if waited < self.timeout {
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
        let rank = self.membership.rank();
        Err(Error::Timeout { rank, waited_for, operation: operation(), after: waited })
    }

    /// The error of a deadlock: `peer` waits in another call for a rank that also waits, and so on, up to this rank
    /// or one that occurred before.
    ///
    /// A rank has at most one call of a communicator at a time, so a rank that waits in it makes no progress there.
    /// The records are read one after the other while ranks may continue: they were only true at the same time if all
    /// of them are unchanged after the last one was read.
    fn deadlock(&self, peer: u32, call: &Signature) -> Option<Error> {
        let (mut chain, mut next) = (Vec::new(), peer);
        while next != self.rank && !chain.iter().any(|(rank, _)| *rank == next) {
            let wait = self.unfinished_wait(next)?;
            chain.push((next, wait));
            next = wait.peer;
        }
        let (_, theirs) = chain.first()?;
        let stands = |(rank, wait): &(u32, Waiting)| self.unfinished_wait(*rank) == Some(*wait);
        if !chain.iter().all(stands) {
            return None;
        }
        // Messages have no sequence number; report that of the next collective.
        let sequence = if call.is_collective() { self.sequence } else { self.next_sequence() };
        Some(self.mismatch_error(peer, sequence, call, theirs.call))
    }

    /// What `rank` is recorded to wait for, if the wait is not over.
    fn unfinished_wait(&self, rank: u32) -> Option<Waiting> {
        self.region.lines(rank).waiting().filter(|wait| {
            let flag = self.region.flag_at(wait.flag);
            wait.peer < self.size && flag.is_some_and(|flag| !flag.reached(wait.target))
        })
    }

    /// Those of `absent` that block the others: not the ranks that are late because they wait for another one.
    fn blocking_ranks(&self, absent: Vec<u32>) -> Vec<u32> {
        let holding_up: Vec<u32> =
            absent.iter().copied().filter(|peer| self.end_of_wait_chain(*peer) == *peer).collect();
        if holding_up.is_empty() { absent } else { holding_up }
    }

    /// Follows the records from `peer` to the rank that it waits for, and so on. Returns the first rank that does not
    /// wait or whose wait is over: it blocks the others. (A rank may have been stopped while asleep; its record still
    /// exists then.)
    pub(super) fn end_of_wait_chain(&self, peer: u32) -> u32 {
        let mut last = peer;
        for _ in 0..self.size {
            match self.unfinished_wait(last) {
                Some(waiting) if waiting.peer != self.rank => last = waiting.peer,
                _ => break,
            }
        }
        last
    }
}
