//! (being written)
pub mod bucket;
pub mod checkpoint;
pub mod comm;
mod error;
pub mod layout;
pub mod optimizer;
pub mod process;
pub mod progress;
pub mod protocol;
pub mod rendezvous;
pub mod replicate;
pub mod sampler;
mod shm;
pub mod step;
pub mod world;

pub use comm::{Algorithm, Buffer, Communicator, DType, Element, Pending, ReduceOp};
pub use error::{Error, Result};
pub use layout::{Layout, TensorSpec};
pub use sampler::Sampler;
pub use step::{DataParallel, GradientSink};
pub use world::{Backend, World};
