//! The error that ends a rank, as PyTorch writes it to the file of `TORCHELASTIC_ERROR_FILE`.
//!
//! A function with the decorator `@record` writes the exception that leaves it as JSON, with the whole traceback. Any
//! other program may write anything there, or nothing: what has another form is ignored, and the rank's last lines are
//! shown instead. A rank may also have handled the error, as when the decorator is in a helper process of it, and have
//! ended much later for another reason. So the last lines are left out only for an error that was recorded just before
//! the rank exited with a code of its own.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::fcntl::OFlag;
use serde::Deserialize;

use crate::supervisor::Exit;

/// Largest file that is read.
const MAX_BYTES: u64 = 4 << 20;
/// Most lines that are shown: the first and the last ones.
const MAX_FIRST: usize = 100;
const MAX_LAST: usize = 300;
/// Most characters of a line that are shown.
const MAX_LINE: usize = 2048;
/// Longest time from the record of an error to the end of the rank if the error has ended it: Python has to end its
/// threads and to free its GPU.
const TIME_TO_END: Duration = Duration::from_secs(15);

/// An error that a rank has recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordedError {
    /// Its text, without control characters but tabs; at least one line.
    pub(crate) lines: Vec<String>,
    /// Time from the record to the end of the rank.
    pub(crate) age: Duration,
    /// It has ended the rank, as far as exit and age tell.
    pub(crate) has_ended_it: bool,
}

#[derive(Deserialize)]
struct ErrorFile {
    message: Message,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Message {
    Text(String),
    Exception {
        #[serde(default)]
        message: String,
        #[serde(default, rename = "extraInfo")]
        extra: Extra,
    },
}

#[derive(Default, Deserialize)]
struct Extra {
    #[serde(default)]
    py_callstack: String,
}

/// The error in the file at `path`, which is that of a rank that has `ended` with this `exit`; `None` if there is none.
pub(crate) fn read(path: &Path, exit: Exit, ended: SystemTime) -> Option<RecordedError> {
    // A rank may have put anything there: neither a link nor a pipe is read.
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let metadata =
        file.metadata().ok().filter(|metadata| metadata.is_file() && metadata.len() <= MAX_BYTES)?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    let lines = parse(&bytes)?;
    // The clock of a file system is up to one tick behind; a time after the end is a clock that was set.
    let age = ended.duration_since(metadata.modified().ok()?).unwrap_or_default();
    let has_failed = matches!(exit, Exit::Code(code) if code != 0);
    Some(RecordedError { lines, age, has_ended_it: has_failed && age <= TIME_TO_END })
}

fn parse(bytes: &[u8]) -> Option<Vec<String>> {
    let file: ErrorFile = serde_json::from_slice(bytes).ok()?;
    let text = match file.message {
        Message::Text(text) => text,
        Message::Exception { extra, .. } if !extra.py_callstack.trim().is_empty() => extra.py_callstack,
        Message::Exception { message, .. } => message,
    };
    let line = |line: &str| -> String {
        let visible = |c: char| if c.is_control() && c != '\t' { '\u{fffd}' } else { c };
        line.chars().take(MAX_LINE).map(visible).collect()
    };
    let mut lines: Vec<String> = text.trim_end().lines().map(line).collect();
    if lines.len() > MAX_FIRST + MAX_LAST {
        let left_out = lines.len() - MAX_FIRST - MAX_LAST;
        lines.splice(MAX_FIRST..MAX_FIRST + left_out, [format!("... {left_out} lines ...")]);
    }
    (!lines.is_empty()).then_some(lines)
}

impl RecordedError {
    /// The last `most` lines, indented like the last lines of a rank, each cut to at most `bytes` bytes.
    pub(crate) fn last_lines(&self, most: usize, bytes: usize) -> Vec<String> {
        let indented = |line: &String| {
            let mut line = format!("    {line}");
            while line.len() > bytes {
                line.pop();
            }
            line
        };
        self.lines.iter().skip(self.lines.len().saturating_sub(most)).map(indented).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use proptest::prelude::*;

    use super::*;

    /// The file that `@record` writes.
    fn recorded(traceback: &str) -> String {
        let extra = serde_json::json!({"py_callstack": traceback, "timestamp": "1700000000"});
        serde_json::json!({"message": {"message": "ValueError: x", "extraInfo": extra}}).to_string()
    }

    #[test]
    fn the_traceback_is_the_error() {
        let lines = parse(recorded("Traceback:\n\tat x\nValueError: \u{1b}[31mx\n\n").as_bytes()).unwrap();
        assert_eq!(lines, ["Traceback:", "\tat x", "ValueError: \u{fffd}[31mx"]);
        let last_lines = |lines: Vec<String>, most, bytes| {
            let error = RecordedError { lines, age: Duration::ZERO, has_ended_it: true };
            error.last_lines(most, bytes)
        };
        assert_eq!(last_lines(lines, 2, 9), ["    \tat x", "    Value"]);
        assert_eq!(last_lines(vec!["äöü".into()], 2, 7), ["    ä"]);
        assert_eq!(parse(recorded(" ").as_bytes()), Some(vec!["ValueError: x".into()]));
        assert_eq!(parse(br#"{"message": "killed", "timestamp": 1}"#), Some(vec!["killed".into()]));
        for other in ["", "{}", "[]", "{\"message\": 1}", "{\"message\": \"\"}", "{\"message\": {}}", "\u{0}"]
        {
            assert_eq!(parse(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_long_traceback_is_cut_in_the_middle() {
        let text: String = (0..1000).map(|line| format!("line {line}\n")).collect();
        let lines = parse(recorded(&text).as_bytes()).unwrap();
        assert_eq!((lines.len(), &*lines[99], &*lines[100]), (401, "line 99", "... 600 lines ..."));
        assert_eq!((&*lines[101], &*lines[400]), ("line 700", "line 999"));
        let lines = parse(recorded(&"é".repeat(5000)).as_bytes()).unwrap();
        assert_eq!(lines[0].chars().count(), MAX_LINE);
    }

    #[test]
    fn only_small_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), recorded("boom")).unwrap();
        symlink(path("file"), path("link")).unwrap();
        mkfifo(&path("pipe"), Mode::S_IRWXU).unwrap();
        fs::write(path("large"), recorded(&"x".repeat(5 << 20))).unwrap();
        let read = |name: &str| read(&path(name), Exit::Code(1), SystemTime::now());
        assert_eq!(read("file").unwrap().lines, ["boom"]);
        for other in ["link", "pipe", "large", "none", "."] {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn an_old_error_and_one_of_a_killed_rank_have_not_ended_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, recorded("boom")).unwrap();
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        for (exit, seconds, has_ended_it) in [
            (Exit::Code(1), 0, true),
            (Exit::Code(1), 5, true),
            (Exit::Code(1), 3600, false),
            (Exit::Code(0), 0, false),
            (Exit::Signal(6), 0, false),
        ] {
            let age = Duration::from_secs(seconds);
            let error = read(&path, exit, written + age).unwrap();
            assert_eq!(error, RecordedError { lines: vec!["boom".into()], age, has_ended_it }, "{exit:?}");
        }
        // The clock was set back.
        let error = read(&path, Exit::Code(1), written - Duration::from_secs(60)).unwrap();
        assert_eq!((error.age, error.has_ended_it), (Duration::ZERO, true));
    }

    proptest! {
        #[test]
        fn any_bytes_are_accepted(bytes in prop::collection::vec(any::<u8>(), 0..200), text in any::<String>()) {
            let _ = parse(&bytes);
            if let Some(lines) = parse(recorded(&text).as_bytes()) {
                prop_assert!(lines.iter().all(|line| line.chars().all(|c| !c.is_control() || c == '\t')));
            }
        }
    }
}
