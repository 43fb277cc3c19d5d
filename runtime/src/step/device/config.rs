//! What there is to choose of a [`DeviceDataParallel`](super::DeviceDataParallel).

use super::super::config::DataParallelConfig;
use super::Plan;
use crate::optimizer::OptimizerConfig;
use crate::{Error, Result};

/// Bytes of a bucket, unless the caller chooses: large enough for the links between GPUs, small enough that several are under
/// way in a backward pass.
pub const BUCKET: usize = 16 << 20;

/// How a [`DeviceDataParallel`](super::DeviceDataParallel) trains. The same on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct DeviceConfig {
    /// What there is to choose on every backend; `threads` and `overlap` mean nothing here.
    pub parallel: DataParallelConfig,
    /// Micro-batches of a rank in each step.
    pub micro_batches: usize,
    /// Epochs, and how the learning rate changes.
    pub plan: Plan,
    /// Keep a copy of the parameters in bf16, for kernels that read it.
    pub bf16_copy: bool,
}

impl DeviceConfig {
    /// The mean of all gradients, as it is; one micro-batch; buckets of [`BUCKET`] bytes, replicated; gradients checked in every
    /// step, weights every [`VERIFY_EVERY`](crate::step::VERIFY_EVERY) steps.
    pub fn new(optimizer: OptimizerConfig, plan: Plan) -> Self {
        let parallel =
            DataParallelConfig { bucket: BUCKET, shard_from: None, ..DataParallelConfig::new(optimizer, 1) };
        DeviceConfig { parallel, micro_batches: 1, plan, bf16_copy: false }
    }

    /// Everything that has to be the same on all ranks, by name.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        let DeviceConfig { parallel, micro_batches, plan: Plan { steps_per_epoch, schedule }, bf16_copy } =
            self;
        let mut settings = parallel.settings();
        settings.extend([
            ("micro_batches", micro_batches.to_string()),
            ("steps_per_epoch", steps_per_epoch.to_string()),
            ("schedule", format!("{schedule:?}")),
            ("bf16_copy", bf16_copy.to_string()),
        ]);
        settings
    }

    /// Whether all of this goes together on `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<()> {
        if self.micro_batches == 0 {
            let problem = "a step has at least one micro-batch".to_owned();
            return Err(Error::InvalidArgument { operation: "data parallel", problem });
        }
        if self.plan.steps_per_epoch == 0 {
            let problem = "an epoch has at least one step".to_owned();
            return Err(Error::InvalidArgument { operation: "data parallel", problem });
        }
        self.parallel.check(ranks)
    }
}
