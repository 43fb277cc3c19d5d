//! The arithmetic of data-parallel training.
//!
//! Each operation has a module of its own. The module states the contract (shapes, formula, source) and tests every
//! implementation against it; the implementations are its submodules, `cpu` and, with the feature `cuda`, `cuda`.
//!
//! - Networks: [`conv`], [`dense`], [`pool`], [`activation`], [`gelu`], [`dropout`], [`norm`], [`loss`],
//!   [`loss_scale`], [`optimizer`], [`scale`].
//! - Data and parameters: [`gather`] assembles batches, [`arena`] and [`digest`] treat all parameters of a network as
//!   one contiguous slice.
//! - Building blocks: register tiles for all matrix products in f32, [`tile_engine`] for those of bf16, [`transpose`] for
//!   the layout of images, [`threads`] for the cores of one rank and [`peak`] for their peak performance, [`rng`] for
//!   random numbers that depend on seed, stream and counter only.
//! - [`level`] names the instruction sets that they are all compiled for.
//! - Collectives: [`dtype`], [`reduce`], [`copy`] and, between hosts, [`checksum`](mod@checksum).
//! - GPUs, with the feature `cuda` (on by default; nothing needs to be installed to build): [`cuda`].
//!
//! The caller allocates inputs, outputs and scratch, and reuses them from step to step; a layer holds only its packed
//! weights and partial sums. A shape that does not fit is a programming error and panics.

pub mod activation;
mod aligned;
pub mod arena;
pub mod checksum;
pub mod conv;
pub mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dense;
pub mod digest;
pub mod dropout;
pub mod dtype;
pub mod gather;
pub mod gelu;
mod gemm;
pub mod level;
pub mod loss;
pub mod loss_scale;
pub mod norm;
pub mod optimizer;
mod passes;
pub mod peak;
pub mod pool;
mod precision;
pub mod reduce;
pub mod rng;
pub mod scale;
pub mod schedule;
mod scratch;
mod simd;
mod storage;
pub mod threads;
pub mod tile_engine;
pub mod transpose;

#[cfg(test)]
mod reference;

pub use aligned::AlignedVec;
pub use dtype::{DType, Element};
pub use precision::Precision;
pub use reduce::ReduceOp;
pub use scratch::Scratch;
pub use storage::Storage;
pub use threads::Threads;
