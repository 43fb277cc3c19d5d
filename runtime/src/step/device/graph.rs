//! Captured steps, and copies from and to the host while they run.

use std::sync::Arc;

use bytemuck::NoUninit;
use mgpu_kernels::cuda::{Device, Event, Graph, Pinned, Stream, View};

use super::{DeviceDataParallel, STEP};
use crate::comm::DeviceCommunicator;
use crate::{Error, Result};

/// Steps captured into a CUDA graph. It must be dropped before the model's communicator can end.
#[derive(Debug)]
pub struct StepGraph {
    graph: Graph,
    steps: u64,
    /// The learning rate at the capture, without the schedule's factor.
    learning_rate: f64,
    /// Keeps the communicator alive, because its collectives are part of the graph.
    _comm: Arc<DeviceCommunicator>,
    /// The model from which it was captured.
    model: Arc<()>,
}

impl StepGraph {
    /// Number of steps of one replay.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

/// An asynchronous copy from the GPU to the host.
#[derive(Debug)]
pub struct Readback {
    bytes: Pinned,
    done: Event,
}

impl Readback {
    /// Allocates pinned memory for `len` bytes.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Self> {
        Ok(Readback { bytes: Pinned::zeroed(device, len)?, done: Event::new(device)? })
    }

    /// Enqueues a copy of `from` on `stream`.
    pub(super) fn enqueue(&mut self, stream: &Stream, from: View<'_>) -> Result<()> {
        stream.enqueue_download(from, &mut self.bytes)?;
        Ok(stream.record(&self.done)?)
    }

    /// Waits for the last copy that was enqueued, and returns it.
    pub(super) fn wait(&mut self, comm: &DeviceCommunicator) -> Result<&[u8]> {
        comm.wait(&self.done, STEP)?;
        // SAFETY: the event follows the copy, and no copy is enqueued while the bytes are borrowed.
        Ok(unsafe { self.bytes.bytes() })
    }
}

/// An asynchronous copy from the host to the GPU.
#[derive(Debug)]
pub struct Upload {
    bytes: Pinned,
    done: Event,
}

impl Upload {
    /// Allocates pinned memory for `len` bytes.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Self> {
        Ok(Upload { bytes: Pinned::zeroed(device, len)?, done: Event::new(device)? })
    }

    /// Enqueues a copy of `values` to `to` on `stream`. Waits only for the previous copy.
    pub(super) fn enqueue<T: NoUninit>(
        &mut self,
        comm: &DeviceCommunicator,
        stream: &Stream,
        values: &[T],
        to: View<'_>,
    ) -> Result<()> {
        let values: &[u8] = bytemuck::cast_slice(values);
        assert_eq!(values.len(), to.bytes(), "sizes of a copy");
        comm.wait(&self.done, STEP)?;
        // SAFETY: the event follows the previous copy.
        let staged = unsafe { self.bytes.bytes_mut() };
        staged[..values.len()].copy_from_slice(values);
        stream.enqueue_upload_part(&self.bytes, 0, to)?;
        Ok(stream.record(&self.done)?)
    }
}

impl DeviceDataParallel {
    /// Captures the steps that `work` enqueues into a graph. The steps are not executed.
    ///
    /// `work` must have run before outside of a capture: kernels are compiled and loaded at their first launch, which
    /// a capture forbids.
    ///
    /// # Errors
    /// Those of `work`; if something cannot be captured.
    pub fn capture(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<StepGraph> {
        self.prepare_step()?;
        let made = self.steps;
        self.compute.begin_capture()?;
        self.capturing = true;
        let outcome = work(self);
        // A step that broke off during the capture does not count.
        (self.capturing, self.open) = (false, false);
        // End the capture even after an error: until then the stream accepts no other work.
        let graph = self.compute.end_capture();
        let steps = std::mem::replace(&mut self.steps, made) - made;
        outcome?;
        if self.is_updated_on_host() && steps != 1 {
            let problem =
                format!("the host updates the parameters in every step: capture one step, not {steps}");
            return Err(Error::InvalidArgument { operation: "capture", problem });
        }
        let model = Arc::clone(&self.identity);
        let learning_rate = self.config.parallel.optimizer.rule.lr();
        Ok(StepGraph { graph: graph?, steps, learning_rate, _comm: Arc::clone(&self.comm), model })
    }

    /// Executes the steps of a graph that was captured from this model. With [`Placement::Host`](crate::Placement::Host)
    /// the host takes part: then it waits for the GPU and for the other ranks.
    ///
    /// # Errors
    /// If an earlier error has poisoned the communicator, or the driver returns an error; if the learning rate was
    /// changed since the capture; as [`begin_step`](Self::begin_step); with [`Placement::Host`](crate::Placement::Host)
    /// as [`finish_step`](Self::finish_step).
    ///
    /// # Panics
    /// If the graph was captured from another model.
    pub fn replay(&mut self, graph: &StepGraph) -> Result<()> {
        assert!(Arc::ptr_eq(&graph.model, &self.identity), "a graph of another model");
        let (captured, lr) = (graph.learning_rate, self.config.parallel.optimizer.rule.lr());
        if captured != lr {
            let problem = format!(
                "the graph was captured with learning rate {captured}, but it is now {lr}: capture again"
            );
            return Err(Error::InvalidArgument { operation: "replay", problem });
        }
        self.prepare_step()?;
        self.comm.begin_launch()?;
        // SAFETY: the graph holds its only communicator, which was not aborted when this was checked. If another
        // thread aborts it now, NCCL keeps what captured operations use until the graph is gone.
        unsafe { self.compute.launch_graph(&graph.graph)? };
        let before = self.steps;
        if self.is_updated_on_host() {
            // Until the host has done its part.
            self.open = true;
            self.host.begin_step(true);
            self.update_on_host()?;
            self.open = false;
        }
        self.steps += graph.steps;
        self.compare_if_due(before)
    }

    /// Enqueues a copy of `from` to the host, in stream order.
    ///
    /// # Errors
    /// If the driver returns an error.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn enqueue_readback(&self, from: View<'_>, to: &mut Readback) -> Result<()> {
        to.enqueue(&self.compute, from)
    }

    /// Waits for the last copy that was enqueued, and returns it.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait`].
    pub fn read<'a>(&self, reading: &'a mut Readback) -> Result<&'a [u8]> {
        reading.wait(&self.comm)
    }

    /// Enqueues a copy of `values` to `to`, in stream order: after the steps so far, which may still read `to`. Waits
    /// only for the previous copy through `through`.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait`].
    ///
    /// # Panics
    /// If the sizes differ, or exceed those of `through`.
    pub fn enqueue_upload<T: NoUninit>(
        &self,
        values: &[T],
        to: View<'_>,
        through: &mut Upload,
    ) -> Result<()> {
        through.enqueue(&self.comm, &self.compute, values, to)
    }

    /// Enqueues a copy of `values` to `to` on another stream, beside the steps. Nothing orders it after the steps so far:
    /// those that read `to` must have finished. Waits only for the previous copy through `through`. Steps may read `to`
    /// once [`wait_for_upload`](Self::wait_for_upload) was called.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait`].
    ///
    /// # Panics
    /// If the sizes differ, or exceed those of `through`.
    pub fn enqueue_upload_beside<T: NoUninit>(
        &self,
        stream: &Stream,
        values: &[T],
        to: View<'_>,
        through: &mut Upload,
    ) -> Result<()> {
        through.enqueue(&self.comm, stream, values, to)
    }

    /// Lets the steps that are enqueued from now on wait for the last copy through `through`.
    ///
    /// # Errors
    /// If the driver returns an error.
    pub fn wait_for_upload(&self, through: &Upload) -> Result<()> {
        Ok(self.compute.wait_for(&through.done)?)
    }
}
