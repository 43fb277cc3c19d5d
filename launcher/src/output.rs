//! The ranks' output: whole lines, each with its rank in front.
//!
//! A line is passed on when it is complete, so that lines of different ranks are never cut into each other. What
//! ends in a carriage return is transient, a progress line: shown on a terminal, where the next one overwrites it,
//! and dropped elsewhere.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use crate::ranks::RankSet;

/// Longest line; what is longer is passed on in pieces.
const LONGEST_LINE: usize = 1 << 20;
/// Lines of each rank that are kept, to be repeated if it is to blame.
const LAST_LINES: usize = 10;
/// Clears the rest of a terminal's line.
const CLEAR: &[u8] = b"\x1b[K";

/// Which of a rank's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// A line, without its end.
    Line(Vec<u8>),
    /// A line that a carriage return ended.
    Transient(Vec<u8>),
}

/// Puts bytes together into lines.
#[derive(Debug, Default)]
pub struct LineSplitter {
    bytes: Vec<u8>,
    /// A carriage return has come whose successor has not.
    returned: bool,
}

impl LineSplitter {
    /// Takes bytes and returns the pieces they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for byte in bytes {
            // A carriage return before a line feed belongs to the line's end.
            if std::mem::take(&mut self.returned) && *byte != b'\n' {
                pieces.push(Piece::Transient(std::mem::take(&mut self.bytes)));
            }
            match byte {
                b'\n' => pieces.push(Piece::Line(std::mem::take(&mut self.bytes))),
                b'\r' => self.returned = true,
                _ => self.bytes.push(*byte),
            }
            if self.bytes.len() >= LONGEST_LINE {
                pieces.push(Piece::Line(std::mem::take(&mut self.bytes)));
            }
        }
        pieces
    }

    /// What is left at the end of the stream.
    pub fn finish(&mut self) -> Option<Piece> {
        let rest = std::mem::take(&mut self.bytes);
        (!rest.is_empty()).then_some(Piece::Line(rest))
    }
}

/// When to colour the prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Color {
    /// On a terminal, unless `NO_COLOR` is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// How output is passed on.
#[derive(Debug, Clone)]
pub struct OutputOptions {
    /// Put `[rank] ` in front of each line.
    pub prefix: bool,
    /// Colour the prefix.
    pub color: Color,
    /// Write each rank's output to a file in this folder too.
    pub log_dir: Option<PathBuf>,
    /// Ranks that are not shown.
    pub quiet: RankSet,
}

impl Default for OutputOptions {
    fn default() -> Self {
        OutputOptions { prefix: true, color: Color::Auto, log_dir: None, quiet: RankSet::default() }
    }
}

/// A destination that may go away.
struct Sink {
    writer: Box<dyn Write>,
    terminal: bool,
    color: bool,
    closed: bool,
}

impl Sink {
    fn new(writer: Box<dyn Write>, terminal: bool, color: Color) -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let color = match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => terminal && !plain,
        };
        Sink { writer, terminal, color, closed: false }
    }

    fn write(&mut self, bytes: &[u8]) {
        if !self.closed && self.writer.write_all(bytes).and_then(|()| self.writer.flush()).is_err() {
            self.closed = true;
        }
    }
}

/// One rank's part.
#[derive(Debug, Default)]
struct RankOutput {
    splitters: [LineSplitter; 2],
    last: VecDeque<Vec<u8>>,
    log: Option<File>,
}

/// Where all output goes.
pub struct Output {
    options: OutputOptions,
    sinks: [Sink; 2],
    ranks: Vec<RankOutput>,
    width: usize,
}

impl Output {
    /// For `ranks` ranks, to this process's standard output and error.
    ///
    /// # Errors
    /// If a log file cannot be made; names it.
    pub fn new(ranks: u32, options: OutputOptions) -> Result<Self, String> {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let (out, err) = (stdout.is_terminal(), stderr.is_terminal());
        let sinks = [
            Sink::new(Box::new(stdout), out, options.color),
            Sink::new(Box::new(stderr), err, options.color),
        ];
        let mut outputs: Vec<RankOutput> = (0..ranks).map(|_| RankOutput::default()).collect();
        if let Some(folder) = &options.log_dir {
            for (rank, output) in outputs.iter_mut().enumerate() {
                output.log = Some(create_log(folder, rank)?);
            }
        }
        let width = ranks.saturating_sub(1).to_string().len();
        Ok(Output { options, sinks, ranks: outputs, width })
    }

    /// True if transient lines are shown.
    pub fn shows_progress(&self) -> bool {
        self.sinks[Stream::Stderr as usize].terminal
    }

    /// False once neither a reader nor a log is left for a rank's stream.
    pub fn is_wanted(&self, rank: u32, stream: Stream) -> bool {
        !self.sinks[stream as usize].closed || self.ranks[rank as usize].log.is_some()
    }

    /// Takes what a rank has written.
    pub fn push(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        let pieces = self.ranks[rank as usize].splitters[stream as usize].push(bytes);
        self.pass_on(rank, stream, pieces);
    }

    /// Takes the end of a rank's stream.
    pub fn finish(&mut self, rank: u32, stream: Stream) {
        let rest = self.ranks[rank as usize].splitters[stream as usize].finish();
        self.pass_on(rank, stream, rest);
    }

    fn pass_on(&mut self, rank: u32, stream: Stream, pieces: impl IntoIterator<Item = Piece>) {
        let quiet = self.options.quiet.contains(rank);
        let sink = &self.sinks[stream as usize];
        let prefix = self.prefix(rank, sink.color);
        let (mut shown, mut logged) = (Vec::new(), Vec::new());
        let output = &mut self.ranks[rank as usize];
        for piece in pieces {
            match piece {
                Piece::Line(line) => {
                    shown.extend_from_slice(&prefix);
                    shown.extend_from_slice(&line);
                    shown.extend_from_slice(if sink.terminal { b"\x1b[K\n" } else { b"\n" });
                    if output.log.is_some() {
                        logged.extend_from_slice(&line);
                        logged.push(b'\n');
                    }
                    if output.last.len() == LAST_LINES {
                        output.last.pop_front();
                    }
                    output.last.push_back(line);
                }
                Piece::Transient(line) if sink.terminal => {
                    shown.extend_from_slice(&prefix);
                    shown.extend_from_slice(&line);
                    shown.extend_from_slice(CLEAR);
                    shown.push(b'\r');
                }
                Piece::Transient(_) => {}
            }
        }
        if let Some(log) = &mut output.log {
            // A full disk costs the log, not the run.
            if log.write_all(&logged).is_err() {
                output.log = None;
            }
        }
        if !quiet && !shown.is_empty() {
            self.sinks[stream as usize].write(&shown);
        }
    }

    fn prefix(&self, rank: u32, color: bool) -> Vec<u8> {
        if !self.options.prefix {
            return Vec::new();
        }
        let width = self.width;
        if color {
            // Six colours that are readable on black and on white.
            format!("\x1b[{}m[{rank:>width$}]\x1b[0m ", 31 + rank % 6).into_bytes()
        } else {
            format!("[{rank:>width$}] ").into_bytes()
        }
    }

    /// A line of the launcher's own, to standard error.
    pub fn say(&mut self, text: &str) {
        let sink = &mut self.sinks[Stream::Stderr as usize];
        let end = if sink.terminal { "\x1b[K\n" } else { "\n" };
        sink.write(format!("mgpurun: {text}{end}").as_bytes());
    }

    /// Repeats the last lines of a rank on standard error.
    pub fn repeat_last_lines(&mut self, rank: u32) {
        let last = std::mem::take(&mut self.ranks[rank as usize].last);
        if last.is_empty() {
            return self.say(&format!("rank {rank} had written nothing"));
        }
        self.say(&format!("the last lines of rank {rank}:"));
        for line in last {
            let sink = &mut self.sinks[Stream::Stderr as usize];
            sink.write(&[b"    ", &line[..], b"\n"].concat());
        }
    }
}

fn create_log(folder: &Path, rank: usize) -> Result<File, String> {
    let path = folder.join(format!("rank-{rank}.log"));
    let create = || {
        fs::create_dir_all(folder)?;
        File::create(&path)
    };
    create().map_err(|error| format!("cannot write the log {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The pieces of `input` in chunks of `chunk` bytes.
    fn split(input: &[u8], chunk: usize) -> Vec<Piece> {
        let mut splitter = LineSplitter::default();
        let mut pieces: Vec<Piece> = input.chunks(chunk).flat_map(|bytes| splitter.push(bytes)).collect();
        pieces.extend(splitter.finish());
        pieces
    }

    proptest! {
        #[test]
        fn lines_are_the_input_whatever_the_chunks(
            input in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'a'), any::<u8>()], 0..300), chunk in 1usize..50
        ) {
            let input: Vec<u8> = input.into_iter().filter(|byte| *byte != b'\r').collect();
            let mut joined = Vec::new();
            for piece in split(&input, chunk) {
                let Piece::Line(line) = piece else { panic!("nothing transient in {input:?}") };
                prop_assert!(!line.contains(&b'\n'));
                joined.extend(line);
                joined.push(b'\n');
            }
            let mut expected = input.clone();
            if expected.last().is_some_and(|byte| *byte != b'\n') {
                expected.push(b'\n');
            }
            prop_assert_eq!(joined, expected);
        }

        #[test]
        fn chunks_do_not_matter(
            input in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b'x')], 0..60), chunk in 1usize..9
        ) {
            prop_assert_eq!(split(&input, chunk), split(&input, 1000));
        }
    }

    #[test]
    fn carriage_returns() {
        let line = |text: &str| Piece::Line(text.into());
        let transient = |text: &str| Piece::Transient(text.into());
        assert_eq!(split(b"10%\r20%\rdone\n", 4), [transient("10%"), transient("20%"), line("done")]);
        assert_eq!(split(b"windows\r\nlines\r\n", 3), [line("windows"), line("lines")]);
        assert_eq!(split(b"cut", 2), [line("cut")]);
    }

    #[test]
    fn endless_lines_are_cut() {
        let pieces = split(&vec![b'x'; 2 * LONGEST_LINE + 5], 4096);
        let lengths: Vec<usize> = pieces
            .iter()
            .map(|piece| match piece {
                Piece::Line(line) => line.len(),
                Piece::Transient(_) => 0,
            })
            .collect();
        assert_eq!(lengths, [LONGEST_LINE, LONGEST_LINE, 5]);
    }

    #[test]
    fn logs_are_written_for_quiet_ranks_too() {
        let folder = tempfile::tempdir().unwrap();
        let options = OutputOptions {
            log_dir: Some(folder.path().join("logs")),
            quiet: "0-".parse().unwrap(),
            ..OutputOptions::default()
        };
        let mut output = Output::new(2, options).unwrap();
        output.push(1, Stream::Stdout, b"one\ntw");
        output.push(1, Stream::Stderr, b"error\n");
        output.push(1, Stream::Stdout, b"o");
        output.finish(1, Stream::Stdout);
        let log = fs::read_to_string(folder.path().join("logs/rank-1.log")).unwrap();
        assert_eq!(log, "one\nerror\ntwo\n");
        let error =
            Output::new(1, OutputOptions { log_dir: Some("/proc/none".into()), ..OutputOptions::default() });
        assert!(error.err().unwrap().starts_with("cannot write the log /proc/none/rank-0.log: "));
    }
}
