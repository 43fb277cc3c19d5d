//! The write side of the connections of a communicator, which the thread of an operation shares with whoever aborts.

use std::io::{self, ErrorKind, IoSlice};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, sendmsg, setsockopt, sockopt};

use super::frame::{Header, Stamp};
use super::transfer::Transfer;

/// How long an abort waits for room in the connections.
const ABORT_PATIENCE: Duration = Duration::from_millis(200);

/// The connections of one communicator, by rank; none at the own rank.
pub(super) struct Wires {
    pub(super) stamp: Stamp,
    wires: Vec<Option<Wire>>,
}

struct Wire {
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
pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
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

impl Wire {
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

impl Wires {
    pub(super) fn new(stamp: Stamp, streams: Vec<Option<TcpStream>>) -> Self {
        let wire = |stream| Wire { stream, outgoing: Mutex::default() };
        Wires { stamp, wires: streams.into_iter().map(|stream| stream.map(wire)).collect() }
    }

    /// Number of ranks.
    pub(super) fn size(&self) -> u32 {
        self.wires.len() as u32
    }

    /// The ranks with a connection.
    pub(super) fn peers(&self) -> impl Iterator<Item = u32> {
        (0..self.size()).filter(|peer| self.wires[*peer as usize].is_some())
    }

    fn wire(&self, peer: u32) -> &Wire {
        self.wires[peer as usize].as_ref().expect("a connection to every other rank")
    }

    pub(super) fn fd(&self, peer: u32) -> BorrowedFd<'_> {
        self.wire(peer).stream.as_fd()
    }

    /// The connection to `peer`, for reading.
    pub(super) fn stream(&self, peer: u32) -> &TcpStream {
        &self.wire(peer).stream
    }

    /// Queues a frame for `peer`. It is lost if the connection has ended.
    pub(super) fn queue(&self, peer: u32, header: Header, payload: &[u8]) {
        let mut outgoing = self.wire(peer).outgoing();
        if !outgoing.closed {
            outgoing.queued.extend_from_slice(&header.with_length(payload.len()).encode(self.stamp));
            outgoing.queued.extend_from_slice(payload);
        }
    }

    /// Whether there is nothing queued for `peer`.
    pub(super) fn is_flushed(&self, peer: u32) -> bool {
        !self.wire(peer).outgoing().has_queued()
    }

    /// Writes as much as there is room for: queued frames first, then those of `transfer`.
    ///
    /// # Errors
    /// If the connection cannot be written to, which does not mean that all of its bytes were read.
    pub(super) fn write(&self, peer: u32, transfer: &mut Transfer<'_>) -> io::Result<()> {
        let wire = self.wire(peer);
        let mut outgoing = wire.outgoing();
        if outgoing.closed {
            return Ok(());
        }
        let written = self.write_all(wire, &mut outgoing, peer, transfer);
        if written.is_err() {
            outgoing.close();
        }
        written
    }

    fn write_all(
        &self,
        wire: &Wire,
        outgoing: &mut Outgoing,
        peer: u32,
        transfer: &mut Transfer<'_>,
    ) -> io::Result<()> {
        loop {
            if !outgoing.within_frame && !wire.write_queued(outgoing)? {
                return Ok(());
            }
            let Some(frame) = transfer.next_frame(peer, self.stamp) else { return Ok(()) };
            let Some(bytes) = write(&wire.stream, &frame)? else { return Ok(()) };
            outgoing.within_frame = transfer.advance(peer, bytes);
        }
    }

    /// Ends the write side of all connections with an abort frame, after what was queued. Other threads that write
    /// are interrupted.
    pub(super) fn abort(&self, header: Header, payload: &[u8]) {
        for peer in self.peers() {
            self.queue(peer, header, payload);
        }
        self.flush(ABORT_PATIENCE);
        for wire in self.wires.iter().flatten() {
            wire.outgoing().close();
            let _ = wire.stream.shutdown(Shutdown::Write);
        }
    }

    /// Writes what is queued, for at most `patience`.
    fn flush(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        loop {
            let mut waiting = Vec::new();
            for wire in self.wires.iter().flatten() {
                let mut outgoing = wire.outgoing();
                if outgoing.within_frame || outgoing.closed {
                    continue;
                }
                match wire.write_queued(&mut outgoing) {
                    Ok(true) => {}
                    Ok(false) => waiting.push(PollFd::new(wire.stream.as_fd(), PollFlags::POLLOUT)),
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

    /// Ends all connections so that peers get everything that was written. A connection that is closed with unread
    /// bytes is reset, and what the kernel has not delivered by then is lost. So this reads, and waits for at most
    /// `patience` until the peers' hosts have confirmed all bytes.
    pub(super) fn close(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        self.flush(patience);
        for wire in self.wires.iter().flatten() {
            let _ = wire.stream.shutdown(Shutdown::Write);
        }
        let mut pause = Duration::from_micros(50);
        while self.wires.iter().flatten().any(|wire| !is_drained(&wire.stream)) && Instant::now() < deadline {
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
