//! Connects the parameters of a burn module to one flat parameter arena, equal on all ranks.
//!
//! burn keeps each parameter in a tensor of its own, and `backward` returns all gradients at once, each in new memory. mgpu
//! needs both in arenas, in the same order on all ranks. The order is that in which a module visits its parameters: burn's
//! identifiers of parameters are random, and differ from rank to rank.
//!
//! Each step copies every gradient once, from burn's tensor into the arena that all ranks sum in place, and every parameter
//! once, from the arena into the memory of its tensor. No memory is allocated for either. (burn's weights cannot be the
//! arena itself: its CPU backend copies borrowed memory in every operation that reads it.)

use burn::backend::Autodiff;
use burn::backend::ndarray::{NdArray, NdArrayTensor};
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorMetadata, TensorPrimitive};
use mgpu::optimizer::OptimizerConfig;
use mgpu::{Communicator, DataParallel, DataParallelConfig, GradientSink, Layout};

/// burn's backend for CPUs, with gradients.
pub type Cpu = Autodiff<NdArray<f32>>;

type Gradients = <Cpu as AutodiffBackend>::Gradients;

/// Errors of the module or of the communication between ranks.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A rank failed, or the request of this rank is invalid.
    #[error(transparent)]
    Mgpu(#[from] mgpu::Error),
    /// A parameter whose type cannot be trained.
    #[error("parameter `{name}` has elements of type {dtype:?}; only f32 can be trained")]
    DType {
        /// The parameter.
        name: String,
        /// Its type.
        dtype: DType,
    },
}

/// A module, replicated on every rank: its parameters are updated together.
///
/// Tensors that need no gradient (frozen parameters, running statistics) are left as they are on each rank.
pub struct Replica<M> {
    /// Absent only while it is mapped.
    module: Option<M>,
    parallel: DataParallel,
}

impl<M: AutodiffModule<Cpu>> Replica<M> {
    /// Overwrites the parameters of all ranks' `module` by those of rank 0 and prepares to train them. Collective. The
    /// update runs on `threads` threads.
    ///
    /// # Errors
    /// If a parameter is not f32, the modules of the ranks differ, or the communicator fails.
    pub fn new(
        comm: Communicator,
        module: M,
        optimizer: OptimizerConfig,
        threads: usize,
    ) -> Result<Self, Error> {
        Self::with_config(comm, module, DataParallelConfig::new(optimizer, threads))
    }

    /// As [`new`](Self::new), with a configuration: micro-batches, clipping, size of buckets, and so on.
    ///
    /// # Errors
    /// As [`new`](Self::new); if the settings are incompatible.
    pub fn with_config(comm: Communicator, module: M, config: DataParallelConfig) -> Result<Self, Error> {
        let mut read = ReadParameters::default();
        module.visit(&mut read);
        if let Some(error) = read.error {
            return Err(error);
        }
        let parallel = DataParallel::with_config(comm, read.layout, read.values, config)?;
        let mut replica = Replica { module: Some(module), parallel };
        replica.load();
        Ok(replica)
    }

    /// The module, to compute a loss with.
    pub fn module(&self) -> &M {
        self.module.as_ref().expect(PRESENT)
    }

    /// Makes one step with the gradient of `loss`, the mean over this rank's part of the batch: averages gradients over
    /// ranks and updates the module. Collective.
    ///
    /// # Errors
    /// As [`DataParallel::step`]. The module is unchanged then.
    pub fn step(&mut self, loss: Tensor<Cpu, 1>) -> Result<(), Error> {
        let module = self.module.as_ref().expect(PRESENT);
        self.parallel.step(|_, sink| write_gradients(module, loss, sink))?;
        self.load();
        Ok(())
    }

    /// Makes one step of all micro-batches. `loss` returns the loss of the micro-batch with the index that it gets.
    /// Collective.
    ///
    /// # Errors
    /// As [`DataParallel::step_accumulated`]. The module is unchanged then.
    pub fn step_accumulated(
        &mut self,
        mut loss: impl FnMut(&M, usize) -> Tensor<Cpu, 1>,
    ) -> Result<(), Error> {
        let module = self.module.as_ref().expect(PRESENT);
        self.parallel
            .step_accumulated(|batch| write_gradients(module, loss(module, batch.index), batch.gradients))?;
        self.load();
        Ok(())
    }

    /// Parameters, learning rate, gradients, checksum and communicator.
    pub fn parallel(&mut self) -> &mut DataParallel {
        &mut self.parallel
    }

    /// Copies the parameters into the module. Needed after the parameters changed in another way than by a step, for
    /// example from a checkpoint.
    pub fn load(&mut self) {
        let module = self.module.take().expect(PRESENT);
        let mut write = WriteParameters { parallel: &self.parallel, tensor: 0 };
        self.module = Some(module.map(&mut write));
    }
}

const PRESENT: &str = "the module is absent only while it is mapped";

/// Computes the gradients of `loss` and copies each of them to `sink`, the last parameter's first, as a backward pass
/// would make them.
fn write_gradients(
    module: &impl Module<Cpu>,
    loss: Tensor<Cpu, 1>,
    sink: &mut dyn GradientSink,
) -> mgpu::Result<()> {
    let mut take = TakeGradients { gradients: loss.backward(), taken: Vec::new() };
    // The graph has references to the parameters. Without it they are overwritten in place.
    drop(loss);
    module.visit(&mut take);
    for (tensor, gradient) in take.taken.into_iter().enumerate().rev() {
        match gradient {
            Some(gradient) => copy_values(&gradient, sink.gradient(tensor)).map_err(mgpu::Error::program)?,
            // The loss does not depend on this parameter.
            None => sink.gradient(tensor).fill(0.0),
        }
        sink.ready(tensor)?;
    }
    Ok(())
}

/// Names, shapes and values of all parameters.
#[derive(Default)]
struct ReadParameters {
    /// Names of the modules around the parameter.
    path: Vec<String>,
    layout: Layout,
    values: Vec<f32>,
    error: Option<Error>,
}

impl ModuleVisitor<Cpu> for ReadParameters {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<Cpu, D>>) {
        let tensor = parameter.val();
        if !tensor.is_require_grad() || self.error.is_some() {
            return;
        }
        let name = self.path.join(".");
        let values = array(tensor.inner());
        let begin = self.values.len();
        self.values.resize(begin + values.shape().num_elements(), 0.0);
        match copy_values(&values, &mut self.values[begin..]) {
            Ok(()) => drop(self.layout.push(name, values.shape().dims)),
            Err(NotF32(dtype)) => self.error = Some(Error::DType { name, dtype }),
        }
    }
}

/// The gradients of all parameters, in the order of the layout.
struct TakeGradients {
    gradients: Gradients,
    taken: Vec<Option<NdArrayTensor>>,
}

impl ModuleVisitor<Cpu> for TakeGradients {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<Cpu, D>>) {
        let tensor = parameter.val();
        if tensor.is_require_grad() {
            self.taken.push(tensor.grad_remove(&mut self.gradients).map(array));
        }
    }
}

/// Overwrites all parameters.
struct WriteParameters<'a> {
    parallel: &'a DataParallel,
    /// Index of the next one in the layout.
    tensor: usize,
}

impl ModuleMapper<Cpu> for WriteParameters<'_> {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<Cpu, D>>) -> Param<Tensor<Cpu, D>> {
        let (id, tensor, mapper) = parameter.consume();
        if !tensor.is_require_grad() {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        let range = self.parallel.layout().range(self.tensor);
        let mut tensor = array(tensor.inner());
        overwrite(&mut tensor, &self.parallel.parameters()[range]);
        self.tensor += 1;
        let tensor = Tensor::from_primitive(TensorPrimitive::Float(tensor));
        Param::from_mapped_value(id, Tensor::from_inner(tensor).require_grad(), mapper)
    }
}

/// What a tensor of burn's CPU backend is made of.
fn array<const D: usize>(tensor: Tensor<NdArray<f32>, D>) -> NdArrayTensor {
    tensor.into_primitive().tensor()
}

/// The type of a tensor that is not f32.
#[derive(Debug, thiserror::Error)]
#[error("a gradient has elements of type {0:?}; only f32 can be reduced")]
struct NotF32(DType);

/// Copies all elements of `tensor`, in row-major order, to as many `values`.
fn copy_values(tensor: &NdArrayTensor, values: &mut [f32]) -> Result<(), NotF32> {
    let NdArrayTensor::F32(storage) = tensor else {
        return Err(NotF32(tensor.dtype()));
    };
    let view = storage.view();
    match view.as_slice() {
        Some(elements) => values.copy_from_slice(elements),
        // Such as the gradient of a convolution's weights, whose first two dimensions are swapped.
        None => values.iter_mut().zip(view.iter()).for_each(|(value, element)| *value = *element),
    }
    Ok(())
}

/// Overwrites the elements of `tensor` by `values`, in row-major order: in place if nobody else has the tensor.
fn overwrite(tensor: &mut NdArrayTensor, values: &[f32]) {
    let NdArrayTensor::F32(storage) = tensor else {
        unreachable!(
            "Replica::with_config rejects parameters of other types, and nobody else changes the module"
        )
    };
    let array = storage.ensure_owned();
    match array.as_slice_mut() {
        Some(elements) => elements.copy_from_slice(values),
        None => array.iter_mut().zip(values).for_each(|(element, value)| *element = *value),
    }
}
