//! Example programs for users of the runtime.
//!
//! Each program is a module with its own `main`, and a binary that calls it. Programs in a single file, with fewer
//! than 200 lines, are for reading, in this order:
//!
//! | program | shows |
//! |---|---|
//! | [`hello_ring`] | world, communicator, send and receive |
//! | [`all_reduce`] | an all-reduce over all ranks |
//! | [`train_mlp`] | data-parallel training of a small network |
//! | [`own_optimizer`] | the same with a custom optimizer |
//! | [`ensemble`] | several networks at once, each on a group of ranks |
//! | [`embed`] | a program that starts its own ranks, or is started by a launcher |
//!
//! (`examples/candle` and `examples/burn`, separate packages, train models of other frameworks.) Programs with a folder are for
//! use:
//!
//! | program | shows |
//! |---|---|
//! | [`train_mnist`] | complete data-parallel training |
//! | [`golden_check`] | the same networks against recorded reference runs |
//! | [`gpu_check`] | every CUDA kernel against the CPU |
//! | [`collective_perf`] | benchmark of all-reduce and other collectives |
//!
//! They share [`nets`], the networks, and [`data`], the digits.
#![forbid(unsafe_code)]
// The standard macros panic if a write fails; `print` has macros that do not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod all_reduce;
pub mod collective_perf;
pub mod data;
pub mod embed;
pub mod ensemble;
mod exit;
pub mod golden_check;
pub mod gpu_check;
pub mod hello_ring;
pub mod nets;
pub mod own_optimizer;
mod parallel;
mod pipeline;
mod print;
pub mod train_mlp;
pub mod train_mnist;
