//! Everything that can go wrong in the runtime, in one enum.
//!
//! Every variant says what happened and to which rank, and where a peer is to blame, which one.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mgpu_control::progress::Blame;

/// Result of a runtime call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment of this process does not describe a rank.
    #[error("environment variable {name} {problem}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// What is wrong with it and what it should be.
        problem: String,
    },
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
    #[error(fmt = mgpu_control::error::timeout)]
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
    /// Two ranks called different operations, or the same one with different arguments.
    #[error("ranks disagree on operation {sequence}: rank {rank} calls {ours}, rank {peer} calls {theirs}")]
    Mismatch {
        /// The rank that noticed.
        rank: u32,
        /// The first rank that differs from it.
        peer: u32,
        /// Position of the operation in the communicator's life, from 1.
        sequence: u32,
        /// This rank's call.
        ours: String,
        /// The other rank's call.
        theirs: String,
    },
    /// The communicator failed earlier and can no longer be used.
    #[error("this communicator of rank {rank} is unusable since an earlier error: {cause}")]
    Poisoned {
        /// The rank.
        rank: u32,
        /// The earlier error.
        cause: String,
    },
    /// The process is a child that a rank has forked: it has a copy of the rank's memory, and no part in the run.
    #[error(fmt = mgpu_control::error::forked)]
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
    /// Ranks hold different models.
    #[error("rank {rank} and rank {peer} hold different models: {difference}")]
    LayoutMismatch {
        /// The rank it is compared with.
        rank: u32,
        /// The rank that differs.
        peer: u32,
        /// The first difference.
        difference: String,
    },
    /// Ranks that should hold equal weights do not.
    #[error("rank {peer} holds other weights than rank {rank} in tensor `{tensor}`")]
    Diverged {
        /// The rank that noticed.
        rank: u32,
        /// The rank that differs.
        peer: u32,
        /// The first tensor that differs.
        tensor: String,
    },
    /// A rank has computed gradients that are infinite or not a number.
    #[error("rank {rank} has gradients that are not finite numbers, in tensor `{tensor}`, in step {step}")]
    NotFinite {
        /// The rank that has them.
        rank: u32,
        /// A tensor with such gradients: if there are several, one of those that its backward pass came to first.
        tensor: String,
        /// The step, from 1.
        step: u64,
    },
    /// The gradients of all ranks together are infinite or not a number, in the sum or in the mean.
    #[error(
        "the gradients of all ranks together are not finite in tensor `{tensor}`, in step {step}, although no rank was seen to \
         have such gradients: their sum overflows, or a single element of a large tensor is not finite; a smaller loss has \
         smaller gradients"
    )]
    ReducedNotFinite {
        /// A tensor with such gradients.
        tensor: String,
        /// The step, from 1.
        step: u64,
    },
    /// Ranks that should have the same number of something do not.
    #[error("rank {peer} has {theirs} {what} where rank {rank} has {ours}")]
    Disagreement {
        /// The rank it is compared with.
        rank: u32,
        /// The rank that differs.
        peer: u32,
        /// What they have: "steps in epoch 3".
        what: String,
        /// How many `rank` has.
        ours: i64,
        /// How many `peer` has.
        theirs: i64,
    },
    /// Ranks that need the same setting have different ones.
    #[error("rank {peer} has {setting} {theirs} where rank {rank} has {ours}; all ranks need the same")]
    SettingMismatch {
        /// The rank it is compared with.
        rank: u32,
        /// The rank that differs.
        peer: u32,
        /// The name of the setting.
        setting: String,
        /// Its value on `rank`.
        ours: String,
        /// Its value on `peer`.
        theirs: String,
    },
    /// Something went wrong in the program's own part of a step.
    #[error("{0}")]
    Program(Arc<dyn std::error::Error + Send + Sync>),
    /// A GPU, its driver or one of NVIDIA's libraries: missing, or it refused something.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] mgpu_kernels::cuda::Error),
    /// NCCL failed, in a call or in the background.
    #[error("rank {rank} in {operation}: {problem}")]
    Nccl {
        /// The rank.
        rank: u32,
        /// What it was doing.
        operation: String,
        /// NCCL's own text.
        problem: String,
    },
    /// A call into NCCL or the driver, or a rank's own work on its GPU, did not come to an end, which no peer can be the
    /// reason of.
    #[error(
        "rank {rank} is stuck in {operation}: {call} has not returned for {:.1} s, although it waits for nobody",
        after.as_secs_f64()
    )]
    Stuck {
        /// The rank, which is itself to blame.
        rank: u32,
        /// What it was doing.
        operation: String,
        /// The function, or the work.
        call: &'static str,
        /// How long ago that call began.
        after: Duration,
    },
    /// A timeline cannot be written. Everything else goes on without it.
    #[error("cannot write the timeline {}: {problem}", path.display())]
    Timeline {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A checkpoint is not as it was written: a file is missing, or has another size or content.
    #[error("checkpoint {}: damaged: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A checkpoint cannot be written or read.
    #[error("checkpoint {}: {problem}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// As [`Display`](fmt::Display), with the causes of a [program's error](Error::program): `main` shows an error that it
/// returns in this way.
///
/// ```
/// let error = mgpu::Error::program("no more images");
/// assert_eq!(format!("{error:?}"), "no more images");
/// ```
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.to_string();
        // The others say all they know.
        if let Error::Program(error) = self {
            let causes = std::iter::successors(error.source(), |cause| cause.source());
            for cause in causes.map(|cause| cause.to_string()) {
                // Many errors have their cause in their own text.
                if !text.ends_with(&cause) {
                    text += &format!(": {cause}");
                }
            }
        }
        f.write_str(&text)
    }
}

impl Error {
    /// An error of the program's own, to be passed through a step.
    ///
    /// ```
    /// let error = mgpu::Error::program("no more images");
    /// assert_eq!(error.to_string(), "no more images");
    /// ```
    pub fn program(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Program(Arc::from(error.into()))
    }

    /// What the progress page is told of it, if it names a culprit.
    pub(crate) fn blame(&self) -> Option<Blame> {
        let timed_out = matches!(
            self,
            Error::Timeout { .. } | Error::Stuck { .. } | Error::PeerLost { silent: true, .. }
        );
        Some(Blame { culprit: self.culprit()?, timed_out, message: self.to_string() })
    }

    /// A refusal of the operating system while trying to `action`.
    pub(crate) fn system(action: impl Into<String>, reason: impl ToString) -> Self {
        Error::System { action: action.into(), reason: reason.to_string() }
    }

    /// The rank that this error holds responsible, if it names one.
    pub fn culprit(&self) -> Option<u32> {
        match self {
            Error::PeerLost { peer, .. }
            | Error::Mismatch { peer, .. }
            | Error::LayoutMismatch { peer, .. }
            | Error::SettingMismatch { peer, .. }
            | Error::Diverged { peer, .. }
            | Error::Disagreement { peer, .. } => Some(*peer),
            Error::Timeout { waited_for, .. } => waited_for.first().copied(),
            Error::Stuck { rank, .. } | Error::Nccl { rank, .. } | Error::NotFinite { rank, .. } => {
                Some(*rank)
            }
            _ => None,
        }
    }
}

/// Each variant becomes the one of the same name.
impl From<mgpu_control::Error> for Error {
    fn from(error: mgpu_control::Error) -> Self {
        use mgpu_control::Error as Control;
        match error {
            Control::System { action, reason } => Error::System { action, reason },
            Control::Join { rank, problem } => Error::Join { rank, problem },
            Control::Rendezvous { rank, operation, problem } => {
                Error::Rendezvous { rank, operation, problem }
            }
            Control::Protocol { peer, problem } => Error::Protocol { peer, problem },
            Control::Timeout { rank, waited_for, operation, after } => {
                Error::Timeout { rank, waited_for, operation, after }
            }
            Control::PeerLost { rank, peer, operation, how, silent } => {
                Error::PeerLost { rank, peer, operation, how, silent }
            }
            Control::Forked { rank, process } => Error::Forked { rank, process },
            Control::InvalidArgument { operation, problem } => Error::InvalidArgument { operation, problem },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_rank_peer_and_remedy() {
        let error = Error::Timeout {
            rank: 0,
            waited_for: vec![1, 3],
            operation: "all_reduce".into(),
            after: Duration::from_millis(1500),
        };
        assert_eq!(
            error.to_string(),
            "rank 0 waited 1.5 s for ranks 1, 3 in all_reduce; a rank that is slow rather than stuck needs a longer MGPU_TIMEOUT (seconds)"
        );
        assert_eq!(error.culprit(), Some(1));
        // What `main` prints of an error that it returns.
        assert_eq!(format!("{error:?}"), error.to_string());
    }

    #[test]
    fn the_causes_of_a_programs_error_are_told() {
        #[derive(Debug, thiserror::Error)]
        #[error("no images")]
        struct NoImages(#[source] std::io::Error);
        let error = Error::program(NoImages(std::io::Error::other("the disk is gone")));
        assert_eq!(format!("{error:?}"), "no images: the disk is gone");
        assert_eq!(error.to_string(), "no images");
        #[derive(Debug, thiserror::Error)]
        #[error("x.gz: {0}")]
        struct Told(#[source] std::io::Error);
        let error = Error::program(Told(std::io::Error::other("the disk is gone")));
        assert_eq!(format!("{error:?}"), "x.gz: the disk is gone");
    }
}
