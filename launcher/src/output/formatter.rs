//! Formats the lines that one read of a rank's stream has completed, for the terminal, the log and the last lines.

use std::collections::VecDeque;

use super::destination::Erase;
use super::lines::Piece;
use super::width::cut;

/// Number of last lines of each rank that are kept, to be repeated if it is the culprit.
const LAST_LINES: usize = 10;
/// Maximum number of bytes kept of each of these lines.
const MAX_KEPT_BYTES: usize = 4096;

/// Formats lines of one stream of a rank.
pub(super) struct LineFormatter {
    /// The timestamp; empty unless requested.
    pub(super) stamp: Vec<u8>,
    pub(super) prefix: Vec<u8>,
    /// How to erase the transient line that a shown line overwrites.
    pub(super) erase: Erase,
    /// Maximum width of transient lines; `None` if they are not shown.
    pub(super) columns: Option<usize>,
    /// Bytes to show; `None` if the rank is not shown.
    pub(super) shown: Option<Vec<u8>>,
    /// Bytes to log; `None` if the rank is not logged.
    pub(super) logged: Option<Vec<u8>>,
    /// The last lines of the rank.
    pub(super) last: VecDeque<Vec<u8>>,
    /// Number of lines, without transient ones.
    pub(super) lines: u64,
}

impl LineFormatter {
    pub(super) fn take(&mut self, piece: Piece<'_>) {
        match piece {
            Piece::Line(line) => self.take_line(line),
            Piece::Transient(line) => {
                if let (Some(shown), Some(columns)) = (&mut self.shown, self.columns) {
                    let whole = [&self.stamp, &self.prefix, line].concat();
                    extend(shown, &[&cut(&whole, columns), self.erase.sequence(), b"\r"]);
                }
            }
        }
    }

    fn take_line(&mut self, line: &[u8]) {
        self.lines += 1;
        if let Some(shown) = &mut self.shown {
            extend(shown, &[&self.stamp, &self.prefix, line, self.erase.line_end()]);
        }
        if let Some(logged) = &mut self.logged {
            extend(logged, &[&self.stamp, line, b"\n"]);
        }
        let is_full = self.last.len() == LAST_LINES;
        // Reuses its memory.
        let mut kept = if is_full { self.last.pop_front() } else { None }.unwrap_or_default();
        kept.clear();
        extend(&mut kept, &[&self.stamp, b"    ", &line[..line.len().min(MAX_KEPT_BYTES)]]);
        self.last.push_back(kept);
    }
}

fn extend(bytes: &mut Vec<u8>, parts: &[&[u8]]) {
    for part in parts {
        bytes.extend_from_slice(part);
    }
}
