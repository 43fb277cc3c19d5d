//! The launcher's side: a state machine over non-blocking sockets that the launcher's event loop drives.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;

use super::directory::PrivateDirectory;
use super::message::{MAX_VALUE, Reply, Request, VERSION, encode};
use super::preflight::{Applicant, PreflightFault, Program, compare};
use super::socket::{Connection, Received};
use crate::progress::{Blame, Ending, ProgressPage, RankState};
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
    /// A connection was refused or broken off.
    Refused {
        /// Who and why.
        why: String,
    },
}

/// How a rank's process ended, as its launcher saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Departure {
    /// Exit code 0.
    Finished,
    /// Anything else, as a predicate: "exited with code 3", "was killed by SIGKILL".
    Failed(String),
}

/// Reads from one peer before it is the others' turn.
const MOST_READS: usize = 16;

struct Peer {
    id: u64,
    connection: Connection,
    /// Known after its hello.
    rank: Option<u32>,
    /// Its hello has been answered.
    admitted: bool,
}

impl Peer {
    fn name(&self) -> String {
        self.rank.map_or_else(|| "a process that has not said hello".into(), |rank| format!("rank {rank}"))
    }
}

struct Entry {
    value: Vec<u8>,
    fds: Vec<OwnedFd>,
    readers: u32,
}

enum WaitFor {
    Key { key: String, from: u32 },
    Barrier { name: String, rank: u32 },
}

struct Wait {
    peer: u64,
    what: WaitFor,
    deadline: Instant,
}

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
    door: Option<(UnixListener, PrivateDirectory)>,
    address: String,
    run_id: String,
    world_size: u32,
    page: Arc<ProgressPage>,
    page_fd: OwnedFd,
    next_id: u64,
    peers: Vec<Peer>,
    entries: HashMap<String, Entry>,
    waits: Vec<Wait>,
    /// The ranks that have said hello; they are let in together.
    applicants: Vec<Applicant>,
    /// The first rank whose process ended.
    first_gone: Option<u32>,
    events: Vec<ServerEvent>,
}

impl Server {
    /// Opens the rendezvous of `world_size` ranks in a private directory.
    ///
    /// # Errors
    /// If the directory, the socket or the progress page cannot be made.
    pub fn bind(world_size: u32, run_id: &str) -> Result<Self> {
        let directory = PrivateDirectory::create(run_id)?;
        let path = directory.socket();
        let listener = UnixListener::bind(&path)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|error| Error::system(format!("listen on {}", path.display()), error))?;
        let address = format!("unix:{}", path.display());
        Self::new(world_size, run_id, address, Some((listener, directory)))
    }

    /// A rendezvous without a socket: its ranks live in this process and hold the other ends of the streams.
    pub(crate) fn in_process(world_size: u32, run_id: &str) -> Result<(Self, Vec<UnixStream>)> {
        let mut server = Self::new(world_size, run_id, "in this process".into(), None)?;
        let mut ends = Vec::new();
        for _ in 0..world_size {
            let (ours, theirs) =
                UnixStream::pair().map_err(|error| Error::system("make a pair of sockets", error))?;
            server.admit(ours)?;
            ends.push(theirs);
        }
        Ok((server, ends))
    }

    fn new(
        world_size: u32,
        run_id: &str,
        address: String,
        door: Option<(UnixListener, PrivateDirectory)>,
    ) -> Result<Self> {
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
            entries: HashMap::new(),
            waits: Vec::new(),
            applicants: Vec::new(),
            first_gone: None,
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
        let door = self.door.iter().map(|(listener, _)| listener.as_fd());
        door.chain(self.peers.iter().map(|peer| peer.connection.as_fd())).collect()
    }

    /// True while some rank's connection is open.
    pub(crate) fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waits.iter().map(|wait| wait.deadline).min()
    }

    /// Accepts, reads and answers whatever is there, and gives up on waits whose deadline has passed.
    pub fn service(&mut self) -> Vec<ServerEvent> {
        self.accept();
        let mut index = 0;
        while index < self.peers.len() {
            match self.serve_peer(index) {
                Ok(true) => index += 1,
                Ok(false) => self.forget(index),
                Err(problem) => {
                    // It may quote what the peer sent: cut, so that the refusal fits a frame.
                    let problem: String = problem.chars().take(1000).collect();
                    let why = format!("{}: {problem}", self.peers[index].name());
                    let refusal = encode(&Reply::Refused { why: problem });
                    let _ = self.peers[index].connection.send(&refusal, &[]);
                    self.events.push(ServerEvent::Refused { why });
                    self.forget(index);
                }
            }
        }
        self.expire(Instant::now());
        std::mem::take(&mut self.events)
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
        for peer in &mut self.peers {
            let Some(rank) = peer.rank.filter(|rank| *rank != gone && !peer.admitted) else { continue };
            peer.admitted = true;
            let (operation, how) = ("join".to_owned(), how.clone());
            let reply = encode(&Reply::PeerGone { peer: gone, how: how.clone() });
            // Not yet let in, the rank cannot note it itself.
            self.page.blame(rank, &Error::PeerLost { rank, peer: gone, operation, how, silent: false });
            let _ = peer.connection.send(&reply, &[]);
        }
    }

    /// Answers those who wait in vain for a rank that has ended. After a failure that is everybody.
    fn give_up_on(&mut self, rank: u32) {
        let (state, how) = (self.page.state(rank), self.page.departure(rank));
        let hopeless = |wait: &Wait| {
            state == RankState::Failed
                || match wait.what {
                    WaitFor::Key { from, .. } => from == rank,
                    WaitFor::Barrier { .. } => true,
                }
        };
        for wait in self.waits.extract_if(.., |wait| hopeless(wait)).collect::<Vec<_>>() {
            self.answer(wait.peer, &Reply::PeerGone { peer: rank, how: how.clone() }, &[]);
        }
    }

    fn accept(&mut self) {
        while let Some((listener, _)) = &self.door {
            let Ok((stream, _)) = listener.accept() else { return };
            if let Err(error) = self.admit(stream) {
                self.events.push(ServerEvent::Refused { why: error.to_string() });
            }
        }
    }

    /// Takes a new connection in, if it is from a process of the same user.
    fn admit(&mut self, stream: UnixStream) -> Result<()> {
        let refuse = |problem: String| Error::Protocol { peer: "a connection".into(), problem };
        stream.set_nonblocking(true).map_err(|error| refuse(error.to_string()))?;
        let owner = getsockopt(&stream, PeerCredentials).map_err(|errno| refuse(errno.to_string()))?;
        if owner.uid() != geteuid().as_raw() {
            return Err(refuse(format!("process {} belongs to user {}", owner.pid(), owner.uid())));
        }
        self.peers.push(Peer {
            id: self.next_id,
            connection: Connection::new(stream),
            rank: None,
            admitted: false,
        });
        self.next_id += 1;
        Ok(())
    }

    fn forget(&mut self, index: usize) {
        let peer = self.peers.swap_remove(index);
        self.waits.retain(|wait| wait.peer != peer.id);
    }

    /// Reads all that a peer has sent and handles its requests. `false`: it is gone.
    fn serve_peer(&mut self, index: usize) -> Result<bool, String> {
        for _ in 0..MOST_READS {
            while let Some(request) = self.peers[index].connection.next_message::<Request>()? {
                self.handle(index, request)?;
            }
            match self.peers[index].connection.receive().map_err(|error| error.to_string())? {
                Received::Bytes => {}
                Received::Nothing => return Ok(true),
                Received::End => return Ok(false),
            }
        }
        Ok(true)
    }

    fn handle(&mut self, index: usize, request: Request) -> Result<(), String> {
        let id = self.peers[index].id;
        let Some(rank) = self.peers[index].rank else { return self.hello(index, request) };
        if !self.peers[index].admitted || self.waits.iter().any(|wait| wait.peer == id) {
            return Err("makes a request before its last one was answered".into());
        }
        match request {
            Request::Hello { .. } => return Err("said hello twice".into()),
            Request::Set { key, value, fds, readers } => {
                let fds = self.peers[index].connection.take_fds(fds)?;
                if value.len() > MAX_VALUE {
                    return Err(format!("a value of {} bytes where {MAX_VALUE} is the most", value.len()));
                }
                if self.entries.contains_key(&key) {
                    return Err(format!("key `{key}` is already set"));
                }
                self.answer(id, &Reply::Done, &[]);
                if readers > 0 {
                    self.entries.insert(key.clone(), Entry { value, fds, readers });
                    self.wake_readers(&key);
                }
            }
            Request::Get { key, from, timeout_ms } => {
                if from >= self.world_size {
                    return Err(format!("waits for rank {from} in a world of {}", self.world_size));
                }
                let hopeless = |gone: &u32| *gone == from || self.page.state(*gone) == RankState::Failed;
                if !self.entries.contains_key(&key)
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
        let applicant = Applicant { rank, manifest, program: Program::of(pid) };
        if let Err((fault, why)) = self.examine(version, world_size, &applicant) {
            let connection = &self.peers[index].connection;
            let _ = connection.send(&encode(&Reply::Refused { why: why.clone() }), &[]);
            let _ = connection.stream().shutdown(std::net::Shutdown::Both);
            self.events.push(ServerEvent::Unfit { rank, fault, why });
            return Ok(());
        }
        if self.page.state(rank) != RankState::Absent {
            return Err(format!("rank {rank} has already joined: is World::from_env called twice?"));
        }
        self.page.join(rank, pid);
        self.peers[index].rank = Some(rank);
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
            let why = format!("claims to be rank {rank} of {world_size} in a world of {}", self.world_size);
            return Err((PreflightFault::WorldSize, why));
        }
        self.applicants.iter().filter(|old| old.rank != rank).try_for_each(|old| compare(old, new))
    }

    /// Lets all ranks in.
    fn welcome(&mut self) {
        let (welcome, page) = (encode(&Reply::Welcome), self.page_fd.as_fd());
        for peer in self.peers.iter_mut().filter(|peer| peer.rank.is_some()) {
            peer.admitted = true;
            if peer.connection.send(&welcome, &[page]).is_err() {
                let _ = peer.connection.stream().shutdown(std::net::Shutdown::Both);
            }
        }
        self.door = None;
    }

    fn gone_ranks(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.world_size)
            .filter(|rank| matches!(self.page.state(*rank), RankState::Left | RankState::Failed))
    }

    fn wait(&mut self, peer: u64, what: WaitFor, timeout_ms: u64) {
        let timeout = Duration::from_millis(timeout_ms.min(1 << 40));
        self.waits.push(Wait { peer, what, deadline: Instant::now() + timeout });
    }

    /// Hands the value of `key` to those who wait for it, until its readers are used up.
    fn wake_readers(&mut self, wanted: &str) {
        let Some(mut entry) = self.entries.remove(wanted) else { return };
        let is_reader = |wait: &Wait| matches!(&wait.what, WaitFor::Key { key, .. } if key == wanted);
        while entry.readers > 0 {
            let Some(position) = self.waits.iter().position(is_reader) else { break };
            let wait = self.waits.remove(position);
            let fds: Vec<BorrowedFd<'_>> = entry.fds.iter().map(AsFd::as_fd).collect();
            let value = entry.value.clone();
            self.answer(wait.peer, &Reply::Value { value, fds: fds.len() as u32 }, &fds);
            entry.readers -= 1;
        }
        if entry.readers > 0 {
            self.entries.insert(wanted.to_owned(), entry);
        }
    }

    fn in_barrier(&self, wanted: &str) -> Vec<u32> {
        let rank_of = |wait: &Wait| match &wait.what {
            WaitFor::Barrier { name, rank } if name == wanted => Some(*rank),
            _ => None,
        };
        self.waits.iter().filter_map(rank_of).collect()
    }

    /// Lets everybody out of a barrier that all have reached.
    fn open_barrier(&mut self, wanted: &str) {
        if self.in_barrier(wanted).len() < self.world_size as usize {
            return;
        }
        let inside = |wait: &mut Wait| matches!(&wait.what, WaitFor::Barrier { name, .. } if name == wanted);
        for wait in self.waits.extract_if(.., inside).collect::<Vec<_>>() {
            self.answer(wait.peer, &Reply::Done, &[]);
        }
    }

    /// Answers those whose deadline has passed with the ranks that did not come. All are looked at before any is
    /// taken out: two that wait in the same barrier are both there.
    fn expire(&mut self, now: Instant) {
        let missing = |wait: &Wait| match &wait.what {
            WaitFor::Key { from, .. } => vec![*from],
            WaitFor::Barrier { name, .. } => {
                let inside = self.in_barrier(name);
                (0..self.world_size).filter(|rank| !inside.contains(rank)).collect()
            }
        };
        let late = self.waits.iter().filter(|wait| wait.deadline <= now);
        let answers: Vec<(u64, Vec<u32>)> = late.map(|wait| (wait.peer, missing(wait))).collect();
        self.waits.retain(|wait| wait.deadline > now);
        for (peer, missing) in answers {
            self.answer(peer, &Reply::TimedOut { missing }, &[]);
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
