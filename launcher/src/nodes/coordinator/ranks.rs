//! What happens to ranks, and what is done about it: events go to the supervisor, and its decisions to the agents.

use std::time::Instant;

use mgpu_control::nodes::{HubAction, RankEnd, RelayMessage};

use super::{Coordinator, MemberId, OWN, Stage};
use crate::exit_code;
use crate::nodes::message::{FromAgent, MAX_RELAYED, Order, ToAgent};
use crate::supervisor::{Action, Event, StopCause};

impl Coordinator {
    /// Handles a message about the ranks of a node.
    pub(super) fn handle_of_epoch(
        &mut self,
        index: usize,
        node: u32,
        host: &str,
        message: FromAgent,
        now: Instant,
    ) -> Result<(), String> {
        let Some(epoch) = &mut self.epoch else { return Err("sent a message of a run that is over".into()) };
        let ranks = epoch.layout.ranks_of(node);
        let check = |rank: u32| match ranks.contains(&rank) {
            true => Ok(rank),
            false => Err(format!("sent a message about rank {rank}, which is not on host {host}")),
        };
        match message {
            FromAgent::Relay { messages } => {
                for message in messages {
                    let actions = self.epoch_mut().hub.handle(node, message)?;
                    self.route(actions, now);
                }
            }
            FromAgent::Joined { rank } => self.supervise(Event::Joined(check(rank)?), now),
            FromAgent::Incompatible { rank, exit_code, why } => {
                self.supervise(Event::Incompatible { rank: check(rank)?, exit_code, why }, now);
            }
            FromAgent::Silent { rank, idle, doing } if self.members[index].id == OWN => {
                self.supervise(Event::Silent { rank, idle, doing }, now);
            }
            FromAgent::Silent { .. } => return Err("reported a silent rank, which node 0 does".into()),
            FromAgent::Exited { rank, exit, blame, last_lines } => {
                let rank = check(rank)?;
                epoch.note_exit(rank, blame.as_ref(), last_lines);
                let exited = Event::Exited { rank, exit, blame };
                match self.must_wait_for_doubtful_nodes(exit, now) {
                    true => self.epoch_mut().held.push((exited, now)),
                    false => self.supervise(exited, now),
                }
            }
            FromAgent::Progress { entries, stopped, .. } => {
                for rank in entries.iter().map(|(rank, _)| rank).chain(&stopped) {
                    check(*rank)?;
                }
                epoch.has_made_a_step |= entries.iter().any(|(_, entry)| entry.steps_begun > 1);
                if self.members[index].id != OWN {
                    self.outbox.push((OWN, ToAgent::Progress { node, entries, stopped }));
                }
            }
            FromAgent::Gone { reader_is_gone } => {
                self.members[index].is_gone = true;
                self.reader_is_gone |= reader_is_gone && self.members[index].id == OWN;
                self.conclude_if_all_gone(now);
            }
            FromAgent::Join(_)
            | FromAgent::Signalled { .. }
            | FromAgent::StopAsked { .. }
            | FromAgent::Failed { .. } => {}
        }
        Ok(())
    }

    /// Passes an event to the supervisor, and its decisions to the agents.
    pub(super) fn supervise(&mut self, event: Event, now: Instant) {
        let Some(epoch) = &mut self.epoch else { return };
        let actions = epoch.supervisor.handle(event, now);
        let mut ends = Vec::new();
        for action in actions {
            match action {
                Action::Announce(rank, end) => {
                    let blame = self.epoch_mut().blames.get(&rank).cloned();
                    ends.push(RankEnd { rank, end, blame });
                }
                Action::Send(rank, signal) => {
                    self.announce(&mut ends, now);
                    let node = self.epoch_mut().layout.node_of(rank);
                    self.order(node, Order::Send { rank, signal: signal as i32 });
                }
                Action::AskToStop => {
                    let actions = self.epoch_mut().hub.ask_to_stop();
                    self.route(actions, now);
                }
                Action::Say(text) => self.outbox.push((OWN, ToAgent::Say { text })),
                Action::Report => self.outbox.push((OWN, ToAgent::Do { orders: vec![Order::Report] })),
                Action::Settle(outcome) => {
                    self.announce(&mut ends, now);
                    self.order_all(&Order::Settle { outcome });
                }
                Action::Finish(outcome) => {
                    self.announce(&mut ends, now);
                    self.order_all(&Order::Finish { outcome: outcome.clone() });
                    self.stage = Stage::Ending(outcome);
                    self.conclude_if_all_gone(now);
                    return;
                }
            }
        }
        self.announce(&mut ends, now);
    }

    /// Tells all nodes how ranks have ended.
    fn announce(&mut self, ends: &mut Vec<RankEnd>, now: Instant) {
        if !ends.is_empty() {
            let actions = self.epoch_mut().hub.announce(std::mem::take(ends));
            self.route(actions, now);
        }
    }

    /// Carries out what the hub wants.
    pub(super) fn route(&mut self, actions: Vec<HubAction>, now: Instant) {
        for action in actions {
            match action {
                HubAction::Send { node, message } => self.relay_to(node, message),
                HubAction::Incompatible { node, fault, why } => {
                    let rank = self.epoch_mut().layout.ranks_of(node).start;
                    let exit_code = exit_code::preflight(fault);
                    self.supervise(Event::Incompatible { rank, exit_code, why }, now);
                }
                HubAction::Admitted => {}
                HubAction::StopAsked { .. } => self.supervise(Event::StopAsked(StopCause::Rank), now),
            }
        }
    }

    /// Sends a relayed message; several in a row share one frame.
    fn relay_to(&mut self, node: u32, message: RelayMessage) {
        let Some(id) = self.member_at(node) else { return };
        match self.outbox.last_mut() {
            Some((last, ToAgent::Relay { messages })) if *last == id && messages.len() < MAX_RELAYED => {
                messages.push(message);
            }
            _ => self.outbox.push((id, ToAgent::Relay { messages: vec![message] })),
        }
    }

    /// Sends an order to a node; several in a row share one frame.
    fn order(&mut self, node: u32, order: Order) {
        let Some(id) = self.member_at(node) else { return };
        match self.outbox.last_mut() {
            Some((last, ToAgent::Do { orders })) if *last == id => orders.push(order),
            _ => self.outbox.push((id, ToAgent::Do { orders: vec![order] })),
        }
    }

    /// The member that is a node of this epoch, unless it is lost.
    fn member_at(&self, node: u32) -> Option<MemberId> {
        let id = *self.epoch.as_ref()?.members.get(node as usize)?;
        self.index_of(id).map(|_| id)
    }

    /// Sends an order to all nodes that take part in this epoch.
    pub(super) fn order_all(&mut self, order: &Order) {
        for member in self.members.iter().filter(|member| member.node.is_some()) {
            self.outbox.push((member.id, ToAgent::Do { orders: vec![order.clone()] }));
        }
    }

    /// Tells all nodes what is new. The first news are told at once, and what follows soon after is collected, so that
    /// the number of messages does not grow with ranks times nodes.
    pub(super) fn flush_news(&mut self, now: Instant) {
        let next_flush = self.next_flush;
        let Some(epoch) = self.epoch.as_mut().filter(|epoch| next_flush <= now && epoch.hub.has_news())
        else {
            return;
        };
        self.next_flush = now + epoch.hub.flush_interval();
        let actions = epoch.hub.flush();
        self.route(actions, now);
    }
}
