//! A part of a network, for pipeline parallelism: consecutive layers, with the activations at its two ends.
//!
//! Each part has its own tensors only. They are consecutive in the layout of the whole network, so the parts' arenas,
//! one behind the other, are the arena of the whole. A part computes the bits that the whole network computes: the
//! activations at a cut are passed on as they are stored.
//!
//! ```
//! use mgpu_examples::nets::{ConvPolicy, Net, Spec};
//! let spec = Spec::named("lenet5")?;
//! assert_eq!(spec.cuts(), [3, 7, 9, 11]);
//! let of = |layers| Net::<f32>::part(&spec, layers, (4, 1), 1, ConvPolicy::Auto);
//! let (first, second) = (of(0..7), of(7..12));
//! let lens = [first.layout().len(), second.layout().len()];
//! assert_eq!(lens.iter().sum::<usize>(), Net::new(&spec, 4, 1).layout().len());
//! # Ok::<(), mgpu_examples::nets::UnknownNet>(())
//! ```

use std::ops::Range;

use mgpu::Layout;
use mgpu_kernels::Storage;
use mgpu_kernels::conv::cpu::ConvPolicy;

use super::Spec;
use super::memory::image_slots;
use super::net::{BatchInFlight, Net};
use super::plan::Plan;

/// Activations at an end of a part, or their gradient.
#[derive(Debug)]
pub enum Activations<'a, E> {
    /// Images, \[N, H, W, C\].
    Images(&'a mut [E]),
    /// Vectors, \[N, F\].
    Vectors(&'a mut [f32]),
}

impl Spec {
    /// The layers before which the network can be cut so that both parts have parameters, ascending: those that begin a
    /// line of a [profile](super::Net::profile), without layers that work in place.
    pub fn cuts(&self) -> Vec<usize> {
        let plan = Plan::new(self);
        let trained: Vec<usize> = self.trained_layers(&plan);
        let between = |cut: &usize| trained.iter().any(|layer| layer >= cut) && trained[0] < *cut;
        plan.cuts().into_iter().filter(between).collect()
    }

    /// The layers that begin a stage with parameters.
    pub fn layers_with_parameters(&self) -> Vec<usize> {
        self.trained_layers(&Plan::new(self))
    }

    fn trained_layers(&self, plan: &Plan) -> Vec<usize> {
        plan.stages.iter().filter(|stage| stage.op.weight().is_some()).map(|stage| stage.layer).collect()
    }

    /// Names, shapes and offsets of the parameters, and of the running statistics, of the whole network.
    pub fn layouts(&self) -> (Layout, Layout) {
        let tensors = Plan::new(self).tensors;
        (tensors.parameters, tensors.buffers)
    }
}

impl<E: Storage> Net<E> {
    /// The part that begins with layer `layers.start` and ends before layer `layers.end`. Both are 0, one of the
    /// network's [cuts](Spec::cuts), or the number of its layers. Allocates everything for `in_flight` batches of up to
    /// `max_batch` images.
    ///
    /// # Panics
    /// As [`Net::new`]; if no layer begins in the part, or `in_flight` is 0.
    pub fn part(
        spec: &Spec,
        layers: Range<usize>,
        (max_batch, in_flight): (usize, usize),
        threads: usize,
        choice: ConvPolicy,
    ) -> Net<E> {
        assert!(in_flight > 0, "a network needs memory for a batch");
        Net::of_plan(Plan::part(spec, layers), (max_batch, in_flight), threads, choice)
    }

    /// Makes batch `index` of those in flight the current one. On a timeline its passes get the number `number`.
    ///
    /// # Panics
    /// In the next pass, if there is no such batch.
    pub fn select_batch(&mut self, index: usize, number: usize) {
        (self.current, self.span_number) = (index, Some(number as u32));
    }

    /// Bytes of the activations of all batches in flight.
    pub fn activation_bytes(&self) -> usize {
        self.batches.iter().map(|batch| batch.images.bytes() + batch.vectors.bytes()).sum()
    }

    /// Begins a batch of `images` images: returns the memory for the part's input, to be overwritten.
    pub fn input(&mut self, images: usize) -> Activations<'_, E> {
        self.batches[self.current].len = images;
        self.slot(0)
    }

    /// The output of the last forward pass.
    pub fn output(&mut self) -> Activations<'_, E> {
        self.slot(self.plan.slots.len() - 1)
    }

    fn slot(&mut self, slot: usize) -> Activations<'_, E> {
        let BatchInFlight { images, vectors, len, .. } = &mut self.batches[self.current];
        if image_slots(&self.plan).contains(&slot) {
            Activations::Images(images.slot_mut(slot, *len))
        } else {
            Activations::Vectors(vectors.slot_mut(slot, *len))
        }
    }

    /// The memory for the gradient of the current batch's output, to be overwritten before a
    /// [backward pass](Self::backward_part).
    pub fn output_gradient(&mut self) -> Activations<'_, E> {
        let slot = self.plan.slots.len() - 1;
        let len = self.plan.slots[slot] * self.batches[self.current].len;
        if image_slots(&self.plan).contains(&slot) {
            Activations::Images(self.image_gradients.start(len))
        } else {
            Activations::Vectors(self.vector_gradients.start(len))
        }
    }

    /// The gradient of the input, after a backward pass.
    pub fn input_gradient(&mut self) -> Activations<'_, E> {
        let len = self.plan.slots[0] * self.batches[self.current].len;
        if image_slots(&self.plan).contains(&0) {
            Activations::Images(self.image_gradients.latest(len))
        } else {
            Activations::Vectors(self.vector_gradients.latest(len))
        }
    }
}
