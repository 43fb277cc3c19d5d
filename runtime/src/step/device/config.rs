//! Configuration of a [`DeviceDataParallel`](super::DeviceDataParallel).

use super::super::config::DataParallelConfig;
use super::UpdatePlan;
use crate::{Error, Result};

/// Default size of a bucket in bytes: large enough for the links between GPUs, small enough that several are in
/// flight during a backward pass.
pub(super) const BUCKET: usize = 16 << 20;

/// Configuration of a [`DeviceDataParallel`](super::DeviceDataParallel): that of the host, and what only a device
/// has. Must be the same on all ranks.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct DeviceConfig {
    /// The configuration that all backends share.
    pub parallel: DataParallelConfig,
    /// Number of steps after which the position in the epoch, which kernels read, restarts from 0; at least 1. A
    /// program that keeps the sample orders of several epochs on the GPU counts all of them as one.
    pub steps_per_epoch: u64,
    /// Keep a copy of the parameters in bf16, for kernels that read it.
    pub bf16_copy: bool,
}

impl DeviceConfig {
    /// `parallel` with one step per epoch and without a copy in bf16.
    pub fn new(parallel: DataParallelConfig) -> Self {
        DeviceConfig { parallel, steps_per_epoch: 1, bf16_copy: false }
    }

    /// Sets the number of [steps per epoch](Self::steps_per_epoch).
    #[must_use]
    pub fn with_steps_per_epoch(self, steps: u64) -> Self {
        DeviceConfig { steps_per_epoch: steps, ..self }
    }

    /// Keeps a [copy](Self::bf16_copy) of the parameters in bf16, or not.
    #[must_use]
    pub fn with_bf16_copy(self, copy: bool) -> Self {
        DeviceConfig { bf16_copy: copy, ..self }
    }

    /// What kernels derive from the index of a step.
    pub(super) fn plan(&self) -> UpdatePlan {
        UpdatePlan { steps_per_epoch: self.steps_per_epoch, schedule: self.parallel.optimizer.schedule }
    }

    /// All settings that must be the same on all ranks, by name.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        let DeviceConfig { parallel, steps_per_epoch, bf16_copy } = self;
        let mut settings = parallel.settings();
        settings
            .extend([("steps_per_epoch", steps_per_epoch.to_string()), ("bf16_copy", bf16_copy.to_string())]);
        settings
    }

    /// Checks that the settings are compatible with each other and with `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<()> {
        if self.steps_per_epoch == 0 {
            let problem = "an epoch has at least one step".to_owned();
            return Err(Error::InvalidArgument { operation: "data parallel", problem });
        }
        self.parallel.check(ranks)
    }
}
