//! Clipping by the global norm of all reduced gradients.
//!
//! Squares are summed shard by shard, and these sums in the order of buckets and ranks, whether a rank holds one
//! shard of a bucket or all of it: a sharded optimizer clips to the same bits as a replicated one. (Pascanu, Mikolov
//! and Bengio 2013; the epsilon in the denominator is that of PyTorch's `clip_grad_norm_`.)

use mgpu_kernels::arena::cpu::scale;
use mgpu_kernels::digest::cpu::sum_of_squares;

use super::gradient_bucket::{Averaged, GradientBucket};
use super::readiness::Readiness;
use crate::comm::{Communicator, shard};
use crate::{Layout, Result};

/// Avoids a division by zero.
const EPSILON: f64 = 1e-6;

/// Scales this rank's part of the reduced gradients so that their global norm is at most `most`, and returns the norm
/// before. Collective if buckets are sharded.
///
/// # Errors
/// As [`Communicator::all_gather`].
pub(super) fn clip(comm: &mut Communicator, buckets: &mut [GradientBucket], most: f64) -> Result<f64> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let has_shard = |bucket: &&GradientBucket| bucket.averaged == Averaged::Shard;
    let squares = |bucket: &GradientBucket, rank| {
        sum_of_squares(&bucket.values()[shard(bucket.elements.len(), ranks, rank)])
    };
    let mine: Vec<f64> = buckets.iter().filter(has_shard).map(|bucket| squares(bucket, rank)).collect();
    let all = if mine.is_empty() { Vec::new() } else { comm.all_gather_slice(&mine)? };
    let (mut sum, mut shard_index) = (0.0, 0);
    for bucket in buckets.iter() {
        for peer in 0..ranks {
            sum += match bucket.averaged {
                Averaged::Shard => all[peer as usize * mine.len() + shard_index],
                _ => squares(bucket, peer),
            };
        }
        shard_index += usize::from(has_shard(&bucket));
    }
    Ok(scale_down_to(buckets, sum.sqrt(), most))
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
            let reduced = bucket.reduced();
            scale(&mut bucket.values_mut()[reduced], factor as f32);
        }
    }
    norm
}
