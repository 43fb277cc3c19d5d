//! One training step, from the forward pass to the update, on one screen: see [`DataParallel::step_accumulated`].
//!
//! The way of a gradient: the model writes it into its bucket ([`crate::bucket`]); the last one of a
//! bucket starts the reduction ([`crate::comm`]), which is the [`Reducer`]'s part and ends with averages. These go through the
//! optimizer ([`crate::optimizer`]) into the parameters, of which every rank has a copy. All copies were made equal once
//! ([`crate::replicate`](mod@crate::replicate)). Of a small bucket every rank averages all and applies the same update to the
//! same bits. Of a large one it averages and updates its shard, and passes that on: state and work are divided by n, and
//! the bits are the same (`bucket`). On a GPU the same way is `device`'s. What both do with bits and not with memory is one:
//! which gradients are there and which bucket is next (`readiness`), and everything that can be chosen (`config`).

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

use config::SHARD_FROM;
pub use config::{Compression, DataParallelConfig, ReducerConfig, Reduction, ShardFrom, Unused};
use gradient_bucket::GradientBucket;
use reducer::Participation;
pub use reducer::Reducer;
pub use sink::GradientSink;
pub use state::NamedArena;

use crate::comm::{Buffer, Communicator, DType};
use crate::optimizer::{Optimizer, OptimizerConfig};
use crate::replicate::{checksum, replicate, verify_equal, verify_settings};
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

/// A model's parameters, replicated on every rank and updated together, with the optimizer's state sharded over ranks: a
/// [`Reducer`] with an optimizer.
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
/// A [`DeviceDataParallel`](device::DeviceDataParallel) has the same configuration and the same methods with the same meanings.
/// What differs is where memory is: here, values are slices, and a call returns when its work is done.
pub struct DataParallel {
    reducer: Reducer,
    /// Empty once they were lost to an error.
    parameters: Buffer,
    /// What the model changes beside its parameters.
    buffers: Vec<f32>,
    optimizer: Optimizer,
    /// Threads that updates run on.
    threads: usize,
    /// Steps between two comparisons of the ranks' weights.
    verify_every: Option<u64>,
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
    /// As [`new`](Self::new); if what is chosen is not compatible.
    pub fn with_config(
        mut comm: Communicator,
        layout: Layout,
        mut values: Vec<f32>,
        config: DataParallelConfig,
    ) -> Result<Self> {
        config.check(comm.size())?;
        verify_settings(&mut comm, &config.settings())?;
        replicate(&mut comm, &layout, &mut values)?;
        let shares_memory = comm.capabilities().shares_memory;
        let shard_from = config.shard_from.bytes(Some(SHARD_FROM)).filter(|_| shares_memory);
        let mut reducer = Reducer::assemble(comm, layout, config.reducer, shard_from)?;
        // Of sharded buckets, peers write what they have updated in place.
        let mut parameters = match shard_from {
            None => Buffer::zeroed::<f32>(values.len()),
            Some(_) => reducer.comm.allocate(DType::F32, values.len())?,
        };
        parameters.as_mut_slice().copy_from_slice(&values);
        let buckets = &reducer.buckets;
        let mut optimizer =
            Optimizer::new(config.optimizer, &reducer.layout, buckets.states, config.threads)?;
        if let Some(average) = optimizer.average_mut() {
            buckets.copy_own(&values, average);
        }
        Ok(DataParallel {
            reducer,
            parameters,
            buffers: Vec::new(),
            optimizer,
            block: BLOCK * config.threads,
            update_time: Duration::ZERO,
            threads: config.threads,
            verify_every: config.verify_every,
        })
    }

    /// With what the model changes beside its parameters, such as running statistics: equal on all ranks now, and each rank's
    /// own from then on, but where the number of ranks is to make no difference. Collective.
    ///
    /// # Errors
    /// [`Error::SettingMismatch`] if ranks have others; as the communicator's.
    pub fn with_buffers(mut self, buffers: Vec<f32>) -> Result<Self> {
        verify_settings(&mut self.reducer.comm, &[describe_buffers(&buffers)])?;
        Ok(DataParallel { buffers, ..self })
    }

    /// Makes one step. `compute` runs forward and backward with the current parameters and hands over every
    /// gradient, as the mean over this rank's batch; the step averages them over ranks and updates the
    /// parameters. Returns what `compute` returns.
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

    /// Makes one step of all [micro-batches](ReducerConfig::micro_batches), which communicates as much as with one.
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
    /// `compute` runs forward and backward of each, and hands over every gradient as the mean over the micro-batch; the
    /// step reduces them over micro-batches and ranks, and updates the parameters.
    ///
    /// # Errors
    /// As `compute` and the communicator. Names a tensor whose gradient was not handed over, or
    /// twice; rank and tensor, if weights differ between ranks ([`Error::Diverged`]). Parameters and optimizer are as before,
    /// and another step may be made, but [`buffers`](Self::buffers) are as `compute` has left them, if gradients are not finite
    /// ([`Error::NotFinite`], which names rank and tensor), or only their sum over ranks is not ([`Error::ReducedNotFinite`]),
    /// or ranks have different numbers of micro-batches or different learning rates in the step ([`Error::Disagreement`],
    /// [`Error::SettingMismatch`]).
    pub fn step_accumulated(&mut self, compute: impl FnMut(MicroBatch<'_>) -> Result<()>) -> Result<()> {
        self.make_step(true, compute).map(|_| ())
    }

    /// Takes part in the steps of ranks that still have data, with weight 0, until no rank has; so this rank's parameters stay
    /// equal to theirs. Each rank calls it once it has run out of data, also the last one. Returns the steps that were made
    /// meanwhile. The learning rate is that of the others. Collective.
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

    /// Makes a step, of which this rank may have no data; none if no rank has, and returns false.
    fn make_step(
        &mut self,
        has_data: bool,
        mut compute: impl FnMut(MicroBatch<'_>) -> Result<()>,
    ) -> Result<bool> {
        self.whole_parameters("step")?;
        let begin = self.reducer.comm.observer().begin();
        let Some(participation) = self.agree_on_participation(has_data)? else { return Ok(false) };
        self.apply_gradient_order()?;
        let Self { reducer, parameters, buffers, .. } = self;
        let parameters = parameters.as_slice();
        reducer.run(participation, buffers, |index, buffers, gradients| {
            compute(MicroBatch { index, parameters, buffers, gradients })
        })?;
        let updating = self.reducer.comm.observer().begin();
        self.update()?;
        self.reducer.comm.observer().end(updating, "optimizer", None);
        if self.verify_every.is_some_and(|every| self.steps().is_multiple_of(every)) {
            self.verify()?;
        }
        self.reducer.comm.observer().end(begin, "step", Some(self.steps() as u32));
        Ok(true)
    }

    /// Agrees with the other ranks on who has data; a rank that has none goes along with their learning rate.
    fn agree_on_participation(&mut self, has_data: bool) -> Result<Option<Participation>> {
        let learning_rate = self.optimizer.base_learning_rate();
        let participation =
            self.reducer.agree_on_participation(self.optimizer.steps(), has_data, learning_rate)?;
        if let Some(Participation { has_data: false, learning_rate, .. }) = participation {
            self.optimizer.set_learning_rate(learning_rate);
        }
        Ok(participation)
    }

    /// Updates the parameters: of a replicated bucket all, of a sharded one this rank's shard for all ranks.
    fn update(&mut self) -> Result<()> {
        self.optimizer.begin_step();
        let Self {
            reducer: Reducer { comm, buckets, .. }, parameters, optimizer, block, update_time, ..
        } = self;
        let mut update = |bucket: &GradientBucket, begin: usize, parameters: &mut [f32]| {
            let start = Instant::now();
            let from = begin - bucket.elements.start;
            let gradients = &bucket.values()[from..from + parameters.len()];
            optimizer.update(begin, bucket.state + (begin - bucket.own.start), parameters, gradients);
            *update_time += start.elapsed();
        };
        for bucket in buckets.all.iter().filter(|bucket| !bucket.sharded) {
            update(bucket, bucket.elements.start, &mut parameters.as_mut_slice()[bucket.elements.clone()]);
        }
        if !buckets.segments.is_empty() {
            let mut update_block = |segment: usize, begin: usize, parameters: &mut Buffer| {
                update(&buckets.all[buckets.of_segment[segment]], begin, parameters.as_mut_slice());
            };
            let all = std::mem::replace(parameters, Buffer::zeroed::<f32>(0));
            *parameters =
                comm.update_all_gather(all, &buckets.segments, *block, &mut update_block)?.wait()?;
        }
        Ok(())
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
        if parameters.len() == self.layout().len() {
            return Ok(parameters);
        }
        let problem = "the parameters were lost to an earlier error".to_owned();
        Err(Error::InvalidArgument { operation, problem })
    }

    /// What the model changes beside its parameters.
    pub fn buffers(&self) -> &[f32] {
        &self.buffers
    }

    /// As [`buffers`](Self::buffers), to be changed: on all ranks alike.
    pub fn buffers_mut(&mut self) -> &mut [f32] {
        &mut self.buffers
    }

    /// Names, shapes and offsets of the parameters.
    pub fn layout(&self) -> &Layout {
        self.reducer.layout()
    }

    /// The gradient of `tensor` as of the last step, reduced over ranks and clipped. Collective where the optimizer is sharded:
    /// a rank has only its shards' averages until somebody asks.
    ///
    /// # Errors
    /// As [`Reducer::gradient`].
    pub fn gradient(&mut self, tensor: usize) -> Result<&[f32]> {
        self.reducer.gradient(tensor)
    }

    /// A copy of the last step's gradients, as the optimizer has seen them: reduced and clipped; 0 for frozen tensors.
    /// Collective where the optimizer is sharded.
    ///
    /// # Errors
    /// As [`Reducer::gradients`].
    pub fn gradients(&mut self) -> Result<Vec<f32>> {
        self.reducer.gradients()
    }

    /// The Euclidean norm of the last step's reduced gradients, before they were clipped; `None` where they are not, or there was
    /// none yet.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.reducer.gradient_norm()
    }

    /// The learning rate of the next step: that which was set last, times the
    /// [schedule's](OptimizerConfig::schedule) factor.
    pub fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }

    /// Sets the learning rate of the following steps, which the schedule multiplies. The same on every rank.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.optimizer.set_learning_rate(lr);
    }

    /// Micro-batches of this rank in each step.
    pub fn micro_batches(&self) -> usize {
        self.reducer.micro_batches()
    }

    /// Sets the micro-batches of the following steps. The same on every rank.
    ///
    /// # Errors
    /// If there are none.
    pub fn set_micro_batches(&mut self, count: usize) -> Result<()> {
        self.reducer.set_micro_batches(count)
    }

    /// Steps made.
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

    /// Elements of the optimizer's state on this rank, the moving average among them.
    pub fn optimizer_len(&self) -> usize {
        self.optimizer.state_len()
    }

    /// The communicator, for collectives of the program's own between steps.
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

/// Buffers as a setting that ranks compare.
fn describe_buffers(buffers: &[f32]) -> (&'static str, String) {
    ("buffers", format!("{} elements with checksum {:016x}", buffers.len(), checksum(buffers)))
}
