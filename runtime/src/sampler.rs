//! Which samples a rank trains on, and which it evaluates.
//!
//! Every epoch shuffles all samples by (seed, epoch), the same on every rank, and cuts the order into global
//! batches; rank r takes the r-th part of each. So no sample is seen twice in an epoch, all ranks make the same
//! number of steps, and n ranks with batch b/n train on the same global batches as one rank with batch b. What
//! does not fill a last global batch is left out of that epoch; another shuffle leaves out others.
//!
//! A sampler has no position to save: a batch is a function of seed, epoch and step, and a run goes on wherever it says.

use std::ops::Range;

use mgpu_kernels::rng::Stream;

use crate::{Error, Result};

/// The training samples of one rank.
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// let mut first = mgpu::Sampler::new(10, 2, 0, 2, 7)?;
/// let mut second = mgpu::Sampler::new(10, 2, 1, 2, 7)?;
/// assert_eq!(first.steps_per_epoch(), 2);
/// let global: Vec<u32> = [first.batch(0, 1), second.batch(0, 1)].concat();
/// assert_eq!(global, mgpu::Sampler::new(10, 4, 0, 1, 7)?.batch(0, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    samples: usize,
    batch: usize,
    rank: usize,
    ranks: usize,
    seed: u64,
    /// The epoch that `order` belongs to.
    epoch: Option<u64>,
    order: Vec<u32>,
}

impl Sampler {
    /// For `samples` samples in batches of `batch` per rank.
    ///
    /// # Errors
    /// If there are fewer samples than one batch on every rank needs, or the batch is empty.
    pub fn new(samples: usize, batch: usize, rank: u32, ranks: u32, seed: u64) -> Result<Self> {
        let (rank, ranks) = (rank as usize, ranks as usize);
        let problem = if batch == 0 {
            "a batch has at least one sample".to_owned()
        } else if samples > u32::MAX as usize {
            format!("{samples} samples are more than 32-bit numbers count")
        } else if samples < batch.saturating_mul(ranks) {
            format!("{samples} samples are fewer than a batch of {batch} on each of {ranks} ranks")
        } else {
            let order = (0..samples as u32).collect();
            return Ok(Sampler { samples, batch, rank, ranks, seed, epoch: None, order });
        };
        Err(Error::InvalidArgument { operation: "sampler", problem })
    }

    /// Steps of an epoch, the same on every rank.
    pub fn steps_per_epoch(&self) -> usize {
        self.samples / (self.batch * self.ranks)
    }

    /// This rank's samples for step `step` (from 0) of epoch `epoch`.
    ///
    /// # Panics
    /// If the epoch has no such step.
    pub fn batch(&mut self, epoch: u64, step: usize) -> &[u32] {
        assert!(step < self.steps_per_epoch(), "step {step} of {}", self.steps_per_epoch());
        if self.epoch != Some(epoch) {
            self.shuffle(epoch);
        }
        let begin = (step * self.ranks + self.rank) * self.batch;
        &self.order[begin..begin + self.batch]
    }

    /// Fisher–Yates with a counter-based generator (Knuth, The Art of Computer Programming 2, algorithm P).
    fn shuffle(&mut self, epoch: u64) {
        let stream = Stream::new(self.seed, epoch);
        self.order = (0..self.samples as u32).collect();
        for last in (1..self.samples).rev() {
            let random = stream.bits(last as u64);
            // The high half of the 128-bit product is uniform over 0..=last to within 2^-32.
            let chosen = (u128::from(random) * (last as u128 + 1)) >> 64;
            self.order.swap(last, chosen as usize);
        }
        self.epoch = Some(epoch);
    }
}

/// The samples that `rank` evaluates: together the ranks cover all samples once, in parts that differ by at most
/// one.
pub fn evaluation_shard(samples: usize, rank: u32, ranks: u32) -> Range<usize> {
    let bound = |rank: u32| samples * rank as usize / ranks as usize;
    bound(rank)..bound(rank + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_sample_comes_twice_and_ranks_step_alike(
            batch in 1usize..20, ranks in 1u32..9, extra in 0usize..300, epoch in 0u64..5, seed in any::<u64>()
        ) {
            let samples = batch * ranks as usize + extra;
            let mut seen = vec![false; samples];
            for rank in 0..ranks {
                let mut sampler = Sampler::new(samples, batch, rank, ranks, seed).unwrap();
                prop_assert_eq!(sampler.steps_per_epoch(), samples / (batch * ranks as usize));
                for step in 0..sampler.steps_per_epoch() {
                    for index in sampler.batch(epoch, step) {
                        prop_assert!(!std::mem::replace(&mut seen[*index as usize], true));
                    }
                }
            }
            let left_out = seen.iter().filter(|seen| !**seen).count();
            prop_assert_eq!(left_out, samples % (batch * ranks as usize));
        }

        #[test]
        fn evaluation_covers_everything_once(samples in 0usize..1000, ranks in 1u32..17) {
            let shards: Vec<_> = (0..ranks).map(|rank| evaluation_shard(samples, rank, ranks)).collect();
            let all: Vec<usize> = shards.iter().cloned().flatten().collect();
            prop_assert_eq!(all, (0..samples).collect::<Vec<_>>());
            let sizes = shards.iter().map(ExactSizeIterator::len);
            prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
        }
    }

    #[test]
    fn epochs_differ_and_repeat() {
        let mut sampler = Sampler::new(1000, 1000, 0, 1, 3).unwrap();
        let first = sampler.batch(0, 0).to_vec();
        let second = sampler.batch(1, 0).to_vec();
        assert_ne!(first, second);
        assert_eq!(first, sampler.batch(0, 0));
    }

    #[test]
    fn too_few_samples_are_an_error() {
        let error = Sampler::new(10, 6, 0, 2, 0).unwrap_err().to_string();
        assert_eq!(error, "sampler: 10 samples are fewer than a batch of 6 on each of 2 ranks");
    }
}
