//! One training step, from the forward pass to the update, on one screen: see [`DataParallel::step`].
//!
//! The way of a gradient: the model writes it into its bucket ([`crate::bucket`]); the last one of a
//! bucket starts the all-reduce ([`crate::comm`]); the averaged bucket goes through the optimizer
//! ([`crate::optimizer`]) into this rank's own copy of the parameters. All copies were made equal once
//! ([`crate::replicate`](mod@crate::replicate)) and every rank applies the same update to the same bits, so they stay equal
//! without ever being sent again. On a GPU the same way is `device`'s.

#[cfg(feature = "cuda")]
pub mod device;

use std::time::{Duration, Instant};

use crate::bucket::{self, Bucket};
use crate::checkpoint::Arena;
use crate::comm::{Buffer, Communicator, DType, Pending, ReduceOp};
use crate::optimizer::{Optimizer, OptimizerConfig};
use crate::replicate::{replicate, sum_over_ranks, verify_equal};
use crate::{Error, Layout, Result};

/// Bytes of the first bucket: small, so that communication starts early.
const FIRST_BUCKET: usize = 256 << 10;
/// Bytes of the other buckets, unless the caller chooses: on a CPU small enough that gradients are still in the cache
/// when they are reduced. (Of 1, 2, 4 and 25 MiB, steps of the larger networks with two ranks were up to 8% shorter
/// with 1 MiB than with 25, and otherwise as long.)
pub const BUCKET: usize = 1 << 20;

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

/// A bucket's gradient: here, or with the communicator.
#[derive(Debug)]
enum Gradient {
    Here(Buffer),
    Reducing(Pending),
    /// Lost to a failed operation.
    Lost,
}

/// A bucket and the gradients in it.
#[derive(Debug)]
struct Slot {
    bucket: Bucket,
    gradient: Gradient,
    /// Tensors not yet ready in this step.
    open: Vec<bool>,
}

impl Slot {
    /// Takes the gradient, waiting for its all-reduce if that is under way.
    fn take(&mut self) -> Result<Buffer> {
        match std::mem::replace(&mut self.gradient, Gradient::Lost) {
            Gradient::Here(buffer) => Ok(buffer),
            Gradient::Reducing(pending) => pending.wait(),
            Gradient::Lost => {
                let problem =
                    "gradients were lost to an earlier error; no further step can be made".to_owned();
                Err(Error::InvalidArgument { operation: "step", problem })
            }
        }
    }

    fn buffer(&self) -> Option<&Buffer> {
        match &self.gradient {
            Gradient::Here(buffer) => Some(buffer),
            _ => None,
        }
    }
}

/// What steps took beside their forward and backward passes, summed over steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Waiting for gradients that were still on their way.
    pub communication: Duration,
    /// Updating the parameters.
    pub optimizer: Duration,
}

/// A model's parameters, replicated on every rank and updated together.
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
    parameters: Vec<f32>,
    slots: Vec<Slot>,
    /// The slot of each tensor.
    slot_of: Vec<usize>,
    optimizer: Optimizer,
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
        Self::with_bucket_size(comm, layout, parameters, optimizer, threads, BUCKET)
    }

    /// As [`new`](Self::new), with gradients all-reduced in buckets of `bucket` bytes (the first is at most 256 KiB).
    /// All ranks pass the same size.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_bucket_size(
        mut comm: Box<dyn Communicator>,
        layout: Layout,
        mut parameters: Vec<f32>,
        optimizer: OptimizerConfig,
        threads: usize,
        bucket: usize,
    ) -> Result<Self> {
        replicate(&mut *comm, &layout, &mut parameters)?;
        let buckets = bucket::plan(&layout, FIRST_BUCKET.min(bucket), bucket);
        let mut gradients = comm.allocate(DType::F32, layout.len())?;
        let mut slots = Vec::new();
        let mut slot_of = vec![0; layout.tensors().len()];
        // Buckets are cut from the end of the arena.
        for (index, bucket) in buckets.into_iter().enumerate() {
            let (rest, gradient) = gradients.split_at(bucket.elements.start);
            gradients = rest;
            slot_of[bucket.tensors.clone()].fill(index);
            let open = vec![true; bucket.tensors.len()];
            slots.push(Slot { bucket, gradient: Gradient::Here(gradient), open });
        }
        let optimizer = Optimizer::new(optimizer, &layout, &parameters, threads);
        Ok(DataParallel { comm, layout, parameters, slots, slot_of, optimizer, times: None })
    }

    /// Makes one step. `compute` runs forward and backward with the current parameters and hands over every
    /// gradient, as the mean over this rank's batch; the step averages them over ranks and updates the
    /// parameters. Returns what `compute` returns.
    ///
    /// # Errors
    /// As `compute` and the communicator; names a tensor whose gradient was not handed over.
    pub fn step<R>(&mut self, compute: impl FnOnce(&[f32], &mut dyn GradientSink) -> Result<R>) -> Result<R> {
        for slot in &mut self.slots {
            slot.open.fill(true);
            // A step that broke off may have left an all-reduce under way.
            slot.gradient = Gradient::Here(slot.take()?);
        }
        let mut sink = Sink {
            comm: &mut *self.comm,
            layout: &self.layout,
            slots: &mut self.slots,
            slot_of: &self.slot_of,
        };
        let result = compute(&self.parameters, &mut sink)?;
        if let Some(slot) = self.slots.iter().find(|slot| slot.open.contains(&true)) {
            return Err(unready(&self.layout, &slot.bucket, &slot.open));
        }
        self.optimizer.begin_step();
        for slot in &mut self.slots {
            let start = self.times.map(|_| Instant::now());
            let gradient = slot.take()?;
            let here = self.times.map(|_| Instant::now());
            self.optimizer.update(&self.layout, &slot.bucket, &mut self.parameters, gradient.as_slice());
            slot.gradient = Gradient::Here(gradient);
            if let (Some(times), Some(start), Some(here)) = (&mut self.times, start, here) {
                times.communication += here - start;
                times.optimizer += here.elapsed();
            }
        }
        Ok(result)
    }

    /// Measures from now on what steps take beside their passes, from zero.
    pub fn start_times(&mut self) {
        self.times = Some(StepTimes::default());
    }

    /// What the steps took since [`start_times`](Self::start_times).
    pub fn times(&self) -> Option<StepTimes> {
        self.times
    }

    /// This rank's copy of the parameters, equal on all ranks.
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// The moving average of the parameters, if the optimizer keeps one.
    pub fn averaged_parameters(&self) -> Option<&[f32]> {
        self.optimizer.average()
    }

    /// Names, shapes and offsets of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The gradient of `tensor` as of the last step, averaged over ranks.
    ///
    /// # Panics
    /// If there is no such tensor, or the last step failed.
    pub fn gradient(&self, tensor: usize) -> &[f32] {
        let slot = &self.slots[self.slot_of[tensor]];
        let buffer = slot.buffer().expect("the last step succeeded");
        let range = self.layout.range(tensor);
        let begin = slot.bucket.elements.start;
        &buffer.as_slice()[range.start - begin..range.end - begin]
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

    /// The communicator, for collectives of the program's own between steps.
    pub fn comm(&mut self) -> &mut dyn Communicator {
        &mut *self.comm
    }

    /// Checks that all ranks hold the same parameters, and returns their checksum. Collective.
    ///
    /// # Errors
    /// [`Error::Diverged`] with rank and tensor.
    pub fn verify(&mut self) -> Result<u64> {
        verify_equal(&mut *self.comm, &self.layout, &self.parameters)
    }

    /// Everything a checkpoint needs of this model: the parameters and the optimizer's state.
    pub fn arenas(&self) -> Vec<Arena<'_>> {
        let weights = Arena { name: "weights", layout: &self.layout, values: &self.parameters };
        let state = self.optimizer.state();
        let state = state.map(|(name, values)| Arena { name, layout: &self.layout, values });
        std::iter::once(weights).chain(state).collect()
    }

    /// Goes back to the state after `steps` steps. `read` returns the values of one of [`arenas`](Self::arenas)
    /// by its name. Collective; afterwards all ranks hold rank 0's values.
    ///
    /// # Errors
    /// As `read`, and the communicator's.
    pub fn restore(
        &mut self,
        steps: u64,
        mut read: impl FnMut(&str, &Layout) -> Result<Vec<f32>>,
    ) -> Result<()> {
        self.parameters = read("weights", &self.layout)?;
        replicate(&mut *self.comm, &self.layout, &mut self.parameters)?;
        for (name, values) in self.optimizer.state_mut() {
            *values = read(name, &self.layout)?;
            replicate(&mut *self.comm, &self.layout, values)?;
        }
        self.optimizer.set_steps(steps);
        Ok(())
    }
}

/// The error of a bucket that was not completed: names its first open tensor.
fn unready(layout: &Layout, bucket: &Bucket, open: &[bool]) -> Error {
    let open = open.iter().position(|open| *open).unwrap_or_default();
    let name = &layout.tensors()[bucket.tensors.start + open].name;
    let problem = format!("the gradient of tensor `{name}` was not handed over");
    Error::InvalidArgument { operation: "step", problem }
}

/// What `compute` sees of the buckets.
struct Sink<'a> {
    comm: &'a mut dyn Communicator,
    layout: &'a Layout,
    slots: &'a mut [Slot],
    slot_of: &'a [usize],
}

impl GradientSink for Sink<'_> {
    fn gradient(&mut self, tensor: usize) -> &mut [f32] {
        let slot = &mut self.slots[self.slot_of[tensor]];
        let Gradient::Here(buffer) = &mut slot.gradient else {
            panic!("the gradient of tensor {tensor} is written after all of its bucket was ready");
        };
        let range = self.layout.range(tensor);
        let begin = slot.bucket.elements.start;
        &mut buffer.as_mut_slice()[range.start - begin..range.end - begin]
    }

    fn ready(&mut self, tensor: usize) -> Result<()> {
        let slot = &mut self.slots[self.slot_of[tensor]];
        slot.open[tensor - slot.bucket.tensors.start] = false;
        if slot.open.contains(&true) {
            return Ok(());
        }
        slot.gradient = match std::mem::replace(&mut slot.gradient, Gradient::Lost) {
            Gradient::Here(gradient) => Gradient::Reducing(self.comm.all_reduce(gradient, ReduceOp::Avg)?),
            // Announced twice: it is on its way already.
            other => other,
        };
        Ok(())
    }

    fn sum_over_ranks(&mut self, values: &mut [f64]) -> Result<()> {
        sum_over_ranks(self.comm, values)
    }
}
