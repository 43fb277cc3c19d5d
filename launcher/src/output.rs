//! The ranks' output: whole lines, each with its rank in front.
//!
//! A line is passed on when it is complete, so that lines of different ranks are never cut into each other. What
//! ends in a carriage return is transient, a progress line: shown on a terminal, where the next one overwrites it,
//! and dropped elsewhere.
//!
//! Nothing here blocks: a reader that is slow slows the ranks down (`sink`). A full disk costs lines, not the run. When
//! the reader has left, as `head` does, the ranks find their pipes closed as they would without a launcher, unless
//! their output goes to a log as well: whoever wants a run to outlive its reader asks for one.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::ranks::RankSet;

mod lines;
mod sink;

pub use lines::{LineSplitter, Piece};
use sink::Sink;

/// Lines of each rank that are kept, to be repeated if it is to blame.
const LAST_LINES: usize = 10;
/// Bytes kept of each of them.
const KEPT_OF_A_LINE: usize = 4096;
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

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the log {}: {error}", path.display())]
pub struct LogError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub error: io::Error,
}

/// One of this process's own streams.
struct Destination {
    sink: Sink,
    terminal: bool,
    color: bool,
}

impl Destination {
    fn new(stream: impl AsFd + IsTerminal + 'static, color: Color) -> Self {
        let terminal = stream.is_terminal();
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let color = match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => terminal && !plain,
        };
        Destination { sink: Sink::new(stream, terminal), terminal, color }
    }

    /// The end of a line. On a terminal a transient line may be under it.
    fn line_end(&self) -> &'static [u8] {
        if self.terminal { b"\x1b[K\n" } else { b"\n" }
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
    destinations: [Destination; 2],
    ranks: Vec<RankOutput>,
    width: usize,
    /// It was said that standard output is lost.
    told_loss: bool,
}

impl Output {
    /// For `ranks` ranks, to this process's standard output and error.
    ///
    /// # Errors
    /// If a log file cannot be made.
    pub fn new(ranks: u32, options: OutputOptions) -> Result<Self, LogError> {
        let destinations =
            [Destination::new(io::stdout(), options.color), Destination::new(io::stderr(), options.color)];
        let mut outputs: Vec<RankOutput> = (0..ranks).map(|_| RankOutput::default()).collect();
        if let Some(folder) = &options.log_dir {
            for (rank, output) in outputs.iter_mut().enumerate() {
                output.log = Some(create_log(folder, rank)?);
            }
        }
        let width = ranks.saturating_sub(1).to_string().len();
        Ok(Output { options, destinations, ranks: outputs, width, told_loss: false })
    }

    /// True if transient lines are shown.
    pub fn shows_progress(&self) -> bool {
        self.destinations[Stream::Stdout as usize].terminal
    }

    /// False while a rank's stream should be left unread, because its reader is slower than the rank.
    pub fn has_room(&self, rank: u32, stream: Stream) -> bool {
        self.options.quiet.contains(rank) || !self.destinations[stream as usize].sink.is_behind()
    }

    /// False once the reader of a rank's stream has left and no log takes its place.
    pub fn is_wanted(&self, rank: u32, stream: Stream) -> bool {
        let failure = self.destinations[stream as usize].sink.failure();
        let seen = !self.options.quiet.contains(rank) && failure == Some(Errno::EPIPE);
        !seen || self.ranks[rank as usize].log.is_some()
    }

    /// The streams that wait for room, to be polled for writing.
    pub fn waiting(&self) -> impl Iterator<Item = (Stream, BorrowedFd<'_>)> {
        let both = [Stream::Stdout, Stream::Stderr].into_iter().zip(&self.destinations);
        both.filter(|(_, to)| to.sink.has_rest()).map(|(stream, to)| (stream, to.sink.as_fd()))
    }

    /// Goes on writing to a stream that has room again.
    pub fn resume(&mut self, stream: Stream) {
        self.destinations[stream as usize].sink.write_what_fits();
        self.tell_loss();
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
        let destination = &self.destinations[stream as usize];
        let prefix = self.prefix(rank, destination.color);
        let (mut shown, mut logged) = (Vec::new(), Vec::new());
        let output = &mut self.ranks[rank as usize];
        for piece in pieces {
            match piece {
                Piece::Line(mut line) => {
                    if !quiet {
                        shown.extend_from_slice(&prefix);
                        shown.extend_from_slice(&line);
                        shown.extend_from_slice(destination.line_end());
                    }
                    if output.log.is_some() {
                        logged.extend_from_slice(&line);
                        logged.push(b'\n');
                    }
                    if output.last.len() == LAST_LINES {
                        output.last.pop_front();
                    }
                    if line.len() > KEPT_OF_A_LINE {
                        line.truncate(KEPT_OF_A_LINE);
                        line.shrink_to_fit();
                    }
                    output.last.push_back(line);
                }
                Piece::Transient(line) if destination.terminal && !quiet => {
                    shown.extend_from_slice(&prefix);
                    shown.extend_from_slice(&line);
                    shown.extend_from_slice(CLEAR);
                    shown.push(b'\r');
                }
                Piece::Transient(_) => {}
            }
        }
        // A full disk costs the log, not the run.
        if let Some(log) = &mut output.log
            && let Err(error) = log.write_all(&logged)
        {
            output.log = None;
            self.say(&format!("the log of rank {rank} ends here: {error}; the run goes on"));
        }
        if !shown.is_empty() {
            self.destinations[stream as usize].sink.push(&shown);
            self.tell_loss();
        }
    }

    /// Says once that standard output takes no more, unless its reader just left, as `head` does.
    fn tell_loss(&mut self) {
        let failure = self.destinations[Stream::Stdout as usize].sink.failure();
        if let Some(errno) = failure.filter(|errno| *errno != Errno::EPIPE)
            && !std::mem::replace(&mut self.told_loss, true)
        {
            self.say(&format!("standard output is lost from here on: {}; the run goes on", errno.desc()));
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
        let destination = &mut self.destinations[Stream::Stderr as usize];
        let line = [b"mgpurun: ", text.as_bytes(), destination.line_end()].concat();
        destination.sink.push(&line);
    }

    /// Repeats the last lines of a rank on standard error.
    pub fn repeat_last_lines(&mut self, rank: u32) {
        let last = std::mem::take(&mut self.ranks[rank as usize].last);
        if last.is_empty() {
            return self.say(&format!("rank {rank} had written nothing"));
        }
        self.say(&format!("the last lines of rank {rank}:"));
        let destination = &mut self.destinations[Stream::Stderr as usize];
        for line in last {
            let line = [b"    ", &line[..], destination.line_end()].concat();
            destination.sink.push(&line);
        }
    }
}

fn create_log(folder: &Path, rank: usize) -> Result<File, LogError> {
    let path = folder.join(format!("rank-{rank}.log"));
    let create = || {
        fs::create_dir_all(folder)?;
        File::create(&path)
    };
    create().map_err(|error| LogError { path: path.clone(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(error.err().unwrap().to_string().starts_with("cannot write the log /proc/none/rank-0.log: "));
    }
}
