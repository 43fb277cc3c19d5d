//! The connections of a communicator, and their write side.

use std::io::{self, ErrorKind, IoSlice};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, sendmsg, setsockopt, sockopt};

use smallvec::SmallVec;

use super::input::Turn;
use crate::comm::hosts::frame::{Header, PIECE_BYTES, Stamp};
use crate::comm::hosts::transfer::Transfer;
use crate::comm::hosts::wire::Sender;

/// How long an abort waits for room in the connections.
const ABORT_PATIENCE: Duration = Duration::from_millis(200);

/// The connections of one communicator, by rank; none at the own rank.
pub(super) struct TcpSender {
    pub(super) stamp: Stamp,
    connections: Vec<Connection>,
}

struct Connection {
    streams: Vec<TcpStream>,
    outgoing: Mutex<Outgoing>,
}

/// What is not written yet.
#[derive(Default)]
struct Outgoing {
    /// Whole frames for the first stream, of which `written` bytes are written.
    queued: Vec<u8>,
    written: usize,
    /// Where the next piece of a transfer goes.
    turn: Turn,
    /// Bytes of payload of the current piece, if it is partly written: nothing else may be written to its stream before
    /// its end.
    piece: Option<usize>,
    /// Nothing can be written any more.
    closed: bool,
}

/// Streams without room for what is to be sent.
pub(super) type Full = SmallVec<[usize; 2]>;

impl Outgoing {
    fn has_queued(&self) -> bool {
        self.written < self.queued.len()
    }

    /// Whether the first stream is in the middle of a piece.
    fn is_within_piece(&self) -> bool {
        self.piece.is_some() && self.turn.stream == 0
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
fn write(stream: &TcpStream, parts: [&[u8]; 2]) -> io::Result<Option<usize>> {
    let parts = parts.map(IoSlice::new);
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

    /// Writes queued frames. Returns whether there was room for all of them.
    fn write_queued(&self, outgoing: &mut Outgoing) -> io::Result<bool> {
        while outgoing.has_queued() {
            match write(&self.streams[0], [&outgoing.queued[outgoing.written..], &[]])? {
                Some(bytes) => outgoing.written += bytes,
                None => return Ok(false),
            }
        }
        outgoing.queued.clear();
        outgoing.written = 0;
        Ok(true)
    }

    /// Writes queued frames, and then pieces of `transfer` for `peer`, as long as there is room: about as many bytes as the
    /// largest piece has, because the peer may have to send, too, before it can receive more.
    fn write_all(
        &self,
        outgoing: &mut Outgoing,
        (peer, stamp): (u32, Stamp),
        transfer: &mut Transfer<'_>,
    ) -> io::Result<Full> {
        let mut full = Full::new();
        if !outgoing.is_within_piece() && !self.write_queued(outgoing)? {
            full.push(0);
            if outgoing.turn.stream == 0 {
                return Ok(full);
            }
        }
        let end = outgoing.turn.position + PIECE_BYTES as u64;
        while outgoing.turn.position < end
            // Nothing may come between the bytes of a small frame.
            && !(outgoing.piece.is_none() && outgoing.turn.stream == 0 && outgoing.has_queued())
            && let Some([header, payload]) = transfer.next_frame(peer, stamp, outgoing.turn.position)
        {
            let piece = outgoing.piece.unwrap_or(payload.len());
            match write(&self.streams[outgoing.turn.stream], [header, payload])? {
                Some(bytes) => {
                    outgoing.piece = Some(piece).filter(|_| transfer.advance(peer, bytes));
                    if outgoing.piece.is_none() {
                        outgoing.turn.advance(piece, self.streams.len());
                    }
                }
                None => {
                    full.push(outgoing.turn.stream);
                    break;
                }
            }
        }
        Ok(full)
    }
}

impl TcpSender {
    pub(super) fn new(stamp: Stamp, streams: Vec<Vec<TcpStream>>) -> Self {
        let connection = |streams| Connection { streams, outgoing: Mutex::default() };
        TcpSender { stamp, connections: streams.into_iter().map(connection).collect() }
    }

    /// The ranks with a connection.
    fn peers(&self) -> impl Iterator<Item = u32> {
        let others = (0..).zip(&self.connections).filter(|(_, connection)| !connection.streams.is_empty());
        others.map(|(peer, _)| peer)
    }

    fn streams(&self) -> impl Iterator<Item = &TcpStream> {
        self.connections.iter().flat_map(|connection| &connection.streams)
    }

    pub(super) fn fd(&self, peer: u32, stream: usize) -> BorrowedFd<'_> {
        self.stream(peer, stream).as_fd()
    }

    /// A stream to `peer`, for reading.
    pub(super) fn stream(&self, peer: u32, stream: usize) -> &TcpStream {
        &self.connections[peer as usize].streams[stream]
    }

    /// Writes as much as there is room for, in a few pieces: queued frames first, then those of `transfer`.
    ///
    /// # Errors
    /// If the connection cannot be written to, which does not mean that all of its bytes were read.
    pub(super) fn write(&self, peer: u32, transfer: &mut Transfer<'_>) -> io::Result<Full> {
        let connection = &self.connections[peer as usize];
        let mut outgoing = connection.outgoing();
        if outgoing.closed {
            return Ok(Full::new());
        }
        let written = connection.write_all(&mut outgoing, (peer, self.stamp), transfer);
        if written.is_err() {
            outgoing.close();
        }
        written
    }

    /// Writes what is queued, for at most `patience`.
    fn flush(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        loop {
            let mut waiting = Vec::new();
            for connection in &self.connections {
                let mut outgoing = connection.outgoing();
                if outgoing.is_within_piece() || outgoing.closed {
                    continue;
                }
                match connection.write_queued(&mut outgoing) {
                    Ok(true) => {}
                    Ok(false) => waiting.push(PollFd::new(connection.streams[0].as_fd(), PollFlags::POLLOUT)),
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
    /// Writes it at once, as far as there is room.
    fn queue(&self, peer: u32, header: Header, payload: &[u8]) {
        let connection = &self.connections[peer as usize];
        let mut outgoing = connection.outgoing();
        if outgoing.closed {
            return;
        }
        let header = header.with_payload(payload).encode(self.stamp);
        let mut written = 0;
        if !outgoing.has_queued() && !outgoing.is_within_piece() {
            // An error comes again when the rest is written, where it is noted.
            written = write(&connection.streams[0], [&header, payload]).ok().flatten().unwrap_or(0);
        }
        let of_header = written.min(header.len());
        outgoing.queued.extend_from_slice(&header[of_header..]);
        outgoing.queued.extend_from_slice(&payload[written - of_header..]);
    }

    fn is_flushed(&self, peer: u32) -> bool {
        !self.connections[peer as usize].outgoing().has_queued()
    }

    fn abort(&self, header: Header, payload: &[u8]) {
        for peer in self.peers() {
            self.queue(peer, header, payload);
        }
        self.flush(ABORT_PATIENCE);
        self.connections.iter().for_each(|connection| connection.outgoing().close());
        self.streams().for_each(|stream| drop(stream.shutdown(Shutdown::Write)));
    }

    /// A connection that is closed with unread bytes is reset, and what the kernel has not delivered by then is lost. So
    /// this reads, and waits until the peers' hosts have confirmed all bytes.
    fn close(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        self.flush(patience);
        self.streams().for_each(|stream| drop(stream.shutdown(Shutdown::Write)));
        let mut pause = Duration::from_micros(50);
        while self.streams().any(|stream| !is_drained(stream)) && Instant::now() < deadline {
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
