//! The data-parallel training runtime.
//!
//! Every rank is a process (or a thread) with its own copy of the weights, made equal once. In each step a rank
//! computes gradients on its own part of the batch, the gradients are averaged over all ranks, and each rank
//! applies its own optimizer. The same program runs alone: without a launcher the world has one rank.
//!
//! The way of a gradient is the way through this crate:
//!
//! | | question |
//! |---|---|
//! | [`World`] | who am I, and who are the others? |
//! | [`Store`], of `mgpu-control` | how do ranks find each other, and exchange what is small? |
//! | [`Communicator`], [`comm`] | how do buffers of all ranks become one? |
//! | [`replicate`](mod@replicate) | how do all begin with the same weights, and how is that proved? |
//! | [`Layout`], [`ParameterGroup`] | what are the model's tensors, and how is each trained? |
//! | [`Reducer`] | how are gradients averaged, for an optimizer of the program's own? |
//! | [`DataParallel`], [`DeviceDataParallel`] | what happens in a training step, on a host and on a GPU? |
//! | [`optimizer`] | how do parameters follow their gradients? |
//! | [`Sampler`] | which samples are mine? |
//! | [`checkpoint`] | how does a run resume after an end? |
//! | [`timeline`] | what did every rank do when? |
//! | [`output_file`] | how is a file written beside a training, and nothing lost? |
//!
//! ```
//! # fn main() -> mgpu::Result<()> {
//! // Two ranks as threads; under `mgpurun` it would be `World::from_env()` in two processes.
//! let worlds = mgpu::World::threads(2)?;
//! std::thread::scope(|scope| {
//!     for mut world in worlds {
//!         scope.spawn(move || -> mgpu::Result<()> {
//!             let mut comm = world.communicator()?;
//!             let mut values = [world.rank() as f32, 1.0];
//!             comm.all_reduce_slice(&mut values, mgpu::ReduceOp::Sum)?;
//!             assert_eq!(values, [1.0, 2.0]);
//!             Ok(())
//!         });
//!     }
//! });
//! # Ok(())
//! # }
//! ```
//!
//! # What it does not do to its host
//! The runtime installs no signal handler, prints nothing and never ends the process: those belong to the program
//! that embeds it. (Unless it is asked to: `mgpurun --inject`.) It starts no thread but one for [`World::threads`], one in rank
//! 0 where another launcher than `mgpurun` started the ranks, one for each NCCL communicator, one while a
//! [`checkpoint::Writer`] is writing, and those the CPU kernels are asked to use.

mod bucket;
pub mod checkpoint;
mod clock;
pub mod comm;
mod error;
mod layout;
mod membership;
mod memory;
pub mod optimizer;
pub mod output_file;
mod parameter_group;
pub mod replicate;
mod sampler;
mod step;
mod survivor;
pub mod timeline;
mod world;

pub use mgpu_control::progress::Phase;
pub use mgpu_control::protocol;
pub use mgpu_control::rendezvous::Store;
pub(crate) use mgpu_control::{control_group, inject, process, progress, rendezvous, shm};

pub use comm::{Algorithm, Buffer, Communicator, DType, Element, Pending, ReduceOp};
#[cfg(feature = "cuda")]
pub use comm::{CapturedGroup, DeviceCommunicator, Group, Waitable};
pub use error::{Error, Result};
pub use layout::{Layout, TensorSpec};
pub use parameter_group::ParameterGroup;
pub use sampler::{Sampler, SamplerConfig, evaluation_shard};
#[cfg(feature = "cuda")]
pub use step::device::{self, DeviceDataParallel};
pub use step::{
    Compression, DataParallel, DataParallelConfig, GradientSink, MicroBatch, NamedArena, Reducer,
    ReducerConfig, Reduction, ShardFrom, Unused,
};
pub use world::{Backend, World};
