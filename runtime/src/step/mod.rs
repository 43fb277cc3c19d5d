//! One training step, from the forward pass to the update, on one screen: see [`DataParallel::step`].
//!
//! The way of a gradient: the model writes it into its bucket ([`crate::bucket`]); the last one of a
//! bucket starts the reduction ([`crate::comm`]); the averages go through the optimizer
//! ([`crate::optimizer`]) into the parameters, of which every rank has a copy. All copies were made equal once
//! ([`crate::replicate`](mod@crate::replicate)). Of a small bucket every rank averages all and applies the same update to the
//! same bits. Of a large one it averages and updates its shard, and passes that on: state and work are divided by n, and
//! the bits are the same (`slot`). On a GPU the same way is `device`'s, without shards.

#[cfg(feature = "cuda")]
pub mod device;
mod slot;

use std::borrow::Cow;
use std::ops::Range;
use std::time::{Duration, Instant};

use slot::{Averaged, Gradient, Sink, Slot, gather, unready};

use crate::bucket;
use crate::comm::{Buffer, Communicator, DType, shard};
use crate::optimizer::{Optimizer, OptimizerConfig};
use crate::replicate::{replicate, verify_equal};
use crate::timeline::Name;
use crate::{Error, Layout, Result};

/// Bytes of the first bucket: small, so that communication starts early.
const FIRST_BUCKET: usize = 256 << 10;
/// Bytes of the other buckets, unless the caller chooses: on a CPU small enough that gradients are still in the cache
/// when they are reduced. (Of 1, 2, 4 and 25 MiB, steps of the larger networks with two ranks were up to 8% shorter
/// with 1 MiB than with 25, and otherwise as long.)
pub const BUCKET: usize = 1 << 20;
/// Bytes from which on a bucket is sharded, unless the caller chooses: below, the optimizer takes less than the exchange
/// of what it has updated. (On a busy machine, two ranks with the 247 KB of `lenet5` took 0.84 ms a step replicated and
/// 1.15 sharded; with the 27 MB of `deep`, sums and updates took 36 ms replicated and 28 sharded.)
pub const SHARD_FROM: usize = 512 << 10;
/// Elements that a thread updates before they are passed on: they, their gradients and their state fit the second-level
/// cache.
const BLOCK: usize = 1 << 15;

/// Where a model writes its gradients during a backward pass.
pub trait GradientSink {
    /// The gradient of parameter tensor `tensor` (index in the layout), to be overwritten: it holds whatever the
    /// last step left.
    fn gradient(&mut self, tensor: usize) -> &mut [f32];

    /// The gradient of `tensor` is final: its all-reduce may start. Called once per tensor and step, in the same
    /// order on every rank, best last layer first.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    fn ready(&mut self, tensor: usize) -> Result<()>;

    /// Sums `values` over all ranks, in place: for synchronised batch normalisation.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    fn sum_over_ranks(&mut self, values: &mut [f64]) -> Result<()>;
}

/// How a [`DataParallel`] trains. The same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DataParallelConfig {
    /// How parameters follow their gradients.
    pub optimizer: OptimizerConfig,
    /// Threads that updates run on.
    pub threads: usize,
    /// Bytes of gradients that are reduced in one operation; the first bucket has at most 256 KiB.
    pub bucket: usize,
    /// Bytes from which on a bucket's part of the optimizer is sharded: every rank has 1/n of its state and of its moving
    /// average, and updates 1/n of its parameters. The weights are the same to the last bit, sharded or not. `None`
    /// replicates all, and so does a backend whose ranks do not share memory: its sums may differ in their last bits from one
    /// operation to the other.
    pub shard_from: Option<usize>,
}

impl DataParallelConfig {
    /// Buckets of [`BUCKET`] bytes, sharded from [`SHARD_FROM`] on.
    pub fn new(optimizer: OptimizerConfig, threads: usize) -> Self {
        DataParallelConfig { optimizer, threads, bucket: BUCKET, shard_from: Some(SHARD_FROM) }
    }
}

/// The name of an arena in a checkpoint, and its values.
pub type NamedArena<'a> = (&'static str, Cow<'a, [f32]>);

/// What steps took beside their forward and backward passes, summed over steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Waiting for gradients that were still on their way.
    pub communication: Duration,
    /// Updating the parameters.
    pub optimizer: Duration,
}

/// A model's parameters, replicated on every rank and updated together, with the optimizer's state sharded over ranks.
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
/// let mut world = mgpu::World::from_env()?;
/// let mut layout = mgpu::Layout::new();
/// layout.push("slope", [1]);
/// let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.1, ..Sgd::default() }));
/// let mut model = mgpu::DataParallel::new(world.communicator()?, layout, vec![0.0], sgd, 1)?;
/// for _ in 0..100 {
///     // Fit y = 3 x at x = 1: the gradient of (slope - 3)² / 2.
///     model.step(|parameters, gradients| {
///         gradients.gradient(0)[0] = parameters[0] - 3.0;
///         gradients.ready(0)
///     })?;
/// }
/// assert!((model.parameters()[0] - 3.0).abs() < 1e-3);
/// # Ok(())
/// # }
/// ```
pub struct DataParallel {
    comm: Box<dyn Communicator>,
    layout: Layout,
    /// Empty once they were lost to an error.
    parameters: Buffer,
    slots: Vec<Slot>,
    /// The slot of each tensor.
    slot_of: Vec<usize>,
    optimizer: Optimizer,
    /// Elements of the sharded buckets, which lie in the arena the other way round.
    segments: Vec<Range<usize>>,
    /// Elements that are updated before they are passed on.
    block: usize,
    /// Where they are asked for.
    times: Option<StepTimes>,
}

impl DataParallel {
    /// Replaces every rank's `parameters` by those of rank 0 and gets ready to train them. Collective. The update
    /// runs on `threads` threads.
    ///
    /// # Errors
    /// If the ranks' layouts differ (names the first tensor), memory is short, or as the communicator's.
    pub fn new(
        comm: Box<dyn Communicator>,
        layout: Layout,
        parameters: Vec<f32>,
        optimizer: OptimizerConfig,
        threads: usize,
    ) -> Result<Self> {
        Self::with_config(comm, layout, parameters, DataParallelConfig::new(optimizer, threads))
    }

    /// As [`new`](Self::new), with all there is to choose.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_config(
        mut comm: Box<dyn Communicator>,
        layout: Layout,
        mut values: Vec<f32>,
        config: DataParallelConfig,
    ) -> Result<Self> {
        replicate(&mut *comm, &layout, &mut values)?;
        let (rank, ranks) = (comm.rank(), comm.size());
        let shares_memory = ranks > 1 && comm.backend() == "cpu";
        let mut gradients = comm.allocate(DType::F32, layout.len())?;
        let (mut slots, mut states) = (Vec::new(), 0);
        let mut slot_of = vec![0; layout.tensors().len()];
        // Buckets are cut from the end of the arena.
        for bucket in bucket::plan(&layout, FIRST_BUCKET.min(config.bucket), config.bucket) {
            let (rest, gradient) = gradients.split_at(bucket.elements.start);
            gradients = rest;
            slot_of[bucket.tensors.clone()].fill(slots.len());
            let begin = bucket.elements.start;
            let sharded = shares_memory && config.shard_from.is_some_and(|least| gradient.bytes() >= least);
            let own = if sharded { shard(gradient.len(), ranks, rank) } else { 0..gradient.len() };
            slots.push(Slot {
                elements: begin..begin + gradient.len(),
                sharded,
                own: begin + own.start..begin + own.end,
                state: states,
                gradient: Gradient::Here(gradient),
                averaged: Averaged::None,
                open: vec![true; bucket.tensors.len()],
                bucket,
            });
            states += own.len();
        }
        let sharded = slots.iter().rev().filter(|slot| slot.sharded);
        let segments: Vec<_> = sharded.map(|slot| slot.elements.clone()).collect();
        // Peers write what they have updated in place.
        let mut parameters = match &segments[..] {
            [] => Buffer::zeroed::<f32>(layout.len()),
            _ => comm.allocate(DType::F32, layout.len())?,
        };
        parameters.as_mut_slice().copy_from_slice(&values);
        let mut optimizer = Optimizer::new(config.optimizer, &layout, states, config.threads);
        if let Some(average) = optimizer.average_mut() {
            keep_own(&slots, &values, average);
        }
        let block = BLOCK * config.threads.max(1);
        let times = None;
        Ok(DataParallel { comm, layout, parameters, slots, slot_of, optimizer, segments, block, times })
    }

    /// Makes one step. `compute` runs forward and backward with the current parameters and hands over every
    /// gradient, as the mean over this rank's batch; the step averages them over ranks and updates the
    /// parameters. Returns what `compute` returns.
    ///
    /// # Errors
    /// As `compute` and the communicator; names a tensor whose gradient was not handed over.
    pub fn step<R>(&mut self, compute: impl FnOnce(&[f32], &mut dyn GradientSink) -> Result<R>) -> Result<R> {
        self.whole_parameters("step")?;
        let begin = self.comm.timeline().begin();
        self.slots.iter_mut().try_for_each(Slot::begin_step)?;
        let mut sink = Sink {
            comm: &mut *self.comm,
            layout: &self.layout,
            slots: &mut self.slots,
            slot_of: &self.slot_of,
        };
        let result = compute(self.parameters.as_slice(), &mut sink)?;
        if let Some(slot) = self.slots.iter().find(|slot| slot.open.contains(&true)) {
            return Err(unready(&self.layout, &slot.bucket, &slot.open));
        }
        self.optimizer.begin_step();
        let updating = self.comm.timeline().begin();
        self.update()?;
        self.comm.timeline().end(updating, Name::OPTIMIZER);
        self.comm.timeline().end_of(begin, Name::STEP, Some(self.steps() as u32));
        Ok(result)
    }

    /// Updates the parameters: of a replicated bucket all, of a sharded one this rank's shard for all ranks.
    fn update(&mut self) -> Result<()> {
        let (start, mut updating) = (Instant::now(), Duration::ZERO);
        let Self { comm, parameters, optimizer, slots, segments, block, .. } = self;
        let mut update = |slot: &Slot, begin: usize, parameters: &mut [f32]| {
            let start = Instant::now();
            let from = begin - slot.elements.start;
            let gradients = &slot.values()[from..from + parameters.len()];
            optimizer.update(begin, slot.state + (begin - slot.own.start), parameters, gradients);
            updating += start.elapsed();
        };
        for slot in slots.iter_mut() {
            slot.settle()?;
            if !slot.sharded {
                update(slot, slot.elements.start, &mut parameters.as_mut_slice()[slot.elements.clone()]);
            }
        }
        if !segments.is_empty() {
            let sharded: Vec<&Slot> = slots.iter().rev().filter(|slot| slot.sharded).collect();
            let mut make = |segment: usize, begin: usize, made: &mut Buffer| {
                update(sharded[segment], begin, made.as_mut_slice());
            };
            let all = std::mem::replace(parameters, Buffer::zeroed::<f32>(0));
            *parameters = comm.all_gather_with(all, segments, *block, &mut make)?.wait()?;
        }
        if let Some(times) = &mut self.times {
            times.communication += start.elapsed().saturating_sub(updating);
            times.optimizer += updating;
        }
        Ok(())
    }

    /// Measures from now on what steps take beside their passes, from zero.
    pub fn start_times(&mut self) {
        self.times = Some(StepTimes::default());
    }

    /// What the steps took since [`start_times`](Self::start_times).
    pub fn times(&self) -> Option<StepTimes> {
        self.times
    }

    /// This rank's copy of the parameters, equal on all ranks. Empty after a step in which a rank was lost while updated
    /// parameters were passed on.
    pub fn parameters(&self) -> &[f32] {
        self.parameters.as_slice()
    }

    /// The parameters, unless they were lost.
    fn whole_parameters(&self, operation: &'static str) -> Result<&[f32]> {
        let parameters = self.parameters.as_slice();
        if parameters.len() == self.layout.len() {
            return Ok(parameters);
        }
        let problem = "the parameters were lost to an earlier error".to_owned();
        Err(Error::InvalidArgument { operation, problem })
    }

    /// The moving average of the parameters, if the optimizer keeps one. Collective where the optimizer is sharded.
    ///
    /// # Errors
    /// As [`Communicator::all_gather`].
    pub fn averaged_parameters(&mut self) -> Result<Option<Vec<f32>>> {
        let Self { comm, layout, slots, optimizer, .. } = self;
        let Some(local) = optimizer.average() else { return Ok(None) };
        let mut whole = vec![0.0; layout.len()];
        gather(&mut **comm, slots, local, &mut whole)?;
        Ok(Some(whole))
    }

    /// Names, shapes and offsets of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The gradient of `tensor` as of the last step, averaged over ranks. Collective where the optimizer is sharded: a rank
    /// has only its shards' averages until somebody asks.
    ///
    /// # Errors
    /// If it was not averaged since the last step began, or as [`Communicator::all_gather`].
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn gradient(&mut self, tensor: usize) -> Result<&[f32]> {
        let slot = &mut self.slots[self.slot_of[tensor]];
        let range = slot.within(&self.layout, tensor);
        Ok(&slot.averaged(&mut *self.comm)?[range])
    }

    /// Sets the learning rate of the following steps, for schedules. The same on every rank.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.optimizer.set_learning_rate(lr);
    }

    /// Steps made.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.comm.size()
    }

    /// Elements of the optimizer's state on this rank, the moving average among them.
    pub fn optimizer_len(&self) -> usize {
        self.optimizer.state_len()
    }

    /// The communicator, for collectives of the program's own between steps.
    pub fn comm(&mut self) -> &mut dyn Communicator {
        &mut *self.comm
    }

    /// Checks that all ranks hold the same parameters, and returns their checksum. Collective.
    ///
    /// # Errors
    /// [`Error::Diverged`] with rank and tensor.
    pub fn verify(&mut self) -> Result<u64> {
        verify_equal(&mut *self.comm, &self.layout, self.parameters.as_slice())
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
            gather(&mut **comm, slots, local, &mut whole)?;
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
    /// As `read`, and the communicator's.
    pub fn restore(
        &mut self,
        steps: u64,
        mut read: impl FnMut(&str, &Layout) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let Self { comm, layout, slots, optimizer, .. } = self;
        let mut whole = |name: &str| -> Result<Vec<f32>> {
            let mut values = read(name, layout)?;
            replicate(&mut **comm, layout, &mut values)?;
            Ok(values)
        };
        self.parameters.as_mut_slice().copy_from_slice(&whole("weights")?);
        for (name, local) in optimizer.state_mut() {
            keep_own(slots, &whole(name)?, local);
        }
        self.optimizer.set_steps(steps);
        Ok(())
    }
}

/// Keeps those elements of a whole arena that this rank has the state of.
fn keep_own(slots: &[Slot], whole: &[f32], local: &mut [f32]) {
    for slot in slots {
        local[slot.states()].copy_from_slice(&whole[slot.own.clone()]);
    }
}
