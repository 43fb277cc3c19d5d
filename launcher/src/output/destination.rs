//! Standard output or error of this process, with the properties of its terminal.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::time::Duration;

use super::options::{Color, OutputOptions};
use super::sink::Sink;

/// How to erase the rest of a transient line that the next line overwrites.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Erase {
    /// Nothing to erase: it is not a terminal.
    Nothing,
    /// To the end of the row.
    Row,
    /// To the end of the screen: the terminal has become narrower and has wrapped the line to two rows.
    Screen,
}

impl Erase {
    /// The escape sequence.
    pub(super) fn sequence(self) -> &'static [u8] {
        match self {
            Erase::Nothing => b"",
            Erase::Row => b"\x1b[K",
            Erase::Screen => b"\x1b[J",
        }
    }

    /// The end of a line.
    pub(super) fn line_end(self) -> &'static [u8] {
        match self {
            Erase::Nothing => b"\n",
            Erase::Row => b"\x1b[K\n",
            Erase::Screen => b"\x1b[J\n",
        }
    }
}

/// Standard output or error.
pub(super) struct Destination {
    pub(super) sink: Sink,
    /// It is a terminal that shows transient lines.
    pub(super) terminal: bool,
    pub(super) color: bool,
    /// Dropped lines that were not reported yet.
    pub(super) missed: u64,
    /// Width of the terminal at the last query.
    columns: usize,
}

impl Destination {
    /// This process's standard output and standard error.
    pub(super) fn standard(options: &OutputOptions) -> [Self; 2] {
        let (color, timeout) = (options.color, options.stall_timeout());
        [Destination::new(io::stdout(), color, timeout), Destination::new(io::stderr(), color, timeout)]
    }

    pub(super) fn new(
        stream: impl AsFd + IsTerminal + 'static,
        color: Color,
        stall_timeout: Duration,
    ) -> Self {
        let is_terminal = stream.is_terminal();
        // Open MPI gives its ranks a pseudo-terminal and forwards what it reads from it.
        let terminal = is_terminal && std::env::var_os("OMPI_COMM_WORLD_RANK").is_none();
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let color = match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => terminal && !plain,
        };
        Destination {
            sink: Sink::new(stream, is_terminal, stall_timeout),
            terminal,
            color,
            missed: 0,
            columns: 0,
        }
    }

    /// Maximum width of a transient line. The last column stays free: after it the cursor may already be in the next row.
    pub(super) fn columns(&self) -> usize {
        self.columns - 1
    }

    /// Queries the width of the terminal, and returns how to erase what the next line overwrites.
    pub(super) fn measure(&mut self) -> Erase {
        if !self.terminal {
            return Erase::Nothing;
        }
        // The launcher gets no SIGWINCH: it is not in the foreground process group.
        let width = terminal_size::terminal_size_of(&self.sink).map(|(width, _)| usize::from(width.0));
        let columns = width.unwrap_or(usize::MAX);
        if columns < std::mem::replace(&mut self.columns, columns) { Erase::Screen } else { Erase::Row }
    }
}
