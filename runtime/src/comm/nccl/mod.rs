//! Collectives through NCCL.
//!
//! | file | question |
//! |---|---|
//! | [`device`] | what does a training step call? |
//! | [`group`] | are the arguments of an operation compatible? |
//! | [`captured`] | how are operations captured and replayed? |
//! | [`call`] | which NCCL function does an operation call? |
//! | [`owner`] | which thread calls NCCL, and how is it aborted? |
//! | [`link`] | how do callers wait for it without ever hanging? |
//! | [`split`] | how are groups connected? |
//! | [`family`] | which communicators fail together? |
//! | [`remote`] | what do ranks of other hosts do? |
//! | [`shutdown`] | how do ranks shut down a communicator, also after errors? |
//! | [`registration`], [`registered`] | which buffers does NCCL access in place? |
//! | [`environment`] | how is NCCL told which interface to take? |
//! | [`host`], [`staging`] | how are host buffers transferred? |
//!
//! Every communicator has a thread, the [`owner`], which makes all NCCL calls. The caller checks the arguments and
//! passes them as data ([`call`]); the owner executes the call; the caller waits for it with a timeout, and checks
//! its peers meanwhile ([`link`]). The caller waits for the GPU in the same way.

mod call;
mod captured;
mod device;
mod environment;
mod family;
mod group;
mod host;
mod link;
mod owner;
mod registered;
mod registration;
mod remote;
mod shutdown;
mod split;
mod staging;

pub use captured::CapturedGroup;
pub use device::{DeviceCommunicator, Waitable};
pub(crate) use environment::set_variables;
pub use group::Group;
pub(crate) use host::host_communicator;
pub use registration::{BufferAccess, Registration};
pub(crate) use registration::{RegisteredMemory, RegistrationPolicy};
pub(crate) use shutdown::CollectiveCounters;
