//! The GPU of a rank, and NCCL where there are others.
//!
//! Both are opened before the rank joins, so that it can say what it works with: ranks that do not go together are told
//! before they begin, not by a collective that never ends.

use std::sync::Arc;

use mgpu_kernels::cuda::{self, Device};
use nccl_sys::{Library, Version};

use super::Identity;
use crate::rendezvous::message::Manifest;
use crate::{Error, Result};

/// The oldest NCCL whose communicators can be configured as ours are.
const MIN_NCCL: Version = Version { major: 2, minor: 18, patch: 0 };

/// What else there is for who lacks a library.
const CPU_HINT: &str = "`--backend cpu` trains without a GPU";

fn missing(text: String) -> Error {
    Error::Gpu(cuda::Error::Missing(text))
}

/// CUDA's code for a machine with a driver and no GPU.
const NO_DEVICE: u32 = 100;

/// GPUs that this process sees: none where there is no driver.
pub(super) fn count() -> Result<u32> {
    match Device::count() {
        Ok(count) => Ok(count),
        Err(cuda::Error::Missing(_) | cuda::Error::Driver { code: NO_DEVICE, .. }) => Ok(0),
        Err(error) => Err(Error::Gpu(error)),
    }
}

fn version(nccl: &Library, rank: u32) -> Result<Version> {
    let refused = |error: nccl_sys::NcclError| Error::Nccl {
        rank,
        operation: "the start".into(),
        problem: error.to_string(),
    };
    nccl.version().map_err(refused)
}

fn open_nccl(rank: u32) -> Result<Library> {
    let nccl = Library::open().map_err(|error| missing(error.summary()))?;
    let found = version(&nccl, rank)?;
    if found < MIN_NCCL {
        let origin = nccl.origin();
        return Err(missing(format!("NCCL {found} from {origin} is too old, {MIN_NCCL} or newer is needed")));
    }
    Ok(nccl)
}

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
        Self::find(identity).map_err(|error| match error {
            Error::Gpu(cuda::Error::Missing(text)) => missing(format!("{text}; {CPU_HINT}")),
            other => other,
        })
    }

    fn find(identity: &Identity) -> Result<Self> {
        let ordinal = identity.device.unwrap_or(identity.local_rank);
        let ordinal = match identity.share_gpus {
            true => ordinal % Device::count()?.max(1),
            false => ordinal,
        };
        let device = Device::open(ordinal)?;
        let nccl = match identity.world_size {
            1 => None,
            _ => Some(open_nccl(identity.rank)?),
        };
        Ok(Gpu { device, nccl })
    }

    /// What the other ranks are to know of it.
    pub(super) fn manifest(&self, identity: &Identity) -> Result<Manifest> {
        let version = |nccl: &Library| Ok::<_, Error>(version(nccl, identity.rank)?.to_string());
        let (major, minor) = self.device.driver();
        Ok(Manifest {
            gpu: Some(self.device.uuid().to_owned()),
            driver: Some(format!("for CUDA {major}.{minor}")),
            nccl: self.nccl.as_ref().map(version).transpose()?,
            shares_gpu: identity.share_gpus,
        })
    }
}
