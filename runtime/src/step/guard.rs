//! Checks in every step before any parameter changes: gradients are finite, and all ranks make the same step.
//!
//! A rank checks its own gradients before the reduction, because only then the error can name the rank. Small tensors
//! are checked completely; of large ones one cache line in 32 is checked, a different one in each step. After the
//! reduction every element is checked, since finite gradients may have an infinite sum: each rank checks its shard of
//! each bucket, and all ranks together cover everything. (If rank 0 alone has the reduced gradients, it checks them.) A
//! single rank has no reduction, and checks all of its own gradients at once.
//!
//! Ranks exchange the results in one small all-gather, together with the values that must be the same on all of them.

use mgpu_kernels::Threads;
use mgpu_kernels::digest::cpu as digest;

use super::gradient_bucket::{GradientBucket, Owner};
use crate::comm::{Communicator, shard};
use crate::replicate::{blame_and_fail, first_outlier};
use crate::{Error, Layout, Result};

/// Largest tensor that is checked completely before the reduction, in elements. (Reading 81 MB of gradients, of which
/// `layers` has most in two tensors, takes one thread about 9 ms of a step of 200 ms.)
const FULL_CHECK_LEN: usize = 1 << 16;

impl GradientBucket {
    /// The index of a tensor of the bucket with non-finite gradients of this rank, in step `step`.
    pub(super) fn non_finite(
        &self,
        threads: &Threads,
        layout: &Layout,
        step: u64,
        is_alone: bool,
    ) -> Option<usize> {
        let values = self.values();
        let is_bad = |tensor: &usize| {
            let gradient = &values[self.within(layout, *tensor)];
            match gradient.len() {
                len if is_alone || len <= FULL_CHECK_LEN => digest::count_non_finite(threads, gradient) > 0,
                _ => digest::sample_has_non_finite(gradient, step),
            }
        };
        self.plan.tensors.clone().rev().find(is_bad)
    }

    /// The index of a tensor of the bucket with non-finite reduced gradients, in the shard of `rank` of `ranks`, or in
    /// all of the bucket if this rank alone has them.
    pub(super) fn reduced_non_finite(
        &self,
        threads: &Threads,
        layout: &Layout,
        (rank, ranks): (u32, u32),
    ) -> Option<usize> {
        let shard = match self.owner {
            Owner::EveryRank | Owner::Shards => shard(self.elements.len(), ranks, rank),
            Owner::RankZero => self.own_within(),
        };
        let is_bad = |tensor: &usize| {
            let within = self.within(layout, *tensor);
            let elements = within.start.max(shard.start)..within.end.min(shard.end);
            !elements.is_empty() && digest::count_non_finite(threads, &self.values()[elements]) > 0
        };
        self.plan.tensors.clone().rev().find(is_bad)
    }
}

/// What a rank reports to the others in a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Report {
    /// A tensor with non-finite gradients of this rank.
    pub(super) own: Option<usize>,
    /// A tensor with non-finite reduced gradients, among those that this rank checked.
    pub(super) reduced: Option<usize>,
    pub(super) micro_batches: usize,
    pub(super) learning_rate: f64,
}

/// Number of words of an encoded report.
const WORDS: usize = 4;

impl Report {
    fn encode(&self) -> [i64; WORDS] {
        let number = |tensor: Option<usize>| tensor.map_or(-1, |tensor| tensor as i64);
        let rate = self.learning_rate.to_bits() as i64;
        [number(self.own), number(self.reduced), self.micro_batches as i64, rate]
    }

    /// Compares the reports of all ranks on step `step`, from 1. Collective.
    pub(super) fn compare(&self, comm: &mut Communicator, layout: &Layout, step: u64) -> Result<()> {
        let mine = self.encode();
        let all = if comm.size() > 1 { comm.all_gather_slice(&mine)? } else { mine.to_vec() };
        let column = |word: usize| all.iter().skip(word).step_by(WORDS).copied().collect::<Vec<i64>>();
        let name = |tensor: i64| layout.tensors()[tensor as usize].name.clone();
        let [own, reduced, micro_batches, rates] = [0, 1, 2, 3].map(column);
        if let Some((right, peer)) = first_outlier(&micro_batches) {
            let (what, ours, theirs) =
                (format!("micro-batches in step {step}"), micro_batches[right], micro_batches[peer]);
            let (rank, peer) = (right as u32, peer as u32);
            return blame_and_fail(comm, Error::Disagreement { rank, peer, what, ours, theirs });
        }
        if let Some((right, peer)) = first_outlier(&rates) {
            let rate = |rank: usize| f64::from_bits(rates[rank] as u64).to_string();
            let (setting, ours, theirs) = (format!("step {step} learning rate"), rate(right), rate(peer));
            let (rank, peer) = (right as u32, peer as u32);
            return blame_and_fail(comm, Error::SettingMismatch { rank, peer, setting, ours, theirs });
        }
        let found = |tensors: &[i64]| tensors.iter().position(|tensor| *tensor >= 0);
        if let Some(rank) = found(&own) {
            let (rank, tensor) = (comm.world_rank(rank as u32), name(own[rank]));
            return Err(Error::NotFinite { rank, tensor, step });
        }
        match found(&reduced) {
            Some(rank) => Err(Error::ReducedNotFinite { tensor: name(reduced[rank]), step }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::optimizer::{OptimizerConfig, Rule, Sgd};
    use crate::{DataParallel, DataParallelConfig, Layout, World};

    /// Only a hardware fault or memory corruption can make them differ.
    #[test]
    fn diverged_weights_are_detected_during_training() {
        std::thread::scope(|scope| {
            for mut world in World::threads(4).unwrap() {
                scope.spawn(move || {
                    let mut layout = Layout::new();
                    layout.push("a", [3]);
                    layout.push("b", [2]);
                    let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.1, ..Sgd::default() }));
                    let config = DataParallelConfig::new(sgd, 1).with_verify_every(5);
                    let comm = world.communicator().unwrap();
                    let mut model = DataParallel::with_config(comm, layout, vec![1.0; 5], config).unwrap();
                    for step in 1..=5 {
                        if step == 3 && world.rank() == 2 {
                            model.parameters.as_mut_slice::<f32>()[4] += 0.5;
                        }
                        let outcome = model.step(|_, gradients| {
                            gradients.write(1, &[1.0; 2])?;
                            gradients.write(0, &[1.0; 3])
                        });
                        let text = outcome.err().map(|error| error.to_string());
                        let expected = "rank 2 has different weights than rank 0 in tensor `b`";
                        assert_eq!(text, (step == 5).then(|| expected.to_owned()));
                    }
                });
            }
        });
    }
}
