//! The GPU of a rank, and the NCCL library if there are other ranks.
//!
//! Both are opened before the rank joins, so that the rank can tell the rendezvous what it uses. Incompatible ranks
//! are then rejected before they start, instead of hanging in a collective.

use std::sync::Arc;

use mgpu_kernels::cuda::{self, Device};
use nccl_sys::{Library, Version};

use super::Identity;
use super::env::NcclPreflight;
use super::variable::variable_error;
use crate::comm::nccl::RegistrationPolicy;
use crate::protocol::MGPU_NCCL;
use crate::rendezvous::NcclUse;
use crate::rendezvous::message::Manifest;
use crate::{Error, Result};

/// The oldest supported NCCL: it has the configuration of communicators that `owner` uses.
const MIN_NCCL: Version = Version { major: 2, minor: 18, patch: 0 };

/// The first NCCL that passes over interfaces that are not running.
const PASSES_OVER_IDLE: Version = Version { major: 2, minor: 28, patch: 3 };

/// What to try without the missing library.
const CPU_HINT: &str = "`--backend cpu` trains without a GPU";

fn missing(text: String) -> Error {
    Error::Gpu(cuda::Error::Missing(text))
}

/// `CUDA_ERROR_NO_DEVICE`: there is a driver, but no GPU.
const NO_DEVICE: u32 = 100;

/// Number of GPUs that this process sees; 0 without a driver.
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

/// What a rank uses under the nccl backend.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) device: Arc<Device>,
    /// `None` in a world of one, unless `MGPU_NCCL=always` requests it.
    pub(super) nccl: Option<Library>,
    /// Whether NCCL may access buffers in place.
    pub(super) registration: RegistrationPolicy,
}

impl Gpu {
    /// Opens the GPU and, if needed, NCCL.
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
        if identity.nccl_always && identity.rendezvous.is_none() {
            let problem =
                "is always, which needs a launcher's rendezvous; start the program with `mgpurun -n 1`";
            return Err(variable_error(MGPU_NCCL, problem.into()));
        }
        let needs_nccl = identity.world_size > 1 || identity.nccl_always;
        let nccl = needs_nccl.then(|| open_nccl(identity.rank)).transpose()?;
        let registration = RegistrationPolicy::new(identity.nccl_register, identity.share_gpus);
        Ok(Gpu { device, nccl, registration })
    }

    /// How the ranks of this host use NCCL, on several hosts.
    pub(super) fn nccl_use(&self, identity: &Identity) -> Option<NcclUse> {
        let version = self.nccl.as_ref()?.version().ok();
        let may_set = identity.nccl_preflight == NcclPreflight::Set;
        let passes_over_idle = version.map(|version| version >= PASSES_OVER_IDLE);
        (identity.nccl_preflight != NcclPreflight::Off).then_some(NcclUse { passes_over_idle, may_set })
    }

    /// What the rendezvous compares between ranks.
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
