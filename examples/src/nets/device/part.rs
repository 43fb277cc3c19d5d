//! A part of a network on a GPU, for pipeline parallelism: it receives activations from the rank with the part before,
//! and sends its own to the rank with the part behind; gradients go the other way.
//!
//! The schedule is 1F1B (PipeDream-flush, Narayanan et al. 2021): part s of p runs the forward passes of p − s − 1
//! micro-batches, then a forward and a backward pass in turn, then the remaining backward passes. So it keeps the
//! activations of at most p − s micro-batches. Between a forward and a backward pass it sends to a neighbour and
//! receives from it in one group, because the neighbour does the same.

use std::ops::Range;

use mgpu::device::DeviceDataParallel;
use mgpu::{DeviceCommunicator, Result};
use mgpu_kernels::cuda::{AutotuneOptions, Memory, Stream, View};
use mgpu_kernels::{Precision, loss};

use super::super::layers::{BatchPlace, DeviceDropout, DevicePass};
use super::super::plan::Plan;
use super::super::spec::Spec;
use super::{DeviceData, DeviceNet};

/// The ranks of `comm` with the parts before and behind this rank's.
#[derive(Debug, Clone, Copy)]
pub struct Neighbours<'a> {
    /// Connects the ranks of a pipeline.
    pub comm: &'a DeviceCommunicator,
    /// The rank with the part before; `None` for the first part.
    pub before: Option<u32>,
    /// The rank with the part behind; `None` for the last part.
    pub behind: Option<u32>,
}

impl Neighbours<'_> {
    /// Sends a buffer to one rank and receives another one from the same rank, each if there is a rank.
    fn exchange(
        &self,
        stream: &Stream,
        peer: Option<u32>,
        send: Option<View<'_>>,
        receive: Option<View<'_>>,
    ) -> Result<()> {
        let Some(peer) = peer else { return Ok(()) };
        self.comm.group(|group| {
            send.map_or(Ok(()), |buffer| group.send(stream, buffer, peer))?;
            receive.map_or(Ok(()), |buffer| group.recv(stream, buffer, peer))
        })
    }
}

impl DeviceNet {
    /// The part that begins with layer `layers.start` and ends before layer `layers.end`; both are 0, one of the
    /// network's [cuts](Spec::cuts), or the number of its layers. Allocates everything for `in_flight` batches of up to
    /// `max_batch` images.
    ///
    /// # Errors
    /// As [`DeviceNet::new`].
    ///
    /// # Panics
    /// As [`DeviceNet::new`]; if no layer begins in the part, or `in_flight` is 0.
    pub fn part(
        spec: &Spec,
        layers: Range<usize>,
        (max_batch, in_flight): (usize, usize),
        precision: Precision,
        options: AutotuneOptions,
        stream: &Stream,
    ) -> Result<DeviceNet> {
        assert!(in_flight > 0, "a network needs memory for a batch");
        let is_last_only = layers.start > 0 && layers.end == spec.layers.len();
        let net =
            DeviceNet::of_plan(Plan::part(spec, layers), (max_batch, in_flight), precision, options, stream)?;
        let len = max_batch * spec.input.iter().product::<usize>();
        let images = || Memory::zeroed(stream.device(), precision.storage(), len);
        Ok(DeviceNet { unused_images: is_last_only.then(images).transpose()?, ..net })
    }

    /// Enqueues one training step of a part on the model's stream, with the model's micro-batches. The last part adds
    /// to the [`score`](Self::score).
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn pipeline_step(
        &mut self,
        model: &mut DeviceDataParallel,
        data: &DeviceData,
        dropout: Option<DeviceDropout>,
        neighbours: &Neighbours<'_>,
    ) -> Result<()> {
        let micro_batches = model.micro_batches();
        let &Neighbours { before, behind, .. } = neighbours;
        // How many forward passes are ahead of the backward passes.
        let ahead = self.batches.len().min(micro_batches) - 1;
        let key = |batch: usize, images: usize| {
            let first = (batch * images) as u64;
            dropout.map(|key| DeviceDropout { first_sample: key.first_sample + first, ..key })
        };
        model.begin_step()?;
        for batch in 0..ahead {
            neighbours.exchange(model.stream(), before, None, Some(self.input_of(batch)))?;
            self.forward_of(model, data, batch, key(batch, self.max_batch))?;
            neighbours.exchange(model.stream(), behind, Some(self.output_of(batch)), None)?;
        }
        neighbours.exchange(model.stream(), before, None, Some(self.input_of(ahead)))?;
        for batch in 0..micro_batches {
            if batch > 0 {
                model.next_micro_batch()?;
            }
            let next = batch + ahead;
            let output = if next < micro_batches {
                self.forward_of(model, data, next, key(next, self.max_batch))?;
                Some(self.output_of(next))
            } else {
                None
            };
            neighbours.exchange(model.stream(), behind, output, Some(self.output_gradient()))?;
            self.select(batch);
            let at = model.begin_span()?;
            let at = if behind.is_none() { self.loss_gradient(model, at)? } else { at };
            let images = self.batch(data, self.max_batch, BatchPlace::OfStep(batch, micro_batches));
            let gradient = self.backward(model, &images, key(batch, self.max_batch), at)?;
            let input = (next + 1 < micro_batches).then(|| self.input_of(next + 1));
            neighbours.exchange(model.stream(), before, Some(gradient), input)?;
        }
        model.finish_step()
    }

    /// Enqueues the evaluation of entries `first..first + images` of the order in all parts, as
    /// [`evaluate`](Self::evaluate). The last part adds to the [`score`](Self::score).
    ///
    /// # Errors
    /// As [`evaluate`](Self::evaluate), and as the communicator's.
    ///
    /// # Panics
    /// If `images` exceeds the maximum batch.
    pub fn pipeline_evaluate(
        &mut self,
        model: &mut DeviceDataParallel,
        data: &DeviceData,
        (first, images): (usize, usize),
        neighbours: &Neighbours<'_>,
    ) -> Result<()> {
        self.select(0);
        let batch = self.batch(data, images, BatchPlace::Index(first));
        neighbours.exchange(model.stream(), neighbours.before, None, Some(self.output(0, images)))?;
        let mut at = model.begin_span()?;
        if let Some(x) = self.gathered(images) {
            at = self.gather(model, &batch, x, at)?;
        }
        let _ = self.forward(model, &batch, DevicePass::Eval, at)?;
        let output = self.output(self.plan.slots.len() - 1, images);
        if neighbours.behind.is_some() {
            return neighbours.exchange(model.stream(), neighbours.behind, Some(output), None);
        }
        let (scratch, score) = (self.scratch.view(), self.score.view());
        Ok(loss::cuda::score(model.stream(), output, batch.labels, scratch, score)?)
    }

    /// Bytes of the activations of all batches in flight.
    pub fn activation_bytes(&self) -> usize {
        let slots = self.batches.iter().flat_map(|batch| &batch.slots);
        slots.map(|slot| slot.view().bytes()).sum()
    }

    /// Enqueues the forward pass of micro-batch `batch`, whose input has been received.
    fn forward_of(
        &mut self,
        model: &DeviceDataParallel,
        data: &DeviceData,
        batch: usize,
        dropout: Option<DeviceDropout>,
    ) -> Result<()> {
        self.select(batch);
        let mut at = model.begin_span()?;
        let images = self.batch(data, self.max_batch, BatchPlace::OfStep(batch, model.micro_batches()));
        if let Some(x) = self.gathered(self.max_batch) {
            at = self.gather(model, &images, x, at)?;
        }
        self.forward(model, &images, DevicePass::Train(dropout), at).map(|_| ())
    }

    /// Makes micro-batch `batch` the current one.
    fn select(&mut self, batch: usize) {
        self.current = batch % self.batches.len();
    }

    /// Where images of the data set go: the first part computes on them, and the last part needs their labels.
    fn gathered(&self, images: usize) -> Option<View<'_>> {
        match &self.unused_images {
            Some(unused) => Some(unused.slice(0..unused.view().len() / self.max_batch * images)),
            None => (self.plan.tensors.before == 0).then(|| self.output(0, images)),
        }
    }

    /// The memory of the input, and of the output, of micro-batch `batch`.
    fn input_of(&self, batch: usize) -> View<'_> {
        self.slot_of(batch, 0)
    }

    fn output_of(&self, batch: usize) -> View<'_> {
        self.slot_of(batch, self.plan.slots.len() - 1)
    }

    fn slot_of(&self, batch: usize, slot: usize) -> View<'_> {
        let in_flight = &self.batches[batch % self.batches.len()];
        in_flight.slots[slot].slice(0..self.plan.slots[slot] * self.max_batch)
    }

    /// The memory of the gradient of a whole micro-batch's output.
    fn output_gradient(&self) -> View<'_> {
        self.gradients[0].slice(0..self.plan.slots[self.plan.slots.len() - 1] * self.max_batch)
    }
}
