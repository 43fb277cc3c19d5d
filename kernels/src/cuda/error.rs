//! The errors of GPU calls.

use std::fmt;

use super::driver::DriverError;

/// Result of a call to this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library is not installed, or not in a version that can be used. One line: what is missing, where it was
    /// searched for, what to install.
    #[error("{0}")]
    Missing(String),
    /// There is no GPU with this ordinal.
    #[error("there is no GPU {ordinal}: CUDA sees {count}{}", visible())]
    NoDevice {
        /// The requested GPU, from 0.
        ordinal: u32,
        /// Number of GPUs.
        count: u32,
    },
    /// The driver returned an error.
    #[error("{call} failed: {text} (CUDA error {code})")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The driver's code.
        code: u32,
        /// Its name and description.
        text: String,
    },
    /// Not enough GPU memory.
    #[error("{wanted} bytes of GPU memory are needed, but only {free} of {total} are free")]
    OutOfMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
        /// Total bytes of the GPU.
        total: u64,
    },
    /// A kernel does not compile for this GPU.
    #[error("kernel source `{kernels}` does not compile for {architecture}: {log}")]
    Compile {
        /// The source's name.
        kernels: &'static str,
        /// The architecture, such as `sm_90`.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// No kernel computes a layer's pass correctly, for a batch of this size.
    #[error("no correct kernel for {pass}: {why}")]
    NoKernel {
        /// The pass, the layer, the batch and the precision.
        pass: String,
        /// What is wrong with which kernel.
        why: String,
    },
    /// A library of ready-made kernels returned an error.
    #[error("{call} failed: {text}")]
    Library {
        /// The library's function.
        call: &'static str,
        /// The library's reason.
        text: String,
    },
}

/// As [`Display`](fmt::Display), because `main` prints a returned error with `Debug`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The value of `CUDA_VISIBLE_DEVICES`, which limits the GPUs that CUDA sees.
fn visible() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => format!(" (CUDA_VISIBLE_DEVICES is `{list}`)"),
        Err(_) => String::new(),
    }
}

impl Error {
    /// Adds to an error of the driver where it was detected: CUDA reports errors of asynchronous work in later calls.
    #[must_use]
    pub fn detected_by(mut self, place: &str) -> Self {
        if let Error::Driver { text, .. } = &mut self {
            *text = format!("{text}; detected by {place}");
        }
        self
    }

    /// The error of `call`.
    pub(super) fn driver(call: &'static str, error: DriverError) -> Self {
        Error::Driver { call, code: error.0, text: error.text() }
    }
}

/// Adds the name of the function that failed.
pub(super) trait Context<T> {
    fn context(self, call: &'static str) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, DriverError> {
    fn context(self, call: &'static str) -> Result<T> {
        self.map_err(|error| Error::driver(call, error))
    }
}
