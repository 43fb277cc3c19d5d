//! Messages between the stages of a pipeline, and the time of waiting for them.

use std::time::Duration;

use mgpu::timeline::Timeline;
use mgpu::{Buffer, Communicator, Element};
use mgpu_kernels::Storage;

use crate::nets::{Activations, LossReport};

/// The stages of this rank's replica of the network: rank s of the communicator is stage s.
pub(super) struct Neighbours {
    comm: Communicator,
    /// Observes the communicator.
    timeline: Timeline,
    /// Memory for messages of `f32` and of images between layers, kept from one message to the next.
    vectors: Option<Buffer>,
    images: Option<Buffer>,
    /// How long this rank has waited for its neighbours so far.
    waited: Duration,
}

impl Neighbours {
    pub(super) fn new(comm: Communicator, timeline: &Timeline) -> Self {
        let comm = timeline.observe(comm);
        let timeline = timeline.clone();
        Neighbours { comm, timeline, vectors: None, images: None, waited: Duration::ZERO }
    }

    pub(super) fn stage(&self) -> u32 {
        self.comm.rank()
    }

    pub(super) fn stages(&self) -> u32 {
        self.comm.size()
    }

    pub(super) fn comm(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    /// How long this rank has waited for its neighbours so far, as far as its timeline counts.
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }

    /// Sends activations, or their gradient, to stage `to`.
    pub(super) fn send<E: Storage + Element>(
        &mut self,
        activations: Activations<'_, E>,
        to: u32,
    ) -> mgpu::Result<()> {
        self.wait(|this| match activations {
            Activations::Images(values) => send(&mut this.comm, &mut this.images, values, to),
            Activations::Vectors(values) => send(&mut this.comm, &mut this.vectors, values, to),
        })
    }

    /// Receives activations, or their gradient, from stage `from`.
    pub(super) fn receive<E: Storage + Element>(
        &mut self,
        activations: Activations<'_, E>,
        from: u32,
    ) -> mgpu::Result<()> {
        self.wait(|this| match activations {
            Activations::Images(values) => receive(&mut this.comm, &mut this.images, values, from),
            Activations::Vectors(values) => receive(&mut this.comm, &mut this.vectors, values, from),
        })
    }

    /// Sends the losses of a step from the last stage to the first. Returns them there; on other stages `report`.
    pub(super) fn report_to_first(&mut self, report: LossReport) -> mgpu::Result<LossReport> {
        let (stage, last) = (self.stage(), self.stages() - 1);
        if last == 0 || (stage != 0 && stage != last) {
            return Ok(report);
        }
        let mut values = [report.loss_sum, report.correct as f64, report.samples as f64];
        self.wait(|Neighbours { comm, .. }| match stage {
            0 => receive(comm, &mut None, &mut values, last),
            _ => send(comm, &mut None, &values, 0),
        })?;
        Ok(LossReport { loss_sum: values[0], correct: values[1] as u64, samples: values[2] as u64 })
    }

    /// Runs `message` and counts how long it waits.
    fn wait(&mut self, message: impl FnOnce(&mut Self) -> mgpu::Result<()>) -> mgpu::Result<()> {
        let before = self.timeline.waiting().unwrap_or_default();
        message(self)?;
        self.waited += self.timeline.waiting().unwrap_or_default() - before;
        Ok(())
    }
}

/// The memory of the last message, if it has the length of the next one.
fn memory<T: Element>(kept: &mut Option<Buffer>, len: usize) -> Buffer {
    kept.take().filter(|buffer| buffer.len() == len).unwrap_or_else(|| Buffer::zeroed::<T>(len))
}

/// Sends `values` to rank `to`.
pub(super) fn send<T: Element>(
    comm: &mut Communicator,
    kept: &mut Option<Buffer>,
    values: &[T],
    to: u32,
) -> mgpu::Result<()> {
    let mut message = memory::<T>(kept, values.len());
    message.as_mut_slice().copy_from_slice(values);
    *kept = Some(comm.send(message, to)?.wait()?);
    Ok(())
}

/// Overwrites `values` with those of rank `from`.
pub(super) fn receive<T: Element>(
    comm: &mut Communicator,
    kept: &mut Option<Buffer>,
    values: &mut [T],
    from: u32,
) -> mgpu::Result<()> {
    let message = comm.recv(memory::<T>(kept, values.len()), from)?.wait()?;
    values.copy_from_slice(message.as_slice());
    *kept = Some(message);
    Ok(())
}
