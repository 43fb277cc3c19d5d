//! A candle model, trained data-parallel by mgpu.
//!
//! [`Replica`] is the bridge, for any model whose variables are in a `VarMap`; [`Classifier`] is a model to cross it with.
//! candle computes loss and gradients of a rank's part of the batch; mgpu averages the gradients over ranks and updates the
//! parameters.
#![forbid(unsafe_code)]

mod classifier;
mod replica;

pub use classifier::Classifier;
pub use replica::{Error, Replica};
