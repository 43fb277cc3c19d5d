//! What ranks compute on GPUs, on the fake libraries of `tests/gpu`.
//!
//! One program, because linking and starting many takes long. Each module is a suite, and its name begins the names of
//! its tests: `cargo test --package mgpu-tests --test gpus fake_gpu::`.

mod fake_gpu;
mod gpu_collectives;
mod gpu_faults;
mod gpu_hosts;
mod gpu_kernels;
mod gpu_libraries;
mod gpu_parallel;
mod gpu_registration;
mod gpu_training;
