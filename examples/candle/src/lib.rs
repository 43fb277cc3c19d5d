//! A candle model, trained data-parallel with mgpu.
//!
//! [`Replica`] connects any model whose variables are in a `VarMap` to mgpu; [`Classifier`] is an example model.
//! candle computes the loss and the gradients of a rank's part of the batch; mgpu averages gradients over ranks and
//! updates the parameters. With the feature `cuda`, `DeviceReplica` does the same for a model on a GPU.
#![deny(unsafe_code)]

mod classifier;
// candle's memory and stream are known to mgpu by their addresses.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod device_replica;
mod replica;

pub use classifier::Classifier;
#[cfg(feature = "cuda")]
pub use device_replica::DeviceReplica;
pub use replica::{Error, Replica};
