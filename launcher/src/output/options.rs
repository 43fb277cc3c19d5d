//! What may be asked of the output.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

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

/// How output is passed on, and what is written down of the run.
#[derive(Debug, Clone)]
pub struct OutputOptions {
    /// Pass bytes on as they are and when they come, to logs too. Nothing is put in front of them, and no byte is ever
    /// dropped: ranks wait for a reader or a disk that takes nothing for as long as it does.
    pub raw: bool,
    /// Put `[rank] ` in front of each line.
    pub prefix: bool,
    /// Put the time in front of each line, in logs too.
    pub timestamps: bool,
    /// Colour the prefix.
    pub color: Color,
    /// Write each rank's output to a file in this folder instead of showing it.
    pub log_dir: Option<PathBuf>,
    /// Show what is logged too.
    pub tee: bool,
    /// The ranks that are shown, all if `None`.
    pub filter: Option<RankSet>,
    /// Append what happens to the ranks to this file, as [`Event`](crate::events::Event)s.
    pub events: Option<PathBuf>,
    /// How long ranks wait for a terminal, a pipe or a disk that takes nothing at all; then lines are dropped.
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
            filter: None,
            events: None,
            stall_timeout: Duration::from_secs(30),
        }
    }
}

impl OutputOptions {
    /// How long ranks wait for whoever takes nothing.
    pub(super) fn stall_timeout(&self) -> Duration {
        if self.raw { Duration::MAX } else { self.stall_timeout }
    }

    /// True if a rank's output goes to standard output and error.
    pub(super) fn shows(&self, rank: u32) -> bool {
        let terminal = self.log_dir.is_none() || self.tee;
        terminal && self.filter.as_ref().is_none_or(|ranks| ranks.contains(rank))
    }
}

/// Why there is no log.
#[derive(thiserror::Error)]
#[error("cannot write the log {}: {error}", path.display())]
pub struct LogError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub error: io::Error,
}

/// As [`Display`](fmt::Display): `main` shows an error that it returns in this way.
impl fmt::Debug for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
