//! The launcher's side: a state machine over non-blocking sockets that the launcher's event loop drives.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::door::{Door, Knock, refuse};
use super::entries::Entries;
use super::message::{MAX_VALUE, Reply, Request, VERSION, check_name, encode};
use super::peer::{HELLO_PATIENCE, Peer};
use super::preflight::{Applicant, PreflightFault, Program, compare};
use super::refusals::{Refusal, Refusals};
use super::socket::Received;
use super::turn::{Conversation, take_turn};
use super::waits::{WaitFor, Waits};
use crate::process::pidfd_open;
use crate::progress::{Blame, Ending, ProgressPage, RankState};
use crate::protocol::MOST_RANKS;
use crate::{Error, Result};

/// Something the launcher wants to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerEvent {
    /// A rank has joined.
    Joined {
        /// The rank.
        rank: u32,
        /// Its process.
        pid: u32,
    },
    /// A rank has said goodbye.
    Left {
        /// The rank.
        rank: u32,
    },
    /// A rank does not go together with the others, and was refused: the run cannot be.
    Unfit {
        /// The rank.
        rank: u32,
        /// In what respect.
        fault: PreflightFault,
        /// What was found, naming both sides.
        why: String,
    },
    /// Connections were refused or broken off.
    Refused {
        /// The process group that had made them; `None` if it is not known, or if they were several.
        group: Option<u32>,
        /// Their number.
        connections: u64,
        /// Who had made the first one, and why it was refused.
        why: String,
    },
}

impl From<Refusal> for ServerEvent {
    fn from(Refusal { group, count, why }: Refusal) -> Self {
        ServerEvent::Refused { group, connections: count, why }
    }
}

/// How a rank's process ended, as its launcher saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Departure {
    /// Exit code 0.
    Finished,
    /// Anything else, as a predicate: "exited with code 3", "was killed by SIGKILL".
    Failed(String),
}

/// Connections without a hello, beyond one for each rank.
const SPARE_STRANGERS: usize = 16;
/// Connections that are taken in before it is the others' turn: whoever goes on connecting keeps nobody waiting.
const MOST_CONNECTIONS: usize = 64;

/// The rendezvous of one run.
///
/// It owns the Unix socket, the key/value store and the progress page. Nothing here blocks: poll [`fds`] for
/// reading, and call [`service`] when one is readable or [`next_deadline`] has passed.
///
/// [`fds`]: Server::fds
/// [`service`]: Server::service
/// [`next_deadline`]: Server::next_deadline
pub struct Server {
    /// Where ranks connect; gone as soon as all have joined, so that nothing is left should this process be killed.
    door: Option<Door>,
    address: String,
    run_id: String,
    world_size: u32,
    page: Arc<ProgressPage>,
    page_fd: OwnedFd,
    next_id: u64,
    peers: Vec<Peer>,
    entries: Entries<OwnedFd>,
    waits: Waits,
    /// The ranks that have said hello; they are let in together.
    applicants: Vec<Applicant>,
    /// The first rank whose process ended.
    first_gone: Option<u32>,
    /// No launcher tells how ranks end.
    unattended: bool,
    /// When those who have joined are told that others have not.
    join_by: Option<Instant>,
    refusals: Refusals,
    events: Vec<ServerEvent>,
}

impl Server {
    /// Opens the rendezvous of `world_size` ranks in a private directory.
    ///
    /// # Errors
    /// If the directory, the socket or the progress page cannot be made.
    pub fn bind(world_size: u32, run_id: &str) -> Result<Self> {
        let door = Door::open()?;
        Self::new(world_size, run_id, door.address().to_owned(), Some(door))
    }

    /// The rendezvous that rank 0 serves where no launcher does: at `door`, and with nobody who would end the run of a
    /// rank that never comes, or tell how one has ended. So the ranks that are here at `join_by` are told who is missing,
    /// and a connection that ends without a goodbye is the end of its rank.
    pub(super) fn unattended(world_size: u32, run_id: &str, door: Door, join_by: Instant) -> Result<Self> {
        let address = door.address().to_owned();
        let server = Self::new(world_size, run_id, address, Some(door))?;
        Ok(Server { unattended: true, join_by: Some(join_by), ..server })
    }

    /// A rendezvous without a socket: its ranks live in this process and hold the other ends of the streams. Public for
    /// tests of the server against peers of any kind.
    #[doc(hidden)]
    pub fn in_process(world_size: u32, run_id: &str) -> Result<(Self, Vec<UnixStream>)> {
        let mut server = Self::new(world_size, run_id, "in this process".into(), None)?;
        let mut ends = Vec::new();
        for _ in 0..world_size {
            let (ours, theirs) =
                UnixStream::pair().map_err(|error| Error::system("make a pair of sockets", error))?;
            server.admit(ours, None).map_err(|(_, problem)| Error::system("take in a socket", problem))?;
            ends.push(theirs);
        }
        Ok((server, ends))
    }

    fn new(world_size: u32, run_id: &str, address: String, door: Option<Door>) -> Result<Self> {
        // Replies that name many ranks have to fit a frame.
        if world_size > MOST_RANKS {
            let problem = format!("{world_size} ranks, where {MOST_RANKS} are the most");
            return Err(Error::InvalidArgument { operation: "rendezvous", problem });
        }
        let (page, page_fd) = ProgressPage::create(world_size)?;
        Ok(Server {
            door,
            address,
            run_id: run_id.to_owned(),
            world_size,
            page: Arc::new(page),
            page_fd,
            next_id: 0,
            peers: Vec::new(),
            entries: Entries::default(),
            waits: Waits::default(),
            applicants: Vec::new(),
            first_gone: None,
            unattended: false,
            join_by: None,
            refusals: Refusals::default(),
            events: Vec::new(),
        })
    }

    /// The value of `MGPU_RENDEZVOUS`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Notes what the ranks run and how often they have been restarted, for those who look at the run from outside.
    pub fn describe(&self, program: &str, restarts: u32) {
        self.page.describe(program, restarts);
    }

    /// Notes the process that was started as `rank`, for those who look at the run from outside before it joins.
    pub fn rank_started(&self, rank: u32, pid: u32) {
        self.page.start(rank, pid);
    }

    /// What every rank is doing.
    pub fn page(&self) -> &ProgressPage {
        &self.page
    }

    /// Whom `rank` held responsible before it failed.
    pub fn blame(&self, rank: u32) -> Option<Blame> {
        self.page.blame_of(rank)
    }

    /// Descriptors to poll for reading.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let door = self.door.as_ref().and_then(Door::fd);
        let connections = self.peers.iter().map(|peer| peer.connection.as_fd());
        let ends = self.peers.iter().filter_map(|peer| peer.end.as_ref().map(AsFd::as_fd));
        door.into_iter().chain(connections).chain(ends).collect()
    }

    /// True while some rank may come, or its connection is open.
    pub(super) fn is_needed(&self) -> bool {
        self.door.is_some() || !self.peers.is_empty()
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let hellos = self.peers.iter().filter_map(Peer::hello_deadline);
        let door = self.door.as_ref().and_then(Door::opens_at);
        let refusals = self.refusals.next_deadline();
        hellos.chain(door).chain(self.waits.next_deadline()).chain(self.join_by).chain(refusals).min()
    }

    /// Accepts, reads and answers whatever is there, and gives up on waits whose deadline has passed.
    pub fn service(&mut self) -> Vec<ServerEvent> {
        self.accept(Instant::now());
        let mut index = 0;
        while index < self.peers.len() {
            // Looked at first: what a process has sent before its end counts.
            let has_ended = self.peers[index].has_ended();
            match take_turn(&mut Visit { server: self, index }) {
                Ok(true) if !has_ended => index += 1,
                Ok(_) => self.forget(index),
                Err(problem) => self.expel(index, &problem),
            }
        }
        self.expire(Instant::now());
        let refusals = self.refusals.take_due(Instant::now());
        let events = std::mem::take(&mut self.events);
        events.into_iter().chain(refusals.into_iter().map(ServerEvent::from)).collect()
    }

    /// Refusals that were to be told a little later, together with more of their kind: for the end of a run.
    pub fn last_refusals(&mut self) -> Vec<ServerEvent> {
        self.refusals.take().into_iter().map(ServerEvent::from).collect()
    }

    /// Records how a rank's process ended, and tells those who wait for it.
    pub fn rank_gone(&mut self, rank: u32, how: Departure) {
        self.page.depart(
            rank,
            match &how {
                Departure::Finished => Ending::Finished,
                Departure::Failed(how) => Ending::Failed(how),
            },
        );
        self.give_up_on(rank);
        let first = *self.first_gone.get_or_insert(rank);
        self.turn_away(first);
    }

    /// True once all ranks have joined.
    fn is_complete(&self) -> bool {
        self.applicants.len() == self.world_size as usize
    }

    /// Answers those who wait to be let in: without rank `gone` that will never be.
    fn turn_away(&mut self, gone: u32) {
        let how = self.page.departure(gone);
        for peer in in_order_of_exit(&mut self.peers) {
            let Some(rank) = peer.rank.filter(|rank| *rank != gone && !peer.admitted) else { continue };
            peer.admitted = true;
            let (operation, how) = ("join".to_owned(), how.clone());
            let reply = encode(&Reply::PeerGone { peer: gone, how: how.clone() });
            // Not yet let in, the rank cannot note it itself.
            let lost = Error::PeerLost { rank, peer: gone, operation, how, silent: false };
            let blame = Blame { culprit: gone, timed_out: false, message: lost.to_string() };
            self.page.blame(rank, &blame);
            let _ = peer.connection.send(&reply, &[]);
        }
    }

    /// Answers those who wait in vain for a rank that has ended. After a failure that is everybody.
    fn give_up_on(&mut self, rank: u32) {
        let (state, how) = (self.page.state(rank), self.page.departure(rank));
        for peer in self.waits.take_hopeless(rank, state == RankState::Failed) {
            self.answer(peer, &Reply::PeerGone { peer: rank, how: how.clone() }, &[]);
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..MOST_CONNECTIONS {
            let Some(door) = &mut self.door else { return };
            let (group, why) = match door.answer(now) {
                Knock::Stream(stream) => match self.admit(stream, Some(now + HELLO_PATIENCE)) {
                    Ok(()) => continue,
                    Err((stream, why)) => {
                        let group = Peer::group_behind(&stream);
                        refuse(stream, why.clone());
                        (group, why)
                    }
                },
                Knock::Refused(Some(why)) => (None, why),
                Knock::Refused(None) => continue,
                Knock::Nobody => return,
            };
            self.refusals.add(group, format!("a connection that {why}"), now);
        }
    }

    /// Takes a new connection in, or gives it back with the reason, as a predicate. If there are too many then that have not
    /// said hello, the oldest of the process that has most of them goes: so a process that floods the rendezvous is in its
    /// own way, and in nobody else's.
    fn admit(&mut self, stream: UnixStream, hello_by: Option<Instant>) -> Result<(), (UnixStream, String)> {
        self.peers.push(Peer::admit(stream, self.next_id, hello_by)?);
        self.next_id += 1;
        let strangers = self.peers.iter().filter(|peer| peer.rank.is_none());
        if strangers.clone().count() <= self.world_size as usize + SPARE_STRANGERS {
            return Ok(());
        }
        let mut counts: HashMap<Option<u32>, usize> = HashMap::new();
        strangers.for_each(|peer| *counts.entry(peer.pid()).or_default() += 1);
        let strangers = self.peers.iter().enumerate().filter(|(_, peer)| peer.rank.is_none());
        // Of several processes that have equally many, the one that has been silent for longest.
        let intruder = strangers.max_by_key(|(_, peer)| (counts[&peer.pid()], Reverse(peer.id)));
        if let Some((index, peer)) = intruder {
            let (own, all) = (counts[&peer.pid()], counts.values().sum::<usize>());
            self.expel(index, &format!("has {own} of {all} silent connections, and no process has more"));
        }
        Ok(())
    }

    /// Tells a peer why it has to go, and forgets it.
    fn expel(&mut self, index: usize, problem: &str) {
        // It may quote what the peer sent: cut, so that the refusal fits a frame.
        let problem: String = problem.chars().take(1000).collect();
        let why = format!("{}: {problem}", self.peers[index].name());
        let _ = self.peers[index].connection.send(&encode(&Reply::Refused { why: problem }), &[]);
        self.refusals.add(self.peers[index].group(), why, Instant::now());
        self.forget(index);
    }

    fn forget(&mut self, index: usize) {
        let peer = self.peers.swap_remove(index);
        self.waits.forget(peer.id);
        let Some(rank) = peer.rank.filter(|_| self.unattended) else { return };
        if self.page.state(rank) == RankState::Joined {
            self.rank_gone(rank, Departure::Failed("ended without a goodbye".into()));
        }
        if rank == 0 {
            // It has given up; its next attempt may be of the same name.
            self.door = None;
        }
    }

    fn handle(&mut self, index: usize, request: Request) -> Result<(), String> {
        let id = self.peers[index].id;
        let Some(rank) = self.peers[index].rank else { return self.hello(index, request) };
        if !self.peers[index].admitted || self.waits.has(id) {
            return Err("makes a request before its last one was answered".into());
        }
        match request {
            Request::Hello { .. } => return Err("said hello twice".into()),
            Request::Set { key, value, fds, readers } => {
                let fds = self.peers[index].connection.take_fds(fds)?;
                if value.len() > MAX_VALUE {
                    return Err(format!("a value of {} bytes where {MAX_VALUE} is the most", value.len()));
                }
                check_name(&key)?;
                match self.entries.set(rank, key.clone(), value, fds, readers) {
                    Ok(()) => self.answer(id, &Reply::Done, &[]),
                    Err(why) => self.answer(id, &Reply::Denied { why }, &[]),
                }
                self.wake_readers(&key);
            }
            Request::Get { key, from, timeout_ms } => {
                check_name(&key)?;
                if from >= self.world_size {
                    let why = format!("rank {rank} waits for rank {from} in a world of {}", self.world_size);
                    self.answer(id, &Reply::Denied { why }, &[]);
                    return Ok(());
                }
                let hopeless = |gone: &u32| *gone == from || self.page.state(*gone) == RankState::Failed;
                if !self.entries.contains(&key)
                    && let Some(gone) = self.gone_ranks().find(hopeless)
                {
                    let how = self.page.departure(gone);
                    self.answer(id, &Reply::PeerGone { peer: gone, how }, &[]);
                    return Ok(());
                }
                self.wait(id, WaitFor::Key { key: key.clone(), from }, timeout_ms);
                self.wake_readers(&key);
            }
            Request::Barrier { name, timeout_ms } => {
                check_name(&name)?;
                let gone = self.gone_ranks().next();
                if let Some(gone) = gone {
                    let how = self.page.departure(gone);
                    self.answer(id, &Reply::PeerGone { peer: gone, how }, &[]);
                    return Ok(());
                }
                self.wait(id, WaitFor::Barrier { name: name.clone(), rank }, timeout_ms);
                self.open_barrier(&name);
            }
            Request::Leave => {
                self.page.depart(rank, Ending::Left);
                self.answer(id, &Reply::Done, &[]);
                self.give_up_on(rank);
                self.events.push(ServerEvent::Left { rank });
            }
        }
        Ok(())
    }

    /// The first message of a connection: does it belong here?
    fn hello(&mut self, index: usize, request: Request) -> Result<(), String> {
        let Request::Hello { version, run_id, rank, world_size, pid, manifest } = request else {
            return Err("did not say hello first".into());
        };
        if run_id != self.run_id {
            return Err("shows the token of another run".into());
        }
        // A rank in a process namespace of its own knows itself by another number than the launcher does.
        let pid = self.peers[index].pid().unwrap_or(pid);
        let applicant = Applicant { rank, manifest, program: Program::of(pid) };
        if let Err((fault, why)) = self.examine(version, world_size, &applicant) {
            // As in `in_order_of_exit`: rank 0 is told last.
            if rank != 0 {
                self.peers[index].refuse(&why);
            }
            if self.unattended && rank < self.world_size && self.page.state(rank) == RankState::Absent {
                self.rank_gone(rank, Departure::Failed(format!("was refused: {why}")));
            }
            if rank == 0 {
                self.peers[index].refuse(&why);
            }
            self.events.push(ServerEvent::Unfit { rank, fault, why });
            return Ok(());
        }
        if self.page.state(rank) != RankState::Absent {
            return Err(match self.unattended {
                true => format!("rank {rank} has already joined: are two runs of one name being started?"),
                false => format!("rank {rank} has already joined: is World::from_env called twice?"),
            });
        }
        self.page.join(rank, pid);
        self.peers[index].rank = Some(rank);
        if self.unattended {
            // By the number that the kernel knows it by here, not by its own.
            self.peers[index].end = self.peers[index].pid().and_then(|pid| pidfd_open(pid).ok());
        }
        self.applicants.push(applicant);
        self.events.push(ServerEvent::Joined { rank, pid });
        if let Some(gone) = self.first_gone {
            self.turn_away(gone);
        } else if self.is_complete() {
            self.welcome();
        }
        Ok(())
    }

    /// Does this rank go together with the run and with the ranks that are here already?
    fn examine(
        &self,
        version: u32,
        world_size: u32,
        new: &Applicant,
    ) -> Result<(), (PreflightFault, String)> {
        let rank = new.rank;
        if version != VERSION {
            let why = format!(
                "rank {rank} speaks version {version} of the protocol, the launcher version {VERSION}: \
                 build both from the same release"
            );
            return Err((PreflightFault::Protocol, why));
        }
        if world_size != self.world_size || rank >= world_size {
            let why = format!(
                "a process claims to be rank {rank} of {world_size} in a world of {}: does a script set RANK or WORLD_SIZE?",
                self.world_size
            );
            return Err((PreflightFault::WorldSize, why));
        }
        self.applicants.iter().filter(|old| old.rank != rank).try_for_each(|old| compare(old, new))
    }

    /// Lets all ranks in. The door is closed first: who has been let in may open one of the same name.
    fn welcome(&mut self) {
        self.door = None;
        self.join_by = None;
        let (welcome, page) = (encode(&Reply::Welcome), self.page_fd.as_fd());
        for peer in self.peers.iter_mut().filter(|peer| peer.rank.is_some()) {
            peer.admitted = true;
            if peer.connection.send(&welcome, &[page]).is_err() {
                let _ = peer.connection.stream().shutdown(std::net::Shutdown::Both);
            }
        }
    }

    /// Tells the ranks that have joined which ones have not, and lets nobody in any more.
    fn give_up_joining(&mut self) {
        self.door = None;
        self.join_by = None;
        let has_come = |rank: &u32| self.applicants.iter().any(|applicant| applicant.rank == *rank);
        let missing: Vec<u32> = (0..self.world_size).filter(|rank| !has_come(rank)).collect();
        let reply = encode(&Reply::TimedOut { missing });
        for peer in in_order_of_exit(&mut self.peers).filter(|peer| peer.rank.is_some() && !peer.admitted) {
            peer.admitted = true;
            let _ = peer.connection.send(&reply, &[]);
        }
    }

    fn gone_ranks(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.world_size)
            .filter(|rank| matches!(self.page.state(*rank), RankState::Left | RankState::Failed))
    }

    fn wait(&mut self, peer: u64, what: WaitFor, timeout_ms: u64) {
        let timeout = Duration::from_millis(timeout_ms.min(1 << 40));
        self.waits.add(peer, what, Instant::now() + timeout);
    }

    /// Hands the value of `key` to those who wait for it, until its readers are used up.
    fn wake_readers(&mut self, key: &str) {
        while self.entries.contains(key)
            && let Some(reader) = self.waits.take_reader(key)
            && let Some((value, fds)) = self.entries.read(key)
        {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            self.answer(reader, &Reply::Value { value, fds: fds.len() as u32 }, &fds);
        }
    }

    /// Lets everybody out of a barrier that all have reached.
    fn open_barrier(&mut self, name: &str) {
        if self.waits.in_barrier(name).len() == self.world_size as usize {
            for peer in self.waits.take_barrier(name) {
                self.answer(peer, &Reply::Done, &[]);
            }
        }
    }

    /// Answers those whose deadline has passed with the ranks that did not come, and gives up on connections that have
    /// not said hello.
    fn expire(&mut self, now: Instant) {
        for (peer, missing) in self.waits.take_late(now, self.world_size) {
            self.answer(peer, &Reply::TimedOut { missing }, &[]);
        }
        if self.join_by.is_some_and(|deadline| deadline <= now) {
            self.give_up_joining();
        }
        let is_late = |peer: &Peer| peer.hello_deadline().is_some_and(|deadline| deadline <= now);
        while let Some(index) = self.peers.iter().position(is_late) {
            self.expel(index, &format!("was silent for {HELLO_PATIENCE:?} after it had connected"));
        }
    }

    /// Replies to a peer. One that is gone or does not read is dropped when its socket is served next.
    fn answer(&self, id: u64, reply: &Reply, fds: &[BorrowedFd<'_>]) {
        if let Some(peer) = self.peers.iter().find(|peer| peer.id == id)
            && peer.connection.send(&encode(reply), fds).is_err()
        {
            let _ = peer.connection.stream().shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The turn of the peer of this index.
struct Visit<'a> {
    server: &'a mut Server,
    index: usize,
}

impl Conversation for Visit<'_> {
    fn receive(&mut self) -> Result<Received, String> {
        self.server.peers[self.index].connection.receive().map_err(|error| error.to_string())
    }

    fn handle_messages(&mut self) -> Result<(), String> {
        while let Some(request) = self.server.peers[self.index].connection.next_message::<Request>()? {
            self.server.handle(self.index, request)?;
        }
        self.server.peers[self.index].connection.settle()
    }
}

/// Those whose process may end as soon as they are told that the run cannot be: rank 0 last, because an unattended server
/// ends with it, and the others would not be told.
fn in_order_of_exit(peers: &mut [Peer]) -> impl Iterator<Item = &mut Peer> {
    let mut order: Vec<&mut Peer> = peers.iter_mut().collect();
    order.sort_by_key(|peer| peer.rank == Some(0));
    order.into_iter()
}

#[cfg(test)]
mod tests;
