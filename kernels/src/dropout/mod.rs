//! Dropout: elements are zeroed with a given probability while training.
//!
//! Contract: element `i` of the batch becomes 0 with probability `p`, else `x / (1 − p)`, so that its expectation
//! stays (Srivastava et al., "Dropout", JMLR 2014, in the inverted form). Whether it is kept depends on `(seed,
//! stream, i)` alone, with `i` counted over the batch of all ranks: a batch split over ranks or threads drops
//! what a single thread would have dropped. The backward pass applies the same mask to the gradient, regenerated
//! rather than stored.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// Names one mask and the place of a slice in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mask {
    /// The run's seed.
    pub seed: u64,
    /// Distinguishes layers and steps of a run.
    pub stream: u64,
    /// Number of elements of the mask that precede the slice.
    pub first: u64,
}

/// Of 2^24 equally likely numbers, how many mean that an element is dropped.
///
/// # Panics
/// Unless `probability` is in [0, 1).
fn dropped(probability: f32) -> u32 {
    assert!((0.0..1.0).contains(&probability), "dropout with probability {probability}");
    (probability * (1 << 24) as f32) as u32
}

/// What the elements that are kept are multiplied with.
fn scale(probability: f32) -> f32 {
    1.0 / (1.0 - probability)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Threads;
    use proptest::prelude::*;

    const MASK: Mask = Mask { seed: 3, stream: 9, first: 0 };

    #[test]
    fn the_share_of_dropped_elements_is_the_probability_and_the_rest_is_scaled() {
        for p in [0.2f32, 0.5, 0.75] {
            let mut values = vec![1.0; 100_000];
            cpu::apply(&Threads::new(2), p, MASK, &mut values);
            let dropped = values.iter().filter(|&&value| value == 0.0).count() as f32;
            // The standard deviation of the share is below 0.0016.
            assert!((dropped / 100_000.0 - p).abs() < 0.008, "{dropped}");
            assert!(values.iter().all(|&value| value == 0.0 || value == 1.0 / (1.0 - p)));
        }
    }

    #[test]
    fn every_element_follows_its_number_in_the_stream() {
        let (p, mask) = (0.3, Mask { first: u64::MAX - 40, ..MASK });
        for count in [1, 3] {
            let values: Vec<f32> = (0..100_003).map(|i| i as f32 - 50_000.0).collect();
            let mut dropped = values.clone();
            cpu::apply(&Threads::new(count), p, mask, &mut dropped);
            let stream = crate::rng::Stream::new(mask.seed, mask.stream);
            for (i, (&value, &result)) in values.iter().zip(&dropped).enumerate() {
                let kept = stream.bits24(mask.first.wrapping_add(i as u64)) >= super::dropped(p);
                assert_eq!(result, if kept { value * scale(p) } else { 0.0 }, "element {i}");
            }
        }
    }

    #[test]
    fn probability_zero_keeps_everything() {
        let mut values = vec![1.5; 100];
        cpu::apply(&Threads::new(1), 0.0, MASK, &mut values);
        assert_eq!(values, [1.5; 100]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn any_split_over_threads_and_ranks_draws_the_same_mask(cut in 0usize..70_000, count in 2usize..5) {
            let mut whole = vec![1.0; 70_000];
            cpu::apply(&Threads::new(1), 0.3, MASK, &mut whole);
            let mut halves = vec![1.0; 70_000];
            let (left, right) = halves.split_at_mut(cut);
            let threads = Threads::new(count);
            cpu::apply(&threads, 0.3, MASK, left);
            cpu::apply(&threads, 0.3, Mask { first: cut as u64, ..MASK }, right);
            prop_assert!(whole == halves);
        }
    }
}
