//! Which streams of which ranks: torchrun's `3`, or `0:1,1:2`.

use std::str::FromStr;

use super::Stream;

/// Standard output is bit 0, standard error is bit 1.
type Bits = u8;

/// Streams of the ranks of a host.
///
/// ```
/// use mgpurun::output::{Stream, StreamMap};
/// let streams: StreamMap = "0:1,2:3".parse()?;
/// assert!(streams.contains(0, Stream::Stdout) && !streams.contains(0, Stream::Stderr));
/// assert!(!streams.contains(1, Stream::Stdout) && streams.contains(2, Stream::Stderr));
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamMap {
    /// What holds for ranks that are not listed.
    others: Bits,
    /// Local ranks and their streams; the last entry of a rank counts.
    listed: Vec<(u32, Bits)>,
}

impl StreamMap {
    /// No stream of any rank.
    pub fn none() -> Self {
        StreamMap { others: 0, listed: Vec::new() }
    }

    /// True if it has this stream of a local rank.
    pub fn contains(&self, local_rank: u32, stream: Stream) -> bool {
        let listed = self.listed.iter().rev().find(|(rank, _)| *rank == local_rank);
        let bits = listed.map_or(self.others, |(_, bits)| *bits);
        bits & (1 << stream as u8) != 0
    }

    fn is_empty(&self) -> bool {
        self.others == 0 && self.listed.iter().all(|(_, bits)| *bits == 0)
    }
}

impl FromStr for StreamMap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bits = |text: &str| match text {
            "0" => Some(0),
            "1" => Some(1),
            "2" => Some(2),
            "3" => Some(3),
            _ => None,
        };
        if let Some(others) = bits(text) {
            return Ok(StreamMap { others, listed: Vec::new() });
        }
        let entry = |part: &str| {
            let (rank, streams) = part.split_once(':')?;
            let rank = rank.parse().ok().filter(|_| rank.bytes().all(|byte| byte.is_ascii_digit()))?;
            Some((rank, bits(streams)?))
        };
        let listed: Option<Vec<_>> = text.split(',').map(entry).collect();
        listed.map(|listed| StreamMap { others: 0, listed }).ok_or_else(|| {
            "it should be 0 (none), 1 (standard output), 2 (standard error), 3 (both), or LOCAL_RANK:NUMBER,... such as 0:3,1:2"
                .into()
        })
    }
}

/// What happens to each stream of each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamChoice {
    /// These are written to a file each.
    pub redirects: StreamMap,
    /// These are written to a file each, and shown.
    pub tee: StreamMap,
}

impl StreamChoice {
    /// True if any stream is written to a file.
    pub fn logs_any(&self) -> bool {
        !self.redirects.is_empty() || !self.tee.is_empty()
    }

    pub(super) fn logs(&self, local_rank: u32, stream: Stream) -> bool {
        self.redirects.contains(local_rank, stream) || self.tee.contains(local_rank, stream)
    }

    pub(super) fn shows(&self, local_rank: u32, stream: Stream) -> bool {
        self.tee.contains(local_rank, stream) || !self.redirects.contains(local_rank, stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_parsed() {
        let map = |text: &str| text.parse::<StreamMap>();
        let of = |text: &str, rank| {
            let map = map(text).unwrap();
            [map.contains(rank, Stream::Stdout), map.contains(rank, Stream::Stderr)]
        };
        assert_eq!(
            [of("0", 0), of("1", 5), of("2", 5), of("3", 5)],
            [[false, false], [true, false], [false, true], [true, true]]
        );
        assert_eq!(
            [of("0:1,12:2", 0), of("0:1,12:2", 12), of("0:1,12:2", 1)],
            [[true, false], [false, true], [false, false]]
        );
        assert_eq!(of("0:1,0:2", 0), [false, true]);
        for text in ["", "4", "00", "+1", "0:", ":1", "0:4", "0:1,", "a:1", "-1:1", "+1:1", "0:1;1:2", " 1"] {
            assert!(map(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_teed_is_logged_and_shown() {
        let choice = |redirects: &str, tee: &str| StreamChoice {
            redirects: redirects.parse().unwrap(),
            tee: tee.parse().unwrap(),
        };
        let state = |choice: &StreamChoice, stream| (choice.logs(0, stream), choice.shows(0, stream));
        let (both, split) = (choice("3", "1"), choice("0:1", "1:3"));
        assert_eq!(
            (state(&both, Stream::Stdout), state(&both, Stream::Stderr)),
            ((true, true), (true, false))
        );
        assert_eq!(
            (state(&split, Stream::Stdout), state(&split, Stream::Stderr)),
            ((true, false), (false, true))
        );
        assert!(both.logs_any() && !choice("0", "1:0").logs_any());
    }
}
