//! The control plane: what a launcher and its ranks share, and nothing that computes.
//!
//! The launcher depends on this package alone; the runtime (`mgpu`) builds its world and its communicators on it.
//!
//! | module | question |
//! |---|---|
//! | [`protocol`] | which environment variables tell a process that it is a rank? |
//! | [`rendezvous`] | how do ranks find each other, and exchange what is small? |
//! | [`progress`] | what is every rank doing, and who holds whom responsible? |
//! | [`process`] | how are processes started, tied to each other and watched? |
//! | [`control_group`] | which limits has the system set for this process? |
//! | [`shm`] | how do processes share memory that leaves nothing behind? |
//! | [`inject`] | how is a fault tried before it happens? |
//!
//! Programs that train use `mgpu`: the interfaces here follow the needs of the launcher and the runtime, which are of
//! the same release.

pub mod control_group;
#[doc(hidden)]
pub mod error;
pub mod inject;
pub mod process;
pub mod progress;
pub mod protocol;
pub mod rendezvous;
pub mod shm;

pub use error::{Error, Result};
