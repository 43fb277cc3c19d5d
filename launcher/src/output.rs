//! The ranks' output: whole lines, each with its rank in front.
//!
//! A line is passed on when it is complete, so that lines of different ranks are never cut into each other. What
//! ends in a carriage return is transient, a progress line: shown on a terminal, cut to its width, where the next one
//! overwrites it, and dropped elsewhere, unless it is the last thing a rank writes. With [`OutputOptions::raw`] bytes
//! are passed on as they are.
//!
//! Nothing here blocks: a reader that is slow slows the ranks down (`sink`), and so does a slow disk (`logs`). One that
//! takes nothing at all for the time of the `stall_timeout` costs lines, which are counted and told of, and so does a full
//! disk: lines, not the run. When the reader has left, as `head` does, the ranks find their pipes closed as they would
//! without a launcher, unless their output goes to a log as well: whoever wants a run to outlive its reader asks for
//! one.
//!
//! What is held in memory for a rank: of each stream one line that is not complete, at most 1 MiB, and its last lines.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Instant, SystemTime};

use memchr::memchr_iter;
use nix::errno::Errno;

mod destination;
mod formatter;
mod lines;
mod logs;
mod options;
mod prefix;
mod sink;
mod stall;
mod width;

use destination::Destination;
use formatter::LineFormatter;
pub use lines::{LineSplitter, Piece};
use logs::Logs;
pub use options::{Color, LogError, OutputOptions};
use prefix::prefix;
use sink::Sink;

/// Which of a rank's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Both, in the order in which they are kept.
pub(crate) const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

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
    /// Both go to the same place, as after `2>&1`: there is one queue for them, so that a line of one does not come
    /// into the midst of a line of the other.
    same_target: bool,
    ranks: Vec<RankOutput>,
    logs: Option<Logs>,
    width: usize,
    /// It was said that standard output is lost.
    reported_loss: bool,
    /// Nothing of the ranks is shown any more.
    muted: bool,
}

impl Output {
    /// For `ranks` ranks, to this process's standard output and error.
    ///
    /// # Errors
    /// If a log file cannot be made.
    pub fn new(ranks: u32, options: OutputOptions) -> Result<Self, LogError> {
        let destinations = [
            Destination::new(io::stdout(), options.color, options.stall_timeout()),
            Destination::new(io::stderr(), options.color, options.stall_timeout()),
        ];
        Output::to(destinations, ranks, options)
    }

    fn to(destinations: [Destination; 2], ranks: u32, options: OutputOptions) -> Result<Self, LogError> {
        let create = |folder| Logs::create(folder, ranks, options.stall_timeout());
        let logs = options.log_dir.as_deref().map(create).transpose()?;
        let width = ranks.saturating_sub(1).to_string().len();
        let ranks = (0..ranks).map(|_| RankOutput::default()).collect();
        let same_target = destinations[0].sink.is_same_as(&destinations[1].sink);
        Ok(Output {
            options,
            destinations,
            same_target,
            ranks,
            logs,
            width,
            reported_loss: false,
            muted: false,
        })
    }

    /// True if transient lines are shown.
    pub fn shows_progress(&self) -> bool {
        self.destinations[Stream::Stdout as usize].terminal && !self.options.raw
    }

    fn sink(&self, stream: Stream) -> &Sink {
        &self.destinations[if self.same_target { 0 } else { stream as usize }].sink
    }

    fn sink_mut(&mut self, stream: Stream) -> &mut Sink {
        &mut self.destinations[if self.same_target { 0 } else { stream as usize }].sink
    }

    /// False while a rank's stream should be left unread, because its reader or its disk is slower than the rank.
    pub fn has_room(&self, rank: u32, stream: Stream) -> bool {
        let shown = !self.options.shows(rank) || !self.sink(stream).is_behind();
        shown && self.logs.as_ref().is_none_or(|logs| logs.has_room() || !logs.is_open(rank))
    }

    /// False once the reader of a rank's stream has left and no log takes its place.
    pub fn is_wanted(&self, rank: u32, stream: Stream) -> bool {
        let seen = !self.options.shows(rank) || self.sink(stream).failure() != Some(Errno::EPIPE);
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
        self.sink_mut(stream).write_what_fits();
        self.report_loss();
        if !self.sink(stream).is_stalled() {
            self.report_missed();
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

    /// From now on nothing of the ranks is shown any more; logs go on.
    pub fn mute(&mut self) {
        self.muted = true;
    }

    /// True once nothing of the ranks is shown any more.
    pub fn is_muted(&self) -> bool {
        self.muted
    }

    /// Takes what a rank has written.
    pub fn push(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        if self.options.raw {
            let newlines = memchr_iter(b'\n', bytes).count() as u64;
            return self.pass_on(rank, stream, bytes, bytes, newlines);
        }
        let mut splitter = std::mem::take(&mut self.ranks[rank as usize].splitters[stream as usize]);
        let mut formatter = self.formatter(rank, stream);
        splitter.push(bytes, |piece| formatter.take(piece));
        self.ranks[rank as usize].splitters[stream as usize] = splitter;
        self.finish_lines(rank, stream, formatter);
    }

    /// Takes the end of a rank's stream.
    pub fn finish(&mut self, rank: u32, stream: Stream) {
        if let Some(rest) = self.ranks[rank as usize].splitters[stream as usize].finish() {
            let mut formatter = self.formatter(rank, stream);
            formatter.take(Piece::Line(&rest));
            self.finish_lines(rank, stream, formatter);
        }
    }

    fn formatter(&mut self, rank: u32, stream: Stream) -> LineFormatter {
        let destination = &mut self.destinations[stream as usize];
        let (erase, color) = (destination.measure(), destination.color);
        LineFormatter {
            erase,
            columns: destination.terminal.then(|| destination.columns()),
            prefix: if self.options.prefix { prefix(rank, self.width, color) } else { Vec::new() },
            stamp: self.stamp(),
            shown: self.shows(rank).then(Vec::new),
            logged: self.logs.as_ref().filter(|logs| logs.is_open(rank)).map(|_| Vec::new()),
            last: std::mem::take(&mut self.ranks[rank as usize].last),
            lines: 0,
        }
    }

    fn finish_lines(&mut self, rank: u32, stream: Stream, formatter: LineFormatter) {
        self.ranks[rank as usize].last = formatter.last;
        let (shown, logged) = (formatter.shown.unwrap_or_default(), formatter.logged.unwrap_or_default());
        self.pass_on(rank, stream, &shown, &logged, formatter.lines);
    }

    fn shows(&self, rank: u32) -> bool {
        self.options.shows(rank) && !self.muted
    }

    /// Passes on what is shown and what is logged of a rank.
    fn pass_on(&mut self, rank: u32, stream: Stream, shown: &[u8], logged: &[u8], lines: u64) {
        if let Some(logs) = &mut self.logs {
            logs.push(rank, logged, lines);
        }
        if self.shows(rank) && !shown.is_empty() {
            if !self.sink_mut(stream).push(shown) {
                self.destinations[stream as usize].missed += lines;
            }
            self.report_loss();
        }
    }

    /// True if bytes were lost that should have come through as they were.
    pub fn is_incomplete(&self) -> bool {
        let is_lost = |stream| self.sink(stream).failure().is_some_and(|errno| errno != Errno::EPIPE);
        self.options.raw && STREAMS.into_iter().any(is_lost)
    }

    /// Says once that standard output takes no more, unless its reader just left, as `head` does.
    fn report_loss(&mut self) {
        let failure = self.sink(Stream::Stdout).failure();
        if let Some(errno) = failure.filter(|errno| *errno != Errno::EPIPE)
            && !std::mem::replace(&mut self.reported_loss, true)
        {
            self.say(&format!("standard output is lost from here on: {}; the run continues", errno.desc()));
        }
    }

    /// Says how many lines were dropped since this was said last.
    fn report_missed(&mut self) {
        let seconds = self.options.stall_timeout.as_secs_f64();
        for stream in STREAMS {
            let missed = std::mem::take(&mut self.destinations[stream as usize].missed);
            // Nobody misses what nobody is left to read.
            if missed > 0 && self.sink(stream).failure() != Some(Errno::EPIPE) {
                let name = stream.name();
                self.write_own(&format!(
                    "{missed} lines of {name} were dropped: the reader accepted nothing for {seconds} s"
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

    /// A line of the launcher's own, to standard error.
    pub fn say(&mut self, text: &str) {
        // Where lines are missing before it, that comes first.
        self.report_missed();
        self.write_own(text);
    }

    fn write_own(&mut self, text: &str) {
        let stamp = self.stamp();
        let end = self.destinations[Stream::Stderr as usize].measure().line_end();
        let line = [&stamp[..], b"mgpurun: ", text.as_bytes(), end].concat();
        self.sink_mut(Stream::Stderr).push_important(&line);
    }

    /// Repeats the last lines of a rank on standard error, if output passes in lines.
    pub fn repeat_last_lines(&mut self, rank: u32) {
        if self.options.raw {
            return;
        }
        let last = std::mem::take(&mut self.ranks[rank as usize].last);
        if last.is_empty() {
            return self.say(&format!("rank {rank} has written nothing"));
        }
        self.say(&format!("the last lines of rank {rank}:"));
        let end = self.destinations[Stream::Stderr as usize].measure().line_end();
        for line in last {
            self.sink_mut(Stream::Stderr).push_important(&[&line[..], end].concat());
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
        self.destinations.iter().any(|to| to.sink.has_pending())
            || self.logs.as_ref().is_some_and(Logs::is_pending)
    }

    /// Gives up what the logs have not taken yet, and says so.
    pub fn abandon_logs(&mut self) {
        for notice in self.logs.as_mut().map(Logs::abandon).unwrap_or_default() {
            self.say(&notice);
        }
    }
}

#[cfg(test)]
mod tests;
