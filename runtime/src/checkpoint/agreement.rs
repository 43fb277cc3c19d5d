//! Ranks agree whether a part of their work has succeeded.
//!
//! One host's full disk must not leave the ranks of other hosts waiting. So after each part of the work all ranks tell
//! each other how it went. If it failed anywhere, all of them return the same error, which names the host.

use std::path::{Path, PathBuf};

use nix::unistd::gethostname;
use serde::{Deserialize, Serialize};

use crate::comm::Communicator;
use crate::{Error, Result};

/// An error on its way to other hosts.
#[derive(Debug, Serialize, Deserialize)]
struct Failure {
    is_damage: bool,
    path: String,
    problem: String,
}

impl Failure {
    /// `folder` stands for the file if the error names none.
    fn new(error: &Error, folder: &Path, (host, rank): (usize, u32)) -> Self {
        let (is_damage, path, problem) = match error {
            Error::Damaged { path, problem } => (true, &**path, problem.clone()),
            Error::Checkpoint { path, problem } => (false, &**path, problem.clone()),
            other => (false, folder, other.to_string()),
        };
        let name =
            gethostname().map_or_else(|_| "unknown".into(), |name| name.to_string_lossy().into_owned());
        let problem = format!("on host {name} (node {host}, rank {rank}): {problem}");
        Failure { is_damage, path: path.to_string_lossy().into_owned(), problem }
    }

    fn into_error(self) -> Error {
        let (path, problem) = (PathBuf::from(self.path), self.problem);
        if self.is_damage { Error::Damaged { path, problem } } else { Error::Checkpoint { path, problem } }
    }
}

/// Returns this rank's result if all ranks have succeeded, and otherwise the error of the first rank that has failed.
/// `host` is this rank's host. Collective.
pub(super) fn agree<T>(comm: &mut Communicator, folder: &Path, host: usize, own: Result<T>) -> Result<T> {
    let failure = own.as_ref().err().map(|error| Failure::new(error, folder, (host, comm.rank())));
    let text = failure.map_or(Vec::new(), |failure| {
        serde_json::to_vec(&failure).expect("texts can always be written as JSON")
    });
    let texts = comm.all_gather_bytes(&text)?;
    let Some((rank, text)) = texts.iter().enumerate().find(|(_, text)| !text.is_empty()) else { return own };
    let failure: Failure = serde_json::from_slice(text).map_err(|error| Error::Protocol {
        peer: format!("rank {rank}"),
        problem: format!("not an error of a checkpoint: {error}"),
    })?;
    Err(failure.into_error())
}
