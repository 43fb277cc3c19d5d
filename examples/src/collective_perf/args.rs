//! The command line.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use mgpu::{Algorithm, DType, ReduceOp};
use serde::Serialize;

use super::collective::Collective;
use crate::print;

/// Measures a collective by size, in place, one JSON object a line.
#[derive(Debug, Parser)]
#[command(name = "collective_perf", version)]
pub(super) struct Args {
    /// Smallest size in bytes.
    #[arg(long, default_value_t = 4, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..1 << 46))]
    pub(super) min: u64,
    /// Largest size in bytes. Sizes are rounded up to whole elements, and to equal shards where ranks have shards.
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..1 << 46))]
    pub(super) max: u64,
    /// Each size is this many times the one before.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub(super) factor: u32,
    /// Operation. A size is that of a rank's whole buffer, all shards together.
    #[arg(long, default_value = "all_reduce", value_name = "NAME")]
    pub(super) collective: Collective,
    /// Element type: f32, f64, f16, bf16, i32, i64 or u8.
    #[arg(long, default_value = "f32")]
    pub(super) dtype: DType,
    /// Reduction: sum, avg, min, max or prod.
    #[arg(long, default_value = "sum")]
    pub(super) op: ReduceOp,
    /// How an all-reduce is carried out: auto, eager (small sizes only), direct or ring.
    #[arg(long, default_value = "auto")]
    pub(super) algo: Algorithm,
    /// Memory of the buffers: arena or private, or under the nccl backend device or private. The first is the default.
    #[arg(long, value_name = "KIND", hide_possible_values = true)]
    pub(super) buffers: Option<Buffers>,
    /// Compare every element of one operation of each size with the expected result.
    #[arg(long)]
    pub(super) check: bool,
    /// Measure how long memory alone needs for the traffic of an all-reduce (keys bound_us and scale_gbps).
    #[arg(long)]
    pub(super) bound: bool,
    /// Lines of other programs (keys impl, ranks, bytes, us_p50 and perhaps collective): prints a table of ratios to
    /// standard error at the end.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) vs: Option<PathBuf>,
}

/// Where buffers lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Buffers {
    /// Memory that peers reach in place.
    Arena,
    /// A rank's own memory.
    Private,
    /// Memory of GPUs.
    Device,
}

impl Args {
    /// The arguments of this process. Ends it with a usage error where they do not go together.
    pub(super) fn parse_consistent() -> Self {
        let args: Args = print::parse_arguments();
        if let Err(problem) = args.check_consistent() {
            print::end(&Args::command().error(ErrorKind::ArgumentConflict, problem));
        }
        args
    }

    fn check_consistent(&self) -> Result<(), String> {
        if self.min > self.max {
            return Err(format!("--min {} is larger than --max {}", self.min, self.max));
        }
        if self.algo != Algorithm::Auto && self.collective != Collective::AllReduce {
            let (algo, collective) = (self.algo, self.collective);
            return Err(format!("--algo {algo} is for all_reduce alone, not for --collective {collective}"));
        }
        Ok(())
    }

    /// The sizes to measure, in bytes: each a multiple of `unit`, ascending.
    pub(super) fn sizes(&self, unit: usize) -> Vec<usize> {
        let next = |size: &u64| Some(size.saturating_mul(self.factor.into()));
        let wanted = std::iter::successors(Some(self.min), next).take_while(|size| *size <= self.max);
        let mut sizes: Vec<usize> = wanted.map(|size| (size as usize).next_multiple_of(unit)).collect();
        // Small sizes may round up to the same one.
        sizes.dedup();
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &str) -> Args {
        Args::parse_from(format!("collective_perf {arguments}").split_whitespace())
    }

    #[test]
    fn sizes_are_whole_shards_without_duplicates() {
        assert_eq!(parsed("--max 1024").sizes(4), [4, 16, 64, 256, 1024]);
        assert_eq!(parsed("--max 1024").sizes(4 * 8), [32, 64, 256, 1024]);
        assert_eq!(parsed("--min 1 --max 1 ").sizes(24), [24]);
        assert_eq!(
            parsed("--min 1 --max 70368744177663 --factor 4294967295").sizes(1),
            [1, u32::MAX as usize]
        );
    }

    #[test]
    fn contradicting_arguments_are_errors() {
        let told = |arguments: &str| parsed(arguments).check_consistent();
        assert_eq!(told("--min 8 --max 8"), Ok(()));
        assert_eq!(told("--min 8 --max 4"), Err("--min 8 is larger than --max 4".into()));
        let refused = told("--algo ring --collective broadcast");
        assert_eq!(
            refused,
            Err("--algo ring is for all_reduce alone, not for --collective broadcast".into())
        );
    }
}
