//! How a node is lost, and what follows from that: its ranks are lost with it, and it may be replaced.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::{Coordinator, OWN, Stage, failure};
use crate::exit_code;
use crate::nodes::message::ToAgent;
use crate::supervisor::Event;

/// Longest time until an agent notices that the coordinator does not answer.
pub(super) const DETECTION_TIME: Duration = Duration::from_secs(6);

/// How a node was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NodeLoss {
    /// Its agent's connection has ended.
    Ended,
    /// Its host does not answer.
    Unreachable,
    /// Its agent has sent nothing for this long, although its host answers.
    Silent(Duration),
    /// It broke the protocol, or could not continue, as the text says.
    Failed(String),
}

impl NodeLoss {
    /// What happened, as a sentence about the node on `host`.
    pub(crate) fn describe(&self, host: &str) -> String {
        match self {
            NodeLoss::Ended => format!("mgpurun on {host} ended without a goodbye"),
            NodeLoss::Unreachable => format!("host {host} does not answer"),
            NodeLoss::Silent(time) => {
                let seconds = time.as_secs_f64();
                format!(
                    "mgpurun on {host} has been silent for {seconds:.0} s, though its host answers (--node-timeout)"
                )
            }
            NodeLoss::Failed(why) => format!("mgpurun on {host} failed: {why}"),
        }
    }

    /// Whether processes may still run on the node for a while.
    fn may_have_ranks(&self) -> bool {
        matches!(self, NodeLoss::Unreachable | NodeLoss::Silent(_))
    }
}

impl Coordinator {
    /// Removes a node that was lost.
    pub(super) fn lose(&mut self, index: usize, loss: &NodeLoss, now: Instant) {
        if self.members[index].id == OWN {
            // It is still there, to be told that the job is over.
            let host = self.members[index].card.as_ref().map_or_else(String::new, |card| card.host.clone());
            let message = format!("{}; it coordinates the job, which ends", loss.describe(&host));
            return self.end(failure(exit_code::NODE_LOST, message));
        }
        let member = self.members.remove(index);
        let Some(card) = member.card else { return };
        if loss.may_have_ranks() && member.node.is_some() && !member.is_gone {
            self.not_before = self.not_before.max(Some(now + DETECTION_TIME + self.config.grace));
        }
        match (&self.stage, member.node) {
            (Stage::Running, Some(node)) => {
                let epoch = self.epoch_mut();
                let (host, ranks) = (epoch.hosts[node as usize].clone(), epoch.layout.ranks_of(node));
                let said = loss.describe(&host);
                let message = format!("{said}; {} lost, and the other ranks are stopped", its_ranks(&ranks));
                let how = format!("was lost: {said}");
                self.supervise(Event::NodeLost { ranks, how, message }, now);
            }
            (Stage::Ending(_), _) => self.conclude_if_all_gone(now),
            (Stage::Gathering(_) | Stage::Pausing(_), _) => {
                let text = format!("{}; waiting for it or a replacement", loss.describe(&card.host));
                self.outbox.push((OWN, ToAgent::Say { text }));
            }
            (Stage::Running, None) | (Stage::Over, _) => {}
        }
    }
}

/// "its rank 4 is" or "its ranks 4-7 are".
fn its_ranks(ranks: &Range<u32>) -> String {
    match ranks.len() {
        1 => format!("its rank {} is", ranks.start),
        _ => format!("its ranks {}-{} are", ranks.start, ranks.end - 1),
    }
}
