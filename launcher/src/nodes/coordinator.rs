//! The coordinator: a pure state machine that makes one job of the agents of all nodes. No I/O.
//!
//! It gathers the nodes, gives each its ranks, and from then on supervises all ranks as if they were on one host: the
//! [`Supervisor`] decides, and each decision goes to the agent of the rank. When the ranks have ended, it waits until
//! every agent has reported that no process is left; only then a new *epoch* (a restart) begins, so that processes of two
//! epochs never run at the same time. Nodes that join meanwhile wait for it.
//!
//! The agent of node 0 is in the same process, and is treated like the others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::{Range, RangeInclusive};
use std::time::{Duration, Instant};

use mgpu_control::nodes::{Hub, HubAction, Layout, RankEnd, RelayMessage};
use mgpu_control::rendezvous::Blame;
use nix::sys::signal::Signal;

use super::arrangement::{arrange, name_hosts};
use super::card::NodeCard;
use super::message::{
    FromAgent, HEARTBEAT, MAX_LAST_LINE, MAX_LAST_LINES, MAX_RELAYED, Order, StartOrder, ToAgent,
};
use super::net::decide;
use crate::exit_code;
use crate::restart::{Decision, Reached, RestartPolicy};
use crate::supervisor::{Action, Event, Exit, Outcome, RankHosts, Supervisor};

/// A node that has connected; the coordinator's own is [`OWN`].
pub(crate) type MemberId = u64;

/// The coordinator's own node.
pub(crate) const OWN: MemberId = 0;

/// Longest time until the kernel of an agent reports that the coordinator does not answer.
const DETECTION_TIME: Duration = Duration::from_secs(6);

/// A node that has not confirmed for so long that it hears the coordinator may be about to be lost.
const DOUBT: Duration = Duration::from_millis(2500);
/// Longest time for which the end of a rank is not judged because of that: the kernel gives a connection up in it.
const MAX_HOLD: Duration = Duration::from_secs(3);

/// What stays the same for the whole job.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Smallest and largest number of nodes.
    pub(crate) nodes: RangeInclusive<u32>,
    /// Longest wait for nodes, and for ranks after the first one has joined.
    pub(crate) join_timeout: Duration,
    /// Longest time without a message of an agent.
    pub(crate) node_timeout: Duration,
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    pub(crate) restart: RestartPolicy,
    pub(crate) run_id: String,
    /// Free on this host.
    pub(crate) master_port: u16,
}

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

/// A connected agent.
#[derive(Debug)]
struct Member {
    id: MemberId,
    /// Its address; `None` for the coordinator's own.
    address: Option<IpAddr>,
    /// What it said about itself; `None` before.
    card: Option<NodeCard>,
    /// Its number in this epoch; `None` if it takes no part.
    node: Option<u32>,
    /// No process of its ranks is left in this epoch.
    is_gone: bool,
    /// It has got a signal that ends the run.
    is_interrupted: bool,
    /// When its last message arrived.
    heard: Instant,
    /// When it confirmed last that it hears the coordinator.
    confirmed: Instant,
}

#[derive(Debug)]
enum Stage {
    /// Waits for nodes until this time.
    Gathering(Instant),
    /// The ranks run.
    Running,
    /// The ranks have ended so; nodes report that no process is left.
    Ending(Outcome),
    /// They have failed, and are started again after this time.
    Pausing(Instant),
    Over,
}

/// The state of the job.
pub(crate) struct Coordinator {
    config: Config,
    /// In ascending order of their ids.
    members: Vec<Member>,
    stage: Stage,
    restarts: u32,
    /// Processes of lost nodes may run until this time.
    not_before: Option<Instant>,
    epoch: Option<Epoch>,
    /// The reader of this node's output has exited.
    reader_is_gone: bool,
    next_beat: Instant,
    /// What all nodes are told is collected until this time.
    next_flush: Instant,
    outbox: Vec<(MemberId, ToAgent)>,
}

/// One start of all ranks.
struct Epoch {
    layout: Layout,
    /// The name of each node's host.
    hosts: Vec<String>,
    /// The member of each node. It may be lost.
    members: Vec<MemberId>,
    supervisor: Supervisor,
    hub: Hub,
    blames: BTreeMap<u32, Blame>,
    last_lines: BTreeMap<u32, Vec<String>>,
    /// Ends of ranks that are not judged yet, and since when.
    held: Vec<(Event, Instant)>,
    /// Some rank has completed a training step.
    has_made_a_step: bool,
}

impl Coordinator {
    /// Waits for the nodes, of which the own one is the first.
    pub(crate) fn new(config: Config, own: NodeCard, now: Instant) -> Self {
        let until = now + config.join_timeout;
        let mut coordinator = Coordinator {
            config,
            members: Vec::new(),
            stage: Stage::Gathering(until),
            restarts: 0,
            not_before: None,
            epoch: None,
            reader_is_gone: false,
            next_beat: now + HEARTBEAT,
            next_flush: now,
            outbox: Vec::new(),
        };
        coordinator.connected(OWN, None, now);
        coordinator.members[0].card = Some(own);
        coordinator.start_if_complete(now);
        coordinator
    }

    /// Messages to be sent, in order.
    pub(crate) fn take_outbox(&mut self) -> Vec<(MemberId, ToAgent)> {
        std::mem::take(&mut self.outbox)
    }

    /// When [`tick`](Self::tick) has to be called at the latest.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let stage = match &self.stage {
            Stage::Gathering(until) => Some(match self.not_before {
                Some(time) if self.is_complete() => time,
                Some(time) if self.is_enough() => time.max(*until),
                _ => *until,
            }),
            Stage::Pausing(until) => Some(*until),
            Stage::Running | Stage::Ending(_) | Stage::Over => None,
        };
        let epoch = self.epoch.as_ref();
        let supervisor = epoch.and_then(|epoch| epoch.supervisor.next_deadline());
        let flush = epoch.is_some_and(|epoch| epoch.hub.has_news()).then_some(self.next_flush);
        let beat = self.has_others().then_some(self.next_beat);
        [stage, supervisor, flush, beat].into_iter().flatten().min()
    }

    fn has_others(&self) -> bool {
        self.members.len() > 1
    }

    fn index_of(&self, id: MemberId) -> Option<usize> {
        self.members.binary_search_by_key(&id, |member| member.id).ok()
    }

    /// An authenticated agent has connected. Its `id` is larger than all before.
    pub(crate) fn connected(&mut self, id: MemberId, address: Option<IpAddr>, now: Instant) {
        let (card, node) = (None, None);
        self.members.push(Member {
            id,
            address,
            card,
            node,
            is_gone: true,
            is_interrupted: false,
            heard: now,
            confirmed: now,
        });
    }

    /// Handles a message of an agent.
    ///
    /// # Errors
    /// If the message breaks the protocol: the connection has to be closed, and the member to be reported as
    /// [lost](Self::lost).
    pub(crate) fn handle(&mut self, id: MemberId, message: FromAgent, now: Instant) -> Result<(), String> {
        let Some(index) = self.index_of(id) else { return Ok(()) };
        self.members[index].heard = now;
        if let FromAgent::Progress { has_heard: true, .. } = message {
            self.members[index].confirmed = now;
        }
        if let FromAgent::Join(card) = message {
            return self.join(index, *card, now);
        }
        let Some(card) = &self.members[index].card else { return Err("did not join first".into()) };
        let host = card.host.clone();
        match message {
            FromAgent::Signalled { signal } => {
                let signal = Signal::try_from(signal).map_err(|_| format!("sent signal {signal}"))?;
                self.signalled(index, signal, now);
            }
            FromAgent::Failed { why } => self.lose(index, &NodeLoss::Failed(why), now),
            // Only the heartbeat.
            FromAgent::Progress { entries, stopped, .. } if entries.is_empty() && stopped.is_empty() => {}
            message => {
                let node =
                    self.members[index].node.ok_or("sent a message of a run in which it takes no part")?;
                self.handle_of_epoch(index, node, &host, message, now)?;
            }
        }
        Ok(())
    }

    /// Handles a message about the ranks of a node.
    fn handle_of_epoch(
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
            FromAgent::Join(_) | FromAgent::Signalled { .. } | FromAgent::Failed { .. } => {}
        }
        Ok(())
    }

    fn epoch_mut(&mut self) -> &mut Epoch {
        self.epoch.as_mut().expect("checked by the caller")
    }

    /// A connection has ended.
    pub(crate) fn lost(&mut self, id: MemberId, loss: &NodeLoss, now: Instant) {
        if let Some(index) = self.index_of(id) {
            self.lose(index, loss, now);
        }
    }

    /// Handles deadlines and sends heartbeats. To be called in every iteration of the loop, after the messages.
    pub(crate) fn tick(&mut self, now: Instant) {
        let late: Vec<(MemberId, Duration)> = self
            .members
            .iter()
            .filter(|member| member.id != OWN)
            .map(|member| (member.id, now.saturating_duration_since(member.heard)))
            .filter(|(_, silence)| *silence >= self.config.node_timeout)
            .collect();
        for (id, silence) in late {
            self.outbox.push((
                id,
                ToAgent::Refused {
                    exit_code: exit_code::NODE_LOST,
                    why: format!("this node was silent for {:.0} s (--node-timeout)", silence.as_secs_f64()),
                },
            ));
            self.lost(id, &NodeLoss::Silent(silence), now);
        }
        if self.next_beat <= now {
            self.next_beat = now + HEARTBEAT;
            let others = self.members.iter().filter(|member| member.id != OWN);
            self.outbox.extend(others.map(|member| (member.id, ToAgent::Beat)));
        }
        self.release_held(now);
        if matches!(self.stage, Stage::Running) {
            self.supervise(Event::Tick, now);
        }
        self.flush_news(now);
        match &self.stage {
            Stage::Gathering(_) => self.start_if_complete(now),
            Stage::Pausing(until) if *until <= now => {
                self.restarts += 1;
                self.stage = Stage::Gathering(now + self.config.join_timeout);
                self.start_if_complete(now);
            }
            _ => {}
        }
    }

    /// Tells all nodes what is new. The first news are told at once, and what follows soon after is collected, so that
    /// the number of messages does not grow with ranks times nodes.
    fn flush_news(&mut self, now: Instant) {
        let next_flush = self.next_flush;
        let Some(epoch) = self.epoch.as_mut().filter(|epoch| next_flush <= now && epoch.hub.has_news())
        else {
            return;
        };
        self.next_flush = now + epoch.hub.flush_interval();
        let actions = epoch.hub.flush();
        self.route(actions, now);
    }

    /// Handles the first message of an agent.
    fn join(&mut self, index: usize, card: NodeCard, now: Instant) -> Result<(), String> {
        if self.members[index].card.is_some() {
            return Err("joined twice".into());
        }
        let most = *self.config.nodes.end();
        let others = self.members.iter().filter_map(|member| member.card.as_ref());
        let contradiction = match card.node_rank {
            _ if card.ranks == 0 => return Err("joined without ranks".into()),
            Some(rank) if rank >= most => {
                let host = &card.host;
                Some(format!("host {host} has node rank {rank} of {most} nodes: node ranks count from 0"))
            }
            _ => others.clone().find_map(|other| other.contradiction(&card)),
        };
        if let Some(why) = contradiction {
            // Nobody's replacement: the nodes were started differently, and a restart would not help.
            if self.restarts == 0 && matches!(self.stage, Stage::Gathering(_)) {
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

    fn refuse(&mut self, index: usize, exit_code: u8, why: String) {
        let id = self.members.remove(index).id;
        self.outbox.push((id, ToAgent::Refused { exit_code, why }));
    }

    /// The nodes that have joined.
    fn cards(&self) -> impl Iterator<Item = (MemberId, &NodeCard)> {
        self.members.iter().filter_map(|member| Some((member.id, member.card.as_ref()?)))
    }

    fn is_complete(&self) -> bool {
        self.cards().count() as u32 >= *self.config.nodes.end()
    }

    fn is_enough(&self) -> bool {
        self.cards().count() as u32 >= *self.config.nodes.start()
    }

    /// Starts the ranks if all nodes are there, or enough of them when the time is over.
    fn start_if_complete(&mut self, now: Instant) {
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

    /// Gives every node its ranks and starts them.
    fn start(&mut self, now: Instant) {
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
        let supervisor = Supervisor::new(world_size, self.config.join_timeout, self.config.grace, now);
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
        self.stage = Stage::Running;
    }

    /// Handles a signal that ends the run. A batch system signals all agents, so the first signal of a second agent is
    /// not a second signal.
    fn signalled(&mut self, index: usize, signal: Signal, now: Instant) {
        let is_first = !std::mem::replace(&mut self.members[index].is_interrupted, true);
        let others =
            self.members.iter().enumerate().any(|(other, member)| other != index && member.is_interrupted);
        match &mut self.stage {
            Stage::Running if is_first && others => {}
            Stage::Running => self.supervise(Event::Signalled(signal), now),
            // Not restarted.
            Stage::Ending(outcome) => outcome.interrupt(signal),
            Stage::Over => {}
            Stage::Gathering(_) | Stage::Pausing(_) => self.end(Outcome::interruption(signal)),
        }
    }

    /// Removes a node that was lost.
    fn lose(&mut self, index: usize, loss: &NodeLoss, now: Instant) {
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

    /// Whether the end of a rank has to be judged later: a node may be about to be lost. Its peers would then fail only
    /// because of that, and may have noticed it first: packets to a node can be lost while those from it arrive.
    fn must_wait_for_doubtful_nodes(&self, exit: Exit, now: Instant) -> bool {
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
    fn release_held(&mut self, now: Instant) {
        let Some(epoch) = &self.epoch else { return };
        let Some((_, since)) = epoch.held.first() else { return };
        let is_over = now.saturating_duration_since(*since) >= MAX_HOLD;
        if is_over || !epoch.supervisor.is_undecided() || !self.has_doubtful_node(now) {
            for (event, _) in std::mem::take(&mut self.epoch_mut().held) {
                self.supervise(event, now);
            }
        }
    }

    /// Passes an event to the supervisor, and its decisions to the agents.
    fn supervise(&mut self, event: Event, now: Instant) {
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
    fn route(&mut self, actions: Vec<HubAction>, now: Instant) {
        for action in actions {
            match action {
                HubAction::Send { node, message } => self.relay_to(node, message),
                HubAction::Incompatible { node, fault, why } => {
                    let rank = self.epoch_mut().layout.ranks_of(node).start;
                    let exit_code = exit_code::preflight(fault);
                    self.supervise(Event::Incompatible { rank, exit_code, why }, now);
                }
                HubAction::Admitted => {}
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
    fn order_all(&mut self, order: &Order) {
        for member in self.members.iter().filter(|member| member.node.is_some()) {
            self.outbox.push((member.id, ToAgent::Do { orders: vec![order.clone()] }));
        }
    }

    /// Ends the epoch if no process is left on any node: decides whether another one follows.
    fn conclude_if_all_gone(&mut self, now: Instant) {
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

    /// Ends the job on all nodes.
    fn end(&mut self, outcome: Outcome) {
        for member in &self.members {
            self.outbox.push((member.id, ToAgent::End { outcome: outcome.clone() }));
        }
        self.stage = Stage::Over;
    }
}

impl Epoch {
    fn name(&self, rank: u32) -> String {
        format!("rank {rank} (host {})", self.hosts[self.layout.node_of(rank) as usize])
    }

    /// Keeps what is needed later of a rank that has ended. The agent has bounded its lines; they are bounded again.
    fn note_exit(&mut self, rank: u32, blame: Option<&Blame>, last_lines: Vec<String>) {
        self.blames.extend(blame.cloned().map(|blame| (rank, blame)));
        let shorten = |line: String| line.chars().take(MAX_LAST_LINE).collect::<String>();
        let lines: Vec<String> = last_lines.into_iter().take(MAX_LAST_LINES).map(shorten).collect();
        if !lines.is_empty() {
            self.last_lines.insert(rank, lines);
        }
    }
}

fn failure(exit_code: u8, message: String) -> Outcome {
    Outcome { exit_code, culprit: None, incompatible: false, message: Some(message), interrupted: false }
}

/// "its rank 4 is" or "its ranks 4-7 are".
fn its_ranks(ranks: &Range<u32>) -> String {
    match ranks.len() {
        1 => format!("its rank {} is", ranks.start),
        _ => format!("its ranks {}-{} are", ranks.start, ranks.end - 1),
    }
}

#[cfg(test)]
mod tests;
