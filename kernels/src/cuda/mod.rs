//! A GPU, as far as training needs one: memory, streams, kernels compiled on the spot, graphs.
//!
//! Nothing here is linked. The driver's library, the run-time compiler and the libraries of ready-made kernels are
//! opened when they are first needed, so that one binary runs on machines with and without them; what is missing is an
//! [`Error`] that says where it was looked for ([`libraries`]).
//!
//! The way of a kernel: an operation keeps its CUDA source beside its Rust code ([`Source`]); [`Device::function`] has
//! it compiled for this very GPU, keeps the result on disk and loads it;
//! [`Stream::launch`] puts it behind the work that the stream has already. A captured [`Graph`] repeats a whole
//! sequence of launches at the price of one.
//!
//! Matrix products and convolutions have a second way: the libraries' algorithms, where they are installed and win a race
//! against this crate's kernels when a layer is set up, as [`AutotuneOptions`] say.
//!
//! Everything on a stream happens later than the call that asked for it. Memory is safe from that: freeing it waits for
//! the work that may use it, and for the graphs that may. Order between streams is the caller's affair, by [`Event`]s.
//!
//! `cudarc` provides the bindings and opens libraries by names of its own. It panics where a library or a function is
//! missing, so nothing of it is called before [`Device::count`] has looked at both.

pub(crate) mod algorithm;
mod arguments;
pub(crate) mod autotune;
mod cache;
mod captures;
mod compile;
mod device;
pub(crate) mod elements;
mod error;
mod graph;
pub mod libraries;
mod memory;
mod sources;
mod state;
mod stream;
mod usage;

pub use arguments::{Arg, Grid};
pub use autotune::{AutotuneOptions, Libraries};
pub use compile::{ARCHITECTURES, Compiled, PRELUDE, Source, compile_for, compiler_version};
pub use device::{Device, Function};
pub use error::{Error, Result};
pub use graph::Graph;
pub use memory::{Memory, Pinned, View};
pub use sources::sources;
pub use state::StepState;
pub use stream::{Event, Stream};
pub use usage::Usage;
