//! Captured steps, and what the host reads while they run.

use std::sync::Arc;

use mgpu_kernels::cuda::{Device, Event, Graph, Pinned, View};

use super::{DeviceDataParallel, STEP};
use crate::comm::DeviceCommunicator;
use crate::{Error, Result};

/// Captured steps. Dropped before the model's communicator, which waits for that.
#[derive(Debug)]
pub struct StepGraph {
    graph: Graph,
    steps: u64,
    /// The learning rate, before the schedule, that it was captured with.
    learning_rate: f64,
    /// Its collectives are part of the graph, which is held for that alone.
    _comm: Arc<DeviceCommunicator>,
    /// Who it was captured from.
    model: Arc<()>,
}

impl StepGraph {
    /// Steps that one replay makes.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

/// A copy on the way to the host.
#[derive(Debug)]
pub struct Readback {
    bytes: Pinned,
    done: Event,
}

impl Readback {
    /// Room for `len` bytes.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Self> {
        Ok(Readback { bytes: Pinned::zeroed(device, len)?, done: Event::new(device)? })
    }
}

impl DeviceDataParallel {
    /// Captures the steps that `work` puts on the stream into a graph. None of them is made.
    ///
    /// Whatever `work` launches has been launched before, outside of a capture: kernels are compiled and loaded when they
    /// are launched first, which a capture forbids.
    ///
    /// # Errors
    /// As `work`, and if something cannot be captured.
    pub fn capture(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<StepGraph> {
        self.prepare_step()?;
        let made = self.steps;
        self.compute.begin_capture()?;
        self.capturing = true;
        let outcome = work(self);
        // A step that breaks off here was none.
        (self.capturing, self.open) = (false, false);
        // A capture is ended, come what may: until then the stream takes no other work.
        let graph = self.compute.end_capture();
        let steps = std::mem::replace(&mut self.steps, made) - made;
        outcome?;
        let model = Arc::clone(&self.identity);
        let learning_rate = self.config.parallel.optimizer.rule.lr();
        Ok(StepGraph { graph: graph?, steps, learning_rate, _comm: Arc::clone(&self.comm), model })
    }

    /// Makes the steps of a graph that was captured from this model.
    ///
    /// # Errors
    /// If an error has made the communicator unusable, or the driver refuses; if another learning rate was set since the capture;
    /// as [`begin_step`](Self::begin_step).
    ///
    /// # Panics
    /// If it was captured from another one.
    pub fn replay(&mut self, graph: &StepGraph) -> Result<()> {
        assert!(Arc::ptr_eq(&graph.model, &self.identity), "a graph of another model");
        let (captured, lr) = (graph.learning_rate, self.config.parallel.optimizer.rule.lr());
        if captured != lr {
            let problem =
                format!("a graph with learning rate {captured} at learning rate {lr}: capture again");
            return Err(Error::InvalidArgument { operation: "replay", problem });
        }
        self.prepare_step()?;
        self.comm.begin_launch()?;
        // SAFETY: the graph holds its only communicator, which was not aborted when it was looked at. If another thread
        // aborts it now, NCCL keeps what captured operations use until the graph is gone.
        unsafe { self.compute.launch_graph(&graph.graph)? };
        let before = self.steps;
        self.steps += graph.steps;
        self.compare_if_due(before)
    }

    /// Begins to copy `from`, as it is at this place of the stream, to the host.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn enqueue_readback(&self, from: View<'_>, to: &mut Readback) -> Result<()> {
        self.compute.download_later(from, &mut to.bytes)?;
        Ok(self.compute.record(&to.done)?)
    }

    /// Waits for the copy that was begun last, as far as the other ranks come along, and returns it.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait`].
    pub fn read<'a>(&self, reading: &'a mut Readback) -> Result<&'a [u8]> {
        self.comm.wait(&reading.done, STEP)?;
        // SAFETY: the event lies behind the copy, and none is begun while the bytes are lent.
        Ok(unsafe { reading.bytes.bytes() })
    }
}
