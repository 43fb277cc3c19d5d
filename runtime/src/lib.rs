//! The data-parallel training runtime.
//!
//! Every rank is a process (or a thread) with its own copy of the weights, made equal once. In each step a rank
//! computes gradients on its own part of the batch, the gradients are averaged over all ranks, and each rank
//! applies its own optimizer. The same program runs alone: without a launcher the world has one rank.
//!
//! The modules, in the order in which a gradient passes through them:
//!
//! | | question |
//! |---|---|
//! | [`World`] | who am I, and who are the others? |
//! | [`Store`], of `mgpu-control` | how do ranks find each other and exchange small values? |
//! | [`Communicator`], [`comm`] | how are buffers of all ranks combined (collectives)? |
//! | [`replicate`](mod@replicate) | how do all ranks start with the same weights, and how is this verified? |
//! | [`Layout`], [`ParameterGroup`] | what are the model's tensors, and how is each trained? |
//! | [`Reducer`] | how are gradients averaged, if the program has its own optimizer? |
//! | [`DataParallel`], [`DeviceDataParallel`] | what happens in a training step, on a host and on a GPU? |
//! | [`optimizer`] | how do gradients update the parameters? |
//! | [`Sampler`] | which samples are mine? |
//! | [`checkpoint`] | how does a run resume after it has ended? |
//! | [`timeline`] | what did every rank do when? |
//! | [`nvtx`] | what do NVIDIA's profilers show of that? |
//! | [`output_file`] | how are by-product files of a training written without losing data? |
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
//! The runtime prints nothing and never ends the process: these belong to the program that embeds it. (The only exception
//! is `mgpurun --inject`, which asks for faults.) It handles no signal, unless the program asks whether it should stop
//! ([`World::stop_requested`]). It starts threads only for:
//! [`World::threads`] (one); rank 0 under another launcher than `mgpurun` (one); each NCCL communicator (one); a
//! [`checkpoint::Writer`] while it writes (one); [`ReducerConfig::overlap`] (one); and the CPU kernels, as many as
//! they are asked to use.

mod bucket;
pub mod checkpoint;
mod clock;
pub mod comm;
mod error;
mod interruption;
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
pub use nvtx;

pub use comm::{Algorithm, Buffer, Communicator, DType, Element, Pending, ReduceOp};
#[cfg(feature = "cuda")]
pub use comm::{BufferAccess, CapturedGroup, DeviceCommunicator, Group, Registration, Waitable};
pub use error::{Error, Result};
pub use layout::{Layout, TensorSpec};
pub use memory::available as available_memory;
pub use parameter_group::ParameterGroup;
pub use sampler::{Sampler, SamplerConfig, batch_part, evaluation_shard};
#[cfg(feature = "cuda")]
pub use step::device::{self, DeviceDataParallel};
pub use step::{
    Compression, DataParallel, DataParallelConfig, GradientSink, MicroBatch, NamedArena, Placement, Reducer,
    ReducerConfig, Reduction, ShardFrom, Unused,
};
pub use world::{Backend, World};
