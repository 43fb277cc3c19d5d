//! Asking all ranks to stop at the same place. `progress::stop` says how they agree on it.

use super::Server;
use crate::nodes::RelayMessage;

impl Server {
    /// Asks all ranks to stop at the same one of their stop checks. True if they were not asked before. With several nodes
    /// the request goes to the [`Hub`](crate::nodes::Hub).
    pub fn ask_to_stop(&mut self) -> bool {
        if std::mem::replace(&mut self.stop_asked, true) {
            return false;
        }
        if self.layout.is_one_host() {
            self.page.stop_at(self.page.propose_stop(self.layout.local_ranks()));
        } else {
            self.outbox.push(RelayMessage::AskToStop);
        }
        true
    }

    /// True once the ranks of this node were asked to stop.
    pub fn has_asked_to_stop(&self) -> bool {
        self.stop_asked
    }

    /// True if all ranks of this node that still run stop by themselves when they are asked to; `has_ended` says which of
    /// them do not run. False if none runs.
    pub fn can_stop(&self, has_ended: impl Fn(u32) -> bool) -> bool {
        let mut running = self.layout.local_ranks().filter(|rank| !has_ended(*rank)).peekable();
        running.peek().is_some() && running.all(|rank| self.page.checks_for_stops(rank))
    }

    /// Holds the ranks of this node at their next stop check, and tells the hub how far they are.
    pub(super) fn propose_stop(&mut self) {
        self.stop_asked = true;
        let check = self.page.propose_stop(self.layout.local_ranks());
        self.outbox.push(RelayMessage::StopBound { check });
    }

    /// Makes the ranks of this node stop at this check.
    pub(super) fn stop_at(&mut self, check: u64) -> Result<(), String> {
        if !self.stop_asked || check == 0 {
            return Err(format!("the hub says that ranks stop at check {check}, which it did not propose"));
        }
        self.page.stop_at(check);
        Ok(())
    }
}
