//! NCCL's result codes as values.
//!
//! Every NCCL function returns an integer. 0 is success; 7 means that a non-blocking communicator is still working,
//! which is not a failure; everything else is an error, including codes introduced after these bindings were
//! generated. Those keep their number, so that an error of a newer library can still be looked up.

use std::fmt;

use crate::sys::ncclResult_t;
use thiserror::Error;

/// Why a call of an NCCL function failed.
#[derive(Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NcclError {
    /// NCCL returned something other than success or "in progress".
    #[error("{function} failed: {message} (NCCL result {code})")]
    Call {
        /// The result code as NCCL returned it; not necessarily one that this crate has a name for.
        code: u32,
        /// The C function, such as `ncclAllReduce`.
        function: &'static str,
        /// NCCL's own text for the code.
        message: String,
    },
    /// The library is too old, too new or not NCCL: it does not export the function.
    #[error("{function} is missing from {library}: {message}")]
    MissingSymbol {
        /// The C function that was to be called.
        function: &'static str,
        /// The library's place, as [`Library::origin`](crate::Library::origin) returns it.
        library: String,
        /// The loader's message.
        message: String,
    },
}

/// As [`Display`](fmt::Display), because `main` prints a returned error with `Debug`.
impl fmt::Debug for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl NcclError {
    /// The C function that failed or was missing.
    pub fn function(&self) -> &'static str {
        match self {
            Self::Call { function, .. } | Self::MissingSymbol { function, .. } => function,
        }
    }

    /// The NCCL result, if the function could be called at all.
    pub fn code(&self) -> Option<ncclResult_t> {
        match self {
            Self::Call { code, .. } => Some(ncclResult_t(*code)),
            Self::MissingSymbol { .. } => None,
        }
    }
}

/// The state of a successful call. Only calls on a non-blocking communicator return [`Progress::InProgress`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "an operation in progress must be polled before anything else is enqueued"]
pub enum Progress {
    /// The call has done its work (for a collective: it is enqueued on its stream).
    Done,
    /// NCCL continues in the background: poll [`Library::comm_async_error`](crate::Library::comm_async_error) until
    /// it returns something else, and enqueue nothing on the communicator's streams before.
    InProgress,
}

/// Splits a result code into progress and error. `describe` returns the text of an error and is called only for one.
///
/// ```
/// use nccl_sys::{Progress, check, ncclResult_t};
/// let text = |_| "from the future".to_owned();
/// assert_eq!(check(ncclResult_t(0), "ncclGroupEnd", text), Ok(Progress::Done));
/// assert_eq!(check(ncclResult_t(7), "ncclGroupEnd", text), Ok(Progress::InProgress));
/// let error = check(ncclResult_t(4242), "ncclGroupEnd", text).unwrap_err();
/// assert_eq!(error.code(), Some(ncclResult_t(4242)));
/// ```
///
/// # Errors
///
/// [`NcclError::Call`] for every other code, known or not.
pub fn check(
    result: ncclResult_t,
    function: &'static str,
    describe: impl FnOnce(ncclResult_t) -> String,
) -> Result<Progress, NcclError> {
    match result {
        ncclResult_t::ncclSuccess => Ok(Progress::Done),
        ncclResult_t::ncclInProgress => Ok(Progress::InProgress),
        _ => Err(NcclError::Call { code: result.0, function, message: describe(result) }),
    }
}

/// Our own text for a result code, for a library that exports no `ncclGetErrorString`.
pub(crate) fn describe_without_library(result: ncclResult_t) -> &'static str {
    match result {
        ncclResult_t::ncclSuccess => "no error",
        ncclResult_t::ncclUnhandledCudaError => "a CUDA call failed",
        ncclResult_t::ncclSystemError => "a system call failed",
        ncclResult_t::ncclInternalError => "an internal check of NCCL failed",
        ncclResult_t::ncclInvalidArgument => "an argument has an invalid value",
        ncclResult_t::ncclInvalidUsage => "the call is not allowed here",
        ncclResult_t::ncclRemoteError => "a remote rank failed or left",
        ncclResult_t::ncclInProgress => "still in progress",
        ncclResult_t::ncclTimeout => "timed out",
        _ => "a result code unknown to these bindings",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_but_two_is_an_error_that_keeps_its_number() {
        for code in (0..20).chain([4242, u32::MAX]) {
            let outcome =
                check(ncclResult_t(code), "ncclAllReduce", |result| describe_without_library(result).into());
            match (code, outcome) {
                (0, outcome) => assert_eq!(outcome, Ok(Progress::Done)),
                (7, outcome) => assert_eq!(outcome, Ok(Progress::InProgress)),
                (_, outcome) => {
                    let error = outcome.unwrap_err();
                    assert_eq!(error.code(), Some(ncclResult_t(code)));
                    assert_eq!(error.function(), "ncclAllReduce");
                    assert!(error.to_string().contains(&code.to_string()), "{error}");
                }
            }
        }
    }

    #[test]
    fn success_is_never_described() {
        let _ = check(ncclResult_t(0), "ncclGroupEnd", |_| panic!("asked for the text of a success"));
    }
}
