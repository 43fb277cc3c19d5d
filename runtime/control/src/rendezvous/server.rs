//! The rendezvous server: a state machine over non-blocking sockets, driven by the launcher's event loop.
//!
//! Here are its sockets and their peers. [`admission`] answers the first message of each rank, [`requests`] those that
//! follow. [`nodes`] is what concerns other hosts, if there are any.

mod admission;
mod nodes;
mod requests;
mod stop;

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::entries::Entries;
use super::listener::{ConnectionAttempt, Listener, refuse};
use super::message::{Reply, Request, encode, shortened};
use super::peer::{HELLO_TIMEOUT, Peer};
use super::preflight::{JoiningRank, PreflightFault};
use super::read_budget::{MessageHandler, serve_within_budget};
use super::rejections::{Rejection, Rejections};
use super::remote_readers::RemoteReaders;
use super::socket::Received;
use super::waits::Waits;
use crate::nccl::NcclAdvice;
use crate::nodes::{Layout, RelayMessage};
use crate::progress::{Blame, Ending, ProgressPage, RankState};
use crate::protocol::MAX_RANKS;
use crate::{Error, Result};

/// An event that the server reports to the launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerEvent {
    /// A rank has joined.
    Joined {
        /// The rank.
        rank: u32,
        /// Its process id.
        pid: u32,
    },
    /// A rank has said goodbye.
    Left {
        /// The rank.
        rank: u32,
    },
    /// A rank asks that all ranks stop. Reported once, and not if the launcher has asked before.
    StopAsked {
        /// The rank.
        rank: u32,
    },
    /// A rank is incompatible with the run and was refused: the run cannot start.
    Incompatible {
        /// The rank.
        rank: u32,
        /// The kind of incompatibility.
        fault: PreflightFault,
        /// The difference, naming both sides.
        why: String,
    },
    /// Connections were rejected or closed by the server.
    Rejected {
        /// The process group that made them; `None` if it is not known, or for several groups.
        group: Option<u32>,
        /// Their number.
        connections: u64,
        /// Who made the first one, and why it was rejected.
        why: String,
    },
}

impl From<Rejection> for ServerEvent {
    fn from(Rejection { group, count, why }: Rejection) -> Self {
        ServerEvent::Rejected { group, connections: count, why }
    }
}

/// How a rank's process ended, as its launcher saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessEnd {
    /// Exit code 0.
    Finished,
    /// It failed; how, as a predicate: "exited with code 3", "was killed by SIGKILL".
    Failed(String),
}

/// Number of unauthenticated connections (without a hello) beyond one for each rank.
const SPARE_UNAUTHENTICATED: usize = 16;
/// Maximum number of connections accepted per call, so that a flood of connections does not delay the other peers.
const MAX_ACCEPTS_PER_CALL: usize = 64;

/// The rendezvous of one run.
///
/// It owns the Unix socket, the key/value store and the progress page. No call blocks: poll [`fds`] for reading, and call
/// [`service`] when one is readable or [`next_deadline`] has passed.
///
/// [`fds`]: Server::fds
/// [`service`]: Server::service
/// [`next_deadline`]: Server::next_deadline
pub struct Server {
    /// Closed as soon as all ranks have joined, so that nothing is left if this process is killed.
    listener: Option<Listener>,
    address: String,
    run_id: String,
    /// The ranks of this node are served here.
    layout: Layout,
    /// Address of this node as other nodes reach it.
    node_address: Option<IpAddr>,
    /// What the ranks are told about NCCL.
    nccl: Option<NcclAdvice>,
    page: Arc<ProgressPage>,
    page_fd: OwnedFd,
    next_id: u64,
    peers: Vec<Peer>,
    entries: Entries<OwnedFd>,
    waits: Waits,
    /// The ranks that have said hello; they are admitted together.
    joining: Vec<JoiningRank>,
    /// For each rank the number of its program; empty if all ranks run the same one.
    programs: Vec<u32>,
    /// The first rank whose process ended.
    first_ended: Option<u32>,
    /// No launcher reports how ranks end.
    unattended: bool,
    /// Deadline for all ranks to join; then those that have joined get a timeout.
    join_by: Option<Instant>,
    rejections: Rejections,
    events: Vec<ServerEvent>,
    /// What this node has to say to the hub.
    outbox: Vec<RelayMessage>,
    /// The ranks of other nodes that wait for values of this one.
    remote_readers: RemoteReaders,
    /// Values of other nodes that arrived after their reader had stopped waiting.
    late: Entries<()>,
    /// Number of the last wait for a value of another node.
    next_get: u64,
    /// The ranks of other nodes that have ended.
    remote_ended: BTreeSet<u32>,
    /// The ranks were asked to stop.
    stop_asked: bool,
}

impl Server {
    /// Opens the rendezvous of `world_size` ranks in a private directory.
    ///
    /// # Errors
    /// If the directory, the socket or the progress page cannot be created.
    pub fn bind(world_size: u32, run_id: &str) -> Result<Self> {
        let layout = one_host(world_size)?;
        let listener = Listener::bind()?;
        Self::new(layout, run_id, listener.address().to_owned(), Some(listener))
    }

    /// The rendezvous that rank 0 serves at `listener` if no launcher does. No launcher ends the run if a rank never
    /// joins, or reports how a rank ended. So at `join_by` the ranks that have joined are told which ranks are missing,
    /// and a connection that ends without a goodbye counts as the end of its rank.
    pub(super) fn unattended(
        world_size: u32,
        run_id: &str,
        listener: Listener,
        join_by: Instant,
    ) -> Result<Self> {
        let address = listener.address().to_owned();
        let server = Self::new(one_host(world_size)?, run_id, address, Some(listener))?;
        Ok(Server { unattended: true, join_by: Some(join_by), ..server })
    }

    /// A rendezvous without a listening socket: its ranks are in this process and hold the other ends of the streams.
    /// Public for tests of the server against arbitrary peers.
    #[doc(hidden)]
    pub fn in_process(world_size: u32, run_id: &str) -> Result<(Self, Vec<UnixStream>)> {
        Self::new(one_host(world_size)?, run_id, "in this process".into(), None)?
            .with_pairs(world_size as usize)
    }

    /// Adds connections to this process; also returns their other ends.
    fn with_pairs(mut self, count: usize) -> Result<(Self, Vec<UnixStream>)> {
        let mut ends = Vec::new();
        for _ in 0..count {
            let (ours, theirs) =
                UnixStream::pair().map_err(|error| Error::system("create a pair of sockets", error))?;
            self.admit(ours, None).map_err(|(_, problem)| Error::system("accept a socket", problem))?;
            ends.push(theirs);
        }
        Ok((self, ends))
    }

    fn new(layout: Layout, run_id: &str, address: String, listener: Option<Listener>) -> Result<Self> {
        let (page, page_fd) = ProgressPage::create(layout.world_size())?;
        Ok(Server {
            listener,
            address,
            run_id: run_id.to_owned(),
            layout,
            node_address: None,
            nccl: None,
            page: Arc::new(page),
            page_fd,
            next_id: 0,
            peers: Vec::new(),
            entries: Entries::default(),
            waits: Waits::default(),
            joining: Vec::new(),
            programs: Vec::new(),
            first_ended: None,
            unattended: false,
            join_by: None,
            rejections: Rejections::default(),
            events: Vec::new(),
            outbox: Vec::new(),
            remote_readers: RemoteReaders::default(),
            late: Entries::default(),
            next_get: 0,
            remote_ended: BTreeSet::new(),
            stop_asked: false,
        })
    }

    fn world_size(&self) -> u32 {
        self.layout.world_size()
    }

    /// The rank whose process runs this server if no launcher does.
    fn leader(&self) -> u32 {
        self.layout.local_ranks().start
    }

    /// The value of `MGPU_RENDEZVOUS`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Where the `number`-th rank of this host may write why it failed. The file is removed with the server. `None` if the
    /// rendezvous has no folder.
    pub fn error_file(&self, number: u32) -> Option<PathBuf> {
        self.listener.as_ref()?.error_file(number)
    }

    /// Allows ranks to run different programs: `programs` has a number for each rank of the world, and only ranks with the same number
    /// have to run the same program. Without this call all ranks do.
    pub fn expect_programs(&mut self, programs: Vec<u32>) {
        self.programs = programs;
    }

    /// Sets the command and the number of restarts on the progress page, for processes that inspect the run.
    pub fn describe(&self, program: &str, restarts: u32) {
        self.page.describe(program, restarts);
    }

    /// Sets the process that was started as `rank` on the progress page, for processes that inspect the run before it
    /// joins.
    pub fn rank_started(&self, rank: u32, pid: u32) {
        self.page.start(rank, pid);
    }

    /// The progress page.
    pub fn page(&self) -> &ProgressPage {
        &self.page
    }

    /// The progress page, for a thread that reads it longer than the server lives.
    pub fn shared_page(&self) -> Arc<ProgressPage> {
        Arc::clone(&self.page)
    }

    /// The rank that `rank` blamed before it failed.
    pub fn blame(&self, rank: u32) -> Option<Blame> {
        self.page.blame_of(rank)
    }

    /// Descriptors to poll for reading.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let listener = self.listener.as_ref().and_then(Listener::fd);
        let connections = self.peers.iter().map(|peer| peer.connection.as_fd());
        let ends = self.peers.iter().filter_map(|peer| peer.end.as_ref().map(AsFd::as_fd));
        listener.into_iter().chain(connections).chain(ends).collect()
    }

    /// True while ranks may connect or connections are open.
    pub(super) fn is_needed(&self) -> bool {
        self.listener.is_some() || !self.peers.is_empty()
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let hellos = self.peers.iter().filter_map(Peer::hello_deadline);
        let listener = self.listener.as_ref().and_then(Listener::resumes_at);
        let rejections = self.rejections.next_deadline();
        hellos.chain(listener).chain(self.waits.next_deadline()).chain(self.join_by).chain(rejections).min()
    }

    /// Accepts connections, reads and answers requests, and ends waits whose deadline has passed.
    pub fn service(&mut self) -> Vec<ServerEvent> {
        self.accept(Instant::now());
        let mut index = 0;
        while index < self.peers.len() {
            // Checked before reading: what a process sent before its end counts.
            let has_ended = self.peers[index].has_ended();
            match serve_within_budget(&mut ServedPeer { server: self, index }) {
                Ok(true) if !has_ended => index += 1,
                Ok(_) => self.forget(index),
                Err(problem) => self.disconnect(index, &problem),
            }
        }
        self.expire(Instant::now());
        let rejections = self.rejections.take_due(Instant::now());
        let events = std::mem::take(&mut self.events);
        events.into_iter().chain(rejections.into_iter().map(ServerEvent::from)).collect()
    }

    /// Rejections that were not reported yet: for the end of a run.
    pub fn drain_rejections(&mut self) -> Vec<ServerEvent> {
        self.rejections.take().into_iter().map(ServerEvent::from).collect()
    }

    /// Records how a rank's process ended, and answers the peers that wait for it. With several nodes, announce it to the
    /// [`Hub`](crate::nodes::Hub) instead: it tells this server, too.
    pub fn rank_ended(&mut self, rank: u32, how: ProcessEnd) {
        self.page.record_end(
            rank,
            match &how {
                ProcessEnd::Finished => Ending::Finished,
                ProcessEnd::Failed(how) => Ending::Failed(how),
            },
        );
        if self.is_remote(rank) {
            self.remote_ended.insert(rank);
        }
        self.fail_waiters_for(rank);
        let first = *self.first_ended.get_or_insert(rank);
        self.fail_pending_joins(first);
    }

    /// Answers the peers whose waits need a rank that has ended. After a failure these are all peers.
    fn fail_waiters_for(&mut self, rank: u32) {
        let (state, how) = (self.page.state(rank), self.page.end_description(rank));
        for peer in self.waits.take_unsatisfiable(rank, state == RankState::Failed) {
            self.answer(peer, &Reply::PeerGone { peer: rank, how: how.clone() }, &[]);
        }
        self.fail_remote_readers_of(rank, state == RankState::Failed, &how);
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..MAX_ACCEPTS_PER_CALL {
            let Some(listener) = &mut self.listener else { return };
            let (group, why) = match listener.accept(now) {
                ConnectionAttempt::Accepted(stream) => match self.admit(stream, Some(now + HELLO_TIMEOUT)) {
                    Ok(()) => continue,
                    Err((stream, why)) => {
                        let group = Peer::group_behind(&stream);
                        refuse(stream, why.clone());
                        (group, why)
                    }
                },
                ConnectionAttempt::Rejected(Some(why)) => (None, why),
                ConnectionAttempt::Rejected(None) => continue,
                ConnectionAttempt::None => return,
            };
            self.rejections.add(group, format!("a connection that {why}"), now);
        }
    }

    /// Adds a new connection, or returns it with the reason of its rejection, as a predicate. If there are then too
    /// many unauthenticated connections, the oldest one of the process with the most of them is closed: so a process
    /// that floods the rendezvous only blocks itself.
    fn admit(&mut self, stream: UnixStream, hello_by: Option<Instant>) -> Result<(), (UnixStream, String)> {
        self.peers.push(Peer::admit(stream, self.next_id, hello_by)?);
        self.next_id += 1;
        let unauthenticated = self.peers.iter().filter(|peer| peer.rank.is_none());
        if unauthenticated.clone().count() <= self.layout.local_ranks().len() + SPARE_UNAUTHENTICATED {
            return Ok(());
        }
        let mut counts: HashMap<Option<u32>, usize> = HashMap::new();
        unauthenticated.for_each(|peer| *counts.entry(peer.pid()).or_default() += 1);
        let unauthenticated = self.peers.iter().enumerate().filter(|(_, peer)| peer.rank.is_none());
        // Among processes with equally many, the oldest connection.
        let candidate = unauthenticated.max_by_key(|(_, peer)| (counts[&peer.pid()], Reverse(peer.id)));
        if let Some((index, peer)) = candidate {
            let (own, all) = (counts[&peer.pid()], counts.values().sum::<usize>());
            self.disconnect(
                index,
                &format!("has {own} of {all} silent connections, and no process has more"),
            );
        }
        Ok(())
    }

    /// Sends a peer the reason and closes its connection.
    fn disconnect(&mut self, index: usize, problem: &str) {
        let problem = shortened(problem);
        let why = format!("{}: {problem}", self.peers[index].name());
        let _ = self.peers[index].connection.send(&encode(&Reply::Refused { why: problem }), &[]);
        self.rejections.add(self.peers[index].group(), why, Instant::now());
        self.forget(index);
    }

    fn forget(&mut self, index: usize) {
        let peer = self.peers.swap_remove(index);
        let waited_for = self.waits.forget(peer.id);
        if let (Some(rank), Some(what)) = (peer.rank, waited_for) {
            self.withdraw(rank, what);
        }
        let Some(rank) = peer.rank.filter(|_| self.unattended) else { return };
        if self.page.state(rank) == RankState::Joined {
            self.local_rank_ended(rank, ProcessEnd::Failed("ended without a goodbye".into()));
        }
        if rank == self.leader() {
            // It has given up; its next attempt may use the same name.
            self.listener = None;
        }
    }

    /// Answers the peers whose deadline has passed with the ranks that did not arrive, and closes connections that have
    /// not said hello in time.
    fn expire(&mut self, now: Instant) {
        for (peer, missing, what) in self.waits.take_expired(now) {
            if let Some(rank) = self.peers.iter().find(|other| other.id == peer).and_then(|peer| peer.rank) {
                self.withdraw(rank, what);
            }
            self.answer(peer, &Reply::TimedOut { missing }, &[]);
        }
        for (reader, barrier) in self.waits.expired_at_hub(now) {
            self.outbox.push(RelayMessage::Expired { barrier, reader });
        }
        if self.join_by.is_some_and(|deadline| deadline <= now) {
            self.give_up_joining();
        }
        let is_expired = |peer: &Peer| peer.hello_deadline().is_some_and(|deadline| deadline <= now);
        while let Some(index) = self.peers.iter().position(is_expired) {
            self.disconnect(index, &format!("was silent for {HELLO_TIMEOUT:?} after it had connected"));
        }
    }

    /// Replies to a peer. A peer that has disconnected or does not read is removed when its socket is served next.
    fn answer(&self, id: u64, reply: &Reply, fds: &[BorrowedFd<'_>]) {
        if let Some(peer) = self.peers.iter().find(|peer| peer.id == id)
            && peer.connection.send(&encode(reply), fds).is_err()
        {
            let _ = peer.connection.stream().shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The layout of a world on one host, which has fewer ranks than a world may have.
fn one_host(world_size: u32) -> Result<Layout> {
    let problem = match world_size {
        ..=MAX_RANKS => match Layout::new(vec![0], world_size, 0) {
            Ok(layout) => return Ok(layout),
            Err(problem) => problem,
        },
        _ => format!("{world_size} ranks; the maximum is {MAX_RANKS}"),
    };
    Err(Error::InvalidArgument { operation: "rendezvous", problem })
}

/// The peer with this index while it is served.
struct ServedPeer<'a> {
    server: &'a mut Server,
    index: usize,
}

impl MessageHandler for ServedPeer<'_> {
    fn receive(&mut self) -> Result<Received, String> {
        self.server.peers[self.index].connection.receive().map_err(|error| error.to_string())
    }

    fn handle_messages(&mut self) -> Result<(), String> {
        while let Some(request) = self.server.peers[self.index].connection.next_message::<Request>()? {
            self.server.handle(self.index, request)?;
        }
        self.server.peers[self.index].connection.check_no_surplus_fds()
    }
}

#[cfg(test)]
mod tests;
