//! Where a model writes its gradients during a backward pass.

use super::Reduction;
use super::accumulate::Accumulator;
use super::slot::{Exchange, check_tensor, ready_twice};
use super::slots::Slots;
use crate::comm::Communicator;
use crate::replicate::sum_over_ranks;
use crate::{Error, Layout, Result};

/// Where a model writes its gradients during a backward pass.
pub trait GradientSink {
    /// The gradient of parameter tensor `tensor` (index in the layout), to be overwritten: it holds whatever the
    /// last step left.
    ///
    /// # Panics
    /// If there is no such tensor, or it may be on its way already, since it was announced.
    fn gradient(&mut self, tensor: usize) -> &mut [f32];

    /// The gradient of `tensor` is final: its all-reduce may start. Called once per tensor and micro-batch, in the same
    /// order on every rank, best last layer first.
    ///
    /// # Errors
    /// If there is no such tensor, or it was announced before; or as [`Communicator::all_reduce`].
    fn ready(&mut self, tensor: usize) -> Result<()>;

    /// Copies the gradient of `tensor` and announces it.
    ///
    /// # Errors
    /// If `gradient` has not as many elements as the tensor (a sink may panic instead); or as [`ready`](Self::ready).
    fn write(&mut self, tensor: usize, gradient: &[f32]) -> Result<()> {
        self.gradient(tensor).copy_from_slice(gradient);
        self.ready(tensor)
    }

    /// Sums `values` over all ranks, in place: for synchronised batch normalisation.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    fn sum_over_ranks(&mut self, values: &mut [f64]) -> Result<()>;
}

/// The sink of a [`DataParallel`](super::DataParallel)'s step, for one micro-batch.
pub(super) struct Sink<'a> {
    pub(super) comm: &'a mut Communicator,
    pub(super) layout: &'a Layout,
    pub(super) slots: &'a mut Slots,
    /// Where to note the order of tensors, if that is not known yet.
    pub(super) observed: Option<&'a mut Vec<usize>>,
    pub(super) accumulator: &'a mut Accumulator,
    pub(super) exchange: Exchange,
    /// The step being made, from 0.
    pub(super) step: u64,
    /// Whether to check that gradients are finite.
    pub(super) check: bool,
    /// A tensor with gradients that are not.
    pub(super) not_finite: &'a mut Option<usize>,
}

impl Sink<'_> {
    /// Checks that there is a tensor `tensor`, whose gradient was not announced before.
    fn check_open(&self, tensor: usize) -> Result<()> {
        check_tensor(self.layout, "step", tensor)?;
        let slot = &self.slots.all[self.slots.of[tensor]];
        if slot.open[tensor - slot.bucket.tensors.start] {
            Ok(())
        } else {
            Err(ready_twice(self.layout, tensor))
        }
    }
}

impl GradientSink for Sink<'_> {
    fn gradient(&mut self, tensor: usize) -> &mut [f32] {
        check_tensor(self.layout, "step", tensor).unwrap_or_else(|error| panic!("{error}"));
        let slot = &mut self.slots.all[self.slots.of[tensor]];
        let range = slot.within(self.layout, tensor);
        &mut slot.values_mut()[range]
    }

    fn ready(&mut self, tensor: usize) -> Result<()> {
        self.check_open(tensor)?;
        let slot = &mut self.slots.all[self.slots.of[tensor]];
        slot.open[tensor - slot.bucket.tensors.start] = false;
        if let Some(order) = self.observed.as_mut().filter(|_| self.accumulator.is_last()) {
            order.push(tensor);
        }
        if self.accumulator.count() > 1 {
            let within = slot.within(self.layout, tensor);
            let Exchange { reduction, invariant, micro_batches } = self.exchange;
            // Where ranks are to make no difference, all are divided by at once.
            let is_mean = reduction == Reduction::Mean && !invariant;
            let divisor = if is_mean { micro_batches as f32 } else { 1.0 };
            self.accumulator.add(self.layout.range(tensor), &mut slot.values_mut()[within], divisor);
        }
        if slot.open.contains(&true) || !self.accumulator.is_last() {
            return Ok(());
        }
        if self.check && self.not_finite.is_none() {
            *self.not_finite = slot.not_finite(self.layout, self.step, self.comm.size() == 1);
        }
        slot.reduce(self.comm, self.exchange, self.slots.of[tensor] as u32)
    }

    fn write(&mut self, tensor: usize, gradient: &[f32]) -> Result<()> {
        self.check_open(tensor)?;
        let spec = &self.layout.tensors()[tensor];
        if gradient.len() != spec.len() {
            let (name, is, should) = (&spec.name, gradient.len(), spec.len());
            let problem = format!("a gradient of {is} elements for tensor `{name}`, which has {should}");
            return Err(Error::InvalidArgument { operation: "step", problem });
        }
        self.gradient(tensor).copy_from_slice(gradient);
        self.ready(tensor)
    }

    fn sum_over_ranks(&mut self, values: &mut [f64]) -> Result<()> {
        // Independent of the number of ranks is only what a micro-batch knows by itself.
        if self.exchange.invariant { Ok(()) } else { sum_over_ranks(self.comm, values) }
    }
}
