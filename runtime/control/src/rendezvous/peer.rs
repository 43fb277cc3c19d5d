//! A connection and the process at its other end.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::{Pid, geteuid, getpgid};

use super::message::{Reply, encode, shortened};
use super::socket::Connection;
use crate::process::has_ended;

/// Time after which a connection that has not said hello is closed.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// A connected process.
pub(super) struct Peer {
    pub(super) id: u64,
    pub(super) connection: Connection,
    /// Its rank; known after its hello.
    pub(super) rank: Option<u32>,
    /// Its hello has been answered.
    pub(super) admitted: bool,
    /// Its process id when it connected.
    pub(super) pid: i32,
    /// Readable when its process has ended; set if no launcher reports that. Needed because a forked child of the process
    /// may hold the connection open.
    pub(super) end: Option<OwnedFd>,
    /// Deadline of its hello; `None` for connections that this process created itself.
    pub(super) hello_by: Option<Instant>,
}

impl Peer {
    /// Accepts a connection from a process of the same user. Returns any other connection with the reason, as a
    /// predicate.
    pub(super) fn admit(
        stream: UnixStream,
        id: u64,
        hello_by: Option<Instant>,
    ) -> Result<Self, (UnixStream, String)> {
        let owner = match getsockopt(&stream, PeerCredentials) {
            Ok(owner) => owner,
            Err(errno) => return Err((stream, format!("has no known owner: {errno}"))),
        };
        if owner.uid() != geteuid().as_raw() {
            let why = format!("comes from process {} of user {}", owner.pid(), owner.uid());
            return Err((stream, why));
        }
        match Connection::new(stream) {
            Ok(connection) => Ok(Peer {
                id,
                connection,
                rank: None,
                admitted: false,
                pid: owner.pid(),
                end: None,
                hello_by,
            }),
            Err((stream, error)) => Err((stream, format!("cannot be used: {error}"))),
        }
    }

    /// Its process id, if the process is visible in this pid namespace.
    pub(super) fn pid(&self) -> Option<u32> {
        visible(self.pid)
    }

    /// True once its process has ended, if that is monitored here.
    pub(super) fn has_ended(&self) -> bool {
        self.end.as_ref().is_some_and(has_ended)
    }

    /// Its process group, or its process id if it has ended.
    pub(super) fn group(&self) -> Option<u32> {
        self.pid().map(group_of)
    }

    /// The process group at the other end of a rejected connection, if it is visible in this pid namespace.
    pub(super) fn group_behind(stream: &UnixStream) -> Option<u32> {
        getsockopt(stream, PeerCredentials).ok().and_then(|owner| visible(owner.pid())).map(group_of)
    }

    /// Its name in messages: the rank, or the process id before its hello.
    pub(super) fn name(&self) -> String {
        match self.rank {
            Some(rank) => format!("rank {rank}"),
            None => format!("process {}, which has not said hello", self.pid),
        }
    }

    /// Sends it the reason of its rejection and closes the connection.
    pub(super) fn refuse(&self, why: &str) {
        let _ = self.connection.send(&encode(&Reply::Refused { why: shortened(why) }), &[]);
        let _ = self.connection.stream().shutdown(Shutdown::Both);
    }

    /// Deadline of the hello, while it has not been said.
    pub(super) fn hello_deadline(&self) -> Option<Instant> {
        self.hello_by.filter(|_| self.rank.is_none())
    }
}

fn group_of(process: u32) -> u32 {
    getpgid(Some(Pid::from_raw(process as i32))).map_or(process, |group| group.as_raw() as u32)
}

/// A process of a pid namespace that is not visible here has pid 0.
fn visible(pid: i32) -> Option<u32> {
    u32::try_from(pid).ok().filter(|pid| *pid > 0)
}
