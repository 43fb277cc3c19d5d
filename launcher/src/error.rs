//! Errors of a launch.

use std::fmt;
use std::io;
use std::path::PathBuf;

use mgpu_control::nodes::who_listens;

use crate::exit_code;
use crate::output::LogError;
use crate::plan::PlanError;
use crate::reservation::ReservationError;

/// Why the ranks could not be started.
#[derive(thiserror::Error)]
pub enum LaunchError {
    /// The request cannot be met.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The rendezvous could not be opened.
    #[error(transparent)]
    Rendezvous(#[from] mgpu_control::Error),
    /// A log file could not be created.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A rank's process could not be started. The ranks started before it have been killed.
    #[error("cannot start rank {rank} ({}): {error}{hint}", program.display())]
    Spawn {
        /// The rank.
        rank: u32,
        /// Its program.
        program: PathBuf,
        /// The system's error.
        error: io::Error,
        /// What to try next; may be empty.
        hint: &'static str,
    },
    /// The port that was chosen for the ranks cannot be used.
    #[error("{from} is {port}: {error}; {}without {from} the port is a free one", who_has(*port, error))]
    MasterPort {
        /// The port.
        port: u16,
        /// The option or environment variable that chose it.
        from: String,
        /// The system's error.
        error: io::Error,
    },
    /// GPUs could not be reserved.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    /// It is unknown which GPUs are free.
    #[error("--gpus free: {0}; --gpus 0,1 names GPUs without asking")]
    Nvml(#[from] nvml::NvmlError),
    /// The address that was chosen for this node is not one.
    #[error("--local-addr is `{0}`: it should be an address of this host, such as 10.0.0.2")]
    LocalAddress(String),
    /// The metrics cannot be served.
    #[error("--metrics-listen {address}: {why}")]
    Metrics {
        /// Where.
        address: String,
        /// Why not, and what to try.
        why: String,
    },
    /// Other nodes could not be looked for.
    #[error("{0}")]
    Network(String),
    /// There are no credentials for the other nodes.
    #[error("{0}")]
    Credentials(String),
    /// Signals could not be set up.
    #[error("cannot wait for signals: {0}")]
    Signals(#[from] nix::Error),
}

impl LaunchError {
    /// The launcher's exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            LaunchError::Plan(error) if error.is_usage() => exit_code::USAGE,
            LaunchError::LocalAddress(_) => exit_code::USAGE,
            LaunchError::Credentials(_) => exit_code::AUTHENTICATION,
            _ => exit_code::LAUNCHER,
        }
    }
}

/// Same text as [`Display`](fmt::Display): `main` prints the error that it returns by its `Debug` text.
impl fmt::Debug for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Who has the port, if another program has it.
fn who_has(port: u16, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => format!("{}; ", who_listens(port)),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_debug_text_of_an_error_is_its_display_text() {
        let path = PathBuf::from("/x/rank-0.log");
        let errors = [
            LaunchError::Plan(PlanError::NoRanks),
            LaunchError::Rendezvous(mgpu_control::Error::system("bind", "no socket")),
            LaunchError::Log(LogError { path, error: io::Error::other("no disk") }),
            LaunchError::Signals(nix::Error::EMFILE),
        ];
        for error in errors {
            assert_eq!(format!("{error:?}"), error.to_string());
        }
        assert_eq!(format!("{:?}", PlanError::NoRanks), PlanError::NoRanks.to_string());
        let error = crate::program::ProgramError::NoFile("/x".into());
        assert_eq!(format!("{error:?}"), "no program at /x");
    }
}
