//! The rendezvous of ranks that another launcher has started: rank 0 serves it, on a thread.
//!
//! All ranks derive the same name from what their launcher calls the job. Rank 0 listens under it until all have joined,
//! and the others try to connect until it does. The name is that of an *abstract* socket: it lies in no folder, so nothing
//! is left when rank 0 is killed, no stale file has to be told from a live one, and a name in use is in use. (A path would
//! be safe only in a folder that belongs to this user alone, which ranks may be told differently about: `XDG_RUNTIME_DIR`
//! is often missing in a batch job.) Such names belong to a network namespace: ranks in containers have to share one.
//!
//! Other users can see the name and could take it first. They gain nothing: the server takes no peer of another user in,
//! and a rank asks the kernel whose socket it has reached before it says a word. All that they can do is to be named in an
//! error.
//!
//! Nobody watches these ranks as `mgpurun` would. A connection that ends without a goodbye is the end of its rank, which
//! the server notes on the progress page; the end of rank 0, and of the server with it, the others notice by their own
//! connections ([`Store::rank_zero_is_gone`](super::Store)).

use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::UnixAddr;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;

use super::client;
use super::listener::Listener;
use super::server::Server;
use crate::process::start_failure;
use crate::{Error, Result};

/// First pause between two attempts to reach rank 0; later ones are up to [`MAX_RETRY_DELAY`].
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(1);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(50);

/// A run as its ranks know it without having spoken to each other.
#[derive(Debug)]
pub struct HostedRun<'a> {
    /// The same on all its ranks, and on those of no other run.
    pub run_id: &'a str,
    /// What users call it, for errors.
    pub title: &'a str,
    /// Number of its ranks.
    pub world_size: u32,
    /// How often its launcher has restarted the ranks.
    pub restart_count: u32,
    /// How long its ranks wait for each other.
    pub join_timeout: Duration,
}

impl HostedRun<'_> {
    /// Serves the rendezvous until the last rank has let go of it. For rank 0, before it [connects](Self::connect).
    ///
    /// # Errors
    /// If another run of this name is being started, or the system refuses a socket, memory or a thread.
    pub fn serve(&self) -> Result<HostedServer> {
        let name = self.name();
        let listener = Listener::bind_abstract(&name).map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => Error::Join { rank: 0, problem: self.taken() },
            _ => Error::system(format!("listen on the abstract socket {name}"), error),
        })?;
        let join_by = Instant::now() + self.join_timeout.min(client::MAX_WAIT);
        let server = Server::unattended(self.world_size, self.run_id, listener, join_by)?;
        let program = std::env::args_os().next().unwrap_or_default();
        server.describe(&program.to_string_lossy(), self.restart_count);
        let (attempt, alive) = pipe().map_err(|error| Error::system("make a pipe", error))?;
        spawn(server, Some(attempt))?;
        Ok(HostedServer { alive })
    }

    /// Connects to rank 0, as soon as it serves.
    ///
    /// # Errors
    /// If that takes longer than the run's join_timeout, or the socket belongs to another user.
    pub fn connect(&self, rank: u32) -> Result<UnixStream> {
        let started = Instant::now();
        let mut pause = FIRST_RETRY_DELAY;
        let stream = loop {
            match self.connect_once() {
                Ok(stream) => break stream,
                // Nobody listens yet, or there are more callers than the system lets queue.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::Other) => {}
                Err(error) => return Err(Error::system("connect to rank 0", error)),
            }
            let after = started.elapsed();
            if after >= self.join_timeout {
                let operation = format!("join ({}; all its ranks have to be on this host)", self.title);
                return Err(Error::Timeout { rank, waited_for: vec![0], operation, after });
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
            Err(errno) => Err(Error::system("ask whose socket rank 0's is", errno)),
        }
    }

    /// The socket's name: users do not meet by mistake.
    fn name(&self) -> String {
        format!("mgpu-{}-{}", geteuid(), self.run_id)
    }

    fn connect_once(&self) -> io::Result<UnixStream> {
        client::connect(&UnixAddr::new_abstract(self.name().as_bytes())?)
    }

    /// Why the name cannot be had.
    fn taken(&self) -> String {
        let by = match self.connect_once().ok().and_then(|stream| owner(&stream).ok()) {
            Some((pid, uid)) => format!("process {pid} of user {uid}"),
            None => "another process".into(),
        };
        format!(
            "{} is being started already, by {by}; give each of two runs at once a name of its own in MGPU_RUN_ID",
            self.title
        )
    }
}

/// The rendezvous that this process serves and has not joined yet. If it never does, the rendezvous ends when this is
/// dropped: the next attempt needs its name.
#[derive(Debug)]
pub struct HostedServer {
    alive: PipeWriter,
}

impl HostedServer {
    /// From now on the rendezvous lasts as long as its ranks.
    pub fn keep_running(mut self) {
        // Fails only if the thread has ended, since a pipe has room for a byte.
        let _ = self.alive.write(&[1]);
    }
}

/// Process and user that listen at the other end.
fn owner(stream: &UnixStream) -> nix::Result<(i32, u32)> {
    getsockopt(stream, PeerCredentials).map(|owner| (owner.pid(), owner.uid()))
}

/// Drives `server` on a thread of its own, which ends with the last rank's connection, or with a pipe whose writer is dropped
/// and has written nothing.
pub(super) fn spawn(server: Server, attempt: Option<PipeReader>) -> Result<()> {
    std::thread::Builder::new()
        .name("mgpu-rendezvous".into())
        .spawn(move || drive(server, attempt))
        .map(drop)
        .map_err(|error| Error::system("start the rendezvous thread", start_failure(&error)))
}

fn drive(mut server: Server, mut attempt: Option<PipeReader>) {
    while server.is_needed() {
        let timeout = match server.next_deadline() {
            None => PollTimeout::NONE,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                // Rounded up: waking before the deadline would only mean another turn.
                PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
            }
        };
        let fds: Vec<BorrowedFd<'_>> = attempt.iter().map(AsFd::as_fd).chain(server.fds()).collect();
        let mut fds: Vec<PollFd<'_>> = fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // An interrupted poll is as good as a timeout: `service` looks at everything anyway.
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
    fn an_attempt_that_rank_0_gives_up_leaves_the_name_free() {
        let run_id = format!("test-attempts-{}", std::process::id());
        let join_timeout = Duration::from_secs(3600);
        let run =
            HostedRun { run_id: &run_id, title: "a test", world_size: 2, restart_count: 0, join_timeout };
        let serving = run.serve().unwrap();
        let waiting = run.connect(1).unwrap();
        let error = run.serve().unwrap_err().to_string();
        assert!(error.contains("is being started already, by process"), "{error}");
        drop(serving);
        // As soon as the thread has seen it.
        let again = loop {
            match run.serve() {
                Ok(serving) => break serving,
                Err(_) => std::thread::yield_now(),
            }
        };
        // Who waited finds its connection ended, and the second attempt is not tied to the first.
        let end = (&waiting).read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset)), "{end:?}");
        again.keep_running();
        run.connect(0).unwrap();
    }
}
