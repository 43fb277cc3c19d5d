//! Clipping by the global norm: all reduced gradients together are one vector, which is shortened if it is too long.
//!
//! Squares are summed shard by shard, and these sums in the order of buckets and ranks, whether a rank has one shard of a
//! bucket or all: a sharded optimizer clips to the same bits as a replicated one. (Pascanu, Mikolov and Bengio 2013; the
//! small number in the denominator is that of PyTorch's `clip_grad_norm_`.)

use mgpu_kernels::arena::cpu::scale;
use mgpu_kernels::digest::cpu::sum_of_squares;

use super::gradient_bucket::{Averaged, GradientBucket};
use super::readiness::Readiness;
use crate::comm::{Communicator, shard};
use crate::{Layout, Result};

/// Keeps a norm of zero from being divided by.
const EPSILON: f64 = 1e-6;

/// Scales what this rank has of the reduced gradients so that their norm is `most` at most, and returns the norm they had.
/// Collective where buckets are sharded.
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
    let (mut sum, mut place) = (0.0, 0);
    for bucket in buckets.iter() {
        for peer in 0..ranks {
            sum += match bucket.averaged {
                Averaged::Shard => all[peer as usize * mine.len() + place],
                _ => squares(bucket, peer),
            };
        }
        place += usize::from(has_shard(&bucket));
    }
    Ok(scale_down_to(buckets, sum.sqrt(), most))
}

/// As [`clip`], of gradients that all ranks have whole, by a sum in which neither ranks nor buckets show.
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

/// Scales gradients of the norm `norm` to `most`, if that is less, and returns `norm`.
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
