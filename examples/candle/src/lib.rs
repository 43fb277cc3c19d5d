//! A candle model, trained data-parallel with mgpu.
//!
//! [`Replica`] connects any model whose variables are in a `VarMap` to mgpu; [`Classifier`] is an example model.
//! candle computes the loss and the gradients of a rank's part of the batch; mgpu averages gradients over ranks and
//! updates the parameters.
#![forbid(unsafe_code)]

mod classifier;
mod replica;

pub use classifier::Classifier;
pub use replica::{Error, Replica};
