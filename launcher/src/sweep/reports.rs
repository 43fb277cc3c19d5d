//! What is kept of the output of a launch: the last JSON object, the last lines of errors, and its events. Pure.
//!
//! A launch may print gigabytes, so memory is limited: a line that is longer than [`LONGEST_LINE`] is dropped.

use std::collections::VecDeque;

use serde::Deserialize;
use serde_json::{Map, Value};

/// Bytes. A result with lists of many epochs is far shorter.
const LONGEST_LINE: usize = 1 << 20;
/// Number of lines of errors.
const ERROR_LINES: usize = 20;
/// Characters of an error that are kept.
const LONGEST_ERROR: usize = 300;

/// Bytes → lines.
#[derive(Debug, Default)]
pub(super) struct LineSplitter {
    line: Vec<u8>,
    is_too_long: bool,
}

impl LineSplitter {
    /// Passes each line that `bytes` complete to `take`, without its line feed.
    pub(super) fn push(&mut self, bytes: &[u8], mut take: impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = piece.strip_suffix(b"\n").map_or((piece, false), |text| (text, true));
            self.is_too_long |= self.line.len() + text.len() > LONGEST_LINE;
            if self.is_too_long {
                self.line.clear();
            } else {
                self.line.extend_from_slice(text);
            }
            if ends {
                if !self.is_too_long {
                    take(&self.line);
                }
                *self = LineSplitter::default();
            }
        }
    }

    /// Passes on what follows the last line feed.
    pub(super) fn finish(&mut self, mut take: impl FnMut(&[u8])) {
        if !self.line.is_empty() {
            take(&std::mem::take(&mut self.line));
        }
    }
}

/// What a launch has reported.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// The last JSON object on its standard output.
    pub(super) result: Option<Map<String, Value>>,
    /// Peak resident memory of each rank that has ended.
    pub(super) peak_rss_mib: Vec<Option<u64>>,
    /// How it ended, unless all ranks finished.
    message: Option<String>,
    /// The last lines of its standard error.
    errors: VecDeque<String>,
}

/// The keys of events that matter here.
#[derive(Deserialize)]
struct Event {
    event: String,
    rank: Option<usize>,
    peak_rss_mib: Option<u64>,
    message: Option<String>,
}

impl Reports {
    pub(super) fn new(ranks: u32) -> Self {
        Reports { peak_rss_mib: vec![None; ranks as usize], ..Reports::default() }
    }

    /// A line of standard output.
    pub(super) fn output(&mut self, line: &[u8]) {
        if line.trim_ascii_start().first() == Some(&b'{')
            && let Ok(object) = serde_json::from_slice(line)
        {
            self.result = Some(object);
        }
    }

    /// A line of standard error.
    pub(super) fn error(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line).replace(char::is_control, " ").trim().to_owned();
        if !line.is_empty() {
            self.errors.truncate(ERROR_LINES - 1);
            self.errors.push_front(line);
        }
    }

    /// An event.
    pub(super) fn event(&mut self, line: &[u8]) {
        let Ok(event) = serde_json::from_slice::<Event>(line) else { return };
        match (event.event.as_str(), event.rank) {
            ("exit", Some(rank)) => {
                if let Some(peak) = self.peak_rss_mib.get_mut(rank) {
                    // A rank that was restarted ends several times.
                    *peak = (*peak).max(event.peak_rss_mib);
                }
            }
            ("end", _) => self.message = event.message,
            _ => {}
        }
    }

    /// Why the launch failed with `code`, in one line: how it ended, and the line of standard error that tells most.
    pub(super) fn failure(&self, code: u8) -> String {
        let end = self.message.clone().unwrap_or_else(|| format!("mgpurun exited with code {code}"));
        // What mgpurun says itself is in `end`, and a hint to use --help says nothing.
        let is_told =
            |line: &&String| line.starts_with("mgpurun: rank") || line.starts_with("mgpurun: the last lines");
        let mut lines = self.errors.iter().filter(|line| !is_told(line) && !line.contains("--help"));
        let mut with_error = lines.clone().filter(|line| line.to_lowercase().contains("error"));
        let line = with_error.next().or_else(|| lines.next());
        let text = line.map_or(end.clone(), |line| format!("{end}: {line}"));
        text.chars().take(LONGEST_ERROR).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_may_arrive_in_pieces() {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        let mut push = |bytes: &[u8]| splitter.push(bytes, |line| lines.push(line.to_vec()));
        push(b"a\nb");
        push(b"c\n\nlong");
        for _ in 0..3 {
            push(&vec![b'x'; LONGEST_LINE / 2]);
        }
        push(b"x\nd\ne");
        splitter.finish(|line| lines.push(line.to_vec()));
        assert_eq!(lines, [&b"a"[..], b"bc", b"", b"d", b"e"]);
    }

    #[test]
    fn the_last_object_counts() {
        let mut reports = Reports::new(1);
        for line in ["{\"a\":1}", "{\"a\":2}", "{\"a\":3", "[4]", "5", "{}}", "text {\"a\":6}"] {
            reports.output(line.as_bytes());
        }
        assert_eq!(serde_json::to_string(&reports.result).unwrap(), "{\"a\":2}");
        reports.output(b"  {}\r");
        assert_eq!(reports.result, Some(Map::new()));
    }

    #[test]
    fn memory_is_the_maximum_over_restarts() {
        let mut reports = Reports::new(2);
        for line in [
            r#"{"event":"exit","rank":1,"peak_rss_mib":7}"#,
            r#"{"event":"exit","rank":1,"peak_rss_mib":5}"#,
            r#"{"event":"exit","rank":9,"peak_rss_mib":5}"#,
            r#"{"event":"exit","rank":-1,"peak_rss_mib":5}"#,
            r#"{"event":"step","rank":0,"step":5}"#,
            "nonsense",
        ] {
            reports.event(line.as_bytes());
        }
        assert_eq!(reports.peak_rss_mib, [None, Some(7)]);
    }

    #[test]
    fn a_failure_is_told_in_one_line() {
        let failure = |end: Option<&str>, lines: &str| {
            let mut reports = Reports { message: end.map(str::to_owned), ..Reports::default() };
            lines.lines().for_each(|line| reports.error(line.as_bytes()));
            reports.failure(3)
        };
        let end = Some("rank 1 exited with code 3");
        assert_eq!(failure(end, ""), "rank 1 exited with code 3");
        assert_eq!(failure(end, "a warning\nthe reason\n  \n"), "rank 1 exited with code 3: the reason");
        let usage = "error: no such option\n\nUsage: prog\n\nFor more information, try '--help'.";
        assert_eq!(failure(end, usage), "rank 1 exited with code 3: error: no such option");
        let told = "why\nmgpurun: rank 1 exited with code 3 after 1 s\nmgpurun: the last lines of rank 1:";
        assert_eq!(failure(end, told), "rank 1 exited with code 3: why");
        assert_eq!(failure(None, "mgpurun: no memory"), "mgpurun exited with code 3: mgpurun: no memory");
        assert_eq!(failure(None, &"ä".repeat(1000)).chars().count(), LONGEST_ERROR);
    }
}
