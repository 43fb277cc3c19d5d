//! The command line.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;

use crate::parallel::positive;

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
    /// Run only checks whose name contains TEXT, for example `conv` or `backward_weights`. With --layers: only layers
    /// of the network TEXT, or whose description contains it.
    #[arg(long, value_name = "TEXT")]
    pub(super) only: Option<String>,
    /// Write all results to this file, as one JSON object.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Instead of the checks, measure memory bandwidth, the optimizer's share of it, and large matrix products.
    #[arg(long, conflicts_with_all = ["quick", "only", "compile_only"])]
    pub(super) bandwidth: bool,
    /// Instead of the checks, time every candidate (our own kernel and each algorithm of cuDNN or cuBLASLt, in each
    /// form) for every layer of the networks, pass and precision, beside the least time that the GPU allows.
    #[arg(long, group = "batched", conflicts_with_all = ["quick", "bandwidth", "compile_only"])]
    pub(super) layers: bool,
    /// Instead of the checks, measure copies between the host and every GPU and between GPUs, and check which GPUs access
    /// each other's memory. Prints one JSON object per line.
    #[arg(long, conflicts_with_all = ["quick", "bandwidth", "layers", "steps", "compile_only", "list", "json"])]
    pub(super) links: bool,
    /// Instead of the checks, count the kernels of a training step of each network in bf16 with --kernels builtin, and the
    /// bytes that they move, beside the least that a step can do with; and time the step.
    #[arg(long, group = "batched", conflicts_with_all = ["quick", "bandwidth", "compile_only"])]
    pub(super) steps: bool,
    /// With --layers or --steps: batch sizes, in images [default: 1024 and 128; with --layers on a fake GPU 2].
    #[arg(long, value_name = "N", num_args = 1.., value_delimiter = ',', requires = "batched", value_parser = positive)]
    pub(super) batch: Vec<usize>,
    /// With --layers: begin no further pass after this many seconds. A pass takes a few seconds at most on a large GPU.
    #[arg(long, value_name = "SECONDS", requires = "layers")]
    pub(super) budget: Option<u64>,
    /// With --layers: the rate that bounds are computed from, instead of a measurement. NAME is bf16, tf32 or f32 (in
    /// TFLOP/s), or copy (in GB/s).
    #[arg(long, value_name = "NAME=RATE", requires = "layers")]
    pub(super) peak: Vec<Rate>,
    /// List all kernels and their source files.
    #[arg(long, conflicts_with_all = ["bandwidth", "layers", "compile_only"])]
    pub(super) list: bool,
    /// Compile all kernels for all architectures. Needs no GPU.
    #[arg(long)]
    pub(super) compile_only: bool,
    /// With --compile-only: print registers, shared memory and spills of each kernel.
    #[arg(long, requires = "compile_only")]
    pub(super) table: bool,
}

/// The peak rate of products in a precision, in TFLOP/s, or of copies, in GB/s.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rate {
    pub(super) of: String,
    pub(super) value: f64,
}

impl std::str::FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (of, value) = text.split_once('=').ok_or("it should be NAME=RATE, such as bf16=800")?;
        if !["bf16", "tf32", "f32", "copy"].contains(&of) {
            return Err(format!("there is no rate `{of}`; known are bf16, tf32, f32 and copy"));
        }
        let value = value.parse().ok().filter(|value: &f64| value.is_finite() && *value > 0.0);
        Ok(Rate { of: of.to_owned(), value: value.ok_or("the rate should be a number above 0")? })
    }
}

impl Args {
    pub(super) fn seed(&self) -> u64 {
        let time = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_secs());
        self.seed.unwrap_or_else(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_parsed() {
        assert_eq!("copy=3350.5".parse(), Ok(Rate { of: "copy".into(), value: 3350.5 }));
        for wrong in ["", "bf16", "int8=1", "bf16=", "bf16=0", "bf16=-1", "bf16=inf", "bf16=fast"] {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong}");
        }
    }
}
