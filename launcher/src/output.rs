//! The ranks' output: complete lines, each with its rank in front.
//!
//! A line is passed on when it is complete, so lines of different ranks are never interleaved within a line. Text that
//! ends in a carriage return is transient, such as a progress line: on a terminal it is shown, cut to the terminal's
//! width, and overwritten by the next one; elsewhere it is dropped, unless it is the last text that a rank writes. With
//! [`OutputOptions::raw`] bytes are passed on unchanged.
//!
//! Nothing here blocks. A slow reader (`sink`) or a slow disk (`logs`) slows the ranks down. If it accepts nothing at
//! all for the stall timeout (`stall`), lines are dropped, counted and reported. On a full disk, too, lines are lost
//! but the run continues. When the reader has exited, as `head` does, the ranks find their pipes closed as they would
//! without a launcher, unless their output is also logged: a user who wants the run to outlive the reader asks for a
//! log.
//!
//! A launch may have several worlds, one for each job. The output numbers the ranks of all jobs consecutively; how a
//! rank is called in prefixes, messages and file names is in `name`.
//!
//! Memory per rank: one incomplete line of each stream, at most 1 MiB, and the last lines.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Instant, SystemTime};

use memchr::memchr_iter;
use nix::errno::Errno;

mod destination;
mod formatter;
mod lines;
mod logs;
mod name;
mod options;
mod prefix;
mod sink;
mod stall;
mod streams;
mod tails;
mod width;

use crate::error_file::RecordedError;
use crate::writer::Start;
use destination::Destination;
use formatter::LineFormatter;
pub use lines::{LineSplitter, Piece};
use logs::Logs;
pub(crate) use name::RankName;
pub use options::{Color, LogError, OutputOptions};
use prefix::prefix;
use sink::Sink;
pub use streams::{StreamChoice, StreamMap};
pub(crate) use tails::TailReader;
use tails::Tails;

/// Which of a rank's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Both streams, in the order of arrays indexed by stream.
pub(crate) const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

impl Stream {
    fn name(self) -> &'static str {
        match self {
            Stream::Stdout => "standard output",
            Stream::Stderr => "standard error",
        }
    }
}

/// The state of one rank's output.
#[derive(Debug, Default)]
struct RankOutput {
    name: RankName,
    /// Its number on this host.
    local_rank: u32,
    splitters: [LineSplitter; 2],
    last: VecDeque<Vec<u8>>,
}

/// The output of all ranks and of the launcher.
pub struct Output {
    options: OutputOptions,
    destinations: [Destination; 2],
    /// Both destinations are the same file, as after `2>&1`: they share one queue, so that a line of one is not
    /// inserted into a line of the other.
    same_target: bool,
    ranks: Vec<RankOutput>,
    logs: Option<Logs>,
    /// The last lines for `mgpurun top`.
    tails: Option<Tails>,
    width: usize,
    /// The loss of standard output was reported.
    reported_loss: bool,
    /// The ranks' output is not shown any more.
    muted: bool,
}

impl Output {
    /// The output of the ranks of all jobs, given the number of ranks of each, to this process's standard output and
    /// error.
    ///
    /// # Errors
    /// If a log file cannot be created.
    pub fn new(jobs: &[u32], options: OutputOptions) -> Result<Self, LogError> {
        let mut output = Output::to(Destination::standard(&options), jobs, options)?;
        output.tails = Tails::create(0, output.ranks.len() as u32);
        Ok(output)
    }

    /// The output of `ranks` ranks of a node, whose numbers [`set_ranks`](Self::set_ranks) gives later.
    ///
    /// # Errors
    /// If the folder of the logs cannot be created.
    pub(crate) fn of_node(ranks: u32, options: OutputOptions) -> Result<Self, LogError> {
        let mut output = Output::to(Destination::standard(&options), &[], options)?;
        output.tails = Tails::create(0, ranks);
        Ok(output)
    }

    fn to(destinations: [Destination; 2], jobs: &[u32], options: OutputOptions) -> Result<Self, LogError> {
        let names = RankName::of(jobs).into_iter().map(|name| (name, name.rank)).collect();
        let (logs, width, ranks) = prepare(names, &options, Start::Empty)?;
        let same_target = destinations[0].sink.is_same_as(&destinations[1].sink);
        Ok(Output {
            options,
            destinations,
            same_target,
            ranks,
            logs,
            tails: None,
            width,
            reported_loss: false,
            muted: false,
        })
    }

    /// The output of `ranks` ranks of one job from now on, of which the first is `first` of its world. The ranks on a host
    /// of several are known only when all nodes have joined, and may change with a restart: then another node may have written
    /// to the same files before, and `logs` says whether they are kept.
    ///
    /// # Errors
    /// If a log file cannot be created.
    pub(crate) fn set_ranks(&mut self, first: u32, ranks: u32, logs: Start) -> Result<(), LogError> {
        let names = (0..ranks).map(|local| (RankName { job: None, rank: first + local }, local));
        let names: Vec<(RankName, u32)> = names.collect();
        if self.ranks.iter().map(|output| output.name).eq(names.iter().map(|(name, _)| *name)) {
            return Ok(());
        }
        (self.logs, self.width, self.ranks) = prepare(names, &self.options, logs)?;
        if let Some(tails) = &mut self.tails {
            tails.set_ranks(first, ranks);
        }
        Ok(())
    }

    /// True if progress lines are shown.
    pub fn shows_progress(&self) -> bool {
        self.destinations[Stream::Stdout as usize].terminal && !self.options.raw
    }

    fn sink(&self, stream: Stream) -> &Sink {
        &self.destinations[if self.same_target { 0 } else { stream as usize }].sink
    }

    fn sink_mut(&mut self, stream: Stream) -> &mut Sink {
        &mut self.destinations[if self.same_target { 0 } else { stream as usize }].sink
    }

    /// False while a rank's stream should not be read, because the reader or the disk is slower than the rank.
    pub fn has_room(&self, rank: u32, stream: Stream) -> bool {
        let shown = !self.is_selected(rank, stream) || !self.sink(stream).is_behind();
        shown && self.logs.as_ref().is_none_or(|logs| logs.has_room() || !logs.is_open(rank, stream))
    }

    /// False once the reader of a rank's stream has exited and the stream is not logged.
    pub fn is_wanted(&self, rank: u32, stream: Stream) -> bool {
        let seen = !self.is_selected(rank, stream) || self.sink(stream).failure() != Some(Errno::EPIPE);
        seen || self.logs.as_ref().is_some_and(|logs| logs.is_open(rank, stream))
    }

    /// The streams with pending output, to be polled for writing.
    pub fn waiting(&self) -> impl Iterator<Item = (Stream, BorrowedFd<'_>)> {
        let both = STREAMS.into_iter().zip(&self.destinations);
        both.filter(|(_, to)| to.sink.wants_room()).map(|(stream, to)| (stream, to.sink.as_fd()))
    }

    /// The descriptor to poll for reading: the logs need a [`tick`](Self::tick).
    pub fn log_bell(&self) -> Option<BorrowedFd<'_>> {
        self.logs.as_ref().map(Logs::fd)
    }

    /// When the next [`tick`](Self::tick) is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        let streams = self.destinations.iter().filter_map(|to| to.sink.deadline());
        let tails = self.tails.as_ref().and_then(Tails::next_deadline);
        streams.chain(self.logs.as_ref().and_then(Logs::next_deadline)).chain(tails).min()
    }

    /// Continues to write to a stream that is writable again.
    pub fn resume(&mut self, stream: Stream) {
        self.sink_mut(stream).write_what_fits();
        self.report_loss();
        if !self.sink(stream).is_stalled() {
            self.report_missed();
        }
    }

    /// Handles stall timeouts of readers and disks, writes last lines that are due, and reports problems of the logs. To be called in every iteration
    /// of the event loop.
    pub fn tick(&mut self, now: Instant) {
        for to in &mut self.destinations {
            to.sink.expire(now);
        }
        if let Some(tails) = &mut self.tails {
            for rank in tails.due(now) {
                tails.note(rank, &self.ranks[rank as usize].last, now);
            }
        }
        for notice in self.logs.as_mut().map(|logs| logs.tick(now)).unwrap_or_default() {
            self.say(&notice);
        }
    }

    /// Stops showing the ranks' output; logging continues.
    pub fn mute(&mut self) {
        self.muted = true;
    }

    /// True after [`mute`](Self::mute).
    pub fn is_muted(&self) -> bool {
        self.muted
    }

    /// Processes bytes that a rank has written.
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

    /// Processes the end of a rank's stream.
    pub fn finish(&mut self, rank: u32, stream: Stream) {
        if let Some(rest) = self.ranks[rank as usize].splitters[stream as usize].finish() {
            let mut formatter = self.formatter(rank, stream);
            formatter.take(Piece::Line(&rest));
            self.finish_lines(rank, stream, formatter);
        }
    }

    fn formatter(&mut self, rank: u32, stream: Stream) -> LineFormatter {
        let destination = &mut self.destinations[stream as usize];
        let (erase, color, name) = (destination.measure(), destination.color, self.ranks[rank as usize].name);
        LineFormatter {
            erase,
            columns: destination.terminal.then(|| destination.columns()),
            prefix: match self.options.prefix {
                true => prefix(&name.short(), rank, self.width, color),
                false => Vec::new(),
            },
            stamp: self.stamp(),
            shown: self.shows(rank, stream).then(Vec::new),
            logged: self.logs.as_ref().filter(|logs| logs.is_open(rank, stream)).map(|_| Vec::new()),
            last: std::mem::take(&mut self.ranks[rank as usize].last),
            lines: 0,
        }
    }

    fn finish_lines(&mut self, rank: u32, stream: Stream, formatter: LineFormatter) {
        self.ranks[rank as usize].last = formatter.last;
        if let Some(tails) = self.tails.as_mut().filter(|_| formatter.lines > 0) {
            tails.note(rank, &self.ranks[rank as usize].last, Instant::now());
        }
        let (shown, logged) = (formatter.shown.unwrap_or_default(), formatter.logged.unwrap_or_default());
        self.pass_on(rank, stream, &shown, &logged, formatter.lines);
    }

    fn is_selected(&self, rank: u32, stream: Stream) -> bool {
        let RankOutput { name, local_rank, .. } = &self.ranks[rank as usize];
        self.options.shows(name.rank, *local_rank, stream)
    }

    fn shows(&self, rank: u32, stream: Stream) -> bool {
        self.is_selected(rank, stream) && !self.muted
    }

    /// Writes a rank's `shown` bytes to its stream and its `logged` bytes to its log.
    fn pass_on(&mut self, rank: u32, stream: Stream, shown: &[u8], logged: &[u8], lines: u64) {
        if let Some(logs) = &mut self.logs {
            logs.push(rank, stream, logged, lines);
        }
        if self.shows(rank, stream) && !shown.is_empty() {
            if !self.sink_mut(stream).push(shown) {
                self.destinations[stream as usize].missed += lines;
            }
            self.report_loss();
        }
    }

    /// True if bytes of raw output were lost.
    pub fn is_incomplete(&self) -> bool {
        let is_lost = |stream| self.sink(stream).failure().is_some_and(|errno| errno != Errno::EPIPE);
        self.options.raw && STREAMS.into_iter().any(is_lost)
    }

    /// Reports once that writing to standard output fails, unless its reader has exited, as `head` does.
    fn report_loss(&mut self) {
        let failure = self.sink(Stream::Stdout).failure();
        if let Some(errno) = failure.filter(|errno| *errno != Errno::EPIPE)
            && !std::mem::replace(&mut self.reported_loss, true)
        {
            self.say(&format!("standard output is lost from here on: {}; the run continues", errno.desc()));
        }
    }

    /// Reports how many lines were dropped since the last report.
    fn report_missed(&mut self) {
        let seconds = self.options.stall_timeout.as_secs_f64();
        for stream in STREAMS {
            let missed = std::mem::take(&mut self.destinations[stream as usize].missed);
            // Not reported if the reader has exited.
            if missed > 0 && self.sink(stream).failure() != Some(Errno::EPIPE) {
                let name = stream.name();
                self.write_own(&format!(
                    "{missed} lines of {name} were dropped: the reader accepted nothing for {seconds} s"
                ));
            }
        }
    }

    /// The timestamp in front of lines; empty unless requested.
    fn stamp(&self) -> Vec<u8> {
        match self.options.timestamps {
            true => format!("{} ", humantime::format_rfc3339_millis(SystemTime::now())).into_bytes(),
            false => Vec::new(),
        }
    }

    /// Writes a line of the launcher itself to standard error.
    pub fn say(&mut self, text: &str) {
        // Dropped lines before it are reported first.
        self.report_missed();
        self.write_own(text);
    }

    fn write_own(&mut self, text: &str) {
        let stamp = self.stamp();
        let end = self.destinations[Stream::Stderr as usize].measure().line_end();
        let line = [&stamp[..], b"mgpurun: ", text.as_bytes(), end].concat();
        self.sink_mut(Stream::Stderr).push_important(&line);
    }

    /// The last lines of a rank as they were shown, at most `most`, each cut to `bytes` bytes.
    pub(crate) fn last_lines(&self, rank: u32, most: usize, bytes: usize) -> Vec<String> {
        let last = &self.ranks[rank as usize].last;
        let text = |line: &Vec<u8>| String::from_utf8_lossy(&line[..line.len().min(bytes)]).into_owned();
        last.iter().skip(last.len().saturating_sub(most)).map(text).collect()
    }

    /// Shows the last lines of a rank whose output another node has, unless output is raw.
    pub(crate) fn repeat_lines(&mut self, name: &str, lines: &[String]) {
        if self.options.raw {
            return;
        }
        self.say(&format!("the last lines of {name}:"));
        let end = self.destinations[Stream::Stderr as usize].measure().line_end();
        for line in lines {
            // The bytes come from another host: only what a line may contain.
            let line: String =
                line.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect();
            self.sink_mut(Stream::Stderr).push_important(&[line.as_bytes(), end].concat());
        }
    }

    /// Shows why a rank has failed, unless output is raw: the error that has ended it, or else its last lines, and below
    /// them an error that it had recorded before.
    pub(crate) fn show_cause(&mut self, rank: u32, error: Option<&RecordedError>) {
        let name = self.ranks[rank as usize].name;
        match error {
            Some(error) if error.has_ended_it => {
                self.show_error(&format!("the error of {name}:"), &error.lines);
            }
            Some(error) => {
                self.repeat_last_lines(rank);
                let seconds = error.age.as_secs();
                let text = format!("an error that {name} had recorded {seconds} s before it ended:");
                self.show_error(&text, &error.lines);
            }
            None => self.repeat_last_lines(rank),
        }
    }

    /// Shows lines without control characters but tabs, below a title.
    fn show_error(&mut self, title: &str, lines: &[String]) {
        if self.options.raw {
            return;
        }
        self.say(title);
        let end = self.destinations[Stream::Stderr as usize].measure().line_end();
        for line in lines {
            self.sink_mut(Stream::Stderr).push_important(&[b"    ", line.as_bytes(), end].concat());
        }
    }

    /// Repeats the last lines of a rank on standard error, unless output is raw.
    pub fn repeat_last_lines(&mut self, rank: u32) {
        if self.options.raw {
            return;
        }
        let RankOutput { name, last, .. } = &mut self.ranks[rank as usize];
        let (name, last) = (*name, std::mem::take(last));
        if last.is_empty() {
            return self.say(&format!("{name} has written nothing"));
        }
        self.say(&format!("the last lines of {name}:"));
        let end = self.destinations[Stream::Stderr as usize].measure().line_end();
        for line in last {
            self.sink_mut(Stream::Stderr).push_important(&[&line[..], end].concat());
        }
    }

    /// Ends the output: no rank writes any more. Call [`tick`](Self::tick) until nothing [is pending](Self::is_pending).
    pub fn close(&mut self) {
        if let Some(logs) = &mut self.logs {
            logs.close();
        }
    }

    /// True while output waits for a reader or a disk.
    pub fn is_pending(&self) -> bool {
        self.destinations.iter().any(|to| to.sink.has_pending())
            || self.logs.as_ref().is_some_and(Logs::is_pending)
    }

    /// Drops log data that is not written yet, and reports it.
    pub fn abandon_logs(&mut self) {
        for notice in self.logs.as_mut().map(Logs::abandon).unwrap_or_default() {
            self.say(&notice);
        }
    }
}

/// The logs, the width of the names and the state of ranks with these names and numbers on this host.
fn prepare(
    names: Vec<(RankName, u32)>,
    options: &OutputOptions,
    start: Start,
) -> Result<(Option<Logs>, usize, Vec<RankOutput>), LogError> {
    let streams = options.streams.as_ref();
    let create = |folder| Logs::create(folder, &names, streams, start, options.stall_timeout());
    let folder = options.log_dir.as_deref().filter(|_| streams.is_none_or(StreamChoice::logs_any));
    let logs = folder.map(create).transpose()?;
    let width = names.iter().map(|(name, _)| name.short().len()).max().unwrap_or(0);
    let rank = |(name, local_rank)| RankOutput { name, local_rank, ..RankOutput::default() };
    Ok((logs, width, names.into_iter().map(rank).collect()))
}

#[cfg(test)]
mod tests;
