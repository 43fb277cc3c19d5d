//! A step on a GPU, from its beginning to the update: what is enqueued on the streams, and when.

use mgpu_kernels::optimizer::cuda::begin_step;

use super::super::config::{Unused, check_join};
use super::super::reducer::Participation;
use super::{DeviceConfig, DeviceDataParallel};
use crate::timeline::Name;
use crate::{Error, Result};

impl DeviceDataParallel {
    /// Begins a step and its first micro-batch: later work on the stream reads the [`state`](Self::state) of this
    /// step. If the previous step broke off, waits for the GPU and repeats that step. Collective if ranks may
    /// [`join`](Self::join): then ranks wait here for each other.
    ///
    /// # Errors
    /// If a kernel cannot be launched, or the moving average is in place of the parameters; if ranks may join: as the
    /// communicator, and during a capture.
    pub fn begin_step(&mut self) -> Result<()> {
        self.begin_step_with(true).map(|_| ())
    }

    /// Takes part in the steps of ranks that still have data, with weight 0, until no rank has; so this rank's
    /// parameters stay equal to theirs. Every rank calls it once it has run out of data, including the last one.
    /// Returns the number of steps made meanwhile. The learning rate is that of the other ranks. Collective.
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

    /// Begins a step, with or without data on this rank. If no rank has data, begins none and returns false.
    fn begin_step_with(&mut self, has_data: bool) -> Result<bool> {
        if !self.capturing {
            self.prepare_step()?;
        }
        if !self.agree_on_participation(has_data)? {
            return Ok(false);
        }
        self.open = true;
        self.host.begin_step(has_data);
        // The first point of a trace.
        let _ = self.begin_span()?;
        let DeviceConfig { parallel, .. } = &self.config;
        begin_step(&self.compute, &parallel.optimizer.rule, self.config.plan(), self.state.view())?;
        // A rank without data only contributes zeros, in one micro-batch.
        self.readiness.begin_step(if has_data { self.micro_batches() } else { 1 });
        self.begin_micro_batch(0)?;
        Ok(true)
    }

    /// Agrees with the other ranks on who has data, if ranks may join; a rank without data adopts their learning
    /// rate. Returns false if no rank has data.
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
        let Some(agreed) = mine.agree(self.host.comm())? else { return Ok(false) };
        *rule = rule.with_lr(agreed.learning_rate);
        self.active = agreed.active;
        Ok(true)
    }

    /// Prepares a step: discards a previous one that broke off.
    pub(super) fn prepare_step(&mut self) -> Result<()> {
        if self.saved_parameters.is_some() {
            let problem =
                "the parameters are replaced by their moving average: swap it back first".to_owned();
            return Err(Error::InvalidArgument { operation: "step", problem });
        }
        if self.open { self.abandon_step() } else { Ok(()) }
    }

    fn begin_micro_batch(&mut self, index: usize) -> Result<()> {
        self.readiness.begin_batch(index);
        self.buffers.begin_batch(&self.readiness.counter, &self.compute)
    }

    /// Ends a micro-batch, and begins the step's next one.
    ///
    /// # Errors
    /// If a kernel cannot be launched; if a tensor's gradient was not marked ready (the error names it); if the step
    /// has no further micro-batch.
    pub fn next_micro_batch(&mut self) -> Result<()> {
        let counter = self.readiness.counter;
        if counter.is_last() {
            let problem = format!("the step has only {} micro-batches", counter.count());
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
            // Messages between two ranks have no tags: those of gradients must end before those of buffers.
            self.wait_for_exchanges()?;
        }
        self.buffers.end_batch(counter, &self.comm, &self.compute)
    }

    /// Sets all gradients that were not marked ready to 0.
    fn zero_missing(&mut self) -> Result<()> {
        while let Some(tensor) = self.readiness.last_open() {
            self.compute.zero(self.gradient(tensor))?;
            self.ready(tensor)?;
        }
        Ok(())
    }

    /// Whether the gradient of `tensor` is needed: false for a [frozen](crate::ParameterGroup::frozen) tensor and for
    /// an index out of range.
    pub fn wants(&self, tensor: usize) -> bool {
        self.layout.tensors().get(tensor).is_some_and(|tensor| !tensor.group.frozen)
    }

    /// Marks the gradient of `tensor` ready: the kernels that write it are enqueued, and its bucket's exchange may
    /// follow them. Call it once per tensor and micro-batch, ideally in the order of the first step, which the
    /// buckets follow.
    ///
    /// # Errors
    /// If there is no such tensor, it is frozen, or was marked ready before; as the communicator.
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

    /// Ends the step: updates the parameters with the gradients, reduced over micro-batches and ranks. With
    /// [`Placement::Host`](crate::Placement::Host) it waits for the gradients, and for the other ranks.
    ///
    /// # Errors
    /// If a kernel cannot be launched; if a tensor's gradient was not marked ready (the error names it); if
    /// micro-batches are missing. With [`Placement::Host`](crate::Placement::Host) also as
    /// [`DataParallel::step_accumulated`](crate::DataParallel::step_accumulated): non-finite gradients are errors here
    /// and not of [`read_status`](Self::read_status).
    pub fn finish_step(&mut self) -> Result<()> {
        let counter = self.readiness.counter;
        if !counter.is_last() {
            let (made, all) = (counter.current() + 1, counter.count());
            let problem = format!("a step of {all} micro-batches ends after {made}");
            return Err(Error::InvalidArgument { operation: "step", problem });
        }
        self.end_micro_batch()?;
        let begin = self.begin_span()?;
        if !self.is_updated_on_host() {
            self.update()?;
        } else if !self.capturing {
            self.update_on_host()?;
        }
        let end = self.end_span(begin, Name::OPTIMIZER)?;
        self.add_span(self.step_begin(), end, Name::STEP);
        self.steps += 1;
        self.open = false;
        self.apply_gradient_order()?;
        self.compare_if_due(self.steps - 1)
    }
}
