//! One of this process's own streams, with what is known of whoever reads it.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::time::Duration;

use super::options::Color;
use super::sink::Sink;

/// How the rest of a transient line is erased that is on the screen where something else is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Erase {
    /// There is no terminal.
    Nothing,
    /// To the end of the row.
    Row,
    /// To the end of the screen: the terminal has become narrower, and has put the line on two rows.
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
    /// A terminal, which shows transient lines.
    pub(super) terminal: bool,
    pub(super) color: bool,
    /// Lines that were dropped and not told of yet.
    pub(super) missed: u64,
    /// Columns of the terminal when it was asked last.
    columns: usize,
}

impl Destination {
    pub(super) fn new(
        stream: impl AsFd + IsTerminal + 'static,
        color: Color,
        stall_timeout: Duration,
    ) -> Self {
        let is_terminal = stream.is_terminal();
        // Open MPI gives its ranks a terminal too: it reads there what it then writes elsewhere.
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

    /// Columns that a transient line may have. The last one stays free: a cursor behind it may already be in the next
    /// row.
    pub(super) fn columns(&self) -> usize {
        self.columns - 1
    }

    /// Asks for the width of the terminal, and says how to erase what may be under the next line.
    pub(super) fn measure(&mut self) -> Erase {
        if !self.terminal {
            return Erase::Nothing;
        }
        // A launcher gets no signal about it: it is not in the foreground.
        let width = terminal_size::terminal_size_of(&self.sink).map(|(width, _)| usize::from(width.0));
        let columns = width.unwrap_or(usize::MAX);
        if columns < std::mem::replace(&mut self.columns, columns) { Erase::Screen } else { Erase::Row }
    }
}
