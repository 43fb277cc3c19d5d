//! Admission: the hellos of the ranks, until all are admitted together or none can be.

use std::os::fd::AsFd;

use super::{ProcessEnd, Server, ServerEvent};
use crate::Error;
use crate::nodes::RelayMessage;
use crate::process::pidfd_open;
use crate::progress::{Blame, RankState};
use crate::rendezvous::message::{Reply, Request, VERSION, encode};
use crate::rendezvous::peer::Peer;
use crate::rendezvous::preflight::{JoiningRank, PreflightFault, Program, compare};

impl Server {
    /// Handles the first message of a connection: checks token and compatibility.
    pub(super) fn hello(&mut self, index: usize, request: Request) -> Result<(), String> {
        let Request::Hello { version, run_id, rank, world_size, pid, manifest } = request else {
            return Err("did not say hello first".into());
        };
        if run_id != self.run_id {
            return Err("has the token of another run".into());
        }
        // A rank in its own pid namespace has another pid there than here.
        let pid = self.peers[index].pid().unwrap_or(pid);
        let joining = JoiningRank { rank, manifest, program: Program::of(pid) };
        if let Err((fault, why)) = self.check_compatible(version, world_size, &joining) {
            // The rank that runs this server is answered last: see `in_order_of_exit`.
            let is_leader = rank == self.leader();
            if !is_leader {
                self.peers[index].refuse(&why);
            }
            if self.unattended && self.layout.is_local(rank) && self.page.state(rank) == RankState::Absent {
                self.local_rank_ended(rank, ProcessEnd::Failed(format!("was refused: {why}")));
            }
            if is_leader {
                self.peers[index].refuse(&why);
            }
            self.events.push(ServerEvent::Incompatible { rank, fault, why });
            return Ok(());
        }
        if self.page.state(rank) != RankState::Absent {
            return Err(match self.unattended {
                true => format!("rank {rank} has already joined: were two runs of the same name started?"),
                false => format!("rank {rank} has already joined: was World::from_env called twice?"),
            });
        }
        self.page.join(rank, pid);
        self.peers[index].rank = Some(rank);
        if self.unattended {
            // By its pid in this namespace, not by the pid that it reports.
            self.peers[index].end = self.peers[index].pid().and_then(|pid| pidfd_open(pid).ok());
        }
        self.joining.push(joining);
        self.events.push(ServerEvent::Joined { rank, pid });
        if let Some(gone) = self.first_ended {
            self.fail_pending_joins(gone);
        } else if !self.layout.is_one_host() {
            self.announce_join(rank);
        } else if self.is_complete() {
            self.welcome();
        }
        Ok(())
    }

    /// Checks that this rank is compatible with the run and with the ranks that have joined.
    fn check_compatible(
        &self,
        version: u32,
        world_size: u32,
        new: &JoiningRank,
    ) -> Result<(), (PreflightFault, String)> {
        let rank = new.rank;
        if version != VERSION {
            let why = format!(
                "rank {rank} uses version {version} of the protocol, the launcher uses version {VERSION}: \
                 build both from the same release"
            );
            return Err((PreflightFault::Protocol, why));
        }
        if world_size != self.world_size() || rank >= world_size {
            let why = format!(
                "a process claims to be rank {rank} of {world_size} in a world of {}: does a script set RANK or WORLD_SIZE?",
                self.world_size()
            );
            return Err((PreflightFault::WorldSize, why));
        }
        if !self.layout.is_local(rank) {
            let local = self.layout.local_ranks();
            let why = format!(
                "a process claims to be rank {rank} on node {}, which has ranks {} to {}: does a script set RANK?",
                self.layout.node(),
                local.start,
                local.end - 1
            );
            return Err((PreflightFault::WorldSize, why));
        }
        let program = |rank: u32| self.programs.get(rank as usize);
        let others = self.joining.iter().filter(|old| old.rank != rank);
        others
            .map(|old| (old, program(old.rank) == program(rank)))
            .try_for_each(|(old, same)| compare(old, new, same))
    }

    /// Admits all ranks. The listener is closed first, because an admitted rank may open one of the same name.
    pub(super) fn welcome(&mut self) {
        self.listener = None;
        self.join_by = None;
        let layout = (!self.layout.is_one_host()).then(|| self.layout.clone());
        let welcome = Reply::Welcome { layout, address: self.node_address, nccl: self.nccl.clone() };
        let (welcome, page) = (encode(&welcome), self.page_fd.as_fd());
        for peer in self.peers.iter_mut().filter(|peer| peer.rank.is_some()) {
            peer.admitted = true;
            if peer.connection.send(&welcome, &[page]).is_err() {
                let _ = peer.connection.stream().shutdown(std::net::Shutdown::Both);
            }
        }
    }

    /// Accepts no more connections, and tells the ranks that have joined which ranks are missing; with several nodes only
    /// the hub knows that.
    pub(super) fn give_up_joining(&mut self) {
        self.listener = None;
        self.join_by = None;
        let has_come = |rank: &u32| self.joining.iter().any(|joining| joining.rank == *rank);
        let missing: Vec<u32> = self.layout.local_ranks().filter(|rank| !has_come(rank)).collect();
        match self.layout.is_one_host() {
            true => self.fail_joins_without(&missing),
            false => self.outbox.push(RelayMessage::GaveUp { missing }),
        }
    }

    /// Tells the ranks that have joined which ranks are missing.
    pub(super) fn fail_joins_without(&mut self, missing: &[u32]) {
        self.listener = None;
        self.join_by = None;
        let leader = self.leader();
        let reply = encode(&Reply::TimedOut { missing: missing.to_vec() });
        for peer in
            in_order_of_exit(&mut self.peers, leader).filter(|peer| peer.rank.is_some() && !peer.admitted)
        {
            peer.admitted = true;
            let _ = peer.connection.send(&reply, &[]);
        }
    }

    /// True once all ranks of this node have joined.
    pub(super) fn is_complete(&self) -> bool {
        self.joining.len() == self.layout.local_ranks().len()
    }

    /// Answers the ranks that wait for admission: without rank `gone` the run cannot start.
    pub(super) fn fail_pending_joins(&mut self, gone: u32) {
        let how = self.page.end_description(gone);
        let leader = self.leader();
        for peer in in_order_of_exit(&mut self.peers, leader) {
            let Some(rank) = peer.rank.filter(|rank| *rank != gone && !peer.admitted) else { continue };
            peer.admitted = true;
            let (operation, how) = ("join".to_owned(), how.clone());
            let reply = encode(&Reply::PeerGone { peer: gone, how: how.clone() });
            // A rank that is not admitted has no progress page, so the server records its blame.
            let lost = Error::PeerLost { rank, peer: gone, operation, how, silent: false };
            let blame = Blame { culprit: gone, timed_out: false, message: lost.to_string() };
            self.page.blame(rank, &blame);
            let _ = peer.connection.send(&reply, &[]);
        }
    }
}

/// Peers in the order in which they are told that the run cannot start. The leader comes last: its process may end as
/// soon as it is told, an unattended server ends with it, and the other ranks would not be told.
fn in_order_of_exit(peers: &mut [Peer], leader: u32) -> impl Iterator<Item = &mut Peer> {
    let mut order: Vec<&mut Peer> = peers.iter_mut().collect();
    order.sort_by_key(|peer| peer.rank == Some(leader));
    order.into_iter()
}
