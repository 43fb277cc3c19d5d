//! The control plane: everything that a launcher and its ranks share. It contains no computation.
//!
//! The launcher depends on this package alone; the runtime (`mgpu`) builds its world and its communicators on it.
//!
//! | module | question |
//! |---|---|
//! | [`protocol`] | which environment variables tell a process that it is a rank? |
//! | [`rendezvous`] | how do ranks find each other and exchange small values? |
//! | [`nodes`] | how do the hosts of one job connect, authenticate each other, and share a rendezvous? |
//! | [`nccl`] | do the hosts reach each other on the interface that NCCL takes? |
//! | [`progress`] | what is every rank doing, and which rank does it blame for its failure? |
//! | [`process`] | how are child processes started, monitored and killed with their parent? |
//! | [`spawn_batch`] | how do many processes start without waiting for each other? |
//! | [`digest`] | do two processes or hosts run the same program? |
//! | [`control_group`] | which cgroup limits apply to this process? |
//! | [`shm`] | how do processes share memory that the kernel always cleans up? |
//! | [`stop_signals`] | which signals ask a rank to stop, and which end it? |
//! | [`tile_registers`] | may this process use the matrix registers of its processor? |
//! | [`inject`] | how are faults injected for tests? |
//!
//! Training programs use `mgpu` instead: the interfaces here change with the launcher and the runtime, which always come
//! from the same release.

pub mod control_group;
pub mod digest;
#[doc(hidden)]
pub mod error;
pub mod inject;
pub mod nccl;
pub mod nodes;
pub mod process;
pub mod progress;
pub mod protocol;
pub mod rendezvous;
pub mod shm;
pub mod spawn_batch;
pub mod stop_signals;
pub mod tile_registers;

pub use error::{Error, Result};
