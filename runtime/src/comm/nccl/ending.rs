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
use crate::progress::{CollectiveCounter, Operation, now};

/// The first wait at the end before a rank looks around, and the longest.
const SLICES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));

/// How long a rank at the end of one communicator believes that another of its threads may come to the collective of
/// another one in which a peer waits.
const OTHER_THREADS: Duration = Duration::from_secs(1);

/// How long a rank that is seen to let go of a communicator may take to leave, and to say why, before it is reported
/// without a reason.
const FAREWELL: Duration = Duration::from_secs(2);

/// How it stands with a rank's communicators.
#[derive(Debug, Default)]
pub(crate) struct Standing {
    /// Collectives begun, by the number of their communicator.
    turns: Mutex<HashMap<u32, u32>>,
    /// One of them ended by force: the others need not wait for peers that do not come.
    failing: AtomicBool,
}

impl Standing {
    fn turns(&self) -> MutexGuard<'_, HashMap<u32, u32>> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a collective, or a graph of them.
    pub(super) fn count_turn(&self, communicator: u32) {
        *self.turns().entry(communicator).or_default() += 1;
    }

    /// How far this rank is.
    pub(super) fn place(&self, communicator: u32) -> CollectiveCounter {
        let turns = self.turns().get(&communicator).copied().unwrap_or_default();
        CollectiveCounter { communicator, count: turns }
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
    pub(super) fn place(&self) -> CollectiveCounter {
        self.membership.standing.place(self.number)
    }

    /// True once all ranks have come to the end, false if that is not to be expected any more.
    pub(super) fn come_to_the_end(&self) -> bool {
        let (page, store) = (self.membership.page(), self.membership.store());
        if std::thread::panicking() || self.membership.standing.is_failing() {
            return false;
        }
        page.enter(self.rank, Operation::Barrier, 0, 0);
        page.note_finalised(self.rank, self.place());
        // So that nobody takes a rank that is early for a silent one.
        page.wait(self.rank, u32::from(self.rank == 0));
        let (name, began, mut slice) = (format!("{}/end", self.name), Instant::now(), SLICES.0);
        let together = loop {
            if page.first_failed().is_some() {
                break false;
            }
            match store.barrier(&name, slice.min(self.timeout)) {
                Ok(()) => break true,
                Err(mgpu_control::Error::Timeout { .. }) if began.elapsed() < self.timeout => {}
                Err(_) => break false,
            }
            if self.peers().into_iter().any(|peer| self.is_missed_by(peer, began.elapsed())) {
                break false;
            }
            slice = (slice * 2).min(SLICES.1);
        };
        page.leave(self.rank);
        together
    }

    /// True if `peer` waits in a collective that this rank, which has been at the end for a while, has never begun.
    fn is_missed_by(&self, peer: u32, at_the_end: Duration) -> bool {
        let Some(theirs) = self.membership.page().waiting_collective(peer) else { return false };
        let ours = self.membership.standing.place(theirs.communicator);
        let is_certain = theirs.communicator == self.number || at_the_end >= OTHER_THREADS;
        theirs.count > ours.count && is_certain
    }

    /// The one of `peers` that has let go of the communicator without the collective that this rank is in. It has had
    /// the time to leave and say why.
    pub(super) fn deserter(&self, peers: &[u32]) -> Option<u32> {
        let (page, ours) = (self.membership.page(), self.place());
        let patience = FAREWELL.min(self.timeout / 2);
        peers.iter().copied().find(|peer| {
            page.finalised_at(*peer)
                .is_some_and(|place| place.communicator == ours.communicator && place.count < ours.count)
                && now().saturating_sub(page.progress(*peer).changed) >= patience
        })
    }
}
