//! Copies the variables of a candle model into one flat parameter arena, equal on all ranks, and back.
//!
//! candle stores each variable in a separate tensor and returns all gradients at once from `backward`. mgpu needs
//! them in one arena, in the same order on all ranks. A `VarMap` has no order, so variables are sorted by name. Each
//! step copies the gradients into the arena and the parameters back into the variables, here a few hundred kilobytes.

use candle_core::{DType, Tensor, Var};
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
        let mut named: Vec<(String, Var)> = {
            let variables = variables.data().lock().expect("nobody panics while holding the variables");
            variables.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect()
        };
        named.sort_by(|(one, _), (other, _)| one.cmp(other));
        let (mut layout, mut parameters) = (Layout::new(), Vec::new());
        for (name, variable) in &named {
            if variable.dtype() != DType::F32 {
                return Err(Error::DType { name: name.clone(), dtype: variable.dtype() });
            }
            layout.push(name, variable.dims());
            parameters.extend(values(variable)?);
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
        let of_variable = |variable: &Var| gradients.get(variable).map(values).transpose();
        let gradients = self.variables.iter().map(of_variable).collect::<Result<Vec<_>, _>>()?;
        self.parallel.step(|_, sink| {
            for (tensor, gradient) in gradients.iter().enumerate().rev() {
                match gradient {
                    Some(gradient) => sink.gradient(tensor).copy_from_slice(gradient),
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
            let values = &self.parallel.parameters()[tensor.range()];
            variable.set(&Tensor::from_slice(values, variable.shape(), variable.device())?)?;
        }
        Ok(())
    }
}

/// All elements of a tensor, in row-major order.
fn values(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}
