//! What there is to choose of a [`Reducer`](super::Reducer) and of a [`DataParallel`](super::DataParallel).

use crate::optimizer::OptimizerConfig;
use crate::{Error, Result};

/// Bytes of the first bucket: small, so that communication starts early.
const FIRST_BUCKET: usize = 256 << 10;
/// Bytes of the other buckets, unless the caller chooses: on a CPU small enough that gradients are still in the cache
/// when they are reduced. (Of 1, 2, 4 and 25 MiB, steps of the larger networks with two ranks were up to 8% shorter
/// with 1 MiB than with 25, and otherwise as long.)
pub(super) const BUCKET: usize = 1 << 20;
/// Bytes from which on a bucket is sharded, unless the caller chooses: below, the optimizer takes less than the exchange
/// of what it has updated. (On a busy machine, two ranks with the 247 KB of `lenet5` took 0.84 ms a step replicated and
/// 1.15 sharded; with the 27 MB of `deep`, sums and updates took 36 ms replicated and 28 sharded.)
pub(super) const SHARD_FROM: usize = 512 << 10;
/// Steps between two comparisons of the ranks' weights, unless the caller chooses.
const VERIFY_EVERY: u64 = 100;

/// How gradients are averaged. The same on all ranks, on the host and on devices.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ReducerConfig {
    /// Micro-batches of a rank in each step, whose gradients are added up before they are reduced: from 1.
    pub micro_batches: usize,
    /// Bytes of gradients that are reduced in one operation; the first bucket has at most 256 KiB. `None` is what suits the
    /// memory: 1 MiB on the host, 16 MiB on a device.
    pub bucket: Option<usize>,
    /// Reduce buckets on a thread of its own, under the rest of the backward pass, for where a core is to spare. What is trained
    /// keeps its bits. It changes nothing where ranks are to make no difference, which takes messages in place of reductions, nor
    /// on GPUs, where reductions always go on beside the computation.
    pub overlap: bool,
    /// What the gradients of micro-batches and ranks become together.
    pub reduction: Reduction,
    /// How gradients travel between ranks.
    pub compression: Compression,
    /// The largest Euclidean norm that all reduced gradients together may have: longer ones are scaled down to it, by
    /// `clip_norm / (norm + 10⁻⁶)` as in PyTorch's `clip_grad_norm_`. `None` leaves them as they are. The last bits of the norm
    /// depend on how gradients are cut into buckets, but where ranks are to make no difference.
    pub clip_norm: Option<f64>,
    /// Fail a step, before it changes any parameter, in which the reduced gradients are not all finite. Every element is
    /// checked. The error names the tensor, and the rank that has such gradients of its own
    /// ([`Error::NotFinite`](crate::Error::NotFinite)), if one was seen to: where there are several ranks, of tensors with more
    /// than 65,536 elements one in 32 is checked before the reduction. Otherwise it is
    /// [`Error::ReducedNotFinite`](crate::Error::ReducedNotFinite), of a sum that overflows for example.
    pub check_finite: bool,
    /// Sum the micro-batches of all ranks in an order that does not depend on the number of ranks: as a balanced binary
    /// tree. Training with n ranks of k micro-batches each gives the same bits for all n and k that are powers of two with
    /// the same product, as long as the model computes a micro-batch's gradients to the same bits (for the networks of
    /// the examples: with the same number of threads). Ranks must be a power of two in number.
    /// [`sum_over_ranks`](super::GradientSink::sum_over_ranks) then sums over nothing: each micro-batch is normalised by
    /// itself. Costs log₂ n exchanges of all gradients in place of one reduction.
    pub world_size_invariant: bool,
    /// What a tensor means whose gradient is not handed over in a micro-batch.
    pub unused: Unused,
    /// Let ranks have different numbers of steps: one that has run out of data calls `join`, and takes part in the steps
    /// of the others with weight 0, so that the mean is over the ranks that have data. Ranks then tell each other at the
    /// beginning of every step whether they have data, which takes a small all-gather. Not together with
    /// `world_size_invariant`, nor with [`sum_over_ranks`](super::GradientSink::sum_over_ranks), which a rank
    /// without data does not call.
    pub join: bool,
}

impl ReducerConfig {
    /// The mean of all gradients, as it is, of one micro-batch in each step; gradients checked.
    pub fn new() -> Self {
        ReducerConfig {
            micro_batches: 1,
            bucket: None,
            overlap: false,
            reduction: Reduction::Mean,
            compression: Compression::None,
            clip_norm: None,
            check_finite: true,
            world_size_invariant: false,
            unused: Unused::Error,
            join: false,
        }
    }

    /// Bytes of the first bucket and of the others, which have `default` bytes unless the caller chooses.
    pub(super) fn buckets(&self, default: usize) -> (usize, usize) {
        let bucket = self.bucket.unwrap_or(default);
        (FIRST_BUCKET.min(bucket), bucket)
    }

    /// Everything that has to be the same on all ranks, by name: it decides what they exchange, and what becomes of it.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        // All fields are named, so that nobody forgets a new one here.
        let ReducerConfig {
            micro_batches,
            bucket,
            overlap,
            reduction,
            compression,
            clip_norm,
            check_finite,
            world_size_invariant,
            unused,
            join,
        } = self;
        vec![
            ("micro_batches", micro_batches.to_string()),
            ("bucket", bucket.map_or_else(|| "auto".to_owned(), |bytes| bytes.to_string())),
            ("overlap", overlap.to_string()),
            ("reduction", format!("{reduction:?}")),
            ("compression", format!("{compression:?}")),
            ("clip_norm", format!("{clip_norm:?}")),
            ("check_finite", check_finite.to_string()),
            ("world_size_invariant", world_size_invariant.to_string()),
            ("unused", format!("{unused:?}")),
            ("join", join.to_string()),
        ]
    }

    /// Whether all of this is compatible on `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<()> {
        check_micro_batches(self.micro_batches)?;
        let problem = if self.world_size_invariant && !ranks.is_power_of_two() {
            format!("a world-size-invariant reduction needs 1, 2, 4, 8, … ranks, not {ranks}")
        } else if self.world_size_invariant && self.compression != Compression::None {
            "compressed gradients are incompatible with a world-size-invariant reduction".to_owned()
        } else if self.world_size_invariant && self.join {
            "`join` is incompatible with a world-size-invariant reduction".to_owned()
        } else if self.clip_norm.is_some_and(|most| most.is_nan() || most <= 0.0) {
            "gradients are clipped to a norm above 0".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::InvalidArgument { operation: "data parallel", problem })
    }
}

impl Default for ReducerConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// Checks that a step may have `count` micro-batches.
pub(super) fn check_micro_batches(count: usize) -> Result<()> {
    if count > 0 {
        return Ok(());
    }
    let problem = "a step has at least one micro-batch".to_owned();
    Err(Error::InvalidArgument { operation: "step", problem })
}

/// Checks that ranks may run out of data.
pub(super) fn check_join(config: &ReducerConfig) -> Result<()> {
    if config.join {
        return Ok(());
    }
    let problem = "ranks take part without data only where the configuration has `join`".to_owned();
    Err(Error::InvalidArgument { operation: "join", problem })
}

/// Checks that all ranks take part in sums within a step.
pub(super) fn check_sums(config: &ReducerConfig) -> Result<()> {
    if !config.join {
        return Ok(());
    }
    let problem = "a rank that has run out of data takes no part in sums within a step: leave out `join`";
    Err(Error::InvalidArgument { operation: "sum over ranks", problem: problem.to_owned() })
}

/// How a [`DataParallel`](super::DataParallel) trains, or a
/// [`DeviceDataParallel`](super::device::DeviceDataParallel). The same on all ranks, but for `threads`.
///
/// ```
/// use mgpu::DataParallelConfig;
/// use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
/// let sgd = OptimizerConfig::new(Rule::Sgd(Sgd::default()));
/// let config = DataParallelConfig::new(sgd, 1).with_micro_batches(4).with_clip_norm(1.0).with_shard_from(None);
/// assert_eq!(config.reducer.clip_norm, Some(1.0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct DataParallelConfig {
    /// How gradients are averaged.
    pub reducer: ReducerConfig,
    /// How parameters follow their gradients.
    pub optimizer: OptimizerConfig,
    /// Threads that updates on the host run on, at least one. It means nothing on a device.
    pub threads: usize,
    /// From which size on a bucket's part of the optimizer is sharded: every rank has 1/n of its state and of its moving
    /// average, and updates 1/n of its parameters. The weights are the same to the last bit, sharded or not (under `nccl` where
    /// two ranks add, and but for a clipped norm).
    pub shard_from: ShardFrom,
    /// Steps between two comparisons of all ranks' weights by checksum, which fail with rank and tensor
    /// ([`Error::Diverged`](crate::Error::Diverged)). `None` leaves comparing to
    /// [`DataParallel::verify`](super::DataParallel::verify).
    pub verify_every: Option<u64>,
}

impl DataParallelConfig {
    /// A [`ReducerConfig::new`]; sharded where it pays; weights compared every 100 steps; updates on
    /// `threads` threads.
    pub fn new(optimizer: OptimizerConfig, threads: usize) -> Self {
        DataParallelConfig {
            reducer: ReducerConfig::new(),
            optimizer,
            threads,
            shard_from: ShardFrom::Auto,
            verify_every: Some(VERIFY_EVERY),
        }
    }

    /// With [`threads`](Self::threads) threads.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        DataParallelConfig { threads, ..self }
    }

    /// With the optimizer sharded [from](Self::shard_from) this size on; `None` for never.
    #[must_use]
    pub fn with_shard_from(self, from: impl Into<ShardFrom>) -> Self {
        DataParallelConfig { shard_from: from.into(), ..self }
    }

    /// With weights compared every so many [steps](Self::verify_every); `None` for never.
    #[must_use]
    pub fn with_verify_every(self, steps: impl Into<Option<u64>>) -> Self {
        DataParallelConfig { verify_every: steps.into(), ..self }
    }

    /// Everything that has to be the same on all ranks, by name.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        let DataParallelConfig {
            reducer,
            optimizer: OptimizerConfig { rule, decay_weights_only, average, schedule },
            threads: _,
            shard_from,
            verify_every,
        } = self;
        let mut settings = vec![
            ("optimizer", format!("{rule:?}")),
            ("decay_weights_only", decay_weights_only.to_string()),
            ("average", format!("{average:?}")),
            ("schedule", format!("{schedule:?}")),
            ("shard_from", shard_from.to_string()),
            ("verify_every", format!("{verify_every:?}")),
        ];
        settings.extend(reducer.settings());
        settings
    }

    /// Whether all of this is compatible on `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<()> {
        let problem = if self.threads == 0 {
            "updates run on at least one thread".to_owned()
        } else if self.verify_every == Some(0) {
            "weights are verified every step or less often, not every 0 steps".to_owned()
        } else if self.optimizer.schedule.decay.steps() == 0 {
            "a schedule's learning rate falls over at least one step".to_owned()
        } else {
            return self.reducer.check(ranks);
        };
        Err(Error::InvalidArgument { operation: "data parallel", problem })
    }
}

/// The settings of a reducer, chosen one by one, of a configuration that has them in `$reducer`.
macro_rules! reducer_builders {
    ($($reducer:ident)?) => {
        /// With this many [micro-batches](ReducerConfig::micro_batches) in each step.
        #[must_use]
        pub fn with_micro_batches(mut self, count: usize) -> Self {
            self$(.$reducer)?.micro_batches = count;
            self
        }

        /// With [buckets](ReducerConfig::bucket) of this many bytes.
        #[must_use]
        pub fn with_bucket(mut self, bytes: usize) -> Self {
            self$(.$reducer)?.bucket = Some(bytes);
            self
        }

        /// With reductions [beside](ReducerConfig::overlap) the backward pass, or not.
        #[must_use]
        pub fn with_overlap(mut self, overlap: bool) -> Self {
            self$(.$reducer)?.overlap = overlap;
            self
        }

        /// With sums or means of gradients: [`ReducerConfig::reduction`].
        #[must_use]
        pub fn with_reduction(mut self, reduction: Reduction) -> Self {
            self$(.$reducer)?.reduction = reduction;
            self
        }

        /// With gradients that travel [so](ReducerConfig::compression).
        #[must_use]
        pub fn with_compression(mut self, compression: Compression) -> Self {
            self$(.$reducer)?.compression = compression;
            self
        }

        /// With gradients [clipped](ReducerConfig::clip_norm) to this norm; `None` for not.
        #[must_use]
        pub fn with_clip_norm(mut self, most: impl Into<Option<f64>>) -> Self {
            self$(.$reducer)?.clip_norm = most.into();
            self
        }

        /// With gradients [checked](ReducerConfig::check_finite), or not.
        #[must_use]
        pub fn with_check_finite(mut self, check: bool) -> Self {
            self$(.$reducer)?.check_finite = check;
            self
        }

        /// With sums that do not depend on the number of ranks, or with others: [`ReducerConfig::world_size_invariant`].
        #[must_use]
        pub fn with_world_size_invariant(mut self, invariant: bool) -> Self {
            self$(.$reducer)?.world_size_invariant = invariant;
            self
        }

        /// With gradients that are not handed over [taken](ReducerConfig::unused) so.
        #[must_use]
        pub fn with_unused(mut self, unused: Unused) -> Self {
            self$(.$reducer)?.unused = unused;
            self
        }

        /// With ranks that may run out of data, or not: [`ReducerConfig::join`].
        #[must_use]
        pub fn with_join(mut self, join: bool) -> Self {
            self$(.$reducer)?.join = join;
            self
        }
    };
}

impl ReducerConfig {
    reducer_builders!();
}

impl DataParallelConfig {
    reducer_builders!(reducer);
}

/// What the gradients of a step's micro-batches, on all ranks, become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their mean: where each is the mean over its samples, the mean over all samples.
    Mean,
    /// Their sum.
    Sum,
}

/// How gradients travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// As they are.
    None,
    /// Rounded to bf16: half the bytes. They are added in f32, and the result is rounded once more (under `nccl` each sum of
    /// two is).
    Bf16,
}

/// What a tensor means whose gradient is not handed over in a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unused {
    /// A mistake: the step fails and names the tensor.
    Error,
    /// The micro-batch does not depend on it: its gradient is 0. The optimizer takes that as any other gradient, so momentum
    /// and weight decay go on moving the tensor, even where no rank has used it. (PyTorch's DDP leaves such a tensor alone.)
    Zero,
}

/// From which size on buckets are sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ShardFrom {
    /// Where it pays: from 512 KiB on where ranks share memory on a host, never on devices. Nor on a host where ranks
    /// do not share memory: there, sums may differ in their last bits from one operation to the other.
    Auto,
    /// From this many bytes on; on a host only where ranks share memory, as for `Auto`.
    Bytes(usize),
    /// All is replicated.
    Never,
}

impl ShardFrom {
    /// The bytes from which on, where `Auto` is `default`.
    pub(super) fn bytes(self, default: Option<usize>) -> Option<usize> {
        match self {
            ShardFrom::Auto => default,
            ShardFrom::Bytes(bytes) => Some(bytes),
            ShardFrom::Never => None,
        }
    }
}

impl From<Option<usize>> for ShardFrom {
    fn from(bytes: Option<usize>) -> Self {
        bytes.map_or(ShardFrom::Never, ShardFrom::Bytes)
    }
}

impl std::fmt::Display for ShardFrom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ShardFrom::Auto => f.write_str("auto"),
            ShardFrom::Bytes(bytes) => bytes.fmt(f),
            ShardFrom::Never => f.write_str("none"),
        }
    }
}
