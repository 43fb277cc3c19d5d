//! The runtime's error type: one enum for everything that can go wrong.
//!
//! Every variant says what happened and to which rank, and names the peer at fault if there is one.

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
    /// The environment variables of this process do not describe a rank.
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
    /// The rendezvous did not serve this rank after it had joined.
    #[error("rank {rank} in {operation}: {problem}")]
    Rendezvous {
        /// The rank.
        rank: u32,
        /// What it asked for.
        operation: String,
        /// What happened to the request.
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
    /// A wait timed out.
    #[error(fmt = mgpu_control::error::timeout)]
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
    /// A peer that this rank needs has ended or stopped responding.
    #[error("rank {rank} lost rank {peer} in {operation}: rank {peer} {how}")]
    PeerLost {
        /// The rank that noticed.
        rank: u32,
        /// The rank that was lost.
        peer: u32,
        /// The operation that needed it.
        operation: String,
        /// What happened to it, as a predicate: "exited with code 3".
        how: String,
        /// True if the peer has not ended but stopped making progress: another rank waited for it past its timeout.
        silent: bool,
    },
    /// Two ranks called different operations, or the same one with different arguments.
    #[error("ranks disagree on operation {sequence}: rank {rank} calls {ours}, rank {peer} calls {theirs}")]
    Mismatch {
        /// The rank that noticed.
        rank: u32,
        /// The first rank that differs from it.
        peer: u32,
        /// Sequence number of the operation in its communicator, from 1.
        sequence: u32,
        /// This rank's call.
        ours: String,
        /// The other rank's call.
        theirs: String,
    },
    /// The communicator failed earlier and can no longer be used.
    #[error("this communicator of rank {rank} is unusable after an earlier error: {cause}")]
    Poisoned {
        /// The rank.
        rank: u32,
        /// The earlier error.
        cause: String,
    },
    /// This process is a forked child of a rank: it has a copy of the rank's memory, but is not part of the run.
    #[error(fmt = mgpu_control::error::forked)]
    Forked {
        /// The rank.
        rank: u32,
        /// The child.
        process: u32,
    },
    /// The caller passed invalid arguments.
    #[error("{operation}: {problem}")]
    InvalidArgument {
        /// The call.
        operation: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The program has [interrupted](crate::World::interrupt_when) the wait.
    #[error("rank {rank} was interrupted in {operation}")]
    Interrupted {
        /// The rank, which is itself the reason.
        rank: u32,
        /// The operation in which it waited.
        operation: String,
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
    #[error("rank {peer} has different weights than rank {rank} in tensor `{tensor}`")]
    Diverged {
        /// The rank that noticed.
        rank: u32,
        /// The rank that differs.
        peer: u32,
        /// The first tensor that differs.
        tensor: String,
    },
    /// A rank has computed non-finite gradients (NaN or Inf).
    #[error("rank {rank} has non-finite gradients (NaN or Inf) in tensor `{tensor}`, in step {step}")]
    NotFinite {
        /// The rank that has them.
        rank: u32,
        /// A tensor with non-finite gradients. If there are several, it is one of those that the backward pass
        /// reached first.
        tensor: String,
        /// The step, from 1.
        step: u64,
    },
    /// The reduced gradients (sum or mean over ranks) are non-finite (NaN or Inf).
    #[error(
        "the reduced gradients are non-finite (NaN or Inf) in tensor `{tensor}`, in step {step}, although no rank's own \
         gradients were found to be: the sum overflows, or a single element of a large tensor is non-finite; try to scale \
         the loss down"
    )]
    ReducedNotFinite {
        /// A tensor with such gradients.
        tensor: String,
        /// The step, from 1.
        step: u64,
    },
    /// Ranks that must have the same number of something have different numbers.
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
    /// Ranks have different values of a setting that must be the same.
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
    /// An error of the program's own code within a step.
    #[error("{0}")]
    Program(Arc<dyn std::error::Error + Send + Sync>),
    /// A GPU, its driver or one of NVIDIA's libraries is missing or has returned an error.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] mgpu_kernels::cuda::Error),
    /// NCCL returned an error, from a call or asynchronously.
    #[error("rank {rank} in {operation}: {problem}")]
    Nccl {
        /// The rank.
        rank: u32,
        /// What it was doing.
        operation: String,
        /// NCCL's own text.
        problem: String,
    },
    /// A call into NCCL or the driver, or the rank's own work on its GPU, did not end, and no peer can be the reason.
    #[error(
        "rank {rank} is stuck in {operation}: {call} has not returned for {:.1} s, although it does not wait for another rank",
        after.as_secs_f64()
    )]
    Stuck {
        /// The rank, which is itself at fault.
        rank: u32,
        /// What it was doing.
        operation: String,
        /// The function, or the work.
        call: &'static str,
        /// How long ago that call began.
        after: Duration,
    },
    /// A timeline cannot be written. The training is not affected.
    #[error("cannot write the timeline {}: {problem}", path.display())]
    Timeline {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A checkpoint is damaged: a file is missing, or its size or checksum differs from the manifest.
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

/// As [`Display`](fmt::Display), and for a [program's error](Error::program) followed by its causes. `main` prints
/// the error that it returns in this form.
///
/// ```
/// let error = mgpu::Error::program("no more images");
/// assert_eq!(format!("{error:?}"), "no more images");
/// ```
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.to_string();
        // All other variants contain their cause in their text.
        if let Error::Program(error) = self {
            let causes = std::iter::successors(error.source(), |cause| cause.source());
            for cause in causes.map(|cause| cause.to_string()) {
                // Many errors repeat their cause in their own text.
                if !text.ends_with(&cause) {
                    text += &format!(": {cause}");
                }
            }
        }
        f.write_str(&text)
    }
}

impl Error {
    /// Wraps an error of the program, so that a step can return it.
    ///
    /// ```
    /// let error = mgpu::Error::program("no more images");
    /// assert_eq!(error.to_string(), "no more images");
    /// ```
    pub fn program(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Program(Arc::from(error.into()))
    }

    /// The same error between other ranks, if it is about what two ranks of a communicator hold.
    pub(crate) fn with_ranks(mut self, other: impl Fn(u32) -> u32) -> Self {
        if let Error::LayoutMismatch { rank, peer, .. }
        | Error::Diverged { rank, peer, .. }
        | Error::Disagreement { rank, peer, .. }
        | Error::SettingMismatch { rank, peer, .. } = &mut self
        {
            (*rank, *peer) = (other(*rank), other(*peer));
        }
        self
    }

    /// What is written to the progress page for this error, if it names a rank at fault.
    pub(crate) fn blame(&self) -> Option<Blame> {
        let timed_out = matches!(
            self,
            Error::Timeout { .. } | Error::Stuck { .. } | Error::PeerLost { silent: true, .. }
        );
        Some(Blame { culprit: self.culprit()?, timed_out, message: self.to_string() })
    }

    /// An error of the operating system while trying to `action`.
    pub(crate) fn system(action: impl Into<String>, reason: impl ToString) -> Self {
        Error::System { action: action.into(), reason: reason.to_string() }
    }

    /// The rank at fault, if the error names one.
    pub fn culprit(&self) -> Option<u32> {
        match self {
            Error::PeerLost { peer, .. }
            | Error::Mismatch { peer, .. }
            | Error::LayoutMismatch { peer, .. }
            | Error::SettingMismatch { peer, .. }
            | Error::Diverged { peer, .. }
            | Error::Disagreement { peer, .. } => Some(*peer),
            Error::Timeout { waited_for, .. } => waited_for.first().copied(),
            Error::Stuck { rank, .. }
            | Error::Nccl { rank, .. }
            | Error::NotFinite { rank, .. }
            | Error::Interrupted { rank, .. } => Some(*rank),
            _ => None,
        }
    }
}

/// Converts each variant to the one of the same name.
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
            Control::Interrupted { rank, operation } => Error::Interrupted { rank, operation },
            Control::Forked { rank, process } => Error::Forked { rank, process },
            Control::InvalidArgument { operation, problem } => Error::InvalidArgument { operation, problem },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_rank_peer_and_what_to_try() {
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
        // `main` prints a returned error with `Debug`.
        assert_eq!(format!("{error:?}"), error.to_string());
    }

    #[test]
    fn debug_output_of_a_program_error_includes_its_causes() {
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
