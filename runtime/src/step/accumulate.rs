//! Accumulation of the gradients of several micro-batches, before they are reduced over ranks.
//!
//! A micro-batch writes its gradients into the arena of the step's gradients; earlier sums are added while the
//! gradients are in the cache. This takes the memory of the gradients once more, and nothing for a single
//! micro-batch.
//!
//! For a world-size-invariant reduction, sums are taken pairwise: of micro-batches 0 and 1, 2 and 3, then of these
//! sums, and so on, like the carries of a binary counter. Level l holds the sum of 2ˡ micro-batches if bit l of their
//! number is set. With n ranks of k micro-batches each, both powers of two, every rank computes a subtree of one tree
//! over n·k ([`tree`](super::tree) computes the top). This takes ⌈log₂ k⌉ times the memory of the gradients.

use std::ops::Range;

use mgpu_kernels::arena::cpu as arena;

/// Which partial sums exist during the micro-batches of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counter {
    pairwise: bool,
    /// Number of micro-batches of the step.
    count: usize,
    /// Index of the current micro-batch.
    current: usize,
}

impl Counter {
    /// For a step of `count` micro-batches.
    pub(super) fn new(count: usize, pairwise: bool) -> Self {
        Counter { pairwise, count, current: 0 }
    }

    /// The same for a step of another number of micro-batches.
    pub(super) fn with_count(self, count: usize) -> Self {
        Counter::new(count, self.pairwise)
    }

    /// Begins micro-batch `index`.
    pub(super) fn begin_batch(&mut self, index: usize) {
        self.current = index;
    }

    /// Number of micro-batches of the step.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Index of the current micro-batch.
    #[cfg(feature = "cuda")]
    pub(super) fn current(&self) -> usize {
        self.current
    }

    /// Whether the current micro-batch is the step's last one.
    pub(super) fn is_last(&self) -> bool {
        self.current + 1 == self.count
    }

    /// Largest number of levels that hold partial sums.
    pub(super) fn levels(&self) -> usize {
        let pairs = (self.count - 1).checked_ilog2().map_or(0, |log| log as usize + 1);
        if self.pairwise { pairs } else { pairs.min(1) }
    }

    /// A bit for each level that holds a partial sum.
    fn occupied_levels(&self) -> usize {
        if self.pairwise { self.current } else { self.current.min(1) }
    }

    /// The levels whose sums are added to the current gradients: the lowest ones, like a carry; for the last
    /// micro-batch all of them. Each comes with the divisor of the result: `divisor` for the step's last addition,
    /// else 1.
    pub(super) fn carried_levels(&self, divisor: f32) -> impl Iterator<Item = (usize, f32)> + use<> {
        let (waiting, last) = (self.occupied_levels(), self.is_last());
        let top = if last { usize::BITS } else { waiting.trailing_ones() };
        let levels = (0..top as usize).filter(move |level| waiting >> level & 1 == 1);
        levels.map(move |level| (level, if last && waiting >> level == 1 { divisor } else { 1.0 }))
    }

    /// The level that holds the result; `None` for the last micro-batch, whose result is the step's sum.
    pub(super) fn result_level(&self) -> Option<usize> {
        let level = if self.pairwise { self.occupied_levels().trailing_ones() as usize } else { 0 };
        (!self.is_last()).then_some(level)
    }
}

/// Partial sums of the gradients of micro-batches.
#[derive(Debug)]
pub(super) struct Accumulator {
    /// Number of elements of all gradients.
    len: usize,
    levels: Vec<Vec<f32>>,
}

impl Accumulator {
    pub(super) fn new(len: usize) -> Self {
        Accumulator { len, levels: Vec::new() }
    }

    /// Allocates the levels that a step needs.
    pub(super) fn begin_step(&mut self, counter: &Counter) {
        while self.levels.len() < counter.levels() {
            self.levels.push(vec![0.0; self.len]);
        }
    }

    /// Accumulates the current micro-batch's gradients of the elements `at`. For the last micro-batch, replaces them
    /// by the sum of all, divided by `divisor`.
    pub(super) fn add(&mut self, counter: &Counter, at: Range<usize>, gradients: &mut [f32], divisor: f32) {
        let Self { levels, .. } = self;
        for (level, divisor) in counter.carried_levels(divisor) {
            arena::add(gradients, &levels[level][at.clone()], divisor);
        }
        if let Some(level) = counter.result_level() {
            levels[level][at].copy_from_slice(gradients);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(values: &[f32], pairwise: bool) -> f32 {
        let (mut accumulator, mut counter) = (Accumulator::new(3), Counter::new(values.len(), pairwise));
        accumulator.begin_step(&counter);
        let mut result = f32::NAN;
        for (index, value) in values.iter().enumerate() {
            counter.begin_batch(index);
            let mut gradient = [*value];
            accumulator.add(&counter, 1..2, &mut gradient, 1.0);
            [result] = gradient;
        }
        result
    }

    /// Sums each half recursively.
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
    fn sums_of_any_number_of_micro_batches_are_exact() {
        for count in 1..=20u32 {
            let values: Vec<f32> = (0..count).map(|i| (i * i + 1) as f32).collect();
            for pairwise in [false, true] {
                assert_eq!(sum(&values, pairwise), values.iter().sum::<f32>(), "{count}");
            }
        }
    }

    #[test]
    fn powers_of_two_are_summed_as_a_balanced_tree() {
        // Values of very different magnitude, so that another order of summation would show.
        let values: Vec<f32> = (0..16u32).map(|i| 1.1f32.powi((i * 37 % 64) as i32)).collect();
        assert_ne!(values.iter().sum::<f32>(), tree(&values));
        for count in [1, 2, 4, 8, 16] {
            assert_eq!(sum(&values[..count], true), tree(&values[..count]));
            assert_eq!(sum(&values[..count], false), values[..count].iter().sum::<f32>());
        }
    }

    #[test]
    fn a_step_does_not_depend_on_the_previous_one() {
        let mut accumulator = Accumulator::new(1);
        for count in [3, 2, 5, 1] {
            let mut counter = Counter::new(count, true);
            accumulator.begin_step(&counter);
            for index in 0..count {
                counter.begin_batch(index);
                let mut gradient = [1.0];
                accumulator.add(&counter, 0..1, &mut gradient, 1.0);
                assert!(!counter.is_last() || gradient == [count as f32]);
            }
        }
    }
}
