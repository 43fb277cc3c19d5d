//! The arithmetic of data-parallel training.
//!
//! Each operation lives under its own name. Its module states the contract (shapes, formula, source) and tests
//! every implementation against it; the implementations are siblings beneath, `cpu` first.
//!
//! - Networks: [`conv`], [`dense`], [`pool`], [`activation`], [`gelu`], [`dropout`], [`norm`], [`loss`], [`optimizer`], [`scale`].
//! - Around them: [`gather`] fills batches, [`arena`] and [`digest`] treat all parameters of a network as one slice.
//! - Beneath them: register tiles for all products, [`transpose`] for the order of images, [`threads`] for the cores of one rank
//!   and the [`peak`] they have, [`rng`] for numbers that do not depend on who draws them.
//! - [`level`] names the instruction sets they are all compiled for.
//! - Collectives: [`dtype`] and [`reduce`].
//! - GPUs, with the feature `cuda` (on by default; nothing is needed to build): [`cuda`].
//!
//! The caller brings inputs, outputs and scratch, and keeps them from step to step; a layer keeps no more than its packed
//! weights and partial sums. A shape that does not fit is a mistake of the program and panics.

pub mod activation;
mod aligned;
pub mod arena;
pub mod conv;
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
pub mod norm;
pub mod optimizer;
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
