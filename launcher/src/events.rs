//! What happens to a run, for programs: one JSON object a line.
//!
//! Lines for people say the same in words that may change; these keep their names. They are appended, so that a file
//! may hold several runs, told apart by the `run_id` of their `start`. Each line is written as soon as it is
//! recorded, by a thread of its own: whoever follows the file sees a fault when it happens, and a disk that hangs
//! holds up nobody. It costs events instead, whose number is recorded as `lost` once the disk goes on.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::output::LogError;
use crate::supervisor::Exit;
use crate::writer::{LONG_QUEUE, Start, Writer, open};

/// Longest wait at the end of a run for a disk that takes nothing.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The ranks' processes were started.
    Start {
        /// How many.
        ranks: u32,
        /// What they run.
        program: String,
        /// Its arguments.
        arguments: Vec<String>,
        /// Identifier of the run, as in `MGPU_RUN_ID`.
        run_id: String,
        /// How often they had been started before, as in `MGPU_RESTART_COUNT`.
        restart: u32,
    },
    /// A rank joined the rendezvous.
    Join {
        /// The rank.
        rank: u32,
        /// The process that joined: the rank's own or a child of it.
        pid: u32,
    },
    /// A rank has come to a step. Looked at once a second: not every step is recorded.
    Step {
        /// The rank.
        rank: u32,
        /// The step it is in, from 1.
        step: u64,
    },
    /// It is decided which rank is to blame; once for each start.
    Fault {
        /// The rank.
        rank: u32,
        /// What it did, in words.
        cause: String,
        /// What the shell would get.
        exit_code: u8,
    },
    /// A rank's process ended.
    Exit {
        /// The rank.
        rank: u32,
        /// Its exit code, unless a signal ended it.
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<i32>,
        /// The signal that ended it.
        #[serde(skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        /// The launcher had asked it to end, or forced it.
        by_launcher: bool,
    },
    /// The run is over.
    End {
        /// What the shell gets.
        exit_code: u8,
        /// What happened, in words; null if all ranks finished.
        message: Option<String>,
        /// The rank to blame.
        culprit: Option<u32>,
    },
    /// So many events could not be written down in time.
    Lost {
        /// How many.
        events: u64,
    },
}

impl Event {
    /// The end of a rank's process.
    pub(crate) fn exit(rank: u32, exit: Exit, by_launcher: bool) -> Self {
        let (code, signal) = match exit {
            Exit::Code(code) => (Some(code), None),
            Exit::Signal(signal) => (None, Some(signal)),
        };
        Event::Exit { rank, code, signal, by_launcher }
    }
}

/// A line.
#[derive(Debug, Serialize)]
struct Record<'a> {
    /// RFC 3339, UTC, milliseconds.
    time: String,
    /// Since the launcher's start, by a clock that nobody sets.
    elapsed_s: f64,
    #[serde(flatten)]
    event: &'a Event,
}

/// Where events are written down.
pub(crate) struct EventLog {
    /// `None` if nobody asked for them.
    file: Option<(PathBuf, Writer)>,
    started: Instant,
    lost: u64,
}

impl EventLog {
    /// Records nothing.
    pub(crate) fn disabled() -> Self {
        EventLog { file: None, started: Instant::now(), lost: 0 }
    }

    /// Records behind what is in the file, which is made if it is missing. Its clock starts here.
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

    /// True if anybody wants to know.
    pub(crate) fn is_enabled(&self) -> bool {
        self.file.is_some()
    }

    /// Writes an event down, without waiting for it.
    pub(crate) fn record(&mut self, event: Event) {
        let Some((_, writer)) = &self.file else { return };
        if writer.waiting() > LONG_QUEUE {
            self.lost += 1;
            return;
        }
        if self.lost > 0 {
            self.write(&Event::Lost { events: self.lost });
            self.lost = 0;
        }
        self.write(&event);
    }

    fn write(&self, event: &Event) {
        let Some((_, writer)) = &self.file else { return };
        let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let elapsed_s = self.started.elapsed().as_millis() as f64 / 1000.0;
        let mut line =
            serde_json::to_vec(&Record { time, elapsed_s, event }).expect("strings and numbers only");
        line.push(b'\n');
        writer.push(0, &line, 1);
    }

    /// Why events are not written down any more; said once.
    pub(crate) fn failure(&self) -> Option<String> {
        let (path, writer) = self.file.as_ref()?;
        let (_, error) = writer.failures().pop()?;
        Some(format!("the events in {} end here: {error}; the run continues", path.display()))
    }

    /// Waits until all is written, but not for a disk that takes nothing.
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
    fn events_are_objects_with_a_time() {
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
        events.record(Event::exit(0, Exit::Code(3), false));
        events.record(Event::exit(1, Exit::Signal(15), true));
        events.record(Event::End { exit_code: 0, message: None, culprit: None });
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
                json!({"event": "exit", "rank": 0, "code": 3, "by_launcher": false}),
                json!({"event": "exit", "rank": 1, "signal": 15, "by_launcher": true}),
                json!({"event": "end", "exit_code": 0, "message": null, "culprit": null}),
            ]
        );
    }

    #[test]
    fn a_disk_that_hangs_costs_events_which_are_counted() {
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
    fn a_failure_is_said_once() {
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
