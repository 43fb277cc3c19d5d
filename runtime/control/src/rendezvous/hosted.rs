//! The rendezvous of ranks that another launcher has started: rank 0 runs the server on a thread, or on several hosts
//! the first rank of each host ([`several_hosts`](super::several_hosts)).
//!
//! All ranks derive the same name from their launcher's identifier of the job. Rank 0 listens under this name until all
//! ranks have joined, and the others retry to connect until it listens. The name belongs to an *abstract* socket, which
//! has no file: nothing is left when rank 0 is killed, there are no stale files, and a name is in use exactly as long
//! as its socket exists. (A path would be safe only in a folder private to this user, and ranks may disagree about that
//! folder: `XDG_RUNTIME_DIR` is often missing in a batch job.) Abstract names belong to a network namespace: ranks in
//! containers have to share one.
//!
//! Other users can see the name and could bind it first. They gain nothing: the server rejects peers of other users,
//! and a rank asks the kernel for the owner of the socket before it sends anything. The only effect is an error that
//! names them.
//!
//! No launcher supervises these ranks as `mgpurun` would. If a connection ends without a goodbye, the server records on
//! the progress page that its rank has ended. The other ranks notice the end of the rank that serves them, and with it
//! of the server, by their own connections ([`Store::serving_rank_is_gone`](super::Store)).

use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::UnixAddr;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::{geteuid, gethostname};

use super::client;
use super::listener::Listener;
use super::server::Server;
use super::several_hosts::{self, HostRun, OwnHost};
use crate::process::start_failure;
use crate::{Error, Result};

/// First delay between two attempts to connect to rank 0; it doubles up to [`MAX_RETRY_DELAY`].
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(1);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Interval between two looks for a failure while the server's process waits for its end.
const FAILURE_POLL: Duration = Duration::from_millis(20);

/// What each rank knows about the run before it has communicated.
#[derive(Debug)]
pub struct HostedRun<'a> {
    /// The same on all ranks of this run, and different from other runs.
    pub run_id: &'a str,
    /// Name of the run in errors.
    pub title: &'a str,
    /// Number of its ranks.
    pub world_size: u32,
    /// How often its launcher has restarted the ranks.
    pub restart_count: u32,
    /// How long its ranks wait for each other.
    pub join_timeout: Duration,
    /// The host of this rank, if the run has ranks on other hosts as well.
    pub host: Option<&'a OwnHost>,
}

impl HostedRun<'_> {
    /// The rank that serves the ranks of this host.
    pub fn leader(&self) -> u32 {
        self.host.map_or(0, |host| host.first_rank)
    }

    /// Serves the rendezvous until the last rank has disconnected. For the [`leader`](Self::leader), before it
    /// [connects](Self::connect). With several hosts the thread also finds the others; what goes wrong there is the
    /// answer to the ranks that join.
    ///
    /// # Errors
    /// If another run of this name is being started, or the system refuses a socket, memory or a thread.
    pub fn serve(&self) -> Result<HostedServer> {
        let name = self.name();
        let listener = Listener::bind_abstract(&name).map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => Error::Join { rank: self.leader(), problem: self.taken() },
            _ => Error::system(format!("listen on the abstract socket {name}"), error),
        })?;
        let join_by = Instant::now() + self.join_timeout.min(client::MAX_WAIT);
        let program = std::env::args_os().next().unwrap_or_default().to_string_lossy().into_owned();
        let make_pipe = || pipe().map_err(|error| Error::system("make a pipe", error));
        let (attempt, alive) = make_pipe()?;
        let Some(host) = self.host else {
            let server = Server::unattended(self.world_size, self.run_id, listener, join_by)?;
            server.describe(&program, self.restart_count);
            spawn(server, Some(attempt))?;
            return Ok(HostedServer { alive, ended: None, patience: self.join_timeout });
        };
        let (ended, until_end) = make_pipe()?;
        let run = HostRun {
            run_id: self.run_id.to_owned(),
            world_size: self.world_size,
            program,
            restart_count: self.restart_count,
            join_timeout: self.join_timeout,
            join_by,
            host: host.clone(),
            host_name: gethostname().map_or_else(|_| "?".into(), |name| name.to_string_lossy().into_owned()),
        };
        several_hosts::start(run, listener, attempt, until_end)?;
        Ok(HostedServer { alive, ended: Some(ended), patience: self.join_timeout })
    }

    /// Connects to the rank that serves this host as soon as it listens.
    ///
    /// # Errors
    /// If it takes longer than `join_timeout`, or the socket belongs to another user.
    pub fn connect(&self, rank: u32) -> Result<UnixStream> {
        let (started, leader) = (Instant::now(), self.leader());
        let mut pause = FIRST_RETRY_DELAY;
        let stream = loop {
            match self.connect_once() {
                Ok(stream) => break stream,
                // It does not listen yet, or its backlog is full.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::Other) => {}
                Err(error) => return Err(Error::system(format!("connect to rank {leader}"), error)),
            }
            let after = started.elapsed();
            if after >= self.join_timeout {
                let hint = match self.host {
                    None => "all its ranks have to be on this host".to_owned(),
                    Some(_) => format!("rank {leader} has to be on this host and serves its ranks"),
                };
                let operation = format!("join ({}; {hint})", self.title);
                return Err(Error::Timeout { rank, waited_for: vec![leader], operation, after });
            }
            std::thread::sleep(pause.min(self.join_timeout - after));
            pause = (pause * 2).min(MAX_RETRY_DELAY);
        };
        match owner(&stream) {
            Ok((_, uid)) if uid == geteuid().as_raw() => Ok(stream),
            Ok((pid, uid)) => {
                let problem = format!("process {pid} of user {uid} has taken the name of {}", self.title);
                Err(Error::Join { rank, problem })
            }
            Err(errno) => Err(Error::system(format!("ask whose socket that of rank {leader} is"), errno)),
        }
    }

    /// The socket's name. It contains the user id, so that runs of different users do not collide, and on several hosts
    /// the first rank: an engine may take one host for several.
    fn name(&self) -> String {
        let host = self.host.map_or(String::new(), |host| format!("-{}", host.first_rank));
        format!("mgpu-{}-{}{host}", geteuid(), self.run_id)
    }

    fn connect_once(&self) -> io::Result<UnixStream> {
        client::connect(&UnixAddr::new_abstract(self.name().as_bytes())?)
    }

    /// The error text for a name that is already in use.
    fn taken(&self) -> String {
        let by = match self.connect_once().ok().and_then(|stream| owner(&stream).ok()) {
            Some((pid, uid)) => format!("process {pid} of user {uid}"),
            None => "another process".into(),
        };
        format!(
            "{} is being started already, by {by}; give concurrent runs different names in MGPU_RUN_ID",
            self.title
        )
    }
}

/// The rendezvous server of this process, which has not joined yet. If this is dropped before
/// [`keep_running`](Self::keep_running), the server ends, so that the next attempt can use its name.
#[derive(Debug)]
pub struct HostedServer {
    alive: PipeWriter,
    /// Readable when the thread has ended; only with several hosts.
    ended: Option<PipeReader>,
    patience: Duration,
}

impl HostedServer {
    /// Lets the server run until the last rank has disconnected: to be called when this process has joined.
    pub fn keep_running(mut self) -> RunningServer {
        // Fails only if the thread has ended, since a pipe has room for a byte.
        let _ = self.alive.write(&[1]);
        RunningServer { ended: self.ended, patience: self.patience }
    }
}

/// The rendezvous server of this process, which has joined.
#[derive(Debug)]
pub struct RunningServer {
    ended: Option<PipeReader>,
    patience: Duration,
}

impl RunningServer {
    /// To be called when this process has said goodbye, before it ends. With several hosts it waits until all ranks of
    /// its host have ended and their goodbyes have arrived, on rank 0's host until all ranks have: the others would take
    /// the end of this process for a failure. Waits no longer than ranks wait for each other to join, and not if
    /// `has_failed`.
    pub fn wait_until_idle(&self, has_failed: impl Fn() -> bool) {
        let Some(ended) = &self.ended else { return };
        let until = Instant::now() + self.patience.min(client::MAX_WAIT);
        while !has_failed() && Instant::now() < until {
            let mut fds = [PollFd::new(ended.as_fd(), PollFlags::POLLIN)];
            let next = until.min(Instant::now() + FAILURE_POLL);
            if poll(&mut fds, poll_timeout(Some(next), Instant::now())).is_ok_and(|ready| ready > 0) {
                return;
            }
        }
    }
}

/// The process and the user at the other end.
pub(super) fn owner(stream: &UnixStream) -> nix::Result<(i32, u32)> {
    getsockopt(stream, PeerCredentials).map(|owner| (owner.pid(), owner.uid()))
}

/// Runs `server` on its own thread, which ends with the last rank's connection, or when the writer of the pipe
/// `attempt` is dropped without having written.
pub(super) fn spawn(server: Server, attempt: Option<PipeReader>) -> Result<()> {
    std::thread::Builder::new()
        .name("mgpu-rendezvous".into())
        .spawn(move || drive(server, attempt))
        .map(drop)
        .map_err(|error| Error::system("start the rendezvous thread", start_failure(&error)))
}

/// How long to poll at `now` if something is due at `deadline`.
pub(super) fn poll_timeout(deadline: Option<Instant>, now: Instant) -> PollTimeout {
    let Some(deadline) = deadline else { return PollTimeout::NONE };
    // Rounded up: waking before the deadline would only cost another iteration.
    let left = deadline.saturating_duration_since(now).as_millis() + 1;
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}

fn drive(mut server: Server, mut attempt: Option<PipeReader>) {
    while server.is_needed() {
        let timeout = poll_timeout(server.next_deadline(), Instant::now());
        let fds: Vec<BorrowedFd<'_>> = attempt.iter().map(AsFd::as_fd).chain(server.fds()).collect();
        let mut fds: Vec<PollFd<'_>> = fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // An interrupted poll is handled like a timeout: `service` checks everything anyway.
        let is_ready = poll(&mut fds, timeout).is_ok_and(|ready| ready > 0);
        let is_decided = attempt.is_some() && is_ready && fds[0].any().unwrap_or(true);
        drop(fds);
        if is_decided
            && attempt.take().is_some_and(|mut pipe| pipe.read(&mut [0]).is_ok_and(|count| count == 0))
        {
            return;
        }
        let _ = server.service();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_the_server_before_rank_0_joins_frees_the_name() {
        let run_id = format!("test-attempts-{}", std::process::id());
        let join_timeout = Duration::from_secs(3600);
        let run = HostedRun {
            run_id: &run_id,
            title: "a test",
            world_size: 2,
            restart_count: 0,
            join_timeout,
            host: None,
        };
        let serving = run.serve().unwrap();
        let waiting = run.connect(1).unwrap();
        let error = run.serve().unwrap_err().to_string();
        assert!(error.contains("is being started already, by process"), "{error}");
        drop(serving);
        // Succeeds once the thread has noticed the drop.
        let again = loop {
            match run.serve() {
                Ok(serving) => break serving,
                Err(_) => std::thread::yield_now(),
            }
        };
        // The waiting connection has ended, and the second attempt does not depend on the first.
        let end = (&waiting).read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset)), "{end:?}");
        again.keep_running();
        run.connect(0).unwrap();
    }
}
