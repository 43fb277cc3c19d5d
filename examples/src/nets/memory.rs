//! Memory for the activations of a batch and their gradients, in two parts.
//!
//! *Images*, up to the first dense layer, are nearly all of it. They may be kept as bf16, which is half the memory and half
//! the way to it. *Vectors*, from there on, are f32: they are few, and the logits are among them. The last slot of the images
//! is the first of the vectors, too: once as images, channels last, and once flattened for the dense layer, channels first.

use mgpu::Result;
use mgpu_kernels::{AlignedVec, Storage};

use super::layers::StageTensors;
use super::plan::{Plan, Stage};

/// Bytes of a cache line, on which every slot begins.
const LINE: usize = 64;

/// The activations of neighbouring slots, in one piece of memory, and their gradients.
#[derive(Debug)]
pub(super) struct ActivationMemory<T> {
    values: AlignedVec<T>,
    /// The number of the first slot.
    first: usize,
    /// Where each slot begins.
    begins: Vec<usize>,
    /// Elements for one image.
    lens: Vec<usize>,
    /// Two buffers between which gradients go to and fro on their way back, and which of them holds that of the output of the
    /// layer being worked on.
    gradients: [AlignedVec<T>; 2],
    current: usize,
}

impl<T: Storage> ActivationMemory<T> {
    /// Slots of images.
    pub(super) fn images(plan: &Plan, max_batch: usize) -> Self {
        Self::new(plan, 0..plan.vectors, max_batch)
    }

    /// Slots of vectors.
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

    /// What a stage reads and what it writes. In place, it reads nothing but the output.
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

    /// The last slot's values and the place of their gradient, with which a backward pass begins.
    pub(super) fn start_backward(&mut self, images: usize) -> (&[T], &mut [T]) {
        self.current = 0;
        let last = self.lens.len() - 1;
        let len = self.lens[last] * images;
        (&self.values[self.begins[last]..][..len], &mut self.gradients[0][..len])
    }

    /// Makes the backward pass of a stage by `pass`. `below` says whether the gradient of its input is asked for.
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

    /// The gradient of slot `slot`, once the stages behind it have made their backward passes.
    pub(super) fn gradient(&self, slot: usize, images: usize) -> &[T] {
        &self.gradients[self.current][..self.lens[slot - self.first] * images]
    }
}

/// Elements for one image of the two buffers of gradients of some slots. The first holds the last slot's to begin with.
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
        // The second convolution's result in the first buffer, the first's in the second.
        assert_eq!(gradients(&plan, &(0..3)), [128 * 7 * 7, 64 * 14 * 14]);
        // The logits, and what was flattened, in the first; the 1,024 outputs of the dense layer in the second.
        assert_eq!(gradients(&plan, &(2..5)), [128 * 7 * 7, 1024]);
        let dense = Plan::new(&Spec {
            layers: vec![Layer::Flatten, Layer::Dense(10)],
            ..Spec::named("deep").unwrap()
        });
        assert_eq!((gradients(&dense, &(0..1)), gradients(&dense, &(0..2))), ([0, 0], [10, 0]));
    }
}
