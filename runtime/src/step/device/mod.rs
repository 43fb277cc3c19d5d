//! The training step on a GPU, without waits on the host.
//!
//! A gradient passes through the same stages as in [`DataParallel`](super::DataParallel): bucket, reduction over
//! ranks, optimizer. Here each stage is work on one of two streams. The *compute* stream has the kernels of the model
//! and of the optimizer; the *exchange* stream has the collectives. When the last gradient of a bucket is marked
//! ready, the exchange stream waits for the compute stream to reach that point (`DeviceBucket::written`) and reduces.
//! Before the update, the compute stream waits for the exchange stream (`DeviceBucket::exchanged`). So reductions
//! overlap the rest of the backward pass, and the whole step can be captured into one graph, in which the streams
//! fork and join. Every rank gets and updates its own shard of a sharded bucket (`device_bucket`), and gathers the
//! others.
//!
//! Everything that changes from step to step (index, learning rate, Adam's corrections, the clipping factor) is in
//! GPU memory and is advanced there, so that a captured step can be replayed unchanged. A world of one exchanges
//! nothing and updates all parameters in one launch.

mod config;
mod device_bucket;
mod exchange;
mod graph;
mod guard;
mod host;
mod state;
mod step;
mod sums;
mod trace;

use std::cell::RefCell;
use std::sync::Arc;

use config::BUCKET;
pub use config::DeviceConfig;
use device_bucket::{DeviceBucket, DeviceBuckets, padded};
pub use graph::{Readback, StepGraph, Upload};
use guard::Guard;
pub use guard::StatusReadback;
use host::{HostModel, HostSide};
use mgpu_kernels::arena::cuda as arena;
use mgpu_kernels::cuda::{Memory, StepState, Stream, View};
use mgpu_kernels::optimizer::chunk::Chunk;
use mgpu_kernels::optimizer::cuda::UpdatePlan;
use state::copy_own;
use sums::{Buffers, DeviceAccumulator};
pub use trace::{DeviceClock, DeviceSpan, StepTrace, TracePoint};

use super::accumulate::Counter;
use super::config::{Compression, DataParallelConfig, Placement, check_micro_batches, check_sums};
use super::describe_buffers;
use super::readiness::Readiness;
use crate::bucket;
use crate::comm::nccl::RegisteredMemory;
use crate::comm::{BufferAccess, Communicator, DType, DeviceCommunicator, ReduceOp};
use crate::optimizer::LossScale;
use crate::replicate::{replicate, verify_same, verify_settings};
use crate::{Error, Layout, Result, TensorSpec};

/// Required alignment of every tensor's offset in elements: 256 bytes of f32, 128 of bf16 and f16.
pub const ALIGNMENT: usize = 64;

/// Largest number of elements in all tensors together that kernels can index.
const MAX_ELEMENTS: usize = (1 << 31) - ALIGNMENT;

/// What most waits are for, in error texts.
const STEP: &str = "training step";

/// Size of an entry of the table of chunks in bytes.
const CHUNK: usize = size_of::<Chunk>();

/// Checks that kernels can use the tensors of `layout`.
fn check_layout(layout: &Layout) -> Result<()> {
    let problem = |tensor: &TensorSpec| {
        let TensorSpec { name, shape, offset, .. } = tensor;
        if !offset.is_multiple_of(ALIGNMENT) {
            Some(format!(
                "tensor `{name}` begins at element {offset}, which is not a multiple of {ALIGNMENT}"
            ))
        } else if tensor.range().end > MAX_ELEMENTS {
            Some(format!("tensor `{name}` of shape {shape:?} ends after more than {MAX_ELEMENTS} elements"))
        } else {
            None
        }
    };
    match layout.tensors().iter().find_map(problem) {
        Some(problem) => Err(Error::InvalidArgument { operation: "data parallel", problem }),
        None => Ok(()),
    }
}

/// The state before the first step.
fn first_state(config: &DataParallelConfig) -> StepState {
    let state = StepState::after(0);
    config.loss_scaler.map_or(state, |scaler| state.with_loss_scale(scaler.initial()))
}

/// Data-parallel training on GPUs: every rank computes with all parameters on its GPU. The
/// [placement](crate::DataParallelConfig::placement) says where they are updated: on every GPU, on that of rank 0, or
/// on the host.
///
/// A step consists of [`begin_step`](Self::begin_step); the model's kernels on [`stream`](Self::stream), which write
/// every [`gradient`](Self::gradient), each followed by [`ready`](Self::ready); and
/// [`finish_step`](Self::finish_step). Micro-batches are separated by [`next_micro_batch`](Self::next_micro_batch).
/// None of these waits for the GPU, except at the end of the first step, where ranks agree on the order of gradients,
/// and with [`Placement::Host`] at the end of every step.
/// [`check`](Self::check) waits and returns errors of the steps.
///
/// Configuration and methods have the same meaning as those of a [`DataParallel`](super::DataParallel). The
/// difference is the memory: here, gradients and buffers are views of GPU memory; [`parameters`](Self::parameters),
/// [`gradients`](Self::gradients) and [`averaged_parameters`](Self::averaged_parameters) return copies on the host,
/// and wait for the GPU.
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
    // Dropped before the memory below, after `drop` has drained the collectives that use it.
    host: HostSide,
    comm: Arc<DeviceCommunicator>,
    layout: Layout,
    config: DeviceConfig,
    /// In the expected order of completion.
    buckets: Vec<DeviceBucket>,
    /// Which gradients are still to come.
    readiness: Readiness,
    /// Number of ranks with data for this step.
    active: u32,
    /// A step has begun and has not finished.
    open: bool,
    sums: DeviceAccumulator,
    buffers: Buffers,
    guard: Guard,
    state: Memory,
    chunks: Memory,
    parameters: RegisteredMemory,
    gradients: RegisteredMemory,
    /// The gradients rounded to bf16, if the communication dtype is bf16.
    compressed: Option<RegisteredMemory>,
    /// Receive buffer for a peer's gradients, in a world-size-invariant reduction.
    theirs: Option<RegisteredMemory>,
    first: Option<Memory>,
    second: Option<Memory>,
    average: Option<Memory>,
    /// The parameters, while they are replaced by their moving average.
    saved_parameters: Option<Memory>,
    copy: Option<Memory>,
    compute: Stream,
    exchange: Stream,
    steps: u64,
    /// Steps are being captured, not executed.
    capturing: bool,
    /// The loss scale after the steps whose status was read, if the gradients are scaled on the GPU.
    loss_scale: Option<LossScale>,
    /// Identifies this model, for its captured graphs.
    identity: Arc<()>,
    /// The trace that is being recorded.
    trace: RefCell<Option<StepTrace>>,
}

impl Drop for DeviceDataParallel {
    /// Other owners may keep the communicator, so only its work is drained.
    fn drop(&mut self) {
        self.comm.drain(&self.exchange);
        self.comm.drain(&self.compute);
        let has_ended = |stream: &Stream| matches!(stream.is_done(), Ok(true));
        if !(has_ended(&self.exchange) && has_ended(&self.compute)) {
            self.registered_mut().for_each(RegisteredMemory::keep);
        }
    }
}

impl DeviceDataParallel {
    /// Replaces every rank's `parameters` by those of rank 0, copies them to the GPU and prepares training. Every
    /// tensor of `layout` must begin at a multiple of [`ALIGNMENT`] ([`Layout::push_aligned`]). Gradients are reduced
    /// by `comm`; `host` is used to set up and verify ([`World::communicators`](crate::World::communicators) creates
    /// both). With [`Placement::Host`] gradients are reduced by `host`, which is a
    /// [`World::host_memory_communicator`](crate::World::host_memory_communicator). Collective.
    ///
    /// # Errors
    /// If a tensor is not aligned, or ends after 2³¹ elements; if the ranks' layouts or settings differ (the error
    /// names the first tensor or setting), settings are incompatible, memory is short, or as the communicator; with
    /// [`Placement::Host`], if `host` does not go through shared memory.
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
        let device = comm.device().clone();
        let (compute, exchange) = (Stream::new(&device)?, Stream::with_high_priority(&device)?);
        let DeviceConfig { parallel, .. } = config;
        let exchanges = comm.uses_nccl() && parallel.placement != Placement::Host;
        let (first, rest) = parallel.reducer.buckets(BUCKET);
        let buckets = bucket::plan(&layout, first, rest);
        let counter = Counter::new(parallel.reducer.micro_batches, parallel.reducer.world_size_invariant);
        let readiness = Readiness::new(&layout, &buckets, exchanges, counter);
        let buckets =
            DeviceBuckets::split(&device, &layout, &buckets, &parallel, (comm.rank(), comm.size()))?;
        let host = if parallel.placement == Placement::Host {
            let host = HostModel::new(host, (&layout, parameters), parallel, (&device, &buckets.all))?;
            parameters = host.parameters().to_vec();
            HostSide::Model(Box::new(host))
        } else {
            replicate(&mut host, &layout, &mut parameters)?;
            HostSide::Communicator(host)
        };
        let len = padded(&layout);
        parameters.resize(len, 0.0);
        // Memory that NCCL uses in every step. Dropped after the model has drained its streams, or kept.
        let registered = |is_used: bool, dtype| -> Result<RegisteredMemory> {
            if exchanges && is_used {
                // SAFETY: see `Drop`. Graphs are only launched by the model.
                return unsafe { comm.allocate(dtype, len) };
            }
            Ok(RegisteredMemory::plain(Memory::zeroed(&device, dtype, len)?))
        };
        let is_compressed = exchanges && parallel.reducer.compression == Compression::Bf16;
        let is_divided =
            parallel.placement == Placement::Shared || buckets.all.iter().any(DeviceBucket::is_sharded);
        let arena = |used: bool, dtype, len| used.then(|| Memory::zeroed(&device, dtype, len)).transpose();
        let (rule, invariant) = (parallel.optimizer.rule, parallel.reducer.world_size_invariant);
        let model = DeviceDataParallel {
            sums: DeviceAccumulator::new(&device, len, &counter)?,
            buffers: Buffers::new(&compute, &[], &counter, invariant)?,
            guard: Guard::new(&compute, &buckets, &layout, &parallel, comm.size())?,
            state: first_state(&parallel).upload(&compute)?,
            chunks: Memory::from_slice(&compute, bytemuck::cast_slice::<_, u8>(&buckets.chunks))?,
            gradients: registered(!is_compressed, DType::F32)?,
            compressed: is_compressed.then(|| registered(true, DType::Bf16)).transpose()?,
            theirs: (comm.size() > 1 && invariant).then(|| registered(true, DType::F32)).transpose()?,
            first: arena(rule.states() > 0, DType::F32, buckets.states)?,
            second: arena(rule.states() > 1, DType::F32, buckets.states)?,
            average: arena(parallel.optimizer.average.is_some(), DType::F32, buckets.states)?,
            saved_parameters: None,
            copy: config.copy().map(|dtype| Memory::zeroed(&device, dtype, len)).transpose()?,
            parameters: registered(is_divided, DType::F32)?,
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
            loss_scale: config.plan().loss_scaler.map(|scaler| scaler.initial()),
            identity: Arc::default(),
            trace: RefCell::default(),
        };
        model.compute.upload(&parameters, model.parameters.view())?;
        if let Some(average) = &model.average {
            copy_own(&model.compute, &model.buckets, &model.parameters, average)?;
        }
        model.refresh_copy()?;
        Ok(model)
    }

    /// Adds buffers: values that the model changes besides its parameters, such as running statistics. They must be
    /// equal on all ranks now; later each rank has its own, except in a world-size-invariant reduction. Collective.
    ///
    /// # Errors
    /// [`Error::SettingMismatch`] if ranks have different ones; if memory is short; as the communicator.
    pub fn with_buffers(mut self, buffers: &[f32]) -> Result<Self> {
        verify_settings(self.host.comm(), &[describe_buffers(buffers)])?;
        self.wait(STEP)?;
        self.buffers = Buffers::new(&self.compute, buffers, &self.readiness.counter, self.is_invariant())?;
        Ok(self)
    }

    /// Updates the copy of the parameters in a narrower type.
    fn refresh_copy(&self) -> Result<()> {
        if let Some(copy) = &self.copy {
            arena::narrow(&self.compute, self.parameters.view(), copy.view())?;
        }
        Ok(())
    }

    fn registered_mut(&mut self) -> impl Iterator<Item = &mut RegisteredMemory> {
        let DeviceDataParallel { parameters, gradients, compressed, theirs, .. } = self;
        [parameters, gradients].into_iter().chain(compressed).chain(theirs)
    }

    /// How NCCL accesses the gradients that it reduces: in place if it can.
    pub fn gradient_access(&self) -> &BufferAccess {
        self.compressed.as_ref().unwrap_or(&self.gradients).access()
    }

    /// The stream for the model's kernels.
    pub fn stream(&self) -> &Stream {
        &self.compute
    }

    /// The state of the current step (index, learning rate and so on), for kernels that depend on it.
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

    /// The parameters of `tensor` as `dtype`: the parameters themselves for f32, their copy for bf16 or f16.
    ///
    /// # Panics
    /// If there is no such tensor, or no copy.
    pub fn parameter_as(&self, tensor: usize, dtype: DType) -> View<'_> {
        match (dtype, &self.copy) {
            (DType::F32, _) => self.parameter(tensor),
            (_, Some(copy)) if copy.view().dtype() == dtype => copy.slice(self.layout.range(tensor)),
            _ => panic!("there is no copy of the parameters in {dtype}"),
        }
    }

    /// The gradient of `tensor`, f32, to be overwritten in every micro-batch. After a step it is reduced over
    /// micro-batches and ranks, but not clipped; of a sharded bucket it only contains this rank's shard. With
    /// [`Placement::Shared`] only rank 0 has the reduced gradients, and with [`Placement::Host`] only the host.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn gradient(&self, tensor: usize) -> View<'_> {
        self.gradients.slice(self.layout.range(tensor))
    }

    /// The model's buffers, f32.
    pub fn buffers(&self) -> View<'_> {
        self.buffers.values.view()
    }

    /// Sums `values` over all ranks, in place and in stream order, for synchronised batch normalisation. Does nothing
    /// in a world-size-invariant reduction, where each micro-batch is normalised separately.
    ///
    /// # Errors
    /// As the communicator; if ranks may [`join`](Self::join).
    pub fn sum_over_ranks(&self, values: View<'_>) -> Result<()> {
        check_sums(&self.config.parallel.reducer)?;
        if self.ranks() == 1 || self.is_invariant() {
            return Ok(());
        }
        self.all_reduce_in_order(values, ReduceOp::Sum)
    }

    /// Waits until all work on the stream is done. `what` describes the work for errors.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait`].
    pub fn wait(&self, what: &str) -> Result<()> {
        self.comm.wait(&self.compute, what)
    }

    /// As [`wait`](Self::wait), for work that does not depend on other ranks, such as an evaluation.
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

    /// Number of steps that were enqueued.
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

    /// The learning rate of the next step: the one that was set last, times the
    /// [schedule's](crate::optimizer::OptimizerConfig::schedule) factor.
    pub fn learning_rate(&self) -> f64 {
        let optimizer = &self.config.parallel.optimizer;
        optimizer.rule.lr() * optimizer.schedule.factor(self.steps)
    }

    /// Sets the learning rate of the following steps, which the schedule multiplies. Must be the same on every rank.
    /// Steps must be captured again afterwards.
    pub fn set_learning_rate(&mut self, lr: f64) {
        let optimizer = &mut self.config.parallel.optimizer;
        optimizer.rule = optimizer.rule.with_lr(lr);
        if let Some(host) = self.host.model_mut() {
            host.set_learning_rate(lr);
        }
    }

    /// Number of micro-batches of this rank in each step.
    pub fn micro_batches(&self) -> usize {
        self.config.parallel.reducer.micro_batches
    }

    /// Waits for the GPU, then sets the number of micro-batches of the following steps. Must be the same on every
    /// rank. Steps that were captured before must not be replayed any more. Collective.
    ///
    /// # Errors
    /// If `count` is 0, memory is short, or ranks have different counts; as [`wait`](Self::wait).
    pub fn set_micro_batches(&mut self, count: usize) -> Result<()> {
        check_micro_batches(count)?;
        verify_same(self.host.comm(), "micro-batches", count as i64)?;
        self.wait(STEP)?;
        let counter = self.readiness.counter.with_count(count);
        self.sums = DeviceAccumulator::new(self.compute.device(), self.parameters.len(), &counter)?;
        self.buffers.set_counter(&counter)?;
        self.config.parallel.reducer.micro_batches = count;
        // Graphs contain addresses of the old accumulators.
        self.identity = Arc::default();
        Ok(())
    }

    /// Number of elements of the optimizer's state on this rank, including the moving average.
    pub fn optimizer_len(&self) -> usize {
        if let Some(host) = self.host.model() {
            return host.optimizer_len();
        }
        [&self.first, &self.second, &self.average].into_iter().flatten().map(Memory::len).sum()
    }

    /// The communicator for host buffers, for the program's own collectives between steps.
    pub fn comm(&mut self) -> &mut Communicator {
        self.host.comm()
    }
}
