//! A GPU, as far as training needs one: memory, streams, kernels compiled at run time, graphs.
//!
//! No library is linked. The driver's library, the run-time compiler and the libraries of ready-made kernels are
//! opened when they are first needed, so that one binary runs on machines with and without them; if one is missing,
//! the [`Error`] lists where it was searched for ([`libraries`]).
//!
//! From source to launch: an operation keeps its CUDA source beside its Rust code ([`Source`]); [`Device::function`]
//! compiles it for this GPU's architecture, caches the result on disk and loads it; [`Stream::launch`] enqueues it on
//! a stream. A captured [`Graph`] replays a whole sequence of launches for the cost of one.
//!
//! For matrix products and convolutions there are also the libraries' algorithms. If the libraries are installed,
//! autotuning selects the fastest of their algorithms and this crate's kernels when a layer is set up;
//! [`AutotuneOptions`] says what it may select.
//!
//! Everything on a stream executes later than the call that enqueued it. Dropping memory is safe nevertheless:
//! freeing it waits for the work that may use it, and for the graphs that may. The caller orders work between
//! streams, with [`Event`]s.
//!
//! `cudarc` provides the types of the bindings; this crate opens the libraries and looks up their functions itself.

pub(crate) mod algorithm;
mod arguments;
pub(crate) mod autotune;
mod cache;
mod captures;
pub mod compare;
mod compile;
pub(crate) mod counters;
mod device;
mod driver;
pub(crate) mod elements;
mod error;
mod graph;
mod launches;
pub mod libraries;
mod memory;
mod peer;
mod sources;
mod state;
mod stream;
mod timing;
pub(crate) mod trial;
mod usage;
mod uses;

pub use arguments::{Arg, Grid};
pub use autotune::{AutotuneOptions, Libraries, Pass};
pub(crate) use compile::kernel_source;
pub use compile::{ARCHITECTURES, Compiled, PRELUDE, Source, compile_for, compiler_version};
pub use counters::Counters;
pub use device::{Device, Function};
pub use error::{Error, Result};
pub use graph::Graph;
pub use launches::Launch;
pub use memory::{Deallocator, Memory, Pinned, View};
pub use sources::sources;
pub use state::StepState;
pub use stream::{Event, Stream};
pub use timing::TimedEvent;
pub use usage::Usage;
