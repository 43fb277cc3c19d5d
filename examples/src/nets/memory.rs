//! Memory for the activations of a batch and for their gradients, in two parts.
//!
//! *Images*, up to the first dense layer, take nearly all of it. They may be stored as bf16, which halves memory and
//! traffic. *Vectors*, from there on, are f32: they are small, and include the logits. The last slot of the images is
//! also the first of the vectors: as images, channels last, and flattened for the dense layer, channels first.
//!
//! Activations exist once for each batch in flight, between its forward and its backward pass. Gradients only exist
//! during a backward pass.

use std::ops::Range;

use mgpu::Result;
use mgpu_kernels::{AlignedVec, Storage};

use super::layers::StageTensors;
use super::plan::{Plan, Stage};

/// Size of a cache line in bytes. Every slot starts on one.
const LINE: usize = 64;

/// The activations of adjacent slots in one allocation.
#[derive(Debug)]
pub(super) struct ActivationMemory<T> {
    values: AlignedVec<T>,
    /// Index of the first slot.
    first: usize,
    /// The start of each slot.
    begins: Vec<usize>,
    /// Elements of one image in each slot.
    lens: Vec<usize>,
}

/// The gradients of adjacent slots.
#[derive(Debug)]
pub(super) struct ActivationGradients<T> {
    /// Two buffers that gradients alternate between in the backward pass, and the index of the one with the gradient
    /// of the current stage's output.
    buffers: [AlignedVec<T>; 2],
    current: usize,
}

/// The slots of images.
pub(super) fn image_slots(plan: &Plan) -> Range<usize> {
    0..plan.vectors
}

/// The slots of vectors.
pub(super) fn vector_slots(plan: &Plan) -> Range<usize> {
    let slots = plan.slots.len();
    if plan.vectors == slots { slots..slots } else { plan.vectors.saturating_sub(1)..slots }
}

impl<T: Storage> ActivationMemory<T> {
    /// The slots `slots`, for batches of up to `max_batch` images.
    pub(super) fn new(plan: &Plan, slots: Range<usize>, max_batch: usize) -> Self {
        let (first, lens) = (slots.start, plan.slots[slots].to_vec());
        let mut end = 0;
        let begin = |len: &usize| {
            let begin = end;
            end += (len * max_batch).next_multiple_of(LINE / size_of::<T>());
            begin
        };
        let begins = lens.iter().map(begin).collect();
        ActivationMemory { values: AlignedVec::zeroed(end), first, begins, lens }
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
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
}

impl<T: Storage> ActivationGradients<T> {
    /// For the slots `slots`, and batches of up to `max_batch` images.
    pub(super) fn new(plan: &Plan, slots: Range<usize>, max_batch: usize) -> Self {
        let buffers = lens(plan, &slots).map(|len| AlignedVec::zeroed(len * max_batch));
        ActivationGradients { buffers, current: 0 }
    }

    /// The gradient of the last slot, of `len` elements, for the start of a backward pass.
    pub(super) fn start(&mut self, len: usize) -> &mut [T] {
        self.current = 0;
        &mut self.buffers[0][..len]
    }

    /// Runs `pass`, the backward pass of a stage. `input_gradient` says whether the gradient of its input is needed.
    pub(super) fn backward(
        &mut self,
        stage: &Stage,
        (values, images): (&ActivationMemory<T>, usize),
        input_gradient: bool,
        pass: impl FnOnce(StageTensors<'_, T>) -> Result<()>,
    ) -> Result<()> {
        let [first, second] = self.buffers.each_mut();
        let (current, other) = if self.current == 0 { (first, second) } else { (second, first) };
        let (x, y) = (values.slot(stage.input, images), values.slot(stage.output, images));
        let in_place = stage.backward_in_place();
        let dx = (input_gradient && !in_place).then(|| &mut other[..x.len()]);
        pass(StageTensors { x, y, dy: &mut current[..y.len()], dx })?;
        if !in_place {
            self.current = 1 - self.current;
        }
        Ok(())
    }

    /// The gradient of a slot of `len` elements, after the backward passes of the following stages.
    pub(super) fn latest(&mut self, len: usize) -> &mut [T] {
        &mut self.buffers[self.current][..len]
    }
}

/// Elements per image of the two gradient buffers of some slots. The last slot uses the first buffer.
fn lens(plan: &Plan, slots: &Range<usize>) -> [usize; 2] {
    let first = plan.first_with_parameters();
    let stages = plan.stages.iter().enumerate().rev();
    let within = stages.filter(|(index, stage)| {
        *index >= first && slots.contains(&stage.output) && slots.contains(&stage.input)
    });
    let (mut lens, mut at) = ([0; 2], 0);
    if plan.tensors.before > 0 && !slots.is_empty() {
        // The part's input may be the only slot.
        lens[0] = plan.slots[slots.end - 1];
    }
    for (index, stage) in within {
        lens[at] = lens[at].max(plan.slots[stage.output]);
        if plan.needs_input_gradient(index) && !stage.backward_in_place() {
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
        assert_eq!(lens(&plan, &(0..3)), [128 * 7 * 7, 64 * 14 * 14]);
        // Logits and the flattened input in the first; the 1,024 outputs of the dense layer in the second.
        assert_eq!(lens(&plan, &(2..5)), [128 * 7 * 7, 1024]);
        let dense = Plan::new(&Spec {
            layers: vec![Layer::Flatten, Layer::Dense(10)],
            ..Spec::named("deep").unwrap()
        });
        assert_eq!((lens(&dense, &(0..1)), lens(&dense, &(0..2))), ([0, 0], [10, 0]));
    }
}
