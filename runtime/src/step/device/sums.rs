//! Accumulation over micro-batches, and world-size-invariant sums over ranks: the counterparts of
//! [`accumulate`](super::super::accumulate), [`tree`](super::super::tree) and [`buffers`](super::super::buffers) on a
//! GPU.

use std::ops::Range;
use std::sync::Arc;

use mgpu_kernels::arena::cuda as arena;
use mgpu_kernels::cuda::{Device, Memory, Stream, View};

use super::super::accumulate::Counter;
use crate::Result;
use crate::comm::{DType, DeviceCommunicator};

/// Partial sums of micro-batches, for all elements of an arena.
#[derive(Debug)]
pub(super) struct DeviceAccumulator {
    levels: Vec<Memory>,
}

impl DeviceAccumulator {
    /// For an arena of `len` elements and steps as `counter` counts them.
    pub(super) fn new(device: &Arc<Device>, len: usize, counter: &Counter) -> Result<Self> {
        let level = |_| Ok(Memory::zeroed(device, DType::F32, len)?);
        Ok(DeviceAccumulator { levels: (0..counter.levels()).map(level).collect::<Result<_>>()? })
    }

    /// Accumulates the elements `at` of the current micro-batch's `values`. For the last micro-batch, replaces them
    /// by the sum of all, divided by `divisor`.
    pub(super) fn add(
        &self,
        counter: &Counter,
        stream: &Stream,
        values: &Memory,
        at: Range<usize>,
        divisor: f32,
    ) -> Result<()> {
        let values = values.slice(at.clone());
        if values.is_empty() {
            return Ok(());
        }
        for (level, divisor) in counter.carried_levels(divisor) {
            arena::add(stream, values, self.levels[level].slice(at.clone()), divisor)?;
        }
        match counter.result_level() {
            Some(level) => Ok(stream.copy(values, self.levels[level].slice(at))?),
            None => Ok(()),
        }
    }
}

/// Replaces every rank's `values` (f32) by their sum over ranks, in the order of a balanced binary tree. `theirs` is
/// a receive buffer of the same length. Collective; the number of ranks must be a power of two.
///
/// # Errors
/// As [`DeviceCommunicator::send`].
pub(super) fn all_sum(
    comm: &DeviceCommunicator,
    stream: &Stream,
    values: View<'_>,
    theirs: View<'_>,
) -> Result<()> {
    for bit in 0..comm.size().ilog2() {
        let peer = comm.rank() ^ 1 << bit;
        comm.group(|group| {
            group.send(stream, values, peer)?;
            group.recv(stream, theirs, peer)
        })?;
        arena::add(stream, values, theirs, 1.0)?;
    }
    Ok(())
}

/// The model's buffers: values that it changes besides its parameters, such as running statistics.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) values: Memory,
    /// Only in a world-size-invariant reduction.
    mean: Option<DeviceBufferMean>,
}

/// The mean of buffers over micro-batches.
#[derive(Debug)]
struct DeviceBufferMean {
    before: Memory,
    sums: DeviceAccumulator,
    theirs: Memory,
}

impl Buffers {
    /// For steps as `counter` counts them.
    pub(super) fn new(stream: &Stream, values: &[f32], counter: &Counter, is_mean: bool) -> Result<Self> {
        let mean = || -> Result<DeviceBufferMean> {
            let device = stream.device();
            let zeroed = || Memory::zeroed(device, DType::F32, values.len());
            let sums = DeviceAccumulator::new(device, values.len(), counter)?;
            Ok(DeviceBufferMean { before: zeroed()?, sums, theirs: zeroed()? })
        };
        let mean = (is_mean && !values.is_empty()).then(mean).transpose()?;
        Ok(Buffers { values: Memory::from_slice(stream, values)?, mean })
    }

    /// Prepares steps of another number of micro-batches.
    pub(super) fn set_counter(&mut self, counter: &Counter) -> Result<()> {
        if let Some(mean) = &mut self.mean {
            mean.sums = DeviceAccumulator::new(self.values.device(), self.values.len(), counter)?;
        }
        Ok(())
    }

    /// Saves the values before the first micro-batch, and resets them before the others.
    pub(super) fn begin_batch(&self, counter: &Counter, stream: &Stream) -> Result<()> {
        let Some(DeviceBufferMean { before, .. }) = &self.mean else { return Ok(()) };
        let (values, before) = (self.values.view(), before.view());
        Ok(if counter.current() == 0 { stream.copy(values, before) } else { stream.copy(before, values) }?)
    }

    /// Accumulates the values that a micro-batch has left; after the last one, replaces them by the mean over all
    /// micro-batches of all ranks. Collective.
    pub(super) fn end_batch(
        &self,
        counter: &Counter,
        comm: &DeviceCommunicator,
        stream: &Stream,
    ) -> Result<()> {
        let Some(DeviceBufferMean { sums, theirs, .. }) = &self.mean else { return Ok(()) };
        sums.add(counter, stream, &self.values, 0..self.values.len(), 1.0)?;
        if !counter.is_last() {
            return Ok(());
        }
        all_sum(comm, stream, self.values.view(), theirs.view())?;
        let count = counter.count() * comm.size() as usize;
        Ok(arena::scale(stream, self.values.view(), 1.0 / count as f32)?)
    }
}
