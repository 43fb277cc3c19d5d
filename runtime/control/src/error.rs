//! Errors of the control plane.

use std::fmt;
use std::time::Duration;

/// Result of a call of the control plane.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the control plane. The runtime's error has the same variants with the same texts.
#[derive(Clone, thiserror::Error)]
pub enum Error {
    /// A call to the operating system failed.
    #[error("cannot {action}: {reason}")]
    System {
        /// The attempted action.
        action: String,
        /// The system's error.
        reason: String,
    },
    /// The rendezvous rejected this rank or could not be reached.
    #[error("rank {rank} cannot join the run: {problem}")]
    Join {
        /// The rank that wanted to join.
        rank: u32,
        /// Why it could not.
        problem: String,
    },
    /// A request to the rendezvous failed after this rank had joined.
    #[error("rank {rank} in {operation}: {problem}")]
    Rendezvous {
        /// The rank.
        rank: u32,
        /// The request.
        operation: String,
        /// Why it failed.
        problem: String,
    },
    /// A peer sent bytes that are not a message of the protocol.
    #[error("{peer} sent a bad message: {problem}")]
    Protocol {
        /// Who sent it.
        peer: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A deadline passed.
    #[error(fmt = timeout)]
    Timeout {
        /// The rank that waited.
        rank: u32,
        /// The ranks that did not arrive.
        waited_for: Vec<u32>,
        /// The operation in which it waited.
        operation: String,
        /// How long it waited.
        after: Duration,
    },
    /// A peer has ended while this rank needs it.
    #[error("rank {rank} lost rank {peer} in {operation}: rank {peer} {how}")]
    PeerLost {
        /// The rank that noticed.
        rank: u32,
        /// The rank that has ended.
        peer: u32,
        /// The operation that needed it.
        operation: String,
        /// How it ended, as a predicate: "exited with code 3".
        how: String,
        /// True if it has not ended but is stuck: another rank waited for it past its deadline.
        silent: bool,
    },
    /// The program has interrupted the wait.
    #[error("rank {rank} was interrupted in {operation}")]
    Interrupted {
        /// The rank.
        rank: u32,
        /// The operation in which it waited.
        operation: String,
    },
    /// The process is a forked child of a rank: it has a copy of the rank's memory but does not belong to the run.
    #[error(fmt = forked)]
    Forked {
        /// The rank.
        rank: u32,
        /// The child.
        process: u32,
    },
    /// The arguments of a call are invalid.
    #[error("{operation}: {problem}")]
    InvalidArgument {
        /// The call.
        operation: &'static str,
        /// What is wrong.
        problem: String,
    },
}

/// The text of [`Error::Timeout`].
#[doc(hidden)]
pub fn timeout(
    rank: &u32,
    waited_for: &[u32],
    operation: &str,
    after: &Duration,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let numbers: Vec<String> = waited_for.iter().map(u32::to_string).collect();
    let ranks = if waited_for.len() == 1 { "rank" } else { "ranks" };
    write!(
        f,
        "rank {rank} waited {:.1} s for {ranks} {} in {operation}; a rank that is slow rather than stuck needs a longer \
         MGPU_TIMEOUT (seconds)",
        after.as_secs_f64(),
        numbers.join(", "),
    )
}

/// The text of [`Error::Forked`].
#[doc(hidden)]
pub fn forked(rank: &u32, process: &u32, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(
        f,
        "process {process} was forked by rank {rank} and is not a rank: use collectives and the run in the parent only, or \
         fork before joining the world"
    )
}

/// Same text as [`Display`](fmt::Display): `main` prints the error that it returns by its `Debug` text.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The operating system failed to `action`, for `reason`.
    pub fn system(action: impl Into<String>, reason: impl ToString) -> Self {
        Error::System { action: action.into(), reason: reason.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_rank_peer_and_remedy() {
        let (waited_for, operation) = (vec![1, 3], "barrier".into());
        let error = Error::Timeout { rank: 0, waited_for, operation, after: Duration::from_millis(1500) };
        assert_eq!(
            error.to_string(),
            "rank 0 waited 1.5 s for ranks 1, 3 in barrier; a rank that is slow rather than stuck needs a longer MGPU_TIMEOUT (seconds)"
        );
        // The text that `main` prints for a returned error.
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(
            Error::Forked { rank: 2, process: 77 }.to_string().starts_with("process 77 was forked by rank 2")
        );
    }
}
