//! Makes ranks equal at the start (layout, settings, weights) and verifies that they stay equal.

use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_64;

use crate::comm::{Communicator, ReduceOp};
use crate::{Error, Layout, Result};

/// Checksum of values: the same bits give the same checksum (XXH3, 64 bits).
pub fn checksum(values: &[f32]) -> u64 {
    xxh3_64(bytemuck::cast_slice(values))
}

/// Checks that all ranks have the same layout: names, shapes and offsets of all tensors. Collective.
///
/// # Errors
/// [`Error::LayoutMismatch`] on every rank. It names the first rank that differs from the majority and the first
/// difference.
pub fn verify_layout(comm: &mut Communicator, layout: &Layout) -> Result<()> {
    let difference = |theirs: &Layout, [rank, peer]: [u32; 2]| {
        let places = [format!("on rank {rank}"), format!("on rank {peer}")];
        layout.difference_between(theirs, places.each_ref().map(String::as_str)).unwrap_or_default()
    };
    let Some((rank, peer, difference)) = compare(comm, layout, difference)? else { return Ok(()) };
    blame_and_fail(comm, Error::LayoutMismatch { rank, peer, difference })
}

/// Checks that all ranks have the same settings: names and values of everything that must be the same for training
/// together, such as command-line flags. Collective. Call it first: ranks with different settings may call different
/// operations, or train something unintended.
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// let worlds = mgpu::World::threads(3)?;
/// std::thread::scope(|scope| {
///     for mut world in worlds {
///         scope.spawn(move || {
///             let seed = if world.rank() == 2 { 8 } else { 7 };
///             let settings = [("--net", "lenet5".to_owned()), ("--seed", seed.to_string())];
///             let mut comm = world.communicator().unwrap();
///             let error = mgpu::replicate::verify_settings(&mut comm, &settings).unwrap_err();
///             assert_eq!(error.to_string(), "rank 2 has --seed 8 where rank 0 has 7; all ranks need the same");
///         });
///     }
/// });
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::SettingMismatch`] on every rank. It names the first setting in which a rank differs from the majority.
pub fn verify_settings(comm: &mut Communicator, settings: &[(&str, String)]) -> Result<()> {
    let mine: Vec<(String, String)> =
        settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let difference = |theirs: &Vec<_>, _| first_difference(&mine, theirs);
    let Some((rank, peer, difference)) = compare(comm, &mine, difference)? else { return Ok(()) };
    let (setting, theirs, ours) = difference;
    blame_and_fail(comm, Error::SettingMismatch { rank, peer, setting, ours, theirs })
}

/// The first setting in which two lists differ, with both values.
fn first_difference(mine: &[(String, String)], theirs: &[(String, String)]) -> (String, String, String) {
    let absent = || "none".to_owned();
    let differs = |index: &usize| mine.get(*index) != theirs.get(*index);
    let index = (0..mine.len().max(theirs.len())).find(differs).unwrap_or_default();
    match (mine.get(index).cloned(), theirs.get(index).cloned()) {
        (Some((name, mine)), Some((other, theirs))) if name == other => (name, mine, theirs),
        (Some((name, mine)), _) => (name, mine, absent()),
        (None, Some((name, theirs))) => (name, absent(), theirs),
        (None, None) => Default::default(),
    }
}

/// Compares `mine` over all ranks. If the ranks differ, returns a rank of the majority, the first rank outside of it,
/// and `difference(majority's value, [outlier, majority rank])` as computed by the outlier. Collective.
fn compare<T: Serialize + DeserializeOwned, D: Serialize + DeserializeOwned + Default>(
    comm: &mut Communicator,
    mine: &T,
    difference: impl FnOnce(&T, [u32; 2]) -> D,
) -> Result<Option<(u32, u32, D)>> {
    let bytes = to_json(mine);
    let hashes = comm.all_gather_slice(&[xxh3_64(&bytes) as i64])?;
    let Some((right, peer)) = first_outlier(&hashes) else { return Ok(None) };
    let (right, peer) = (right as u32, peer as u32);
    let reference = comm.broadcast_bytes(&bytes, right)?;
    // Broadcast the difference to all ranks: a rank that merely waited for the outlier would report a wrong cause.
    let own = match comm.rank() == peer {
        true => difference(&from_json(&reference, right)?, [peer, right].map(|rank| comm.world_rank(rank))),
        false => D::default(),
    };
    let text = comm.broadcast_bytes(&to_json(&own), peer)?;
    Ok(Some((right, peer, from_json(&text, peer)?)))
}

fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("names and numbers can be written as JSON")
}

fn from_json<T: DeserializeOwned>(bytes: &[u8], rank: u32) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::Protocol {
        peer: format!("rank {rank}"),
        problem: format!("cannot parse the value to compare: {error}"),
    })
}

/// Returns `error`, whose ranks are those of `comm`, with ranks of the world; before that, tells the launcher which rank
/// is at fault, so that the launcher names that rank whichever ends first.
pub(crate) fn blame_and_fail<T>(comm: &mut Communicator, error: Error) -> Result<T> {
    let error = error.with_ranks(|rank| comm.world_rank(rank));
    comm.blame(&error);
    Err(error)
}

/// Checks that all ranks hold the same values, and returns their checksum. Collective.
///
/// # Errors
/// If there are fewer values than the layout has elements. [`Error::Diverged`] on every rank, with the first tensor
/// that differs and the first rank that differs from the majority (from rank 0 if there is a tie).
pub fn verify_equal(comm: &mut Communicator, layout: &Layout, values: &[f32]) -> Result<u64> {
    if values.len() < layout.len() {
        let problem = format!("{} values for a layout of {}", values.len(), layout.len());
        return Err(Error::InvalidArgument { operation: "verify_equal", problem });
    }
    let sum = checksum(values);
    let sums = comm.all_gather_slice(&[sum as i64])?;
    let Some((right, peer)) = first_outlier(&sums) else { return Ok(sum) };
    let tensors: Vec<i64> =
        layout.tensors().iter().map(|tensor| checksum(&values[tensor.range()]) as i64).collect();
    let all = comm.all_gather_slice(&tensors)?;
    let of = |rank: usize| &all[rank * tensors.len()..][..tensors.len()];
    let first = of(right).iter().zip(of(peer)).position(|(a, b)| a != b);
    let tensor = first.map_or("(none: values beyond the layout)", |index| &layout.tensors()[index].name);
    let tensor = tensor.to_owned();
    blame_and_fail(comm, Error::Diverged { rank: right as u32, peer: peer as u32, tensor })
}

/// Checks that all ranks have the same number of `what`, such as steps in an epoch: with different numbers, ranks
/// would wait for each other forever. Collective.
///
/// # Errors
/// [`Error::Disagreement`] on every rank. It names the first rank that differs from the majority.
pub fn verify_same(comm: &mut Communicator, what: &str, number: i64) -> Result<()> {
    let numbers = comm.all_gather_slice(&[number])?;
    let Some((right, peer)) = first_outlier(&numbers) else { return Ok(()) };
    let (ours, theirs) = (numbers[right], numbers[peer]);
    let what = what.to_owned();
    blame_and_fail(comm, Error::Disagreement { rank: right as u32, peer: peer as u32, what, ours, theirs })
}

/// Index of the most common value, and index of the first value that differs from it. `None` if all are equal.
pub(crate) fn first_outlier<T: PartialEq>(values: &[T]) -> Option<(usize, usize)> {
    let count = |value: &T| values.iter().filter(|other| *other == value).count();
    // If several are equally common, the first one counts.
    let right = (0..values.len()).rev().max_by_key(|index| count(&values[*index]))?;
    let peer = values.iter().position(|value| *value != values[right])?;
    Some((right, peer))
}

/// Replaces every rank's values by those of rank 0. First checks that the layouts are equal; afterwards checks that
/// the checksums are equal, and returns the checksum. Collective.
///
/// # Errors
/// If the number of values is not that of the layout's elements; as [`verify_layout`], [`verify_equal`] and the
/// communicator.
pub fn replicate(comm: &mut Communicator, layout: &Layout, values: &mut [f32]) -> Result<u64> {
    layout.check("replicate")?;
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
pub fn sum_over_ranks(comm: &mut Communicator, values: &mut [f64]) -> Result<()> {
    comm.all_reduce_slice(values, ReduceOp::Sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outlier_is_found_by_majority() {
        assert_eq!(first_outlier(&[7, 7, 7]), None);
        assert_eq!(first_outlier::<i64>(&[]), None);
        assert_eq!(first_outlier(&[7, 8]), Some((0, 1)));
        assert_eq!(first_outlier(&[8, 7, 7]), Some((1, 0)));
        assert_eq!(first_outlier(&[7, 8, 8, 7]), Some((0, 1)));
        assert_eq!(first_outlier(&[1, 7, 7, 2]), Some((1, 0)));
    }

    #[test]
    fn the_first_difference_of_two_setting_lists_is_found() {
        let list = |settings: &[(&str, &str)]| -> Vec<(String, String)> {
            settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let (a, b) = (list(&[("x", "1"), ("y", "2")]), list(&[("x", "1"), ("y", "3")]));
        let found = |mine: &[_], theirs: &[_]| {
            let (name, mine, theirs) = first_difference(mine, theirs);
            format!("{name}: {mine}, {theirs}")
        };
        assert_eq!(found(&a, &b), "y: 2, 3");
        assert_eq!(found(&a, &a[..1]), "y: 2, none");
        assert_eq!(found(&[], &b), "x: none, 1");
        assert_eq!(found(&list(&[("z", "1")]), &a), "z: 1, none");
    }
}
