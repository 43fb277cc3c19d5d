//! Which nodes belong to the job: they join before a start, or wait for the next one, or are refused.

use std::time::Instant;

use super::{Coordinator, MemberId, Stage, failure};
use crate::exit_code;
use crate::nodes::card::NodeCard;
use crate::nodes::message::ToAgent;
use crate::supervisor::Outcome;

impl Coordinator {
    /// Handles the first message of an agent.
    pub(super) fn join(&mut self, index: usize, card: NodeCard, now: Instant) -> Result<(), String> {
        if self.members[index].card.is_some() {
            return Err("joined twice".into());
        }
        let most = *self.config.nodes.end();
        let others = self.members.iter().filter_map(|member| member.card.as_ref());
        let own = others.clone().next().filter(|_| card.node_rank == Some(0));
        let contradiction = match card.node_rank {
            _ if card.ranks == 0 => return Err("joined without ranks".into()),
            Some(rank) if rank >= most => {
                let host = &card.host;
                Some(format!("host {host} has node rank {rank} of {most} nodes: node ranks count from 0"))
            }
            _ => others.clone().find_map(|other| other.contradiction(&card)).or_else(|| {
                let (own, other) = (&own?.host, &card.host);
                Some(format!(
                    "host {own} is node 0, and host {other} has node rank 0: give each its own --node-rank"
                ))
            }),
        };
        if let Some(why) = contradiction {
            let is_own = own == Some(&card);
            self.has_met_itself |= is_own;
            // Nobody's replacement: the nodes were started differently, and a restart would not help.
            if self.restarts == 0 && matches!(self.stage, Stage::Gathering(_)) && !is_own {
                self.end(Outcome { incompatible: true, ..failure(exit_code::NODES_DIFFER, why) });
            } else {
                self.refuse(index, exit_code::NODES_DIFFER, why);
            }
            return Ok(());
        }
        if others.clone().count() as u32 >= most {
            let hosts: Vec<&str> = others.map(|card| card.host.as_str()).collect();
            let why = format!("the job has all its {most} nodes already: {}", hosts.join(", "));
            self.refuse(index, exit_code::NODES_DIFFER, why);
            return Ok(());
        }
        let id = self.members[index].id;
        self.members[index].card = Some(card);
        match self.stage {
            Stage::Gathering(_) => self.start_if_complete(now),
            _ => {
                let text = "the ranks run without this node, which joins them at their next restart".into();
                self.outbox.push((id, ToAgent::Say { text }));
            }
        }
        Ok(())
    }

    /// True while no other node has joined, and the ranks have not been started.
    pub(crate) fn waits_alone(&self) -> bool {
        matches!(self.stage, Stage::Gathering(_)) && self.restarts == 0 && self.cards().count() == 1
    }

    /// True if node 0 has joined as if it were another node. It does so to find out where its endpoint leads.
    pub(crate) fn has_met_itself(&self) -> bool {
        self.has_met_itself
    }

    fn refuse(&mut self, index: usize, exit_code: u8, why: String) {
        let id = self.members.remove(index).id;
        self.outbox.push((id, ToAgent::Refused { exit_code, why }));
    }

    /// The nodes that have joined.
    pub(super) fn cards(&self) -> impl Iterator<Item = (MemberId, &NodeCard)> {
        self.members.iter().filter_map(|member| Some((member.id, member.card.as_ref()?)))
    }

    pub(super) fn is_complete(&self) -> bool {
        self.cards().count() as u32 >= *self.config.nodes.end()
    }

    pub(super) fn is_enough(&self) -> bool {
        self.cards().count() as u32 >= *self.config.nodes.start()
    }

    /// Starts the ranks if all nodes are there, or enough of them when the time is over.
    pub(super) fn start_if_complete(&mut self, now: Instant) {
        let Stage::Gathering(until) = self.stage else { return };
        let may_start = self.not_before.is_none_or(|time| time <= now);
        if may_start && (self.is_complete() || until <= now && self.is_enough()) {
            self.start(now);
        } else if until <= now && !self.is_enough() {
            self.give_up();
        }
    }

    /// Ends the job because nodes have not come.
    fn give_up(&mut self) {
        let count = self.cards().count();
        let (min, max) = (*self.config.nodes.start(), *self.config.nodes.end());
        let wanted = if min == max { format!("{max}") } else { format!("at least {min}") };
        let hosts: Vec<&str> = self.cards().map(|(_, card)| card.host.as_str()).collect();
        let ranks: Vec<u32> = self.cards().filter_map(|(_, card)| card.node_rank).collect();
        let missing: Vec<String> =
            (1..max).filter(|rank| !ranks.contains(rank)).map(|rank| rank.to_string()).collect();
        // Known only if the nodes are numbered.
        let names = match ranks.len() + 1 >= hosts.len() && !ranks.is_empty() && min == max {
            true => format!("; missing: node {}", missing.join(", ")),
            false => String::new(),
        };
        let why = format!(
            "{count} of {wanted} nodes joined within {} s ({}){names}; a slow start needs a longer --timeout",
            self.config.join_timeout.as_secs_f64(),
            hosts.join(", ")
        );
        let code = if self.restarts == 0 { exit_code::NEVER_JOINED } else { exit_code::NODE_LOST };
        self.end(failure(code, why));
    }
}
