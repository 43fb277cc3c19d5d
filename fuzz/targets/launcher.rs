//! Parsers of the launcher: sets of ranks from the command line, and the output of ranks.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mgpurun::output::{LineSplitter, Piece};
use mgpurun::ranks::RankSet;

/// The pieces of `bytes` that arrive in chunks of `chunk` bytes, and whether each is a complete line.
fn split(bytes: &[u8], chunk: usize) -> Vec<(bool, Vec<u8>)> {
    let (mut splitter, mut pieces) = (LineSplitter::default(), Vec::new());
    for bytes in bytes.chunks(chunk) {
        splitter.push(bytes, |piece| {
            pieces.push(match piece {
                Piece::Line(text) => (true, text.to_vec()),
                Piece::Transient(text) => (false, text.to_vec()),
            });
        });
    }
    pieces.extend(splitter.finish().map(|text| (true, text)));
    pieces
}

fuzz_target!(|input: (u8, u32, &[u8])| {
    let (chunk, rank, bytes) = input;
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(set) = text.parse::<RankSet>()
    {
        let listed = text.split(',').any(|part| part.trim().parse() == Ok(rank));
        assert!(!listed || set.contains(rank), "{rank} is in `{text}`");
    }
    let pieces = split(bytes, 1 + usize::from(chunk));
    assert_eq!(pieces, split(bytes, usize::MAX), "the pieces depend on the chunks");
    let is_text = |byte: &u8| !matches!(byte, b'\n' | b'\r');
    let kept: Vec<u8> = pieces.into_iter().flat_map(|(_, text)| text).collect();
    let expected: Vec<u8> = bytes.iter().copied().filter(is_text).collect();
    assert_eq!(kept.iter().copied().filter(is_text).collect::<Vec<u8>>(), expected, "text was lost");
});
