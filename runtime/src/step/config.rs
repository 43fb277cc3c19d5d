//! What there is to choose of a [`DataParallel`](super::DataParallel).

use crate::optimizer::OptimizerConfig;
use crate::{Error, Result};

/// Bytes of the first bucket: small, so that communication starts early.
pub(super) const FIRST_BUCKET: usize = 256 << 10;
/// Bytes of the other buckets, unless the caller chooses: on a CPU small enough that gradients are still in the cache
/// when they are reduced. (Of 1, 2, 4 and 25 MiB, steps of the larger networks with two ranks were up to 8% shorter
/// with 1 MiB than with 25, and otherwise as long.)
pub const BUCKET: usize = 1 << 20;
/// Bytes from which on a bucket is sharded, unless the caller chooses: below, the optimizer takes less than the exchange
/// of what it has updated. (On a busy machine, two ranks with the 247 KB of `lenet5` took 0.84 ms a step replicated and
/// 1.15 sharded; with the 27 MB of `deep`, sums and updates took 36 ms replicated and 28 sharded.)
pub const SHARD_FROM: usize = 512 << 10;
/// Steps between two comparisons of the ranks' weights, unless the caller chooses.
pub const VERIFY_EVERY: u64 = 100;

/// How a [`DataParallel`](super::DataParallel) trains. The same on all ranks, but for `threads`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DataParallelConfig {
    /// How parameters follow their gradients.
    pub optimizer: OptimizerConfig,
    /// Threads that updates run on, at least one.
    pub threads: usize,
    /// Bytes of gradients that are reduced in one operation; the first bucket has at most 256 KiB.
    pub bucket: usize,
    /// Bytes from which on a bucket's part of the optimizer is sharded: every rank has 1/n of its state and of its moving
    /// average, and updates 1/n of its parameters. The weights are the same to the last bit, sharded or not (under `nccl` where
    /// two ranks add, and but for a clipped norm). `None` replicates all, and so does a [`DataParallel`](super::DataParallel) whose ranks do not share
    /// memory: sums of its backend may differ in their last bits from one operation to the other.
    pub shard_from: Option<usize>,
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
    /// Steps between two comparisons of all ranks' weights by checksum, which fail with rank and tensor
    /// ([`Error::Diverged`](crate::Error::Diverged)). `None` leaves comparing to
    /// [`DataParallel::verify`](super::DataParallel::verify).
    pub verify_every: Option<u64>,
    /// Sum the micro-batches of all ranks in an order that does not depend on the number of ranks: as a balanced binary
    /// tree. Training with n ranks of k micro-batches each gives the same bits for all n and k that are powers of two with
    /// the same product, as long as the model computes a micro-batch's gradients to the same bits (for the networks of
    /// the examples: with the same number of threads). Ranks must be a power of two in number.
    /// [`sum_over_ranks`](super::GradientSink::sum_over_ranks) then sums over nothing: each micro-batch is normalised by
    /// itself. Costs log₂ n exchanges of all gradients in place of one reduction.
    pub world_size_invariant: bool,
}

impl DataParallelConfig {
    /// The mean of all gradients, as it is; buckets of [`BUCKET`] bytes, sharded from [`SHARD_FROM`] on; gradients checked
    /// in every step, weights every [`VERIFY_EVERY`] steps.
    pub fn new(optimizer: OptimizerConfig, threads: usize) -> Self {
        DataParallelConfig {
            optimizer,
            threads,
            bucket: BUCKET,
            shard_from: Some(SHARD_FROM),
            overlap: false,
            reduction: Reduction::Mean,
            compression: Compression::None,
            clip_norm: None,
            check_finite: true,
            verify_every: Some(VERIFY_EVERY),
            world_size_invariant: false,
        }
    }

    /// Bytes of the first bucket at most.
    pub(super) fn first_bucket(&self) -> usize {
        FIRST_BUCKET.min(self.bucket)
    }

    /// Everything that has to be the same on all ranks, by name: it decides what they exchange, and what becomes of it.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        // All fields are named, so that nobody forgets a new one here.
        let DataParallelConfig {
            optimizer: OptimizerConfig { rule, decay_weights_only, average },
            threads: _,
            bucket,
            shard_from,
            overlap,
            reduction,
            compression,
            clip_norm,
            check_finite,
            verify_every,
            world_size_invariant,
        } = self;
        vec![
            ("optimizer", format!("{rule:?}")),
            ("decay_weights_only", decay_weights_only.to_string()),
            ("average", format!("{average:?}")),
            ("bucket", bucket.to_string()),
            ("shard_from", format!("{shard_from:?}")),
            ("overlap", overlap.to_string()),
            ("reduction", format!("{reduction:?}")),
            ("compression", format!("{compression:?}")),
            ("clip_norm", format!("{clip_norm:?}")),
            ("check_finite", check_finite.to_string()),
            ("verify_every", format!("{verify_every:?}")),
            ("world_size_invariant", world_size_invariant.to_string()),
        ]
    }

    /// Whether all of this goes together on `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<()> {
        let problem = if self.threads == 0 {
            "updates run on at least one thread".to_owned()
        } else if self.world_size_invariant && !ranks.is_power_of_two() {
            format!("sums that do not depend on the number of ranks need 1, 2, 4, 8, … of them, not {ranks}")
        } else if self.world_size_invariant && self.compression != Compression::None {
            "compressed gradients depend on the number of ranks, which they are not to do".to_owned()
        } else if self.clip_norm.is_some_and(|most| most.is_nan() || most <= 0.0) {
            "gradients are clipped to a norm above 0".to_owned()
        } else if self.verify_every == Some(0) {
            "weights are verified every step or less often, not every 0 steps".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::InvalidArgument { operation: "data parallel", problem })
    }
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
