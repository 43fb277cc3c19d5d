//! Where ranks connect: a listening socket, which stays quiet when descriptors run out.
//!
//! A launcher's socket lies in a private folder, and its ranks are told the path. One of rank 0 has a name that all ranks
//! know without being told (`hosted`), and no file.
//!
//! A connection that cannot be accepted because too many files are open stays in the queue, and the socket stays
//! readable: whoever polls it would turn in circles. So the door keeps a descriptor in reserve, which makes room to
//! accept such a connection and to tell it why it cannot stay. Where even that fails, the door is not polled for a
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

/// How long a door is left alone where nothing can be accepted.
const PAUSE: Duration = Duration::from_secs(1);

/// The listening socket and its folder, if it has one; both are gone when this is dropped.
pub(super) struct Door {
    listener: UnixListener,
    address: String,
    _directory: Option<PrivateDirectory>,
    /// Any open file.
    reserve: Option<File>,
    /// Not to be polled before.
    shut_until: Option<Instant>,
    /// The launcher knows that connections cannot be accepted.
    is_told: bool,
}

/// What is at the door.
pub(super) enum Knock {
    /// A connection.
    Stream(UnixStream),
    /// One that could not be accepted; the launcher should know why, unless it does already.
    Refused(Option<String>),
    /// Nothing more for now.
    Nobody,
}

impl Door {
    /// Listens in a new folder.
    pub(super) fn open() -> Result<Self> {
        let directory = PrivateDirectory::create()?;
        let path = directory.socket();
        let failed = |error| Error::system(format!("listen on {}", path.display()), error);
        let listener = UnixListener::bind(&path).map_err(failed)?;
        let address = format!("unix:{}", path.display());
        Self::new(listener, address, Some(directory)).map_err(failed)
    }

    /// Listens under the abstract `name`.
    pub(super) fn open_abstract(name: &str) -> io::Result<Self> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        Self::new(listener, format!("abstract:{name}"), None)
    }

    fn new(listener: UnixListener, address: String, directory: Option<PrivateDirectory>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let reserve = File::open("/dev/null").ok();
        Ok(Door { listener, address, _directory: directory, reserve, shut_until: None, is_told: false })
    }

    /// The value of `MGPU_RENDEZVOUS`.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// To be polled, unless it is shut for a while.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.shut_until.is_none().then(|| self.listener.as_fd())
    }

    /// When a door that is shut is to be looked at again.
    pub(super) fn opens_at(&self) -> Option<Instant> {
        self.shut_until
    }

    /// Ends the pause of a door that is shut.
    #[cfg(test)]
    pub(super) fn open_now(&mut self) {
        self.shut_until = None;
    }

    /// Takes the next connection in.
    pub(super) fn answer(&mut self, now: Instant) -> Knock {
        if self.shut_until.is_some_and(|until| now < until) {
            return Knock::Nobody;
        }
        self.shut_until = None;
        loop {
            let error = match self.listener.accept() {
                Ok((stream, _)) => {
                    self.is_told = false;
                    return Knock::Stream(stream);
                }
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::WouldBlock => return Knock::Nobody,
                ErrorKind::Interrupted | ErrorKind::ConnectionAborted => continue,
                // The kernel looks for a descriptor first, and for a connection only if there is one.
                _ if !self.has_caller() => return Knock::Nobody,
                _ => self.turn_away(&error, now),
            }
            let why = (!std::mem::replace(&mut self.is_told, true)).then(|| explain(&error));
            return Knock::Refused(why);
        }
    }

    /// True if a connection waits to be accepted.
    fn has_caller(&self) -> bool {
        let mut fds = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Refuses the connection that could not be accepted, with the reserved descriptor, or shuts the door for a while.
    fn turn_away(&mut self, error: &io::Error, now: Instant) {
        drop(self.reserve.take());
        match self.listener.accept() {
            Ok((stream, _)) => refuse(stream, explain(error)),
            Err(_) => self.shut_until = Some(now + PAUSE),
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
