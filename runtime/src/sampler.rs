//! Which samples a rank trains on, and which it evaluates.
//!
//! Every epoch shuffles all samples by (seed, epoch), identically on every rank, and cuts the order into global
//! batches; rank r takes the r-th part of each. So no sample occurs twice in an epoch, all ranks have the same number
//! of steps, and n ranks with batch b/n train on the same global batches as one rank with batch b. Samples that do
//! not fill a last global batch are left out of that epoch; the next shuffle leaves out others.
//!
//! A sampler has no position to save: a batch is a function of seed, epoch and step. The global batches do not depend on
//! the number of ranks, so a run continues at the same step with another number of them. If they do not divide the global
//! batch, some take one sample more ([`batch_part`]).

use std::ops::Range;

use mgpu_kernels::rng::Stream;

use crate::{Error, Result};

/// Configuration of a [`Sampler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerConfig {
    /// Samples of the training set.
    pub samples: usize,
    /// Samples of a batch on each rank.
    pub batch: usize,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Seed of the shuffling; the same on all ranks.
    pub seed: u64,
}

/// The training samples of one rank.
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// use mgpu::{Sampler, SamplerConfig};
/// let config = SamplerConfig { samples: 10, batch: 2, rank: 0, ranks: 2, seed: 7 };
/// let mut first = Sampler::new(config)?;
/// let mut second = Sampler::new(SamplerConfig { rank: 1, ..config })?;
/// assert_eq!(first.steps_per_epoch(), 2);
/// let global: Vec<u32> = [first.batch(0, 1), second.batch(0, 1)].concat();
/// assert_eq!(global, Sampler::new(SamplerConfig { batch: 4, ranks: 1, ..config })?.batch(0, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    samples: usize,
    /// Samples of a step on all ranks.
    global_batch: usize,
    /// Those of this rank.
    part: Range<usize>,
    seed: u64,
    /// The epoch that `order` belongs to.
    epoch: Option<u64>,
    order: Vec<u32>,
}

/// Checks that there is a rank `rank` among `ranks`.
fn check_rank(rank: u32, ranks: u32) -> Result<()> {
    if rank < ranks {
        return Ok(());
    }
    let problem = format!("there is no rank {rank} among {ranks}");
    Err(Error::InvalidArgument { operation: "sampler", problem })
}

/// The entries of a global batch of `global` samples in part `part` of `parts`. The parts are consecutive, and together
/// they are the whole batch. If they cannot be equal, the first ones have one sample more.
///
/// ```
/// let parts: Vec<_> = (0..3).map(|part| mgpu::batch_part(8, part, 3)).collect();
/// assert_eq!(parts, [0..3, 3..6, 6..8]);
/// ```
///
/// # Panics
/// If there is no such part.
pub fn batch_part(global: usize, part: usize, parts: usize) -> Range<usize> {
    assert!(part < parts, "there is no part {part} among {parts}");
    let (each, rest) = (global / parts, global % parts);
    let begin = |part: usize| part * each + part.min(rest);
    begin(part)..begin(part + 1)
}

impl Sampler {
    /// The samples of `config.rank`.
    ///
    /// # Errors
    /// If `rank` is not below `ranks`, if the samples do not fill one batch on every rank, or if the batch is empty.
    pub fn new(config: SamplerConfig) -> Result<Self> {
        let SamplerConfig { samples, batch, rank, ranks, seed } = config;
        check_rank(rank, ranks)?;
        let global_batch = batch.saturating_mul(ranks as usize);
        if samples < global_batch {
            let problem =
                format!("{samples} samples are fewer than a batch of {batch} on each of {ranks} ranks");
            return Err(Error::InvalidArgument { operation: "sampler", problem });
        }
        let begin = batch * rank as usize;
        Self::of_part(samples, global_batch, begin..begin + batch, seed)
    }

    /// The samples of a rank that takes the entries `part` of each global batch of `global_batch` samples. The parts of
    /// all ranks together are the global batch, and need not be equal: [`batch_part`] divides one.
    ///
    /// ```
    /// # fn main() -> mgpu::Result<()> {
    /// use mgpu::{Sampler, batch_part};
    /// let rank = |rank| Sampler::of_part(100, 8, batch_part(8, rank, 3), 7);
    /// let (mut first, mut last) = (rank(0)?, rank(2)?);
    /// assert_eq!((first.steps_per_epoch(), last.steps_per_epoch()), (12, 12));
    /// assert_eq!((first.batch(0, 11).len(), last.batch(0, 11).len()), (3, 2));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the part is empty or exceeds the global batch, or the samples do not fill a global batch.
    pub fn of_part(samples: usize, global_batch: usize, part: Range<usize>, seed: u64) -> Result<Self> {
        let problem = if part.is_empty() {
            "a batch has at least one sample".to_owned()
        } else if part.end > global_batch {
            format!("samples {} to {} of a global batch of {global_batch}", part.start, part.end)
        } else if samples > u32::MAX as usize {
            format!("{samples} samples are more than 32-bit numbers count")
        } else if samples < global_batch {
            format!("{samples} samples are fewer than a global batch of {global_batch}")
        } else {
            let order = (0..samples as u32).collect();
            return Ok(Sampler { samples, global_batch, part, seed, epoch: None, order });
        };
        Err(Error::InvalidArgument { operation: "sampler", problem })
    }

    /// Steps of an epoch, the same on every rank.
    pub fn steps_per_epoch(&self) -> usize {
        self.samples / self.global_batch
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
        let begin = step * self.global_batch;
        &self.order[begin + self.part.start..begin + self.part.end]
    }

    /// Fisher–Yates with a counter-based generator (Knuth, The Art of Computer Programming 2, algorithm P).
    fn shuffle(&mut self, epoch: u64) {
        let stream = Stream::new(self.seed, epoch);
        self.order = (0..self.samples as u32).collect();
        for last in (1..self.samples).rev() {
            let random = stream.bits(last as u64);
            // The high half of the 128-bit product is uniform over 0..=last, with a bias below 2^-32.
            let chosen = (u128::from(random) * (last as u128 + 1)) >> 64;
            self.order.swap(last, chosen as usize);
        }
        self.epoch = Some(epoch);
    }
}

/// The samples that `rank` of `ranks` ranks evaluates. The ranks together cover all samples once; their parts differ
/// by at most one sample.
///
/// # Errors
/// If there is no such rank.
pub fn evaluation_shard(samples: usize, rank: u32, ranks: u32) -> Result<Range<usize>> {
    check_rank(rank, ranks)?;
    // The result is at most `samples`.
    let bound = |rank: u32| (samples as u128 * u128::from(rank) / u128::from(ranks)) as usize;
    Ok(bound(rank)..bound(rank + 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_sample_occurs_twice_and_ranks_have_equal_step_counts(
            batch in 1usize..20, ranks in 1u32..9, extra in 0usize..300, epoch in 0u64..5, seed in any::<u64>()
        ) {
            let samples = batch * ranks as usize + extra;
            let mut seen = vec![false; samples];
            for rank in 0..ranks {
                let mut sampler = Sampler::new(SamplerConfig { samples, batch, rank, ranks, seed }).unwrap();
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
        fn any_number_of_ranks_trains_on_the_same_global_batches(
            global in 1usize..40, ranks in 1usize..9, extra in 0usize..100, epoch in 0u64..5
        ) {
            prop_assume!(ranks <= global);
            let samples = global + extra;
            let mut alone = Sampler::of_part(samples, global, 0..global, 5).unwrap();
            let parts: Vec<_> = (0..ranks).map(|rank| batch_part(global, rank, ranks)).collect();
            let sizes: Vec<usize> = parts.iter().map(ExactSizeIterator::len).collect();
            prop_assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes[0] - sizes[ranks - 1] <= 1);
            let of_part = |part: &Range<usize>| Sampler::of_part(samples, global, part.clone(), 5).unwrap();
            let mut samplers: Vec<Sampler> = parts.iter().map(of_part).collect();
            for step in 0..samples / global {
                let all: Vec<u32> =
                    samplers.iter_mut().flat_map(|sampler| sampler.batch(epoch, step).to_vec()).collect();
                prop_assert_eq!(&all[..], alone.batch(epoch, step));
            }
        }

        #[test]
        fn evaluation_shards_cover_all_samples_once(samples in 0usize..1000, ranks in 1u32..17) {
            let shards: Vec<_> = (0..ranks).map(|rank| evaluation_shard(samples, rank, ranks).unwrap()).collect();
            let all: Vec<usize> = shards.iter().cloned().flatten().collect();
            prop_assert_eq!(all, (0..samples).collect::<Vec<_>>());
            let sizes = shards.iter().map(ExactSizeIterator::len);
            prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
        }
    }

    #[test]
    fn epochs_differ_and_are_reproducible() {
        let config = SamplerConfig { samples: 1000, batch: 1000, rank: 0, ranks: 1, seed: 3 };
        let mut sampler = Sampler::new(config).unwrap();
        let first = sampler.batch(0, 0).to_vec();
        let second = sampler.batch(1, 0).to_vec();
        assert_ne!(first, second);
        assert_eq!(first, sampler.batch(0, 0));
    }

    #[test]
    fn invalid_configurations_are_rejected() {
        let config = SamplerConfig { samples: 10, batch: 6, rank: 0, ranks: 2, seed: 0 };
        let refused = |config| Sampler::new(config).unwrap_err().to_string();
        assert_eq!(refused(config), "sampler: 10 samples are fewer than a batch of 6 on each of 2 ranks");
        let fits = SamplerConfig { batch: 5, ..config };
        assert_eq!(refused(SamplerConfig { rank: 2, ..fits }), "sampler: there is no rank 2 among 2");
        assert_eq!(refused(SamplerConfig { ranks: 0, ..fits }), "sampler: there is no rank 0 among 0");
        assert_eq!(refused(SamplerConfig { batch: 0, ..fits }), "sampler: a batch has at least one sample");
        assert!(refused(SamplerConfig { batch: usize::MAX, ..fits }).contains("fewer than a batch of"));
        for (global, part, text) in [
            (11, 0..1, "10 samples are fewer than a global batch of 11"),
            (8, 4..9, "samples 4 to 9 of a global batch of 8"),
            (8, 4..4, "a batch has at least one sample"),
        ] {
            assert_eq!(
                Sampler::of_part(10, global, part, 0).unwrap_err().to_string(),
                format!("sampler: {text}")
            );
        }
        assert!(evaluation_shard(10, 3, 3).is_err() && evaluation_shard(10, 0, 0).is_err());
        let last = evaluation_shard(usize::MAX, u32::MAX - 1, u32::MAX).unwrap();
        assert_eq!(last.end, usize::MAX);
    }
}
