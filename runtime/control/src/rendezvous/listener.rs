//! The listening socket that ranks connect to. It does not cause a busy loop when descriptors run out.
//!
//! A launcher's socket lies in a private folder, and its ranks get the path. A socket of rank 0 is abstract: all ranks
//! derive its name (`hosted`), and there is no file.
//!
//! A connection that cannot be accepted because too many files are open stays in the backlog, and the socket stays
//! readable: a poll loop would spin. So the listener keeps a descriptor in reserve. It closes that descriptor to accept
//! such a connection and to send it the reason for its rejection. If even that fails, the listener is not polled for a
//! while. The problem is reported once, until a connection is accepted again.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::directory::PrivateDirectory;
use super::message::{Reply, encode};
use super::socket::Connection;
use crate::{Error, Result};

/// How long the listener is not polled if no connection can be accepted.
const PAUSE: Duration = Duration::from_secs(1);

/// The listening socket and its folder, if it has one. Dropping it closes the socket and removes the folder.
pub(super) struct Listener {
    listener: UnixListener,
    address: String,
    directory: Option<PrivateDirectory>,
    /// An open file, closed to free a descriptor.
    reserve: Option<File>,
    /// Not polled before this time.
    paused_until: Option<Instant>,
    /// It was reported that connections cannot be accepted.
    is_reported: bool,
}

/// The result of accepting a connection.
pub(super) enum ConnectionAttempt {
    /// A new connection.
    Accepted(UnixStream),
    /// A connection could not be accepted; the reason, unless it was reported before.
    Rejected(Option<String>),
    /// There is no connection for now.
    None,
}

impl Listener {
    /// Listens in a new folder.
    pub(super) fn bind() -> Result<Self> {
        let directory = PrivateDirectory::create()?;
        let path = directory.socket();
        let failed = |error| Error::system(format!("listen on {}", path.display()), error);
        let listener = UnixListener::bind(&path).map_err(failed)?;
        let address = format!("unix:{}", path.display());
        Self::new(listener, address, Some(directory)).map_err(failed)
    }

    /// Listens under the abstract `name`.
    pub(super) fn bind_abstract(name: &str) -> io::Result<Self> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        Self::new(listener, format!("abstract:{name}"), None)
    }

    fn new(listener: UnixListener, address: String, directory: Option<PrivateDirectory>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let reserve = File::open("/dev/null").ok();
        Ok(Listener { listener, address, directory, reserve, paused_until: None, is_reported: false })
    }

    /// The value of `MGPU_RENDEZVOUS`.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Where the `number`-th rank of this host may write why it failed, if there is a folder.
    pub(super) fn error_file(&self, number: u32) -> Option<PathBuf> {
        self.directory.as_ref().map(|directory| directory.error_file(number))
    }

    /// The descriptor to poll, unless the listener is paused.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.paused_until.is_none().then(|| self.listener.as_fd())
    }

    /// When a paused listener is polled again.
    pub(super) fn resumes_at(&self) -> Option<Instant> {
        self.paused_until
    }

    /// Ends the pause.
    #[cfg(test)]
    pub(super) fn end_pause(&mut self) {
        self.paused_until = None;
    }

    /// Accepts the next connection.
    pub(super) fn accept(&mut self, now: Instant) -> ConnectionAttempt {
        if self.paused_until.is_some_and(|until| now < until) {
            return ConnectionAttempt::None;
        }
        self.paused_until = None;
        loop {
            let error = match self.listener.accept() {
                Ok((stream, _)) => {
                    self.is_reported = false;
                    return ConnectionAttempt::Accepted(stream);
                }
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::WouldBlock => return ConnectionAttempt::None,
                ErrorKind::Interrupted | ErrorKind::ConnectionAborted => continue,
                // The kernel allocates a descriptor before it looks for a connection, so there may be none.
                _ if !self.has_pending_connection() => return ConnectionAttempt::None,
                _ => self.reject(&error, now),
            }
            let why = (!std::mem::replace(&mut self.is_reported, true)).then(|| explain(&error));
            return ConnectionAttempt::Rejected(why);
        }
    }

    /// True if a connection waits to be accepted.
    fn has_pending_connection(&self) -> bool {
        let mut fds = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Rejects the connection that could not be accepted, using the reserved descriptor, or pauses the listener.
    fn reject(&mut self, error: &io::Error, now: Instant) {
        drop(self.reserve.take());
        match self.listener.accept() {
            Ok((stream, _)) => refuse(stream, explain(error)),
            Err(_) => self.paused_until = Some(now + PAUSE),
        }
        self.reserve = File::open("/dev/null").ok();
    }
}

fn explain(error: &io::Error) -> String {
    format!("cannot be accepted by the launcher: {error}; raise `ulimit -n` or start fewer ranks")
}

/// Sends a connection the reason for its rejection. Nothing was sent on it before, so its buffer has room for the text.
pub(super) fn refuse(stream: UnixStream, why: String) {
    if let Ok(connection) = Connection::new(stream) {
        let _ = connection.send(&encode(&Reply::Refused { why }), &[]);
    }
}
