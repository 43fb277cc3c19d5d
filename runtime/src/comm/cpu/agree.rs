//! How ranks come together: arrival, comparison, and waiting for each other without ever hanging.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::lines::{Arrival, Waiting};
use super::wait::Flag;
use super::{CpuTransport, cores, prefetch};
use crate::clock::now;
use crate::comm::signature::{Path, SIGNATURE_WORDS, Signature, describe};
use crate::{Error, Result};

impl CpuTransport {
    /// The number the next operation will have: what to write before [`enter`](Self::enter) belongs to it.
    pub(super) fn next_sequence(&self) -> u32 {
        self.sequence.wrapping_add(1)
    }

    /// Arrives at the next operation and waits until all ranks have, with the same call.
    pub(super) fn enter(&mut self, call: &Signature) -> Result<()> {
        self.sequence = self.next_sequence();
        if std::mem::replace(&mut self.entered, true) {
            self.membership.page().touch(self.rank);
        }
        let own = self.region.lines(self.rank);
        own.arrive(self.sequence, call, self.policy);
        let digest = own.arrival(self.sequence).digest();
        for peer in self.peers() {
            let line = self.region.lines(peer).arrival(self.sequence);
            if call.path == Path::Eager {
                self.policy.spin_while(&line.flag, self.sequence, || self.fetch_slot(peer, call));
            }
            let waited = self.wait(&line.flag, self.sequence, call, || {
                let arrived =
                    |peer: &u32| self.region.lines(*peer).arrival(self.sequence).flag.reached(self.sequence);
                (vec![peer], self.blocking_ranks(self.peers().filter(|peer| !arrived(peer)).collect()))
            });
            if let Err(error) = waited {
                // A rank that has come with another call, and ended because of that, did not just end.
                let differs = |peer: &u32| {
                    let line = self.region.lines(*peer).arrival(self.sequence);
                    line.flag.reached(self.sequence) && line.digest() != digest
                };
                return Err(self.peers().find(differs).map_or(error, |peer| self.mismatch(peer, call)));
            }
            if line.digest() != digest {
                return Err(self.mismatch(peer, call));
            }
        }
        if let Some(arrival) = &self.arrival {
            // An operation of several parts has begun with its first one.
            let _ = arrival.compare_exchange(0, now(), Relaxed, Relaxed);
        }
        // Peers have finished with the next line: it can come back to this core while there is time.
        let next: *const Arrival = own.arrival(self.next_sequence());
        prefetch::for_writing(next.cast());
        Ok(())
    }

    /// The error of having come to the present operation with another call than `peer`.
    #[cold]
    fn mismatch(&self, peer: u32, call: &Signature) -> Error {
        let theirs = self.region.lines(peer).call(self.sequence);
        self.disagreement(peer, self.sequence, call, theirs)
    }

    /// The error of having called something else than `peer`.
    pub(super) fn disagreement(
        &self,
        peer: u32,
        sequence: u32,
        ours: &Signature,
        theirs: [u64; SIGNATURE_WORDS],
    ) -> Error {
        self.in_minority.set(self.is_in_minority(sequence, ours));
        let (ours, theirs) = (ours.to_string(), describe(theirs));
        Error::Mismatch { rank: self.rank, peer, sequence, ours, theirs }
    }

    /// Whether more ranks have come to operation `sequence` with one other call than with `ours`.
    fn is_in_minority(&self, sequence: u32, ours: &Signature) -> bool {
        let has_come = |peer: &u32| self.region.lines(*peer).arrival(sequence).flag.reached(sequence);
        let calls: Vec<_> =
            self.peers().filter(has_come).map(|peer| self.region.lines(peer).call(sequence)).collect();
        let count = |call: &[u64; SIGNATURE_WORDS]| calls.iter().filter(|other| *other == call).count();
        let ours = ours.encode();
        calls.iter().filter(|call| **call != ours).map(count).max() > Some(1 + count(&ours))
    }

    /// Waits until `flag` has come to `target`. `absent` tells, when it takes long, which ranks must be there for
    /// that to happen at all, and which ones it is waiting for.
    #[inline]
    pub(super) fn wait(
        &self,
        flag: &Flag,
        target: u32,
        call: &Signature,
        absent: impl Fn() -> (Vec<u32>, Vec<u32>),
    ) -> Result<()> {
        self.policy.wait(
            flag,
            target,
            || self.spread_over_cores(),
            |waited| {
                let (needed, waited_for) = absent();
                self.check_peers(flag, target, call, waited, &needed, waited_for)
            },
        )
    }

    #[cold]
    fn spread_over_cores(&self) {
        if !self.policy.is_oversubscribed() {
            cores::spread(self.rank, |rank| self.region.cores(rank), self.size);
        }
    }

    /// What a rank does between two slices of sleep: it leaves a note whom it waits for, looks whether that is in
    /// vain, and gives up after the deadline.
    #[cold]
    fn check_peers(
        &self,
        flag: &Flag,
        target: u32,
        call: &Signature,
        waited: Duration,
        needed: &[u32],
        mut waited_for: Vec<u32>,
    ) -> Result<()> {
        let operation = || match call.is_collective() {
            true => format!("operation {} of {}, {call}", self.sequence, self.name),
            false => format!("{call} of {}", self.name),
        };
        let (flag, words) = (self.region.line_of(flag), call.encode());
        let note = needed.first().map(|peer| Waiting { peer: *peer, flag, target, call: words });
        self.region.lines(self.rank).set_waiting(note);
        if let Some(peer) = waited_for.first() {
            self.membership.page().wait(self.rank, *peer);
        }
        // Before a look at who has gone: a peer that has seen the same, and ended, still called what it called.
        if let Some(error) = needed.first().and_then(|peer| self.deadlock(*peer, call)) {
            return Err(error);
        }
        if let Some(error) = self.membership.lost_peer(needed, operation) {
            return Err(error);
        }
        if waited < self.timeout {
            return Ok(());
        }
        waited_for.sort_unstable();
        Err(Error::Timeout { rank: self.rank, waited_for, operation: operation(), after: waited })
    }

    /// The error of waiting for `peer` in vain: it waits in another call for a rank that waits in turn, and so on, until one
    /// waits for this rank, or for one that was met before. Each of them could only go on if the next one did.
    ///
    /// A rank has one call of a communicator at a time, so who waits in it does nothing else there. The notes are read one
    /// after the other, while ranks may go on: only if all still stand when the last one has been read did they stand together.
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
        // Messages have no number: the collective that comes next does.
        let sequence = if call.is_collective() { self.sequence } else { self.next_sequence() };
        Some(self.disagreement(peer, sequence, call, theirs.call))
    }

    /// What `rank` has been waiting for, and still is, as far as it has not given up.
    fn unfinished_wait(&self, rank: u32) -> Option<Waiting> {
        self.region.lines(rank).waiting().filter(|wait| {
            let flag = self.region.flag_at(wait.flag);
            wait.peer < self.size && flag.is_some_and(|flag| !flag.reached(wait.target))
        })
    }

    /// Those of `absent` that hold up the others: a rank that is late because it waits for another one itself does not.
    fn blocking_ranks(&self, absent: Vec<u32>) -> Vec<u32> {
        let holding_up: Vec<u32> =
            absent.iter().copied().filter(|peer| self.end_of_wait_chain(*peer) == *peer).collect();
        if holding_up.is_empty() { absent } else { holding_up }
    }

    /// The rank that `peer` waits for in turn, and so on: the first that does not wait, or whose wait is over, is the
    /// one that holds up all the others. (A rank may have been stopped in its sleep: its note is still there then.)
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
