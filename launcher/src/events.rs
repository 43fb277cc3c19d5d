//! The events of a run for programs: one JSON object per line.
//!
//! Messages for people may change their words; the keys here are stable. Events are appended, so a file may hold several
//! runs, distinguished by the `run_id` of their `start`. If a launch has several jobs, an event of one of them has its
//! number as `job`. A separate thread writes each line as soon as it is recorded: a program that follows the file sees a
//! fault when it happens, and a disk that hangs does not block the run. Events are dropped then, and their number is
//! recorded as `lost` once the disk works again.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::output::LogError;
use crate::supervisor::Exit;
use crate::writer::{LONG_QUEUE, Start, Writer, open};

/// Longest wait without progress for the disk at the end of a run.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// An event of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The ranks' processes were started.
    Start {
        /// Number of ranks.
        ranks: u32,
        /// Their program.
        program: String,
        /// Its arguments.
        arguments: Vec<String>,
        /// Identifier of the run, as in `MGPU_RUN_ID`.
        run_id: String,
        /// Number of restarts before, as in `MGPU_RESTART_COUNT`.
        restart: u32,
    },
    /// A rank joined the rendezvous.
    Join {
        /// The rank.
        rank: u32,
        /// The process that joined: the started process or a child of it.
        pid: u32,
    },
    /// The step of a rank has changed. Sampled once a second: not every step is recorded.
    Step {
        /// The rank.
        rank: u32,
        /// Its current step, from 1.
        step: u64,
    },
    /// The culprit of a failure is determined; at most once for each start.
    Fault {
        /// The rank.
        rank: u32,
        /// What it did, as text.
        cause: String,
        /// The exit code of mgpurun, unless the ranks are restarted.
        exit_code: u8,
    },
    /// A rank's process ended.
    Exit {
        /// The rank.
        rank: u32,
        /// Its exit code, unless a signal killed it.
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<i32>,
        /// The signal that killed it.
        #[serde(skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        /// The launcher had asked it to end or killed it.
        by_launcher: bool,
        /// Its peak resident memory in MiB, rounded up; absent if the kernel did not tell.
        #[serde(skip_serializing_if = "Option::is_none")]
        peak_rss_mib: Option<u64>,
    },
    /// The launch is over, or one of its jobs.
    End {
        /// The exit code of mgpurun.
        exit_code: u8,
        /// What happened, as text; null if all ranks finished.
        message: Option<String>,
        /// The culprit.
        culprit: Option<u32>,
        /// Its job, if this is the end of a launch of several.
        #[serde(skip_serializing_if = "Option::is_none")]
        culprit_job: Option<u32>,
    },
    /// Events were dropped because the disk was too slow.
    Lost {
        /// Number of dropped events.
        events: u64,
    },
}

impl Event {
    /// The end of a rank's process.
    pub(crate) fn exit(rank: u32, exit: Exit, by_launcher: bool, peak_memory: Option<u64>) -> Self {
        let (code, signal) = match exit {
            Exit::Code(code) => (Some(code), None),
            Exit::Signal(signal) => (None, Some(signal)),
        };
        let peak_rss_mib = peak_memory.map(|bytes| bytes.div_ceil(1 << 20));
        Event::Exit { rank, code, signal, by_launcher, peak_rss_mib }
    }
}

/// A line of the file.
#[derive(Debug, Serialize)]
struct Record<'a> {
    /// RFC 3339, UTC, milliseconds.
    time: String,
    /// Seconds since the launcher's start, by the monotonic clock.
    elapsed_s: f64,
    /// The job, if the launch has several and the event concerns one.
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<u32>,
    #[serde(flatten)]
    event: &'a Event,
}

/// The file of events.
pub(crate) struct EventLog {
    /// `None` if events are not recorded.
    file: Option<(PathBuf, Writer)>,
    started: Instant,
    lost: u64,
}

impl EventLog {
    /// Records nothing.
    pub(crate) fn disabled() -> Self {
        EventLog { file: None, started: Instant::now(), lost: 0 }
    }

    /// Appends to the file, which is created if it is missing. The clock of `elapsed_s` starts here.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub(crate) fn open(path: &Path) -> Result<Self, LogError> {
        let start = || -> io::Result<_> {
            let writer = Writer::start("mgpurun-events", vec![open(path, Start::Append)?])?;
            Ok((path.to_owned(), writer))
        };
        let file = start().map_err(|error| LogError { path: path.to_owned(), error })?;
        Ok(EventLog { file: Some(file), ..EventLog::disabled() })
    }

    /// True if events are recorded.
    pub(crate) fn is_enabled(&self) -> bool {
        self.file.is_some()
    }

    /// Records an event of the whole launch without blocking.
    pub(crate) fn record(&mut self, event: Event) {
        self.record_of(None, event);
    }

    /// Records an event of a job without blocking; `None` if the launch has only one.
    pub(crate) fn record_of(&mut self, job: Option<u32>, event: Event) {
        let Some((_, writer)) = &self.file else { return };
        if writer.waiting() > LONG_QUEUE {
            self.lost += 1;
            return;
        }
        if self.lost > 0 {
            self.write(None, &Event::Lost { events: self.lost });
            self.lost = 0;
        }
        self.write(job, &event);
    }

    fn write(&self, job: Option<u32>, event: &Event) {
        let Some((_, writer)) = &self.file else { return };
        let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let elapsed_s = self.started.elapsed().as_millis() as f64 / 1000.0;
        let mut line =
            serde_json::to_vec(&Record { time, elapsed_s, job, event }).expect("strings and numbers only");
        line.push(b'\n');
        writer.push(0, &line, 1);
    }

    /// Why events are not written any more; returned once.
    pub(crate) fn failure(&self) -> Option<String> {
        let (path, writer) = self.file.as_ref()?;
        let (_, error) = writer.failures().pop()?;
        Some(format!("the events in {} end here: {error}; the run continues", path.display()))
    }

    /// Waits until everything is written, or the disk has accepted nothing for [`FLUSH_TIMEOUT`].
    pub(crate) fn flush(&self) {
        if let Some((_, writer)) = &self.file {
            writer.flush(FLUSH_TIMEOUT);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn events_are_json_objects_with_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        std::fs::write(&path, "{\"earlier\":\"run\"}\n").unwrap();
        let mut events = EventLog::open(&path).unwrap();
        let before = SystemTime::now() - Duration::from_millis(1);
        events.record(Event::Start {
            ranks: 2,
            program: "/bin/a \"b\"".into(),
            arguments: vec!["c\n".into()],
            run_id: "r".into(),
            restart: 0,
        });
        events.record(Event::Join { rank: 1, pid: 7 });
        events.record(Event::Step { rank: 1, step: 1 << 40 });
        events.record(Event::Fault { rank: 0, cause: "why".into(), exit_code: 3 });
        events.record(Event::exit(0, Exit::Code(3), false, Some((5 << 20) + 1)));
        events.record(Event::exit(1, Exit::Signal(15), true, None));
        events.record(Event::End { exit_code: 0, message: None, culprit: None, culprit_job: None });
        events.flush();
        let text = std::fs::read_to_string(&path).unwrap();
        let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.remove(0), json!({"earlier": "run"}));
        let mut elapsed = 0.0;
        for line in &mut lines {
            let object = line.as_object_mut().unwrap();
            let time = object.remove("time").unwrap();
            let time = humantime::parse_rfc3339(time.as_str().unwrap()).unwrap();
            assert!(time >= before && time <= SystemTime::now());
            let later = object.remove("elapsed_s").unwrap().as_f64().unwrap();
            assert!(later >= elapsed);
            elapsed = later;
        }
        assert_eq!(
            lines,
            [
                json!({"event": "start", "ranks": 2, "program": "/bin/a \"b\"", "arguments": ["c\n"],
                       "run_id": "r", "restart": 0}),
                json!({"event": "join", "rank": 1, "pid": 7}),
                json!({"event": "step", "rank": 1, "step": 1u64 << 40}),
                json!({"event": "fault", "rank": 0, "cause": "why", "exit_code": 3}),
                json!({"event": "exit", "rank": 0, "code": 3, "by_launcher": false, "peak_rss_mib": 6}),
                json!({"event": "exit", "rank": 1, "signal": 15, "by_launcher": true}),
                json!({"event": "end", "exit_code": 0, "message": null, "culprit": null}),
            ]
        );
    }

    #[test]
    fn events_dropped_because_of_a_hanging_disk_are_counted() {
        let (mut reader, pipe) = io::pipe().unwrap();
        let file = std::fs::File::from(std::os::fd::OwnedFd::from(pipe));
        let mut events = EventLog::disabled();
        events.file = Some(("events".into(), Writer::start("test", vec![file]).unwrap()));
        let mut recorded = 0;
        while events.lost < 5 {
            events.record(Event::Step { rank: 0, step: recorded });
            recorded += 1;
        }
        let reading = std::thread::spawn(move || io::read_to_string(&mut reader).unwrap());
        events.file.as_ref().unwrap().1.flush(Duration::MAX);
        events.record(Event::Step { rank: 0, step: recorded });
        events.flush();
        drop(events);
        let text = reading.join().unwrap();
        let lost = text.lines().position(|line| line.contains(r#""event":"lost","events":5}"#)).unwrap();
        assert_eq!(lost as u64, recorded - 5);
        assert_eq!(text.lines().count(), lost + 2);
    }

    #[test]
    fn a_write_error_is_reported_once() {
        let mut events = EventLog::open(Path::new("/dev/full")).unwrap();
        events.record(Event::Lost { events: 1 });
        events.flush();
        assert!(events.failure().unwrap().starts_with("the events in /dev/full end here: No space left"));
        assert_eq!(events.failure(), None);
        let error = EventLog::open(Path::new("/proc/none")).err().unwrap();
        assert!(error.to_string().starts_with("cannot write the log /proc/none: "), "{error}");
        EventLog::disabled().record(Event::Lost { events: 1 });
    }
}
