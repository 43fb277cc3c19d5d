//! What there is to choose of a [`DeviceDataParallel`](super::DeviceDataParallel).

use super::super::config::DataParallelConfig;
use super::UpdatePlan;
use crate::{Error, Result};

/// Bytes of a bucket, unless the caller chooses: large enough for the links between GPUs, small enough that several are under
/// way in a backward pass.
pub(super) const BUCKET: usize = 16 << 20;

/// How a [`DeviceDataParallel`](super::DeviceDataParallel) trains: as on the host, and what only a device has. The same on all
/// ranks.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct DeviceConfig {
    /// What there is to choose on every backend.
    pub parallel: DataParallelConfig,
    /// Steps after which the position in an epoch, which kernels read, is 0 again: from 1.
    pub steps_per_epoch: u64,
    /// Keep a copy of the parameters in bf16, for kernels that read it.
    pub bf16_copy: bool,
}

impl DeviceConfig {
    /// `parallel` with one step an epoch and without a copy in bf16.
    pub fn new(parallel: DataParallelConfig) -> Self {
        DeviceConfig { parallel, steps_per_epoch: 1, bf16_copy: false }
    }

    /// With epochs of so many [steps](Self::steps_per_epoch).
    #[must_use]
    pub fn with_steps_per_epoch(self, steps: u64) -> Self {
        DeviceConfig { steps_per_epoch: steps, ..self }
    }

    /// With a [copy](Self::bf16_copy) of the parameters in bf16, or without.
    #[must_use]
    pub fn with_bf16_copy(self, copy: bool) -> Self {
        DeviceConfig { bf16_copy: copy, ..self }
    }

    /// What the index of a step says about it.
    pub(super) fn plan(&self) -> UpdatePlan {
        UpdatePlan { steps_per_epoch: self.steps_per_epoch, schedule: self.parallel.optimizer.schedule }
    }

    /// Everything that has to be the same on all ranks, by name.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        let DeviceConfig { parallel, steps_per_epoch, bf16_copy } = self;
        let mut settings = parallel.settings();
        settings
            .extend([("steps_per_epoch", steps_per_epoch.to_string()), ("bf16_copy", bf16_copy.to_string())]);
        settings
    }

    /// Whether all of this is compatible on `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<()> {
        if self.steps_per_epoch == 0 {
            let problem = "an epoch has at least one step".to_owned();
            return Err(Error::InvalidArgument { operation: "data parallel", problem });
        }
        self.parallel.check(ranks)
    }
}
