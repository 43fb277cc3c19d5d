//! One of this process's own streams, with what is known of whoever reads it.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::time::Duration;

use super::options::Color;
use super::sink::Sink;

/// Clears the rest of a terminal's line.
pub(super) const CLEAR: &[u8] = b"\x1b[K";

/// Standard output or error.
pub(super) struct Destination {
    pub(super) sink: Sink,
    /// A terminal, which shows transient lines.
    pub(super) terminal: bool,
    pub(super) color: bool,
    /// Lines that were dropped and not told of yet.
    pub(super) missed: u64,
}

impl Destination {
    pub(super) fn new(stream: impl AsFd + IsTerminal + 'static, color: Color, patience: Duration) -> Self {
        let terminal = stream.is_terminal();
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let color = match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => terminal && !plain,
        };
        Destination { sink: Sink::new(stream, terminal, patience), terminal, color, missed: 0 }
    }

    /// The end of a line. On a terminal a transient line may be under it.
    pub(super) fn line_end(&self) -> &'static [u8] {
        if self.terminal { b"\x1b[K\n" } else { b"\n" }
    }

    /// Passes whole lines on, or counts them.
    pub(super) fn push(&mut self, bytes: &[u8], lines: u64) {
        if !self.sink.push(bytes) {
            self.missed += lines;
        }
    }
}
