//! Copies the variables of a candle model into one flat parameter arena, equal on all ranks, and back.
//!
//! candle stores each variable in a separate tensor and returns all gradients at once from `backward`. mgpu needs
//! them in one arena, in the same order on all ranks. A `VarMap` has no order, so variables are sorted by name. Each
//! step copies every gradient once, from candle's memory into the arena, and every parameter once, from the arena into
//! the memory of its variable.

use candle_core::{CpuStorage, DType, InplaceOp1, Storage, Tensor, Var};
use candle_nn::VarMap;
use mgpu::optimizer::OptimizerConfig;
use mgpu::{Communicator, DataParallel, Layout};

/// Errors of candle or of the communication between ranks.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A rank failed, or the request of this rank is invalid.
    #[error(transparent)]
    Mgpu(#[from] mgpu::Error),
    /// A variable whose type cannot be trained.
    #[error("variable `{name}` has elements of type {dtype:?}; only f32 can be trained")]
    DType {
        /// The variable.
        name: String,
        /// Its type.
        dtype: DType,
    },
}

/// The variables of a model, replicated on every rank and updated together.
pub struct Replica {
    /// In the order of the layout.
    variables: Vec<Var>,
    parallel: DataParallel,
}

impl Replica {
    /// Overwrites the `variables` of all ranks with those of rank 0 and prepares to train them. Collective. The
    /// update runs on `threads` threads.
    ///
    /// # Errors
    /// If a variable is not f32, the models of the ranks differ, or the communicator fails.
    pub fn new(
        comm: Communicator,
        variables: &VarMap,
        optimizer: OptimizerConfig,
        threads: usize,
    ) -> Result<Self, Error> {
        let named = sorted_by_name(variables)?;
        let (mut layout, mut parameters) = (Layout::new(), Vec::new());
        for (name, variable) in &named {
            layout.push(name, variable.dims());
            let begin = parameters.len();
            parameters.resize(begin + variable.elem_count(), 0.0);
            copy_values(variable, &mut parameters[begin..])?;
        }
        let parallel = DataParallel::new(comm, layout, parameters, optimizer, threads)?;
        let variables = named.into_iter().map(|(_, variable)| variable).collect();
        let replica = Replica { variables, parallel };
        replica.load()?;
        Ok(replica)
    }

    /// Makes one step with the gradient of `loss`, the mean over this rank's part of the batch: averages gradients
    /// over ranks and updates the variables. Collective.
    ///
    /// # Errors
    /// As candle's backward pass and [`DataParallel::step`].
    pub fn step(&mut self, loss: &Tensor) -> Result<(), Error> {
        let gradients = loss.backward()?;
        let variables = &self.variables;
        self.parallel.step(|_, sink| {
            for (tensor, variable) in variables.iter().enumerate().rev() {
                match gradients.get(variable) {
                    Some(gradient) => {
                        copy_values(gradient, sink.gradient(tensor)).map_err(mgpu::Error::program)?;
                    }
                    // The loss does not depend on this variable.
                    None => sink.gradient(tensor).fill(0.0),
                }
                sink.ready(tensor)?;
            }
            Ok(())
        })?;
        self.load()
    }

    /// Parameters, learning rate, gradients, checksum and communicator.
    pub fn parallel(&mut self) -> &mut DataParallel {
        &mut self.parallel
    }

    /// Copies the parameters into the variables. Needed after the parameters changed in another way than by a step,
    /// for example from a checkpoint.
    ///
    /// # Errors
    /// As candle's.
    pub fn load(&self) -> Result<(), Error> {
        for (variable, tensor) in self.variables.iter().zip(self.parallel.layout().tensors()) {
            variable.inplace_op1(&Overwrite(&self.parallel.parameters()[tensor.range()]))?;
        }
        Ok(())
    }
}

/// The variables, which must be f32, in an order that is the same on all ranks.
pub(crate) fn sorted_by_name(variables: &VarMap) -> Result<Vec<(String, Var)>, Error> {
    let mut named: Vec<(String, Var)> = {
        let variables = variables.data().lock().expect("nobody panics while holding the variables");
        variables.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect()
    };
    if let Some((name, variable)) = named.iter().find(|(_, variable)| variable.dtype() != DType::F32) {
        return Err(Error::DType { name: name.clone(), dtype: variable.dtype() });
    }
    named.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(named)
}

/// Copies all elements of a tensor in memory of the CPU, in row-major order, to `values`.
fn copy_values(tensor: &Tensor, values: &mut [f32]) -> candle_core::Result<()> {
    // Itself, except for one such as a transposed gradient, which candle arranges first.
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("a tensor on {:?}: `Replica` is for models on the CPU", tensor.device())
    };
    let elements = &storage.as_slice::<f32>()?[layout.start_offset()..][..layout.shape().elem_count()];
    if values.len() != elements.len() {
        candle_core::bail!(
            "a tensor of shape {:?} where {} elements are expected",
            tensor.shape(),
            values.len()
        )
    }
    values.copy_from_slice(elements);
    Ok(())
}

/// Writes these values, in row-major order, into the memory of a variable.
struct Overwrite<'a>(&'a [f32]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &candle_core::Layout) -> candle_core::Result<()> {
        let (CpuStorage::F32(elements), Some((begin, end))) = (storage, layout.contiguous_offsets()) else {
            candle_core::bail!("a variable of layout {layout:?}, which is not contiguous f32")
        };
        if end - begin != self.0.len() {
            candle_core::bail!("a variable of shape {:?} gets {} elements", layout.shape(), self.0.len())
        }
        elements[begin..end].copy_from_slice(self.0);
        Ok(())
    }
}
