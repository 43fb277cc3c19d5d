//! An epoch: one start of all ranks, from the numbers of the nodes to the decision whether another epoch follows.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use mgpu_control::nodes::{Hub, Layout};
use mgpu_control::rendezvous::Blame;

use super::{Coordinator, MemberId, OWN, Stage, failure};
use crate::exit_code;
use crate::nodes::arrangement::{arrange, name_hosts};
use crate::nodes::card::NodeCard;
use crate::nodes::message::{MAX_LAST_LINE, MAX_LAST_LINES, StartOrder, ToAgent};
use crate::nodes::net::decide;
use crate::restart::{Decision, Reached};
use crate::supervisor::{Event, RankHosts, Supervisor};

/// One start of all ranks.
pub(super) struct Epoch {
    pub(super) layout: Layout,
    /// The name of each node's host.
    pub(super) hosts: Vec<String>,
    /// The member of each node. It may be lost.
    pub(super) members: Vec<MemberId>,
    pub(super) supervisor: Supervisor,
    pub(super) hub: Hub,
    pub(super) blames: BTreeMap<u32, Blame>,
    pub(super) last_lines: BTreeMap<u32, Vec<String>>,
    /// Ends of ranks that are not judged yet, and since when.
    pub(super) held: Vec<(Event, Instant)>,
    /// Some rank has completed a training step.
    pub(super) has_made_a_step: bool,
}

impl Coordinator {
    pub(super) fn epoch_mut(&mut self) -> &mut Epoch {
        self.epoch.as_mut().expect("checked by the caller")
    }

    /// Gives every node its ranks and starts them.
    pub(super) fn start(&mut self, now: Instant) {
        let order = arrange(
            &self
                .members
                .iter()
                .filter_map(|member| {
                    Some((
                        member.id,
                        member.card.as_ref()?.node_rank.or(member.node),
                        member.card.as_ref()?.host.as_str(),
                    ))
                })
                .collect::<Vec<_>>(),
        );
        let member_of = |id: MemberId| self.index_of(id).map(|index| &self.members[index]);
        let cards: Vec<(&NodeCard, Option<IpAddr>)> = order
            .iter()
            .filter_map(|id| member_of(*id))
            .filter_map(|member| Some((member.card.as_ref()?, member.address)))
            .collect();
        let hosts = name_hosts(cards.iter().map(|(card, address)| (card.host.as_str(), *address)));
        let mut world_size = 0u32;
        let mut first_ranks = Vec::new();
        for (card, _) in &cards {
            first_ranks.push(world_size);
            world_size = world_size.saturating_add(card.ranks);
        }
        let sizes: Vec<String> = cards.iter().map(|(card, _)| card.ranks.to_string()).collect();
        let is_unequal = cards.iter().any(|(card, _)| card.ranks != cards[0].0.ranks);
        let names = first_ranks.iter().copied().zip(hosts.iter().cloned()).collect();
        let layout = match Layout::new(first_ranks, world_size, 0) {
            Ok(layout) => layout,
            Err(why) => return self.end(failure(exit_code::LAUNCHER, why)),
        };
        let nets: Vec<_> =
            hosts.iter().map(String::as_str).zip(cards.iter().map(|(card, _)| &card.net)).collect();
        let (net, line) = match decide(&nets) {
            Ok(decided) => decided,
            Err(why) => return self.end(failure(exit_code::LAUNCHER, why)),
        };
        if let Some(text) = line.filter(|_| self.restarts == 0) {
            self.outbox.push((OWN, ToAgent::Say { text }));
        }
        if is_unequal {
            let text = format!("the nodes have unequal numbers of ranks: {}", sizes.join(", "));
            self.outbox.push((OWN, ToAgent::Say { text }));
        }
        self.members.iter_mut().for_each(|member| member.node = None);
        for (id, node) in order.iter().zip(0..) {
            let Some(index) = self.index_of(*id) else { continue };
            let member = &mut self.members[index];
            (member.node, member.is_gone) = (Some(node), false);
            let start = StartOrder {
                layout: layout.seen_from(node).expect("one of its nodes"),
                hosts: hosts.clone(),
                run_id: self.config.run_id.clone(),
                net,
                master_port: self.config.master_port,
                restarts: self.restarts,
                max_restarts: self.config.restart.max_restarts,
            };
            self.outbox.push((*id, ToAgent::Start(Box::new(start))));
        }
        let supervisor = Supervisor::new(world_size, self.config.join_timeout, self.config.grace, now)
            .with_stop_grace(self.config.stop_grace)
            .with_silence(self.config.node_timeout);
        self.epoch = Some(Epoch {
            hub: Hub::new(layout.clone(), hosts.clone()),
            layout,
            hosts,
            members: order,
            supervisor: supervisor.on_hosts(RankHosts { hosts: names }),
            blames: BTreeMap::new(),
            last_lines: BTreeMap::new(),
            held: Vec::new(),
            has_made_a_step: false,
        });
        self.not_before = None;
        self.failure = None;
        self.stage = Stage::Running;
    }

    /// Ends the epoch if no process is left on any node: decides whether another one follows.
    pub(super) fn conclude_if_all_gone(&mut self, now: Instant) {
        let Stage::Ending(outcome) = &self.stage else { return };
        if self.members.iter().any(|member| member.node.is_some() && !member.is_gone) {
            return;
        }
        let outcome = outcome.clone();
        let Some(mut epoch) = self.epoch.take() else { return };
        if let Some(rank) = outcome.culprit
            && epoch.layout.node_of(rank) != 0
            && let Some(lines) = epoch.last_lines.remove(&rank)
        {
            let name = epoch.name(rank);
            self.outbox.push((OWN, ToAgent::LastLines { name, lines }));
        }
        let reached = match epoch.supervisor.has_joined() {
            _ if epoch.has_made_a_step => Reached::Step,
            true => Reached::Join,
            false => Reached::Start,
        };
        let policy = self.config.restart;
        match policy.decide(&outcome, reached, self.restarts) {
            Decision::Restart(pause) if !self.reader_is_gone => {
                let (next, most, seconds) = (self.restarts + 1, policy.max_restarts, pause.as_secs_f64());
                let text = format!("restart {next} of {most} in {seconds} s");
                self.outbox.push((OWN, ToAgent::Say { text }));
                self.failure = Some(outcome);
                self.stage = Stage::Pausing(now + pause);
            }
            decision => {
                if let Decision::Stop(Some(why)) = decision {
                    self.outbox.push((OWN, ToAgent::Say { text: why.to_owned() }));
                }
                self.end(outcome);
            }
        }
    }
}

impl Epoch {
    fn name(&self, rank: u32) -> String {
        format!("rank {rank} (host {})", self.hosts[self.layout.node_of(rank) as usize])
    }

    /// Keeps what is needed later of a rank that has ended. The agent has bounded its lines; they are bounded again.
    pub(super) fn note_exit(&mut self, rank: u32, blame: Option<&Blame>, last_lines: Vec<String>) {
        self.blames.extend(blame.cloned().map(|blame| (rank, blame)));
        let shorten = |line: String| line.chars().take(MAX_LAST_LINE).collect::<String>();
        let lines: Vec<String> = last_lines.into_iter().take(MAX_LAST_LINES).map(shorten).collect();
        if !lines.is_empty() {
            self.last_lines.insert(rank, lines);
        }
    }
}
