//! The communicators of a rank that fail together: one of the world, and all groups that were split from it.
//!
//! A rank that has failed takes part in none of them any more, so they are aborted together. All aborts begin before
//! the first is waited for: NCCL frees memory in an abort, and that waits for the GPU, which may be busy with another
//! communicator's kernel that only its own abort ends.
//!
//! Shutting down a communicator needs all of its ranks, but ranks may drop overlapping groups in different orders.
//! So a rank that does not meet the other members soon keeps the communicator, unused, until it has dropped all of the
//! family; there all ranks of the world meet, and the rest is shut down at once. See [`shutdown`](super::shutdown).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::owner::{Ended, Owner};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Family {
    /// Number of the world's communicator.
    number: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// No communicator joins any more: the others are being aborted.
    stopped: bool,
    /// In the order of their creation.
    communicators: Vec<FamilyMember>,
}

#[derive(Debug)]
struct FamilyMember {
    number: u32,
    owner: Arc<Owner>,
    /// Whether it was dropped.
    retired: bool,
}

impl Family {
    /// The family of the world's communicator `number`.
    pub(super) fn new(number: u32) -> Self {
        Family { number, state: Mutex::default() }
    }

    /// Number of the world's communicator.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Adds a communicator that is about to be connected. It is told to stop if the others were.
    pub(super) fn add(&self, number: u32, owner: &Arc<Owner>) {
        let mut state = self.state();
        if state.stopped {
            owner.request_stop();
        }
        state.communicators.push(FamilyMember { number, owner: Arc::clone(owner), retired: false });
    }

    /// Whether other communicators than one are in use.
    pub(super) fn has_others(&self) -> bool {
        self.state().communicators.iter().filter(|member| !member.retired).count() > 1
    }

    /// Removes a communicator that was shut down. True if none is in use any more.
    pub(super) fn remove(&self, number: u32) -> bool {
        let mut state = self.state();
        state.communicators.retain(|member| member.number != number);
        state.is_unused()
    }

    /// Keeps a communicator that was dropped. True if none is in use any more.
    pub(super) fn retire(&self, number: u32) -> bool {
        let mut state = self.state();
        let members = state.communicators.iter_mut();
        members.filter(|member| member.number == number).for_each(|member| member.retired = true);
        state.is_unused()
    }

    /// Whether communicator `number` was dropped and still exists.
    pub(super) fn has_retired(&self, number: u32) -> bool {
        self.state().communicators.iter().any(|member| member.number == number && member.retired)
    }

    /// Starts no further operation in any of the communicators.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        state.communicators.iter().for_each(|member| member.owner.request_stop());
    }

    /// Aborts all communicators.
    pub(super) fn abort(&self) {
        let owners = self.owners();
        // A communicator that is being connected has no kernels. If it is being split from another one, that one's
        // abort ends the split.
        let (connected, connecting): (Vec<_>, Vec<_>) = owners.iter().partition(|owner| owner.is_connected());
        let begun: Vec<_> = connected.into_iter().map(|owner| (owner, owner.begin_abort())).collect();
        for (owner, aborted) in begun {
            let _: Ended = owner.finish_abort(aborted);
        }
        for owner in connecting {
            let _: Ended = owner.abort();
        }
    }

    /// Shuts down all communicators together with the other ranks; aborts those for which that takes longer than
    /// `limit`.
    pub(super) fn finalise(&self, limit: Duration) {
        let owners = self.owners();
        let deadline = Instant::now() + limit;
        let begun: Vec<_> = owners.iter().map(|owner| (owner, owner.begin_finalise())).collect();
        for (owner, finalised) in begun {
            let left = deadline.saturating_duration_since(Instant::now());
            let _: Ended = owner.finish_finalise(&finalised, left);
        }
        self.state().communicators.clear();
    }

    fn owners(&self) -> Vec<Arc<Owner>> {
        self.state().communicators.iter().map(|member| Arc::clone(&member.owner)).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_unused(&self) -> bool {
        self.communicators.iter().all(|member| member.retired)
    }
}
