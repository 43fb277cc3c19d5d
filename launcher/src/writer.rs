//! Writes files on a separate thread.
//!
//! No system call tells in advance whether a write to a file will block: on a dead file server it blocks forever, on a
//! busy disk for seconds. The event loop, which must notice dead ranks, cannot block, so a thread writes the files. A
//! queue connects the two; the loop can query the number of bytes in the queue and the number of bytes that have left
//! it. The producer decides what to do when the queue is long (`output::logs`, `events`).
//!
//! A file that cannot be written any more, on a full disk for instance, is abandoned: further data for it is dropped,
//! and the error can be queried once. The *bell* is a descriptor to poll; it becomes readable on the events that a
//! producer may wait for.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Number of bytes above which the queue is long.
pub(crate) const LONG_QUEUE: usize = 1 << 20;
/// Maximum size of one write; determines how finely progress is observed.
const CHUNK: usize = 64 << 10;

/// Complete lines for one file.
struct Batch {
    file: usize,
    bytes: Vec<u8>,
    lines: u64,
}

/// The state shared between the producer and the writing thread.
struct QueueState {
    batches: VecDeque<Batch>,
    /// Bytes that are not written yet, including those that are being written.
    waiting: usize,
    /// Bytes that have left the queue since the start.
    taken: u64,
    /// Lines of each file that are not written yet.
    lines: Vec<u64>,
    /// Errors of abandoned files that were not queried yet.
    failures: Vec<(usize, io::Error)>,
    failed: Vec<bool>,
    /// The producer waits until the queue is empty.
    ring_when_empty: bool,
    rung: bool,
    /// The producer has ended.
    closed: bool,
}

struct Queue {
    state: Mutex<QueueState>,
    /// Signalled when the queue changes.
    changed: Condvar,
    bell: EventFd,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // No code panics while it holds the lock, so a poisoned lock has consistent state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self, state: &mut QueueState) {
        if !std::mem::replace(&mut state.rung, true) {
            // Fails only if the counter would overflow.
            let _ = self.bell.write(1);
        }
    }
}

/// A thread that writes files, and its queue.
///
/// Dropping it does not block: the queue is still written if the process continues.
pub(crate) struct Writer {
    queue: Arc<Queue>,
}

impl Writer {
    /// Starts a thread named `name` for these files.
    pub(crate) fn start(name: &str, files: Vec<File>) -> io::Result<Self> {
        let state = QueueState {
            batches: VecDeque::new(),
            waiting: 0,
            taken: 0,
            lines: vec![0; files.len()],
            failures: Vec::new(),
            failed: vec![false; files.len()],
            ring_when_empty: false,
            rung: false,
            closed: false,
        };
        let bell = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new(), bell });
        let own = Arc::clone(&queue);
        thread::Builder::new().name(name.into()).spawn(move || write_all(&own, files))?;
        Ok(Writer { queue })
    }

    /// Puts complete lines into the queue; false if the file was abandoned.
    pub(crate) fn push(&self, file: usize, bytes: &[u8], lines: u64) -> bool {
        let mut state = self.queue.lock();
        if state.failed[file] {
            return false;
        }
        if bytes.is_empty() {
            return true;
        }
        state.waiting += bytes.len();
        state.lines[file] += lines;
        match state.batches.back_mut() {
            Some(batch) if batch.file == file && batch.bytes.len() + bytes.len() <= CHUNK => {
                batch.bytes.extend_from_slice(bytes);
                batch.lines += lines;
            }
            _ => state.batches.push_back(Batch { file, bytes: bytes.to_vec(), lines }),
        }
        self.queue.changed.notify_all();
        true
    }

    /// Bytes that are not written yet.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.lock().waiting
    }

    /// Bytes that have left the queue since the start: two equal results mean no progress in between.
    pub(crate) fn taken(&self) -> u64 {
        self.queue.lock().taken
    }

    /// The files that were abandoned since the last call, with their errors.
    pub(crate) fn failures(&self) -> Vec<(usize, io::Error)> {
        std::mem::take(&mut self.queue.lock().failures)
    }

    /// Readable when a long queue has become short, when a file was abandoned and, after
    /// [`ring_when_empty`](Self::ring_when_empty), when the queue is empty.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.queue.bell.as_fd()
    }

    /// Resets the bell.
    pub(crate) fn silence(&self) {
        if std::mem::take(&mut self.queue.lock().rung) {
            // Cannot block: the descriptor is non-blocking.
            let _ = self.queue.bell.read();
        }
    }

    /// Makes the bell ring when the queue is empty.
    pub(crate) fn ring_when_empty(&self) {
        let mut state = self.queue.lock();
        state.ring_when_empty = true;
        if state.waiting == 0 {
            self.queue.ring(&mut state);
        }
    }

    /// Abandons all files. Returns, for each, the number of lines that may not have been written.
    pub(crate) fn abandon(&self) -> Vec<u64> {
        let mut state = self.queue.lock();
        state.batches.clear();
        state.waiting = 0;
        state.failed.fill(true);
        state.lines.iter_mut().map(std::mem::take).collect()
    }

    /// Waits until everything is written, or no progress has been made for `timeout`.
    pub(crate) fn flush(&self, timeout: Duration) {
        let mut state = self.queue.lock();
        let (mut taken, mut since) = (state.taken, Instant::now());
        while state.waiting > 0 {
            if state.taken != taken {
                (taken, since) = (state.taken, Instant::now());
            }
            let left = timeout.saturating_sub(since.elapsed());
            if left.is_zero() {
                return;
            }
            let woken = self.queue.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

/// The writing thread.
fn write_all(queue: &Queue, mut files: Vec<File>) {
    loop {
        let mut state = queue.lock();
        let batch = loop {
            match state.batches.pop_front() {
                Some(batch) => break batch,
                None if state.closed => return,
                None => state = queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(state);
        let mut pieces = batch.bytes.chunks(CHUNK).peekable();
        while let Some(piece) = pieces.next() {
            let given_up = queue.lock().failed[batch.file];
            let written = if given_up { Ok(()) } else { files[batch.file].write_all(piece) };
            let mut state = queue.lock();
            let was_long = state.waiting > LONG_QUEUE;
            // Saturates only if everything was abandoned meanwhile.
            state.waiting = state.waiting.saturating_sub(piece.len());
            state.taken += piece.len() as u64;
            if pieces.peek().is_none() {
                // Together with the last bytes: once none wait, `abandon` must not count these lines as lost.
                state.lines[batch.file] = state.lines[batch.file].saturating_sub(batch.lines);
            }
            if let Err(error) = written
                && !std::mem::replace(&mut state.failed[batch.file], true)
            {
                state.failures.push((batch.file, error));
                queue.ring(&mut state);
            }
            if was_long && state.waiting <= LONG_QUEUE || state.ring_when_empty && state.waiting == 0 {
                queue.ring(&mut state);
            }
        }
        queue.changed.notify_all();
    }
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// Truncated.
    Empty,
    /// Appended to.
    Append,
}

/// Opens a file for appending (`O_APPEND`: another process may truncate it while it is written). A named pipe without a
/// reader is an error; opening it does not block.
pub(crate) fn open(path: &Path, start: Start) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.append(true).create(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
    fcntl(&file, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    if start == Start::Empty && file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn wait_for_bell(writer: &Writer) {
        poll(&mut [PollFd::new(writer.bell(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
        writer.silence();
    }

    #[test]
    fn everything_is_written_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let paths = [folder.path().join("a"), folder.path().join("b")];
        std::fs::write(&paths[0], "old").unwrap();
        std::fs::write(&paths[1], "old\n").unwrap();
        let files = vec![open(&paths[0], Start::Empty).unwrap(), open(&paths[1], Start::Append).unwrap()];
        let writer = Writer::start("test", files).unwrap();
        for index in 0..10_000 {
            assert!(writer.push(index % 2, format!("{index}\n").as_bytes(), 1));
        }
        writer.ring_when_empty();
        wait_for_bell(&writer);
        assert_eq!(writer.waiting(), 0);
        let lines = |which: usize| -> String {
            (0..10_000).filter(|index| index % 2 == which).map(|index| format!("{index}\n")).collect()
        };
        assert_eq!(std::fs::read_to_string(&paths[0]).unwrap(), lines(0));
        assert_eq!(std::fs::read_to_string(&paths[1]).unwrap(), format!("old\n{}", lines(1)));
    }

    #[test]
    fn no_lines_are_pending_when_no_bytes_are() {
        let writer =
            Writer::start("test", vec![open(Path::new("/dev/null"), Start::Append).unwrap()]).unwrap();
        for _ in 0..50_000 {
            assert!(writer.push(0, b"written\n", 1));
            while writer.waiting() > 0 {
                std::hint::spin_loop();
            }
            assert_eq!(writer.queue.lock().lines, [0]);
        }
    }

    #[test]
    fn a_write_error_abandons_only_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("good");
        let files =
            vec![open(Path::new("/dev/full"), Start::Empty).unwrap(), open(&path, Start::Empty).unwrap()];
        let writer = Writer::start("test", files).unwrap();
        assert!(writer.push(0, b"lost\n", 1));
        wait_for_bell(&writer);
        let failures = writer.failures();
        assert_eq!(failures.len(), 1);
        assert_eq!((failures[0].0, failures[0].1.kind()), (0, io::ErrorKind::StorageFull));
        assert!(!writer.push(0, b"lost too\n", 1) && writer.push(1, b"kept\n", 1));
        writer.flush(Duration::MAX);
        assert_eq!(std::fs::read_to_string(path).unwrap(), "kept\n");
    }

    #[test]
    fn flush_and_drop_do_not_wait_for_a_stuck_file() {
        let (mut reader, pipe) = io::pipe().unwrap();
        let writer = Writer::start("test", vec![File::from(OwnedFd::from(pipe))]).unwrap();
        let line = vec![b'x'; LONG_QUEUE];
        assert!(writer.push(0, &line, 1) && writer.push(0, b"\nlast\n", 2));
        writer.flush(Duration::from_millis(1));
        assert!(writer.waiting() > 0);
        assert_eq!(writer.abandon(), [3]);
        assert_eq!(writer.waiting(), 0);
        drop(writer);
        // A blocked write still finishes.
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        assert!(bytes.len() < line.len() && line.starts_with(&bytes));
    }
}
