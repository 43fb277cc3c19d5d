//! Why a launch does not come about.

use std::io;
use std::path::PathBuf;

use crate::exit_code;
use crate::output::LogError;
use crate::plan::PlanError;

/// Why the ranks could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The request cannot be met.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The rendezvous could not be opened.
    #[error(transparent)]
    Rendezvous(#[from] mgpu::Error),
    /// A log file could not be made.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A rank's process could not be made. Those before it have been ended.
    #[error("cannot start rank {rank} ({}): {error}{hint}", program.display())]
    Spawn {
        /// The rank.
        rank: u32,
        /// What it should have run.
        program: PathBuf,
        /// What the system said.
        error: io::Error,
        /// What to try next; may be empty.
        hint: &'static str,
    },
    /// The system refused something.
    #[error("cannot wait for signals: {0}")]
    Signals(#[from] nix::Error),
}

impl LaunchError {
    /// The launcher's exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            LaunchError::Plan(
                PlanError::NoRanks | PlanError::TooManyRanks(_) | PlanError::NoRankToInject(..),
            ) => exit_code::USAGE,
            _ => exit_code::LAUNCHER,
        }
    }
}
