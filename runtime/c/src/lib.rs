//! The C interface of `mgpu`. `include/mgpu.h` is generated from this crate by `regenerate.sh`; its beginning has the
//! rules that hold for all functions (they are in `cbindgen.toml`).
//!
//! | file | question |
//! |---|---|
//! | `status` | how is an error told to C? |
//! | `call` | how does a call never panic, and which pointers are refused? |
//! | `structs` | how can structs grow without breaking programs? |
//! | `values` | which numbers are types and reductions? |
//! | `world` | who am I, should I stop, what am I doing? |
//! | `interrupt` | how does Ctrl-C end a wait? |
//! | `memory` | which memory do ranks access in place? |
//! | `communicator`, `collectives` | groups, and all operations on host memory |
//! | `device` | operations on GPU memory |
//! | `layout`, `reducer`, `checkpoint` | the model's tensors, their gradients, their files |
//!
//! A handle is a pointer to a boxed struct. Every handle may be used by several threads: what is not shared in Rust is
//! behind a lock here.
#![allow(clippy::missing_safety_doc, reason = "the rules of all pointers are at the beginning of the header")]

mod call;
mod checkpoint;
mod collectives;
mod communicator;
#[cfg(feature = "cuda")]
mod device;
mod interrupt;
mod layout;
mod memory;
mod reducer;
mod status;
mod structs;
mod values;
mod world;

pub use checkpoint::*;
pub use collectives::*;
pub use communicator::*;
#[cfg(feature = "cuda")]
pub use device::*;
pub use interrupt::*;
pub use layout::*;
pub use memory::*;
pub use reducer::*;
pub use status::*;
pub use values::*;
pub use world::*;
