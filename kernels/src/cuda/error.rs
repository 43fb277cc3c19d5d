//! What can go wrong with a GPU, in one enum.

use std::ffi::CStr;
use std::fmt;

use cudarc::driver::DriverError;

/// Result of a call to this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library is not on this machine, or not one that can be used. One line: what, where it was looked for, what to
    /// install.
    #[error("{0}")]
    Missing(String),
    /// There are fewer GPUs.
    #[error("there is no GPU {ordinal}: CUDA sees {count}{}", visible())]
    NoDevice {
        /// The GPU asked for, from 0.
        ordinal: u32,
        /// GPUs there are.
        count: u32,
    },
    /// The driver refused a call.
    #[error("{call} failed: {text} (CUDA error {code})")]
    Driver {
        /// What was tried.
        call: &'static str,
        /// The driver's code.
        code: u32,
        /// Its name and explanation.
        text: String,
    },
    /// Memory is short.
    #[error("{wanted} bytes of GPU memory are needed where {free} of {total} are free")]
    OutOfMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes of the GPU.
        total: u64,
    },
    /// A kernel does not compile on this machine.
    #[error("kernel source `{kernels}` does not compile for {architecture}: {log}")]
    Compile {
        /// The source's name.
        kernels: &'static str,
        /// The architecture, such as `sm_90`.
        architecture: String,
        /// The compiler's reason.
        log: String,
    },
    /// A library of ready-made kernels refused a call.
    #[error("{call} failed: {text}")]
    Library {
        /// What was tried.
        call: &'static str,
        /// The library's reason.
        text: String,
    },
}

/// As [`Display`](fmt::Display): `main` shows an error that it returns in this way.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How `CUDA_VISIBLE_DEVICES` bears upon what CUDA sees.
fn visible() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => format!(" (CUDA_VISIBLE_DEVICES is `{list}`)"),
        Err(_) => String::new(),
    }
}

impl Error {
    /// The same error, with a word on where it came up if it is the driver's.
    #[must_use]
    pub fn detected_in(mut self, place: &str) -> Self {
        if let Error::Driver { text, .. } = &mut self {
            *text = format!("{text}; noticed by {place}");
        }
        self
    }

    /// The error of `call`.
    pub(super) fn driver(call: &'static str, error: DriverError) -> Self {
        let text = |text: std::result::Result<&CStr, DriverError>| {
            text.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
        };
        let text = format!("{}, {}", text(error.error_name()), text(error.error_string()));
        Error::Driver { call, code: error.0 as u32, text }
    }
}

/// Names the call that failed.
pub(super) trait Context<T> {
    fn context(self, call: &'static str) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, DriverError> {
    fn context(self, call: &'static str) -> Result<T> {
        self.map_err(|error| Error::driver(call, error))
    }
}
