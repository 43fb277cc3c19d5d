//! Shared code of the test suites: test bodies for threads and processes, and supervised programs.
//!
//! The programs under test are binaries of this package (`t-mgpurun`, `t-train_mnist`, …) that only call the real
//! `main`, because cargo gives tests the paths of binaries of their own package only.
#![forbid(unsafe_code)]

pub mod checkpoints;
pub mod collectives;
pub mod device;
pub mod fake_gpu;
pub mod faults;
pub mod mnist;
pub mod models;
pub mod process;
pub mod threads;
pub mod tracer;
