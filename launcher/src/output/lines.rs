//! Splits bytes into lines. Pure: no I/O.
//!
//! A rank's output arrives in chunks of arbitrary size. A line is complete at its line feed; carriage returns that no
//! line feed follows end a transient line, such as a progress bar. The last text that a rank writes is a line, however
//! it ends: nothing overwrites it, and before a crash it may be important.

use memchr::memchr2;

/// Maximum length of a line; longer lines are passed on in pieces.
const MAX_LINE: usize = 1 << 20;

/// A piece of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// A line, without its end.
    Line(&'a [u8]),
    /// A line that ended with a carriage return; not empty.
    Transient(&'a [u8]),
}

/// Assembles bytes into lines.
#[derive(Debug, Default)]
pub struct LineSplitter {
    /// The incomplete line.
    begun: Vec<u8>,
    /// A carriage return follows it; the next byte decides whether it is transient.
    returned: bool,
}

impl LineSplitter {
    /// Processes bytes and passes the completed pieces to `take`.
    pub fn push(&mut self, mut bytes: &[u8], mut take: impl FnMut(Piece<'_>)) {
        while let Some(first) = bytes.first() {
            // Carriage returns in front of a line feed belong to the end of the line.
            if self.returned && !is_end(*first) {
                self.returned = false;
                let line = std::mem::take(&mut self.begun);
                if !line.is_empty() {
                    take(Piece::Transient(&line));
                }
            }
            // Only the next byte tells whether a line of the maximum length is complete.
            if self.begun.len() == MAX_LINE && !is_end(*first) {
                take(Piece::Line(&std::mem::take(&mut self.begun)));
            }
            let room = bytes.len().min(MAX_LINE - self.begun.len());
            let (text, rest) = bytes.split_at(memchr2(b'\n', b'\r', &bytes[..room]).unwrap_or(room));
            let end = rest.first().copied().filter(|byte| is_end(*byte));
            bytes = if end.is_some() { &rest[1..] } else { rest };
            match end {
                Some(b'\n') if self.begun.is_empty() => take(Piece::Line(text)),
                Some(b'\n') => {
                    self.begun.extend_from_slice(text);
                    take(Piece::Line(&std::mem::take(&mut self.begun)));
                }
                _ => self.begun.extend_from_slice(text),
            }
            self.returned = end == Some(b'\r');
        }
    }

    /// The incomplete line at the end of the stream.
    pub fn finish(&mut self) -> Option<Vec<u8>> {
        self.returned = false;
        Some(std::mem::take(&mut self.begun)).filter(|rest| !rest.is_empty())
    }
}

fn is_end(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, PartialEq)]
    enum Owned {
        Line(Vec<u8>),
        Transient(Vec<u8>),
    }

    /// The pieces of `input` in chunks of `chunk` bytes.
    fn split(input: &[u8], chunk: usize) -> Vec<Owned> {
        let (mut splitter, mut pieces) = (LineSplitter::default(), Vec::new());
        for bytes in input.chunks(chunk) {
            splitter.push(bytes, |piece| {
                pieces.push(match piece {
                    Piece::Line(text) => Owned::Line(text.to_vec()),
                    Piece::Transient(text) => Owned::Transient(text.to_vec()),
                });
            });
        }
        pieces.extend(splitter.finish().map(Owned::Line));
        pieces
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_chunks(
            input in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'a'), any::<u8>()], 0..300), chunk in 1usize..50
        ) {
            let input: Vec<u8> = input.into_iter().filter(|byte| *byte != b'\r').collect();
            let mut joined = Vec::new();
            for piece in split(&input, chunk) {
                let Owned::Line(line) = piece else { panic!("nothing transient in {input:?}") };
                prop_assert!(!line.contains(&b'\n'));
                joined.extend(line);
                joined.push(b'\n');
            }
            let mut expected = input.clone();
            if expected.last().is_some_and(|byte| *byte != b'\n') {
                expected.push(b'\n');
            }
            prop_assert_eq!(joined, expected);
        }

        #[test]
        fn pieces_do_not_depend_on_chunks(
            input in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b'x')], 0..60), chunk in 1usize..9
        ) {
            prop_assert_eq!(split(&input, chunk), split(&input, 1000));
        }
    }

    #[test]
    fn carriage_returns_end_transient_lines() {
        let line = |text: &str| Owned::Line(text.into());
        let transient = |text: &str| Owned::Transient(text.into());
        assert_eq!(split(b"10%\r20%\rdone\n", 4), [transient("10%"), transient("20%"), line("done")]);
        assert_eq!(split(b"windows\r\nlines\r\n", 3), [line("windows"), line("lines")]);
        assert_eq!(split(b"\r10%\r\r20%\r\r\n\r\n", 2), [transient("10%"), line("20%"), line("")]);
        assert_eq!(split(b"cut", 2), [line("cut")]);
        assert_eq!(split(b"1%\rloss nan\r\r", 3), [transient("1%"), line("loss nan")]);
        assert_eq!(split(b"\r", 1), []);
    }

    #[test]
    fn long_lines_are_cut() {
        let pieces = split(&vec![b'x'; 2 * MAX_LINE + 5], 4096);
        let lengths: Vec<usize> = pieces
            .iter()
            .map(|piece| match piece {
                Owned::Line(line) => line.len(),
                Owned::Transient(_) => 0,
            })
            .collect();
        assert_eq!(lengths, [MAX_LINE, MAX_LINE, 5]);
        let mut longest = vec![b'x'; MAX_LINE];
        longest.extend(b"\r\nnext\n");
        assert_eq!(split(&longest, 4096).len(), 2);
    }
}
