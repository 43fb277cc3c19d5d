//! The command line.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use mgpu::{Algorithm, DType, ReduceOp};
use serde::Serialize;

use super::collective::Collective;
use crate::print;

/// Benchmarks a collective for a range of sizes, in place. Prints one JSON object per size.
#[derive(Debug, Parser)]
#[command(name = "collective_perf", version)]
pub(super) struct Args {
    /// Smallest size in bytes, or with a suffix K, M or G in KiB, MiB or GiB, as in nccl-tests.
    #[arg(long, default_value_t = 4, value_name = "BYTES", value_parser = size)]
    pub(super) min: u64,
    /// Largest size in bytes. Sizes are rounded up to whole elements and, for sharded collectives, to equal shards.
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES", value_parser = size)]
    pub(super) max: u64,
    /// Factor from one size to the next.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub(super) factor: u32,
    /// Collective. A size is that of a rank's whole buffer, all shards together.
    #[arg(long, default_value = "all_reduce", value_name = "NAME")]
    pub(super) collective: Collective,
    /// Element type: f32, f64, f16, bf16, i32, i64 or u8.
    #[arg(long, default_value = "f32")]
    pub(super) dtype: DType,
    /// Reduction: sum, avg, min, max or prod.
    #[arg(long, default_value = "sum")]
    pub(super) op: ReduceOp,
    /// Algorithm of the all-reduce: auto, eager (small sizes only), direct or ring.
    #[arg(long, default_value = "auto")]
    pub(super) algo: Algorithm,
    /// Buffer memory: arena (shared memory that peers access directly) or private; with the nccl backend device or
    /// private. The default is the first of the two.
    #[arg(long, value_name = "KIND", hide_possible_values = true)]
    pub(super) buffers: Option<Buffers>,
    /// Where private buffers begin: this many bytes after the beginning of a page. Large memory of malloc usually begins
    /// at 16, that of PyTorch at 64.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(..4096))]
    pub(super) offset: Option<u16>,
    /// Verify every element of one run of each size.
    #[arg(long)]
    pub(super) check: bool,
    /// Also measure how long the memory traffic of an all-reduce takes by itself (keys bound_us and scale_gbps).
    #[arg(long)]
    pub(super) bound: bool,
    /// Results of other programs (keys impl, ranks, bytes, us_p50 and optionally collective). Prints a table of
    /// ratios to standard error at the end.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) vs: Option<PathBuf>,
}

/// Kinds of buffer memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Buffers {
    /// Shared memory that peers access directly.
    Arena,
    /// Memory of one rank only.
    Private,
    /// GPU memory.
    Device,
}

/// Parses a size, such as 4096 or 64M.
fn size(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.as_bytes() {
        [.., b'K' | b'k'] => (&text[..text.len() - 1], 10),
        [.., b'M' | b'm'] => (&text[..text.len() - 1], 20),
        [.., b'G' | b'g'] => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let bytes = number.parse().ok().and_then(|number: u64| number.checked_mul(1 << shift));
    let sensible = bytes.filter(|bytes| (1..1 << 46).contains(bytes));
    sensible.ok_or_else(|| {
        "it should be a number of bytes, such as 4096, 64K, 64M or 1G, from 1 to 64 TiB".into()
    })
}

impl Args {
    /// Parses the arguments of this process. Exits with a usage error if they are incompatible.
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
            return Err(format!(
                "--algo {algo} works only with all_reduce, not with --collective {collective}"
            ));
        }
        if let Some(offset) = self.offset {
            if self.buffers != Some(Buffers::Private) {
                return Err("--offset works only with --buffers private".into());
            }
            if !usize::from(offset).is_multiple_of(self.dtype.size()) {
                return Err(format!("--offset {offset} is not a multiple of the size of {}", self.dtype));
            }
        }
        Ok(())
    }

    /// The sizes to measure in bytes: multiples of `unit`, ascending.
    pub(super) fn sizes(&self, unit: usize) -> Vec<usize> {
        let next = |size: &u64| Some(size.saturating_mul(self.factor.into()));
        let wanted = std::iter::successors(Some(self.min), next).take_while(|size| *size <= self.max);
        let mut sizes: Vec<usize> = wanted.map(|size| (size as usize).next_multiple_of(unit)).collect();
        // Small sizes may round up to the same size.
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
    fn sizes_may_have_suffixes() {
        let sizes = ["1", "3k", "64M", "1G", "65535G"].map(|text| size(text).ok());
        assert_eq!(sizes, [Some(1), Some(3 << 10), Some(64 << 20), Some(1 << 30), Some(65535 << 30)]);
        for refused in
            ["", "0", "K", "-1", "1.5M", "1KiB", "65536G", "99999999999999999999", "18014398509481985K", "é"]
        {
            assert!(size(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn contradicting_arguments_are_errors() {
        let check = |arguments: &str| parsed(arguments).check_consistent();
        assert_eq!(check("--min 8 --max 8"), Ok(()));
        assert_eq!(check("--min 8 --max 4"), Err("--min 8 is larger than --max 4".into()));
        let refused = check("--algo ring --collective broadcast");
        assert_eq!(
            refused,
            Err("--algo ring works only with all_reduce, not with --collective broadcast".into())
        );
    }
}
