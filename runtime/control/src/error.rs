//! Everything that can go wrong in the control plane.

use std::fmt;
use std::time::Duration;

/// Result of a call of the control plane.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. The runtime's error has each of these variants too, with the same text.
#[derive(Clone, thiserror::Error)]
pub enum Error {
    /// The operating system refused something.
    #[error("cannot {action}: {reason}")]
    System {
        /// What was tried.
        action: String,
        /// The system's reason.
        reason: String,
    },
    /// The rendezvous refused this rank, or could not be reached.
    #[error("rank {rank} cannot join the run: {problem}")]
    Join {
        /// The rank that wanted to join.
        rank: u32,
        /// Why it could not.
        problem: String,
    },
    /// The rendezvous, which this rank had joined, did not serve it.
    #[error("rank {rank} in {operation}: {problem}")]
    Rendezvous {
        /// The rank.
        rank: u32,
        /// What it asked for.
        operation: String,
        /// What became of that.
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
        /// The ranks that did not come.
        waited_for: Vec<u32>,
        /// What it waited in.
        operation: String,
        /// How long it waited.
        after: Duration,
    },
    /// A peer is gone while this rank needs it.
    #[error("rank {rank} lost rank {peer} in {operation}: rank {peer} {how}")]
    PeerLost {
        /// The rank that noticed.
        rank: u32,
        /// The rank that is gone.
        peer: u32,
        /// What needed it.
        operation: String,
        /// What became of it, as a predicate: "exited with code 3".
        how: String,
        /// True when it is not gone but silent: another rank waited for it past its deadline.
        silent: bool,
    },
    /// The process is a child that a rank has forked: it has a copy of the rank's memory, and no part in the run.
    #[error(fmt = forked)]
    Forked {
        /// The rank.
        rank: u32,
        /// The child.
        process: u32,
    },
    /// The caller's arguments make no sense.
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
        "process {process} was forked by rank {rank} and is no rank itself: leave collectives and the run to the parent, or \
         fork before the world is joined"
    )
}

/// As [`Display`](fmt::Display): `main` shows an error that it returns in this way.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// A refusal of the operating system while trying to `action`.
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
        // What `main` prints of an error that it returns.
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(
            Error::Forked { rank: 2, process: 77 }.to_string().starts_with("process 77 was forked by rank 2")
        );
    }
}
