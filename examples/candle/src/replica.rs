//! The variables of a candle model as one flat arena of parameters, equal on all ranks, and back.
//!
//! candle keeps each variable in a tensor of its own and has all gradients at once when `backward` returns. mgpu wants them
//! in one arena, in an order that all ranks have: that of the variables' names, since a `VarMap` has none. So a step copies
//! each gradient into its place in the arena and each parameter back into its variable, a few hundred kilobytes here.

use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;
use mgpu::optimizer::OptimizerConfig;
use mgpu::{Communicator, DataParallel, Layout};

/// What can go wrong, in candle or between ranks.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// candle refused something.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A rank failed, or this one's request makes no sense.
    #[error(transparent)]
    Mgpu(#[from] mgpu::Error),
    /// A variable is no parameter that ranks can share.
    #[error("variable `{name}` has elements of type {dtype:?}; those of f32 can be trained")]
    DType {
        /// The variable.
        name: String,
        /// Its type.
        dtype: DType,
    },
}

/// A model's variables, replicated on every rank and updated together.
pub struct Replica {
    /// In the order of the layout.
    variables: Vec<Var>,
    parallel: DataParallel,
}

impl Replica {
    /// Sets every rank's `variables` to those of rank 0, whatever they were initialised with, and gets ready to train them.
    /// Collective. The update runs on `threads` threads.
    ///
    /// # Errors
    /// If a variable is not of f32, the ranks' models differ, or as the communicator's.
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

    /// Makes one step down the gradient of `loss`, the mean over this rank's part of the batch: averages the gradients over
    /// ranks and updates the variables. Collective.
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
                    // The loss does not depend on it.
                    None => sink.gradient(tensor).fill(0.0),
                }
                sink.ready(tensor)?;
            }
            Ok(())
        })?;
        self.load()
    }

    /// The parameters and what they were trained with: learning rate, gradients, checksum, communicator.
    pub fn parallel(&mut self) -> &mut DataParallel {
        &mut self.parallel
    }

    /// Sets the variables to the parameters: to be called where those have changed otherwise than by a step, from a
    /// checkpoint.
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
