//! The ranks' output: whole lines, each with its rank in front.
//!
//! A line is passed on when it is complete, so that lines of different ranks are never cut into each other. What
//! ends in a carriage return is transient, a progress line: shown on a terminal, where the next one overwrites it,
//! and dropped elsewhere.
//!
//! Nothing here blocks: a reader that is slow slows the ranks down (`sink`), and so does a slow disk (`logs`). One that
//! takes nothing at all for the time of the `patience` costs lines, which are counted and told of, and so does a full
//! disk: lines, not the run. When the reader has left, as `head` does, the ranks find their pipes closed as they would
//! without a launcher, unless their output goes to a log as well: whoever wants a run to outlive its reader asks for
//! one.
//!
//! What is held in memory for a rank: of each stream one line that is not complete, at most 1 MiB, and its last lines.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Instant, SystemTime};

use nix::errno::Errno;

mod destination;
mod lines;
mod logs;
mod options;
mod patience;
mod sink;

use destination::{CLEAR, Destination};
pub use lines::{LineSplitter, Piece};
use logs::Logs;
pub use options::{Color, LogError, OutputOptions};

/// Lines of each rank that are kept, to be repeated if it is to blame.
const LAST_LINES: usize = 10;
/// Bytes kept of each of them.
const KEPT_OF_A_LINE: usize = 4096;
/// Which of a rank's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Both, in the order in which they are kept.
const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

impl Stream {
    fn name(self) -> &'static str {
        match self {
            Stream::Stdout => "standard output",
            Stream::Stderr => "standard error",
        }
    }
}

/// One rank's part.
#[derive(Debug, Default)]
struct RankOutput {
    splitters: [LineSplitter; 2],
    last: VecDeque<Vec<u8>>,
}

/// Where all output goes.
pub struct Output {
    options: OutputOptions,
    destinations: [Destination; 2],
    ranks: Vec<RankOutput>,
    logs: Option<Logs>,
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
        let destinations = [
            Destination::new(io::stdout(), options.color, options.patience),
            Destination::new(io::stderr(), options.color, options.patience),
        ];
        Output::to(destinations, ranks, options)
    }

    fn to(destinations: [Destination; 2], ranks: u32, options: OutputOptions) -> Result<Self, LogError> {
        let create = |folder| Logs::create(folder, ranks, options.patience);
        let logs = options.log_dir.as_deref().map(create).transpose()?;
        let width = ranks.saturating_sub(1).to_string().len();
        let ranks = (0..ranks).map(|_| RankOutput::default()).collect();
        Ok(Output { options, destinations, ranks, logs, width, told_loss: false })
    }

    /// True if transient lines are shown.
    pub fn shows_progress(&self) -> bool {
        self.destinations[Stream::Stdout as usize].terminal
    }

    /// False while a rank's stream should be left unread, because its reader or its disk is slower than the rank.
    pub fn has_room(&self, rank: u32, stream: Stream) -> bool {
        let shown = !self.options.shows(rank) || !self.destinations[stream as usize].sink.is_behind();
        shown && self.logs.as_ref().is_none_or(|logs| logs.has_room() || !logs.is_open(rank))
    }

    /// False once the reader of a rank's stream has left and no log takes its place.
    pub fn is_wanted(&self, rank: u32, stream: Stream) -> bool {
        let failure = self.destinations[stream as usize].sink.failure();
        let seen = !self.options.shows(rank) || failure != Some(Errno::EPIPE);
        seen || self.logs.as_ref().is_some_and(|logs| logs.is_open(rank))
    }

    /// The streams that wait for room, to be polled for writing.
    pub fn waiting(&self) -> impl Iterator<Item = (Stream, BorrowedFd<'_>)> {
        let both = STREAMS.into_iter().zip(&self.destinations);
        both.filter(|(_, to)| to.sink.wants_room()).map(|(stream, to)| (stream, to.sink.as_fd()))
    }

    /// To be polled for reading: the logs want a [`tick`](Self::tick).
    pub fn log_bell(&self) -> Option<BorrowedFd<'_>> {
        self.logs.as_ref().map(Logs::fd)
    }

    /// When [`tick`](Self::tick) is due at the latest, so that no rank waits too long.
    pub fn next_deadline(&self) -> Option<Instant> {
        let streams = self.destinations.iter().filter_map(|to| to.sink.deadline());
        streams.chain(self.logs.as_ref().and_then(Logs::next_deadline)).min()
    }

    /// Goes on writing to a stream that has room again.
    pub fn resume(&mut self, stream: Stream) {
        self.destinations[stream as usize].sink.write_what_fits();
        self.tell_loss();
        if !self.destinations[stream as usize].sink.is_stuck() {
            self.tell_missed();
        }
    }

    /// Gives up readers and disks that were waited for long enough, and says what became of the logs. To be called
    /// in every turn of the event loop.
    pub fn tick(&mut self, now: Instant) {
        for to in &mut self.destinations {
            to.sink.expire(now);
        }
        for notice in self.logs.as_mut().map(|logs| logs.tick(now)).unwrap_or_default() {
            self.say(&notice);
        }
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
        let shows = self.options.shows(rank);
        let logs = self.logs.as_ref().is_some_and(|logs| logs.is_open(rank));
        let destination = &self.destinations[stream as usize];
        let (stamp, prefix) = (self.stamp(), self.prefix(rank, destination.color));
        let (mut shown, mut logged, mut lines) = (Vec::new(), Vec::new(), 0);
        let output = &mut self.ranks[rank as usize];
        for piece in pieces {
            match piece {
                Piece::Line(line) => {
                    lines += 1;
                    if shows {
                        extend(&mut shown, &[&stamp, &prefix, &line, destination.line_end()]);
                    }
                    if logs {
                        extend(&mut logged, &[&stamp, &line, b"\n"]);
                    }
                    if output.last.len() == LAST_LINES {
                        output.last.pop_front();
                    }
                    let kept = &line[..line.len().min(KEPT_OF_A_LINE)];
                    output.last.push_back([&stamp, &b"    "[..], kept].concat());
                }
                Piece::Transient(line) if destination.terminal && shows => {
                    extend(&mut shown, &[&stamp, &prefix, &line, CLEAR, b"\r"]);
                }
                Piece::Transient(_) => {}
            }
        }
        if let Some(logs) = &mut self.logs {
            logs.push(rank, &logged, lines);
        }
        if !shown.is_empty() {
            self.destinations[stream as usize].push(&shown, lines);
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

    /// Says how many lines were dropped since this was said last.
    fn tell_missed(&mut self) {
        let seconds = self.options.patience.as_secs_f64();
        for stream in STREAMS {
            let to = &mut self.destinations[stream as usize];
            let missed = std::mem::take(&mut to.missed);
            // Nobody misses what nobody is left to read.
            if missed > 0 && to.sink.failure() != Some(Errno::EPIPE) {
                let name = stream.name();
                self.write_own(&format!(
                    "{missed} lines of {name} are not shown: nobody took any for {seconds} s"
                ));
            }
        }
    }

    /// The time, to be put in front of lines if that is asked for.
    fn stamp(&self) -> Vec<u8> {
        match self.options.timestamps {
            true => format!("{} ", humantime::format_rfc3339_millis(SystemTime::now())).into_bytes(),
            false => Vec::new(),
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
        // Where lines are missing before it, that comes first.
        self.tell_missed();
        self.write_own(text);
    }

    fn write_own(&mut self, text: &str) {
        let stamp = self.stamp();
        let destination = &mut self.destinations[Stream::Stderr as usize];
        let line = [&stamp[..], b"mgpurun: ", text.as_bytes(), destination.line_end()].concat();
        destination.sink.push_important(&line);
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
            let line = [&line[..], destination.line_end()].concat();
            destination.sink.push_important(&line);
        }
    }

    /// No rank writes any more. [`tick`](Self::tick) is due until nothing [is pending](Self::is_pending).
    pub fn close(&mut self) {
        if let Some(logs) = &mut self.logs {
            logs.close();
        }
    }

    /// True while something waits for a reader or a disk.
    pub fn is_pending(&self) -> bool {
        self.destinations.iter().any(|to| to.sink.has_rest())
            || self.logs.as_ref().is_some_and(Logs::is_pending)
    }

    /// Gives up what the logs have not taken yet, and says so.
    pub fn abandon_logs(&mut self) {
        for notice in self.logs.as_mut().map(Logs::abandon).unwrap_or_default() {
            self.say(&notice);
        }
    }
}

fn extend(bytes: &mut Vec<u8>, parts: &[&[u8]]) {
    for part in parts {
        bytes.extend_from_slice(part);
    }
}

#[cfg(test)]
mod tests;
