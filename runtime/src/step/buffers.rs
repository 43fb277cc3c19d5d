//! World-size-invariant running statistics.
//!
//! Normally the micro-batches update running statistics one after the other, with statistics over all ranks. For a
//! world-size-invariant reduction, each micro-batch updates the values from before the step, and the result is the
//! mean of these, summed in the order of the gradients.

use super::accumulate::{Accumulator, Counter};
use super::tree;
use crate::Result;
use crate::comm::{Buffer, Communicator};

/// The mean of the model's buffers over micro-batches.
#[derive(Debug)]
pub(super) struct BufferMean {
    before: Vec<f32>,
    sum: Accumulator,
}

impl BufferMean {
    /// For a step that begins with the values `buffers`.
    pub(super) fn new(buffers: &[f32], counter: &Counter) -> Self {
        let mut sum = Accumulator::new(buffers.len());
        sum.begin_step(counter);
        BufferMean { before: buffers.to_vec(), sum }
    }

    /// Resets the buffers for another micro-batch.
    pub(super) fn begin_batch(&self, buffers: &mut [f32]) {
        buffers.copy_from_slice(&self.before);
    }

    /// Accumulates the values that a micro-batch has left.
    pub(super) fn add(&mut self, counter: &Counter, buffers: &mut [f32]) {
        self.sum.add(counter, 0..buffers.len(), buffers, 1.0);
    }

    /// Replaces the sum over this rank's micro-batches by the mean over all ranks. Collective.
    pub(super) fn finish(comm: &mut Communicator, counter: &Counter, buffers: &mut [f32]) -> Result<()> {
        let sum = tree::all_sum(comm, Buffer::from_slice(buffers))?;
        let count = (counter.count() * comm.size() as usize) as f32;
        for (buffer, sum) in buffers.iter_mut().zip(sum.as_slice::<f32>()) {
            *buffer = sum / count;
        }
        Ok(())
    }
}
