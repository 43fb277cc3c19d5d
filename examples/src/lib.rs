//! What a user of the runtime copies from.
//!
//! Each program is a module here with a `main` of its own, and a binary that calls it. Those of one file, with fewer
//! than 150 lines, are for reading, in this order:
//!
//! | program | shows |
//! |---|---|
//! | [`hello_ring`] | world, communicator, send and receive |
//! | [`all_reduce`] | one sum over all ranks |
//! | [`train_mlp`] | data-parallel training of a small network |
//! | [`own_optimizer`] | the same with an optimizer that the runtime does not have |
//! | [`embed`] | a program that starts its own ranks, and one that is handed a world |
//!
//! (`examples/candle`, a package of its own, trains a model of the candle framework.) Those with a folder are for use:
//!
//! | program | shows |
//! |---|---|
//! | [`train_mnist`] | data-parallel training with everything that belongs to it |
//! | [`golden_check`] | the same networks against recorded reference runs |
//! | [`gpu_check`] | every CUDA kernel against the CPU |
//! | [`collective_perf`] | how long an all-reduce takes, or another collective |
//!
//! They share [`nets`], the networks, and [`data`], the digits.
#![forbid(unsafe_code)]
// They panic when a write fails: `print` has what does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod all_reduce;
pub mod collective_perf;
pub mod data;
pub mod embed;
mod exit;
pub mod golden_check;
pub mod gpu_check;
pub mod hello_ring;
pub mod nets;
pub mod own_optimizer;
mod parallel;
mod print;
pub mod train_mlp;
pub mod train_mnist;
