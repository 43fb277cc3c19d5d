//! The flags for how ranks train together, the same in all programs that train.

use std::fmt::Display;

use clap::{Args, ValueEnum};
use mgpu::Compression;
use mgpu::optimizer::OptimizerConfig;
use mgpu::{DataParallelConfig, ShardFrom};

/// How ranks train together.
#[derive(Debug, Args)]
pub(crate) struct Parallel {
    /// Mebibytes of gradients in one all-reduce, such as 0.25 [default: 1; on GPUs 16].
    #[arg(long, value_name = "MIB", value_parser = mebibytes)]
    bucket: Option<usize>,
    /// Keep on each rank the optimizer's state of its own shard of the parameters only: auto (of buckets that are large
    /// enough to gain by it; on GPUs of none), on (of all) or off.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Sharding::Auto, hide_possible_values = true)]
    shard_optimizer: Sharding,
    /// Reduce gradients on a thread of its own, under the rest of the backward pass: for where a core is to spare beside
    /// all ranks' threads. On GPUs this is always so.
    #[arg(long)]
    overlap: bool,
    /// Cut each rank's batch into this many micro-batches, of which gradients are computed one after the other and
    /// exchanged once: less memory for the same step.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = positive)]
    accumulate: usize,
    /// Cut the batch of all ranks into this many micro-batches, a power of two, and sum their gradients in an order that
    /// does not depend on the number of ranks: 1, 2, 4, … up to M of them then train the same weights to the last bit,
    /// with as many images a step and --threads (here 1 by default). Batch normalisation is of micro-batches.
    #[arg(long, value_name = "M", value_parser = positive, conflicts_with = "accumulate")]
    world_size_invariant: Option<usize>,
    /// Scale gradients down to this norm, all tensors' together, where they exceed it.
    #[arg(long, value_name = "X", value_parser = above_0)]
    clip_norm: Option<f64>,
    /// What gradients travel as between ranks: f32, or bf16, which rounds them.
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = CommDtype::F32, hide_possible_values = true)]
    gradients: CommDtype,
}

/// What of the optimizer is sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sharding {
    Auto,
    On,
    Off,
}

/// How gradients travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CommDtype {
    F32,
    Bf16,
}

impl Parallel {
    /// Bytes of gradients in one all-reduce, where the user says.
    pub(crate) fn bucket_bytes(&self) -> Option<usize> {
        self.bucket
    }

    /// What of the optimizer is sharded, where the user says.
    pub(crate) fn sharding(&self) -> Option<&'static str> {
        match self.shard_optimizer {
            Sharding::Auto => None,
            Sharding::On => Some("on"),
            Sharding::Off => Some("off"),
        }
    }

    /// Threads of a rank: as many as asked for, else its share of the cores. That depends on the number of ranks, and sums on
    /// the number of threads.
    pub(crate) fn threads(&self, asked: Option<u16>, share: usize) -> usize {
        let share = if self.is_world_size_invariant() { 1 } else { share };
        asked.map_or(share, usize::from)
    }

    /// The most that gradients may be together, if there is one.
    pub(crate) fn clip_norm(&self) -> Option<f64> {
        self.clip_norm
    }

    /// Whether gradients are rounded on their way.
    pub(crate) fn compresses(&self) -> bool {
        self.gradients == CommDtype::Bf16
    }

    /// Whether the number of ranks is to make no difference.
    pub(crate) fn is_world_size_invariant(&self) -> bool {
        self.world_size_invariant.is_some()
    }

    /// How many micro-batches there are, in words.
    pub(crate) fn describe_micro_batches(&self) -> String {
        match self.world_size_invariant {
            Some(all) => format!("{all} of all ranks"),
            None => format!("{} of each rank", self.accumulate),
        }
    }

    /// The parts that the `batch` images of each of `ranks` ranks are cut into.
    pub(crate) fn micro_batches(&self, batch: usize, ranks: u32) -> Result<usize, String> {
        let count = match self.world_size_invariant {
            None => self.accumulate,
            Some(all) if all.is_power_of_two() && all.is_multiple_of(ranks as usize) => all / ranks as usize,
            Some(all) => {
                return Err(format!(
                    "--world-size-invariant {all}: it should be a power of two, and a multiple of the {ranks} ranks"
                ));
            }
        };
        if batch.is_multiple_of(count) {
            Ok(count)
        } else {
            Err(format!("{batch} images a step on each rank cannot be cut into {count} micro-batches"))
        }
    }

    /// The flags by name, with what was asked for: all ranks need the same.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("--bucket", given(self.bucket.map(|bytes| bytes as f64 / f64::from(1 << 20)))),
            ("--shard-optimizer", self.sharding().unwrap_or("auto").to_owned()),
            ("--overlap", self.overlap.to_string()),
            ("--world-size-invariant", given(self.world_size_invariant)),
            ("--accumulate", self.accumulate.to_string()),
            ("--clip-norm", given(self.clip_norm)),
            ("--gradients", if self.compresses() { "bf16" } else { "f32" }.to_owned()),
        ]
    }

    /// What was asked for, in steps of `micro_batches` micro-batches.
    pub(crate) fn config(
        &self,
        optimizer: OptimizerConfig,
        threads: usize,
        micro_batches: usize,
    ) -> DataParallelConfig {
        let config = DataParallelConfig::new(optimizer, threads)
            .with_micro_batches(micro_batches)
            .with_shard_from(match self.shard_optimizer {
                Sharding::Auto => ShardFrom::Auto,
                Sharding::On => ShardFrom::Bytes(0),
                Sharding::Off => ShardFrom::Never,
            })
            .with_overlap(self.overlap)
            .with_clip_norm(self.clip_norm)
            .with_compression(if self.compresses() { Compression::Bf16 } else { Compression::None })
            .with_world_size_invariant(self.is_world_size_invariant());
        match self.bucket {
            Some(bytes) => config.with_bucket(bytes),
            None => config,
        }
    }
}

/// The value of a flag, in words.
pub(crate) fn given(value: Option<impl Display>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

/// The bytes of a bucket.
fn mebibytes(text: &str) -> Result<usize, String> {
    let bytes = text.parse().map(|mebibytes: f64| (mebibytes * f64::from(1 << 20)) as usize);
    let sensible = bytes.ok().filter(|bytes| (1 << 10..=1 << 30).contains(bytes));
    sensible.ok_or_else(|| "it should be a number from 0.001 to 1024".into())
}

/// A number above 0.
pub(crate) fn above_0(text: &str) -> Result<f64, String> {
    // The arithmetic is in f32, where larger ones are infinite and smaller ones 0.
    let number =
        text.parse().ok().filter(|number: &f64| *number as f32 > 0.0 && (*number as f32).is_finite());
    number.ok_or_else(|| "it should be a number above 0 that f32 can represent (1e-45 to 3.4e38)".into())
}

/// A whole number from 1.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "it should be a number from 1".into())
}
