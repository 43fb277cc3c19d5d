//! What the suites share: bodies that run in threads and in processes alike, and programs under supervision.
//!
//! The programs under test are built as binaries of this package (`t-mgpurun`, `t-train_mnist`, …), each nothing
//! but the real one's `main`: cargo tells a test where the binaries of its own package are, and of no other.
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
