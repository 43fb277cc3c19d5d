//! The shutdown of a communicator.
//!
//! Normally the ranks synchronise first, so that none is gone while another still works. But a rank may also drop its
//! communicator because of its own error, of which NCCL and the peers know nothing: they would wait for it in the
//! next collective while it waits for them at the shutdown. So each rank records collective progress counters on the
//! progress page: how many collectives it has begun, in which it waits, and at which it has reached the shutdown. If
//! a peer waits in a collective that a rank at the shutdown has never begun, the wait cannot succeed; both sides
//! detect that and abort.
//!
//! Messages between two ranks are not counted, since the other ranks do not take part in them. Nor are operations in
//! host memory (`World::host_memory_communicator`), where a peer names the rank for which it waits.
//!
//! The page does not show that to ranks of other hosts: see [`remote`](super::remote).
//!
//! Groups may be dropped in any order. So only the last communicator of a [`Family`](super::family) that a rank drops
//! waits for all ranks of the world; it ends all that are left. Before that, the drop of another one waits briefly for
//! its members, because they usually drop it at the same time and can free it then.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::link::Link;
use super::owner::Ended;
use super::split::GROUP;
use crate::progress::{CollectiveCounter, Operation, now};

/// First and longest wait at the shutdown between two checks of the peers.
const WAIT_SLICES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));

/// How long a rank that drops one of several communicators of a family waits for the other members, before it keeps
/// the communicator until it drops the last one.
const EARLY_END_LIMIT: Duration = Duration::from_millis(500);

/// Timeout of ncclCommFinalize and ncclCommDestroy after all ranks have arrived at the shutdown.
pub(super) const FINALISE_LIMIT: Duration = Duration::from_secs(5);

/// How long a rank at the shutdown of one communicator assumes that another of its threads may still begin the
/// collective of another communicator in which a peer waits.
const OTHER_THREAD_GRACE: Duration = Duration::from_secs(1);

/// How long a rank that has dropped a communicator may take to leave and to report its error, before it is reported
/// without a reason.
const DEPARTURE_GRACE: Duration = Duration::from_secs(2);

/// Collective progress counters of a rank's communicators.
#[derive(Debug, Default)]
pub(crate) struct CollectiveCounters {
    /// Number of collectives begun, by the number of the communicator.
    counts: Mutex<HashMap<u32, u32>>,
    /// One of the communicators was aborted: the others need not wait for peers.
    failing: AtomicBool,
}

impl CollectiveCounters {
    fn counts(&self) -> MutexGuard<'_, HashMap<u32, u32>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a collective, or the launch of a graph of collectives.
    pub(super) fn count_collective(&self, communicator: u32) {
        *self.counts().entry(communicator).or_default() += 1;
    }

    /// Adds a group of this rank.
    pub(super) fn add_group(&self, number: u32) {
        self.counts().insert(number, 0);
    }

    /// Removes a group that all members have dropped.
    fn remove_group(&self, number: u32) {
        self.counts().remove(&number);
    }

    /// This rank's progress in a communicator of its own.
    pub(super) fn progress(&self, communicator: u32) -> CollectiveCounter {
        let count = self.progress_if_member(communicator).unwrap_or_default();
        CollectiveCounter { communicator, count }
    }

    /// The number of collectives that this rank has begun in any communicator; `None` for a group of other ranks.
    pub(super) fn progress_if_member(&self, communicator: u32) -> Option<u32> {
        let count = self.counts().get(&communicator).copied();
        count.or_else(|| (communicator & GROUP == 0).then_some(0))
    }

    /// Records that a communicator was aborted.
    pub(crate) fn fail(&self) {
        self.failing.store(true, Ordering::SeqCst);
    }

    fn is_failing(&self) -> bool {
        self.failing.load(Ordering::SeqCst)
    }
}

impl Link {
    /// This rank's progress in this communicator.
    pub(super) fn progress(&self) -> CollectiveCounter {
        self.membership.collectives.progress(self.number)
    }

    /// Ends the communicator: at once if the other members drop it, too, or else when this rank has dropped all of the
    /// family. A proper end needs all members: they synchronise first, so that none is gone while another still works.
    /// If some rank does not arrive or has failed, the communicators are aborted.
    pub(super) fn shut_down(&self) {
        let is_last = if !self.family.has_others() {
            self.family.retire(self.number)
        } else if !self.may_meet() {
            // The caller may free the memory of its operations next, which would wait for them.
            self.membership.collectives.fail();
            let _: Ended = self.owner.abort();
            self.family.remove(self.number)
        } else if self.early_barrier() {
            let _: Ended = self.owner.finalise(FINALISE_LIMIT.min(self.timeout));
            self.membership.collectives.remove_group(self.number);
            self.family.remove(self.number)
        } else {
            self.family.retire(self.number)
        };
        if !is_last {
            return;
        }
        if self.shutdown_barrier() {
            self.family.finalise(FINALISE_LIMIT.min(self.timeout));
        } else {
            self.membership.collectives.fail();
            self.family.abort();
        }
    }

    /// Whether this rank can hope that others arrive at a shutdown.
    fn may_meet(&self) -> bool {
        let has_failed = || self.membership.page().first_failed().is_some();
        !std::thread::panicking() && !self.membership.collectives.is_failing() && !has_failed()
    }

    /// Waits briefly for the members at the drop of one of several communicators.
    fn early_barrier(&self) -> bool {
        let (page, rank) = (self.membership.page(), self.rank());
        page.enter(rank, Operation::Barrier, 0, 0);
        page.note_finalised(rank, self.progress());
        let (name, members) = (format!("{}/dropped", self.key), self.members.world_ranks());
        let limit = EARLY_END_LIMIT.min(self.timeout);
        let together = self.membership.store().barrier_of(&name, members, limit).is_ok();
        page.leave(rank);
        together
    }

    /// Waits for all ranks of the world at the shutdown of the family. False if some rank will not arrive.
    fn shutdown_barrier(&self) -> bool {
        let (page, store, rank) = (self.membership.page(), self.membership.store(), self.rank());
        if !self.may_meet() {
            return false;
        }
        let peers: Vec<u32> = (0..page.world_size()).filter(|peer| *peer != rank).collect();
        page.enter(rank, Operation::Barrier, 0, 0);
        page.note_finalised(rank, self.progress());
        // Records a wait, so that a rank that is early is not taken for one without progress.
        if let Some(peer) = peers.first() {
            page.wait(rank, *peer);
        }
        let name = format!("communicator-{}/end", self.family.number());
        let (began, mut slice) = (Instant::now(), WAIT_SLICES.0);
        let together = loop {
            if page.first_failed().is_some() {
                break false;
            }
            match store.barrier(&name, slice.min(self.timeout)) {
                Ok(()) => break true,
                Err(mgpu_control::Error::Timeout { .. }) if began.elapsed() < self.timeout => {}
                Err(_) => break false,
            }
            let waited = began.elapsed();
            let is_awaited = peers.iter().any(|peer| self.is_awaited_by(*peer, waited));
            if is_awaited || self.is_awaited_remotely(waited) {
                break false;
            }
            slice = (slice * 2).min(WAIT_SLICES.1);
        };
        page.leave(rank);
        together
    }

    /// True if `peer`, on this host, waits in a collective that this rank has never begun, or for this rank in an operation
    /// in host memory, and this rank has been at the shutdown for long enough.
    fn is_awaited_by(&self, peer: u32, at_the_end: Duration) -> bool {
        if self.is_remote(peer) {
            return false;
        }
        let page = self.membership.page();
        let Some(theirs) = page.waiting_collective(peer) else {
            // The shutdown itself has no number.
            let is_for_this_rank = page
                .progress(peer)
                .operation
                .is_some_and(|last| last.running && last.sequence > 0 && last.waits_for == Some(self.rank()));
            return is_for_this_rank && at_the_end >= OTHER_THREAD_GRACE;
        };
        let ours = self.membership.collectives.progress_if_member(theirs.communicator);
        let was_dropped = self.family.has_retired(theirs.communicator);
        ours.is_some_and(|ours| theirs.count > ours) && (was_dropped || at_the_end >= OTHER_THREAD_GRACE)
    }

    /// The peer that has dropped the communicator before the collective in which this rank waits. It has had the time
    /// to leave and to report its error.
    pub(super) fn departed_peer(&self, peers: &[u32]) -> Option<u32> {
        let (page, ours) = (self.membership.page(), self.progress());
        let grace = DEPARTURE_GRACE.min(self.timeout / 2);
        peers.iter().copied().find(|peer| {
            page.finalised_at(*peer)
                .is_some_and(|theirs| theirs.communicator == ours.communicator && theirs.count < ours.count)
                && now().saturating_sub(page.progress(*peer).changed) >= grace
        })
    }
}
