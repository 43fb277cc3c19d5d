//! The client that a rank uses: it sends one request at a time and waits for the reply until a deadline.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Shutdown};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, getsockopt, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;

use super::message::{MAX_FDS, MAX_NAME, MAX_VALUE, Manifest, Reply, Request, VERSION, check_name, encode};
use super::rank_list;
use super::socket::{Connection, Received};
use crate::nccl::NcclAdvice;
use crate::nodes::Layout;
use crate::process::{ForkDetector, has_ended, pidfd_open};
use crate::progress::ProgressPage;
use crate::{Error, Result};

/// Time that the server has beyond a request's own deadline before it counts as gone.
const SERVER_MARGIN: Duration = Duration::from_secs(5);

/// How often a wait that can be interrupted looks for an interruption.
const SLICE: Duration = Duration::from_millis(20);

/// How long a rank waits for the others to join. The launcher, which knows which ranks are missing, ends the run much
/// earlier.
const JOIN_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// Upper bound of every wait: a later `Instant` may not be representable.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(1 << 30);

/// The name of the hello operation in errors.
const JOIN: &str = "join";

/// `timeout` in milliseconds, at most the largest value that a message can hold.
fn milliseconds(timeout: Duration) -> u64 {
    timeout.as_millis().try_into().unwrap_or(u64::MAX)
}

/// Connects to a socket. A stopped launcher (SIGSTOP) accepts no connections, and once its backlog is full `connect`
/// blocks: the send timeout bounds that wait.
pub(super) fn connect(address: &UnixAddr) -> io::Result<UnixStream> {
    let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&stream, sockopt::SendTimeout, &TimeVal::new(SERVER_MARGIN.as_secs() as i64, 0))?;
    loop {
        match nix::sys::socket::connect(stream.as_raw_fd(), address) {
            Ok(()) => return Ok(stream.into()),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return Err(io::Error::other("its backlog of connections is full")),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// The process that runs the rendezvous server. The server ends with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServedBy {
    /// The launcher, whose ranks end with it.
    Launcher,
    /// A rank, which may die like any other rank.
    Rank {
        /// The first rank of this host.
        rank: u32,
        /// How long it waits for the ranks of the run.
        join_timeout: Duration,
    },
}

/// The key/value store of a run, and its barriers.
#[derive(Debug)]
pub struct Store {
    fork_detector: ForkDetector,
    served_by: ServedBy,
    rank: u32,
    world_size: u32,
    /// Which ranks are on which node, and the address of this one: known after the join.
    layout: Option<Layout>,
    address: Option<IpAddr>,
    /// What the server has said about NCCL.
    nccl: NcclAdvice,
    connection: Mutex<Connection>,
    /// This side has closed the connection, so the end of the connection does not mean that the server has ended.
    closed: AtomicBool,
    /// Readable when the rank that runs the server has ended; needed because a forked child of it may hold the connection
    /// open.
    server_pidfd: Option<OwnedFd>,
    /// Says whether the wait of the calling thread is to end.
    interrupt_check: OnceLock<fn() -> bool>,
}

/// A request that was sent, and the deadline of its reply.
struct PendingRequest {
    operation: String,
    started: Instant,
    deadline: Instant,
    sent: io::Result<()>,
}

/// A rank that has said hello and waits for the others.
pub struct PendingJoin {
    store: Store,
    hello: PendingRequest,
}

impl PendingJoin {
    /// Waits until all ranks have said hello and are compatible.
    pub fn wait(self) -> Result<(Store, ProgressPage)> {
        let PendingJoin { mut store, hello } = self;
        let mut connection = store.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let (layout, address, nccl) = match store.finish(&mut connection, hello)? {
            Reply::Welcome { layout, address, nccl } => (layout, address, nccl.unwrap_or_default()),
            Reply::Refused { why } => return Err(Error::Join { rank: store.rank, problem: why }),
            other => return Err(store.unexpected(&connection, &other)),
        };
        if let Some(problem) = layout.as_ref().and_then(|layout| store.contradiction(layout)) {
            return Err(store.bad_message(&connection, problem));
        }
        if !nccl.is_plausible() {
            return Err(store.bad_message(&connection, "impossible advice about NCCL".into()));
        }
        let fds = connection.take_fds(1).map_err(|problem| store.bad_message(&connection, problem))?;
        let page = ProgressPage::open(fds[0].as_fd(), store.world_size)?;
        drop(connection);
        (store.layout, store.address, store.nccl) = (layout, address, nccl);
        Ok((store, page))
    }
}

impl Store {
    /// Connects to the launcher at `address`.
    pub fn connect(address: &str, rank: u32) -> Result<UnixStream> {
        let refused = |problem: String| Error::Join { rank, problem };
        let path = address.strip_prefix("unix:").ok_or_else(|| {
            refused(format!("`{address}` is not the address of a rendezvous; it should be unix:PATH"))
        })?;
        let connected = UnixAddr::new(path).map_err(io::Error::from).and_then(|address| connect(&address));
        connected.map_err(|error| {
            refused(format!(
                "no launcher answers at {path}: {error} (has this process already joined, or has its run ended?)"
            ))
        })
    }

    /// Says hello over a connected stream.
    pub fn send_hello(
        stream: UnixStream,
        served_by: ServedBy,
        run_id: &str,
        rank: u32,
        world_size: u32,
        manifest: Manifest,
    ) -> Result<PendingJoin> {
        let refused = |problem: String| Error::Join { rank, problem };
        if run_id.len() > MAX_NAME {
            return Err(refused(format!(
                "the run's identifier has {} bytes; the maximum is {MAX_NAME}",
                run_id.len()
            )));
        }
        let server =
            getsockopt(&stream, sockopt::PeerCredentials).ok().filter(|_| served_by != ServedBy::Launcher);
        let server_pidfd = server.and_then(|server| pidfd_open(server.pid() as u32).ok());
        let connection = Connection::new(stream).map_err(|(_, error)| refused(error.to_string()))?;
        let connection = Mutex::new(connection);
        let (fork_detector, closed) = (ForkDetector::for_this_process(), AtomicBool::new(false));
        let (layout, address) = (None, None);
        let store = Store {
            fork_detector,
            served_by,
            rank,
            world_size,
            layout,
            address,
            nccl: NcclAdvice::default(),
            connection,
            closed,
            server_pidfd,
            interrupt_check: OnceLock::new(),
        };
        let (pid, run_id) = (std::process::id(), run_id.to_owned());
        let request = Request::Hello { version: VERSION, run_id, rank, world_size, pid, manifest };
        let mut connection = store.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let join_timeout = match served_by {
            ServedBy::Launcher => JOIN_TIMEOUT,
            ServedBy::Rank { join_timeout, .. } => join_timeout,
        };
        let hello = store.begin(&mut connection, &request, &[], JOIN, join_timeout)?;
        drop(connection);
        Ok(PendingJoin { store, hello })
    }

    /// Joins over a connected stream: for tests of this client against any server.
    #[doc(hidden)]
    pub fn join_through(
        stream: UnixStream,
        run_id: &str,
        rank: u32,
        world_size: u32,
    ) -> Result<(Self, ProgressPage)> {
        Self::send_hello(stream, ServedBy::Launcher, run_id, rank, world_size, Manifest::default())?.wait()
    }

    /// Publishes `value`, and up to 4 descriptors with it, to be read by `readers` ranks, once each. A key can be set
    /// again only after all its readers have read it.
    ///
    /// # Errors
    /// If the value is larger than 12 KiB, the key is already set, this rank has set more than 1,024 keys, 256 descriptors
    /// or 4 MiB that were not read yet, or the launcher is gone.
    pub fn set(&self, key: &str, value: &[u8], fds: &[BorrowedFd<'_>], readers: u32) -> Result<()> {
        check_name(key).map_err(|problem| Error::InvalidArgument { operation: "set", problem })?;
        if value.len() > MAX_VALUE || fds.len() > MAX_FDS {
            let (bytes, count) = (value.len(), fds.len());
            let problem = format!(
                "{bytes} bytes and {count} descriptors; the maximum is {MAX_VALUE} bytes and {MAX_FDS} descriptors"
            );
            return Err(Error::InvalidArgument { operation: "set", problem });
        }
        let (key, value, count) = (key.to_owned(), value.to_vec(), fds.len() as u32);
        let request = Request::Set { key, value, fds: count, readers };
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        match self.call(&mut connection, &request, fds, "set", Duration::ZERO)? {
            Reply::Done => Ok(()),
            Reply::Denied { why } => Err(Error::InvalidArgument { operation: "set", problem: why }),
            other => Err(self.unexpected(&connection, &other)),
        }
    }

    /// Waits until rank `from` has set `key`. On several hosts the value is on the host of `from`, so `from` has to be the
    /// rank that sets it.
    ///
    /// # Errors
    /// If it takes longer than `timeout`, `from` has ended without setting the key, or any rank has failed; if the value
    /// has descriptors and `from` is on another host.
    pub fn get(&self, key: &str, from: u32, timeout: Duration) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        check_name(key).map_err(|problem| Error::InvalidArgument { operation: "get", problem })?;
        let request = Request::Get { key: key.to_owned(), from, timeout_ms: milliseconds(timeout) };
        let operation = format!("get `{key}`");
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        match self.call(&mut connection, &request, &[], &operation, timeout)? {
            Reply::Value { value, fds } => {
                let fds =
                    connection.take_fds(fds).map_err(|problem| self.bad_message(&connection, problem))?;
                Ok((value, fds))
            }
            Reply::Denied { why } => Err(Error::InvalidArgument { operation: "get", problem: why }),
            other => Err(self.unexpected(&connection, &other)),
        }
    }

    /// Ends waits when `check` is true. Only the first such call counts.
    pub fn interrupt_when(&self, check: fn() -> bool) {
        let _ = self.interrupt_check.set(check);
    }

    /// Whether the wait of this thread is to end.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt_check.get().is_some_and(|is_interrupted| is_interrupted())
    }

    /// Whether another thread is in a call, which may last.
    pub fn is_in_use(&self) -> bool {
        self.connection.try_lock().is_err()
    }

    /// Waits until all ranks are in the barrier called `name`.
    ///
    /// # Errors
    /// If it takes longer than `timeout` (the error names the missing ranks), or a rank has ended.
    pub fn barrier(&self, name: &str, timeout: Duration) -> Result<()> {
        self.enter_barrier(name, None, timeout)
    }

    /// Waits until `ranks`, this one among them, are in the barrier called `name`. All of them pass the same ranks.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier), except that other ranks may leave the run; if this rank is not among `ranks`, or
    /// one of them does not exist.
    pub fn barrier_of(&self, name: &str, ranks: &[u32], timeout: Duration) -> Result<()> {
        let mut ranks = ranks.to_vec();
        rank_list::sort_if_long(&mut ranks);
        self.enter_barrier(name, Some(ranks), timeout)
    }

    fn enter_barrier(&self, name: &str, ranks: Option<Vec<u32>>, timeout: Duration) -> Result<()> {
        let denied = |problem| Error::InvalidArgument { operation: "barrier", problem };
        check_name(name).map_err(denied)?;
        let request = Request::Barrier { name: name.to_owned(), ranks, timeout_ms: milliseconds(timeout) };
        let operation = format!("barrier `{name}`");
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        match self.call(&mut connection, &request, &[], &operation, timeout)? {
            Reply::Done => Ok(()),
            Reply::Denied { why } => Err(denied(why)),
            other => Err(self.unexpected(&connection, &other)),
        }
    }

    /// Asks that all ranks stop. The progress page says where, once that is decided
    /// ([`ProgressPage::stop_state`]).
    ///
    /// # Errors
    /// If the launcher is gone.
    pub fn ask_to_stop(&self) -> Result<()> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        match self.call(&mut connection, &Request::Stop, &[], "stop", Duration::ZERO)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(&connection, &other)),
        }
    }

    /// Says goodbye. Errors no longer matter and are ignored.
    pub fn leave(&self) {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.call(&mut connection, &Request::Leave, &[], "leave", Duration::ZERO);
    }

    /// Which ranks are on which node, if the world is on several hosts.
    pub fn layout(&self) -> Option<&Layout> {
        self.layout.as_ref()
    }

    /// The address of this node as the other nodes reach it, if the world is on several hosts.
    pub fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// What a rank of a world on several hosts has to know about NCCL.
    pub fn nccl_advice(&self) -> &NcclAdvice {
        &self.nccl
    }

    /// How a layout of the server contradicts what this rank knows.
    fn contradiction(&self, layout: &Layout) -> Option<String> {
        let local = layout.local_ranks();
        (layout.world_size() != self.world_size || !local.contains(&self.rank)).then(|| {
            format!(
                "a layout with ranks {} to {} of {} on this node, for rank {} of {}",
                local.start,
                local.end - 1,
                layout.world_size(),
                self.rank,
                self.world_size
            )
        })
    }

    /// True if a rank runs the server, which is so under launchers other than `mgpurun`.
    pub fn is_served_by_a_rank(&self) -> bool {
        self.served_by != ServedBy::Launcher
    }

    /// Returns an error in a forked child of the rank. The child shares the connection: it would send requests of the
    /// parent and read its replies.
    #[inline]
    pub fn check_process(&self) -> Result<()> {
        match self.fork_detector.is_original_process() {
            true => Ok(()),
            false => Err(self.forked()),
        }
    }

    #[cold]
    fn forked(&self) -> Error {
        Error::Forked { rank: self.rank, process: std::process::id() }
    }

    /// Sends a request and waits for its reply.
    fn call(
        &self,
        connection: &mut Connection,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        operation: &str,
        timeout: Duration,
    ) -> Result<Reply> {
        let pending = self.begin(connection, request, fds, operation, timeout)?;
        self.finish(connection, pending)
    }

    /// Sends a request.
    fn begin(
        &self,
        connection: &mut Connection,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        operation: &str,
        timeout: Duration,
    ) -> Result<PendingRequest> {
        self.check_process()?;
        if self.closed.load(Ordering::Relaxed) {
            let problem = "this rank has closed its connection to the rendezvous after an earlier error";
            return Err(self.unserved(operation, problem.into()));
        }
        let started = Instant::now();
        let deadline = started + timeout.min(MAX_WAIT) + SERVER_MARGIN;
        connection.check_no_surplus_fds().map_err(|problem| self.bad_message(connection, problem))?;
        // The server has to read it soon, however late it answers.
        let sent = connection.send_before(&encode(request), fds, started + SERVER_MARGIN);
        let pending = PendingRequest { operation: operation.to_owned(), started, deadline, sent };
        if pending.sent.as_ref().is_err_and(|error| error.kind() == ErrorKind::TimedOut) {
            return Err(self.silent(connection, &pending));
        }
        Ok(pending)
    }

    /// The other rank that runs the rendezvous server of this host, if one does.
    pub fn serving_rank(&self) -> Option<u32> {
        match self.served_by {
            ServedBy::Rank { rank, .. } => Some(rank).filter(|rank| *rank != self.rank),
            ServedBy::Launcher => None,
        }
    }

    /// True if another rank runs the rendezvous server of this host and has ended.
    pub fn serving_rank_is_gone(&self) -> bool {
        if self.serving_rank().is_none() || self.closed.load(Ordering::Relaxed) {
            return false;
        }
        if self.server_pidfd.as_ref().is_some_and(has_ended) {
            return true;
        }
        // If the lock is held, its holder waits for a reply and notices the end of the connection itself.
        self.connection.try_lock().is_ok_and(|connection| connection.is_at_end())
    }

    /// The error of a server that is gone.
    fn gone(&self, operation: &str, reason: &str) -> Error {
        match self.serving_rank() {
            Some(peer) => Error::PeerLost {
                rank: self.rank,
                peer,
                operation: operation.to_owned(),
                how: format!("has ended, and with it the rendezvous that it served ({reason})"),
                silent: false,
            },
            None => self.unserved(operation, format!("{} is gone ({reason})", self.server())),
        }
    }

    /// The error of a server that does not answer.
    fn silent(&self, connection: &Connection, pending: &PendingRequest) -> Error {
        // A late reply would be mistaken for the reply to the next request.
        self.close(connection);
        let (operation, after) = (&pending.operation, pending.started.elapsed());
        match self.serving_rank() {
            Some(serving) => {
                let operation = operation.clone();
                Error::Timeout { rank: self.rank, waited_for: vec![serving], operation, after }
            }
            None => self.unserved(operation, format!("{} did not answer for {after:.1?}", self.server())),
        }
    }

    /// The error of a server that is not another rank.
    fn unserved(&self, operation: &str, problem: String) -> Error {
        match operation {
            JOIN => Error::Join { rank: self.rank, problem },
            _ => Error::Rendezvous { rank: self.rank, operation: operation.to_owned(), problem },
        }
    }

    /// The server of this rank, if that is not another rank.
    fn server(&self) -> &'static str {
        match self.served_by {
            ServedBy::Launcher => "the launcher",
            ServedBy::Rank { .. } => "its own rendezvous thread",
        }
    }

    /// Waits for the reply to a request.
    fn finish(&self, connection: &mut Connection, pending: PendingRequest) -> Result<Reply> {
        let PendingRequest { sent, deadline, .. } = &pending;
        let gone = |reason: String| self.gone(&pending.operation, &reason);
        let reply = loop {
            let reply = connection.next_message().map_err(|problem| self.bad_message(connection, problem))?;
            match (reply, sent) {
                (Some(reply), Ok(())) => break reply,
                // A launcher that rejects a connection without reading from it sends the reason before it closes it.
                (Some(reply @ Reply::Refused { .. }), Err(_)) => break reply,
                (Some(_), Err(error)) => return Err(gone(error.to_string())),
                (None, _) => {}
            }
            let now = Instant::now();
            let next_look = self.interrupt_check.get().map_or(*deadline, |_| (now + SLICE).min(*deadline));
            match connection.receive_before(next_look).map_err(|error| gone(error.to_string()))? {
                Received::Bytes => {}
                Received::Nothing if self.is_interrupted() => {
                    // As after a timeout.
                    self.close(connection);
                    return Err(Error::Interrupted { rank: self.rank, operation: pending.operation });
                }
                Received::Nothing if next_look < *deadline => {}
                Received::Nothing => return Err(self.silent(connection, &pending)),
                Received::End => {
                    sent.as_ref().map_err(|error| gone(error.to_string()))?;
                    return Err(gone("its end of the connection is closed".into()));
                }
            }
        };
        match reply {
            Reply::TimedOut { missing } if missing.iter().all(|rank| *rank < self.world_size) => {
                Err(Error::Timeout {
                    rank: self.rank,
                    waited_for: missing,
                    operation: pending.operation,
                    after: pending.started.elapsed(),
                })
            }
            Reply::PeerGone { peer, how } if peer < self.world_size => {
                let (rank, operation) = (self.rank, pending.operation);
                Err(Error::PeerLost { rank, peer, operation, how, silent: false })
            }
            reply => {
                if matches!(reply, Reply::Refused { .. }) {
                    // The server ends the connection but keeps running.
                    self.close(connection);
                }
                Ok(reply)
            }
        }
    }

    /// Closes the connection after an error that leaves its state unknown.
    fn close(&self, connection: &Connection) {
        self.closed.store(true, Ordering::Relaxed);
        let _ = connection.stream().shutdown(Shutdown::Both);
    }

    /// The error of a server that violates the protocol. Its further messages cannot be matched to requests, so the
    /// connection is closed.
    fn bad_message(&self, connection: &Connection, problem: String) -> Error {
        self.close(connection);
        let peer = match self.serving_rank() {
            Some(rank) => format!("rank {rank}"),
            None => self.server().into(),
        };
        Error::Protocol { peer, problem }
    }

    fn unexpected(&self, connection: &Connection, reply: &Reply) -> Error {
        match reply {
            Reply::Refused { why } => {
                Error::Protocol { peer: format!("rank {}", self.rank), problem: why.clone() }
            }
            other => self.bad_message(connection, format!("unexpected {other:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A store whose launcher has already sent `replies`, and sends nothing else.
    fn store(replies: &[Reply]) -> (Store, UnixStream) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        for reply in replies {
            theirs.write_all(&encode(reply)).unwrap();
        }
        let connection = Mutex::new(Connection::new(ours).unwrap());
        let (fork_detector, served_by, closed) =
            (ForkDetector::for_this_process(), ServedBy::Launcher, AtomicBool::new(false));
        (
            Store {
                fork_detector,
                served_by,
                rank: 0,
                world_size: 2,
                layout: None,
                address: None,
                nccl: NcclAdvice::default(),
                connection,
                closed,
                server_pidfd: None,
                interrupt_check: OnceLock::new(),
            },
            theirs,
        )
    }

    #[test]
    fn a_connection_that_this_side_closed_does_not_mean_that_rank_0_is_dead() {
        let refusal = Reply::Refused { why: "no room".into() };
        for (reply, is_gone) in [(Some(Reply::Done), false), (Some(refusal), false), (None, true)] {
            let (store, rank_0) = store(reply.as_slice());
            let store = Store {
                served_by: ServedBy::Rank { rank: 0, join_timeout: Duration::ZERO },
                rank: 1,
                ..store
            };
            assert!(!store.serving_rank_is_gone());
            if reply.is_some() {
                store.get("a", 0, Duration::ZERO).unwrap_err();
            }
            drop(rank_0);
            assert_eq!(store.serving_rank_is_gone(), is_gone);
        }
    }

    #[test]
    fn the_death_of_rank_0_is_noticed_while_its_child_holds_the_connection() {
        let (store, _held_by_a_child) = store(&[]);
        let mut rank_0 =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let server_pidfd = pidfd_open(rank_0.id()).ok();
        let store = Store {
            served_by: ServedBy::Rank { rank: 0, join_timeout: Duration::ZERO },
            rank: 1,
            server_pidfd,
            ..store
        };
        assert!(!store.serving_rank_is_gone());
        rank_0.kill().unwrap();
        rank_0.wait().unwrap();
        assert!(store.serving_rank_is_gone());
    }

    #[test]
    fn a_denied_request_is_an_invalid_argument_and_the_next_one_succeeds() {
        let denied = Reply::Denied { why: "key `a` is already set".into() };
        let (store, _launcher) = store(&[denied, Reply::Done]);
        let error = store.set("a", b"", &[], 1).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { operation: "set", .. }), "{error:?}");
        assert!(error.to_string().contains("key `a` is already set"), "{error}");
        store.set("b", b"", &[], 1).unwrap();
    }

    #[test]
    fn a_wait_can_be_interrupted() {
        let (store, rank_0) = store(&[]);
        let served_by = ServedBy::Rank { rank: 0, join_timeout: Duration::ZERO };
        let store = Store { served_by, rank: 1, ..store };
        store.interrupt_when(|| true);
        let error = store.barrier("b", Duration::from_secs(1000)).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 was interrupted in barrier `b`");
        // This side has closed the connection.
        drop(rank_0);
        assert!(!store.serving_rank_is_gone());
    }

    #[test]
    fn a_protocol_violation_closes_the_connection() {
        for wrong in [
            Reply::Value { value: vec![], fds: 3 },
            Reply::TimedOut { missing: vec![2] },
            Reply::PeerGone { peer: u32::MAX, how: "left".into() },
            Reply::Done,
        ] {
            let (store, _launcher) = store(&[wrong, Reply::Done]);
            let error = store.get("a", 1, Duration::ZERO).unwrap_err();
            assert!(matches!(error, Error::Protocol { .. }), "{error}");
            let error = store.barrier("b", Duration::ZERO).unwrap_err();
            assert!(matches!(error, Error::Rendezvous { .. }), "{error}");
            assert!(error.to_string().starts_with("rank 0 in barrier `b`: this rank has closed"), "{error}");
        }
    }

    #[test]
    fn a_rejection_is_read_even_if_the_request_cannot_be_sent() {
        let (store, launcher) = store(&[Reply::Refused { why: "no room".into() }]);
        drop(launcher);
        let error = store.barrier("b", Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
    }

    #[test]
    fn an_oversized_run_id_is_an_error() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let error = Store::join_through(ours, &"x".repeat(1 << 17), 0, 1).unwrap_err();
        assert!(error.to_string().contains("131072 bytes"), "{error}");
    }
}
