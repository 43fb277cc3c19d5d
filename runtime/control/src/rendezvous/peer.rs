//! A connection and who is at its other end.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::{Pid, geteuid, getpgid};

use super::message::{Reply, encode};
use super::socket::Connection;
use crate::process::has_ended;

/// How long a connection may be silent before it has said hello.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Somebody who has connected.
pub(super) struct Peer {
    pub(super) id: u64,
    pub(super) connection: Connection,
    /// Known after its hello.
    pub(super) rank: Option<u32>,
    /// Its hello has been answered.
    pub(super) admitted: bool,
    /// Its process when it connected.
    pub(super) pid: i32,
    /// Readable when its process has ended, where nobody else tells. A child that it has forked holds the connection open.
    pub(super) end: Option<OwnedFd>,
    /// When its hello has to be here; `None` for connections that this process has made itself.
    pub(super) hello_by: Option<Instant>,
}

impl Peer {
    /// Takes a connection from a process of the same user. Gives any other back with the reason, as a predicate.
    pub(super) fn admit(
        stream: UnixStream,
        id: u64,
        hello_by: Option<Instant>,
    ) -> Result<Self, (UnixStream, String)> {
        let owner = match getsockopt(&stream, PeerCredentials) {
            Ok(owner) => owner,
            Err(errno) => return Err((stream, format!("does not show whose it is: {errno}"))),
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

    /// Its process, if this process can see it.
    pub(super) fn pid(&self) -> Option<u32> {
        visible(self.pid)
    }

    /// True once its process has ended, as far as that is to be found out here.
    pub(super) fn has_ended(&self) -> bool {
        self.end.as_ref().is_some_and(has_ended)
    }

    /// Its process group, or its process if that has ended.
    pub(super) fn group(&self) -> Option<u32> {
        self.pid().map(group_of)
    }

    /// The process group at the other end of a connection that is not taken in, if this process can see it.
    pub(super) fn group_behind(stream: &UnixStream) -> Option<u32> {
        getsockopt(stream, PeerCredentials).ok().and_then(|owner| visible(owner.pid())).map(group_of)
    }

    /// Who it is, as far as that is known.
    pub(super) fn name(&self) -> String {
        match self.rank {
            Some(rank) => format!("rank {rank}"),
            None => format!("process {}, which has not said hello", self.pid),
        }
    }

    /// Tells it why it cannot stay, and ends the connection.
    pub(super) fn refuse(&self, why: &str) {
        let _ = self.connection.send(&encode(&Reply::Refused { why: why.to_owned() }), &[]);
        let _ = self.connection.stream().shutdown(Shutdown::Both);
    }

    /// When a peer that has not said hello is given up.
    pub(super) fn hello_deadline(&self) -> Option<Instant> {
        self.hello_by.filter(|_| self.rank.is_none())
    }
}

fn group_of(process: u32) -> u32 {
    getpgid(Some(Pid::from_raw(process as i32))).map_or(process, |group| group.as_raw() as u32)
}

/// A process of a namespace that this one does not see has no number here.
fn visible(pid: i32) -> Option<u32> {
    u32::try_from(pid).ok().filter(|pid| *pid > 0)
}
