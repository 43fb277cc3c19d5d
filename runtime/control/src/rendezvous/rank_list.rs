//! Lists of ranks in messages: for `#[serde(with = "rank_list")]`.
//!
//! A short list consists of numbers. A list of many ranks of a large world would not fit a frame, so it is a bitmap in
//! hexadecimal digits: rank r is bit r % 4 of digit r / 4. Such a list arrives in ascending order.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::protocol::MAX_WORLD_RANKS;

/// Longer lists are bitmaps.
const MAX_NUMBERS: usize = 1024;

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum RankList {
    Numbers(Vec<u32>),
    Bits(String),
}

impl RankList {
    fn of(ranks: &[u32]) -> Self {
        if ranks.len() <= MAX_NUMBERS || ranks.iter().any(|rank| *rank >= MAX_WORLD_RANKS) {
            return RankList::Numbers(ranks.to_vec());
        }
        let digits = ranks.iter().max().map_or(0, |last| last / 4 + 1);
        let mut bits = vec![0u32; digits as usize];
        ranks.iter().for_each(|rank| bits[(rank / 4) as usize] |= 1 << (rank % 4));
        RankList::Bits(bits.into_iter().filter_map(|digit| char::from_digit(digit, 16)).collect())
    }

    fn into_ranks(self) -> Result<Vec<u32>, String> {
        let bits = match self {
            RankList::Numbers(ranks) => return Ok(ranks),
            RankList::Bits(bits) => bits,
        };
        if bits.len() > MAX_WORLD_RANKS as usize / 4 {
            return Err(format!("a list of ranks with {} digits", bits.len()));
        }
        let mut ranks = Vec::new();
        for (position, digit) in (0u32..).zip(bits.chars()) {
            let digit =
                digit.to_digit(16).ok_or_else(|| format!("a list of ranks with the digit {digit:?}"))?;
            ranks.extend((0..4).filter(|bit| digit >> bit & 1 == 1).map(|bit| 4 * position + bit));
        }
        Ok(ranks)
    }
}

pub(crate) fn serialize<S: Serializer>(ranks: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
    RankList::of(ranks).serialize(serializer)
}

pub(crate) fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    RankList::deserialize(deserializer)?.into_ranks().map_err(serde::de::Error::custom)
}

/// For lists that may be absent.
pub(crate) mod option {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        ranks: &Option<Vec<u32>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        ranks.as_deref().map(RankList::of).serialize(serializer)
    }

    pub(crate) fn deserialize<'a, D: Deserializer<'a>>(
        deserializer: D,
    ) -> Result<Option<Vec<u32>>, D::Error> {
        let list = Option::<RankList>::deserialize(deserializer)?;
        list.map(RankList::into_ranks).transpose().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn through_json(ranks: &[u32]) -> Vec<u32> {
        let mut bytes = Vec::new();
        serialize(ranks, &mut serde_json::Serializer::new(&mut bytes)).unwrap();
        assert!(bytes.len() < 24 << 10, "{} bytes", bytes.len());
        deserialize(&mut serde_json::Deserializer::from_slice(&bytes)).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn ranks_arrive_as_they_were_sent(ranks in prop::collection::btree_set(0..MAX_WORLD_RANKS, 0..3000)) {
            let ranks: Vec<u32> = ranks.into_iter().collect();
            prop_assert_eq!(through_json(&ranks), ranks);
        }

        #[test]
        fn arbitrary_texts_never_panic(text in "[0-9a-zA-Z]{0,40}") {
            let list = RankList::Bits(text.clone()).into_ranks();
            prop_assert_eq!(list.is_ok(), text.chars().all(|digit| digit.is_ascii_hexdigit()));
        }
    }

    #[test]
    fn a_short_list_keeps_its_order_and_the_longest_one_fits_a_frame() {
        assert_eq!(through_json(&[7, u32::MAX, 2]), [7, u32::MAX, 2]);
        let all: Vec<u32> = (0..MAX_WORLD_RANKS).collect();
        assert_eq!(through_json(&all), all);
        let digits = "f".repeat(MAX_WORLD_RANKS as usize / 4 + 1);
        assert_eq!(RankList::Bits(digits).into_ranks().unwrap_err(), "a list of ranks with 16385 digits");
    }
}
