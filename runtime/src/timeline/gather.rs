//! Gathers the records of all ranks on rank 0.
//!
//! Names are sent as JSON, then spans as 64-bit words, over the observed communicator. They are validated like any
//! input from another process.

use super::{NO_NUMBER, NameText, Record, RecordedSpan};
use crate::comm::{Buffer, Communicator};
use crate::{Error, Result};

/// Words of a span: beginning, end, bytes, name and number.
const WORDS: usize = 4;
/// The bits of a name's index; the bit above them marks the background thread.
const NAMES: u64 = (1 << 31) - 1;
/// Largest accepted number of spans, and of bytes of names, of a rank.
const MAX_COUNT: i64 = 1 << 26;

/// The record of one rank.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Track {
    pub(super) names: Vec<String>,
    pub(super) spans: Vec<TrackSpan>,
    /// Number of spans that did not fit into the record.
    pub(super) left_out: u64,
}

/// A [`Span`](super::Span), with its name's index in the track.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TrackSpan {
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) bytes: u64,
    pub(super) name: usize,
    pub(super) number: Option<u32>,
    /// Whether it belongs to the rank's background thread.
    pub(super) background: bool,
}

/// Gathers all ranks' records on rank 0, by rank; empty elsewhere. Collective.
pub(super) fn gather(record: &Record, comm: &mut Communicator) -> Result<Vec<Track>> {
    let (names, words) = encode(record);
    let counts = [names.len() as i64, words.len() as i64, record.left_out as i64];
    let all = comm.all_gather_slice(&counts)?;
    let counts: Vec<_> = all.chunks_exact(counts.len()).collect();
    // All ranks check all counts, so that none waits for a rank that has returned an error.
    for (rank, counts) in counts.iter().enumerate() {
        let limits = [MAX_COUNT, MAX_COUNT * WORDS as i64, i64::MAX];
        if !counts.iter().zip(limits).all(|(count, most)| (0..=most).contains(count)) {
            return Err(bad(rank, "invalid counts"));
        }
    }
    if comm.rank() > 0 {
        comm.send(Buffer::from_slice(&names), 0)?.wait()?;
        comm.send(Buffer::from_slice(&words), 0)?.wait()?;
        return Ok(Vec::new());
    }
    let mut records = vec![(Buffer::from_slice(&names), Buffer::from_slice(&words))];
    for (rank, counts) in counts.iter().enumerate().skip(1) {
        let names = comm.recv(Buffer::zeroed::<u8>(counts[0] as usize), rank as u32)?.wait()?;
        let words = comm.recv(Buffer::zeroed::<i64>(counts[1] as usize), rank as u32)?.wait()?;
        records.push((names, words));
    }
    // Errors from here on block no other rank.
    let decoded = records.iter().zip(&counts).enumerate().map(|(rank, ((names, words), counts))| {
        let track = decode(names.as_slice(), words.as_slice(), counts[2] as u64);
        track.map_err(|problem| bad(rank, problem))
    });
    decoded.collect()
}

fn bad(rank: usize, problem: &str) -> Error {
    Error::Protocol { peer: format!("rank {rank}"), problem: format!("in its timeline: {problem}") }
}

/// Encodes a record: its names as JSON, and its spans as words.
fn encode(record: &Record) -> (Vec<u8>, Vec<i64>) {
    let mut names: Vec<&str> = record.names.iter().map(String::as_str).collect();
    let mut words = Vec::with_capacity(record.spans.len() * WORDS);
    for RecordedSpan { span, background } in &record.spans {
        let name = match span.name.0 {
            NameText::Registered(index) => index as usize,
            // There are only a dozen fixed names.
            NameText::Fixed(text) => names.iter().position(|name| *name == text).unwrap_or_else(|| {
                names.push(text);
                names.len() - 1
            }),
        };
        let number = u64::from(span.number.unwrap_or(NO_NUMBER));
        let which = u64::from(*background) << 63 | (name as u64) << 32 | number;
        words.extend([span.begin, span.end, span.bytes, which].map(|word| word as i64));
    }
    (serde_json::to_vec(&names).expect("texts are JSON"), words)
}

/// Decodes and validates a track.
fn decode(names: &[u8], words: &[i64], left_out: u64) -> Result<Track, &'static str> {
    let names: Vec<String> = serde_json::from_slice(names).map_err(|_| "names that are not JSON")?;
    let spans = words.chunks(WORDS).map(|words| {
        let &[begin, end, bytes, which] = words else { return Err("an incomplete span") };
        let (begin, end, which) = (begin as u64, end as u64, which as u64);
        let (background, name, number) = (which >> 63 == 1, (which >> 32 & NAMES) as usize, which as u32);
        if end < begin {
            return Err("a span that ends before it begins");
        }
        if name >= names.len() {
            return Err("a span without a name");
        }
        Ok(TrackSpan {
            begin,
            end,
            bytes: bytes as u64,
            name,
            number: (number != NO_NUMBER).then_some(number),
            background,
        })
    });
    let spans = spans.collect::<Result<_, _>>()?;
    Ok(Track { names, spans, left_out })
}

#[cfg(test)]
mod tests {
    use super::super::{Name, Span, Timeline};
    use super::*;

    #[test]
    fn records_round_trip() {
        let timeline = Timeline::new(4).unwrap();
        let told = timeline.name("layer 3");
        let spans = [(told, None, 7), (Name::STEP, Some(0), 0), (Name::STEP, Some(1), u64::MAX)];
        for ((name, number, bytes), background) in spans.into_iter().zip([false, false, true]) {
            timeline.record_on(Span { name, number, begin: 5, end: 1 << 60, bytes }, background);
        }
        let (names, words) = encode(&timeline.state.as_ref().unwrap().record());
        let track = decode(&names, &words, 9).unwrap();
        assert_eq!(track.left_out, 9);
        let found: Vec<_> = track
            .spans
            .iter()
            .map(|span| (track.names[span.name].as_str(), span.number, span.bytes))
            .collect();
        assert_eq!(found, [("layer 3", None, 7), ("step", Some(0), 0), ("step", Some(1), u64::MAX)]);
        assert!(track.spans.iter().all(|span| (span.begin, span.end) == (5, 1 << 60)));
        let background: Vec<bool> = track.spans.iter().map(|span| span.background).collect();
        assert_eq!(background, [false, false, true]);
    }

    #[test]
    fn invalid_records_are_rejected() {
        for (names, words, problem) in [
            (&b"[\"a\""[..], &[][..], "names that are not JSON"),
            (b"[\"a\"]", &[1, 2, 0], "an incomplete span"),
            (b"[\"a\"]", &[2, 1, 0, 0], "a span that ends before it begins"),
            (b"[\"a\"]", &[1, 2, 0, 1 << 32], "a span without a name"),
            (b"[]", &[1, 2, 0, -1], "a span without a name"),
        ] {
            assert_eq!(decode(names, words, 0).unwrap_err(), problem);
        }
    }
}
