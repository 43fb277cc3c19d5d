//! The shutdown of a communicator.
//!
//! Normally the ranks synchronise first, so that none is gone while another still works. But a rank may also drop its
//! communicator because of its own error, of which NCCL and the peers know nothing: they would wait for it in the
//! next collective while it waits for them at the shutdown. So each rank records collective progress counters on the
//! progress page: how many collectives it has begun, in which it waits, and at which it has reached the shutdown. If
//! a peer waits in a collective that a rank at the shutdown has never begun, the wait cannot succeed; both sides
//! detect that and abort.
//!
//! Messages between two ranks are not counted, since the other ranks do not take part in them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::link::Link;
use crate::progress::{CollectiveCounter, Operation, now};

/// First and longest wait at the shutdown between two checks of the peers.
const WAIT_SLICES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));

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

    /// This rank's progress in a communicator.
    pub(super) fn progress(&self, communicator: u32) -> CollectiveCounter {
        let turns = self.counts().get(&communicator).copied().unwrap_or_default();
        CollectiveCounter { communicator, count: turns }
    }

    /// Records that a communicator was aborted.
    pub(super) fn fail(&self) {
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

    /// Waits for all ranks at the shutdown. False if some rank will not arrive.
    pub(super) fn shutdown_barrier(&self) -> bool {
        let (page, store) = (self.membership.page(), self.membership.store());
        if std::thread::panicking() || self.membership.collectives.is_failing() {
            return false;
        }
        page.enter(self.rank, Operation::Barrier, 0, 0);
        page.note_finalised(self.rank, self.progress());
        // Records a wait, so that a rank that is early is not taken for one without progress.
        if let Some(peer) = self.peers().first() {
            page.wait(self.rank, *peer);
        }
        let (name, began, mut slice) = (format!("{}/end", self.name), Instant::now(), WAIT_SLICES.0);
        let together = loop {
            if page.first_failed().is_some() {
                break false;
            }
            match store.barrier(&name, slice.min(self.timeout)) {
                Ok(()) => break true,
                Err(mgpu_control::Error::Timeout { .. }) if began.elapsed() < self.timeout => {}
                Err(_) => break false,
            }
            if self.peers().into_iter().any(|peer| self.is_awaited_by(peer, began.elapsed())) {
                break false;
            }
            slice = (slice * 2).min(WAIT_SLICES.1);
        };
        page.leave(self.rank);
        together
    }

    /// True if `peer` waits in a collective that this rank has never begun, and this rank has been at the shutdown
    /// for long enough.
    fn is_awaited_by(&self, peer: u32, at_the_end: Duration) -> bool {
        let Some(theirs) = self.membership.page().waiting_collective(peer) else { return false };
        let ours = self.membership.collectives.progress(theirs.communicator);
        let is_certain = theirs.communicator == self.number || at_the_end >= OTHER_THREAD_GRACE;
        theirs.count > ours.count && is_certain
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
