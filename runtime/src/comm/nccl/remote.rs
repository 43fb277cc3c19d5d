//! What ranks of other hosts do. The progress page of a host does not show that, except for how they end, so it is asked
//! for at the rendezvous, and only once a wait is long.
//!
//! - A rank whose wait has timed out enters a barrier. The members that are not in it soon after do not wait: they are
//!   to blame.
//! - A rank that has dropped a communicator before the others says so. A rank that waits in a collective asks one member
//!   each second whether it has; different ranks ask different ones, so all of them are asked within about a second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::link::{Link, WaitContext};

/// How much later the timeout of a rank on another host may pass than that of this rank.
const OVERDUE_LIMIT: Duration = Duration::from_secs(2);

/// Longest wait for the answer to a question.
const ANSWER_LIMIT: Duration = Duration::from_millis(25);

/// The questions of a rank in one communicator.
#[derive(Debug, Default)]
pub(super) struct Inquiry {
    /// In which second of a wait it has asked last.
    second: AtomicU64,
}

impl Link {
    /// Whether a rank is on another host.
    pub(super) fn is_remote(&self, rank: u32) -> bool {
        self.membership.store().layout().is_some_and(|layout| !layout.is_local(rank))
    }

    fn has_remote_members(&self) -> bool {
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
        if !context.is_collective() || !self.has_remote_members() {
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

    /// Tells ranks of other hosts how many collectives this one has begun in the communicator that it has dropped.
    pub(super) fn announce_departure(&self) {
        if self.has_remote_members() {
            let begun = self.progress().count.to_le_bytes();
            // If it cannot be said, the others find out at their timeouts.
            let _ =
                self.membership.store().set(&self.departure(self.rank()), &begun, &[], self.members.size());
        }
    }

    /// The member of another host that has dropped the communicator before the collective in which this rank waits, if
    /// the one that is asked now has.
    pub(super) fn departed_remote_peer(&self, context: &WaitContext, waited: Duration) -> Option<u32> {
        let second = waited.as_secs();
        if second == self.inquiry.second.swap(second, Ordering::Relaxed)
            || second == 0
            || !context.is_collective()
        {
            return None;
        }
        let remote: Vec<u32> = context.peers.iter().copied().filter(|peer| self.is_remote(*peer)).collect();
        let turn = (u64::from(self.rank()) + second) % remote.len().max(1) as u64;
        let peer = *remote.get(turn as usize)?;
        let (value, _) = self.membership.store().get(&self.departure(peer), peer, ANSWER_LIMIT).ok()?;
        let begun = u32::from_le_bytes(value.try_into().ok()?);
        (begun < self.progress().count).then_some(peer)
    }

    /// Where a rank says that it has dropped the communicator.
    fn departure(&self, rank: u32) -> String {
        format!("{}/departed/{rank}", self.key)
    }
}
