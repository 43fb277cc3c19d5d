//! How the ranks of a communicator part.
//!
//! In peace they come together first, so that none is gone while another still works. But a rank may also let go of its
//! communicator because of an error of its own, of which NCCL and the peers know nothing: they would wait for it in the
//! next collective while it waits for them at the end. So each rank says on the progress page how far it is: how many
//! collectives it has begun, when it waits in one and when it comes to the end. A peer that waits in a collective which
//! the rank at the end has never begun waits in vain; both sides see that, and give up.
//!
//! Messages between two ranks are not counted, since the other ranks have no part in them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::link::Link;
use crate::progress::{Operation, Place, now};

/// The first wait at the end before a rank looks around, and the longest.
const WAIT_SLICES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));

/// How long a rank at the end of one communicator believes that another of its threads may come to the collective of
/// another one in which a peer waits.
const OTHER_THREAD_GRACE: Duration = Duration::from_secs(1);

/// How long a rank that is seen to let go of a communicator may take to leave, and to say why, before it is reported
/// without a reason.
const DEPARTURE_GRACE: Duration = Duration::from_secs(2);

/// How it stands with a rank's communicators.
#[derive(Debug, Default)]
pub(crate) struct CollectiveCounters {
    /// Collectives begun, by the number of their communicator.
    counts: Mutex<HashMap<u32, u32>>,
    /// One of them ended by force: the others need not wait for peers that do not come.
    failing: AtomicBool,
}

impl CollectiveCounters {
    fn counts(&self) -> MutexGuard<'_, HashMap<u32, u32>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a collective, or a graph of them.
    pub(super) fn count_collective(&self, communicator: u32) {
        *self.counts().entry(communicator).or_default() += 1;
    }

    /// How far this rank is.
    pub(super) fn progress(&self, communicator: u32) -> Place {
        let turns = self.counts().get(&communicator).copied().unwrap_or_default();
        Place { communicator, turns }
    }

    /// Notes that a communicator was ended by force.
    pub(super) fn fail(&self) {
        self.failing.store(true, Ordering::SeqCst);
    }

    fn is_failing(&self) -> bool {
        self.failing.load(Ordering::SeqCst)
    }
}

impl Link {
    /// How far this rank is in this communicator.
    pub(super) fn progress(&self) -> Place {
        self.membership.collectives.progress(self.number)
    }

    /// True once all ranks have come to the end, false if that is not to be expected any more.
    pub(super) fn shutdown_barrier(&self) -> bool {
        let (page, store) = (self.membership.page(), self.membership.store());
        if std::thread::panicking() || self.membership.collectives.is_failing() {
            return false;
        }
        page.enter(self.rank, Operation::Barrier, 0, 0);
        page.end_at(self.rank, self.progress());
        // So that nobody takes a rank that is early for a silent one.
        page.wait(self.rank, u32::from(self.rank == 0));
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

    /// True if `peer` waits in a collective that this rank, which has been at the end for a while, has never begun.
    fn is_awaited_by(&self, peer: u32, at_the_end: Duration) -> bool {
        let Some(theirs) = self.membership.page().waits_in(peer) else { return false };
        let ours = self.membership.collectives.progress(theirs.communicator);
        let is_certain = theirs.communicator == self.number || at_the_end >= OTHER_THREAD_GRACE;
        theirs.turns > ours.turns && is_certain
    }

    /// The one of `peers` that has let go of the communicator without the collective that this rank is in. It has had
    /// the time to leave and say why.
    pub(super) fn departed_peer(&self, peers: &[u32]) -> Option<u32> {
        let (page, ours) = (self.membership.page(), self.progress());
        let grace = DEPARTURE_GRACE.min(self.timeout / 2);
        peers.iter().copied().find(|peer| {
            page.ends_at(*peer)
                .is_some_and(|place| place.communicator == ours.communicator && place.turns < ours.turns)
                && now().saturating_sub(page.progress(*peer).changed) >= grace
        })
    }
}
