//! Status codes, and the text of the last error of each thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

/// The result of a call: `MGPU_OK` or one of the errors.
pub type Status = i32;

/// Success.
pub const MGPU_OK: Status = 0;
/// An argument is invalid: a null pointer, an unknown number, a length that does not fit.
pub const MGPU_ERROR_ARGUMENT: Status = 1;
/// The environment variables do not describe a rank.
pub const MGPU_ERROR_ENVIRONMENT: Status = 2;
/// The operating system refused something.
pub const MGPU_ERROR_SYSTEM: Status = 3;
/// The rendezvous refused this rank, could not be reached, or did not serve it.
pub const MGPU_ERROR_RENDEZVOUS: Status = 4;
/// Another rank did not arrive in time.
pub const MGPU_ERROR_TIMEOUT: Status = 5;
/// Another rank has ended, or makes no progress.
pub const MGPU_ERROR_PEER_LOST: Status = 6;
/// Ranks have called different operations, or with different arguments.
pub const MGPU_ERROR_MISMATCH: Status = 7;
/// An earlier error has made the communicator unusable.
pub const MGPU_ERROR_POISONED: Status = 8;
/// This process is a forked child of a rank.
pub const MGPU_ERROR_FORKED: Status = 9;
/// The call was interrupted: see `mgpu_interrupt`.
pub const MGPU_ERROR_INTERRUPTED: Status = 10;
/// Ranks have different layouts, settings or numbers of something.
pub const MGPU_ERROR_DISAGREEMENT: Status = 11;
/// Ranks that should have equal weights do not.
pub const MGPU_ERROR_DIVERGED: Status = 12;
/// Gradients are NaN or infinite. Another reduction may follow.
pub const MGPU_ERROR_NOT_FINITE: Status = 13;
/// A function of the program has returned an error.
pub const MGPU_ERROR_PROGRAM: Status = 14;
/// A GPU, its driver or one of NVIDIA's libraries is missing or has returned an error.
pub const MGPU_ERROR_GPU: Status = 15;
/// A file of a checkpoint is damaged.
pub const MGPU_ERROR_DAMAGED: Status = 16;
/// A checkpoint cannot be written or read.
pub const MGPU_ERROR_CHECKPOINT: Status = 17;
/// An error of a kind that this version has no number for.
pub const MGPU_ERROR_OTHER: Status = 98;
/// A defect of the library: it has panicked. The handles of the call cannot be used any more.
pub const MGPU_ERROR_PANIC: Status = 99;

/// The exit code of a program that was asked to stop and has saved its work.
pub const MGPU_EXIT_STOPPED: i32 = 74;
const _: () = assert!(MGPU_EXIT_STOPPED == mgpu::protocol::EXIT_STOPPED as i32);

/// What a failed call reports.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    text: String,
    culprit: Option<u32>,
}

impl Failure {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        Failure { status, text: text.into(), culprit: None }
    }

    /// An invalid argument.
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(MGPU_ERROR_ARGUMENT, text)
    }

    /// Makes it the last error of this thread, and returns its status.
    pub(crate) fn record(self) -> Status {
        // A zero byte would end the text for C.
        let text = CString::new(self.text.replace('\0', "\\0")).unwrap_or_default();
        let last = LastError { text, culprit: self.culprit };
        // Without effect at the end of a thread, whose text is gone.
        let _ = LAST.try_with(|kept| *kept.borrow_mut() = last);
        self.status
    }
}

impl From<mgpu::Error> for Failure {
    fn from(error: mgpu::Error) -> Self {
        use mgpu::Error;
        let status = match &error {
            Error::InvalidArgument { .. } => MGPU_ERROR_ARGUMENT,
            Error::Environment { .. } => MGPU_ERROR_ENVIRONMENT,
            Error::System { .. } => MGPU_ERROR_SYSTEM,
            Error::Join { .. } | Error::Rendezvous { .. } | Error::Protocol { .. } => MGPU_ERROR_RENDEZVOUS,
            Error::Timeout { .. } | Error::Stuck { .. } => MGPU_ERROR_TIMEOUT,
            Error::PeerLost { .. } => MGPU_ERROR_PEER_LOST,
            Error::Mismatch { .. } => MGPU_ERROR_MISMATCH,
            Error::Poisoned { .. } => MGPU_ERROR_POISONED,
            Error::Forked { .. } => MGPU_ERROR_FORKED,
            Error::Interrupted { .. } => MGPU_ERROR_INTERRUPTED,
            Error::LayoutMismatch { .. } | Error::Disagreement { .. } | Error::SettingMismatch { .. } => {
                MGPU_ERROR_DISAGREEMENT
            }
            Error::Diverged { .. } => MGPU_ERROR_DIVERGED,
            Error::NotFinite { .. } | Error::ReducedNotFinite { .. } => MGPU_ERROR_NOT_FINITE,
            Error::Program(_) => MGPU_ERROR_PROGRAM,
            #[cfg(feature = "cuda")]
            Error::Gpu(_) => MGPU_ERROR_GPU,
            Error::Nccl { .. } => MGPU_ERROR_GPU,
            Error::Damaged { .. } => MGPU_ERROR_DAMAGED,
            Error::Checkpoint { .. } => MGPU_ERROR_CHECKPOINT,
            _ => MGPU_ERROR_OTHER,
        };
        Failure { status, culprit: error.culprit(), text: format!("{error:?}") }
    }
}

struct LastError {
    text: CString,
    culprit: Option<u32>,
}

thread_local! {
    static LAST: RefCell<LastError> = RefCell::new(LastError { text: CString::default(), culprit: None });
}

/// The text of the last call of this thread that failed; empty before. It says what happened to which rank. Valid until
/// the next call of this thread fails, or the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn mgpu_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().text.as_ptr()).unwrap_or(c"the thread is ending".as_ptr())
}

/// The rank that the last failed call of this thread names as the cause, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn mgpu_last_error_rank() -> i64 {
    LAST.try_with(|last| last.borrow().culprit.map_or(-1, i64::from)).unwrap_or(-1)
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn mgpu_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
