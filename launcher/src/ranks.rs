//! Sets of ranks on the command line and in reports: `0`, `1-`, `0,2-3`.

use std::str::FromStr;

/// A set of ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankSet {
    /// Inclusive ranges; an open end is `u32::MAX`.
    ranges: Vec<(u32, u32)>,
}

impl RankSet {
    /// True if `rank` is in the set.
    pub fn contains(&self, rank: u32) -> bool {
        self.ranges.iter().any(|(first, last)| (*first..=*last).contains(&rank))
    }
}

impl FromStr for RankSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a set of ranks; write 0 or 1-3 or 1- or 0,2-3");
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
        let range = |part: &str| match part.split_once('-') {
            None => number(part).map(|rank| (rank, rank)),
            Some((first, "")) => number(first).map(|first| (first, u32::MAX)),
            Some((first, last)) => Ok((number(first)?, number(last)?)),
        };
        let ranges: Vec<_> = text.split(',').map(range).collect::<Result<_, _>>()?;
        if ranges.iter().any(|(first, last)| first > last) {
            return Err(wrong());
        }
        Ok(RankSet { ranges })
    }
}

/// Ranks in ascending order, as text: `0,2-3`.
pub(crate) fn list(ranks: &[u32]) -> String {
    let is_next = |a: &u32, b: &u32| a.checked_add(1) == Some(*b);
    let ranges = ranks.chunk_by(is_next).map(|range| match range {
        [rank] => rank.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    ranges.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_by_ranges() {
        for (ranks, text) in [
            (&[][..], ""),
            (&[7], "7"),
            (&[0, 1], "0-1"),
            (&[0, 2, 3, 4, 9], "0,2-4,9"),
            (&[u32::MAX], "4294967295"),
        ] {
            assert_eq!(list(ranks), text);
        }
    }

    #[test]
    fn rank_sets_are_parsed() {
        for (text, inside, outside) in [
            ("0", &[0][..], &[1, 2][..]),
            ("1-", &[1, 2, 99], &[0]),
            ("0,2-3", &[0, 2, 3], &[1, 4]),
            ("1-1", &[1], &[0, 2]),
        ] {
            let set: RankSet = text.parse().unwrap();
            assert!(inside.iter().all(|rank| set.contains(*rank)), "{text}");
            assert!(!outside.iter().any(|rank| set.contains(*rank)), "{text}");
        }
        assert!(!RankSet::default().contains(0));
        for text in ["", "a", "3-1", "-", "1,,2", "1-2-3"] {
            assert!(text.parse::<RankSet>().is_err(), "{text}");
        }
    }
}
