//! The hub: what has to be known of all nodes. Pure: no I/O and no clock.
//!
//! It admits the nodes together, or refuses one; it carries reads between nodes; it completes barriers; and it tells all
//! nodes how ranks ended. For each rank it holds two bytes and at most one place in a barrier. Its messages to all nodes
//! are collected for a [`flush_interval`](Hub::flush_interval), except the first failure, which is told at once: so
//! their number grows with the nodes, not with ranks times nodes.

use std::time::Duration;

use super::admission::Admission;
use super::barriers::{Arrival, Barriers, Participants};
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
    has_failed: bool,
    /// Goodbyes that the nodes have not been told.
    left: Vec<u32>,
    /// Ends that the nodes have not been told.
    ends: Vec<RankEnd>,
    /// Number of failures that all nodes have been told.
    failures_told: usize,
}

impl Hub {
    /// The hub of a job. `hosts` are the names of the nodes' hosts, for texts.
    pub fn new(layout: Layout, hosts: Vec<String>) -> Self {
        Hub {
            admission: Admission::new(layout.clone(), hosts),
            barriers: Barriers::default(),
            ended: vec![Ended::No; layout.world_size() as usize],
            ranks_ended: 0,
            has_failed: false,
            left: Vec::new(),
            ends: Vec::new(),
            failures_told: 0,
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
                Ok(Vec::new())
            }
            RelayMessage::Ready { manifest } => self.admission.ready(from, manifest),
            RelayMessage::GaveUp { missing } => {
                self.check_own(from, &missing)?;
                Ok(self.admission.give_up(from, &missing))
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
                Ok(Vec::new())
            }
            RelayMessage::Ended { ends } => {
                let ranks: Vec<u32> = ends.iter().map(|end| end.rank).collect();
                self.check_own(from, &ranks)?;
                Ok(self.announce(ends))
            }
            RelayMessage::Admit
            | RelayMessage::Refused { .. }
            | RelayMessage::Released { .. }
            | RelayMessage::NotReleased { .. }
            | RelayMessage::Finished { .. } => {
                Err(format!("node {from} sent a message that only node 0 sends to the others"))
            }
        }
    }

    /// Notes how ranks ended, as their launcher saw it; if a node is lost, all its ranks have. The first failure is told
    /// at once, with everything before it; the rest is collected for the next [`flush`](Self::flush). Ranks that do not
    /// exist are ignored.
    pub fn announce(&mut self, ends: Vec<RankEnd>) -> Vec<HubAction> {
        let had_failed = self.has_failed;
        let world_size = self.layout.world_size();
        for end in ends.into_iter().filter(|end| end.rank < world_size) {
            let (ended, is_failure) = match end.end {
                ProcessEnd::Finished => (Ended::Finished, false),
                ProcessEnd::Failed(_) => (Ended::Failed, true),
            };
            if !self.advance(end.rank, ended) {
                continue;
            }
            if is_failure && !std::mem::replace(&mut self.has_failed, true) {
                self.barriers.clear();
            }
            self.admission.stop();
            self.ends.push(bounded(end));
        }
        if self.has_failed && !had_failed { self.flush() } else { Vec::new() }
    }

    /// How long the loop may collect what all nodes are told before it calls [`flush`](Self::flush): it grows with the
    /// number of nodes, so that at most 6,400 nodes are told something in a second.
    pub fn flush_interval(&self) -> Duration {
        MIN_FLUSH_INTERVAL * (1 + self.layout.nodes() / NODES_PER_INTERVAL)
    }

    /// True if [`flush`](Self::flush) has something to tell.
    pub fn has_news(&self) -> bool {
        !self.left.is_empty() || !self.ends.is_empty()
    }

    /// Tells all nodes which ranks have left and how ranks ended. Node 0 is told all of it, because its progress page is
    /// the one that shows the whole job.
    pub fn flush(&mut self) -> Vec<HubAction> {
        let mut messages = Vec::new();
        let mut left = std::mem::take(&mut self.left);
        if !left.is_empty() {
            left.sort_unstable();
            messages.push(RelayMessage::Left { ranks: left });
        }
        let ends = std::mem::take(&mut self.ends);
        let all = messages.iter().cloned().chain(in_messages(&ends));
        let mut actions: Vec<HubAction> = all.map(|message| HubAction::Send { node: 0, message }).collect();

        let is_failure = |end: &&RankEnd| end.end != ProcessEnd::Finished;
        let room = MAX_FAILURES_TOLD - self.failures_told;
        let failures: Vec<RankEnd> = ends.iter().filter(is_failure).take(room).cloned().collect();
        self.failures_told += failures.len();
        messages.extend(in_messages(&failures));
        let finished: Vec<u32> = ends.iter().filter(|end| !is_failure(end)).map(|end| end.rank).collect();
        if !finished.is_empty() {
            messages.push(RelayMessage::Finished { ranks: finished });
        }
        for node in 1..self.layout.nodes() {
            actions.extend(messages.iter().map(|message| HubAction::Send { node, message: message.clone() }));
        }
        actions
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
        if self.advance(rank, Ended::Left) {
            self.left.push(rank);
        }
    }

    /// Notes how far `rank` has ended. `false` if as much was known.
    fn advance(&mut self, rank: u32, ended: Ended) -> bool {
        let known = &mut self.ended[rank as usize];
        if *known >= ended {
            return false;
        }
        if std::mem::replace(known, ended) == Ended::No {
            self.ranks_ended += 1;
            self.barriers.forget_those_of(rank);
        }
        true
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
        Err(format!("node {from} asks for rank {rank} of {world_size}, which is not on another node"))
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

/// The end with its texts as long as a progress page keeps them.
fn bounded(mut end: RankEnd) -> RankEnd {
    if let ProcessEnd::Failed(how) = &mut end.end {
        progress::truncate_text(how);
    }
    if let Some(blame) = &mut end.blame {
        progress::truncate_text(&mut blame.message);
    }
    end
}

fn in_messages(ends: &[RankEnd]) -> impl Iterator<Item = RelayMessage> {
    ends.chunks(ENDS_PER_MESSAGE).map(|ends| RelayMessage::Ended { ends: ends.to_vec() })
}
