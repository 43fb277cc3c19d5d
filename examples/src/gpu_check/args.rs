//! The command line.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;

/// Checks every CUDA kernel on a GPU against the CPU. Exit code 1 if a result is wrong.
#[derive(Debug, Parser)]
#[command(name = "gpu_check", version)]
pub(super) struct Args {
    /// Index of the GPU.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) device: u32,
    /// Seed of all random numbers [default: the time].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Check only few and small shapes, and no kernels of libraries unless --only layers requests them.
    #[arg(long)]
    pub(super) quick: bool,
    /// Run only checks whose name contains TEXT, for example `conv` or `backward_weights`.
    #[arg(long, value_name = "TEXT")]
    pub(super) only: Option<String>,
    /// Write all results to this file, as one JSON object.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Instead of the checks, measure memory bandwidth, the optimizer's share of it, and large matrix products.
    #[arg(long, conflicts_with_all = ["quick", "only", "compile_only"])]
    pub(super) bandwidth: bool,
    /// List all kernels and their source files.
    #[arg(long, conflicts_with_all = ["bandwidth", "compile_only"])]
    pub(super) list: bool,
    /// Compile all kernels for all architectures. Needs no GPU.
    #[arg(long)]
    pub(super) compile_only: bool,
    /// With --compile-only: print registers, shared memory and spills of each kernel.
    #[arg(long, requires = "compile_only")]
    pub(super) table: bool,
}

impl Args {
    pub(super) fn seed(&self) -> u64 {
        let time = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_secs());
        self.seed.unwrap_or_else(time)
    }
}
