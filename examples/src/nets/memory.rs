//! Memory for the activations of a batch and their gradients.

use mgpu_kernels::AlignedVec;

use super::plan::{Plan, Stage};

/// Elements of a cache line, on which every slot begins.
const LINE: usize = 16;

/// The activations of all slots, in one piece of memory.
#[derive(Debug)]
pub(super) struct Slots {
    values: AlignedVec,
    /// Where each slot begins.
    begins: Vec<usize>,
    /// Elements for one image.
    lens: Vec<usize>,
}

impl Slots {
    pub(super) fn new(plan: &Plan, max_batch: usize) -> Self {
        let mut end = 0;
        let mut begin = |len: &usize| {
            let begin = end;
            end += (len * max_batch).next_multiple_of(LINE);
            begin
        };
        let begins = plan.slots.iter().map(&mut begin).collect();
        Slots { values: AlignedVec::zeroed(end), begins, lens: plan.slots.clone() }
    }

    /// The elements of slot `slot` for `images` images.
    pub(super) fn slot(&self, slot: usize, images: usize) -> &[f32] {
        &self.values[self.begins[slot]..][..self.lens[slot] * images]
    }

    /// As [`slot`](Self::slot).
    pub(super) fn slot_mut(&mut self, slot: usize, images: usize) -> &mut [f32] {
        &mut self.values[self.begins[slot]..][..self.lens[slot] * images]
    }

    /// What a stage reads and what it writes. In place, it reads nothing but the output.
    pub(super) fn of_stage(&mut self, stage: &Stage, images: usize) -> (&[f32], &mut [f32]) {
        let (input, output) = (stage.input, stage.output);
        let (before, from_output) = self.values.split_at_mut(self.begins[output]);
        let x = if input == output {
            &[][..]
        } else {
            &before[self.begins[input]..][..self.lens[input] * images]
        };
        (x, &mut from_output[..self.lens[output] * images])
    }
}

/// Elements for one image of the two buffers between which gradients go to and fro on their way back. The first holds the
/// logits' gradient to begin with.
pub(super) fn gradients(plan: &Plan) -> [usize; 2] {
    let mut lens = [0; 2];
    let mut at = 0;
    lens[at] = plan.slots[plan.slots.len() - 1];
    for stage in plan.stages.iter().skip(plan.first_with_parameters() + 1).rev() {
        let moves = usize::from(!stage.op.backward_in_place()) + usize::from(stage.flattened.is_some());
        for _ in 0..moves {
            at = 1 - at;
            lens[at] = lens[at].max(plan.slots[stage.input]);
        }
    }
    lens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nets::Spec;

    #[test]
    fn gradients_have_room_for_what_lies_in_them() {
        // Logits in the first buffer; the 1,024 outputs of the dense layer in the second; what it flattened in the first,
        // and as an image in the second; the first convolution's result in the first.
        assert_eq!(gradients(&Plan::new(&Spec::named("deep").unwrap())), [64 * 14 * 14, 128 * 7 * 7]);
    }
}
