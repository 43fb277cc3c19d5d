//! Where ranks connect: a listening socket, which stays quiet when descriptors run out.
//!
//! A launcher's socket lies in a private folder, and its ranks are told the path. One of rank 0 has a name that all ranks
//! know without being told (`hosted`), and no file.
//!
//! A connection that cannot be accepted because too many files are open stays in the queue, and the socket stays
//! readable: whoever polls it would turn in circles. So the listener keeps a descriptor in reserve, which makes room to
//! accept such a connection and to tell it why it cannot stay. Where even that fails, the listener is not polled for a
//! while. The launcher is told once, until a connection gets through again.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::directory::PrivateDirectory;
use super::message::{Reply, encode};
use super::socket::Connection;
use crate::{Error, Result};

/// How long a listener is left alone where nothing can be accepted.
const PAUSE: Duration = Duration::from_secs(1);

/// The listening socket and its folder, if it has one; both are gone when this is dropped.
pub(super) struct Listener {
    listener: UnixListener,
    address: String,
    _directory: Option<PrivateDirectory>,
    /// Any open file.
    reserve: Option<File>,
    /// Not to be polled before.
    paused_until: Option<Instant>,
    /// The launcher knows that connections cannot be accepted.
    is_reported: bool,
}

/// What is at the listener.
pub(super) enum ConnectionAttempt {
    /// A connection.
    Accepted(UnixStream),
    /// One that could not be accepted; the launcher should know why, unless it does already.
    Rejected(Option<String>),
    /// Nothing more for now.
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
        Ok(Listener {
            listener,
            address,
            _directory: directory,
            reserve,
            paused_until: None,
            is_reported: false,
        })
    }

    /// The value of `MGPU_RENDEZVOUS`.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// To be polled, unless it is shut for a while.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.paused_until.is_none().then(|| self.listener.as_fd())
    }

    /// When a listener that is shut is to be looked at again.
    pub(super) fn resumes_at(&self) -> Option<Instant> {
        self.paused_until
    }

    /// Ends the pause of a listener that is shut.
    #[cfg(test)]
    pub(super) fn end_pause(&mut self) {
        self.paused_until = None;
    }

    /// Takes the next connection in.
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
                // The kernel looks for a descriptor first, and for a connection only if there is one.
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

    /// Refuses the connection that could not be accepted, with the reserved descriptor, or shuts the listener for a while.
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

/// Tells a connection why it cannot stay. Nothing was sent on it before, so there is room for the text.
pub(super) fn refuse(stream: UnixStream, why: String) {
    if let Ok(connection) = Connection::new(stream) {
        let _ = connection.send(&encode(&Reply::Refused { why }), &[]);
    }
}
