//! What ranks of other hosts do. The progress page of a host does not show that, or not all of it and late, except for how
//! they end. So it is asked for at the rendezvous, and only once a wait is long.
//!
//! - A rank whose wait has timed out enters a barrier. The members that are not in it soon after do not wait: they are
//!   to blame.
//! - A rank that has waited for a second in a collective says how many it has begun in which communicator. A rank at the
//!   shutdown of a communicator asks one of the others each second. If that one waits in a collective that this rank has
//!   never begun, the wait cannot succeed. Such a statement stays true, so it does not matter when it is read; and it stays
//!   on the host of the rank that makes it, so a rank that waits sends nothing to other hosts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::link::{Link, WaitContext};
use crate::progress::CollectiveCounter;

/// How much later the timeout of a rank on another host may pass than that of this rank.
const OVERDUE_LIMIT: Duration = Duration::from_secs(2);

/// Longest wait for the answer to a question.
const ANSWER_LIMIT: Duration = Duration::from_millis(25);

/// When a rank has said last that it waits in a communicator.
#[derive(Debug, Default)]
pub(super) struct Statement {
    /// After so many seconds of a wait.
    second: AtomicU64,
}

impl Link {
    /// Whether a rank is on another host.
    pub(super) fn is_remote(&self, rank: u32) -> bool {
        self.membership.store().layout().is_some_and(|layout| !layout.is_local(rank))
    }

    /// Whether a member is on another host.
    pub(super) fn has_remote_members(&self) -> bool {
        self.members.world_ranks().iter().any(|member| self.is_remote(*member))
    }

    /// Whether a rank does something other than waiting, as far as this host's page shows.
    pub(super) fn is_busy(&self, rank: u32) -> bool {
        match self.membership.page().progress(rank).operation {
            Some(last) => !(last.running && last.waits_for.is_some()),
            None => !self.is_remote(rank),
        }
    }

    /// The members that do not wait in this collective; `None` if that is not known, or all wait.
    pub(super) fn absent_members(&self, context: &WaitContext) -> Option<Vec<u32>> {
        if !context.is_collective() || !self.has_remote_members() || self.membership.store().is_in_use() {
            return None;
        }
        let name = format!("{}/overdue/{}", self.key, context.sequence);
        let limit = OVERDUE_LIMIT.min(self.timeout);
        match self.membership.store().barrier_of(&name, self.members.world_ranks(), limit) {
            Err(mgpu_control::Error::Timeout { mut waited_for, .. }) => {
                // Those of this host that wait have only begun later.
                waited_for.retain(|member| self.is_remote(*member) || self.is_busy(*member));
                Some(waited_for).filter(|absent| !absent.is_empty())
            }
            _ => None,
        }
    }

    /// Says that this rank waits in a collective, after 1, 2, 4, … seconds. It says so again, because whoever reads it
    /// removes it, and may be another one than the rank that blocks it.
    pub(super) fn state_wait(&self, context: &WaitContext, waited: Duration) {
        let second = waited.as_secs();
        // In every call: the next wait begins with second 0.
        let is_new = second != self.statement.second.swap(second, Ordering::Relaxed);
        let is_due = is_new && second.is_power_of_two();
        if !is_due || !context.is_collective() || !self.has_remote_members() {
            return;
        }
        let (store, rank, key) = (self.membership.store(), self.rank(), statement_of(self.rank()));
        let CollectiveCounter { communicator, count } = self.progress();
        let value = [communicator.to_le_bytes(), count.to_le_bytes()].concat();
        if store.is_in_use() {
            return;
        }
        // The previous one, if nobody has read it. If this cannot be said, the others find out at the timeout.
        let _ = store.get(&key, rank, Duration::ZERO);
        let _ = store.set(&key, &value, &[], 1);
    }

    /// Whether the rank of another host that is asked now waits in a collective that this rank, which has been at the
    /// shutdown for so long, has never begun.
    pub(super) fn is_awaited_remotely(&self, at_the_end: Duration) -> bool {
        let second = at_the_end.as_secs();
        let is_new = second != self.statement.second.swap(second, Ordering::Relaxed);
        // Another thread may be about to begin it.
        if !is_new || second == 0 || !self.has_remote_members() || self.membership.store().is_in_use() {
            return false;
        }
        let world = 0..self.membership.page().world_size();
        let remote: Vec<u32> = world.filter(|rank| self.is_remote(*rank)).collect();
        let turn = (u64::from(self.rank()) + second) % remote.len().max(1) as u64;
        let Some(peer) = remote.get(turn as usize) else { return false };
        let Ok((value, _)) = self.membership.store().get(&statement_of(*peer), *peer, ANSWER_LIMIT) else {
            return false;
        };
        let number = |at: usize| Some(u32::from_le_bytes(value.get(at..at + 4)?.try_into().ok()?));
        let (Some(communicator), Some(theirs)) = (number(0), number(4)) else { return false };
        let ours = self.membership.collectives.progress_if_member(communicator);
        ours.is_some_and(|ours| theirs > ours)
    }
}

/// Where a rank says that it waits.
fn statement_of(rank: u32) -> String {
    format!("nccl/rank-{rank}-waits")
}
