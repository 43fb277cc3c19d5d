//! A destination of lines: standard output or error, which may be slow, stalled or closed.
//!
//! A pager that is not scrolled, or a full pipe, must not keep the launcher from noticing a dead rank or a Ctrl-C, so a
//! write must never block. The descriptor is shared with the shell and cannot be made non-blocking without making the
//! shell's non-blocking, too. So a pipe or a terminal is opened a second time, which gives a separate, non-blocking
//! descriptor. If that is not possible (it belongs to another user, or is a socket), every write is preceded by a poll,
//! and is no longer than what a writable pipe accepts without blocking. The remaining bytes wait in a queue until the
//! event loop finds the descriptor writable. When the queue is long, the ranks' pipes are not read: a rank that writes
//! faster than its reader reads is slowed down, as it would be without a launcher. A reader that has stalled is given
//! up after a timeout (`stall`): new output is then dropped until the reader continues.

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

/// Number of queued bytes above which ranks have to wait.
const LONG_QUEUE: usize = 256 << 10;
/// Bytes that the launcher's own lines may add to a stalled queue.
const RESERVE: usize = 64 << 10;
/// Number of bytes that a writable pipe accepts without blocking (`PIPE_BUF`).
const PIPE_CHUNK: usize = 4096;
/// Maximum size of a write to a pipe that was opened a second time: it is non-blocking and accepts what fits.
const OWN_PIPE_CHUNK: usize = 1 << 20;
/// Maximum size of a write to a terminal that cannot be opened a second time, because it belongs to another user.
const TERMINAL_CHUNK: usize = 64;
/// A terminal may be reported as writable and still accept nothing: the end of a line needs two bytes. Time until the
/// next try.
const RETRY_DELAY: Duration = Duration::from_millis(10);
/// Maximum size of a write to a regular file, which is always writable.
const FILE_CHUNK: usize = 64 << 10;

/// A destination that may be slow and may be closed.
pub(crate) struct Sink {
    target: Box<dyn AsFd>,
    piece: usize,
    queue: Vec<u8>,
    /// Number of bytes at the front of the queue that are already written.
    written: usize,
    stall: StallDetector,
    /// Bytes of important lines that were queued since the reader stalled.
    reserved: usize,
    /// A write failed although the descriptor was writable: it is not polled before this time.
    pause: Option<Instant>,
    /// The error after which nothing is written any more.
    failure: Option<Errno>,
}

/// Opens the pipe or terminal of `target` a second time. Fails for a pipe without a reader.
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

    /// Writes as much as possible without blocking and queues the rest. False if the bytes are dropped because the
    /// reader has stalled. After a failure everything is dropped and need not be counted.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        let stuck = self.stall.is_stalled();
        if !stuck {
            self.keep(bytes);
        }
        !stuck
    }

    /// As [`push`](Self::push), for the few important lines, which are also queued while the reader is stalled.
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
        // If nothing is queued, only the bytes that cannot be written have to be copied.
        let written = if self.has_pending() { 0 } else { self.write_to_target(bytes) };
        self.queue.extend_from_slice(&bytes[written..]);
        self.write_what_fits();
    }

    /// Writes as much as possible without blocking and returns the number of bytes; all of them after a failure.
    fn write_to_target(&mut self, bytes: &[u8]) -> usize {
        let mut written = 0;
        while written < bytes.len() && self.has_room() {
            let end = bytes.len().min(written + self.piece);
            match write(&self.target, &bytes[written..end]) {
                Ok(count) => written += count,
                Err(Errno::EINTR) => {}
                // Another process writes to the same pipe, or a terminal has less room than needed.
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

    /// Writes queued bytes.
    pub(crate) fn write_what_fits(&mut self) {
        let before = self.pending();
        let queue = std::mem::take(&mut self.queue);
        self.written += self.write_to_target(&queue[self.written..]);
        self.queue = queue;
        let taken = self.pending() < before;
        if !self.has_pending() {
            self.queue.clear();
            self.written = 0;
            // One long line should not keep its memory for the rest of the run.
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

    /// Treats the reader as stalled if it has accepted nothing for the stall timeout.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.stall.expire(now);
        self.pause = self.pause.filter(|until| *until > now);
    }

    /// True while pushed bytes are dropped.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stall.is_stalled()
    }

    fn pending(&self) -> usize {
        self.queue.len() - self.written
    }

    /// True if the descriptor should be polled for writing.
    pub(crate) fn wants_room(&self) -> bool {
        self.has_pending() && self.pause.is_none()
    }

    /// True while bytes are queued.
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
        // A closed reader counts as writable: the write then fails.
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
    fn a_reader_that_does_not_read_does_not_block() {
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
    fn a_closed_reader_is_a_failure_and_blocks_nothing() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut sink = Sink::new(writer, false, LIMIT);
        sink.push(b"lost");
        assert_eq!(sink.failure(), Some(Errno::EPIPE));
        sink.push(b"lost too");
        assert!(!sink.has_pending());
    }

    #[test]
    fn output_is_dropped_while_the_reader_is_stalled() {
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
