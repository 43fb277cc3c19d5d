//! Bundles: arrivals of several ranks in one frame. Pure.
//!
//! All of them have made the call in the header of the frame. Its payload has an entry for each rank: rank and length of
//! the contribution (4 bytes each), location of the buffer (8), and the contribution.

use super::frame::{BUNDLE_BYTES, SMALL_BYTES};

/// Bytes of an entry before those of its contribution.
const ENTRY_BYTES: usize = 16;
const _: () = assert!(ENTRY_BYTES + SMALL_BYTES <= BUNDLE_BYTES, "an entry fits into a bundle");

/// The arrival of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry<'a> {
    pub(super) rank: u32,
    pub(super) location: u64,
    pub(super) payload: &'a [u8],
}

/// Calls `send` with the payloads of as few frames as have room for these entries. `bytes` is memory for one.
pub(super) fn encode<'a>(
    entries: impl Iterator<Item = Entry<'a>>,
    bytes: &mut Vec<u8>,
    mut send: impl FnMut(&[u8]),
) {
    bytes.clear();
    for Entry { rank, location, payload } in entries {
        if bytes.len() + ENTRY_BYTES + payload.len() > BUNDLE_BYTES {
            send(bytes);
            bytes.clear();
        }
        bytes.extend_from_slice(&rank.to_le_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&location.to_le_bytes());
        bytes.extend_from_slice(payload);
    }
    if !bytes.is_empty() {
        send(bytes);
    }
}

/// The entries of a frame's payload; an error behind the last one that is whole.
pub(super) fn decode(mut bytes: &[u8]) -> impl Iterator<Item = Result<Entry<'_>, String>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let entry = split_entry(&mut bytes);
        if entry.is_none() {
            bytes = &[];
        }
        Some(entry.ok_or_else(|| "a bundle that ends within an entry".to_owned()))
    })
}

fn split_entry<'a>(bytes: &mut &'a [u8]) -> Option<Entry<'a>> {
    let (rank, rest) = bytes.split_first_chunk::<4>()?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let (location, rest) = rest.split_first_chunk::<8>()?;
    let (payload, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *bytes = rest;
    Some(Entry { rank: u32::from_le_bytes(*rank), location: u64::from_le_bytes(*location), payload })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn entries_survive_the_wire(
            entries in prop::collection::vec((any::<u32>(), any::<u64>(), 0usize..=SMALL_BYTES), 0..40),
            cut in 1usize..40,
        ) {
            let contribution: Vec<u8> = (0..SMALL_BYTES).map(|at| at as u8).collect();
            let entries: Vec<Entry<'_>> = entries
                .into_iter()
                .map(|(rank, location, length)| Entry { rank, location, payload: &contribution[..length] })
                .collect();
            let (mut frames, mut memory) = (Vec::new(), Vec::new());
            encode(entries.iter().copied(), &mut memory, |frame| frames.push(frame.to_vec()));
            prop_assert!(frames.iter().all(|frame| (1..=BUNDLE_BYTES).contains(&frame.len())));
            let decoded: Result<Vec<_>, _> = frames.iter().flat_map(|frame| decode(frame)).collect();
            prop_assert_eq!(decoded.as_ref(), Ok(&entries));
            if let Some(frame) = frames.last() {
                // Without its last bytes it ends within the last entry, or is not shorter than one.
                let cut = &frame[..frame.len() - cut.min(frame.len())];
                let whole = decode(cut).take_while(Result::is_ok).count();
                prop_assert!(whole < decode(frame).count());
                prop_assert!(decode(cut).filter(Result::is_err).count() <= 1);
            }
        }

        /// Whatever arrives are entries that encode to the same bytes, and at most one error.
        #[test]
        fn any_bytes_are_decoded_or_rejected(bytes in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..200)) {
            let entries: Vec<Entry<'_>> = decode(&bytes).map_while(Result::ok).collect();
            let (mut frame, mut memory) = (Vec::new(), Vec::new());
            encode(entries.iter().copied(), &mut memory, |bytes| frame = bytes.to_vec());
            prop_assert!(bytes.starts_with(&frame));
            prop_assert!(decode(&bytes).count() <= entries.len() + 1);
        }
    }
}
