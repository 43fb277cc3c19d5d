//! Ends of ranks that are not judged yet, because a node may be about to be lost.
//!
//! The ranks that exchange data with a lost host fail because of that, and may notice it before the coordinator does. So
//! the end of a rank is held while a node is in doubt: either the node is lost, and with it the culprit is known, or it
//! confirms again that it hears the coordinator.

use std::time::{Duration, Instant};

use super::{Coordinator, Member, OWN};
use crate::supervisor::Exit;

/// A node that has not confirmed for so long that it hears the coordinator may be about to be lost.
pub(super) const DOUBT: Duration = Duration::from_millis(2500);
/// Longest time for which the end of a rank is not judged because of that: a dead link is given up in it.
pub(super) const MAX_HOLD: Duration = Duration::from_secs(3);

impl Coordinator {
    /// Whether the end of a rank has to be judged later: a node may be about to be lost. Its peers would then fail only
    /// because of that, and may have noticed it first: packets to a node can be lost while those from it arrive.
    pub(super) fn must_wait_for_doubtful_nodes(&self, exit: Exit, now: Instant) -> bool {
        let Some(epoch) = &self.epoch else { return false };
        !epoch.held.is_empty()
            || exit != Exit::Code(0) && epoch.supervisor.is_undecided() && self.has_doubtful_node(now)
    }

    /// True if a node has not confirmed for a while that it hears the coordinator, or has not been heard itself.
    fn has_doubtful_node(&self, now: Instant) -> bool {
        let is_doubtful = |member: &Member| now.saturating_duration_since(member.confirmed) >= DOUBT;
        self.members.iter().any(|member| member.id != OWN && member.node.is_some() && is_doubtful(member))
    }

    /// Passes the ends of ranks on that were held back, once it is clear which nodes are lost.
    pub(super) fn release_held(&mut self, now: Instant) {
        let Some(epoch) = &self.epoch else { return };
        let Some((_, since)) = epoch.held.first() else { return };
        let is_over = now.saturating_duration_since(*since) >= MAX_HOLD;
        if is_over || !epoch.supervisor.is_undecided() || !self.has_doubtful_node(now) {
            for (event, _) in std::mem::take(&mut self.epoch_mut().held) {
                self.supervise(event, now);
            }
        }
    }
}
