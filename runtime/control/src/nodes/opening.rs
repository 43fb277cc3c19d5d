//! A connection that is not authenticated yet: the handshake with its socket and its deadline.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::auth::Credentials;
use super::channel::Channel;
use super::handshake::{Fault, Handshake};
use super::link::Link;
use super::outbox::Outbox;
use super::preamble::RunTag;
use super::tcp;

/// Maximum number of reads per call, so that one peer does not keep the others waiting.
const MAX_READS_PER_CALL: usize = 4;
/// Time for a connection to be made, and again for its handshake.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(5);

pub(super) struct Opening {
    stream: TcpStream,
    peer: SocketAddr,
    handshake: Handshake,
    unsent: Outbox,
    is_connected: bool,
    deadline: Instant,
}

impl Opening {
    /// Starts to connect to `peer`, from the address `local` if it is given.
    pub(super) fn dial(
        peer: SocketAddr,
        local: Option<IpAddr>,
        credentials: &Credentials,
        run: RunTag,
        now: Instant,
    ) -> Result<Self, Fault> {
        let failed = |error| Fault::Connection(tcp::describe(&error));
        let stream = tcp::start_connecting(peer, local).map_err(failed)?;
        let handshake = Handshake::dialer(credentials, run).map_err(Fault::Connection)?;
        Ok(Self::new(stream, peer, handshake, false, now))
    }

    /// Takes an accepted connection.
    pub(super) fn accept(
        stream: TcpStream,
        peer: SocketAddr,
        credentials: &Credentials,
        run: RunTag,
        now: Instant,
    ) -> Result<Self, Fault> {
        tcp::configure(&stream).map_err(|error| Fault::Connection(tcp::describe(&error)))?;
        let handshake = Handshake::listener(credentials, run).map_err(Fault::Connection)?;
        Ok(Self::new(stream, tcp::canonical(peer), handshake, true, now))
    }

    fn new(
        stream: TcpStream,
        peer: SocketAddr,
        handshake: Handshake,
        is_connected: bool,
        now: Instant,
    ) -> Self {
        let deadline = now + HANDSHAKE_TIME;
        Opening { stream, peer, handshake, unsent: Outbox::default(), is_connected, deadline }
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// True once the other side has sent a preamble that matches.
    pub(super) fn is_answered(&self) -> bool {
        self.handshake.is_answered()
    }

    /// The descriptor with the events to poll it for.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let events = match (self.is_connected, self.unsent.is_empty()) {
            (false, _) => PollFlags::POLLOUT,
            (true, false) => PollFlags::POLLIN | PollFlags::POLLOUT,
            (true, true) => PollFlags::POLLIN,
        };
        PollFd::new(self.stream.as_fd(), events)
    }

    /// Reads and writes. Returns the channel once both sides are authenticated, for [`into_link`](Self::into_link).
    pub(super) fn service(&mut self, now: Instant) -> Result<Option<Channel>, Fault> {
        self.is_connected = self.is_connected || self.has_connected()?;
        let result = if self.is_connected { self.read() } else { Ok(None) };
        if self.is_connected {
            self.unsent.end().extend(self.handshake.take_output());
            // Reading reports the error: a peer that closes its end may have said why before.
            let _ = self.unsent.write_to(&self.stream);
        }
        match result {
            Ok(None) if self.deadline <= now => Err(self.timed_out()),
            result => result,
        }
    }

    fn has_connected(&self) -> Result<bool, Fault> {
        let failed = |error| Fault::Connection(tcp::describe(&error));
        if let Some(error) = self.stream.take_error().map_err(failed)? {
            return Err(failed(error));
        }
        match self.stream.peer_addr() {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }

    fn read(&mut self) -> Result<Option<Channel>, Fault> {
        let mut bytes = [0; 2048];
        for _ in 0..MAX_READS_PER_CALL {
            let count = match (&self.stream).read(&mut bytes) {
                Ok(0) => return Err(Fault::Connection(self.ended().into())),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(Fault::Connection(tcp::describe(&error))),
            };
            if let Some(channel) = self.handshake.advance(&bytes[..count])? {
                return Ok(Some(channel));
            }
        }
        Ok(None)
    }

    fn ended(&self) -> &'static str {
        match self.is_answered() {
            true => "closed the connection during authentication",
            false => "closed the connection without a word of mgpurun",
        }
    }

    fn timed_out(&self) -> Fault {
        let problem = match (self.is_connected, self.is_answered()) {
            (false, _) => "did not accept the connection",
            (true, false) => "did not identify itself",
            (true, true) => "did not complete the authentication",
        };
        Fault::Connection(format!("{problem} within {} s", HANDSHAKE_TIME.as_secs()))
    }

    /// The link of a connection whose handshake has succeeded.
    pub(super) fn into_link(self, channel: Channel) -> Result<Link, Fault> {
        let local = self.stream.local_addr().map_err(|error| Fault::Connection(tcp::describe(&error)))?;
        Ok(Link::new(self.stream, self.peer, tcp::canonical(local), channel, self.unsent))
    }
}
