//! Configuration of a [`Reducer`](super::Reducer) and of a [`DataParallel`](super::DataParallel).

use crate::optimizer::{LossScaler, OptimizerConfig};
use crate::{Error, Result};

/// Size of the first bucket in bytes: small, so that communication starts early.
const FIRST_BUCKET: usize = 256 << 10;
/// Default size of the other buckets in bytes: on a CPU small enough that gradients are still in the cache when they
/// are reduced. (With 1, 2, 4 and 25 MiB and two ranks, steps of the larger networks were up to 8% shorter with 1 MiB
/// than with 25, and otherwise equally long.)
const BUCKET: usize = 1 << 20;
/// The same over several hosts, where every reduction costs the latency of the network.
const BUCKET_OVER_HOSTS: usize = 8 << 20;
/// Default size in bytes from which a bucket is sharded: below, the replicated update takes less time than exchanging
/// the updated parameters. (On a busy machine, two ranks with the 247 KB of `lenet5` took 0.84 ms per step replicated
/// and 1.15 ms sharded; with the 27 MB of `deep`, reductions and updates took 36 ms replicated and 28 ms sharded.)
pub(super) const SHARD_FROM: usize = 512 << 10;
/// The same with more ranks than cores: a replicated update then takes as many times longer, because the ranks of a core take
/// turns. (lenet5 on two cores, sharded beside replicated: with 4 ranks 1.03 times as fast, with 8 ranks 1.05, with 16 ranks 1.13
/// times.)
pub(super) const SHARD_FROM_WITH_SHARED_CORES: usize = 128 << 10;
/// Default number of steps between two comparisons of the ranks' weights.
const VERIFY_EVERY: u64 = 100;

/// How gradients are averaged. Must be the same on all ranks. Used on the host and on devices.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ReducerConfig {
    /// Number of micro-batches of a rank in each step, at least 1. Their gradients are accumulated before they are
    /// reduced.
    pub micro_batches: usize,
    /// Bytes of gradients that are reduced in one operation; the first bucket has at most 256 KiB. `None` chooses a
    /// default: 16 MiB on a device; on the host 1 MiB, or 8 MiB if the ranks are on several hosts and nothing is clipped
    /// to a norm that depends on the buckets (see `clip_norm`).
    pub bucket: Option<usize>,
    /// Reduce buckets on a background thread, overlapping the rest of the backward pass; useful if there is a spare
    /// core. The results have the same bits. It has no effect on a world-size-invariant reduction, which uses
    /// messages instead of reductions, nor on GPUs, where reductions always overlap.
    pub overlap: bool,
    /// How the gradients of micro-batches and ranks are combined.
    pub reduction: Reduction,
    /// The communication dtype of gradients.
    pub compression: Compression,
    /// Largest Euclidean norm of all reduced gradients together: longer gradients are scaled by `clip_norm / (norm +
    /// 10⁻⁶)`, as in PyTorch's `clip_grad_norm_`. `None` disables clipping. The last bits of the norm depend on the
    /// buckets, except in a world-size-invariant reduction.
    pub clip_norm: Option<f64>,
    /// Fail a step with non-finite reduced gradients before it changes any parameter. Every element is checked. The
    /// error names the tensor, and the rank whose own gradients are non-finite
    /// ([`Error::NotFinite`](crate::Error::NotFinite)), if it was found: with several ranks, only one in 32 elements
    /// is checked before the reduction for tensors of more than 65,536 elements. Otherwise it is
    /// [`Error::ReducedNotFinite`](crate::Error::ReducedNotFinite), for example because the sum overflows.
    pub check_finite: bool,
    /// World-size-invariant reduction: sum the micro-batches of all ranks in an order that does not depend on the
    /// number of ranks, as a balanced binary tree. Training with n ranks of k micro-batches each gives the same bits
    /// for all n and k that are powers of two with the same product, if the model computes the same bits for a
    /// micro-batch (for the networks of the examples: with the same number of threads). The number of ranks must be a
    /// power of two. [`sum_over_ranks`](super::GradientSink::sum_over_ranks) then does nothing: each micro-batch is
    /// normalised separately. Costs log₂ n exchanges of all gradients instead of one reduction.
    pub world_size_invariant: bool,
    /// What to do if a tensor's gradient is not marked ready in a micro-batch.
    pub unused: Unused,
    /// Let ranks have different numbers of steps. A rank that has run out of data calls `join`, and takes part in the
    /// steps of the others with weight 0, so that the mean is over the ranks with data. At the beginning of every
    /// step, a small all-gather tells which ranks have data. Incompatible with `world_size_invariant` and with
    /// [`sum_over_ranks`](super::GradientSink::sum_over_ranks), which a rank without data does not call.
    pub join: bool,
}

impl ReducerConfig {
    /// One micro-batch per step; mean over ranks, uncompressed; gradients checked.
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

    /// Sizes in bytes of the first bucket and of the others, of gradients on the host. The bits of a training must not
    /// depend on where its ranks are: so clipping, by a norm whose last bits depend on the buckets, excludes larger buckets
    /// over a network.
    pub(super) fn host_buckets(&self, crosses_network: bool) -> (usize, usize) {
        let has_norm_of_buckets = self.clip_norm.is_some() && !self.world_size_invariant;
        self.buckets(if crosses_network && !has_norm_of_buckets { BUCKET_OVER_HOSTS } else { BUCKET })
    }

    /// Sizes in bytes of the first bucket and of the others. `default` is the default of the others.
    pub(super) fn buckets(&self, default: usize) -> (usize, usize) {
        let bucket = self.bucket.unwrap_or(default);
        (FIRST_BUCKET.min(bucket), bucket)
    }

    /// All settings that must be the same on all ranks, by name.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        // Destructured completely, so that a new field cannot be forgotten here.
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

    /// Checks that the settings are compatible with each other and with `ranks` ranks.
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

/// Checks that `join` is enabled.
pub(super) fn check_join(config: &ReducerConfig) -> Result<()> {
    if config.join {
        return Ok(());
    }
    let problem = "ranks can only take part without data if the configuration enables `join`".to_owned();
    Err(Error::InvalidArgument { operation: "join", problem })
}

/// Checks that all ranks take part in sums within a step, that is, that `join` is disabled.
pub(super) fn check_sums(config: &ReducerConfig) -> Result<()> {
    if !config.join {
        return Ok(());
    }
    let problem = "a rank that has run out of data takes no part in sums within a step: disable `join`";
    Err(Error::InvalidArgument { operation: "sum over ranks", problem: problem.to_owned() })
}

/// Configuration of a [`DataParallel`](super::DataParallel) or of a
/// [`DeviceDataParallel`](super::device::DeviceDataParallel). Must be the same on all ranks, except for `threads`.
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
    /// Configuration of the optimizer.
    pub optimizer: OptimizerConfig,
    /// Number of threads for updates, and checks of large gradients, on the host; at least 1. It has no effect on a device,
    /// except with [`Placement::Host`].
    pub threads: usize,
    /// Size from which the optimizer of a bucket is sharded: every rank holds 1/n of its state and moving average,
    /// and updates 1/n of its parameters. The weights have the same bits with and without sharding (under `nccl` only
    /// with two ranks, and without clipping).
    pub shard_from: ShardFrom,
    /// Where the parameters and the optimizer's state are kept. Other placements than `Replicated` are incompatible with a
    /// [world-size-invariant](ReducerConfig::world_size_invariant) reduction; `Shared` is incompatible with sharding, and
    /// `Host` with less than sharding everything.
    pub placement: Placement,
    /// How the loss scale follows the gradients, for a model that stores gradients in f16; `None` for gradients that are
    /// not scaled. With it, the model multiplies the gradient of its loss by the [scale](super::DataParallel::loss_scale), and
    /// the step divides the reduced gradients by it, before they are clipped. A step whose gradients are not finite then
    /// is no error: no parameter and no state of the optimizer changes, on any rank, and the scale falls. Such a step
    /// counts for the schedule, but not for the optimizer. Needs
    /// [`check_finite`](ReducerConfig::check_finite).
    pub loss_scaler: Option<LossScaler>,
    /// Number of steps between two comparisons of all ranks' weights by checksum. They fail with rank and tensor
    /// ([`Error::Diverged`](crate::Error::Diverged)). With `None`, only
    /// [`DataParallel::verify`](super::DataParallel::verify) compares.
    pub verify_every: Option<u64>,
}

impl DataParallelConfig {
    /// The defaults: [`ReducerConfig::new`]; sharded where it pays; weights compared every 100 steps; updates on
    /// `threads` threads.
    pub fn new(optimizer: OptimizerConfig, threads: usize) -> Self {
        DataParallelConfig {
            reducer: ReducerConfig::new(),
            optimizer,
            threads,
            shard_from: ShardFrom::Auto,
            placement: Placement::Replicated,
            loss_scaler: None,
            verify_every: Some(VERIFY_EVERY),
        }
    }

    /// Sets the number of [`threads`](Self::threads).
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        DataParallelConfig { threads, ..self }
    }

    /// Shards the optimizer [from](Self::shard_from) this size; `None` for never.
    #[must_use]
    pub fn with_shard_from(self, from: impl Into<ShardFrom>) -> Self {
        DataParallelConfig { shard_from: from.into(), ..self }
    }

    /// Keeps parameters and optimizer state [where](Self::placement) `placement` says.
    #[must_use]
    pub fn with_placement(self, placement: Placement) -> Self {
        DataParallelConfig { placement, ..self }
    }

    /// Scales the gradient of the loss as this [scaler](Self::loss_scaler) says; `None` for not at all.
    #[must_use]
    pub fn with_loss_scaler(self, scaler: impl Into<Option<LossScaler>>) -> Self {
        DataParallelConfig { loss_scaler: scaler.into(), ..self }
    }

    /// Compares weights [every](Self::verify_every) so many steps; `None` for never.
    #[must_use]
    pub fn with_verify_every(self, steps: impl Into<Option<u64>>) -> Self {
        DataParallelConfig { verify_every: steps.into(), ..self }
    }

    /// All settings that must be the same on all ranks, by name.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        let DataParallelConfig {
            reducer,
            optimizer: OptimizerConfig { rule, decay_weights_only, average, schedule },
            threads: _,
            shard_from,
            placement,
            loss_scaler,
            verify_every,
        } = self;
        let mut settings = vec![
            ("optimizer", format!("{rule:?}")),
            ("decay_weights_only", decay_weights_only.to_string()),
            ("average", format!("{average:?}")),
            ("schedule", format!("{schedule:?}")),
            ("shard_from", shard_from.to_string()),
            ("placement", format!("{placement:?}")),
            ("loss_scaler", loss_scaler.map_or_else(|| "none".to_owned(), |scaler| format!("{scaler:?}"))),
            ("verify_every", format!("{verify_every:?}")),
        ];
        settings.extend(reducer.settings());
        settings
    }

    /// Checks that the settings are compatible with each other and with `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<()> {
        let problem = if self.threads == 0 {
            "updates run on at least one thread".to_owned()
        } else if self.verify_every == Some(0) {
            "weights are verified every step or less often, not every 0 steps".to_owned()
        } else if self.optimizer.schedule.decay.steps() == 0 {
            "a schedule's learning rate falls over at least one step".to_owned()
        } else if let Some(problem) = self.placement_problem() {
            problem.to_owned()
        } else if let Some(problem) = self.loss_scaler.and_then(|scaler| scaler.problem()) {
            problem
        } else if self.loss_scaler.is_some() && !self.reducer.check_finite {
            "a loss scale follows the check for non-finite gradients: enable `check_finite`".to_owned()
        } else {
            return self.reducer.check(ranks);
        };
        Err(Error::InvalidArgument { operation: "data parallel", problem })
    }

    /// Why the placement is incompatible with the other settings, if it is.
    fn placement_problem(&self) -> Option<&'static str> {
        let invariant = self.reducer.world_size_invariant;
        match (self.placement, self.shard_from) {
            (Placement::Replicated, _) => None,
            (Placement::Shared | Placement::Host, _) if invariant => Some(
                "a world-size-invariant reduction needs placement replicated: its ranks exchange gradients pairwise, in a \
                 fixed tree, and do not hand them in",
            ),
            (Placement::Shared, ShardFrom::Bytes(_)) => Some(
                "a sharded optimizer is incompatible with placement shared, which keeps all of its state on rank 0: \
                 disable sharding, or use placement replicated",
            ),
            (Placement::Host, ShardFrom::Never | ShardFrom::Bytes(1..)) => Some(
                "placement host has one copy of the optimizer's state, divided over all ranks, so all of it is sharded: \
                 enable sharding, or use placement replicated",
            ),
            (Placement::Shared, ShardFrom::Auto | ShardFrom::Never)
            | (Placement::Host, ShardFrom::Auto | ShardFrom::Bytes(0)) => None,
        }
    }
}

/// Builder methods for the settings of a reducer, which are in the field `$reducer`, or in `self`.
macro_rules! reducer_builders {
    ($($reducer:ident)?) => {
        /// Sets the number of [micro-batches](ReducerConfig::micro_batches) per step.
        #[must_use]
        pub fn with_micro_batches(mut self, count: usize) -> Self {
            self$(.$reducer)?.micro_batches = count;
            self
        }

        /// Sets the size of [buckets](ReducerConfig::bucket) in bytes.
        #[must_use]
        pub fn with_bucket(mut self, bytes: usize) -> Self {
            self$(.$reducer)?.bucket = Some(bytes);
            self
        }

        /// Enables or disables the [overlap](ReducerConfig::overlap) of reductions with the backward pass.
        #[must_use]
        pub fn with_overlap(mut self, overlap: bool) -> Self {
            self$(.$reducer)?.overlap = overlap;
            self
        }

        /// Sets the [reduction](ReducerConfig::reduction): mean or sum.
        #[must_use]
        pub fn with_reduction(mut self, reduction: Reduction) -> Self {
            self$(.$reducer)?.reduction = reduction;
            self
        }

        /// Sets the [communication dtype](ReducerConfig::compression) of gradients.
        #[must_use]
        pub fn with_compression(mut self, compression: Compression) -> Self {
            self$(.$reducer)?.compression = compression;
            self
        }

        /// [Clips](ReducerConfig::clip_norm) gradients to this norm; `None` disables clipping.
        #[must_use]
        pub fn with_clip_norm(mut self, most: impl Into<Option<f64>>) -> Self {
            self$(.$reducer)?.clip_norm = most.into();
            self
        }

        /// Enables or disables the [check](ReducerConfig::check_finite) for non-finite gradients.
        #[must_use]
        pub fn with_check_finite(mut self, check: bool) -> Self {
            self$(.$reducer)?.check_finite = check;
            self
        }

        /// Enables or disables the [world-size-invariant](ReducerConfig::world_size_invariant) reduction.
        #[must_use]
        pub fn with_world_size_invariant(mut self, invariant: bool) -> Self {
            self$(.$reducer)?.world_size_invariant = invariant;
            self
        }

        /// Sets what to do about [unused](ReducerConfig::unused) tensors.
        #[must_use]
        pub fn with_unused(mut self, unused: Unused) -> Self {
            self$(.$reducer)?.unused = unused;
            self
        }

        /// Sets whether ranks may run out of data and [join](ReducerConfig::join).
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

/// How the gradients of a step's micro-batches on all ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their mean. If each is the mean over its samples, this is the mean over all samples.
    Mean,
    /// Their sum.
    Sum,
}

/// The communication dtype of gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// f32.
    None,
    /// Gradients are rounded to bf16, which halves the bytes. They are summed in f32, and the result is rounded once
    /// more (under `nccl` each sum of two is rounded).
    Bf16,
}

/// What to do if a tensor's gradient is not marked ready in a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unused {
    /// The step fails and names the tensor.
    Error,
    /// The gradient is 0. The optimizer treats it as any other gradient, so momentum and weight decay still change
    /// the tensor, even if no rank has used it. (PyTorch's DDP leaves such a tensor unchanged.)
    Zero,
}

/// Where the parameters and the optimizer's state are kept, and which way gradients and parameters take in a step.
/// On the host all placements train the same bits, and each continues from the checkpoints of the others.
///
/// Bytes that cross between ranks in a step ([`Communicator::traffic`](crate::Communicator::traffic), over all ranks),
/// for parameters of S bytes on n ranks:
///
/// | placement | gradients | parameters |
/// |---|---|---|
/// | `Replicated`, buckets that are not sharded | 2·(n − 1)·S | |
/// | `Replicated`, sharded buckets | (n − 1)·S | (n − 1)·S |
/// | `Shared` | (n − 1)·S, to rank 0 | (n − 1)·S, from rank 0 |
/// | `Host`, on a host | (n − 1)·S | (n − 1)·S |
///
/// [Compressed](Compression::Bf16) gradients are half as many bytes. Besides, every step exchanges a few bytes for checks,
/// and what the model [sums over ranks](super::GradientSink::sum_over_ranks).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Placement {
    /// A copy on every rank: gradients are all-reduced, and every rank updates its own parameters (or its
    /// [shard](DataParallelConfig::shard_from) of them).
    #[default]
    Replicated,
    /// On rank 0's device: gradients are reduced to rank 0, which alone has the optimizer's state and updates the
    /// parameters; the other ranks receive them in every step.
    Shared,
    /// In host memory: every rank hands in its gradients there, the CPU averages them and updates the parameters, and
    /// every rank fetches them for the next step.
    ///
    /// Ranks that compute on a host share its memory. So there is one copy of the optimizer's state, of which each rank
    /// keeps and updates 1/n, as with a sharded optimizer, for buckets of all sizes.
    Host,
}

/// Size from which buckets are sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ShardFrom {
    /// From 512 KiB if ranks share memory on a host, and from 128 KiB if there are more ranks than cores. Never on devices,
    /// and never on a host without shared memory, because there sums may differ in their last bits from one operation to
    /// another.
    Auto,
    /// From this many bytes. On a host only if ranks share memory, as for `Auto`.
    Bytes(usize),
    /// Never: the optimizer is replicated.
    Never,
}

impl ShardFrom {
    /// The size in bytes, where `default` is that of `Auto`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_larger_over_a_network_unless_bits_depend_on_them() {
        let plain = ReducerConfig::new();
        let rest = |config: ReducerConfig, crosses_network| config.host_buckets(crosses_network).1;
        assert!(rest(plain, true) > rest(plain, false));
        assert_eq!(rest(plain.with_clip_norm(1.0), true), rest(plain, false));
        assert!(rest(plain.with_clip_norm(1.0).with_world_size_invariant(true), true) > rest(plain, false));
        assert_eq!(rest(plain.with_bucket(12345), true), 12345);
    }
}
