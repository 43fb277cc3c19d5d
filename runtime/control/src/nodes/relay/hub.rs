//! The hub: what has to be known of all nodes. Pure: no I/O and no clock.
//!
//! It admits the nodes together, or refuses one; it carries reads between nodes; it completes barriers; and it tells all
//! nodes how ranks ended. For each rank it holds two bytes and at most one place in a barrier. Its messages to all nodes
//! are collected for a [`flush_interval`](Hub::flush_interval), except the first failure, which is told at once: so
//! their number grows with the nodes, not with ranks times nodes.

use std::collections::HashMap;
use std::time::Duration;

use super::admission::Admission;
use super::barriers::{Arrival, Barriers, Participants};
use super::stop::StopRound;
use super::{HubAction, MAX_FAILURES_TOLD, RankEnd, RelayMessage};
use crate::nodes::Layout;
use crate::progress;
use crate::rendezvous::ProcessEnd;
use crate::rendezvous::message::{MAX_VALUE, Reply, check_name};

/// Number of ends in one message: with the longest texts it still fits a frame.
const ENDS_PER_MESSAGE: usize = 8;
/// Shortest time for which messages to all nodes are collected.
const MIN_FLUSH_INTERVAL: Duration = Duration::from_millis(10);
/// For each of this many nodes the interval is one minimum longer.
const NODES_PER_INTERVAL: u32 = 64;

/// How far a rank has ended. A later value carries more information.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ended {
    No,
    Left,
    Finished,
    Failed,
}

/// The state machine of node 0 that connects the servers of all nodes.
#[derive(Debug)]
pub struct Hub {
    layout: Layout,
    admission: Admission,
    barriers: Barriers,
    /// How far each rank has ended.
    ended: Vec<Ended>,
    ranks_ended: u32,
    /// The first rank whose process ended: the cause, if the ranks were not admitted yet.
    first_end: Option<RankEnd>,
    has_failed: bool,
    /// Number of failures that all nodes are told.
    failures_told: usize,
    news: News,
    /// Where all ranks stop.
    stop: StopRound,
}

/// What the nodes have not been told.
#[derive(Debug, Default)]
struct News {
    /// Goodbyes, for everyone.
    left: Vec<u32>,
    /// All ends, in order: for node 0.
    all: Vec<RankEnd>,
    /// Those of them that concern everyone.
    for_everyone: Vec<RankEnd>,
    /// The others, by their nodes.
    own: HashMap<u32, Vec<RankEnd>>,
}

impl Hub {
    /// The hub of a job. `hosts` are the names of the nodes' hosts, for texts.
    pub fn new(layout: Layout, hosts: Vec<String>) -> Self {
        Hub {
            admission: Admission::new(layout.clone(), hosts),
            barriers: Barriers::default(),
            ended: vec![Ended::No; layout.world_size() as usize],
            ranks_ended: 0,
            first_end: None,
            has_failed: false,
            failures_told: 0,
            news: News::default(),
            stop: StopRound::default(),
            layout,
        }
    }

    /// True once the ranks of all nodes are admitted.
    pub fn is_admitted(&self) -> bool {
        self.admission.is_admitted()
    }

    /// Handles a message of node `from`.
    ///
    /// # Errors
    /// What is wrong with the message, which no node of this release sends: its connection should be closed. Messages
    /// that were overtaken by other events (a deadline that passed while the barrier was completed) are ignored.
    pub fn handle(&mut self, from: u32, message: RelayMessage) -> Result<Vec<HubAction>, String> {
        if from >= self.layout.nodes() {
            return Err(format!("a message of node {from} in a job of {} nodes", self.layout.nodes()));
        }
        match message {
            RelayMessage::Joined { ranks } => {
                self.check_own(from, &ranks)?;
                self.admission.join(&ranks);
                Ok(self.tell_verdict(from))
            }
            RelayMessage::Ready { manifest } => match self.admission.ready(from, manifest)? {
                actions if actions.is_empty() => Ok(self.tell_verdict(from)),
                actions => Ok(actions),
            },
            RelayMessage::GaveUp { missing } => {
                self.check_own(from, &missing)?;
                match self.admission.give_up(from, &missing) {
                    actions if actions.is_empty() => Ok(self.tell_verdict(from)),
                    actions => Ok(actions),
                }
            }
            RelayMessage::Get { reader, ref key, from: owner, .. }
            | RelayMessage::Cancelled { reader, ref key, from: owner, .. } => {
                check_name(key)?;
                self.check_own(from, &[reader])?;
                self.check_other(from, owner)?;
                Ok(vec![self.to_node_of(owner, message)])
            }
            RelayMessage::Got { reader, ref key, ref reply, .. } => {
                check_name(key)?;
                self.check_other(from, reader)?;
                self.check_answer(reply)?;
                Ok(vec![self.to_node_of(reader, message)])
            }
            RelayMessage::Arrived { barrier, ranks, arrived } => self.arrive(from, barrier, ranks, &arrived),
            RelayMessage::Expired { barrier, reader } => {
                self.check_own(from, &[reader])?;
                let missing = self.barriers.expire(&barrier, reader);
                let reply = missing.map(|missing| Reply::TimedOut { missing });
                Ok(reply.into_iter().map(|reply| self.answer(reader, &barrier, reply)).collect())
            }
            RelayMessage::Left { ranks } => {
                self.check_own(from, &ranks)?;
                ranks.into_iter().for_each(|rank| self.leave(rank));
                Ok(self.decide_stop())
            }
            RelayMessage::Ended { ends } => {
                let ranks: Vec<u32> = ends.iter().map(|end| end.rank).collect();
                self.check_own(from, &ranks)?;
                Ok(self.announce(ends))
            }
            RelayMessage::AskToStop => {
                let mut actions = self.ask_to_stop();
                if !actions.is_empty() {
                    actions.insert(0, HubAction::StopAsked { node: from });
                }
                Ok(actions)
            }
            RelayMessage::StopBound { check } => {
                self.stop.bound(from, check)?;
                Ok(self.decide_stop())
            }
            RelayMessage::Admit
            | RelayMessage::ProposeStop
            | RelayMessage::StopAt { .. }
            | RelayMessage::Refused { .. }
            | RelayMessage::Released { .. }
            | RelayMessage::NotReleased { .. }
            | RelayMessage::Finished { .. } => {
                Err(format!("node {from} sent a message that only node 0 sends to the others"))
            }
        }
    }

    /// Asks all ranks to stop at the same place. Does nothing if they were asked before.
    pub fn ask_to_stop(&mut self) -> Vec<HubAction> {
        if self.stop.begin() { self.to_all(&RelayMessage::ProposeStop) } else { Vec::new() }
    }

    /// Tells all nodes where their ranks stop, once that can be decided.
    fn decide_stop(&mut self) -> Vec<HubAction> {
        let (layout, ended) = (&self.layout, &self.ended);
        let has_left = |node| layout.ranks_of(node).all(|rank| ended[rank as usize] != Ended::No);
        let check = self.stop.decide(layout.nodes(), has_left);
        check.map(|check| self.to_all(&RelayMessage::StopAt { check })).unwrap_or_default()
    }

    fn to_all(&self, message: &RelayMessage) -> Vec<HubAction> {
        let nodes = 0..self.layout.nodes();
        nodes.map(|node| HubAction::Send { node, message: message.clone() }).collect()
    }

    /// Notes how ranks ended, as their launcher saw it; if a node is lost, all its ranks have. The first failure is told
    /// at once, with everything before it; the rest is collected for the next [`flush`](Self::flush). Ranks that do not
    /// exist are ignored.
    pub fn announce(&mut self, ends: Vec<RankEnd>) -> Vec<HubAction> {
        let (had_failed, world_size) = (self.has_failed, self.layout.world_size());
        for end in ends.into_iter().filter(|end| end.rank < world_size) {
            self.note_end(bounded(end, world_size));
        }
        let mut actions = if self.has_failed && !had_failed { self.flush() } else { Vec::new() };
        actions.extend(self.decide_stop());
        actions
    }

    fn note_end(&mut self, end: RankEnd) {
        let ended = match end.end {
            ProcessEnd::Finished => Ended::Finished,
            ProcessEnd::Failed(_) => Ended::Failed,
        };
        let Some(before) = self.advance(end.rank, ended) else { return };
        if ended == Ended::Failed && !std::mem::replace(&mut self.has_failed, true) {
            self.barriers.clear();
        }
        self.admission.stop();
        self.first_end.get_or_insert_with(|| end.clone());
        // After a goodbye, code 0 is news for its own node only; and after many failures, another one.
        let concerns_everyone = match ended {
            Ended::Failed => self.failures_told < MAX_FAILURES_TOLD,
            _ => before == Ended::No,
        };
        self.failures_told += usize::from(concerns_everyone && ended == Ended::Failed);
        match concerns_everyone {
            true => self.news.for_everyone.push(end.clone()),
            false => {
                self.news.own.entry(self.layout.node_of(end.rank)).or_default().push(end.clone());
            }
        }
        self.news.all.push(end);
    }

    /// How long the loop may collect what all nodes are told before it calls [`flush`](Self::flush): it grows with the
    /// number of nodes, so that at most 6,400 nodes are told something in a second.
    pub fn flush_interval(&self) -> Duration {
        MIN_FLUSH_INTERVAL * (1 + self.layout.nodes() / NODES_PER_INTERVAL)
    }

    /// True if [`flush`](Self::flush) has something to tell.
    pub fn has_news(&self) -> bool {
        !self.news.left.is_empty() || !self.news.all.is_empty()
    }

    /// Tells all nodes which ranks have left and how ranks ended, as far as it concerns them. Node 0 is told all, because
    /// its progress page is the one that shows the whole job.
    pub fn flush(&mut self) -> Vec<HubAction> {
        let News { mut left, all, for_everyone, own } = std::mem::take(&mut self.news);
        left.sort_unstable();
        let left = (!left.is_empty()).then_some(RelayMessage::Left { ranks: left });
        let common: Vec<RelayMessage> = left.iter().cloned().chain(in_messages(&for_everyone)).collect();
        let mut actions = Vec::new();
        let mut send = |node, message| actions.push(HubAction::Send { node, message });
        left.into_iter().chain(in_messages(&all)).for_each(|message| send(0, message));
        for node in 1..self.layout.nodes() {
            let own = own.get(&node).map(|ends| in_messages(ends)).unwrap_or_default();
            common.iter().cloned().chain(own).for_each(|message| send(node, message));
        }
        actions
    }

    /// Number of places in barriers that are kept, for tests of the bound.
    #[cfg(test)]
    pub(crate) fn places(&self) -> usize {
        self.barriers.places()
    }

    /// Tells a node that has just come, or has waited for long, why the run does not start, if that is decided.
    fn tell_verdict(&self, node: u32) -> Vec<HubAction> {
        let missing =
            self.admission.missing().map(|missing| RelayMessage::GaveUp { missing: missing.to_vec() });
        let ended = self.first_end.iter().filter(|_| !self.admission.is_admitted());
        let ended = ended.map(|end| RelayMessage::Ended { ends: vec![end.clone()] });
        missing.into_iter().chain(ended).map(|message| HubAction::Send { node, message }).collect()
    }

    fn arrive(
        &mut self,
        from: u32,
        barrier: String,
        ranks: Option<Vec<u32>>,
        arrived: &[u32],
    ) -> Result<Vec<HubAction>, String> {
        check_name(&barrier)?;
        self.check_own(from, arrived)?;
        let participants = Participants::of(ranks, self.layout.world_size())?;
        if let Some(other) = arrived.iter().find(|rank| !participants.contains(**rank)) {
            return Err(format!("rank {other} waits in barrier `{barrier}` without taking part in it"));
        }
        // A rank that has ended is told to all nodes, and then no rank waits for it any more.
        if self.has_failed || self.has_ended_one_of(&participants) {
            return Ok(Vec::new());
        }
        let mut actions = Vec::new();
        for rank in arrived {
            match self.barriers.arrive(&barrier, &participants, *rank) {
                Arrival::Waits => {}
                Arrival::Differs(other) => {
                    let why = format!(
                        "rank {rank} and rank {other} are in barrier `{barrier}` with different participants"
                    );
                    actions.push(self.answer(*rank, &barrier, Reply::Denied { why }));
                }
                Arrival::Completes => {
                    let mut nodes: Vec<u32> = match participants {
                        Participants::Everyone(_) => (0..self.layout.nodes()).collect(),
                        Participants::Ranks(_) => {
                            participants.iter().map(|rank| self.layout.node_of(rank)).collect()
                        }
                    };
                    nodes.dedup();
                    let released = |node| HubAction::Send {
                        node,
                        message: RelayMessage::Released { barrier: barrier.clone() },
                    };
                    actions.extend(nodes.into_iter().map(released));
                }
            }
        }
        Ok(actions)
    }

    fn has_ended_one_of(&self, participants: &Participants) -> bool {
        match participants {
            Participants::Everyone(_) => self.ranks_ended > 0,
            Participants::Ranks(ranks) => ranks.iter().any(|rank| self.ended[*rank as usize] != Ended::No),
        }
    }

    fn leave(&mut self, rank: u32) {
        if self.advance(rank, Ended::Left).is_some() {
            self.news.left.push(rank);
        }
    }

    /// Notes how far `rank` has ended, and returns how far it had before; `None` if as much was known.
    fn advance(&mut self, rank: u32, ended: Ended) -> Option<Ended> {
        let known = &mut self.ended[rank as usize];
        if *known >= ended {
            return None;
        }
        let before = std::mem::replace(known, ended);
        if before == Ended::No {
            self.ranks_ended += 1;
            self.barriers.forget_those_of(rank);
        }
        Some(before)
    }

    fn to_node_of(&self, rank: u32, message: RelayMessage) -> HubAction {
        HubAction::Send { node: self.layout.node_of(rank), message }
    }

    /// The hub's own answer to a rank that waits in a barrier.
    fn answer(&self, reader: u32, barrier: &str, reply: Reply) -> HubAction {
        self.to_node_of(reader, RelayMessage::NotReleased { reader, barrier: barrier.to_owned(), reply })
    }

    /// Checks that node `from` speaks of ranks of its own.
    fn check_own(&self, from: u32, ranks: &[u32]) -> Result<(), String> {
        let own = self.layout.ranks_of(from);
        match ranks.iter().find(|rank| !own.contains(rank)) {
            None => Ok(()),
            Some(other) => Err(format!(
                "node {from}, which has ranks {} to {}, speaks for rank {other}",
                own.start,
                own.end - 1
            )),
        }
    }

    /// Checks that `rank` exists and is not on node `from`.
    fn check_other(&self, from: u32, rank: u32) -> Result<(), String> {
        let world_size = self.layout.world_size();
        if rank < world_size && !self.layout.ranks_of(from).contains(&rank) {
            return Ok(());
        }
        Err(format!("node {from} names rank {rank} of {world_size}, which is not on another node"))
    }

    /// Checks the answer of a node to a `Get`.
    fn check_answer(&self, reply: &Reply) -> Result<(), String> {
        match reply {
            Reply::Value { value, fds: 0 } if value.len() <= MAX_VALUE => Ok(()),
            Reply::PeerGone { peer, .. } if *peer < self.layout.world_size() => Ok(()),
            Reply::Denied { .. } => Ok(()),
            Reply::Value { value, fds } => {
                Err(format!("a value of {} bytes and {fds} descriptors for another node", value.len()))
            }
            _ => Err("an answer to a read that is none".into()),
        }
    }
}

/// The end with its texts as long as a progress page keeps them, and without the blame of a rank that does not exist.
fn bounded(mut end: RankEnd, world_size: u32) -> RankEnd {
    if let ProcessEnd::Failed(how) = &mut end.end {
        progress::truncate_text(how);
    }
    end.blame = end.blame.filter(|blame| blame.culprit < world_size);
    if let Some(blame) = &mut end.blame {
        progress::truncate_text(&mut blame.message);
    }
    end
}

/// The messages that tell these ends. Those with code 0 are a list of ranks, which stays short when all ranks finish.
fn in_messages(ends: &[RankEnd]) -> Vec<RelayMessage> {
    let (finished, failed): (Vec<&RankEnd>, Vec<&RankEnd>) =
        ends.iter().partition(|end| end.end == ProcessEnd::Finished);
    let failed = failed.chunks(ENDS_PER_MESSAGE);
    let failed =
        failed.map(|ends| RelayMessage::Ended { ends: ends.iter().map(|end| (*end).clone()).collect() });
    let mut finished: Vec<u32> = finished.iter().map(|end| end.rank).collect();
    finished.sort_unstable();
    let finished = (!finished.is_empty()).then_some(RelayMessage::Finished { ranks: finished });
    failed.chain(finished).collect()
}
