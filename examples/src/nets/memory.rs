//! Memory for the activations of a batch and their gradients, in two parts.
//!
//! *Images*, up to the first dense layer, take nearly all of it. They may be stored as bf16, which halves memory and
//! traffic. *Vectors*, from there on, are f32: they are small, and include the logits. The last slot of the images is
//! also the first of the vectors: as images, channels last, and flattened for the dense layer, channels first.

use mgpu::Result;
use mgpu_kernels::{AlignedVec, Storage};

use super::layers::StageTensors;
use super::plan::{Plan, Stage};

/// Size of a cache line in bytes. Every slot starts on one.
const LINE: usize = 64;

/// The activations of adjacent slots in one allocation, and their gradients.
#[derive(Debug)]
pub(super) struct ActivationMemory<T> {
    values: AlignedVec<T>,
    /// Index of the first slot.
    first: usize,
    /// The start of each slot.
    begins: Vec<usize>,
    /// Elements of one image in each slot.
    lens: Vec<usize>,
    /// Two buffers that gradients alternate between in the backward pass, and the index of the one with the gradient
    /// of the current stage's output.
    gradients: [AlignedVec<T>; 2],
    current: usize,
}

impl<T: Storage> ActivationMemory<T> {
    /// The slots of images.
    pub(super) fn images(plan: &Plan, max_batch: usize) -> Self {
        Self::new(plan, 0..plan.vectors, max_batch)
    }

    /// The slots of vectors.
    pub(super) fn vectors(plan: &Plan, max_batch: usize) -> Self {
        Self::new(plan, plan.vectors - 1..plan.slots.len(), max_batch)
    }

    fn new(plan: &Plan, slots: std::ops::Range<usize>, max_batch: usize) -> Self {
        let gradients = gradients(plan, &slots).map(|len| AlignedVec::zeroed(len * max_batch));
        let (first, lens) = (slots.start, plan.slots[slots].to_vec());
        let mut end = 0;
        let begin = |len: &usize| {
            let begin = end;
            end += (len * max_batch).next_multiple_of(LINE / size_of::<T>());
            begin
        };
        let begins = lens.iter().map(begin).collect();
        ActivationMemory { values: AlignedVec::zeroed(end), first, begins, lens, gradients, current: 0 }
    }

    /// The elements of slot `slot` for `images` images.
    pub(super) fn slot(&self, slot: usize, images: usize) -> &[T] {
        let slot = slot - self.first;
        &self.values[self.begins[slot]..][..self.lens[slot] * images]
    }

    /// As [`slot`](Self::slot).
    pub(super) fn slot_mut(&mut self, slot: usize, images: usize) -> &mut [T] {
        let slot = slot - self.first;
        &mut self.values[self.begins[slot]..][..self.lens[slot] * images]
    }

    /// The input and output of a stage. If it works in place, the input is empty.
    pub(super) fn of_stage(&mut self, stage: &Stage, images: usize) -> (&[T], &mut [T]) {
        let (input, output) = (stage.input - self.first, stage.output - self.first);
        let (before, from_output) = self.values.split_at_mut(self.begins[output]);
        let x = if input == output {
            &[][..]
        } else {
            &before[self.begins[input]..][..self.lens[input] * images]
        };
        (x, &mut from_output[..self.lens[output] * images])
    }

    /// The last slot's values, and the buffer of their gradient, for the start of a backward pass.
    pub(super) fn start_backward(&mut self, images: usize) -> (&[T], &mut [T]) {
        self.current = 0;
        let last = self.lens.len() - 1;
        let len = self.lens[last] * images;
        (&self.values[self.begins[last]..][..len], &mut self.gradients[0][..len])
    }

    /// Runs `pass`, the backward pass of a stage. `input_gradient` says whether the gradient of its input is needed.
    pub(super) fn backward(
        &mut self,
        stage: &Stage,
        images: usize,
        input_gradient: bool,
        pass: impl FnOnce(StageTensors<'_, T>) -> Result<()>,
    ) -> Result<()> {
        let [first, second] = self.gradients.each_mut();
        let (current, other) = if self.current == 0 { (first, second) } else { (second, first) };
        let slot = |slot: usize| {
            let slot = slot - self.first;
            &self.values[self.begins[slot]..][..self.lens[slot] * images]
        };
        let (x, y) = (slot(stage.input), slot(stage.output));
        let in_place = stage.backward_in_place();
        let dx = (input_gradient && !in_place).then(|| &mut other[..x.len()]);
        pass(StageTensors { x, y, dy: &mut current[..y.len()], dx })?;
        if !in_place {
            self.current = 1 - self.current;
        }
        Ok(())
    }

    /// The gradient of slot `slot`, after the backward passes of the following stages.
    pub(super) fn gradient(&self, slot: usize, images: usize) -> &[T] {
        &self.gradients[self.current][..self.lens[slot - self.first] * images]
    }
}

/// Elements per image of the two gradient buffers of some slots. The last slot uses the first buffer.
fn gradients(plan: &Plan, slots: &std::ops::Range<usize>) -> [usize; 2] {
    let first = plan.first_with_parameters();
    let stages = plan.stages.iter().enumerate().rev();
    let within = stages.filter(|(index, stage)| {
        *index >= first && slots.contains(&stage.output) && slots.contains(&stage.input)
    });
    let (mut lens, mut at) = ([0; 2], 0);
    for (index, stage) in within {
        lens[at] = lens[at].max(plan.slots[stage.output]);
        if index > first && !stage.backward_in_place() {
            at = 1 - at;
            lens[at] = lens[at].max(plan.slots[stage.input]);
        }
    }
    lens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nets::{Layer, Spec};

    #[test]
    fn gradient_buffers_are_large_enough() {
        let plan = Plan::new(&Spec::named("deep").unwrap());
        // The output gradient of the second convolution is in the first buffer, that of the first convolution in the
        // second.
        assert_eq!(gradients(&plan, &(0..3)), [128 * 7 * 7, 64 * 14 * 14]);
        // Logits and the flattened input in the first; the 1,024 outputs of the dense layer in the second.
        assert_eq!(gradients(&plan, &(2..5)), [128 * 7 * 7, 1024]);
        let dense = Plan::new(&Spec {
            layers: vec![Layer::Flatten, Layer::Dense(10)],
            ..Spec::named("deep").unwrap()
        });
        assert_eq!((gradients(&dense, &(0..1)), gradients(&dense, &(0..2))), ([0, 0], [10, 0]));
    }
}
