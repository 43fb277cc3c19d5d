//! The gradient sink: where a model writes its gradients during a backward pass.

use mgpu_kernels::Threads;

use super::accumulate::Accumulator;
use super::config::{ReducerConfig, Reduction, check_sums};
use super::gradient_bucket::{Exchange, GradientBucket};
use super::readiness::{Readiness, check_tensor};
use crate::comm::Communicator;
use crate::replicate::sum_over_ranks;
use crate::{Error, Layout, Result};

/// Where a model writes its gradients during a backward pass.
pub trait GradientSink {
    /// Whether the gradient of `tensor` is needed: false for a [frozen](crate::ParameterGroup::frozen) tensor and for
    /// an index out of range.
    fn wants(&self, tensor: usize) -> bool {
        let _ = tensor;
        true
    }

    /// The gradient of tensor `tensor` (index in the layout), to be overwritten: it contains old values.
    ///
    /// # Panics
    /// If there is no such tensor, it is frozen, or its bucket may already be in flight, because the gradient was
    /// marked ready.
    fn gradient(&mut self, tensor: usize) -> &mut [f32];

    /// Marks the gradient of `tensor` ready: its reduction may start. Call it once per tensor and micro-batch,
    /// ideally in the order of the first step, which the buckets follow.
    ///
    /// # Errors
    /// If there is no such tensor, it is frozen, or was marked ready before; or as [`Communicator::all_reduce`].
    fn ready(&mut self, tensor: usize) -> Result<()>;

    /// Copies the gradient of `tensor` and marks it ready.
    ///
    /// # Errors
    /// If the number of elements differs from the tensor's (a sink may panic instead); or as [`ready`](Self::ready).
    fn write(&mut self, tensor: usize, gradient: &[f32]) -> Result<()> {
        self.gradient(tensor).copy_from_slice(gradient);
        self.ready(tensor)
    }

    /// Sums `values` over all ranks, in place: for synchronised batch normalisation.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; if ranks may [`join`](ReducerConfig::join).
    fn sum_over_ranks(&mut self, values: &mut [f64]) -> Result<()>;
}

/// The sink of a [`Reducer`](super::Reducer), for one micro-batch.
pub(super) struct Sink<'a> {
    pub(super) comm: &'a mut Communicator,
    pub(super) layout: &'a Layout,
    pub(super) buckets: &'a mut [GradientBucket],
    pub(super) readiness: &'a mut Readiness,
    pub(super) accumulator: &'a mut Accumulator,
    pub(super) config: &'a ReducerConfig,
    pub(super) threads: &'a Threads,
    pub(super) exchange: Exchange,
    /// The current step, from 0.
    pub(super) step: u64,
    /// A tensor with non-finite gradients.
    pub(super) non_finite: &'a mut Option<usize>,
}

impl Sink<'_> {
    /// Sets all gradients that were not marked ready to 0.
    pub(super) fn zero_missing(&mut self) -> Result<()> {
        while let Some(tensor) = self.readiness.last_open() {
            self.gradient(tensor).fill(0.0);
            self.ready(tensor)?;
        }
        Ok(())
    }

    /// Starts the reduction of a bucket.
    fn reduce(&mut self, index: usize) -> Result<()> {
        let bucket = &mut self.buckets[index];
        if self.config.check_finite && self.non_finite.is_none() {
            let is_alone = self.comm.size() == 1;
            *self.non_finite = bucket.non_finite(self.threads, self.layout, self.step, is_alone);
        }
        bucket.reduce(self.comm, self.exchange, index as u32)
    }
}

impl GradientSink for Sink<'_> {
    fn wants(&self, tensor: usize) -> bool {
        self.layout.tensors().get(tensor).is_some_and(|tensor| !tensor.group.frozen)
    }

    fn gradient(&mut self, tensor: usize) -> &mut [f32] {
        check_tensor(self.layout, "step", tensor).unwrap_or_else(|error| panic!("{error}"));
        let bucket = self.readiness.bucket_of(tensor);
        let bucket = &mut self.buckets[bucket.unwrap_or_else(|| panic!("step: tensor {tensor} is frozen"))];
        let range = bucket.within(self.layout, tensor);
        &mut bucket.values_mut()[range]
    }

    fn ready(&mut self, tensor: usize) -> Result<()> {
        let (bucket, _) = self.readiness.mark_ready(self.layout, tensor)?;
        let counter = self.readiness.counter;
        if counter.count() > 1 {
            let bucket = &mut self.buckets[bucket];
            let within = bucket.within(self.layout, tensor);
            let Exchange { reduction, invariant, micro_batches, .. } = self.exchange;
            // A world-size-invariant reduction divides once at its end.
            let is_mean = reduction == Reduction::Mean && !invariant;
            let divisor = if is_mean { micro_batches as f32 } else { 1.0 };
            let gradient = &mut bucket.values_mut()[within];
            self.accumulator.add(&counter, self.layout.range(tensor), gradient, divisor);
        }
        while let Some(bucket) = self.readiness.next_bucket() {
            self.reduce(bucket)?;
        }
        Ok(())
    }

    fn write(&mut self, tensor: usize, gradient: &[f32]) -> Result<()> {
        self.readiness.check_open(self.layout, tensor)?;
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
        check_sums(self.config)?;
        // In a world-size-invariant reduction, a micro-batch only depends on its own samples.
        if self.exchange.invariant { Ok(()) } else { sum_over_ranks(self.comm, values) }
    }
}
