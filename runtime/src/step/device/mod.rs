//! The training step on a GPU, where nothing waits for anything on the host.
//!
//! The way of a gradient is that of [`DataParallel`](super::DataParallel): into its bucket, over the ranks, through the
//! optimizer. Here every leg of it is work on one of two streams. The *compute* stream has the model's kernels and the
//! optimizer's; the *exchange* stream has the collectives. When the last gradient of a bucket has been asked for, the
//! exchange stream is told to wait for the compute stream to come to that place (`DeviceBucket::written`), and to reduce;
//! before the update the compute stream waits for the exchange stream in turn (`DeviceBucket::exchanged`). So buckets
//! travel under the rest of the backward pass, and the whole step can be captured into one graph: the streams part and
//! join within it. Of a sharded bucket every rank gets and updates its own shard (`bucket`), and gathers the others'.
//!
//! What differs from step to step (its index, the learning rate, Adam's corrections, what clipping multiplies gradients with)
//! lies in the GPU's memory and is advanced there, so that a captured step can be replayed as it is. A world of one exchanges
//! nothing and updates all parameters in one launch.

mod config;
mod device_bucket;
mod exchange;
mod graph;
mod guard;
mod state;
mod step;
mod sums;

use std::sync::Arc;

use config::BUCKET;
pub use config::DeviceConfig;
use device_bucket::{DeviceBucket, DeviceBuckets, padded};
pub use graph::{Readback, StepGraph};
use guard::Guard;
pub use guard::StatusReadback;
use mgpu_kernels::arena::cuda as arena;
use mgpu_kernels::cuda::{Memory, StepState, Stream, View};
use mgpu_kernels::optimizer::chunk::Chunk;
use mgpu_kernels::optimizer::cuda::Plan;
use state::copy_own;
use sums::{Buffers, DeviceAccumulator};

use super::accumulate::Counter;
use super::config::{Compression, check_micro_batches, check_sums};
use super::describe_buffers;
use super::readiness::Readiness;
use crate::bucket;
use crate::comm::{Communicator, DType, DeviceCommunicator, ReduceOp};
use crate::replicate::{replicate, verify_same, verify_settings};
use crate::{Error, Layout, Result, TensorSpec};

/// Elements that every tensor's offset is a multiple of: 256 bytes of f32, 128 of bf16.
pub const ALIGNMENT: usize = 64;

/// Elements that the kernels count in all tensors together.
const MAX_ELEMENTS: usize = (1 << 31) - ALIGNMENT;

/// What is waited for mostly, in the words of errors.
const STEP: &str = "training step";

/// Bytes of an entry of the table of chunks.
const CHUNK: usize = size_of::<Chunk>();

/// Checks that kernels can work on the tensors of `layout`.
fn check_layout(layout: &Layout) -> Result<()> {
    let problem = |tensor: &TensorSpec| {
        let TensorSpec { name, shape, offset, .. } = tensor;
        if !offset.is_multiple_of(ALIGNMENT) {
            Some(format!("tensor `{name}` begins at element {offset}, which is no multiple of {ALIGNMENT}"))
        } else if tensor.range().end > MAX_ELEMENTS {
            Some(format!("tensor `{name}` of shape {shape:?} ends behind {MAX_ELEMENTS} elements"))
        } else {
            None
        }
    };
    match layout.tensors().iter().find_map(problem) {
        Some(problem) => Err(Error::InvalidArgument { operation: "data parallel", problem }),
        None => Ok(()),
    }
}

/// A model's parameters on this rank's GPU, replicated on every rank and updated together.
///
/// Used in the order of a step: [`begin_step`](Self::begin_step); the model's kernels on [`stream`](Self::stream), which
/// write every [`gradient`](Self::gradient) and announce it by [`ready`](Self::ready); [`finish_step`](Self::finish_step).
/// Between two micro-batches comes [`next_micro_batch`](Self::next_micro_batch). None of these waits for the GPU, but at the end of
/// the first step, where ranks agree on its order; [`check`](Self::check) does and says whether all is well.
///
/// Configuration, methods and their meanings are those of a [`DataParallel`](super::DataParallel). What differs is where memory
/// is: here, gradients and buffers are views of the GPU's, [`parameters`](Self::parameters), [`gradients`](Self::gradients) and
/// [`averaged_parameters`](Self::averaged_parameters) are copies on the host, and what returns one waits for the GPU.
///
/// ```no_run
/// use mgpu::DataParallelConfig;
/// use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
/// use mgpu::device::{ALIGNMENT, DeviceConfig, DeviceDataParallel};
/// # fn main() -> mgpu::Result<()> {
/// let mut world = mgpu::World::from_env()?; // under `mgpurun --backend nccl`
/// let (device, host) = world.communicators()?;
/// let mut layout = mgpu::Layout::new();
/// layout.push_aligned("slope", [1], ALIGNMENT);
/// let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.1, ..Sgd::default() }));
/// let config = DeviceConfig::new(DataParallelConfig::new(sgd, 1));
/// let mut model = DeviceDataParallel::new(device, host, layout, vec![0.0], config)?;
/// for _ in 0..100 {
///     model.begin_step()?;
///     // Kernels of the model on `model.stream()` write `model.gradient(0)`. Here: the parameter itself.
///     model.stream().copy(model.parameter(0), model.gradient(0))?;
///     model.ready(0)?;
///     model.finish_step()?;
/// }
/// println!("{:?}", model.parameters()?);
/// # Ok(())
/// # }
/// ```
pub struct DeviceDataParallel {
    // Both go before the memory below, after `drop` has seen to it that collectives do nothing to it any more.
    host: Communicator,
    comm: Arc<DeviceCommunicator>,
    layout: Layout,
    config: DeviceConfig,
    /// Buckets, in the order in which they are expected to be complete.
    buckets: Vec<DeviceBucket>,
    /// Which gradients are still to come.
    readiness: Readiness,
    /// Ranks that have data for this step.
    active: u32,
    /// A step has begun and is not finished.
    open: bool,
    sums: DeviceAccumulator,
    buffers: Buffers,
    guard: Guard,
    state: Memory,
    chunks: Memory,
    parameters: Memory,
    gradients: Memory,
    /// The gradients rounded to bf16, where they travel so.
    compressed: Option<Memory>,
    /// What a peer has sent of its gradients, where ranks are to make no difference.
    theirs: Option<Memory>,
    first: Option<Memory>,
    second: Option<Memory>,
    average: Option<Memory>,
    /// The parameters, while their average is in their place.
    saved_parameters: Option<Memory>,
    copy: Option<Memory>,
    compute: Stream,
    exchange: Stream,
    steps: u64,
    /// Steps are being captured and not made.
    capturing: bool,
    /// Tells this model from others.
    identity: Arc<()>,
}

impl Drop for DeviceDataParallel {
    /// The communicator may have other holders, so it need not end here: the work does.
    fn drop(&mut self) {
        self.comm.drain(&self.exchange);
        self.comm.drain(&self.compute);
    }
}

impl DeviceDataParallel {
    /// Replaces every rank's `parameters` by those of rank 0, brings them to the GPU and gets ready to train them.
    /// Collective. Every tensor of `layout` begins at a multiple of [`ALIGNMENT`] ([`Layout::push_aligned`]). Gradients
    /// travel by `comm`; `host` serves for what is set up and verified on the host
    /// ([`World::communicators`](crate::World::communicators) has both).
    ///
    /// # Errors
    /// If a tensor is not aligned, or ends behind 2³¹ elements; if the ranks' layouts or settings differ (names the first tensor
    /// or setting), what is chosen is not compatible, memory is short, or as the communicator's.
    pub fn new(
        comm: Arc<DeviceCommunicator>,
        mut host: Communicator,
        layout: Layout,
        mut parameters: Vec<f32>,
        config: DeviceConfig,
    ) -> Result<Self> {
        check_layout(&layout)?;
        config.check(comm.size())?;
        verify_settings(&mut host, &config.settings())?;
        replicate(&mut host, &layout, &mut parameters)?;
        let device = comm.device().clone();
        let (compute, exchange) = (Stream::new(&device)?, Stream::urgent(&device)?);
        let DeviceConfig { parallel, .. } = config;
        let several = comm.size() > 1;
        let (first, rest) = parallel.reducer.buckets(BUCKET);
        let buckets = bucket::plan(&layout, first, rest);
        let counter = Counter::new(parallel.reducer.micro_batches, parallel.reducer.world_size_invariant);
        let readiness = Readiness::new(&layout, &buckets, several, counter);
        let buckets = DeviceBuckets::cut(&device, &layout, &buckets, &parallel, (comm.rank(), comm.size()))?;
        let len = padded(&layout);
        parameters.resize(len, 0.0);
        let arena = |used: bool, dtype, len| used.then(|| Memory::zeroed(&device, dtype, len)).transpose();
        let (rule, invariant) = (parallel.optimizer.rule, parallel.reducer.world_size_invariant);
        let model = DeviceDataParallel {
            sums: DeviceAccumulator::new(&device, len, &counter)?,
            buffers: Buffers::new(&compute, &[], &counter, invariant)?,
            guard: Guard::new(&compute, &buckets, &layout, &parallel, comm.size())?,
            state: StepState::after(0).upload(&compute)?,
            chunks: Memory::from_slice(&compute, bytemuck::cast_slice::<_, u8>(&buckets.chunks))?,
            gradients: Memory::zeroed(&device, DType::F32, len)?,
            compressed: arena(
                several && parallel.reducer.compression == Compression::Bf16,
                DType::Bf16,
                len,
            )?,
            theirs: arena(several && invariant, DType::F32, len)?,
            first: arena(rule.states() > 0, DType::F32, buckets.states)?,
            second: arena(rule.states() > 1, DType::F32, buckets.states)?,
            average: arena(parallel.optimizer.average.is_some(), DType::F32, buckets.states)?,
            saved_parameters: None,
            copy: arena(config.bf16_copy, DType::Bf16, len)?,
            parameters: Memory::from_slice(&compute, &parameters)?,
            buckets: buckets.all,
            readiness,
            active: comm.size(),
            open: false,
            host,
            comm,
            layout,
            config,
            compute,
            exchange,
            steps: 0,
            capturing: false,
            identity: Arc::default(),
        };
        if let Some(average) = &model.average {
            copy_own(&model.compute, (&model.buckets, model.ranks()), &model.parameters, average)?;
        }
        model.refresh_bf16_copy()?;
        Ok(model)
    }

    /// With what the model changes beside its parameters, such as running statistics: equal on all ranks now, and each rank's
    /// own from then on, but where the number of ranks is to make no difference. Collective.
    ///
    /// # Errors
    /// [`Error::SettingMismatch`] if ranks have others; if memory is short, and as the communicator's.
    pub fn with_buffers(mut self, buffers: &[f32]) -> Result<Self> {
        verify_settings(&mut self.host, &[describe_buffers(buffers)])?;
        self.wait(STEP)?;
        self.buffers = Buffers::new(&self.compute, buffers, &self.readiness.counter, self.is_invariant())?;
        Ok(self)
    }

    /// Makes the bf16 copy that of the parameters.
    fn refresh_bf16_copy(&self) -> Result<()> {
        if let Some(copy) = &self.copy {
            arena::narrow(&self.compute, self.parameters.view(), copy.view())?;
        }
        Ok(())
    }

    /// The stream that the model's kernels belong on.
    pub fn stream(&self) -> &Stream {
        &self.compute
    }

    /// Index, learning rate and the like of the step being made, for kernels that depend on them.
    pub fn state(&self) -> View<'_> {
        self.state.view()
    }

    /// The parameters of `tensor`, f32.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn parameter(&self, tensor: usize) -> View<'_> {
        self.parameters.slice(self.layout.range(tensor))
    }

    /// The parameters of `tensor` as `dtype`: themselves for f32, their copy for bf16.
    ///
    /// # Panics
    /// If there is no such tensor, or no copy.
    pub fn parameter_as(&self, tensor: usize, dtype: DType) -> View<'_> {
        match (dtype, &self.copy) {
            (DType::F32, _) => self.parameter(tensor),
            (DType::Bf16, Some(copy)) => copy.slice(self.layout.range(tensor)),
            _ => panic!("there is no copy of the parameters in {dtype}"),
        }
    }

    /// The gradient of `tensor`, f32, to be overwritten in every micro-batch. After a step: reduced over micro-batches and
    /// ranks, of a sharded bucket this rank's shard alone, and as long as it was before clipping.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn gradient(&self, tensor: usize) -> View<'_> {
        self.gradients.slice(self.layout.range(tensor))
    }

    /// What the model changes beside its parameters, f32.
    pub fn buffers(&self) -> View<'_> {
        self.buffers.values.view()
    }

    /// Sums `values` over all ranks, in place, between what is on the stream before and after: for synchronised batch
    /// normalisation. Where ranks are to make no difference, each micro-batch is normalised by itself, and this does nothing.
    ///
    /// # Errors
    /// As the communicator's; if ranks may [`join`](Self::join).
    pub fn sum_over_ranks(&self, values: View<'_>) -> Result<()> {
        check_sums(&self.config.parallel.reducer)?;
        if self.ranks() == 1 || self.is_invariant() {
            return Ok(());
        }
        self.comm.all_reduce(&self.compute, values, ReduceOp::Sum)
    }

    /// Waits until all work on the stream is over, as far as the other ranks are alive and come along. `what` is what it
    /// is, in the words of an error.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait`].
    pub fn wait(&self, what: &str) -> Result<()> {
        self.comm.wait(&self.compute, what)
    }

    /// As [`wait`](Self::wait), where no other rank has a part in the work on the stream, as in an evaluation.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait_local`].
    pub fn wait_local(&self, what: &str) -> Result<()> {
        self.comm.wait_local(&self.compute, what)
    }

    /// Names, shapes and offsets of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Steps made, as far as they have been put on the stream.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Rank of this process.
    pub fn rank(&self) -> u32 {
        self.comm.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.comm.size()
    }

    /// The learning rate of the next step: that which was set last, times the
    /// [schedule's](crate::optimizer::OptimizerConfig::schedule) factor.
    pub fn learning_rate(&self) -> f64 {
        let optimizer = &self.config.parallel.optimizer;
        optimizer.rule.lr() * optimizer.schedule.factor(self.steps)
    }

    /// Sets the learning rate of the following steps, which the schedule multiplies. The same on every rank. Steps that were
    /// captured before are to be captured again.
    pub fn set_learning_rate(&mut self, lr: f64) {
        let optimizer = &mut self.config.parallel.optimizer;
        optimizer.rule = optimizer.rule.with_lr(lr);
    }

    /// Micro-batches of this rank in each step.
    pub fn micro_batches(&self) -> usize {
        self.config.parallel.reducer.micro_batches
    }

    /// Sets the micro-batches of the following steps, once the GPU is done with those so far. The same on every rank. Steps
    /// that were captured before keep theirs, and are not to be replayed any more. Collective.
    ///
    /// # Errors
    /// If there are none, memory is short, or ranks have different numbers of them; as [`wait`](Self::wait).
    pub fn set_micro_batches(&mut self, count: usize) -> Result<()> {
        check_micro_batches(count)?;
        verify_same(&mut self.host, "micro-batches", count as i64)?;
        self.wait(STEP)?;
        let counter = self.readiness.counter.with_count(count);
        self.sums = DeviceAccumulator::new(self.compute.device(), self.parameters.len(), &counter)?;
        self.buffers.set_counter(&counter)?;
        self.config.parallel.reducer.micro_batches = count;
        // A graph holds the addresses of the sums that were.
        self.identity = Arc::default();
        Ok(())
    }

    /// Elements of the optimizer's state on this rank, the moving average among them.
    pub fn optimizer_len(&self) -> usize {
        [&self.first, &self.second, &self.average].into_iter().flatten().map(Memory::len).sum()
    }

    /// The communicator for host buffers, for collectives of the program's own between steps.
    pub fn comm(&mut self) -> &mut Communicator {
        &mut self.host
    }
}
