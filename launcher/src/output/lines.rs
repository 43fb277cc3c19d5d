//! Bytes to lines: pure.
//!
//! What a rank writes arrives in pieces that the kernel chose. A line is complete at its line feed; a carriage return
//! that no line feed follows ends a transient one, such as a progress bar.

/// Longest line; what is longer is passed on in pieces.
const LONGEST_LINE: usize = 1 << 20;

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// A line, without its end.
    Line(Vec<u8>),
    /// A line that a carriage return ended.
    Transient(Vec<u8>),
}

/// Puts bytes together into lines.
#[derive(Debug, Default)]
pub struct LineSplitter {
    bytes: Vec<u8>,
    /// A carriage return has come whose successor has not.
    returned: bool,
}

impl LineSplitter {
    /// Takes bytes and returns the pieces they complete.
    pub fn push(&mut self, mut bytes: &[u8]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        while let Some(first) = bytes.first() {
            // A carriage return before a line feed belongs to the line's end.
            if std::mem::take(&mut self.returned) && *first != b'\n' {
                pieces.push(Piece::Transient(std::mem::take(&mut self.bytes)));
            }
            let is_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
            // Only what comes after the longest line tells whether it was one.
            if self.bytes.len() == LONGEST_LINE && !is_end(first) {
                pieces.push(Piece::Line(std::mem::take(&mut self.bytes)));
            }
            let room = bytes.len().min(LONGEST_LINE - self.bytes.len());
            let (text, rest) = bytes.split_at(bytes[..room].iter().position(is_end).unwrap_or(room));
            self.bytes.extend_from_slice(text);
            bytes = rest;
            if let Some((end, rest)) = rest.split_first().filter(|(end, _)| is_end(end)) {
                bytes = rest;
                match end {
                    b'\n' => pieces.push(Piece::Line(std::mem::take(&mut self.bytes))),
                    _ => self.returned = true,
                }
            }
        }
        pieces
    }

    /// What is left at the end of the stream.
    pub fn finish(&mut self) -> Option<Piece> {
        let rest = std::mem::take(&mut self.bytes);
        let transient = std::mem::take(&mut self.returned);
        match rest.is_empty() {
            true => None,
            false if transient => Some(Piece::Transient(rest)),
            false => Some(Piece::Line(rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The pieces of `input` in chunks of `chunk` bytes.
    fn split(input: &[u8], chunk: usize) -> Vec<Piece> {
        let mut splitter = LineSplitter::default();
        let mut pieces: Vec<Piece> = input.chunks(chunk).flat_map(|bytes| splitter.push(bytes)).collect();
        pieces.extend(splitter.finish());
        pieces
    }

    proptest! {
        #[test]
        fn lines_are_the_input_whatever_the_chunks(
            input in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'a'), any::<u8>()], 0..300), chunk in 1usize..50
        ) {
            let input: Vec<u8> = input.into_iter().filter(|byte| *byte != b'\r').collect();
            let mut joined = Vec::new();
            for piece in split(&input, chunk) {
                let Piece::Line(line) = piece else { panic!("nothing transient in {input:?}") };
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
        fn chunks_do_not_matter(
            input in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b'x')], 0..60), chunk in 1usize..9
        ) {
            prop_assert_eq!(split(&input, chunk), split(&input, 1000));
        }
    }

    #[test]
    fn carriage_returns() {
        let line = |text: &str| Piece::Line(text.into());
        let transient = |text: &str| Piece::Transient(text.into());
        assert_eq!(split(b"10%\r20%\rdone\n", 4), [transient("10%"), transient("20%"), line("done")]);
        assert_eq!(split(b"windows\r\nlines\r\n", 3), [line("windows"), line("lines")]);
        assert_eq!(split(b"cut", 2), [line("cut")]);
    }

    #[test]
    fn endless_lines_are_cut() {
        let pieces = split(&vec![b'x'; 2 * LONGEST_LINE + 5], 4096);
        let lengths: Vec<usize> = pieces
            .iter()
            .map(|piece| match piece {
                Piece::Line(line) => line.len(),
                Piece::Transient(_) => 0,
            })
            .collect();
        assert_eq!(lengths, [LONGEST_LINE, LONGEST_LINE, 5]);
        let mut longest = vec![b'x'; LONGEST_LINE];
        longest.extend(b"\r\nnext\n");
        assert_eq!(split(&longest, 4096).len(), 2);
    }
}
