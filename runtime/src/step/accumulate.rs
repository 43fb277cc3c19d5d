//! The gradients of several micro-batches become one, before they travel.
//!
//! A micro-batch writes its gradients where the step's will be, and they are added to while they are in the cache: the only
//! memory this takes are the gradients' once more, and nothing for a single micro-batch.
//!
//! Where training is not to depend on the number of ranks, sums are taken pairwise: of micro-batches 0 and 1, 2 and 3, then of
//! these sums, and so on, as a binary counter carries. Level l holds the sum of 2ˡ micro-batches where bit l of their number
//! is set. n ranks with k micro-batches each hold the subtrees of one tree over n·k, if both are powers of two
//! ([`tree`](super::tree) has its top). This takes ⌈log₂ k⌉ times the memory of the gradients.

use std::ops::Range;

/// Sums of micro-batches, for all gradients.
#[derive(Debug, Default)]
pub(super) struct Accumulator {
    /// Elements of all gradients.
    len: usize,
    pairwise: bool,
    levels: Vec<Vec<f32>>,
    /// Micro-batches of the step.
    count: usize,
    /// The one being computed.
    current: usize,
}

impl Accumulator {
    pub(super) fn new(len: usize, pairwise: bool) -> Self {
        Accumulator { len, pairwise, ..Self::default() }
    }

    /// Gets ready for a step of `count` micro-batches.
    pub(super) fn begin_step(&mut self, count: usize) {
        let levels =
            (count - 1).checked_ilog2().map_or(0, |log| if self.pairwise { log as usize + 1 } else { 1 });
        while self.levels.len() < levels {
            self.levels.push(vec![0.0; self.len]);
        }
        (self.count, self.current) = (count, 0);
    }

    /// Gets ready for micro-batch `index`.
    pub(super) fn begin_batch(&mut self, index: usize) {
        self.current = index;
    }

    /// Micro-batches of the step.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Whether the micro-batch being computed is the step's last.
    pub(super) fn is_last(&self) -> bool {
        self.current + 1 == self.count
    }

    /// Takes the micro-batch's gradients of the elements `at`; with the last micro-batch, replaces them by the sum of all.
    pub(super) fn add(&mut self, at: Range<usize>, gradients: &mut [f32]) {
        let last = self.is_last();
        // Bits that are set are levels with sums that wait. The lowest ones are carried; with the last micro-batch all are.
        let waiting = if self.pairwise { self.current } else { self.current.min(1) };
        let mut level = 0;
        while waiting >> level & 1 == 1 || last && waiting >> level > 0 {
            if waiting >> level & 1 == 1 {
                let earlier = &self.levels[level][at.clone()];
                for (gradient, earlier) in gradients.iter_mut().zip(earlier) {
                    *gradient += earlier;
                }
            }
            level += 1;
        }
        if !last {
            let level = if self.pairwise { level } else { 0 };
            self.levels[level][at].copy_from_slice(gradients);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(values: &[f32], pairwise: bool) -> f32 {
        let mut accumulator = Accumulator::new(3, pairwise);
        accumulator.begin_step(values.len());
        let mut result = f32::NAN;
        for (index, value) in values.iter().enumerate() {
            accumulator.begin_batch(index);
            let mut gradient = [*value];
            accumulator.add(1..2, &mut gradient);
            [result] = gradient;
        }
        result
    }

    /// Sums halves, each by itself.
    fn tree(values: &[f32]) -> f32 {
        match values {
            [value] => *value,
            _ => {
                let (left, right) = values.split_at(values.len() / 2);
                tree(left) + tree(right)
            }
        }
    }

    #[test]
    fn any_number_of_micro_batches_is_summed() {
        for count in 1..=20u32 {
            let values: Vec<f32> = (0..count).map(|i| (i * i + 1) as f32).collect();
            for pairwise in [false, true] {
                assert_eq!(sum(&values, pairwise), values.iter().sum::<f32>(), "{count}");
            }
        }
    }

    #[test]
    fn powers_of_two_are_summed_as_a_balanced_tree() {
        // Values of very different size, so that another order would show.
        let values: Vec<f32> = (0..16u32).map(|i| 1.1f32.powi((i * 37 % 64) as i32)).collect();
        assert_ne!(values.iter().sum::<f32>(), tree(&values));
        for count in [1, 2, 4, 8, 16] {
            assert_eq!(sum(&values[..count], true), tree(&values[..count]));
            assert_eq!(sum(&values[..count], false), values[..count].iter().sum::<f32>());
        }
    }

    #[test]
    fn a_step_knows_nothing_of_the_one_before() {
        let mut accumulator = Accumulator::new(1, true);
        for count in [3, 2, 5, 1] {
            accumulator.begin_step(count);
            for index in 0..count {
                accumulator.begin_batch(index);
                let mut gradient = [1.0];
                accumulator.add(0..1, &mut gradient);
                assert!(!accumulator.is_last() || gradient == [count as f32]);
            }
        }
    }
}
