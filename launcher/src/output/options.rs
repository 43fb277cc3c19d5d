//! Options of the output.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::Stream;
use super::streams::StreamChoice;
use crate::ranks::RankSet;

/// When to colour the prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Color {
    /// On a terminal, unless `NO_COLOR` is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// How output is shown and logged.
#[derive(Debug, Clone)]
pub struct OutputOptions {
    /// Pass bytes on unchanged as they arrive, to logs, too. Nothing is put in front of them and no byte is ever
    /// dropped: if a reader or a disk stalls, ranks wait without a limit.
    pub raw: bool,
    /// Put `[rank] ` in front of each line.
    pub prefix: bool,
    /// Put the time in front of each line, in logs too.
    pub timestamps: bool,
    /// When to colour the prefix.
    pub color: Color,
    /// Write each rank's output to a file in this folder instead of showing it.
    pub log_dir: Option<PathBuf>,
    /// Show the output that is logged, too.
    pub tee: bool,
    /// Log and show each stream as chosen here, instead of all of them alike. Logged streams have a file each, in
    /// `log_dir`.
    pub streams: Option<StreamChoice>,
    /// The ranks whose output is shown; `None`: all.
    pub filter: Option<RankSet>,
    /// The local ranks whose output is shown; `None`: all.
    pub local_filter: Option<RankSet>,
    /// Append the [`Event`](crate::events::Event)s of the run to this file.
    pub events: Option<PathBuf>,
    /// How long ranks wait for a terminal, a pipe or a disk that accepts nothing at all; then lines are dropped.
    pub stall_timeout: Duration,
}

impl Default for OutputOptions {
    fn default() -> Self {
        OutputOptions {
            raw: false,
            prefix: true,
            timestamps: false,
            color: Color::Auto,
            log_dir: None,
            tee: false,
            streams: None,
            filter: None,
            local_filter: None,
            events: None,
            stall_timeout: Duration::from_secs(30),
        }
    }
}

impl OutputOptions {
    /// The effective stall timeout.
    pub(super) fn stall_timeout(&self) -> Duration {
        if self.raw { Duration::MAX } else { self.stall_timeout }
    }

    /// True if a rank's stream goes to standard output or error.
    pub(super) fn shows(&self, rank: u32, local_rank: u32, stream: Stream) -> bool {
        let is_in = |ranks: &Option<RankSet>, rank| ranks.as_ref().is_none_or(|ranks| ranks.contains(rank));
        let terminal = match &self.streams {
            Some(streams) => streams.shows(local_rank, stream),
            None => self.log_dir.is_none() || self.tee,
        };
        terminal && is_in(&self.filter, rank) && is_in(&self.local_filter, local_rank)
    }
}

/// A log file could not be created.
#[derive(thiserror::Error)]
#[error("cannot write the log {}: {error}", path.display())]
pub struct LogError {
    /// The file.
    pub path: PathBuf,
    /// The system's error.
    pub error: io::Error,
}

/// Same text as [`Display`](fmt::Display): `main` prints the error that it returns by its `Debug` text.
impl fmt::Debug for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
