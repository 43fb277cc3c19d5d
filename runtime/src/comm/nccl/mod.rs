//! Collectives through NCCL.
//!
//! | file | question |
//! |---|---|
//! | [`device`] | what does a training step call? |
//! | [`group`] | do the arguments of an operation go together? |
//! | [`captured`] | how are operations repeated? |
//! | [`call`] | which function of NCCL is that? |
//! | [`owner`] | who calls it, and how is it brought to an end? |
//! | [`link`] | how does one wait for it without ever hanging? |
//! | [`shutdown`] | how do ranks part, in peace or not? |
//! | [`host`], [`staging`] | how do buffers of the host get there? |
//!
//! Every communicator has a thread of its own, the [`owner`], which alone enters NCCL. A call goes: arguments are checked
//! and become data ([`call`]), the owner carries them out, the caller waits for it with a deadline and an eye on its peers
//! ([`link`]). What the GPU does later is waited for in the same way.

mod call;
mod captured;
mod device;
mod group;
mod host;
mod link;
mod owner;
mod shutdown;
mod staging;

pub use captured::CapturedGroup;
pub use device::{DeviceCommunicator, Waitable};
pub use group::Group;
pub(crate) use host::host_communicator;
pub(crate) use shutdown::CollectiveCounters;
