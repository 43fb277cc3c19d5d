//! Saving and restoring a model, and moving the optimizer's state when buckets change.

use std::borrow::Cow;

use super::gradient_buckets::Ownership;
use super::{DataParallel, Reducer};
use crate::comm::Communicator;
use crate::optimizer::{AVERAGE, LossScale, Optimizer};
use crate::replicate::{replicate, verify_same};
use crate::{Error, Layout, Result};

/// The name of an arena in a checkpoint, and its values.
pub type NamedArena<'a> = (&'static str, Cow<'a, [f32]>);

impl DataParallel {
    /// True if a moving average of the parameters is kept.
    pub fn has_average(&self) -> bool {
        self.optimizer.average().is_some()
    }

    /// The moving average of the parameters, if the optimizer keeps one. Collective if a rank does not have the
    /// optimizer's whole state.
    ///
    /// # Errors
    /// As [`Communicator::all_gather`](crate::Communicator::all_gather).
    pub fn averaged_parameters(&mut self) -> Result<Option<Vec<f32>>> {
        let Self { reducer: Reducer { comm, buckets, ownership, .. }, optimizer, parameters, .. } = self;
        let Some(local) = optimizer.average() else { return Ok(None) };
        // Frozen tensors have no state: their average equals their value.
        let mut whole = parameters.as_slice().to_vec();
        buckets.gather(comm, local, &mut whole)?;
        if matches!(ownership, Ownership::RankZero) {
            comm.broadcast_slice(&mut whole, 0)?;
        }
        Ok(Some(whole))
    }

    /// Everything that a checkpoint needs of this model, by name: the parameters and the optimizer's state, each with
    /// the [layout](Self::layout) of the parameters, complete on rank 0 and empty elsewhere. Collective if the
    /// optimizer is sharded.
    ///
    /// # Errors
    /// As [`Communicator::all_gather`](crate::Communicator::all_gather).
    pub fn arenas(&mut self) -> Result<Vec<NamedArena<'_>>> {
        let len = if self.rank() == 0 { self.whole_parameters("arenas")?.len() } else { 0 };
        let Self { reducer: Reducer { comm, buckets, .. }, optimizer, parameters, .. } = self;
        let mut arenas = Vec::new();
        for (name, local) in optimizer.state() {
            // Frozen tensors have no state: their average equals their value, the rest is 0.
            let mut whole = match name {
                AVERAGE => parameters.as_slice::<f32>()[..len].to_vec(),
                _ => vec![0.0; len],
            };
            buckets.gather(comm, local, &mut whole)?;
            arenas.push((name, Cow::Owned(whole)));
        }
        let weights = &self.whole_parameters("arenas")?[..len];
        arenas.insert(0, ("weights", Cow::Borrowed(weights)));
        Ok(arenas)
    }

    /// Restores the state after `steps` steps. `read` returns the values of one of the [`arenas`](Self::arenas) by
    /// name. Afterwards all ranks hold rank 0's values. They may have been saved with any number of ranks, with any
    /// placement, with a sharded optimizer or not. Collective.
    ///
    /// Gradients that become ready in another order than the reverse of the layout's change the buckets after the first step
    /// of a process. So after a restore the norm for clipping may be rounded differently in the first step.
    ///
    /// # Errors
    /// If ranks restore different steps; as `read`, and as the communicator.
    pub fn restore(
        &mut self,
        steps: u64,
        mut read: impl FnMut(&str, &Layout) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let Self { reducer: Reducer { comm, layout, buckets, .. }, optimizer, .. } = self;
        verify_same(comm, "steps to resume from", steps as i64)?;
        let mut whole = |name: &str| -> Result<Vec<f32>> {
            let mut values = read(name, layout)?;
            replicate(comm, layout, &mut values)?;
            Ok(values)
        };
        self.parameters.as_mut_slice().copy_from_slice(&whole("weights")?);
        for (name, local) in optimizer.state_mut() {
            buckets.copy_own(&whole(name)?, local);
        }
        self.optimizer.set_steps(steps, 0);
        self.loss_scaling = self.loss_scaling.map(|(scaler, _)| (scaler, scaler.initial()));
        Ok(())
    }

    /// The scale of the next step's loss, and what it depends on; `None` without a
    /// [loss scaler](crate::DataParallelConfig::loss_scaler).
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scaling.map(|(_, scale)| scale)
    }

    /// Continues with the loss scale of a checkpoint, after [`restore`](Self::restore), which begins with the scaler's
    /// first scale. All ranks adopt rank 0's; with `None` there, or without a loss scaler, nothing changes. Collective.
    ///
    /// # Errors
    /// If it is no loss scale, or more steps were skipped than made; as the communicator.
    pub fn restore_loss_scale(&mut self, saved: Option<LossScale>) -> Result<()> {
        let Some((scaler, _)) = self.loss_scaling else { return Ok(()) };
        if let Some(scale) = loss_scale_of_rank_0(&mut self.reducer.comm, saved, self.optimizer.steps())? {
            self.optimizer.set_steps(self.optimizer.steps(), scale.skipped);
            self.loss_scaling = Some((scaler, scale));
        }
        Ok(())
    }

    /// Replaces the buckets once the order of gradients is known, and moves the optimizer's state accordingly.
    pub(super) fn apply_gradient_order(&mut self) -> Result<()> {
        let Some(buckets) = self.reducer.next_buckets()? else { return Ok(()) };
        let Self { reducer, optimizer, .. } = self;
        let mut states = Vec::new();
        for (_, local) in optimizer.state() {
            let mut whole = vec![0.0; reducer.layout.len()];
            reducer.buckets.gather(&mut reducer.comm, local, &mut whole)?;
            states.push(whole);
        }
        reducer.rebuild_buckets(buckets)?;
        let (config, buckets) = (optimizer.config(), &reducer.buckets);
        let mut renewed = Optimizer::new(config, &reducer.layout, buckets.states);
        renewed.set_steps(optimizer.steps(), optimizer.skipped_steps());
        for ((_, local), whole) in renewed.state_mut().zip(states) {
            buckets.copy_own(&whole, local);
        }
        *optimizer = renewed;
        Ok(())
    }
}

/// Rank 0's `saved` on all ranks, if it is the state after `steps` steps. Collective.
pub(super) fn loss_scale_of_rank_0(
    comm: &mut Communicator,
    saved: Option<LossScale>,
    steps: u64,
) -> Result<Option<LossScale>> {
    let mut words = saved.map_or([0; 4], |LossScale { scale, good_steps, skipped }| {
        [1, i64::from(scale.to_bits()), i64::from(good_steps), skipped.cast_signed()]
    });
    comm.broadcast_slice(&mut words, 0)?;
    let [is_saved, scale, good_steps, skipped] = words;
    if is_saved == 0 {
        return Ok(None);
    }
    let scale = LossScale {
        scale: f32::from_bits(scale as u32),
        good_steps: good_steps as u32,
        skipped: skipped.cast_unsigned(),
    };
    if scale.is_valid() && scale.skipped <= steps {
        return Ok(Some(scale));
    }
    let problem = format!("{scale:?} is no loss scale after {steps} steps");
    Err(Error::InvalidArgument { operation: "restore loss scale", problem })
}
