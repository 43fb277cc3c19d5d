//! The server of one node of several: what concerns other nodes.
//!
//! The server does no I/O between hosts. What it has to say to the hub lies in its outbox, and what the hub says is
//! delivered to it. It serves the ranks of its node as on one host, except in these points:
//!
//! - Its ranks are admitted when the hub has compared all nodes.
//! - A value stays here. A rank of another node that waits for it is a [`RemoteReader`]; a rank of this node that waits
//!   for a value of another node has a numbered wait here, with its deadline. If an answer crosses the end of that wait,
//!   the value was read there and must not be lost: it is kept here until the same rank asks for it again.
//! - A barrier with participants on other nodes is completed by the hub.
//! - How ranks of other nodes ended is recorded on the progress page like the ends of its own ranks.

mod requests;

use super::*;
use crate::nccl::NcclAdvice;
use crate::nodes::RankEnd;
use crate::nodes::relay::{NodeManifest, NodeProgram, RelayMessage};
use crate::progress::truncate_text;
use crate::rendezvous::message::{VERSION, check_name, shortened};
use crate::rendezvous::rank_list;
use crate::rendezvous::remote_readers::RemoteReader;

/// Maximum number of programs of one node that are compared with those of other nodes.
const MAX_PROGRAMS: usize = 16;

impl Server {
    /// Opens the rendezvous of the ranks of one node in a private directory. `node_address` is the node's address as other
    /// nodes reach it, for its ranks.
    ///
    /// After each call of [`service`](Self::service) and [`deliver`](Self::deliver), carry what
    /// [`take_outbox`](Self::take_outbox) returns to the [`Hub`](crate::nodes::Hub).
    ///
    /// # Errors
    /// If the directory, the socket or the progress page cannot be created.
    pub fn of_node(layout: Layout, node_address: Option<IpAddr>, run_id: &str) -> Result<Self> {
        let listener = Listener::bind()?;
        let server = Self::new(layout, run_id, listener.address().to_owned(), Some(listener))?;
        Ok(Server { node_address, ..server })
    }

    /// The rendezvous that the first rank of a node serves at `listener` if no launcher does; see
    /// [`unattended`](Self::unattended). It tells the hub how the ranks of its node end.
    pub(in crate::rendezvous) fn unattended_of_node(
        layout: Layout,
        node_address: Option<IpAddr>,
        run_id: &str,
        listener: Listener,
        join_by: Instant,
    ) -> Result<Self> {
        let address = listener.address().to_owned();
        let server = Self::new(layout, run_id, address, Some(listener))?;
        Ok(Server { node_address, unattended: true, join_by: Some(join_by), ..server })
    }

    /// The same server, which tells its ranks something about NCCL.
    pub(in crate::rendezvous) fn with_nccl_advice(self, nccl: Option<NcclAdvice>) -> Self {
        Server { nccl, ..self }
    }

    /// The rendezvous of a node whose ranks are in this process: see [`in_process`](Self::in_process).
    #[doc(hidden)]
    pub fn in_process_of_node(
        layout: Layout,
        node_address: Option<IpAddr>,
        run_id: &str,
    ) -> Result<(Self, Vec<UnixStream>)> {
        let ranks = layout.local_ranks().len();
        let server = Self::new(layout, run_id, "in this process".into(), None)?;
        Server { node_address, ..server }.with_pairs(ranks)
    }

    /// Which ranks are on which node.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What this node has to say to the hub, in order.
    pub fn take_outbox(&mut self) -> Vec<RelayMessage> {
        std::mem::take(&mut self.outbox)
    }

    /// Handles a message of the hub.
    ///
    /// # Errors
    /// What is wrong with the message, which no hub of this release sends: the connection should be closed. A message
    /// that was overtaken by other events is ignored: the answer to a rank that does not wait any more, or the admission
    /// of ranks of which one has ended.
    pub fn deliver(&mut self, message: RelayMessage) -> Result<(), String> {
        match message {
            RelayMessage::Admit => self.admit_all(),
            RelayMessage::Refused { rank, why } => {
                self.check_local(rank)?;
                self.refuse_joined(rank, &why);
                Ok(())
            }
            RelayMessage::GaveUp { mut missing } => {
                missing.iter().try_for_each(|rank| self.check_rank(*rank))?;
                rank_list::sort_if_long(&mut missing);
                self.fail_joins_without(&missing);
                Ok(())
            }
            RelayMessage::Get { reader, number, key, from } => {
                check_name(&key)?;
                self.check_local(from)?;
                self.check_remote(reader)?;
                self.serve_remote(RemoteReader { rank: reader, number, key, from });
                Ok(())
            }
            RelayMessage::Cancelled { reader, number, .. } => {
                self.remote_readers.cancel(reader, number);
                Ok(())
            }
            RelayMessage::Got { reader, number, key, reply } => {
                check_name(&key)?;
                self.check_local(reader)?;
                self.answer_reader(reader, number, &key, reply)
            }
            RelayMessage::Released { barrier } => {
                for peer in self.waits.take_released(&barrier) {
                    self.answer(peer, &Reply::Done, &[]);
                }
                Ok(())
            }
            RelayMessage::NotReleased { reader, barrier, reply } => {
                self.check_local(reader)?;
                self.answer_in_barrier(reader, &barrier, reply)
            }
            RelayMessage::Left { ranks } => {
                ranks.iter().try_for_each(|rank| self.check_rank(*rank))?;
                ranks.into_iter().for_each(|rank| self.remote_rank_left(rank));
                Ok(())
            }
            RelayMessage::Ended { ends } => ends.into_iter().try_for_each(|end| self.record_remote(end)),
            RelayMessage::Finished { ranks } => {
                ranks.iter().try_for_each(|rank| self.check_rank(*rank))?;
                ranks.into_iter().for_each(|rank| self.rank_ended(rank, ProcessEnd::Finished));
                Ok(())
            }
            RelayMessage::ProposeStop => {
                self.propose_stop();
                Ok(())
            }
            RelayMessage::StopAt { check } => self.stop_at(check),
            RelayMessage::AskToStop
            | RelayMessage::StopBound { .. }
            | RelayMessage::Joined { .. }
            | RelayMessage::Ready { .. }
            | RelayMessage::Arrived { .. }
            | RelayMessage::Expired { .. } => Err("a message that only nodes send to the hub".into()),
        }
    }

    /// True if `rank` exists and is on another node.
    pub(super) fn is_remote(&self, rank: u32) -> bool {
        rank < self.world_size() && !self.layout.is_local(rank)
    }

    /// Tells the hub that `rank` has joined, and what it needs to know if that was the last one of this node.
    pub(super) fn announce_join(&mut self, rank: u32) {
        if self.is_complete() {
            let manifest = self.manifest();
            self.outbox.push(RelayMessage::Ready { manifest });
        } else if self.unattended {
            match self.outbox.last_mut() {
                Some(RelayMessage::Joined { ranks }) => ranks.push(rank),
                _ => self.outbox.push(RelayMessage::Joined { ranks: vec![rank] }),
            }
        }
    }

    /// What the hub compares. The ranks of this node agree, so one of them speaks for all. Texts of ranks are truncated, so
    /// that the manifest fits a frame.
    fn manifest(&self) -> NodeManifest {
        let truncated = |mut text: String| {
            truncate_text(&mut text);
            text
        };
        let mut programs: Vec<NodeProgram> = Vec::new();
        let mut ranks: Vec<&JoiningRank> = self.joining.iter().collect();
        ranks.sort_by_key(|joining| joining.rank);
        for joining in &ranks {
            let number = self.programs.get(joining.rank as usize).copied().unwrap_or_default();
            if let Some(program) = &joining.program
                && programs.len() < MAX_PROGRAMS
                && programs.iter().all(|known| known.number != number)
            {
                let (path, digest) = (truncated(program.to_string()), program.hash().ok());
                programs.push(NodeProgram { number, rank: joining.rank, path, digest });
            }
        }
        let first = ranks.first().map(|joining| joining.manifest.clone()).unwrap_or_default();
        let (driver, nccl) = (first.driver.map(truncated), first.nccl.map(truncated));
        NodeManifest { version: VERSION, driver, nccl, programs }
    }

    fn admit_all(&mut self) -> Result<(), String> {
        if self.first_ended.is_some() {
            // They have been told that the run does not start.
            return Ok(());
        }
        if !self.is_complete() || self.peers.iter().any(|peer| peer.admitted) {
            return Err("the hub admits ranks that have not joined, or were answered before".into());
        }
        self.welcome();
        Ok(())
    }

    /// Refuses a rank that waits for admission.
    fn refuse_joined(&mut self, rank: u32, why: &str) {
        let why = shortened(why);
        let waits = |peer: &&mut Peer| peer.rank == Some(rank) && !peer.admitted;
        let Some(peer) = self.peers.iter_mut().find(waits) else { return };
        peer.admitted = true;
        // The refused rank may run this server, and end as soon as it is told: the others are told first.
        if self.unattended {
            self.local_rank_ended(rank, ProcessEnd::Failed(format!("was refused: {why}")));
        }
        if let Some(peer) = self.peers.iter().find(|peer| peer.rank == Some(rank)) {
            peer.refuse(&why);
        }
    }

    /// Records how a rank of this node ended, as this server saw it, and tells the hub.
    pub(super) fn local_rank_ended(&mut self, rank: u32, how: ProcessEnd) {
        if !self.layout.is_one_host() {
            let end = RankEnd::of(&self.page, rank, how.clone());
            self.outbox.push(RelayMessage::Ended { ends: vec![end] });
        }
        self.rank_ended(rank, how);
    }

    /// Tells the hub that a rank of this node has said goodbye, or how it failed before that by its own account.
    pub(super) fn announce_goodbye(&mut self, rank: u32) {
        if self.layout.is_one_host() {
            return;
        }
        if self.page.state(rank) == RankState::Failed {
            let how = ProcessEnd::Failed(self.page.end_description(rank));
            let end = RankEnd::of(&self.page, rank, how);
            self.outbox.push(RelayMessage::Ended { ends: vec![end] });
            return;
        }
        match self.outbox.last_mut() {
            Some(RelayMessage::Left { ranks }) => ranks.push(rank),
            _ => self.outbox.push(RelayMessage::Left { ranks: vec![rank] }),
        }
    }

    /// Records that a rank has said goodbye on another node.
    fn remote_rank_left(&mut self, rank: u32) {
        // This node knows of its own ranks already.
        if self.is_remote(rank) {
            self.remote_ended.insert(rank);
            self.page.record_end(rank, Ending::Left);
            self.fail_waiters_for(rank);
        }
    }

    /// Records how a rank ended, with its blame before its end: who reads the end looks for the blame.
    fn record_remote(&mut self, RankEnd { rank, end, blame }: RankEnd) -> Result<(), String> {
        self.check_rank(rank)?;
        if let Some(blame) = blame {
            self.check_rank(blame.culprit)?;
            self.page.blame(rank, &blame);
        }
        self.rank_ended(rank, end);
        Ok(())
    }

    pub(super) fn peer_of(&self, rank: u32) -> Option<u64> {
        self.peers.iter().find(|peer| peer.rank == Some(rank)).map(|peer| peer.id)
    }

    pub(super) fn check_rank(&self, rank: u32) -> Result<(), String> {
        match rank < self.world_size() {
            true => Ok(()),
            false => Err(format!("rank {rank} in a world of {}", self.world_size())),
        }
    }

    fn check_local(&self, rank: u32) -> Result<(), String> {
        match self.layout.is_local(rank) {
            true => Ok(()),
            false => Err(format!("a message for rank {rank}, which is not on node {}", self.layout.node())),
        }
    }

    fn check_remote(&self, rank: u32) -> Result<(), String> {
        match self.is_remote(rank) {
            true => Ok(()),
            false => Err(format!("rank {rank} reads from another node, and is not on one")),
        }
    }
}

#[cfg(test)]
mod tests;
