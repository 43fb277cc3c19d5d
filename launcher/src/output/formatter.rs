//! What becomes of the lines that one read of a rank's stream has completed.

use std::collections::VecDeque;

use super::destination::Erase;
use super::lines::Piece;
use super::width::cut;

/// Lines of each rank that are kept, to be repeated if it is to blame.
const LAST_LINES: usize = 10;
/// Bytes kept of each of them.
const MAX_KEPT_BYTES: usize = 4096;

/// Lines of one stream of a rank on their way.
pub(super) struct LineFormatter {
    /// The time, if that is asked for.
    pub(super) stamp: Vec<u8>,
    pub(super) prefix: Vec<u8>,
    /// What may be under the first line that is shown.
    pub(super) erase: Erase,
    /// The width of transient lines; `None` if they are not shown.
    pub(super) columns: Option<usize>,
    /// What is to be shown, if anything.
    pub(super) shown: Option<Vec<u8>>,
    /// What is to be logged, if anything.
    pub(super) logged: Option<Vec<u8>>,
    /// The last lines of the rank.
    pub(super) last: VecDeque<Vec<u8>>,
    /// The number of lines, without transient ones.
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
        // Its memory serves once more.
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
