//! Why a launch cannot be planned.

use std::fmt;

use mgpu_control::inject::Injection;
use mgpu_control::protocol::MAX_RANKS;

use crate::placement::Gpu;

/// Why there is no plan.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Zero ranks.
    #[error("at least one rank is needed, not 0")]
    NoRanks,
    /// More ranks than [`MAX_RANKS`].
    #[error("{0} ranks are more than the {MAX_RANKS} that mgpurun starts")]
    TooManyRanks(u32),
    /// There are GPUs, but fewer than ranks.
    #[error(
        "{ranks} ranks and {gpus} GPU{}: choose -n {gpus} for one rank on each GPU, or --backend cpu for {ranks} ranks without GPUs (for tests only, --share-gpus)",
        if *gpus == 1 { "" } else { "s" }
    )]
    TooFewGpus {
        /// Requested ranks.
        ranks: u32,
        /// Visible GPUs.
        gpus: usize,
    },
    /// A fault for a rank that does not exist.
    #[error("--inject {0}: there is no rank {rank} among {1} (ranks count from 0)", rank = .0.rank)]
    NoRankToInject(Injection, u32),
    /// There are GPUs, but too few that no other job of the launch takes.
    #[error(
        "{}, and the other jobs of this launch leave {left} of {gpus} GPUs: choose fewer ranks, or --backend cpu (for tests only, --share-gpus)",
        count_ranks(*ranks)
    )]
    TooFewGpusLeft {
        /// Requested ranks.
        ranks: u32,
        /// GPUs that are left.
        left: usize,
        /// Visible GPUs.
        gpus: usize,
    },
    /// Fewer GPUs are free than ranks were requested.
    #[error(
        "{} and {free} free GPUs of {gpus}: {users}; choose fewer ranks, or name GPUs with --gpus",
        count_ranks(*ranks)
    )]
    TooFewFreeGpus {
        /// Requested ranks.
        ranks: u32,
        /// GPUs that are free.
        free: usize,
        /// Visible GPUs.
        gpus: usize,
        /// Who uses the others.
        users: String,
    },
    /// A GPU was named that is not there, or cannot be used.
    #[error("--gpus {name}: {problem}")]
    NoSuchGpu {
        /// As on the command line.
        name: String,
        /// Why it cannot be used, and what can.
        problem: String,
    },
    /// GPUs were chosen for ranks that use none.
    #[error("--gpus chooses GPUs, and --backend cpu uses none: leave out one of them")]
    GpusForCpu,
    /// It is unknown which GPUs there are, so they cannot be divided.
    #[error("several jobs cannot divide the GPUs, because neither the driver nor NVML lists any: {hint}")]
    UnknownGpus {
        /// What to try next.
        hint: &'static str,
    },
    /// Two jobs ask for all remaining GPUs.
    #[error(
        "-n auto for two jobs: both would take all GPUs that the others leave; choose -n or --gpus for each"
    )]
    TwoAutos,
    /// More ranks are required after a failure than there are at the start.
    #[error(
        "--min-ranks {fewest}: the job has only {}; it goes on with fewer after a failure, so choose at most {ranks}",
        count_ranks(*ranks)
    )]
    TooManyAtLeast {
        /// The fewest ranks.
        fewest: u32,
        /// Those of the first start.
        ranks: u32,
    },
    /// A job would go on with fewer ranks, but is not restarted.
    #[error(
        "--min-ranks (or a range of ranks) says how a restart goes on, and there is none: add --max-restarts"
    )]
    NoRestarts,
    /// A job that goes on with fewer ranks has an option for which all are needed.
    #[error("--min-ranks and {option} are incompatible: {why}")]
    NotElastic {
        /// The option.
        option: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// Parts of one world differ in an option that is the same for all of its ranks.
    #[error("--one-world: {option} differs between the parts, and the ranks of one world share it")]
    Mixed {
        /// The option.
        option: &'static str,
    },
    /// The error of one of several jobs.
    #[error("job {job}: {error}")]
    InJob {
        /// The job, numbered from 0.
        job: usize,
        /// Its error.
        error: Box<PlanError>,
    },
    /// NCCL was requested, and this build does not support it.
    #[error("the nccl backend is not part of this build (feature cuda); use --backend cpu")]
    NoNccl,
}

/// Same text as [`Display`](fmt::Display): `main` prints the error that it returns by its `Debug` text.
impl fmt::Debug for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl PlanError {
    /// A launch has reserved this GPU.
    pub(crate) fn held(gpu: &Gpu, holder: &str) -> Self {
        let problem = format!("the GPU is reserved by {holder}; choose another one, or --gpus free");
        PlanError::NoSuchGpu { name: gpu.name.clone(), problem }
    }

    /// True if the command line is wrong, whatever the machine has.
    pub(crate) fn is_usage(&self) -> bool {
        match self {
            PlanError::InJob { error, .. } => error.is_usage(),
            PlanError::NoRanks
            | PlanError::TooManyRanks(_)
            | PlanError::NoRankToInject(..)
            | PlanError::GpusForCpu
            | PlanError::TwoAutos
            | PlanError::TooManyAtLeast { .. }
            | PlanError::NoRestarts
            | PlanError::NotElastic { .. }
            | PlanError::Mixed { .. } => true,
            _ => false,
        }
    }
}

/// "1 rank" or "2 ranks".
fn count_ranks(ranks: u32) -> String {
    format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" })
}
