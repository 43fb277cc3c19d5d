//! Dropout: elements are zeroed with a given probability while training.
//!
//! Contract: element `i` of the batch becomes 0 with probability `p`, otherwise `x / (1 − p)`, which preserves its
//! expectation (inverted dropout; Srivastava et al., "Dropout", JMLR 2014). Whether it is kept depends on `(seed,
//! stream, step, i)` alone, with `i` counted over the batch of all ranks: a batch divided among ranks or threads
//! drops what a single thread would have dropped. The backward pass applies the same mask to the gradient,
//! regenerated rather than stored.
//!
//! Elements are counted as \[N, C, P\] (P = H·W), although they are \[N, P, C\] in memory: a mask does not depend on
//! the layout.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// Identifies the masks of one layer, one for each step, and the position of this rank's samples in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mask {
    /// The run's seed.
    pub seed: u64,
    /// Distinguishes the layers of a run. The step is added to it, 16 bits higher.
    pub stream: u64,
    /// Index of this rank's first sample in the batch of all ranks.
    pub first_sample: u64,
    /// Channels of a sample, C.
    pub channels: usize,
    /// Positions of a sample, P = H·W.
    pub plane: usize,
}

impl Mask {
    /// The stream of random numbers of the mask of training step `step`.
    pub fn stream_of_step(&self, step: u64) -> u64 {
        self.stream | step << 16
    }
}

/// How many of 2^24 equally likely random numbers drop an element.
///
/// # Panics
/// Unless `probability` is in [0, 1).
fn dropped(probability: f32) -> u32 {
    assert!((0.0..1.0).contains(&probability), "dropout with probability {probability}");
    (probability * (1 << 24) as f32) as u32
}

/// The factor for elements that are kept.
fn scale(probability: f32) -> f32 {
    1.0 / (1.0 - probability)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Threads;
    use proptest::prelude::*;

    const MASK: Mask = Mask { seed: 3, stream: 9, first_sample: 0, channels: 10, plane: 7 };

    #[test]
    fn the_dropped_fraction_is_the_probability_and_other_elements_are_scaled() {
        for p in [0.2f32, 0.5, 0.75] {
            let mut values = vec![1.0; 105_000];
            cpu::apply(&Threads::new(2), p, &MASK, 0, &mut values);
            let dropped = values.iter().filter(|&&value| value == 0.0).count() as f32;
            // The standard deviation of the fraction is below 0.0016.
            assert!((dropped / 105_000.0 - p).abs() < 0.008, "{dropped}");
            assert!(values.iter().all(|&value| value == 0.0 || value == 1.0 / (1.0 - p)));
        }
    }

    #[test]
    fn probability_zero_keeps_everything() {
        let mut values = vec![1.5; 140];
        cpu::apply(&Threads::new(1), 0.0, &MASK, 0, &mut values);
        assert_eq!(values, [1.5; 140]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn any_split_over_threads_and_ranks_draws_the_same_mask(cut in 0usize..1000, count in 2usize..5) {
            let mut whole = vec![1.0; 70_000];
            cpu::apply(&Threads::new(1), 0.3, &MASK, 0, &mut whole);
            let mut halves = vec![1.0; 70_000];
            let (left, right) = halves.split_at_mut(cut * 70);
            let threads = Threads::new(count);
            cpu::apply(&threads, 0.3, &MASK, 0, left);
            cpu::apply(&threads, 0.3, &Mask { first_sample: cut as u64, ..MASK }, 0, right);
            prop_assert!(whole == halves);
        }
    }

    #[test]
    fn elements_are_counted_channel_by_channel() {
        let mut values = vec![1.0; 3 * 70];
        cpu::apply(&Threads::new(1), 0.5, &Mask { first_sample: 4, ..MASK }, 6, &mut values);
        let stream = crate::rng::Stream::new(MASK.seed, MASK.stream | 6 << 16);
        for (at, value) in values.iter().enumerate() {
            let (sample, position, channel) = (at / 70, at % 70 / 10, at % 10);
            let element = (4 + sample) * 70 + channel * 7 + position;
            assert_eq!(*value == 0.0, stream.uniform(element as u64) < 0.5, "{at}");
        }
    }
}
