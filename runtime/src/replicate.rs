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
/// [`Error::Diverged`] on every rank, naming a rank that differs from rank 0 and the first tensor.
pub fn verify_equal(comm: &mut dyn Communicator, layout: &Layout, values: &[f32]) -> Result<u64> {
    let sum = checksum(values);
    let sums = comm.all_gather_slice(&[sum as i64])?;
    let Some(peer) = sums.iter().position(|other| *other != sums[0]) else { return Ok(sum) };
    let tensors: Vec<i64> =
        layout.tensors().iter().map(|tensor| checksum(&values[tensor.range()]) as i64).collect();
    let all = comm.all_gather_slice(&tensors)?;
    let of = |rank: usize| &all[rank * tensors.len()..][..tensors.len()];
    let first = of(0).iter().zip(of(peer)).position(|(a, b)| a != b);
    let tensor = first.map_or("(none: values beyond the layout)", |index| &layout.tensors()[index].name);
    Err(Error::Diverged { rank: 0, peer: peer as u32, tensor: tensor.to_owned() })
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
