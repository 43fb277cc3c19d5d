//! One authenticated connection to another agent, over which messages travel in both directions.

use std::io::{ErrorKind, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::libc;
use nix::poll::{PollFd, PollFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::channel::{Channel, MAX_FRAME};
use super::outbox::Outbox;
use super::unacknowledged::{self, Unacknowledged};

/// Maximum number of bytes that wait to be sent.
const MAX_UNSENT: usize = 16 << 20;
/// Maximum number of reads per call, so that one peer does not keep the others waiting.
const MAX_READS_PER_CALL: usize = 16;
/// How long a closed link waits for the other side to close its own end.
const CLOSING_TIME: Duration = Duration::from_secs(5);

/// State of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkState {
    /// Messages can be sent and received.
    Open,
    /// No message arrives any more. Those that had arrived can still be taken.
    Lost(Loss),
}

/// How a link was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loss {
    /// The other process closed the connection or has ended.
    Ended,
    /// The other host does not answer.
    Unreachable,
    /// The other side broke the protocol or does not read; the text says what happened.
    Protocol(String),
}

/// An authenticated connection to another agent.
///
/// Poll [`fd`](Self::fd) for reading, and for writing while it [`wants_to_write`](Self::wants_to_write). When it is ready
/// or [`next_deadline`](Self::next_deadline) has passed, call [`service`](Self::service), and then
/// [`next_message`](Self::next_message) until it returns `None`. No call blocks.
pub struct Link {
    stream: TcpStream,
    peer: SocketAddr,
    local: SocketAddr,
    channel: Channel,
    unsent: Outbox,
    unacknowledged: Unacknowledged,
    /// Until when a closed link waits for the other side.
    closing_by: Option<Instant>,
    /// Nothing can be written any more: this side has closed its end, or the other side does not accept anything.
    is_write_closed: bool,
    lost: Option<Loss>,
}

impl Link {
    pub(super) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        local: SocketAddr,
        channel: Channel,
        unsent: Outbox,
    ) -> Self {
        Link {
            stream,
            peer,
            local,
            channel,
            unsent,
            unacknowledged: Unacknowledged::default(),
            closing_by: None,
            is_write_closed: false,
            lost: None,
        }
    }

    /// The descriptor to poll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The descriptor with the events to poll it for.
    pub fn poll_fd(&self) -> PollFd<'_> {
        let output = if self.wants_to_write() { PollFlags::POLLOUT } else { PollFlags::empty() };
        PollFd::new(self.fd(), PollFlags::POLLIN | output)
    }

    /// True if bytes wait to be sent.
    pub fn wants_to_write(&self) -> bool {
        !self.unsent.is_empty() && !self.is_write_closed && self.lost.is_none()
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.closing_by.or_else(|| self.unacknowledged.deadline()).filter(|_| self.lost.is_none())
    }

    /// Address of the other side.
    pub fn peer_address(&self) -> SocketAddr {
        self.peer
    }

    /// Address of this side: the one under which the other side's host reaches this one.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Sends a message: writes as much of it as possible, [`service`](Self::service) writes the rest. A message to a link
    /// that was closed or lost is dropped.
    ///
    /// The link is lost if the message is larger than 1 MiB of JSON, or if then more than 16 MiB wait to be sent.
    pub fn send<T: Serialize>(&mut self, message: &T) {
        if self.lost.is_some() || self.is_write_closed || self.closing_by.is_some() {
            return;
        }
        self.note_acknowledgements(Instant::now());
        if let Err(problem) = self.channel.seal(message, self.unsent.end()) {
            return self.lose(Loss::Protocol(format!("cannot send {problem}")));
        }
        self.write();
        let unsent = self.unsent.len();
        if unsent > MAX_UNSENT && self.wants_to_write() {
            self.lose(Loss::Protocol(format!("it does not read: {unsent} bytes wait to be sent")));
        }
    }

    /// Reads and writes.
    pub fn service(&mut self, now: Instant) -> LinkState {
        if self.lost.is_none() {
            self.write();
        }
        if self.lost.is_none() {
            self.read();
        }
        self.note_acknowledgements(now);
        if self.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.lose(if self.closing_by.is_some() { Loss::Ended } else { Loss::Unreachable });
        }
        self.lost.clone().map_or(LinkState::Open, LinkState::Lost)
    }

    /// The next message that has arrived, `None` if there is none.
    ///
    /// # Errors
    /// If the other side sent something else. The link is lost then.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        let result = self.channel.next_message();
        if let Err(problem) = &result {
            self.lose(Loss::Protocol(problem.clone()));
        }
        result
    }

    /// Says goodbye: what was sent is still written, then the other side sees the end of the stream.
    ///
    /// Keep calling [`service`](Self::service) until the link is lost: with [`Loss::Ended`] once the other side has closed
    /// its end too, or did not within 5 s. A link that is dropped before that may destroy what is on its way.
    pub fn close(&mut self) {
        self.closing_by.get_or_insert_with(|| Instant::now() + CLOSING_TIME);
        self.write();
    }

    fn write(&mut self) {
        if self.is_write_closed {
            return;
        }
        // After an error there may still be messages to read, and reading then says how the connection ended.
        let unsent = self.unsent.len();
        let has_failed = self.unsent.write_to(&self.stream).is_err();
        self.unacknowledged.wrote(unsent - self.unsent.len(), Instant::now());
        if has_failed || self.closing_by.is_some() && self.unsent.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
            self.is_write_closed = true;
        }
    }

    fn note_acknowledgements(&mut self, now: Instant) {
        if self.unacknowledged.is_pending() {
            self.unacknowledged.note(unacknowledged::bytes(&self.stream), now);
        }
    }

    fn read(&mut self) {
        let mut bytes = [0; 32 << 10];
        for _ in 0..MAX_READS_PER_CALL {
            // The caller takes the messages before more are read.
            if self.channel.buffered() > 2 * MAX_FRAME {
                return;
            }
            let count = match (&self.stream).read(&mut bytes) {
                Ok(0) => return self.lose(Loss::Ended),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return self.lose(loss_of(error.raw_os_error())),
            };
            if let Err(problem) = self.channel.open(&bytes[..count]) {
                return self.lose(Loss::Protocol(problem));
            }
        }
    }

    fn lose(&mut self, loss: Loss) {
        self.lost.get_or_insert(loss);
    }
}

/// What an error of a socket says about the other side. Whoever closes a connection or resets it is alive; every other
/// error is that of packets without an answer. (After the time-out the kernel reports the last reason why a packet could
/// not be sent, such as EINVAL for a blackhole route.)
fn loss_of(code: Option<i32>) -> Loss {
    match code {
        Some(libc::ECONNRESET | libc::ECONNABORTED | libc::EPIPE) => Loss::Ended,
        _ => Loss::Unreachable,
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Link { peer, local, lost, .. } = self;
        f.debug_struct("Link")
            .field("peer", peer)
            .field("local", local)
            .field("lost", lost)
            .finish_non_exhaustive()
    }
}
