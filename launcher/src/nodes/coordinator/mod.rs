//! The coordinator: a pure state machine that makes one job of the agents of all nodes. No I/O.
//!
//! It gathers the nodes, gives each its ranks, and from then on supervises all ranks as if they were on one host: the
//! [`Supervisor`] decides, and each decision goes to the agent of the rank. When the ranks have ended, it waits until
//! every agent has reported that no process is left; only then a new *epoch* (a restart) begins, so that processes of two
//! epochs never run at the same time. Nodes that join meanwhile wait for it.
//!
//! The agent of node 0 is in the same process, and is treated like the others.
//!
//! Messages and deadlines arrive here. `joining` gathers the nodes, `epoch` starts their ranks and concludes when they
//! have ended, `ranks` carries events to the supervisor and its decisions to the agents, `loss` handles nodes that are
//! lost, and `doubt` those that may be.

mod doubt;
mod epoch;
mod joining;
mod loss;
mod ranks;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::card::NodeCard;
use super::message::{FromAgent, HEARTBEAT, Order, ToAgent};
use crate::exit_code;
use crate::restart::RestartPolicy;
use crate::supervisor::{Event, Outcome, StopCause};
use epoch::Epoch;
pub(crate) use loss::NodeLoss;

/// A node that has connected; the coordinator's own is [`OWN`].
pub(crate) type MemberId = u64;

/// The coordinator's own node.
pub(crate) const OWN: MemberId = 0;

/// What stays the same for the whole job.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Smallest and largest number of nodes.
    pub(crate) nodes: RangeInclusive<u32>,
    /// Longest wait for nodes, and for ranks after the first one has joined.
    pub(crate) join_timeout: Duration,
    /// Longest time without a message of an agent.
    pub(crate) node_timeout: Duration,
    /// Time between SIGTERM and SIGKILL after a failure.
    pub(crate) grace: Duration,
    /// Time that ranks have when they are asked to stop.
    pub(crate) stop_grace: Duration,
    pub(crate) restart: RestartPolicy,
    pub(crate) run_id: String,
    /// Free on this host.
    pub(crate) master_port: u16,
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
    /// How the last epoch failed, before the next one.
    failure: Option<Outcome>,
    /// Node 0 has joined as if it were another node.
    has_met_itself: bool,
    /// The reader of this node's output has exited.
    reader_is_gone: bool,
    next_beat: Instant,
    /// What all nodes are told is collected until this time.
    next_flush: Instant,
    outbox: Vec<(MemberId, ToAgent)>,
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
            failure: None,
            has_met_itself: false,
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
        let supervised = epoch.filter(|_| matches!(self.stage, Stage::Running));
        let supervisor = supervised.and_then(|epoch| epoch.supervisor.next_deadline());
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
            FromAgent::Signalled { signal, can_stop } => {
                let signal = Signal::try_from(signal).map_err(|_| format!("sent signal {signal}"))?;
                self.signalled(index, (signal, can_stop), now);
            }
            FromAgent::StopAsked { signal, can_stop } => {
                let signal = signal
                    .map(|signal| Signal::try_from(signal).map_err(|_| format!("sent signal {signal}")));
                let cause = signal.transpose()?.map_or(StopCause::Time, StopCause::Signal);
                self.stop_asked(cause, can_stop, now);
            }
            FromAgent::Failed { why } => self.lose(index, &NodeLoss::Failed(why), now),
            // Only the heartbeat. Node 0 learns that the progress it knows is that of now.
            FromAgent::Progress { entries, stopped, .. } if entries.is_empty() && stopped.is_empty() => {
                if let Some(node) = self.members[index].node.filter(|_| self.members[index].id != OWN) {
                    self.outbox.push((OWN, ToAgent::Progress { node, entries, stopped }));
                }
            }
            message => {
                let node =
                    self.members[index].node.ok_or("sent a message of a run in which it takes no part")?;
                self.handle_of_epoch(index, node, &host, message, now)?;
            }
        }
        Ok(())
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

    /// Handles a signal that ends the run. A batch system signals all agents, so the first signal of a second agent is
    /// not a second signal.
    fn signalled(&mut self, index: usize, (signal, can_stop): (Signal, bool), now: Instant) {
        let is_first = !std::mem::replace(&mut self.members[index].is_interrupted, true);
        let others =
            self.members.iter().enumerate().any(|(other, member)| other != index && member.is_interrupted);
        match &mut self.stage {
            Stage::Running if is_first && others => {}
            Stage::Running if can_stop => {
                self.supervise(Event::StopAsked(StopCause::Signal(signal)), now);
            }
            Stage::Running => self.supervise(Event::Signalled(signal), now),
            // Not restarted.
            Stage::Ending(outcome) => outcome.interrupt(signal),
            Stage::Over => {}
            Stage::Gathering(_) | Stage::Pausing(_) => self.end(Outcome::interruption(signal)),
        }
    }

    /// Handles a request to stop that is not a signal that ends the run. It does not count as the first of two.
    fn stop_asked(&mut self, cause: StopCause, can_stop: Option<bool>, now: Instant) {
        match (&mut self.stage, cause) {
            // The agent gets the order to start its ranks, and asks again; or its ranks have ended; or it takes no part in
            // this epoch. The time of `--stop-after` comes on every node.
            (Stage::Running, StopCause::Signal(signal)) if can_stop.is_none() => {
                self.order_all(&Order::PassStop { signal: signal as i32 });
            }
            (Stage::Running, _) if can_stop.is_none() => {}
            (Stage::Running, StopCause::Time) if can_stop == Some(false) => {
                self.supervise(Event::TimePassed, now);
            }
            (Stage::Running, _) => self.supervise(Event::StopAsked(cause), now),
            (Stage::Ending(outcome), _) => outcome.ask_to_stop(),
            (Stage::Gathering(_) | Stage::Pausing(_), _) => {
                let outcome = match self.failure.take() {
                    Some(mut failure) => {
                        let text = format!("not restarted, since a stop was asked for ({})", cause.name());
                        self.outbox.push((OWN, ToAgent::Say { text }));
                        failure.ask_to_stop();
                        failure
                    }
                    None => Outcome::stopped(cause),
                };
                self.end(outcome);
            }
            (Stage::Over, _) => {}
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

fn failure(exit_code: u8, message: String) -> Outcome {
    Outcome { exit_code, culprit: None, incompatible: false, message: Some(message), interrupted: false }
}

#[cfg(test)]
mod tests;
