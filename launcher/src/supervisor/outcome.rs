//! How a run ended: the exit code, the culprit and the message.

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::StopCause;
use crate::exit_code;

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Exit code of the launcher; see [`crate::exit_code`].
    pub exit_code: u8,
    /// The culprit.
    pub culprit: Option<u32>,
    /// A restart would not help: the ranks are incompatible, or SIGKILL has not ended some.
    pub incompatible: bool,
    /// What happened, in one line; `None` if all ranks finished.
    pub message: Option<String>,
    /// A signal or an [`Interrupter`](crate::Interrupter) asked for the end.
    pub interrupted: bool,
}

impl Outcome {
    /// Changes the outcome for a `signal` that arrived after all ranks had ended, while leftover processes were running.
    pub(crate) fn interrupt(&mut self, signal: Signal) {
        self.interrupted = true;
        if self.exit_code == exit_code::SUCCESS {
            self.exit_code = exit_code::signalled(signal as i32);
            self.message = Some(format!("stopped by {signal}"));
        }
    }

    /// Notes a request to stop that came too late for the ranks: they are not restarted.
    pub(crate) fn ask_to_stop(&mut self) {
        self.interrupted |= self.culprit.is_some();
    }

    /// True if the ranks ended because somebody asked for it, and not because of a failure.
    pub(crate) fn is_interruption(&self) -> bool {
        self.interrupted && self.culprit.is_none()
    }

    pub(crate) fn success() -> Self {
        Outcome {
            exit_code: exit_code::SUCCESS,
            culprit: None,
            incompatible: false,
            message: None,
            interrupted: false,
        }
    }

    pub(super) fn failure(exit_code: u8, culprit: u32, message: String) -> Self {
        Outcome {
            exit_code,
            culprit: Some(culprit),
            incompatible: false,
            message: Some(message),
            interrupted: false,
        }
    }

    /// The outcome of a run that `signal` interrupts.
    pub(crate) fn interruption(signal: Signal) -> Self {
        Outcome {
            exit_code: exit_code::signalled(signal as i32),
            culprit: None,
            incompatible: false,
            message: Some(format!("stopped by {signal}")),
            interrupted: true,
        }
    }

    /// The outcome of a run that is asked to stop before its ranks are started.
    pub(crate) fn stopped(cause: StopCause) -> Self {
        let message = Some(format!("stopped on request ({})", cause.name()));
        Outcome {
            exit_code: exit_code::STOPPED,
            culprit: None,
            incompatible: false,
            message,
            interrupted: true,
        }
    }
}
