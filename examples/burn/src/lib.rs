//! A burn model, trained data-parallel with mgpu.
//!
//! [`Replica`] connects any burn module on the CPU to mgpu; [`Classifier`] is an example module. burn computes the loss and
//! the gradients of a rank's part of the batch; mgpu averages gradients over ranks and updates the parameters.
#![forbid(unsafe_code)]

mod classifier;
mod replica;

pub use classifier::Classifier;
pub use replica::{Cpu, Error, Replica};
