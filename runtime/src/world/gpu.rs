//! The GPU of a rank, and NCCL where there are others.
//!
//! Both are opened before the rank joins, so that it can say what it works with: ranks that do not go together are told
//! before they begin, not by a collective that never ends.

use std::sync::Arc;

use mgpu_kernels::cuda::{self, Device};
use nccl_sys::Library;

use super::Identity;
use crate::rendezvous::message::Manifest;
use crate::{Error, Result};

/// What a rank under the nccl backend works with.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) device: Arc<Device>,
    /// Not needed in a world of one.
    pub(super) nccl: Option<Library>,
}

impl Gpu {
    /// Opens what the rank needs.
    pub(super) fn open(identity: &Identity) -> Result<Self> {
        let ordinal = identity.device.unwrap_or(identity.local_rank);
        let ordinal = match identity.share_gpus {
            true => ordinal % Device::count()?.max(1),
            false => ordinal,
        };
        let device = Device::open(ordinal)?;
        let nccl = match identity.world_size {
            1 => None,
            _ => Some(Library::open().map_err(|error| cuda::Error::Missing(error.summary()))?),
        };
        Ok(Gpu { device, nccl })
    }

    /// What the other ranks are to know of it.
    pub(super) fn manifest(&self, identity: &Identity) -> Result<Manifest> {
        let version = |nccl: &Library| {
            let version = nccl.version().map_err(|error| Error::Nccl {
                rank: identity.rank,
                operation: "the start".into(),
                problem: error.to_string(),
            })?;
            Ok::<_, Error>(version.to_string())
        };
        let (major, minor) = self.device.driver();
        Ok(Manifest {
            gpu: Some(self.device.uuid().to_owned()),
            driver: Some(format!("for CUDA {major}.{minor}")),
            nccl: self.nccl.as_ref().map(version).transpose()?,
            shares_gpu: identity.share_gpus,
        })
    }
}
