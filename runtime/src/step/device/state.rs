//! Saving and restoring a model on GPUs, its moving average, and moving its state when buckets change.

use std::borrow::Cow;

use mgpu_kernels::cuda::{Memory, StepState, Stream};

use super::super::reducer::plan_from_order;
use super::super::state::NamedArena;
use super::device_bucket::{DeviceBucket, DeviceBuckets};
use super::guard::Guard;
use super::host::owned;
use super::{BUCKET, DeviceDataParallel, STEP};
use crate::comm::DType;
use crate::optimizer::AVERAGE;
use crate::replicate::{replicate, verify_equal, verify_same};
use crate::{Layout, Result};

/// Which ranks receive all elements of an arena that rank 0 alone holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Receivers {
    /// Only rank 0 keeps them.
    Owners,
    All,
}

impl DeviceDataParallel {
    /// A copy of the parameters on the host. Collective: begins with [`check`](Self::check).
    ///
    /// # Errors
    /// As [`read_status`](Self::read_status).
    pub fn parameters(&mut self) -> Result<Vec<f32>> {
        self.check()?;
        self.download(&self.parameters)
    }

    /// A copy on the host of the last step's gradients as the optimizer has used them: reduced and clipped.
    /// Collective.
    ///
    /// # Errors
    /// As [`read_status`](Self::read_status).
    pub fn gradients(&mut self) -> Result<Vec<f32>> {
        self.check()?;
        if let Some(host) = self.host.model_mut() {
            return host.gradients();
        }
        let ranks = self.ranks();
        if self.is_shared() {
            self.comm.broadcast(&self.compute, self.gradients.view(), 0)?;
        }
        for bucket in self.buckets.iter().filter(|bucket| bucket.is_sharded()) {
            let shards = self.gradients.slice(bucket.shards(ranks));
            self.comm.all_gather(&self.compute, self.gradients.slice(bucket.own()), shards)?;
        }
        self.wait(STEP)?;
        let mut gradients = self.download(&self.gradients)?;
        let StepState { scale, .. } = StepState::download(self.state.view(), &self.compute)?;
        mgpu_kernels::arena::cpu::scale(&mut gradients, scale);
        Ok(gradients)
    }

    /// Copies the elements of the layout to the host.
    fn download(&self, arena: &Memory) -> Result<Vec<f32>> {
        Ok(arena.slice(0..self.layout.len()).to_vec(&self.compute)?)
    }

    /// True if a moving average of the parameters is kept.
    pub fn has_average(&self) -> bool {
        self.config.parallel.optimizer.average.is_some()
    }

    /// Replaces the parameters by their moving average, to evaluate with it on the device; called again, restores the
    /// parameters. Collective unless every rank has the whole average.
    ///
    /// # Errors
    /// If the driver returns an error, or memory is short; as
    /// [`DeviceCommunicator::all_gather`](crate::DeviceCommunicator::all_gather).
    ///
    /// # Panics
    /// If no average is kept.
    pub fn swap_average(&mut self) -> Result<()> {
        // Allocating and freeing waits for the GPU; wait here instead, with a timeout.
        self.wait(STEP)?;
        // Captured graphs contain addresses, so values are copied and memory is not swapped.
        if let Some(parameters) = &self.saved_parameters {
            self.compute.copy(parameters.view(), self.parameters.view())?;
            self.wait(STEP)?;
            self.saved_parameters = None;
        } else {
            let saved_parameters =
                Memory::zeroed(self.parameters.device(), DType::F32, self.parameters.len())?;
            self.compute.copy(self.parameters.view(), saved_parameters.view())?;
            self.saved_parameters = Some(saved_parameters);
            if let Some(host) = self.host.model_mut() {
                let average = host.averaged_parameters()?.expect("a moving average is kept");
                self.compute.upload(&average, self.parameters.slice(0..average.len()))?;
            } else {
                let average = self.average.as_ref().expect("a moving average is kept");
                self.gather(average, &self.parameters, Receivers::All)?;
            }
        }
        self.refresh_copy()
    }

    /// Gathers an arena of which this rank holds its own elements. Collective if the optimizer is sharded, or if all
    /// ranks receive what only rank 0 holds.
    fn gather(&self, local: &Memory, whole: &Memory, receivers: Receivers) -> Result<()> {
        let ranks = self.ranks();
        for bucket in &self.buckets {
            let [own, rest] = bucket.states();
            if bucket.is_sharded() {
                self.comm.all_gather(&self.compute, local.slice(own), whole.slice(bucket.shards(ranks)))?;
            }
            self.compute.copy(local.slice(rest), whole.slice(bucket.rest()))?;
            if self.is_shared() && receivers == Receivers::All {
                self.comm.broadcast(&self.compute, whole.slice(bucket.elements.clone()), 0)?;
            }
        }
        Ok(())
    }

    /// Replaces the buckets once the order of gradients is known: the buckets of all ranks follow that of rank 0's
    /// first step. If that is the order of the layout, last tensor first, nothing changes. Not during a capture,
    /// which cannot wait: if the first step is captured, the buckets stay as they are.
    pub(super) fn apply_gradient_order(&mut self) -> Result<()> {
        let Some(order) = self.readiness.take_observed_order().filter(|_| !self.capturing) else {
            return Ok(());
        };
        let sizes = self.config.parallel.reducer.buckets(BUCKET);
        let plans = plan_from_order(self.host.comm(), &self.layout, order, sizes)?;
        if self.buckets.iter().map(|bucket| &bucket.plan).eq(&plans) {
            return Ok(());
        }
        // Allocating and freeing waits for the GPU; wait here instead, with a timeout.
        self.wait(STEP)?;
        let (device, rank_of_ranks) = (self.compute.device(), (self.rank(), self.ranks()));
        let buckets =
            DeviceBuckets::split(device, &self.layout, &plans, &self.config.parallel, rank_of_ranks)?;
        let mut guard =
            Guard::new(&self.compute, &buckets, &self.layout, &self.config.parallel, rank_of_ranks.1)?;
        guard.generation = self.guard.generation;
        let chunks = Memory::from_slice(&self.compute, bytemuck::cast_slice::<_, u8>(&buckets.chunks))?;
        let zeroed = |len| Memory::zeroed(device, DType::F32, len);
        let states = self.states().into_iter().map(|(_, local)| local);
        let moved = states.map(|local| Ok((local, zeroed(self.parameters.len())?, zeroed(buckets.states)?)));
        let moved = moved.collect::<Result<Vec<_>>>()?;
        for (local, whole, renewed) in &moved {
            self.gather(local, whole, Receivers::Owners)?;
            copy_own(&self.compute, &buckets.all, whole, renewed)?;
        }
        self.wait(STEP)?;
        let mut renewed = moved.into_iter().map(|(_, _, renewed)| renewed).collect::<Vec<_>>().into_iter();
        for arena in [&mut self.first, &mut self.second, &mut self.average].into_iter().flatten() {
            *arena = renewed.next().expect("as many as there are");
        }
        self.readiness.set_buckets(&plans);
        self.buckets = buckets.all;
        (self.guard, self.chunks) = (guard, chunks);
        Ok(())
    }

    /// The arenas of the optimizer's state, by their names in a checkpoint.
    fn states(&self) -> Vec<(&'static str, &Memory)> {
        let names = self.config.parallel.optimizer.rule.state_names().iter().copied();
        let states = names.zip([&self.first, &self.second].into_iter().flatten());
        states.chain(self.average.iter().map(|average| (AVERAGE, average))).collect()
    }

    /// Copies on the host of the parameters and the optimizer's state, with their names in a checkpoint: complete on
    /// rank 0, empty elsewhere. Collective.
    ///
    /// # Errors
    /// As [`read_status`](Self::read_status).
    pub fn arenas(&mut self) -> Result<Vec<NamedArena<'static>>> {
        self.check()?;
        if let Some(host) = self.host.model_mut() {
            return Ok(owned(host.arenas()?));
        }
        let download = |arena: &Memory| {
            if self.rank() == 0 { self.download(arena) } else { Ok(Vec::new()) }
        };
        let mut arenas =
            vec![("weights", download(self.saved_parameters.as_ref().unwrap_or(&self.parameters))?)];
        for (name, local) in self.states() {
            let values = if self.is_shared() && self.rank() > 0 {
                Vec::new()
            } else if local.len() == self.parameters.len() {
                download(local)?
            } else {
                download(&self.gathered(name, local, Receivers::Owners)?)?
            };
            arenas.push((name, values));
        }
        Ok(arenas.into_iter().map(|(name, values)| (name, Cow::Owned(values))).collect())
    }

    /// [Gathers](Self::gather) an arena into new memory, and waits for the GPU.
    fn gathered(&self, name: &str, local: &Memory, receivers: Receivers) -> Result<Memory> {
        let whole = Memory::zeroed(local.device(), DType::F32, self.parameters.len())?;
        if name == AVERAGE {
            // Frozen tensors have no state: their average equals their value.
            let parameters = self.saved_parameters.as_ref().unwrap_or(&self.parameters);
            self.compute.copy(parameters.view(), whole.view())?;
        }
        self.gather(local, &whole, receivers)?;
        // Before the memory may be freed.
        self.wait(STEP)?;
        Ok(whole)
    }

    /// A copy on the host of the moving average of the parameters, if the optimizer keeps one. Collective.
    ///
    /// # Errors
    /// As [`read_status`](Self::read_status).
    pub fn averaged_parameters(&mut self) -> Result<Option<Vec<f32>>> {
        self.check()?;
        if let Some(host) = self.host.model_mut() {
            return host.averaged_parameters();
        }
        let Some(average) = &self.average else { return Ok(None) };
        self.download(&self.gathered(AVERAGE, average, Receivers::All)?).map(Some)
    }

    /// Restores the state after `steps` steps. `read` returns the values of one of the [`arenas`](Self::arenas) by
    /// name, in the order of the device's layout. Afterwards all ranks hold rank 0's values. They may have been saved
    /// with any number of ranks, with a sharded optimizer or not. Collective.
    ///
    /// # Errors
    /// If ranks restore different steps; as `read`, and as the communicator.
    pub fn restore(
        &mut self,
        steps: u64,
        mut read: impl FnMut(&str, &Layout) -> Result<Vec<f32>>,
    ) -> Result<()> {
        self.wait(STEP)?;
        if let Some(host) = self.host.model_mut() {
            host.restore(steps, read)?;
            self.saved_parameters = None;
            self.upload_from_host()?;
            return self.reset_to_step(steps);
        }
        verify_same(self.host.comm(), "steps to resume from", steps as i64)?;
        self.loss_scale = self.config.plan().loss_scaler.map(|scaler| scaler.initial());
        let states: Vec<&'static str> = self.states().into_iter().map(|(name, _)| name).collect();
        let mut whole = |model: &mut Self, name: &str| -> Result<Vec<f32>> {
            let mut values = read(name, &model.layout)?;
            replicate(model.host.comm(), &model.layout, &mut values)?;
            values.resize(model.parameters.len(), 0.0);
            Ok(values)
        };
        let weights = whole(self, "weights")?;
        self.compute.upload(&weights, self.parameters.view())?;
        for (index, name) in states.into_iter().enumerate() {
            let values = whole(self, name)?;
            let values = Memory::from_slice(&self.compute, &values)?;
            copy_own(&self.compute, &self.buckets, &values, self.states()[index].1)?;
            // Before the memory is freed.
            self.wait(STEP)?;
        }
        self.saved_parameters = None;
        self.refresh_copy()?;
        self.reset_to_step(steps)
    }

    /// Checks that all ranks hold the same parameters, and returns their checksum in the order of the device's layout.
    /// Collective.
    ///
    /// # Errors
    /// [`Error::Diverged`](crate::Error::Diverged) with rank and tensor; as [`read_status`](Self::read_status).
    pub fn verify(&mut self) -> Result<u64> {
        self.check()?;
        self.compare_all()
    }

    /// Compares all ranks' parameters on the host. Collective.
    pub(super) fn compare_all(&mut self) -> Result<u64> {
        self.wait(STEP)?;
        let parameters = self.download(&self.parameters)?;
        verify_equal(self.host.comm(), &self.layout, &parameters)
    }
}

/// Copies the elements of a whole arena that this rank updates.
pub(super) fn copy_own(
    stream: &Stream,
    buckets: &[DeviceBucket],
    whole: &Memory,
    local: &Memory,
) -> Result<()> {
    for bucket in buckets {
        for (state, elements) in bucket.states().into_iter().zip([bucket.own(), bucket.rest()]) {
            stream.copy(whole.slice(elements), local.slice(state))?;
        }
    }
    Ok(())
}
