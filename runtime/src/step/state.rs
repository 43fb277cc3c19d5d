//! What a checkpoint needs of a model, and what becomes of the optimizer's state when buckets change.

use std::borrow::Cow;

use super::DataParallel;
use super::config::DataParallelConfig;
use super::slots::Slots;
use crate::bucket::{self, Bucket};
use crate::comm::Communicator;
use crate::optimizer::Optimizer;
use crate::replicate::{replicate, verify_same};
use crate::{Error, Layout, Result};

/// The name of an arena in a checkpoint, and its values.
pub type NamedArena<'a> = (&'static str, Cow<'a, [f32]>);

impl DataParallel {
    /// The moving average of the parameters, if the optimizer keeps one. Collective where the optimizer is sharded.
    ///
    /// # Errors
    /// As [`Communicator::all_gather`].
    pub fn averaged_parameters(&mut self) -> Result<Option<Vec<f32>>> {
        let Self { comm, layout, slots, optimizer, .. } = self;
        let Some(local) = optimizer.average() else { return Ok(None) };
        let mut whole = vec![0.0; layout.len()];
        slots.gather(comm, local, &mut whole)?;
        Ok(Some(whole))
    }

    /// Everything a checkpoint needs of this model, by name: the parameters and the optimizer's state, each with the
    /// parameters' [layout](Self::layout), whole on rank 0 and empty elsewhere. Collective where the optimizer is sharded.
    ///
    /// # Errors
    /// As [`Communicator::all_gather`].
    pub fn arenas(&mut self) -> Result<Vec<NamedArena<'_>>> {
        let Self { comm, layout, slots, optimizer, .. } = self;
        let len = if comm.rank() == 0 { layout.len() } else { 0 };
        let mut arenas = Vec::new();
        for (name, local) in optimizer.state() {
            let mut whole = vec![0.0; len];
            slots.gather(comm, local, &mut whole)?;
            arenas.push((name, Cow::Owned(whole)));
        }
        let weights = &self.whole_parameters("arenas")?[..len];
        arenas.insert(0, ("weights", Cow::Borrowed(weights)));
        Ok(arenas)
    }

    /// Goes back to the state after `steps` steps. `read` returns the values of one of [`arenas`](Self::arenas)
    /// by its name. Collective; afterwards all ranks hold rank 0's values. They may come from any number of ranks, with
    /// a sharded optimizer or not.
    ///
    /// # Errors
    /// If ranks go back to different steps; as `read`, and the communicator's.
    pub fn restore(
        &mut self,
        steps: u64,
        mut read: impl FnMut(&str, &Layout) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let Self { comm, layout, slots, optimizer, .. } = self;
        verify_same(comm, "steps to go on from", steps as i64)?;
        let mut whole = |name: &str| -> Result<Vec<f32>> {
            let mut values = read(name, layout)?;
            replicate(comm, layout, &mut values)?;
            Ok(values)
        };
        self.parameters.as_mut_slice().copy_from_slice(&whole("weights")?);
        for (name, local) in optimizer.state_mut() {
            slots.keep_own(&whole(name)?, local);
        }
        self.optimizer.set_steps(steps);
        Ok(())
    }

    /// Cuts the buckets anew, once it is known in which order gradients come: rank 0's of the first step, for all ranks.
    /// Where that is the order of the layout, last tensor first, nothing changes.
    pub(super) fn follow_order(&mut self) -> Result<()> {
        let tensors = self.layout.tensors().len();
        let Some(order) = self.observed.take_if(|order| order.len() == tensors) else { return Ok(()) };
        let buckets = follow(&mut self.comm, &self.layout, order, &self.config)?;
        let current = self.slots.all.iter().map(|slot| &slot.bucket);
        if current.eq(&buckets) {
            return Ok(());
        }
        let Self { comm, layout, slots, optimizer, .. } = self;
        let mut states = Vec::new();
        for (_, local) in optimizer.state() {
            let mut whole = vec![0.0; layout.len()];
            slots.gather(comm, local, &mut whole)?;
            states.push(whole);
        }
        let arenas = std::mem::take(slots).uncut()?;
        *slots = Slots::cut(layout, buckets, arenas, self.sharding);
        let config = optimizer.config();
        let mut renewed = Optimizer::new(config, layout, slots.states, self.config.threads)?;
        renewed.set_steps(optimizer.steps());
        for ((_, local), whole) in renewed.state_mut().zip(states) {
            slots.keep_own(&whole, local);
        }
        *optimizer = renewed;
        Ok(())
    }
}

/// Buckets for gradients that come in rank 0's `order`, the same on all ranks. Collective.
pub(super) fn follow(
    comm: &mut Communicator,
    layout: &Layout,
    order: Vec<usize>,
    config: &DataParallelConfig,
) -> Result<Vec<Bucket>> {
    let mut order: Vec<i64> = order.into_iter().map(|tensor| tensor as i64).collect();
    comm.broadcast_slice(&mut order, 0)?;
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..layout.tensors().len() as i64) {
        let problem = "its order of gradients does not name every tensor once".to_owned();
        return Err(Error::Protocol { peer: "rank 0".into(), problem });
    }
    let order = order.into_iter().map(|tensor| tensor as usize);
    Ok(bucket::plan_in_order(layout, order, config.first_bucket(), config.bucket))
}
