//! Where lines end up: standard output or error, which may be slow, stuck or gone.
//!
//! A pager that nobody scrolls, or a full pipe, must not stop the launcher from noticing a dead rank or a Ctrl-C, so
//! a write may never block. The descriptor is shared with the shell and cannot be made non-blocking without doing
//! that to the shell as well. A pipe or a terminal is opened a second time, which gives a descriptor of our own that can.
//! Where that is not possible (it belongs to another user, or is a socket), the kernel is asked before every write, and
//! a write is no longer than what a pipe that has room takes at once. The pending waits in a queue until the event loop
//! finds room. When the queue is long, the ranks' pipes are left unread: a rank that writes faster than its reader reads is slowed down, as it
//! would be without a launcher. A reader that has stopped for good is given up after a while (`patience`): what comes
//! then is not put into the queue any more, until the reader goes on.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd::write;

use super::stall::StallDetector;

/// Bytes in the queue from which ranks have to wait.
const LONG_QUEUE: usize = 256 << 10;
/// Bytes that the launcher's own lines may add to a queue that is stuck.
const RESERVE: usize = 64 << 10;
/// What a pipe that reports room takes without blocking (`PIPE_BUF`).
const PIPE_CHUNK: usize = 4096;
/// Longest write to a pipe of our own: it takes what has room.
const OWN_PIPE_CHUNK: usize = 1 << 20;
/// What is risked at a terminal that cannot be opened a second time, because it belongs to another user.
const TERMINAL_CHUNK: usize = 64;
/// A terminal may report room and still take nothing: a line's end needs two bytes. Time until it is asked again.
const RETRY_DELAY: Duration = Duration::from_millis(10);
/// A file takes anything.
const FILE_CHUNK: usize = 64 << 10;

/// A destination that may be slow and may go away.
pub(crate) struct Sink {
    target: Box<dyn AsFd>,
    piece: usize,
    queue: Vec<u8>,
    /// Bytes of the queue that are written already.
    written: usize,
    stall: StallDetector,
    /// Bytes of important lines that came since the reader was given up.
    reserved: usize,
    /// Room was promised in vain: until then it is not asked for.
    pause: Option<Instant>,
    /// Why nothing is written any more.
    failure: Option<Errno>,
}

/// A descriptor of our own to the pipe or terminal behind `target`. Fails for a pipe that nobody reads any more.
fn reopen(target: BorrowedFd<'_>) -> Option<File> {
    let flags = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits();
    let path = format!("/proc/self/fd/{}", target.as_raw_fd());
    OpenOptions::new().write(true).custom_flags(flags).open(path).ok()
}

impl Sink {
    pub(crate) fn new(target: impl AsFd + 'static, terminal: bool, timeout: Duration) -> Self {
        let kind = fstat(&target).map(|stat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT);
        let is_pipe = kind == Ok(SFlag::S_IFIFO);
        let own = if terminal || is_pipe { reopen(target.as_fd()) } else { None };
        let piece = match own {
            Some(_) if is_pipe => OWN_PIPE_CHUNK,
            None if terminal => TERMINAL_CHUNK,
            None if kind == Ok(SFlag::S_IFREG) => FILE_CHUNK,
            _ => PIPE_CHUNK,
        };
        let target: Box<dyn AsFd> = match own {
            Some(own) => Box::new(own),
            None => Box::new(target),
        };
        Self::with_piece(target, piece, timeout)
    }

    fn with_piece(target: Box<dyn AsFd>, piece: usize, timeout: Duration) -> Self {
        let stall = StallDetector::new(timeout);
        Sink { target, piece, queue: Vec::new(), written: 0, stall, reserved: 0, pause: None, failure: None }
    }

    /// Writes what finds room now, and keeps the pending. False if it is dropped: while the reader is stuck.
    /// After a failure everything is dropped, and nobody need count it.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        let stuck = self.stall.is_stalled();
        if !stuck {
            self.keep(bytes);
        }
        !stuck
    }

    /// As [`push`](Self::push), for the few lines that are worth some more room.
    pub(crate) fn push_important(&mut self, bytes: &[u8]) {
        self.reserved = if self.stall.is_stalled() { self.reserved + bytes.len() } else { 0 };
        if self.reserved <= RESERVE {
            self.keep(bytes);
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.failure.is_some() {
            return;
        }
        // Where nothing waits, only what finds no room has to be copied.
        let written = if self.has_pending() { 0 } else { self.write_to_target(bytes) };
        self.queue.extend_from_slice(&bytes[written..]);
        self.write_what_fits();
    }

    /// Writes as much as finds room, and returns how much. After a failure that is all.
    fn write_to_target(&mut self, bytes: &[u8]) -> usize {
        let mut written = 0;
        while written < bytes.len() && self.has_room() {
            let end = bytes.len().min(written + self.piece);
            match write(&self.target, &bytes[written..end]) {
                Ok(count) => written += count,
                Err(Errno::EINTR) => {}
                // Somebody else writes to the same pipe, or a terminal has less room than is needed.
                Err(Errno::EAGAIN) => {
                    self.pause = Some(Instant::now() + RETRY_DELAY);
                    break;
                }
                Err(errno) => {
                    self.failure = Some(errno);
                    return bytes.len();
                }
            }
        }
        written
    }

    /// Goes on writing what is kept.
    pub(crate) fn write_what_fits(&mut self) {
        let before = self.pending();
        let queue = std::mem::take(&mut self.queue);
        self.written += self.write_to_target(&queue[self.written..]);
        self.queue = queue;
        let taken = self.pending() < before;
        if !self.has_pending() {
            self.queue.clear();
            self.written = 0;
            // One long line should not cost its memory for the pending of the run.
            self.queue.shrink_to(LONG_QUEUE);
        } else if self.written > LONG_QUEUE {
            self.queue.drain(..std::mem::take(&mut self.written));
        }
        self.stall.observe(taken, self.pending() > LONG_QUEUE, Instant::now());
    }

    /// True if both write to the same pipe or terminal.
    pub(crate) fn is_same_as(&self, other: &Sink) -> bool {
        let identity = |sink: &Sink| fstat(sink).map(|stat| (stat.st_dev, stat.st_ino));
        identity(self).is_ok_and(|own| identity(other) == Ok(own))
    }

    /// When [`expire`](Self::expire) is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.stall.deadline().into_iter().chain(self.pause).min()
    }

    /// Gives the reader up if it has taken nothing for too long.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.stall.expire(now);
        self.pause = self.pause.filter(|until| *until > now);
    }

    /// True while what is pushed is dropped.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stall.is_stalled()
    }

    fn pending(&self) -> usize {
        self.queue.len() - self.written
    }

    /// True while it is worth while to be told of room.
    pub(crate) fn wants_room(&self) -> bool {
        self.has_pending() && self.pause.is_none()
    }

    /// True while something waits for room.
    pub(crate) fn has_pending(&self) -> bool {
        self.written < self.queue.len()
    }

    /// True if ranks should wait before they write more.
    pub(crate) fn is_behind(&self) -> bool {
        self.stall.is_waiting()
    }

    /// Why nothing is written any more.
    pub(crate) fn failure(&self) -> Option<Errno> {
        self.failure
    }

    fn has_room(&self) -> bool {
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLOUT)];
        // A reader that is gone counts as room: the write then says so.
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1))
    }
}

impl AsFd for Sink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.target.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn a_stuck_reader_does_not_block() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut sink = Sink::new(writer, false, LIMIT);
        let input: Vec<u8> = (0..400_000u32).map(|index| index as u8).collect();
        sink.push(&input);
        assert!(sink.has_pending() && sink.is_behind());
        let mut output = Vec::new();
        while sink.has_pending() {
            let mut chunk = [0; 10_000];
            let count = reader.read(&mut chunk).unwrap();
            output.extend_from_slice(&chunk[..count]);
            sink.write_what_fits();
        }
        assert!(!sink.is_behind());
        drop(sink);
        reader.read_to_end(&mut output).unwrap();
        assert!(output == input);
    }

    #[test]
    fn a_reader_that_is_gone_costs_its_lines_only() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut sink = Sink::new(writer, false, LIMIT);
        sink.push(b"lost");
        assert_eq!(sink.failure(), Some(Errno::EPIPE));
        sink.push(b"lost too");
        assert!(!sink.has_pending());
    }

    #[test]
    fn a_reader_that_stopped_costs_what_comes_then() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut sink = Sink::new(writer, false, LIMIT);
        assert!(sink.push(&[b'a'; 400_000]));
        let deadline = sink.deadline().unwrap();
        sink.expire(deadline);
        assert!(sink.is_stalled() && !sink.is_behind() && sink.deadline().is_none());
        assert!(!sink.push(b"dropped"));
        sink.push_important(b"kept");
        for _ in 0..100 {
            sink.push_important(&[b'x'; 4096]);
        }
        assert!(sink.pending() < 400_000 + RESERVE + 4096);
        let mut output = vec![0; 400_004];
        reader.read_exact(&mut output[..65_536]).unwrap();
        sink.write_what_fits();
        assert!(!sink.is_stalled() && sink.push(b"shown"));
        let mut end = 65_536;
        while end < output.len() {
            end += reader.read(&mut output[end..]).unwrap();
            sink.write_what_fits();
        }
        assert!(output.ends_with(b"akept"));
    }
}
