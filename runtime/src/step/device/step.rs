//! A step on a GPU, from its beginning to the update: what is put on the streams, and when.

use mgpu_kernels::optimizer::cuda::begin;

use super::super::config::{Unused, check_join};
use super::super::reducer::Participation;
use super::{DeviceConfig, DeviceDataParallel};
use crate::{Error, Result};

impl DeviceDataParallel {
    /// Begins a step and its first micro-batch: what follows on the stream reads the [`state`](Self::state) of the next one. A
    /// step that broke off is made anew, once the GPU is done with it. Collective where ranks may
    /// [`join`](Self::join): they then wait here for each other.
    ///
    /// # Errors
    /// If a kernel cannot be launched, or the moving average is in the parameters' place; where ranks may join, as the
    /// communicator's, and in a capture.
    pub fn begin_step(&mut self) -> Result<()> {
        self.begin_step_with(true).map(|_| ())
    }

    /// Takes part in the steps of ranks that still have data, with weight 0, until no rank has; so this rank's parameters stay
    /// equal to theirs. Each rank calls it once it has run out of data, also the last one. Returns the steps that were made
    /// meanwhile. The learning rate is that of the others. Collective.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step) and [`finish_step`](Self::finish_step); if the configuration has no
    /// [`join`](crate::ReducerConfig::join).
    pub fn join(&mut self) -> Result<u64> {
        check_join(&self.config.parallel.reducer)?;
        let before = self.steps;
        while self.begin_step_with(false)? {
            self.zero_missing()?;
            self.finish_step()?;
        }
        Ok(self.steps - before)
    }

    /// Begins a step, for which this rank may have no data; none if no rank has, and returns false.
    fn begin_step_with(&mut self, has_data: bool) -> Result<bool> {
        if !self.capturing {
            self.prepare_step()?;
        }
        if !self.agree_on_participation(has_data)? {
            return Ok(false);
        }
        self.open = true;
        let DeviceConfig { parallel, .. } = &self.config;
        begin(&self.compute, &parallel.optimizer.rule, self.config.plan(), self.state.view())?;
        // A rank without data has nothing but zeros to add up.
        self.readiness.begin_step(if has_data { self.micro_batches() } else { 1 });
        self.begin_micro_batch(0)?;
        Ok(true)
    }

    /// Agrees with the other ranks on who has data, where they may run out of it; a rank that has none goes along with their
    /// learning rate. Returns false if nobody has.
    fn agree_on_participation(&mut self, has_data: bool) -> Result<bool> {
        let DeviceConfig { parallel, .. } = &mut self.config;
        if !parallel.reducer.join {
            return Ok(true);
        }
        if self.capturing {
            let problem = "ranks that may run out of data agree before each step, which cannot be captured";
            return Err(Error::InvalidArgument { operation: "capture", problem: problem.to_owned() });
        }
        let rule = &mut parallel.optimizer.rule;
        let (micro_batches, learning_rate) = (parallel.reducer.micro_batches, rule.lr());
        let (step, active) = (self.steps, self.comm.size());
        let mine = Participation { step, has_data, active, micro_batches, learning_rate };
        let Some(agreed) = mine.agree(&mut self.host)? else { return Ok(false) };
        *rule = rule.with_lr(agreed.learning_rate);
        self.active = agreed.active;
        Ok(true)
    }

    /// Gets ready for a step: gives up one that broke off.
    pub(super) fn prepare_step(&mut self) -> Result<()> {
        if self.saved_parameters.is_some() {
            let problem = "the moving average is in the parameters' place: swap it back first".to_owned();
            return Err(Error::InvalidArgument { operation: "step", problem });
        }
        if self.open { self.abandon_step() } else { Ok(()) }
    }

    fn begin_micro_batch(&mut self, index: usize) -> Result<()> {
        self.readiness.begin_batch(index);
        self.buffers.begin_batch(&self.readiness.counter, &self.compute)
    }

    /// Ends a micro-batch, and begins the next one of the step.
    ///
    /// # Errors
    /// If a kernel cannot be launched; names a tensor whose gradient was not announced; if the step has no further micro-batch.
    pub fn next_micro_batch(&mut self) -> Result<()> {
        let counter = self.readiness.counter;
        if counter.is_last() {
            let problem = format!("a step has {} micro-batches and no more", counter.count());
            return Err(Error::InvalidArgument { operation: "step", problem });
        }
        self.end_micro_batch()?;
        self.begin_micro_batch(counter.current() + 1)
    }

    fn end_micro_batch(&mut self) -> Result<()> {
        if self.config.parallel.reducer.unused == Unused::Zero {
            self.zero_missing()?;
        }
        self.readiness.check_complete(&self.layout)?;
        let counter = &self.readiness.counter;
        if self.is_invariant() && counter.is_last() && self.ranks() > 1 {
            // Messages between two ranks have no names: those of gradients are over before those of buffers.
            self.wait_for_exchanges()?;
        }
        self.buffers.end_batch(counter, &self.comm, &self.compute)
    }

    /// Takes 0 for all gradients that were not announced.
    fn zero_missing(&mut self) -> Result<()> {
        while let Some(tensor) = self.readiness.last_open() {
            self.compute.zero(self.gradient(tensor))?;
            self.ready(tensor)?;
        }
        Ok(())
    }

    /// Whether a gradient of `tensor` is taken: not of a [frozen](crate::ParameterGroup::frozen) one, nor where there is no such
    /// tensor.
    pub fn wants(&self, tensor: usize) -> bool {
        self.layout.tensors().get(tensor).is_some_and(|tensor| !tensor.group.frozen)
    }

    /// The kernels that write the gradient of `tensor` are on the stream: its bucket's exchange may follow them.
    /// Called once per tensor and micro-batch, best in the order of the first step, which buckets follow.
    ///
    /// # Errors
    /// If there is no such tensor, it is frozen, or was announced before; as the communicator's.
    pub fn ready(&mut self, tensor: usize) -> Result<()> {
        let (bucket, is_complete) = self.readiness.mark_ready(&self.layout, tensor)?;
        if is_complete {
            self.accumulate(bucket)?;
        }
        while let Some(bucket) = self.readiness.next_bucket() {
            self.begin_exchange(bucket)?;
        }
        Ok(())
    }

    /// Updates the parameters by the gradients, reduced over micro-batches and ranks.
    ///
    /// # Errors
    /// If a kernel cannot be launched; names a tensor whose gradient was not announced; if micro-batches are missing.
    pub fn finish_step(&mut self) -> Result<()> {
        let counter = self.readiness.counter;
        if !counter.is_last() {
            let (made, all) = (counter.current() + 1, counter.count());
            let problem = format!("a step of {all} micro-batches ends after {made}");
            return Err(Error::InvalidArgument { operation: "step", problem });
        }
        self.end_micro_batch()?;
        self.update()?;
        self.steps += 1;
        self.open = false;
        self.apply_gradient_order()?;
        self.compare_if_due(self.steps - 1)
    }
}
