//! From an error to an exit code.

use std::fmt::Display;
use std::process::ExitCode;

/// Success, or the error as one line on standard error and exit code 1.
pub(crate) fn report<E: Display>(program: &str, result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}
