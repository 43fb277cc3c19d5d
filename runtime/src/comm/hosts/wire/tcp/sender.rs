//! The connections of a communicator, and their write side.

use std::io::{self, ErrorKind, IoSlice};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, sendmsg, setsockopt, sockopt};

use crate::comm::hosts::frame::{Header, Stamp};
use crate::comm::hosts::transfer::Transfer;
use crate::comm::hosts::wire::Sender;

/// How long an abort waits for room in the connections.
const ABORT_PATIENCE: Duration = Duration::from_millis(200);

/// The connections of one communicator, by rank; none at the own rank.
pub(super) struct TcpSender {
    pub(super) stamp: Stamp,
    connections: Vec<Option<Connection>>,
}

struct Connection {
    stream: TcpStream,
    outgoing: Mutex<Outgoing>,
}

/// What is not written yet.
#[derive(Default)]
struct Outgoing {
    /// Whole frames, of which `written` bytes are written.
    queued: Vec<u8>,
    written: usize,
    /// A frame of a transfer is partly written: nothing else may be written before its end.
    within_frame: bool,
    /// Nothing can be written any more.
    closed: bool,
}

impl Outgoing {
    fn has_queued(&self) -> bool {
        self.written < self.queued.len()
    }

    /// Closes it: what was queued is lost.
    fn close(&mut self) {
        *self = Outgoing { closed: true, ..Outgoing::default() };
    }
}

/// Sets the options of a connection between ranks.
///
/// There is no TCP_USER_TIMEOUT: it also ends connections whose receiver is alive and reads nothing for a while
/// (tcp_probe_timer in the kernel), as a rank that is stopped in a debugger does.
pub(in super::super::super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &1)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &1)?;
    setsockopt(stream, sockopt::TcpKeepCount, &4)?;
    Ok(())
}

/// Writes without blocking and without SIGPIPE; `None` if there is no room.
fn write(stream: &TcpStream, parts: &[&[u8]]) -> io::Result<Option<usize>> {
    let parts = [parts[0], parts.get(1).copied().unwrap_or_default()].map(IoSlice::new);
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    loop {
        match sendmsg::<()>(stream.as_raw_fd(), &parts, &[], flags, None) {
            Ok(bytes) => return Ok(Some(bytes)),
            Err(Errno::EAGAIN) => return Ok(None),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

impl Connection {
    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes queued frames. False if there is no room for all of them.
    fn write_queued(&self, outgoing: &mut Outgoing) -> io::Result<bool> {
        while outgoing.has_queued() {
            match write(&self.stream, &[&outgoing.queued[outgoing.written..]])? {
                Some(bytes) => outgoing.written += bytes,
                None => return Ok(false),
            }
        }
        outgoing.queued.clear();
        outgoing.written = 0;
        Ok(true)
    }
}

impl TcpSender {
    pub(super) fn new(stamp: Stamp, streams: Vec<Option<TcpStream>>) -> Self {
        let connection = |stream| Connection { stream, outgoing: Mutex::default() };
        TcpSender { stamp, connections: streams.into_iter().map(|stream| stream.map(connection)).collect() }
    }

    /// Number of ranks.
    pub(super) fn size(&self) -> u32 {
        self.connections.len() as u32
    }

    /// The ranks with a connection.
    pub(super) fn peers(&self) -> impl Iterator<Item = u32> {
        (0..self.size()).filter(|peer| self.connections[*peer as usize].is_some())
    }

    fn connection(&self, peer: u32) -> &Connection {
        self.connections[peer as usize].as_ref().expect("a connection to every other rank")
    }

    pub(super) fn fd(&self, peer: u32) -> BorrowedFd<'_> {
        self.connection(peer).stream.as_fd()
    }

    /// The connection to `peer`, for reading.
    pub(super) fn stream(&self, peer: u32) -> &TcpStream {
        &self.connection(peer).stream
    }

    /// Writes as much as there is room for: queued frames first, then those of `transfer`.
    ///
    /// # Errors
    /// If the connection cannot be written to, which does not mean that all of its bytes were read.
    pub(super) fn write(&self, peer: u32, transfer: &mut Transfer<'_>) -> io::Result<()> {
        let connection = self.connection(peer);
        let mut outgoing = connection.outgoing();
        if outgoing.closed {
            return Ok(());
        }
        let written = self.write_all(connection, &mut outgoing, peer, transfer);
        if written.is_err() {
            outgoing.close();
        }
        written
    }

    fn write_all(
        &self,
        connection: &Connection,
        outgoing: &mut Outgoing,
        peer: u32,
        transfer: &mut Transfer<'_>,
    ) -> io::Result<()> {
        loop {
            if !outgoing.within_frame && !connection.write_queued(outgoing)? {
                return Ok(());
            }
            let Some(frame) = transfer.next_frame(peer, self.stamp) else { return Ok(()) };
            let Some(bytes) = write(&connection.stream, &frame)? else { return Ok(()) };
            outgoing.within_frame = transfer.advance(peer, bytes);
        }
    }

    /// Writes what is queued, for at most `patience`.
    fn flush(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        loop {
            let mut waiting = Vec::new();
            for connection in self.connections.iter().flatten() {
                let mut outgoing = connection.outgoing();
                if outgoing.within_frame || outgoing.closed {
                    continue;
                }
                match connection.write_queued(&mut outgoing) {
                    Ok(true) => {}
                    Ok(false) => waiting.push(PollFd::new(connection.stream.as_fd(), PollFlags::POLLOUT)),
                    Err(_) => outgoing.close(),
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if waiting.is_empty() || left.is_zero() {
                return;
            }
            let _ = poll(&mut waiting, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        }
    }
}

impl Sender for TcpSender {
    fn queue(&self, peer: u32, header: Header, payload: &[u8]) {
        let mut outgoing = self.connection(peer).outgoing();
        if !outgoing.closed {
            outgoing.queued.extend_from_slice(&header.with_length(payload.len()).encode(self.stamp));
            outgoing.queued.extend_from_slice(payload);
        }
    }

    fn is_flushed(&self, peer: u32) -> bool {
        !self.connection(peer).outgoing().has_queued()
    }

    fn abort(&self, header: Header, payload: &[u8]) {
        for peer in self.peers() {
            self.queue(peer, header, payload);
        }
        self.flush(ABORT_PATIENCE);
        for connection in self.connections.iter().flatten() {
            connection.outgoing().close();
            let _ = connection.stream.shutdown(Shutdown::Write);
        }
    }

    /// A connection that is closed with unread bytes is reset, and what the kernel has not delivered by then is lost. So
    /// this reads, and waits until the peers' hosts have confirmed all bytes.
    fn close(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        self.flush(patience);
        for connection in self.connections.iter().flatten() {
            let _ = connection.stream.shutdown(Shutdown::Write);
        }
        let mut pause = Duration::from_micros(50);
        while self.connections.iter().flatten().any(|connection| !is_drained(&connection.stream))
            && Instant::now() < deadline
        {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }
}

/// Reads and drops what has arrived. True if the peer's host has confirmed everything, or the connection has ended.
fn is_drained(stream: &TcpStream) -> bool {
    let mut dropped = [0u8; 16 << 10];
    for _ in 0..64 {
        match io::Read::read(&mut &*stream, &mut dropped) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(_) => return true,
        }
    }
    super::unconfirmed::bytes(stream) == 0
}
