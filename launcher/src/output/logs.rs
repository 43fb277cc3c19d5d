//! The ranks' logs: a file for each rank, or for each stream of a rank, written by a thread.
//!
//! A slow disk slows the ranks down. A disk that hangs causes dropped lines after the stall timeout, and a full disk
//! ends the log. Both are reported, and the log itself says where lines are missing.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use super::LogError;
use super::name::RankName;
use super::stall::StallDetector;
use super::streams::StreamChoice;
use super::{STREAMS, Stream};
use crate::writer::{LONG_QUEUE, Start, Writer, open};

/// The name of the writing thread.
const THREAD: &str = "mgpurun-log";

/// A log of a rank.
#[derive(Debug, Clone, Copy, Default)]
struct Log {
    name: RankName,
    /// The stream that it has; `None`: both.
    stream: Option<Stream>,
    ended: bool,
    /// Dropped lines that were not reported yet.
    lost: u64,
}

impl Log {
    /// "the log of rank 3" or "the log of rank 3's standard error".
    fn describe(&self) -> String {
        match self.stream {
            None => format!("the log of {}", self.name),
            Some(stream) => format!("the log of {}, {}", self.name, stream.name()),
        }
    }
}

/// All logs of a run.
pub(super) struct Logs {
    writer: Writer,
    stall: StallDetector,
    /// Last value of [`Writer::taken`].
    taken: u64,
    /// In the order of the writer's files.
    logs: Vec<Log>,
    /// For each rank the log of each stream, if the stream is logged.
    of_rank: Vec<[Option<usize>; 2]>,
    /// No more lines come; the queue should be emptied.
    closing: bool,
}

impl Logs {
    /// Opens files in `folder`, which is created if it is missing: for each rank one file, or with `streams` one
    /// for each stream that is chosen. `names` has each rank's name and its number on this host.
    pub(super) fn create(
        folder: &Path,
        names: &[(RankName, u32)],
        streams: Option<&StreamChoice>,
        start: Start,
        timeout: Duration,
    ) -> Result<Self, LogError> {
        let (mut logs, mut of_rank) = (Vec::new(), Vec::new());
        for (name, local_rank) in names {
            let mut add = |stream| {
                logs.push(Log { name: *name, stream, ..Log::default() });
                Some(logs.len() - 1)
            };
            of_rank.push(match streams {
                None => [add(None); 2],
                Some(choice) => STREAMS.map(|stream| match choice.logs(*local_rank, stream) {
                    true => add(Some(stream)),
                    false => None,
                }),
            });
        }
        let failed = |path: &Path| {
            let path = path.to_owned();
            |error| LogError { path, error }
        };
        let create = |log: &Log| {
            let path = folder.join(log.name.log_file(log.stream));
            let parent = path.parent().unwrap_or(folder);
            std::fs::create_dir_all(parent).and_then(|()| open(&path, start)).map_err(failed(&path))
        };
        std::fs::create_dir_all(folder).map_err(failed(folder))?;
        let files = logs.iter().map(create).collect::<Result<_, _>>()?;
        let writer = Writer::start(THREAD, files).map_err(failed(folder))?;
        Ok(Logs { writer, stall: StallDetector::new(timeout), taken: 0, logs, of_rank, closing: false })
    }

    /// False if a rank's stream is not logged, or once writing its log has failed.
    pub(super) fn is_open(&self, rank: u32, stream: Stream) -> bool {
        self.of_rank[rank as usize][stream as usize].is_some_and(|log| !self.logs[log].ended)
    }

    /// False while ranks should wait.
    pub(super) fn has_room(&self) -> bool {
        !self.stall.is_waiting()
    }

    /// Queues complete lines of a rank's stream, if it is logged, or counts them as lost.
    pub(super) fn push(&mut self, rank: u32, stream: Stream, bytes: &[u8], lines: u64) {
        let Some(file) = self.of_rank[rank as usize][stream as usize] else { return };
        let log = &mut self.logs[file];
        if log.ended {
            return;
        }
        if self.stall.is_stalled() {
            log.lost += lines;
        } else {
            self.writer.push(file, bytes, lines);
            self.observe_writer(Instant::now());
        }
    }

    /// When the next [`tick`](Self::tick) is due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.stall.deadline()
    }

    /// Readable if [`tick`](Self::tick) should be called earlier.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.writer.bell()
    }

    /// Checks the progress of the writer. Returns messages for the user.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<String> {
        self.writer.silence();
        let mut notices = Vec::new();
        for (file, error) in self.writer.failures() {
            let log = &mut self.logs[file];
            log.ended = true;
            notices.push(format!("{} ends here: {error}; the run continues", log.describe()));
        }
        self.observe_writer(now);
        self.stall.expire(now);
        if !self.stall.is_stalled() {
            notices.extend(self.report_losses());
        }
        notices
    }

    /// Notes that no more lines come.
    pub(super) fn close(&mut self) {
        if !std::mem::replace(&mut self.closing, true) {
            self.writer.ring_when_empty();
            self.observe_writer(Instant::now());
        }
    }

    /// True while queued data may still be written.
    pub(super) fn is_pending(&self) -> bool {
        !self.stall.is_stalled() && self.writer.waiting() > 0
    }

    /// Drops queued data. Returns messages for the user.
    pub(super) fn abandon(&mut self) -> Vec<String> {
        for (log, lines) in self.logs.iter_mut().zip(self.writer.abandon()) {
            log.lost += lines;
        }
        self.report_losses()
    }

    fn observe_writer(&mut self, now: Instant) {
        let taken = self.writer.taken();
        let long = self.writer.waiting() > if self.closing { 0 } else { LONG_QUEUE };
        self.stall.observe(taken != self.taken, long, now);
        self.taken = taken;
    }

    fn report_losses(&mut self) -> Vec<String> {
        let seconds = self.stall.limit().as_secs_f64();
        let mut notices = Vec::new();
        for (file, log) in self.logs.iter_mut().enumerate() {
            let lost = std::mem::take(&mut log.lost);
            if lost > 0 && !log.ended {
                self.writer.push(file, format!("mgpurun: {lost} lines are missing here\n").as_bytes(), 0);
                let name = log.describe();
                notices.push(format!("{name} lost {lost} lines: its disk accepted nothing for {seconds} s"));
            }
        }
        notices
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{PipeWriter, Read, Write};
    use std::os::fd::{AsFd, OwnedFd};

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    /// What fills a pipe.
    const FILLING: u8 = b'.';

    /// The logs of two ranks on a disk that accepts nothing until the other end is read, where [`FILLING`] comes first.
    fn hanging() -> (impl Read, Logs) {
        let (reader, mut pipe) = std::io::pipe().unwrap();
        let has_room = |pipe: &PipeWriter| {
            poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLOUT)], PollTimeout::ZERO).unwrap() > 0
        };
        while has_room(&pipe) {
            // A pipe with room has room for a page.
            pipe.write_all(&[FILLING; 4096]).unwrap();
        }
        let file = File::from(OwnedFd::from(pipe));
        let writer = Writer::start(THREAD, vec![file.try_clone().unwrap(), file]).unwrap();
        let stall = StallDetector::new(Duration::from_secs(30));
        let logs = RankName::of(&[2]).into_iter().map(|name| Log { name, ..Log::default() }).collect();
        let of_rank = vec![[Some(0); 2], [Some(1); 2]];
        (reader, Logs { writer, stall, taken: 0, logs, of_rank, closing: false })
    }

    const LINE: [u8; 1000] = [b'\n'; 1000];

    #[test]
    fn lines_dropped_because_of_a_hanging_disk_are_counted() {
        let (mut reader, mut logs) = hanging();
        let mut pushed = 0;
        while logs.has_room() {
            logs.push(0, Stream::Stdout, &LINE, 1);
            pushed += 1;
        }
        let mut now = Instant::now();
        while !logs.stall.is_stalled() {
            now += Duration::from_secs(60);
            assert_eq!(logs.tick(now), [] as [String; 0]);
        }
        assert!(logs.has_room() && logs.next_deadline().is_none());
        logs.push(0, Stream::Stdout, &LINE, 1);
        logs.push(1, Stream::Stdout, &LINE, 2);
        logs.push(0, Stream::Stdout, &LINE, 1);
        assert_eq!(logs.tick(now), [] as [String; 0]);

        // The disk works again: everything queued is written, and the gap is marked.
        let reading = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).unwrap();
            bytes
        });
        let notices = loop {
            let notices = logs.tick(Instant::now());
            if !notices.is_empty() {
                break notices;
            }
            std::thread::yield_now();
        };
        let told = |rank, lost| {
            format!("the log of rank {rank} lost {lost} lines: its disk accepted nothing for 30 s")
        };
        assert_eq!(notices, [told(0, 2), told(1, 2)]);
        logs.push(1, Stream::Stdout, b"after\n", 1);
        logs.close();
        while logs.is_pending() {
            poll(&mut [PollFd::new(logs.fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
            assert_eq!(logs.tick(Instant::now()), [] as [String; 0]);
        }
        drop(logs);
        let bytes = reading.join().unwrap();
        let filling = bytes.iter().take_while(|byte| **byte == FILLING).count();
        let text = str::from_utf8(&bytes[filling + LINE.len() * pushed..]).unwrap();
        assert_eq!(text, "mgpurun: 2 lines are missing here\n".repeat(2) + "after\n");
    }

    #[test]
    fn lines_not_written_at_the_end_are_reported() {
        let (_reader, mut logs) = hanging();
        while logs.has_room() {
            logs.push(1, Stream::Stdout, &LINE, 1);
        }
        logs.close();
        let mut now = Instant::now();
        while logs.is_pending() {
            now += Duration::from_secs(60);
            assert_eq!(logs.tick(now), [] as [String; 0]);
        }
        let notices = logs.abandon();
        assert_eq!(notices.len(), 1);
        assert!(notices[0].starts_with("the log of rank 1 lost 1"), "{notices:?}");
        assert!(!logs.is_pending());
    }
}
