//! Making the ranks equal once, and proving that they stay so.

use xxhash_rust::xxh3::xxh3_64;

use crate::comm::{Communicator, ReduceOp};
use crate::{Error, Layout, Result};

/// Longest description of a difference that ranks tell each other.
const DIFFERENCE_BYTES: usize = 512;

/// A checksum of values: equal bits give equal sums (XXH3, 64 bits).
pub fn checksum(values: &[f32]) -> u64 {
    xxh3_64(bytemuck::cast_slice(values))
}

/// Checks that all ranks have the same layout. Collective.
///
/// # Errors
/// [`Error::LayoutMismatch`] on every rank, naming a rank that differs from rank 0 and the first difference.
pub fn verify_layout(comm: &mut dyn Communicator, layout: &Layout) -> Result<()> {
    let mine = serde_json::to_vec(layout).expect("a layout holds names and numbers");
    let mut len = [mine.len() as i64];
    comm.broadcast_slice(&mut len, 0)?;
    let mut reference = if comm.rank() == 0 { mine } else { vec![0; len[0] as usize] };
    comm.broadcast_slice(&mut reference, 0)?;
    let reference: Layout = serde_json::from_slice(&reference).map_err(|error| Error::Protocol {
        peer: "rank 0".into(),
        problem: format!("not a layout: {error}"),
    })?;
    // Everybody learns of a difference: a rank that only waited for a stranger would name the wrong cause.
    let mut text = layout.difference(&reference).unwrap_or_default().into_bytes();
    text.resize(DIFFERENCE_BYTES, 0);
    let texts = comm.all_gather_slice(&text)?;
    let Some(peer) = texts.chunks(DIFFERENCE_BYTES).position(|text| text[0] != 0) else { return Ok(()) };
    let text = &texts[peer * DIFFERENCE_BYTES..][..DIFFERENCE_BYTES];
    let text = String::from_utf8_lossy(text).trim_end_matches('\0').to_owned();
    Err(Error::LayoutMismatch {
        rank: peer as u32,
        peer: 0,
        difference: format!("{text} (here is rank {peer}, there rank 0)"),
    })
}

/// Checks that all ranks hold the same values, and returns their checksum. Collective.
///
/// # Errors
/// [`Error::Diverged`] on every rank, naming the first tensor and the first rank that differs from most of them (from
/// rank 0, where as many agree with it).
pub fn verify_equal(comm: &mut dyn Communicator, layout: &Layout, values: &[f32]) -> Result<u64> {
    let sum = checksum(values);
    let sums = comm.all_gather_slice(&[sum as i64])?;
    let Some((right, peer)) = odd_one(&sums) else { return Ok(sum) };
    let tensors: Vec<i64> =
        layout.tensors().iter().map(|tensor| checksum(&values[tensor.range()]) as i64).collect();
    let all = comm.all_gather_slice(&tensors)?;
    let of = |rank: usize| &all[rank * tensors.len()..][..tensors.len()];
    let first = of(right).iter().zip(of(peer)).position(|(a, b)| a != b);
    let tensor = first.map_or("(none: values beyond the layout)", |index| &layout.tensors()[index].name);
    Err(Error::Diverged { rank: right as u32, peer: peer as u32, tensor: tensor.to_owned() })
}

/// Checks that all ranks have the same number of `what`, such as steps in an epoch: ranks that go on with different ones
/// would wait for each other in vain. Collective.
///
/// # Errors
/// [`Error::Disagreement`] on every rank, naming the first rank that differs from most of them.
pub fn verify_same(comm: &mut dyn Communicator, what: &str, number: i64) -> Result<()> {
    let numbers = comm.all_gather_slice(&[number])?;
    let Some((right, peer)) = odd_one(&numbers) else { return Ok(()) };
    let (ours, theirs) = (numbers[right], numbers[peer]);
    Err(Error::Disagreement { rank: right as u32, peer: peer as u32, what: what.to_owned(), ours, theirs })
}

/// The first place of the most common value, and the first that has another one. `None` if all are the same.
fn odd_one(values: &[i64]) -> Option<(usize, usize)> {
    let count = |value: &i64| values.iter().filter(|other| *other == value).count();
    // Of equally common values the first one.
    let right = (0..values.len()).rev().max_by_key(|place| count(&values[*place]))?;
    let peer = values.iter().position(|value| *value != values[right])?;
    Some((right, peer))
}

/// Replaces every rank's values by those of rank 0, after checking that the layouts agree, and returns their
/// checksum after checking that all ranks have it. Collective.
///
/// # Errors
/// As [`verify_layout`], [`verify_equal`] and the communicator's.
pub fn replicate(comm: &mut dyn Communicator, layout: &Layout, values: &mut [f32]) -> Result<u64> {
    if values.len() != layout.len() {
        let problem = format!("{} values for a layout of {}", values.len(), layout.len());
        return Err(Error::InvalidArgument { operation: "replicate", problem });
    }
    verify_layout(comm, layout)?;
    comm.broadcast_slice(values, 0)?;
    verify_equal(comm, layout, values)
}

/// Sums `values` over ranks, in place: for counts and losses.
///
/// # Errors
/// As the communicator's.
pub fn sum_over_ranks(comm: &mut dyn Communicator, values: &mut [f64]) -> Result<()> {
    comm.all_reduce_slice(values, ReduceOp::Sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_are_right() {
        assert_eq!(odd_one(&[7, 7, 7]), None);
        assert_eq!(odd_one(&[]), None);
        assert_eq!(odd_one(&[7, 8]), Some((0, 1)));
        assert_eq!(odd_one(&[8, 7, 7]), Some((1, 0)));
        assert_eq!(odd_one(&[7, 8, 8, 7]), Some((0, 1)));
        assert_eq!(odd_one(&[1, 7, 7, 2]), Some((1, 0)));
    }
}
