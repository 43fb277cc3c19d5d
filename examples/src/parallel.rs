//! The flags for data-parallel training, shared by all training programs.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use mgpu::optimizer::OptimizerConfig;
use mgpu::{
    Communicator, Compression, DataParallelConfig, DeviceCommunicator, Placement, Reduction, ShardFrom, World,
};

/// Data-parallel options.
#[derive(Debug, Args)]
pub(crate) struct Parallel {
    /// Where the weights are: replicated (a copy on every rank), shared (on rank 0, which updates them; the others fetch
    /// them and hand in gradients), host (in host memory, where the CPU updates them) or layers (every rank has some
    /// of the layers; layers:K: K ranks share the layers, and such groups of ranks train in parallel).
    #[arg(long, value_name = "NAME", default_value_t = PlacementChoice::Replicated)]
    placement: PlacementChoice,
    /// With --placement layers: the layers before which the network is cut, such as 3,7. Layers are counted from 0, as in
    /// the lines of --profile and --show-kernels. Without it, rank 0 measures the layers at the start, and the cuts
    /// that make the slowest part fastest are used.
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', value_parser = positive)]
    cut: Vec<usize>,
    /// Bucket size in MiB: gradients reduced in one all-reduce, for example 0.25 [default: 1; on GPUs 16;
    /// on CPUs of several hosts 8, unless gradients are clipped].
    #[arg(long, value_name = "MIB", value_parser = mebibytes)]
    bucket: Option<usize>,
    /// Shard the optimizer state over ranks (ZeRO stage 1): auto (for buckets large enough to benefit; never on
    /// GPUs), on (all buckets) or off.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Sharding::Auto, hide_possible_values = true)]
    shard_optimizer: Sharding,
    /// Overlap the reduction of gradients with the rest of the backward pass, on an extra thread. Useful if each rank
    /// has a core to spare. On GPUs reductions always overlap.
    #[arg(long)]
    overlap: bool,
    /// Gradient accumulation: split each rank's batch into K micro-batches and reduce their gradients once a step.
    /// Takes less memory for the same step.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = positive)]
    accumulate: usize,
    /// World-size-invariant reduction: split the global batch into M micro-batches (M is a power of two) and sum
    /// their gradients in an order that does not depend on the number of ranks. With the same global batch size and
    /// the same --threads (default here: 1), training on 1, 2, 4, … up to M ranks gives bit-equal weights. Batch
    /// normalisation uses the statistics of each micro-batch.
    #[arg(long, value_name = "M", value_parser = positive, conflicts_with = "accumulate")]
    world_size_invariant: Option<usize>,
    /// Clip the global norm of all gradients to X.
    #[arg(long, value_name = "X", value_parser = above_0)]
    clip_norm: Option<f64>,
    /// Communication dtype of gradients: f32, or bf16, which rounds them.
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = CommDtype::F32, hide_possible_values = true)]
    gradients: CommDtype,
    /// How gradients are combined over ranks and micro-batches: mean or sum.
    ///
    /// With sum the optimizer is adapted to the larger gradients, so that it trains what mean does, up to rounding, and
    /// with a power of two of summands bit-equal. SGD's learning rate is divided by their number. Adam and RMSprop
    /// divide gradients by their own size: a divided learning rate would just train slower, so theirs stays, and epsilon
    /// is multiplied instead. The L2 penalty and --clip-norm are multiplied too.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = ReduceBy::Mean, hide_possible_values = true)]
    reduction: ReduceBy,
}

/// Where the weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlacementChoice {
    Replicated,
    Shared,
    Host,
    /// The layers are cut over so many ranks; over all, if none is given.
    Layers(Option<u32>),
}

impl FromStr for PlacementChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "replicated" => PlacementChoice::Replicated,
            "shared" => PlacementChoice::Shared,
            "host" => PlacementChoice::Host,
            "layers" => PlacementChoice::Layers(None),
            _ => {
                let ranks = text.strip_prefix("layers:").and_then(|ranks| ranks.parse().ok());
                let ranks = ranks.filter(|ranks: &u32| *ranks > 0);
                let problem =
                    "it should be replicated, shared, host, layers, or layers:K with a number K of ranks";
                PlacementChoice::Layers(Some(ranks.ok_or(problem)?))
            }
        })
    }
}

impl Display for PlacementChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlacementChoice::Replicated => f.write_str("replicated"),
            PlacementChoice::Shared => f.write_str("shared"),
            PlacementChoice::Host => f.write_str("host"),
            PlacementChoice::Layers(None) => f.write_str("layers"),
            PlacementChoice::Layers(Some(ranks)) => write!(f, "layers:{ranks}"),
        }
    }
}

/// How ranks share a network with [`PlacementChoice::Layers`]: rank r has part r mod `stages` of replica ⌊r / `stages`⌋.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    /// The number of parts of the network, each on a rank.
    pub(crate) stages: u32,
    /// The number of replicas of the whole network, which train on different images.
    pub(crate) replicas: u32,
}

impl Grid {
    /// The part of the network on `rank`.
    pub(crate) fn stage(self, rank: u32) -> u32 {
        rank % self.stages
    }

    /// The replica of the network that the part on `rank` belongs to.
    pub(crate) fn replica(self, rank: u32) -> u32 {
        rank / self.stages
    }
}

/// How gradients are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ReduceBy {
    Mean,
    Sum,
}

/// Which optimizer state is sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sharding {
    Auto,
    On,
    Off,
}

/// Communication dtype: the element type of gradients in collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CommDtype {
    F32,
    Bf16,
}

impl Parallel {
    /// Where the weights are.
    pub(crate) fn placement(&self) -> PlacementChoice {
        self.placement
    }

    /// Bucket size in bytes, if the user gave one.
    pub(crate) fn bucket_bytes(&self) -> Option<usize> {
        self.bucket
    }

    /// Whether the optimizer state is sharded, if the user said so.
    pub(crate) fn sharding(&self) -> Option<&'static str> {
        match self.shard_optimizer {
            Sharding::Auto => None,
            Sharding::On => Some("on"),
            Sharding::Off => Some("off"),
        }
    }

    /// Threads of a rank: `asked` if given, else its share of the cores. World-size-invariant runs default to 1,
    /// because the share depends on the number of ranks, and the order of sums on the number of threads.
    pub(crate) fn threads(&self, asked: Option<u16>, share: usize) -> usize {
        let share = if self.is_world_size_invariant() { 1 } else { share };
        asked.map_or(share, usize::from)
    }

    /// The global norm that gradients are clipped to, if any.
    pub(crate) fn clip_norm(&self) -> Option<f64> {
        self.clip_norm
    }

    /// The layers before which the network is to be cut; empty if they are to be measured.
    pub(crate) fn cuts(&self) -> &[usize] {
        &self.cut
    }

    /// How `ranks` ranks share the layers; `None` if each has the whole network.
    pub(crate) fn grid(&self, ranks: u32) -> Result<Option<Grid>, String> {
        let PlacementChoice::Layers(stages) = self.placement else {
            let is_cut = !self.cut.is_empty();
            return if is_cut { Err("--cut needs --placement layers".to_owned()) } else { Ok(None) };
        };
        let placement = format!("--placement {}", self.placement);
        let stages = stages.unwrap_or(ranks);
        if self.clip_norm.is_some() {
            return Err(format!(
                "{placement} and --clip-norm are incompatible: no rank has all gradients, whose norm would be clipped"
            ));
        }
        if self.is_world_size_invariant() {
            return Err(format!(
                "{placement} and --world-size-invariant are incompatible: give the micro-batches with --accumulate"
            ));
        }
        if self.overlap {
            return Err(format!(
                "{placement} and --overlap are incompatible: the ranks of a pipeline compute while others communicate"
            ));
        }
        if stages > ranks || !ranks.is_multiple_of(stages) {
            return Err(format!(
                "{placement} needs a multiple of {stages} ranks, not {ranks}: each replica of the network is on {stages}"
            ));
        }
        Ok(Some(Grid { stages, replicas: ranks / stages }))
    }

    /// The error of a golden run on GPUs whose layers are to be cut over ranks.
    pub(crate) fn refuse_on_gpus(&self) -> String {
        format!("--placement {} runs on CPUs only: start it with mgpurun --backend cpu", self.placement)
    }

    /// The number of the replica on `rank`, and the number of replicas on `ranks` ranks. Each replica trains on batches of
    /// its own.
    pub(crate) fn replica(&self, rank: u32, ranks: u32) -> Result<(u32, u32), String> {
        Ok(self.grid(ranks)?.map_or((rank, ranks), |grid| (grid.replica(rank), grid.replicas)))
    }

    /// What the weights on `ranks` ranks have in common, in words.
    pub(crate) fn describe_copies(&self, ranks: u32) -> String {
        let s = |count: u32| if count == 1 { "" } else { "s" };
        match self.grid(ranks) {
            Ok(Some(Grid { stages, replicas: 1 })) => format!("cut over {stages} rank{}", s(stages)),
            Ok(Some(Grid { stages, replicas })) => {
                format!("cut over {stages} rank{}, the same in {replicas} replicas", s(stages))
            }
            _ => format!("the same on {ranks} rank{}", s(ranks)),
        }
    }

    /// How many times the mean gradients are: with `--reduction sum`, the number of micro-batches on all of `ranks` ranks
    /// together.
    pub(crate) fn gradient_scale(&self, ranks: u32) -> Option<usize> {
        let micro_batches =
            self.world_size_invariant.unwrap_or(self.accumulate.saturating_mul(ranks as usize));
        (self.reduction == ReduceBy::Sum).then_some(micro_batches)
    }

    /// Whether gradients are communicated in bf16.
    pub(crate) fn compresses(&self) -> bool {
        self.gradients == CommDtype::Bf16
    }

    /// Whether the reduction is world-size-invariant.
    pub(crate) fn is_world_size_invariant(&self) -> bool {
        self.world_size_invariant.is_some()
    }

    /// The number of micro-batches, in words.
    pub(crate) fn describe_micro_batches(&self) -> String {
        match self.world_size_invariant {
            Some(all) => format!("{all} of all ranks"),
            None => format!("{} of each rank", self.accumulate),
        }
    }

    /// Number of micro-batches on each of `ranks` ranks.
    pub(crate) fn count_micro_batches(&self, ranks: u32) -> Result<usize, String> {
        match self.world_size_invariant {
            None => Ok(self.accumulate),
            Some(all) if all.is_power_of_two() && all.is_multiple_of(ranks as usize) => {
                Ok(all / ranks as usize)
            }
            Some(all) => Err(format!(
                "--world-size-invariant {all} must be a power of two and a multiple of the number of ranks, {ranks}"
            )),
        }
    }

    /// Number of micro-batches on each of `ranks` ranks, which divide its `batch` images equally.
    pub(crate) fn micro_batches(&self, batch: usize, ranks: u32) -> Result<usize, String> {
        let count = self.count_micro_batches(ranks)?;
        if batch.is_multiple_of(count) {
            Ok(count)
        } else {
            Err(format!(
                "the batch of {batch} images on each rank cannot be split into {count} equal micro-batches"
            ))
        }
    }

    /// Whether the CPU updates the weights, also under the nccl backend.
    pub(crate) fn is_on_host(&self) -> bool {
        self.placement() == PlacementChoice::Host
    }

    /// The communicators of a rank with a GPU: for device memory, and for host buffers. Collective.
    pub(crate) fn communicators(
        &self,
        world: &mut World,
    ) -> mgpu::Result<(Arc<DeviceCommunicator>, Communicator)> {
        // The ranks of a pipeline exchange gradients and activations on GPUs, and all else in host memory.
        if !self.is_on_host() && !matches!(self.placement, PlacementChoice::Layers(_)) {
            return world.communicators();
        }
        Ok((Arc::new(world.device_communicator()?), world.host_memory_communicator()?))
    }

    /// All flags by name with their values. They must be equal on all ranks.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("--placement", self.placement.to_string()),
            ("--cut", format!("{:?}", self.cut)),
            ("--bucket", given(self.bucket.map(|bytes| bytes as f64 / f64::from(1 << 20)))),
            ("--shard-optimizer", self.sharding().unwrap_or("auto").to_owned()),
            ("--overlap", self.overlap.to_string()),
            ("--world-size-invariant", given(self.world_size_invariant)),
            ("--accumulate", self.accumulate.to_string()),
            ("--clip-norm", given(self.clip_norm)),
            ("--gradients", if self.compresses() { "bf16" } else { "f32" }.to_owned()),
            ("--reduction", if self.reduction == ReduceBy::Sum { "sum" } else { "mean" }.to_owned()),
        ]
    }

    /// The configuration on `ranks` ranks, with `micro_batches` micro-batches a step on each.
    pub(crate) fn config(
        &self,
        mut optimizer: OptimizerConfig,
        threads: usize,
        (ranks, micro_batches): (u32, usize),
    ) -> DataParallelConfig {
        let scale = self.gradient_scale(ranks).map_or(1.0, |scale| scale as f64);
        optimizer.rule = optimizer.rule.with_gradient_scale(scale);
        let config = DataParallelConfig::new(optimizer, threads)
            .with_micro_batches(micro_batches)
            .with_shard_from(match self.shard_optimizer {
                Sharding::Auto => ShardFrom::Auto,
                Sharding::On => ShardFrom::Bytes(0),
                Sharding::Off => ShardFrom::Never,
            })
            .with_placement(match self.placement {
                // A group of ranks with the same layers has a copy of them each.
                PlacementChoice::Replicated | PlacementChoice::Layers(_) => Placement::Replicated,
                PlacementChoice::Shared => Placement::Shared,
                PlacementChoice::Host => Placement::Host,
            })
            .with_overlap(self.overlap)
            .with_clip_norm(self.clip_norm.map(|norm| norm * scale))
            .with_reduction(if self.reduction == ReduceBy::Sum { Reduction::Sum } else { Reduction::Mean })
            .with_compression(if self.compresses() { Compression::Bf16 } else { Compression::None })
            .with_world_size_invariant(self.is_world_size_invariant());
        match self.bucket {
            Some(bytes) => config.with_bucket(bytes),
            None => config,
        }
    }
}

/// The value of an optional flag, in words.
pub(crate) fn given(value: Option<impl Display>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

/// Parses a bucket size in MiB, into bytes.
fn mebibytes(text: &str) -> Result<usize, String> {
    let bytes = text.parse().map(|mebibytes: f64| (mebibytes * f64::from(1 << 20)) as usize);
    let sensible = bytes.ok().filter(|bytes| (1 << 10..=1 << 30).contains(bytes));
    sensible.ok_or_else(|| "it should be a number from 0.001 to 1024".into())
}

/// Parses a number above 0.
pub(crate) fn above_0(text: &str) -> Result<f64, String> {
    // Arithmetic is in f32: larger numbers would become infinite, smaller ones 0.
    let number =
        text.parse().ok().filter(|number: &f64| *number as f32 > 0.0 && (*number as f32).is_finite());
    number.ok_or_else(|| "it should be a number above 0 that f32 can represent (1e-45 to 3.4e38)".into())
}

/// Parses a whole number from 1.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "it should be a number from 1".into())
}
