//! [`Replica`](crate::Replica) for a model on a GPU: gradients and parameters stay on the GPU, and the host does not
//! wait for them after the first step (in which the ranks agree on the order of gradients).
//!
//! candle enqueues all of its work on one stream, and its allocator reuses memory in the order of that stream. So
//! every copy from and to memory of candle is enqueued on candle's stream, between candle's own kernels, and no other
//! stream touches that memory. The arenas belong to mgpu, whose compute stream reduces and updates. Events order
//! the streams in each step:
//!
//! ```text
//! candle's stream   forward, backward │ copy gradients ─┐                       ┌─ copy parameters │ forward, …
//! compute stream                                        └─ reduce, update ──────┘
//! ```
//!
//! As on the CPU, a step copies every gradient once and every parameter once.

use std::sync::Arc;

use candle_core::cuda::cudarc::driver::{DevicePtr, DevicePtrMut};
use candle_core::{CpuStorage, CudaStorage, Device, InplaceOp1, Storage, Tensor, Var};
use candle_nn::VarMap;
use mgpu::device::{ALIGNMENT, DeviceConfig};
use mgpu::optimizer::OptimizerConfig;
use mgpu::{Communicator, DType, DataParallelConfig, DeviceCommunicator, DeviceDataParallel, Layout};
use mgpu_kernels::cuda::{Event, Stream, View};

use crate::replica::{Error, sorted_by_name};

/// The variables of a model on a GPU, replicated on every rank and updated together.
pub struct DeviceReplica {
    /// In the order of the layout.
    variables: Vec<Var>,
    // Dropped before candle's stream: it waits for the copies from and to its arenas.
    parallel: DeviceDataParallel,
    /// candle's own.
    stream: Stream,
    /// Orders one stream after the other. The driver notes at each wait which record of it is meant.
    event: Event,
    /// Keeps candle's stream alive.
    device: Device,
}

impl DeviceReplica {
    /// Overwrites the `variables` of all ranks with those of rank 0 and prepares to train them. The communicators are
    /// those of [`World::communicators`](mgpu::World::communicators), and the variables are on candle's `device`, which
    /// is their GPU: `Device::new_cuda(comm.device().ordinal() as usize)`. Collective.
    ///
    /// # Errors
    /// If a variable is not f32 or not on `device`, `device` is another GPU than the communicator's, the models of the
    /// ranks differ, or a communicator fails.
    pub fn new(
        comm: Arc<DeviceCommunicator>,
        host: Communicator,
        device: &Device,
        variables: &VarMap,
        optimizer: OptimizerConfig,
    ) -> Result<Self, Error> {
        let candle = device.as_cuda_device()?.cuda_stream();
        if candle.context().ordinal() != comm.device().ordinal() as usize {
            let (candle, mgpu) = (candle.context().ordinal(), comm.device().ordinal());
            return Err(candle_core::Error::msg(format!(
                "variables on GPU {candle}, a communicator on {mgpu}"
            ))
            .into());
        }
        let named = sorted_by_name(variables)?;
        let (mut layout, mut parameters) = (Layout::new(), Vec::new());
        for (name, variable) in &named {
            let tensor = layout.push_aligned(name, variable.dims(), ALIGNMENT);
            parameters.resize(layout.range(tensor).start, 0.0);
            parameters.extend(variable.flatten_all()?.to_vec1::<f32>()?);
        }
        // SAFETY: cudarc, which candle uses, makes streams of the primary context; `device` keeps this one until the
        // replica is dropped, and `parallel`, which is dropped before, waits for what was enqueued on it.
        let stream = unsafe { Stream::from_raw(comm.device(), candle.cu_stream()) };
        let event = Event::new(comm.device())?;
        let config = DeviceConfig::new(DataParallelConfig::new(optimizer, 1));
        let parallel = DeviceDataParallel::new(comm, host, layout, parameters, config)?;
        let variables = named.into_iter().map(|(_, variable)| variable).collect();
        let replica = DeviceReplica { variables, parallel, stream, event, device: device.clone() };
        replica.load()?;
        Ok(replica)
    }

    /// Enqueues one step with the gradient of `loss`, the mean over this rank's part of the batch: averages gradients
    /// over ranks and updates the variables. Errors of the GPU, such as non-finite gradients, are returned by
    /// [`check`](DeviceDataParallel::check) and [`verify`](DeviceDataParallel::verify) of
    /// [`parallel`](Self::parallel). Collective.
    ///
    /// # Errors
    /// As candle's backward pass and [`DeviceDataParallel::finish_step`].
    pub fn step(&mut self, loss: &Tensor) -> Result<(), Error> {
        let gradients = loss.backward()?;
        self.parallel.begin_step()?;
        for (tensor, variable) in self.variables.iter().enumerate().rev() {
            let copied = self.copy_gradient(gradients.get(variable), self.parallel.gradient(tensor));
            self.order(&self.stream, self.parallel.stream())?;
            copied?;
            self.parallel.ready(tensor)?;
        }
        self.parallel.finish_step()?;
        self.load()
    }

    /// Parameters, learning rate, gradients, checksum and communicator.
    pub fn parallel(&mut self) -> &mut DeviceDataParallel {
        &mut self.parallel
    }

    /// Copies the parameters into the variables. Needed after the parameters changed in another way than by a step,
    /// for example from a checkpoint.
    ///
    /// # Errors
    /// As candle's.
    pub fn load(&self) -> Result<(), Error> {
        self.order(self.parallel.stream(), &self.stream)?;
        let copied = self.variables.iter().enumerate().try_for_each(|(tensor, variable)| {
            self.check_device(variable)?;
            let parameters = self.parallel.parameter(tensor);
            variable.inplace_op1(&Overwrite { parameters, stream: &self.stream })
        });
        // The next update writes what is read here.
        self.order(&self.stream, self.parallel.stream())?;
        Ok(copied?)
    }

    /// Lets `second` wait for the work on `first` so far.
    fn order(&self, first: &Stream, second: &Stream) -> Result<(), Error> {
        first.record(&self.event)?;
        Ok(second.wait_for(&self.event)?)
    }

    /// Enqueues a copy of a gradient on candle's stream; without one, the loss does not depend on the variable.
    fn copy_gradient(&self, gradient: Option<&Tensor>, to: View<'_>) -> Result<(), Error> {
        let Some(gradient) = gradient else {
            return Ok(self.stream.zero(to)?);
        };
        self.check_device(gradient)?;
        // Itself, except for one such as a transposed gradient, which candle arranges first.
        let gradient = gradient.contiguous()?;
        let (storage, layout) = gradient.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { unreachable!("the tensor's device is a GPU") };
        let begin = layout.start_offset();
        let elements = storage.as_cuda_slice::<f32>()?.slice(begin..begin + layout.shape().elem_count());
        if elements.len() != to.len() {
            let (shape, len) = (gradient.shape(), to.len());
            let text = format!("a gradient of shape {shape:?} where {len} elements are expected");
            return Err(candle_core::Error::msg(text).into());
        }
        let candle = storage.device.cuda_stream();
        let (address, _read) = elements.device_ptr(&candle);
        // SAFETY: memory of the communicator's GPU, used here on the stream in whose order candle writes and frees it.
        let from = unsafe { View::from_raw(address, DType::F32, elements.len()) };
        Ok(self.stream.copy(from, to)?)
    }

    /// Checks that candle uses a tensor on the stream of `device` only.
    fn check_device(&self, tensor: &Tensor) -> candle_core::Result<()> {
        if !tensor.device().same_device(&self.device) {
            candle_core::bail!("a tensor on {:?}: the replica is on {:?}", tensor.device(), self.device)
        }
        Ok(())
    }
}

impl From<mgpu_kernels::cuda::Error> for Error {
    fn from(error: mgpu_kernels::cuda::Error) -> Self {
        mgpu::Error::from(error).into()
    }
}

/// Copies these parameters, in row-major order, into the memory of a variable, on candle's stream.
struct Overwrite<'a> {
    parameters: View<'a>,
    stream: &'a Stream,
}

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &candle_core::Layout) -> candle_core::Result<()> {
        candle_core::bail!("a variable on the CPU, which `DeviceReplica` does not train")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &candle_core::Layout) -> candle_core::Result<()> {
        let candle = storage.device.cuda_stream();
        let Some((begin, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a variable of layout {layout:?}, which is not contiguous")
        };
        let mut elements = storage.as_cuda_slice_mut::<f32>()?.slice_mut(begin..end);
        if elements.len() != self.parameters.len() {
            candle_core::bail!(
                "a variable of shape {:?} gets {} elements",
                layout.shape(),
                self.parameters.len()
            )
        }
        let len = elements.len();
        let (address, _written) = elements.device_ptr_mut(&candle);
        // SAFETY: as for a gradient; candle lends the memory exclusively.
        let to = unsafe { View::from_raw(address, DType::F32, len) };
        self.stream.copy(self.parameters, to).map_err(candle_core::Error::wrap)
    }
}
