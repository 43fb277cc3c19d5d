//! One training step, from the forward pass to the update: see [`DataParallel::step_accumulated`].
//!
//! The model writes a gradient into its bucket ([`crate::bucket`]). When the last gradient of a bucket is ready, the
//! [`Reducer`] starts the reduction over ranks ([`crate::comm`]). The optimizer ([`crate::optimizer`]) then applies
//! the averaged gradients to the parameters, of which every rank has a copy; all copies were made equal at the start
//! ([`crate::replicate`](mod@crate::replicate)). Every rank averages all of a small bucket, and applies the same
//! update to the same bits. In a large bucket every rank averages and updates only its shard, and the shards are then
//! gathered: memory and work are divided by n, and the bits are the same (`gradient_bucket`). That is the placement
//! `replicated`. With `host` all buckets count as large, so that the ranks' memory has one copy of the optimizer's state.
//! With `shared` rank 0 averages and updates all buckets, and the others receive the parameters. `device` does the same
//! on a GPU. Host and device share what does not depend on the memory: which gradients are ready and which bucket is next
//! (`readiness`), and the configuration (`config`).

mod accumulate;
mod buffers;
mod clip;
mod config;
#[cfg(feature = "cuda")]
pub mod device;
mod gradient_bucket;
mod gradient_buckets;
mod guard;
mod readiness;
mod reducer;
mod sink;
mod state;
mod tree;

use std::time::{Duration, Instant};

pub use config::{Compression, DataParallelConfig, Placement, ReducerConfig, Reduction, ShardFrom, Unused};
use config::{SHARD_FROM, SHARD_FROM_WITH_SHARED_CORES};
use gradient_bucket::{GradientBucket, Owner};
use gradient_buckets::Ownership;
use reducer::Participation;
pub use reducer::Reducer;
pub use sink::GradientSink;
pub use state::NamedArena;

use crate::comm::{Buffer, Capabilities, Communicator, DType, gather_segments};
use crate::optimizer::{LossScale, LossScaler, Optimizer, OptimizerConfig};
use crate::replicate::{checksum, replicate, verify_equal, verify_settings};
use crate::{Error, Layout, Result};

/// Number of elements that a thread updates at a time: they, their gradients and their state fit into the L2 cache.
const BLOCK: usize = 1 << 15;

/// A part of a rank's batch, whose gradients are computed separately.
pub struct MicroBatch<'a> {
    /// Index among this rank's micro-batches of the step, from 0.
    pub index: usize,
    /// The parameters, unchanged during the step.
    pub parameters: &'a [f32],
    /// The model's buffers, which the forward pass may change: values besides the parameters, such as running
    /// statistics.
    pub buffers: &'a mut [f32],
    /// Receives the gradients.
    pub gradients: &'a mut dyn GradientSink,
}

/// Data-parallel training on the host: a [`Reducer`] with an optimizer. Every rank holds all parameters; the
/// optimizer's state is sharded over ranks, or where the [`Placement`] says.
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
///
/// A [`DeviceDataParallel`](device::DeviceDataParallel) has the same configuration and methods, with the same
/// meaning. The difference is the memory: here, values are slices, and a call returns when its work is done.
pub struct DataParallel {
    reducer: Reducer,
    /// Empty after an error that lost them.
    parameters: Buffer,
    /// The model's buffers, such as running statistics.
    buffers: Vec<f32>,
    optimizer: Optimizer,
    loss_scaling: Option<(LossScaler, LossScale)>,
    /// Number of steps between two comparisons of the ranks' weights.
    verify_every: Option<u64>,
    /// Number of elements that are updated before they are copied to the peers.
    block: usize,
    /// Total time of the updates.
    update_time: Duration,
}

impl DataParallel {
    /// Replaces every rank's `parameters` by those of rank 0 and prepares training. Updates run on `threads` threads.
    /// Collective.
    ///
    /// # Errors
    /// If the ranks' layouts or settings differ (the error names the first tensor or setting), memory is short, or as the
    /// communicator.
    pub fn new(
        comm: Communicator,
        layout: Layout,
        parameters: Vec<f32>,
        optimizer: OptimizerConfig,
        threads: usize,
    ) -> Result<Self> {
        Self::with_config(comm, layout, parameters, DataParallelConfig::new(optimizer, threads))
    }

    /// As [`new`](Self::new), with a configuration.
    ///
    /// # Errors
    /// As [`new`](Self::new); if the settings are incompatible.
    pub fn with_config(
        mut comm: Communicator,
        layout: Layout,
        mut values: Vec<f32>,
        config: DataParallelConfig,
    ) -> Result<Self> {
        config.check(comm.size())?;
        verify_settings(&mut comm, &config.settings())?;
        replicate(&mut comm, &layout, &mut values)?;
        let ownership = ownership(&config, &comm);
        let mut reducer = Reducer::assemble(comm, layout, config.reducer, ownership, config.threads)?;
        // Peers write the updated parameters of their buckets and shards in place.
        let mut parameters = match ownership {
            Ownership::Ranks { shard_from: None } => Buffer::zeroed::<f32>(values.len()),
            _ => reducer.comm.allocate(DType::F32, values.len())?,
        };
        parameters.as_mut_slice().copy_from_slice(&values);
        let buckets = &reducer.buckets;
        let mut optimizer = Optimizer::new(config.optimizer, &reducer.layout, buckets.states);
        if let Some(average) = optimizer.average_mut() {
            buckets.copy_own(&values, average);
        }
        Ok(DataParallel {
            reducer,
            parameters,
            buffers: Vec::new(),
            optimizer,
            loss_scaling: config.loss_scaler.map(|scaler| (scaler, scaler.initial())),
            block: BLOCK * config.threads,
            update_time: Duration::ZERO,
            verify_every: config.verify_every,
        })
    }

    /// Adds buffers: values that the model changes besides its parameters, such as running statistics. They must be equal
    /// on all ranks now; later each rank has its own, except in a world-size-invariant reduction. Collective.
    ///
    /// # Errors
    /// [`Error::SettingMismatch`] if ranks have different ones; as the communicator.
    pub fn with_buffers(mut self, buffers: Vec<f32>) -> Result<Self> {
        verify_settings(&mut self.reducer.comm, &[describe_buffers(&buffers)])?;
        Ok(DataParallel { buffers, ..self })
    }

    /// Makes one step. `compute` runs forward and backward with the current parameters and provides every gradient,
    /// as the mean over this rank's batch. The step averages them over ranks and updates the parameters. Returns what
    /// `compute` returns.
    ///
    /// # Errors
    /// As [`step_accumulated`](Self::step_accumulated); if there are several micro-batches.
    pub fn step<R>(&mut self, compute: impl FnOnce(&[f32], &mut dyn GradientSink) -> Result<R>) -> Result<R> {
        self.reducer.check_single("step", "step_accumulated")?;
        let (mut compute, mut result) = (Some(compute), None);
        self.step_accumulated(|batch| {
            let compute = compute.take().expect("there is one micro-batch");
            result = Some(compute(batch.parameters, batch.gradients)?);
            Ok(())
        })?;
        Ok(result.expect("the micro-batch was computed"))
    }

    /// Makes one step of all [micro-batches](ReducerConfig::micro_batches), with as much communication as for one.
    ///
    /// ```
    /// # fn main() -> mgpu::Result<()> {
    /// # use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
    /// # let mut world = mgpu::World::from_env()?;
    /// # let mut layout = mgpu::Layout::new();
    /// # layout.push("mean", [1]);
    /// let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { lr: 1.0, ..Sgd::default() }));
    /// let config = mgpu::DataParallelConfig::new(sgd, 1).with_micro_batches(4).with_clip_norm(100.0);
    /// let mut model = mgpu::DataParallel::with_config(world.communicator()?, layout, vec![0.0], config)?;
    /// let samples = [1.0, 3.0, 5.0, 11.0];
    /// // The gradient of (mean - sample)² / 2, sample by sample.
    /// model.step_accumulated(|batch| {
    ///     batch.gradients.write(0, &[batch.parameters[0] - samples[batch.index]])
    /// })?;
    /// assert_eq!((model.parameters(), model.gradient_norm()), (&[5.0][..], Some(5.0)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// `compute` runs forward and backward of each micro-batch, and provides every gradient as the mean over the
    /// micro-batch. The step reduces them over micro-batches and ranks, and updates the parameters.
    ///
    /// # Errors
    /// Those of `compute` and the communicator. If a tensor's gradient was not marked ready, or twice; the error
    /// names it. If weights differ between ranks ([`Error::Diverged`], with rank and tensor).
    ///
    /// After the following errors, parameters and optimizer are unchanged and another step may be made, but
    /// [`buffers`](Self::buffers) are as `compute` has left them: without a
    /// [loss scaler](DataParallelConfig::loss_scaler), non-finite gradients of a rank
    /// ([`Error::NotFinite`], with rank and tensor); non-finite reduced gradients only ([`Error::ReducedNotFinite`]);
    /// different numbers of micro-batches or different learning rates on the ranks ([`Error::Disagreement`],
    /// [`Error::SettingMismatch`]).
    pub fn step_accumulated(&mut self, compute: impl FnMut(MicroBatch<'_>) -> Result<()>) -> Result<()> {
        self.make_step(true, compute).map(|_| ())
    }

    /// Takes part in the steps of ranks that still have data, with weight 0, until no rank has; so this rank's
    /// parameters stay equal to theirs. Every rank calls it once it has run out of data, including the last one.
    /// Returns the number of steps made meanwhile. The learning rate is that of the other ranks. Collective.
    ///
    /// ```
    /// use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
    /// use mgpu::{DataParallel, DataParallelConfig, Layout, World};
    ///
    /// fn train(mut world: World) -> mgpu::Result<()> {
    ///     let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.5, ..Sgd::default() }));
    ///     let config = DataParallelConfig::new(sgd, 1).with_join(true);
    ///     let mut layout = Layout::new();
    ///     layout.push("sum", [1]);
    ///     let mut model = DataParallel::with_config(world.communicator()?, layout, vec![0.0], config)?;
    ///     let batches = 2 + world.rank();
    ///     for _ in 0..batches {
    ///         model.step(|_, gradients| gradients.write(0, &[-2.0]))?;
    ///     }
    ///     assert_eq!(model.join()?, u64::from(4 - batches));
    ///     // Four steps, whose means are over three, three, two and one ranks.
    ///     assert_eq!(model.parameters(), [4.0]);
    ///     Ok(())
    /// }
    ///
    /// let worlds = World::threads(3).unwrap();
    /// std::thread::scope(|scope| {
    ///     for world in worlds {
    ///         scope.spawn(|| train(world).unwrap());
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    /// As [`step_accumulated`](Self::step_accumulated); if the configuration has no [`join`](ReducerConfig::join).
    pub fn join(&mut self) -> Result<u64> {
        self.reducer.check_join()?;
        let before = self.steps();
        while self.make_step(false, |_| Ok(()))? {}
        Ok(self.steps() - before)
    }

    /// Makes a step, with or without data on this rank. If no rank has data, makes none and returns false.
    fn make_step(
        &mut self,
        has_data: bool,
        mut compute: impl FnMut(MicroBatch<'_>) -> Result<()>,
    ) -> Result<bool> {
        self.whole_parameters("step")?;
        let begin = self.reducer.comm.observer().begin();
        let _step = nvtx::range("step", Some(self.steps() + 1));
        let Some(participation) = self.agree_on_participation(has_data)? else { return Ok(false) };
        self.apply_gradient_order()?;
        let Self { reducer, parameters, buffers, .. } = self;
        let parameters = parameters.as_slice();
        let unscale = self.loss_scaling.map_or(1.0, |(_, scale)| scale.inverse());
        let reduced = reducer.run(participation, unscale, buffers, |index, buffers, gradients| {
            compute(MicroBatch { index, parameters, buffers, gradients })
        });
        let updating = self.reducer.comm.observer().begin();
        let range = nvtx::range("optimizer", None);
        if self.overflows(&reduced) {
            self.optimizer.skip_step();
        } else {
            reduced?;
            self.update()?;
        }
        drop(range);
        self.reducer.comm.observer().end(updating, "optimizer", None);
        if self.verify_every.is_some_and(|every| self.steps().is_multiple_of(every)) {
            self.verify()?;
        }
        self.reducer.comm.observer().end(begin, "step", Some(self.steps() as u32));
        Ok(true)
    }

    /// Whether gradients have overflowed because of the loss scale, which then falls. The same on all ranks, since all have
    /// compared what they found.
    fn overflows(&mut self, reduced: &Result<()>) -> bool {
        let Some((scaler, scale)) = &mut self.loss_scaling else { return false };
        let not_finite = matches!(reduced, Err(Error::NotFinite { .. } | Error::ReducedNotFinite { .. }));
        let overflows = not_finite && scale.may_fall();
        if overflows || reduced.is_ok() {
            *scale = scaler.after(*scale, overflows);
        }
        overflows
    }

    /// Agrees with the other ranks on who has data; a rank without data adopts their learning rate.
    fn agree_on_participation(&mut self, has_data: bool) -> Result<Option<Participation>> {
        let learning_rate = self.optimizer.base_learning_rate();
        let participation =
            self.reducer.agree_on_participation(self.optimizer.steps(), has_data, learning_rate)?;
        if let Some(Participation { has_data: false, learning_rate, .. }) = participation {
            self.optimizer.set_learning_rate(learning_rate);
        }
        Ok(participation)
    }

    /// Updates the parameters that this rank owns, and makes them equal on all ranks: shards are gathered, and what rank
    /// 0 has updated is broadcast.
    fn update(&mut self) -> Result<()> {
        self.optimizer.begin_step();
        let Self {
            reducer: Reducer { comm, buckets, ownership, threads, .. },
            parameters,
            optimizer,
            block,
            update_time,
            ..
        } = self;
        let mut update = |bucket: &GradientBucket, begin: usize, parameters: &mut [f32]| {
            let start = Instant::now();
            let from = begin - bucket.elements.start;
            let gradients = &bucket.values()[from..from + parameters.len()];
            let state = bucket.state + (begin - bucket.own.start);
            optimizer.update(threads, begin, state, parameters, gradients);
            *update_time += start.elapsed();
        };
        for bucket in buckets.all.iter().filter(|bucket| bucket.owner == Owner::EveryRank) {
            update(bucket, bucket.elements.start, &mut parameters.as_mut_slice()[bucket.elements.clone()]);
        }
        if buckets.segments.is_empty() {
            return Ok(());
        }
        let all = std::mem::replace(parameters, Buffer::zeroed::<f32>(0));
        *parameters = match ownership {
            Ownership::Ranks { .. } => {
                let mut update_block = |segment: usize, begin: usize, parameters: &mut Buffer| {
                    update(&buckets.all[buckets.of_segment[segment]], begin, parameters.as_mut_slice());
                };
                comm.update_all_gather(all, &buckets.segments, *block, &mut update_block)?.wait()?
            }
            Ownership::RankZero => {
                let mut of_segment = buckets.of_segment.iter().map(|bucket| &buckets.all[*bucket]);
                gather_segments(all, &buckets.segments, |mut segment| {
                    let bucket = of_segment.next().expect("a bucket for each segment");
                    if comm.rank() == 0 {
                        update(bucket, bucket.own.start, segment.as_mut_slice());
                    }
                    // While it is in the cache.
                    comm.broadcast(segment, 0)?.wait()
                })?
            }
        };
        Ok(())
    }

    /// Total time of the updates so far, without communication.
    pub fn update_time(&self) -> Duration {
        self.update_time
    }

    /// This rank's copy of the parameters, equal on all ranks. Empty after an error during the gathering of updated
    /// parameters.
    pub fn parameters(&self) -> &[f32] {
        self.parameters.as_slice()
    }

    /// The parameters, or an error if they were lost.
    fn whole_parameters(&self, operation: &'static str) -> Result<&[f32]> {
        let parameters = self.parameters.as_slice();
        if parameters.len() == self.layout().len() {
            return Ok(parameters);
        }
        let problem = "the parameters were lost to an earlier error".to_owned();
        Err(Error::InvalidArgument { operation, problem })
    }

    /// The model's buffers, such as running statistics.
    pub fn buffers(&self) -> &[f32] {
        &self.buffers
    }

    /// As [`buffers`](Self::buffers), mutable. All ranks must make the same changes.
    pub fn buffers_mut(&mut self) -> &mut [f32] {
        &mut self.buffers
    }

    /// Names, shapes and offsets of the parameters.
    pub fn layout(&self) -> &Layout {
        self.reducer.layout()
    }

    /// The gradient of `tensor` in the last step, reduced over ranks and clipped. Collective if a rank only holds the
    /// averages that it needs (with a sharded optimizer, and other [placements](Placement) than `Replicated`) until
    /// they are gathered here.
    ///
    /// # Errors
    /// As [`Reducer::gradient`].
    pub fn gradient(&mut self, tensor: usize) -> Result<&[f32]> {
        self.reducer.gradient(tensor)
    }

    /// A copy of the last step's gradients as the optimizer has used them: reduced and clipped; 0 for frozen tensors.
    /// Collective as [`gradient`](Self::gradient).
    ///
    /// # Errors
    /// As [`Reducer::gradients`].
    pub fn gradients(&mut self) -> Result<Vec<f32>> {
        self.reducer.gradients()
    }

    /// The Euclidean norm of the last step's reduced gradients before clipping; `None` without clipping, or before
    /// the first step.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.reducer.gradient_norm()
    }

    /// The learning rate of the next step: the one that was set last, times the
    /// [schedule's](OptimizerConfig::schedule) factor.
    pub fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }

    /// Sets the learning rate of the following steps, which the schedule multiplies. Must be the same on every rank.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.optimizer.set_learning_rate(lr);
    }

    /// Number of micro-batches of this rank in each step.
    pub fn micro_batches(&self) -> usize {
        self.reducer.micro_batches()
    }

    /// Sets the number of micro-batches of the following steps. Must be the same on every rank.
    ///
    /// # Errors
    /// If `count` is 0.
    pub fn set_micro_batches(&mut self, count: usize) -> Result<()> {
        self.reducer.set_micro_batches(count)
    }

    /// Number of steps made.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.reducer.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.reducer.ranks()
    }

    /// Number of elements of the optimizer's state on this rank, including the moving average.
    pub fn optimizer_len(&self) -> usize {
        self.optimizer.state_len()
    }

    /// The communicator, for the program's own collectives between steps.
    pub fn comm(&mut self) -> &mut Communicator {
        self.reducer.comm()
    }

    /// Checks that all ranks hold the same parameters, and returns their checksum. Collective.
    ///
    /// # Errors
    /// [`Error::Diverged`] with rank and tensor.
    pub fn verify(&mut self) -> Result<u64> {
        let Self { reducer: Reducer { comm, layout, .. }, parameters, .. } = self;
        verify_equal(comm, layout, parameters.as_slice())
    }
}

/// Who averages and updates which buckets of the ranks of `comm`.
fn ownership(config: &DataParallelConfig, comm: &Communicator) -> Ownership {
    // Under NCCL every shard of a host buffer would go through the memory of the GPU once more.
    let Capabilities { sums_in_rank_order, shares_cores, .. } = comm.capabilities();
    let has_shards = comm.size() > 1 && sums_in_rank_order;
    let default = if shares_cores { SHARD_FROM_WITH_SHARED_CORES } else { SHARD_FROM };
    let shard_from = config.shard_from.bytes(Some(default)).filter(|_| has_shards);
    match config.placement {
        Placement::Shared if comm.size() > 1 => Ownership::RankZero,
        Placement::Host if comm.size() > 1 => Ownership::Ranks { shard_from: Some(0) },
        _ => Ownership::Ranks { shard_from },
    }
}

/// Describes buffers as a setting that ranks compare.
fn describe_buffers(buffers: &[f32]) -> (&'static str, String) {
    ("buffers", format!("{} elements with checksum {:016x}", buffers.len(), checksum(buffers)))
}
