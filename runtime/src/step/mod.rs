//! One training step, from the forward pass to the update, on one screen: see [`DataParallel::step`].
//!
//! The way of a gradient: the model writes it into its bucket ([`crate::bucket`]); the last one of a
//! bucket starts the reduction ([`crate::comm`]); the averages go through the optimizer
//! ([`crate::optimizer`]) into the parameters, of which every rank has a copy. All copies were made equal once
//! ([`crate::replicate`](mod@crate::replicate)). Of a small bucket every rank averages all and applies the same update to the
//! same bits. Of a large one it averages and updates its shard, and passes that on: state and work are divided by n, and
//! the bits are the same (`slot`). On a GPU the same way is `device`'s.

mod accumulate;
mod buffers;
mod clip;
mod config;
#[cfg(feature = "cuda")]
pub mod device;
mod guard;
mod sink;
mod slot;
mod slots;
mod state;
mod tree;

use std::time::{Duration, Instant};

use accumulate::Accumulator;
use buffers::BufferMean;
pub use config::{BUCKET, Compression, DataParallelConfig, Reduction, SHARD_FROM, VERIFY_EVERY};
use guard::Report;
pub use sink::GradientSink;
use sink::Sink;
use slot::{Exchange, Slot, check_tensor, unready};
use slots::{Sharding, Slots};
pub use state::NamedArena;

use crate::bucket;
use crate::comm::{Buffer, Communicator, DType};
use crate::optimizer::{Optimizer, OptimizerConfig};
use crate::replicate::{agree, replicate, verify_equal};
use crate::{Error, Layout, Result};

/// Elements that a thread updates before they are passed on: they, their gradients and their state fit the second-level
/// cache.
const BLOCK: usize = 1 << 15;

/// A part of a rank's batch, of which gradients are computed by themselves.
pub struct MicroBatch<'a> {
    /// Which of the step's on this rank, from 0.
    pub index: usize,
    /// The parameters, the same for all of the step.
    pub parameters: &'a [f32],
    /// What the model changes while it computes, beside its parameters: running statistics.
    pub buffers: &'a mut [f32],
    /// Takes the gradients.
    pub gradients: &'a mut dyn GradientSink,
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
    comm: Communicator,
    layout: Layout,
    /// Empty once they were lost to an error.
    parameters: Buffer,
    slots: Slots,
    sharding: Sharding,
    /// Tensors in the order in which their gradients came in the first step, until buckets follow it.
    observed: Option<Vec<usize>>,
    optimizer: Optimizer,
    accumulator: Accumulator,
    config: DataParallelConfig,
    /// Norm of the last step's gradients, where they are clipped.
    norm: Option<f64>,
    /// Elements that are updated before they are passed on.
    block: usize,
    /// What updating has taken so far.
    update_time: Duration,
}

impl DataParallel {
    /// Replaces every rank's `parameters` by those of rank 0 and gets ready to train them. Collective. The update
    /// runs on `threads` threads.
    ///
    /// # Errors
    /// If the ranks' layouts or settings differ (names the first tensor or setting), memory is short, or as the communicator's.
    pub fn new(
        comm: Communicator,
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
    /// As [`new`](Self::new); if what is chosen does not go together.
    pub fn with_config(
        mut comm: Communicator,
        layout: Layout,
        mut values: Vec<f32>,
        config: DataParallelConfig,
    ) -> Result<Self> {
        config.check(comm.size())?;
        agree(&mut comm, &config.settings())?;
        replicate(&mut comm, &layout, &mut values)?;
        let (rank, ranks) = (comm.rank(), comm.size());
        if config.overlap && ranks > 1 {
            comm = comm.in_background()?;
        }
        let shares_memory = comm.capabilities().shares_memory;
        let sharding = Sharding { rank, ranks, from: config.shard_from.filter(|_| shares_memory) };
        let gradients = comm.allocate(DType::F32, layout.len())?;
        let narrow = match config.compression {
            Compression::Bf16 if ranks > 1 => Some(comm.allocate(DType::Bf16, layout.len())?),
            _ => None,
        };
        let buckets = bucket::plan(&layout, config.first_bucket(), config.bucket);
        let slots = Slots::cut(&layout, buckets, (gradients, narrow), sharding);
        // Of sharded buckets, peers write what they have updated in place.
        let mut parameters = match sharding.from {
            None => Buffer::zeroed::<f32>(layout.len()),
            Some(_) => comm.allocate(DType::F32, layout.len())?,
        };
        parameters.as_mut_slice().copy_from_slice(&values);
        let mut optimizer = Optimizer::new(config.optimizer, &layout, slots.states, config.threads)?;
        if let Some(average) = optimizer.average_mut() {
            slots.keep_own(&values, average);
        }
        Ok(DataParallel {
            accumulator: Accumulator::new(layout.len(), config.world_size_invariant),
            block: BLOCK * config.threads,
            observed: (ranks > 1).then(Vec::new),
            update_time: Duration::ZERO,
            norm: None,
            comm,
            layout,
            parameters,
            slots,
            sharding,
            optimizer,
            config,
        })
    }

    /// Makes one step. `compute` runs forward and backward with the current parameters and hands over every
    /// gradient, as the mean over this rank's batch; the step averages them over ranks and updates the
    /// parameters. Returns what `compute` returns.
    ///
    /// # Errors
    /// As [`step_accumulated`](Self::step_accumulated).
    pub fn step<R>(&mut self, compute: impl FnOnce(&[f32], &mut dyn GradientSink) -> Result<R>) -> Result<R> {
        let (mut compute, mut result) = (Some(compute), None);
        self.step_accumulated(1, &mut [], |batch| {
            let compute = compute.take().expect("there is one micro-batch");
            result = Some(compute(batch.parameters, batch.gradients)?);
            Ok(())
        })?;
        Ok(result.expect("the micro-batch was computed"))
    }

    /// Makes one step of several micro-batches, equally many on all ranks, which communicates as much as with one.
    ///
    /// ```
    /// # fn main() -> mgpu::Result<()> {
    /// # use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
    /// # let mut world = mgpu::World::from_env()?;
    /// # let mut layout = mgpu::Layout::new();
    /// # layout.push("mean", [1]);
    /// let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { lr: 1.0, ..Sgd::default() }));
    /// let config = mgpu::DataParallelConfig { clip_norm: Some(100.0), ..mgpu::DataParallelConfig::new(sgd, 1) };
    /// let mut model = mgpu::DataParallel::with_config(world.communicator()?, layout, vec![0.0], config)?;
    /// let samples = [1.0, 3.0, 5.0, 11.0];
    /// // The gradient of (mean - sample)² / 2, sample by sample.
    /// model.step_accumulated(4, &mut [], |batch| {
    ///     batch.gradients.write(0, &[batch.parameters[0] - samples[batch.index]])
    /// })?;
    /// assert_eq!((model.parameters(), model.gradient_norm()), (&[5.0][..], Some(5.0)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// `compute` runs forward and backward of each, and hands over every gradient as the mean over the micro-batch; the
    /// step reduces them over micro-batches and ranks, and updates the parameters. `buffers` are what the model changes
    /// beside its parameters, such as running statistics; they are passed on to `compute`.
    ///
    /// # Errors
    /// As `compute` and the communicator; if there are no micro-batches. Names a tensor whose gradient was not handed over, or
    /// twice; rank and tensor, if weights differ between ranks ([`Error::Diverged`]). Parameters and optimizer are as before,
    /// and another step may be made, but `buffers` are as `compute` has left them, if gradients are not finite
    /// ([`Error::NotFinite`], which names rank and tensor), or only their sum over ranks is not ([`Error::ReducedNotFinite`]),
    /// or ranks have different numbers of micro-batches or different learning rates in the step ([`Error::Disagreement`],
    /// [`Error::SettingMismatch`]).
    pub fn step_accumulated(
        &mut self,
        micro_batches: usize,
        buffers: &mut [f32],
        mut compute: impl FnMut(MicroBatch<'_>) -> Result<()>,
    ) -> Result<()> {
        if micro_batches == 0 {
            let problem = "a step has at least one micro-batch".to_owned();
            return Err(Error::InvalidArgument { operation: "step", problem });
        }
        self.whole_parameters("step")?;
        let begin = self.comm.observer().begin();
        self.follow_order()?;
        self.slots.all.iter_mut().try_for_each(Slot::begin_step)?;
        self.observed.iter_mut().for_each(Vec::clear);
        self.accumulator.begin_step(micro_batches);
        let mut not_finite = None;
        let is_mean = self.config.world_size_invariant && !buffers.is_empty();
        let mut mean = is_mean.then(|| BufferMean::new(buffers, micro_batches));
        for index in 0..micro_batches {
            self.accumulator.begin_batch(index);
            if let Some(mean) = &mut mean {
                mean.begin_batch(index, buffers);
            }
            let (parameters, mut sink) = self.begin_batch(&mut not_finite);
            compute(MicroBatch { index, parameters, buffers, gradients: &mut sink })?;
            if let Some(mean) = &mut mean {
                mean.add(buffers);
            }
            if let Some(slot) = self.slots.all.iter().find(|slot| slot.open.contains(&true)) {
                return Err(unready(&self.layout, &slot.bucket, &slot.open));
            }
        }
        self.slots.all.iter_mut().try_for_each(Slot::settle)?;
        if let Some(mean) = mean {
            mean.finish(&mut self.comm, buffers)?;
        }
        self.compare_reports(not_finite)?;
        self.clip()?;
        let updating = self.comm.observer().begin();
        self.update()?;
        self.comm.observer().end(updating, "optimizer", None);
        if self.config.verify_every.is_some_and(|every| self.steps().is_multiple_of(every)) {
            self.verify()?;
        }
        self.comm.observer().end(begin, "step", Some(self.steps() as u32));
        Ok(())
    }

    /// Updates the parameters: of a replicated bucket all, of a sharded one this rank's shard for all ranks.
    fn update(&mut self) -> Result<()> {
        self.optimizer.begin_step();
        let Self { comm, parameters, optimizer, slots, block, update_time, .. } = self;
        let mut update = |slot: &Slot, begin: usize, parameters: &mut [f32]| {
            let start = Instant::now();
            let from = begin - slot.elements.start;
            let gradients = &slot.values()[from..from + parameters.len()];
            optimizer.update(begin, slot.state + (begin - slot.own.start), parameters, gradients);
            *update_time += start.elapsed();
        };
        for slot in slots.all.iter().filter(|slot| !slot.sharded) {
            update(slot, slot.elements.start, &mut parameters.as_mut_slice()[slot.elements.clone()]);
        }
        if !slots.segments.is_empty() {
            let mut make = |segment: usize, begin: usize, made: &mut Buffer| {
                update(&slots.all[slots.of_segment[segment]], begin, made.as_mut_slice());
            };
            let all = std::mem::replace(parameters, Buffer::zeroed::<f32>(0));
            *parameters = comm.update_all_gather(all, &slots.segments, *block, &mut make)?.wait()?;
        }
        Ok(())
    }

    /// What a micro-batch is computed with. What is found in its gradients goes to `not_finite`.
    fn begin_batch<'a>(&'a mut self, not_finite: &'a mut Option<usize>) -> (&'a [f32], Sink<'a>) {
        let (micro_batches, step) = (self.accumulator.count(), self.steps());
        for slot in &mut self.slots.all {
            slot.open.fill(true);
        }
        let DataParallelConfig { reduction, world_size_invariant: invariant, check_finite: check, .. } =
            self.config;
        let sink = Sink {
            comm: &mut self.comm,
            layout: &self.layout,
            slots: &mut self.slots,
            observed: self.observed.as_mut(),
            accumulator: &mut self.accumulator,
            exchange: Exchange { reduction, invariant, micro_batches },
            step,
            check,
            not_finite,
        };
        (self.parameters.as_slice(), sink)
    }

    /// Compares what the ranks have found in their gradients, `own` in those of this rank, and whether all make the same step.
    fn compare_reports(&mut self, own: Option<usize>) -> Result<()> {
        let Self { comm, layout, slots, config, accumulator, optimizer, .. } = self;
        let (rank, ranks) = (comm.rank(), comm.size());
        let reduced = match config.check_finite && ranks > 1 {
            true => slots.all.iter().find_map(|slot| slot.reduced_not_finite(layout, rank, ranks)),
            false => None,
        };
        let (micro_batches, learning_rate) = (accumulator.count(), optimizer.learning_rate());
        let report = Report { own, reduced, micro_batches, learning_rate };
        report.compare(comm, layout, optimizer.steps() + 1)
    }

    /// Shortens the gradients if they are longer than they may be.
    fn clip(&mut self) -> Result<()> {
        if let Some(most) = self.config.clip_norm {
            self.norm = Some(match self.config.world_size_invariant {
                true => clip::clip_invariant(&self.layout, &mut self.slots, most),
                false => clip::clip(&mut self.comm, &mut self.slots.all, most)?,
            });
        }
        Ok(())
    }

    /// The Euclidean norm of the last step's reduced gradients, before they were clipped; `None` where they are not.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.norm
    }

    /// What updating the parameters has taken so far, without communication.
    pub fn update_time(&self) -> Duration {
        self.update_time
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

    /// Names, shapes and offsets of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The gradient of `tensor` as of the last step, averaged over ranks. Collective where the optimizer is sharded: a rank
    /// has only its shards' averages until somebody asks.
    ///
    /// # Errors
    /// If there is no such tensor, it was not averaged since the last step began, or as [`Communicator::all_gather`].
    pub fn gradient(&mut self, tensor: usize) -> Result<&[f32]> {
        check_tensor(&self.layout, "gradient", tensor)?;
        let slot = &mut self.slots.all[self.slots.of[tensor]];
        let range = slot.within(&self.layout, tensor);
        Ok(&slot.averaged(&mut self.comm)?[range])
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
    pub fn comm(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    /// Checks that all ranks hold the same parameters, and returns their checksum. Collective.
    ///
    /// # Errors
    /// [`Error::Diverged`] with rank and tensor.
    pub fn verify(&mut self) -> Result<u64> {
        verify_equal(&mut self.comm, &self.layout, self.parameters.as_slice())
    }
}
