//! Running statistics that do not depend on how micro-batches are spread over ranks.
//!
//! Commonly one micro-batch moves them after the other, with statistics that are those of all ranks. Where nothing may
//! depend on the number of ranks, each micro-batch moves them from where they were before the step, and the mean of the
//! results is where they are after it, taken in the order of the gradients' sums.

use super::accumulate::{Accumulator, Counter};
use super::tree;
use crate::Result;
use crate::comm::{Buffer, Communicator};

/// The mean of buffers after each micro-batch.
#[derive(Debug)]
pub(super) struct BufferMean {
    before: Vec<f32>,
    sum: Accumulator,
}

impl BufferMean {
    /// For a step that begins with `buffers`.
    pub(super) fn new(buffers: &[f32], counter: &Counter) -> Self {
        let mut sum = Accumulator::new(buffers.len());
        sum.begin_step(counter);
        BufferMean { before: buffers.to_vec(), sum }
    }

    /// Puts the buffers back for another micro-batch.
    pub(super) fn begin_batch(&self, buffers: &mut [f32]) {
        buffers.copy_from_slice(&self.before);
    }

    /// Takes them as a micro-batch has left them.
    pub(super) fn add(&mut self, counter: &Counter, buffers: &mut [f32]) {
        self.sum.add(counter, 0..buffers.len(), buffers, 1.0);
    }

    /// Replaces the sum over this rank's micro-batches, which the last one has left, by the mean over all. Collective.
    pub(super) fn finish(comm: &mut Communicator, counter: &Counter, buffers: &mut [f32]) -> Result<()> {
        let sum = tree::all_sum(comm, Buffer::from_slice(buffers))?;
        let count = (counter.count() * comm.size() as usize) as f32;
        for (buffer, sum) in buffers.iter_mut().zip(sum.as_slice::<f32>()) {
            *buffer = sum / count;
        }
        Ok(())
    }
}
