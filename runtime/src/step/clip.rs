//! Clipping by the global norm of all reduced gradients.
//!
//! Squares are summed shard by shard, and these sums in the order of buckets and ranks, whether a rank holds one
//! shard of a bucket or all of it: all placements, and a sharded optimizer, clip to the same bits. (Pascanu, Mikolov and
//! Bengio 2013; the epsilon in the denominator is that of PyTorch's `clip_grad_norm_`.)

use mgpu_kernels::digest::cpu::sum_of_squares;

use super::gradient_bucket::{GradientBucket, Owner};
use super::readiness::Readiness;
use crate::comm::{Communicator, shard};
use crate::{Layout, Result};

/// Avoids a division by zero.
const EPSILON: f64 = 1e-6;

/// Scales this rank's part of the reduced gradients so that their global norm is at most `most`, and returns the norm
/// before. Collective unless every rank has all of them.
///
/// # Errors
/// As [`Communicator::all_gather`].
pub(super) fn clip(comm: &mut Communicator, buckets: &mut [GradientBucket], most: f64) -> Result<f64> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let has_shard = |bucket: &&GradientBucket| bucket.owner == Owner::Shards;
    let squares = |bucket: &GradientBucket, rank| {
        sum_of_squares(&bucket.values()[shard(bucket.elements.len(), ranks, rank)])
    };
    let mine: Vec<f64> = buckets.iter().filter(has_shard).map(|bucket| squares(bucket, rank)).collect();
    let all = if mine.is_empty() { Vec::new() } else { comm.all_gather_slice(&mine)? };
    let (mut sum, mut shard_index) = (0.0, 0);
    for bucket in buckets.iter() {
        for peer in 0..ranks {
            sum += match bucket.owner {
                Owner::Shards => all[peer as usize * mine.len() + shard_index],
                Owner::RankZero if rank > 0 => 0.0,
                Owner::EveryRank | Owner::RankZero => squares(bucket, peer),
            };
        }
        shard_index += usize::from(has_shard(&bucket));
    }
    let mut norm = [sum.sqrt()];
    if buckets.iter().any(|bucket| bucket.owner == Owner::RankZero) {
        comm.broadcast_slice(&mut norm, 0)?;
    }
    Ok(scale_down_to(buckets, norm[0], most))
}

/// As [`clip`], for gradients that all ranks hold completely. The order of the sum depends neither on ranks nor on
/// buckets.
pub(super) fn clip_invariant(
    layout: &Layout,
    readiness: &Readiness,
    buckets: &mut [GradientBucket],
    most: f64,
) -> f64 {
    let squares = |tensor: usize| {
        let bucket = &buckets[readiness.bucket_of(tensor)?];
        Some(sum_of_squares(&bucket.values()[bucket.within(layout, tensor)]))
    };
    let sum: f64 = (0..layout.tensors().len()).filter_map(squares).sum();
    scale_down_to(buckets, sum.sqrt(), most)
}

/// Scales gradients of norm `norm` down to `most` if they exceed it, and returns `norm`.
fn scale_down_to(buckets: &mut [GradientBucket], norm: f64, most: f64) -> f64 {
    let factor = most / (norm + EPSILON);
    if factor < 1.0 {
        for bucket in buckets {
            bucket.scale_reduced(factor as f32);
        }
    }
    norm
}
