//! Shared code of the test suites: test bodies for threads and processes, and supervised programs.
//!
//! The programs under test are binaries of this package (`t-mgpurun`, `t-train_mnist`, …) that only call the real
//! `main`, because cargo gives tests the paths of binaries of their own package only.
#![forbid(unsafe_code)]

pub mod c_library;
pub mod checkpoints;
pub mod collectives;
pub mod cores;
pub mod device;
pub mod fake_gpu;
pub mod faults;
pub mod hosts;
pub mod mnist;
pub mod models;
pub mod page;
pub mod process;
pub mod threads;
pub mod tracer;

/// The programs of the examples: names, and paths as the tests have built them. (A macro, because Cargo tells these
/// paths to test programs only.)
#[macro_export]
macro_rules! example_programs {
    () => {
        [
            ("all_reduce", env!("CARGO_BIN_EXE_t-all_reduce")),
            ("allreduce_perf", env!("CARGO_BIN_EXE_t-allreduce_perf")),
            ("collective_perf", env!("CARGO_BIN_EXE_t-collective_perf")),
            ("embed", env!("CARGO_BIN_EXE_t-embed")),
            ("ensemble", env!("CARGO_BIN_EXE_t-ensemble")),
            ("golden_check", env!("CARGO_BIN_EXE_t-golden_check")),
            ("gpu_check", env!("CARGO_BIN_EXE_t-gpu_check")),
            ("hello_ring", env!("CARGO_BIN_EXE_t-hello_ring")),
            ("own_optimizer", env!("CARGO_BIN_EXE_t-own_optimizer")),
            ("train_mlp", env!("CARGO_BIN_EXE_t-train_mlp")),
            ("train_mnist", env!("CARGO_BIN_EXE_t-train_mnist")),
        ]
    };
}
