//! The training step on a GPU, where nothing waits for anything on the host.
//!
//! The optimizer is replicated here: every rank has all of its state.
//!
//! The way of a gradient is that of [`DataParallel`](super::DataParallel): into its bucket, over the ranks, through the
//! optimizer. Here every leg of it is work on one of two streams. The *compute* stream has the model's kernels and the
//! optimizer's; the *exchange* stream has the all-reduces. When the last gradient of a bucket has been asked for, the
//! exchange stream is told to wait for the compute stream to come to that place (`Slot::written`), and to all-reduce;
//! before the bucket's update the compute stream waits for the exchange stream in turn (`Slot::reduced`). So buckets
//! travel under the rest of the backward pass, and the whole step can be captured into one graph: the streams part and
//! join within it.
//!
//! What differs from step to step (its index, the learning rate, Adam's corrections) lies in the GPU's memory and is
//! advanced there, so that a captured step can be replayed as it is. A world of one exchanges nothing and updates all
//! parameters in one launch.

use std::mem;
use std::sync::Arc;

use mgpu_kernels::cuda::{Device, Event, Graph, Memory, Pinned, StepState, Stream, View};
use mgpu_kernels::optimizer::chunk::{Chunk, chunks};
pub use mgpu_kernels::optimizer::cuda::Plan;
use mgpu_kernels::optimizer::cuda::{Arenas, begin, update};

use super::config::FIRST_BUCKET;
use crate::bucket::{self, Bucket};
use crate::comm::{Communicator, DType, DeviceCommunicator, ReduceOp};
use crate::optimizer::{AVERAGE, OptimizerConfig};
use crate::replicate::{replicate, verify_equal};
use crate::{Layout, Result};

/// Elements that every tensor's offset is a multiple of: 256 bytes of f32, 128 of bf16.
pub const ALIGNMENT: usize = 64;

/// Bytes of the other buckets, unless the caller chooses: large enough for the links between GPUs, small enough that
/// several are under way in a backward pass.
pub const BUCKET: usize = 16 << 20;

/// What is waited for mostly, in the words of errors.
const STEP: &str = "training step";

/// How a [`DeviceDataParallel`] trains.
#[derive(Debug, Clone, Copy)]
pub struct DeviceConfig {
    /// The update of parameters.
    pub optimizer: OptimizerConfig,
    /// Epochs, and how the learning rate changes.
    pub plan: Plan,
    /// Keep a copy of the parameters in bf16, for kernels that read it.
    pub bf16_copy: bool,
    /// Bytes of gradients in one all-reduce; the first bucket is at most 256 KiB.
    pub bucket: usize,
}

/// A bucket, and where its gradients are on their way.
#[derive(Debug)]
struct Slot {
    bucket: Bucket,
    /// Bytes of the chunk table that are the bucket's.
    chunks: std::ops::Range<usize>,
    /// Tensors not yet ready in this step.
    open: Vec<bool>,
    /// The compute stream has written all gradients of the bucket.
    written: Event,
    /// The exchange stream has averaged them.
    reduced: Event,
}

/// A model's parameters on this rank's GPU, replicated on every rank and updated together.
///
/// Used in the order of a step: [`begin_step`](Self::begin_step); the model's kernels on [`stream`](Self::stream), which
/// write every [`gradient`](Self::gradient) and announce it by [`ready`](Self::ready); [`finish_step`](Self::finish_step).
/// None of these waits for the GPU.
///
/// ```no_run
/// use mgpu::optimizer::{OptimizerConfig, Rule, Schedule, Sgd};
/// use mgpu::step::device::{ALIGNMENT, BUCKET, DeviceConfig, DeviceDataParallel, Plan};
/// # fn main() -> mgpu::Result<()> {
/// let mut world = mgpu::World::from_env()?; // under `mgpurun --backend nccl`
/// let (device, host) = world.communicators()?;
/// let mut layout = mgpu::Layout::new();
/// layout.push_aligned("slope", [1], ALIGNMENT);
/// let config = DeviceConfig {
///     optimizer: OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.1, ..Sgd::default() })),
///     plan: Plan { steps_per_epoch: 100, schedule: Schedule::CONSTANT },
///     bf16_copy: false,
///     bucket: BUCKET,
/// };
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
    host: Box<dyn Communicator>,
    comm: Arc<DeviceCommunicator>,
    layout: Layout,
    config: DeviceConfig,
    slots: Vec<Slot>,
    /// The slot of each tensor.
    slot_of: Vec<usize>,
    state: Memory,
    chunks: Memory,
    parameters: Memory,
    gradients: Memory,
    first: Option<Memory>,
    second: Option<Memory>,
    average: Option<Memory>,
    copy: Option<Memory>,
    compute: Stream,
    exchange: Stream,
    steps: u64,
    /// Tells this model from others.
    identity: Arc<()>,
}

/// Captured steps. Dropped before the model's communicator, which waits for that.
#[derive(Debug)]
pub struct StepGraph {
    graph: Graph,
    steps: u64,
    /// Its collectives are part of the graph, which is held for that alone.
    _comm: Arc<DeviceCommunicator>,
    /// Who it was captured from.
    model: Arc<()>,
}

impl StepGraph {
    /// Steps that one replay makes.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

/// A copy on the way to the host.
#[derive(Debug)]
pub struct Reading {
    bytes: Pinned,
    done: Event,
}

impl Reading {
    /// Room for `len` bytes.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Self> {
        Ok(Reading { bytes: Pinned::zeroed(device, len)?, done: Event::new(device)? })
    }
}

impl Drop for DeviceDataParallel {
    /// The communicator may have other holders, so it need not end here: the work does.
    fn drop(&mut self) {
        self.comm.come_to_rest(&self.exchange);
        self.comm.come_to_rest(&self.compute);
    }
}

impl DeviceDataParallel {
    /// Replaces every rank's `parameters` by those of rank 0, brings them to the GPU and gets ready to train them.
    /// Collective. Every tensor of `layout` begins at a multiple of [`ALIGNMENT`] ([`Layout::push_aligned`]). Gradients
    /// travel by `comm`; `host` serves for what is set up and verified on the host
    /// ([`World::communicators`](crate::World::communicators) has both).
    ///
    /// # Errors
    /// If the ranks' layouts differ (names the first tensor), memory is short, or as the communicator's.
    ///
    /// # Panics
    /// If a tensor is not aligned.
    pub fn new(
        comm: Arc<DeviceCommunicator>,
        mut host: Box<dyn Communicator>,
        layout: Layout,
        mut parameters: Vec<f32>,
        config: DeviceConfig,
    ) -> Result<Self> {
        for tensor in layout.tensors() {
            assert!(tensor.offset.is_multiple_of(ALIGNMENT), "tensor `{}` is not aligned", tensor.name);
        }
        replicate(&mut *host, &layout, &mut parameters)?;
        let device = comm.device().clone();
        let (compute, exchange) = (Stream::new(&device)?, Stream::urgent(&device)?);
        let OptimizerConfig { rule, average, .. } = config.optimizer;
        let len = layout.len();
        let arena = |used: bool, dtype| used.then(|| Memory::zeroed(&device, dtype, len)).transpose();

        let mut table: Vec<Chunk> = Vec::new();
        let mut slots = Vec::new();
        let mut slot_of = vec![0; layout.tensors().len()];
        for bucket in bucket::plan(&layout, FIRST_BUCKET.min(config.bucket), config.bucket) {
            let tensors = layout.tensors()[bucket.tensors.clone()].iter();
            let tensors = tensors.map(|tensor| (tensor.range(), config.optimizer.decays(tensor)));
            let from = mem::size_of_val(&table[..]);
            table.extend(chunks(tensors, rule.weight_decay()));
            slot_of[bucket.tensors.clone()].fill(slots.len());
            slots.push(Slot {
                chunks: from..mem::size_of_val(&table[..]),
                open: vec![true; bucket.tensors.len()],
                written: Event::new(&device)?,
                reduced: Event::new(&device)?,
                bucket,
            });
        }
        let copied = bytemuck::cast_slice::<Chunk, u8>(&table);
        let model = DeviceDataParallel {
            state: StepState::after(0).upload(&compute)?,
            chunks: Memory::from_slice(&compute, copied)?,
            gradients: Memory::zeroed(&device, DType::F32, len)?,
            first: arena(rule.states() > 0, DType::F32)?,
            second: arena(rule.states() > 1, DType::F32)?,
            average: average.map(|_| Memory::from_slice(&compute, &parameters)).transpose()?,
            copy: arena(config.bf16_copy, DType::Bf16)?,
            parameters: Memory::from_slice(&compute, &parameters)?,
            host,
            comm,
            layout,
            config,
            slots,
            slot_of,
            compute,
            exchange,
            steps: 0,
            identity: Arc::default(),
        };
        model.renew_copy()?;
        Ok(model)
    }

    /// Makes the bf16 copy that of the parameters.
    fn renew_copy(&self) -> Result<()> {
        if let Some(copy) = &self.copy {
            mgpu_kernels::arena::cuda::narrow(&self.compute, self.parameters.view(), copy.view())?;
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

    /// The gradient of `tensor`, f32, to be overwritten. After a step: averaged over ranks.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn gradient(&self, tensor: usize) -> View<'_> {
        self.gradients.slice(self.layout.range(tensor))
    }

    /// Begins a step: what follows on the stream reads the [`state`](Self::state) of the next one.
    ///
    /// # Errors
    /// If a kernel cannot be launched.
    pub fn begin_step(&mut self) -> Result<()> {
        for slot in &mut self.slots {
            slot.open.fill(true);
        }
        let DeviceConfig { optimizer, plan, .. } = &self.config;
        Ok(begin(&self.compute, &optimizer.rule, *plan, self.state.view())?)
    }

    /// The kernels that write the gradient of `tensor` are on the stream: its bucket's all-reduce may follow them.
    /// Called once per tensor and step, in the same order on every rank, best last layer first.
    ///
    /// # Errors
    /// As the communicator's.
    pub fn ready(&mut self, tensor: usize) -> Result<()> {
        let slot = &mut self.slots[self.slot_of[tensor]];
        slot.open[tensor - slot.bucket.tensors.start] = false;
        if self.comm.size() == 1 || slot.open.contains(&true) {
            return Ok(());
        }
        self.compute.record(&slot.written)?;
        self.exchange.wait_for(&slot.written)?;
        let gradients = self.gradients.slice(slot.bucket.elements.clone());
        self.comm.all_reduce(&self.exchange, gradients, ReduceOp::Avg)?;
        self.exchange.record(&slot.reduced)?;
        Ok(())
    }

    /// Updates the parameters by the gradients' averages.
    ///
    /// # Errors
    /// If a kernel cannot be launched; names a tensor whose gradient was not announced.
    pub fn finish_step(&mut self) -> Result<()> {
        if let Some(slot) = self.slots.iter().find(|slot| slot.open.contains(&true)) {
            return Err(super::slot::unready(&self.layout, &slot.bucket, &slot.open));
        }
        if self.comm.size() == 1 {
            self.update(self.chunks.view())?;
        } else {
            for slot in &self.slots {
                self.compute.wait_for(&slot.reduced)?;
                self.update(self.chunks.slice(slot.chunks.clone()))?;
            }
        }
        self.steps += 1;
        Ok(())
    }

    fn update(&self, chunks: View<'_>) -> Result<()> {
        let OptimizerConfig { rule, average, .. } = &self.config.optimizer;
        let arenas = Arenas {
            gradients: self.gradients.view(),
            scale: 1.0,
            params: self.parameters.view(),
            first: self.first.as_ref().map(Memory::view),
            second: self.second.as_ref().map(Memory::view),
            average: self.average.as_ref().map(Memory::view).zip(*average),
            copy: self.copy.as_ref().map(Memory::view),
        };
        Ok(update(&self.compute, rule, self.state.view(), chunks, &arenas)?)
    }

    /// Sums `values` over all ranks, in place, between what is on the stream before and after: for synchronised batch
    /// normalisation.
    ///
    /// # Errors
    /// As the communicator's.
    pub fn sum_over_ranks(&mut self, values: View<'_>) -> Result<()> {
        if self.comm.size() == 1 {
            return Ok(());
        }
        self.comm.all_reduce(&self.compute, values, ReduceOp::Sum)
    }

    /// Captures the steps that `work` puts on the stream into a graph. None of them is made.
    ///
    /// Whatever `work` launches has been launched before, outside of a capture: kernels are compiled and loaded when they
    /// are launched first, which a capture forbids.
    ///
    /// # Errors
    /// As `work`, and if something cannot be captured.
    pub fn capture(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<StepGraph> {
        let made = self.steps;
        self.compute.begin_capture()?;
        let outcome = work(self);
        // A capture is ended, come what may: until then the stream takes no other work.
        let graph = self.compute.end_capture();
        let steps = std::mem::replace(&mut self.steps, made) - made;
        outcome?;
        let model = Arc::clone(&self.identity);
        Ok(StepGraph { graph: graph?, steps, _comm: Arc::clone(&self.comm), model })
    }

    /// Makes the steps of a graph that was captured from this model.
    ///
    /// # Errors
    /// If an error has made the communicator unusable, or the driver refuses.
    ///
    /// # Panics
    /// If it was captured from another one.
    pub fn replay(&mut self, graph: &StepGraph) -> Result<()> {
        assert!(Arc::ptr_eq(&graph.model, &self.identity), "a graph of another model");
        self.comm.begin_launch()?;
        // SAFETY: the graph holds its only communicator, which was not aborted when it was looked at. If another thread
        // aborts it now, NCCL keeps what captured operations use until the graph is gone.
        unsafe { self.compute.launch_graph(&graph.graph)? };
        self.steps += graph.steps;
        Ok(())
    }

    /// Begins to copy `from`, as it is at this place of the stream, to the host.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn read_later(&self, from: View<'_>, to: &mut Reading) -> Result<()> {
        self.compute.download_later(from, &mut to.bytes)?;
        Ok(self.compute.record(&to.done)?)
    }

    /// Waits for the copy that was begun last, as far as the other ranks come along, and returns it.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait`].
    pub fn read<'a>(&self, reading: &'a mut Reading) -> Result<&'a [u8]> {
        self.comm.wait(&reading.done, STEP)?;
        // SAFETY: the event lies behind the copy, and none is begun while the bytes are lent.
        Ok(unsafe { reading.bytes.bytes() })
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

    /// The communicator for host buffers, for collectives of the program's own between steps.
    pub fn comm(&mut self) -> &mut dyn Communicator {
        &mut *self.host
    }

    /// A copy of the parameters on the host.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn parameters(&mut self) -> Result<Vec<f32>> {
        self.wait(STEP)?;
        Ok(self.parameters.to_vec(&self.compute)?)
    }

    /// True if a moving average of the parameters is kept.
    pub fn has_average(&self) -> bool {
        self.average.is_some()
    }

    /// Exchanges the parameters and their moving average: to evaluate with the average, and back again.
    ///
    /// # Errors
    /// If the driver refuses, or memory is short.
    ///
    /// # Panics
    /// If no average is kept.
    pub fn swap_average(&mut self) -> Result<()> {
        let average = self.average.as_mut().expect("a moving average is kept");
        // Captured graphs hold the addresses: the values change places, not the memories.
        let aside = Memory::zeroed(average.device(), DType::F32, average.len())?;
        self.compute.copy(average.view(), aside.view())?;
        self.compute.copy(self.parameters.view(), average.view())?;
        self.compute.copy(aside.view(), self.parameters.view())?;
        self.renew_copy()
    }

    /// Checks that all ranks hold the same parameters, and returns their checksum in the order of the device's layout.
    /// Collective.
    ///
    /// # Errors
    /// [`Error::Diverged`](crate::Error::Diverged) with rank and tensor.
    pub fn verify(&mut self) -> Result<u64> {
        let parameters = self.parameters()?;
        verify_equal(&mut *self.host, &self.layout, &parameters)
    }

    /// Copies on the host of the parameters and the optimizer's state, with the names a checkpoint has for them.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn arenas(&mut self) -> Result<Vec<(&'static str, Vec<f32>)>> {
        self.wait(STEP)?;
        let named = self.named();
        named.into_iter().map(|(name, memory)| Ok((name, memory.to_vec(&self.compute)?))).collect()
    }

    fn named(&self) -> Vec<(&'static str, &Memory)> {
        let names = self.config.optimizer.rule.state_names().iter().copied();
        let states = names.zip([&self.first, &self.second].into_iter().flatten());
        let average = self.average.iter().map(|average| (AVERAGE, average));
        std::iter::once(("weights", &self.parameters)).chain(states).chain(average).collect()
    }

    /// Goes back to the state after `steps` steps. `read` returns the values of one of [`arenas`](Self::arenas) by its
    /// name, in the order of the device's layout. Collective; afterwards all ranks hold rank 0's values.
    ///
    /// # Errors
    /// As `read`, and the communicator's.
    pub fn restore(&mut self, steps: u64, mut read: impl FnMut(&str) -> Result<Vec<f32>>) -> Result<()> {
        self.wait(STEP)?;
        let names: Vec<&'static str> = self.named().into_iter().map(|(name, _)| name).collect();
        for (index, name) in names.into_iter().enumerate() {
            let mut values = read(name)?;
            replicate(&mut *self.host, &self.layout, &mut values)?;
            self.compute.upload(&values, self.named()[index].1.view())?;
        }
        self.renew_copy()?;
        self.compute.upload(bytemuck::bytes_of(&StepState::after(steps)), self.state.view())?;
        self.steps = steps;
        Ok(())
    }
}
