//! Configuration of a [`DeviceDataParallel`](super::DeviceDataParallel).

use super::super::config::{DataParallelConfig, Placement};
use super::UpdatePlan;
use crate::comm::DType;
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
    /// Keep a copy of the parameters in f16 instead.
    pub f16_copy: bool,
}

impl DeviceConfig {
    /// `parallel` with one step per epoch and without a copy of the parameters.
    pub fn new(parallel: DataParallelConfig) -> Self {
        DeviceConfig { parallel, steps_per_epoch: 1, bf16_copy: false, f16_copy: false }
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

    /// Keeps a copy of the parameters in `dtype`: [bf16](Self::bf16_copy) or [f16](Self::f16_copy); none if it is another
    /// type, such as f32.
    #[must_use]
    pub fn with_copy_in(self, dtype: DType) -> Self {
        DeviceConfig { bf16_copy: dtype == DType::Bf16, f16_copy: dtype == DType::F16, ..self }
    }

    /// The element type of the copy of the parameters, if there is one.
    pub(super) fn copy(&self) -> Option<DType> {
        if self.f16_copy { Some(DType::F16) } else { self.bf16_copy.then_some(DType::Bf16) }
    }

    /// What kernels derive from the index of a step, and from the gradients of the one before.
    pub(super) fn plan(&self) -> UpdatePlan {
        let DataParallelConfig { optimizer, placement, loss_scaler, .. } = self.parallel;
        // Where the host updates the parameters, it scales the loss.
        let loss_scaler = loss_scaler.filter(|_| placement != Placement::Host);
        UpdatePlan { steps_per_epoch: self.steps_per_epoch, schedule: optimizer.schedule, loss_scaler }
    }

    /// All settings that must be the same on all ranks, by name.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        let DeviceConfig { parallel, steps_per_epoch, bf16_copy, f16_copy } = self;
        let mut settings = parallel.settings();
        settings.extend([
            ("steps_per_epoch", steps_per_epoch.to_string()),
            ("bf16_copy", bf16_copy.to_string()),
            ("f16_copy", f16_copy.to_string()),
        ]);
        settings
    }

    /// Checks that the settings are compatible with each other and with `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<()> {
        let problem = if self.steps_per_epoch == 0 {
            "an epoch has at least one step"
        } else if self.bf16_copy && self.f16_copy {
            "there is one copy of the parameters, in bf16 or in f16"
        } else {
            return self.parallel.check(ranks);
        };
        Err(Error::InvalidArgument { operation: "data parallel", problem: problem.to_owned() })
    }
}
