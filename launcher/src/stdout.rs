//! `mgpurun`'s own standard output: help, reports, dry runs.

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;

use crate::exit_code;

/// Prints `text`. Returns `code`, or [`exit_code::BROKEN_PIPE`] without a message if the reader has exited.
pub(crate) fn print(text: &str, code: ExitCode) -> Result<ExitCode, Box<dyn Error>> {
    let mut stdout = io::stdout().lock();
    after(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()), code)
}

/// Parses the arguments of a command. Returns an exit code if help was printed or the arguments are wrong.
pub(crate) fn parse<P: Parser>(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Result<P, ExitCode>, Box<dyn Error>> {
    match P::try_parse_from(arguments) {
        Ok(parsed) => Ok(Ok(parsed)),
        Err(error) => refuse(&error).map(Err),
    }
}

/// Prints help, or what is wrong with the arguments. Returns the exit code.
pub(crate) fn refuse(error: &clap::Error) -> Result<ExitCode, Box<dyn Error>> {
    let printed = error.print();
    let code = ExitCode::from(error.exit_code() as u8);
    // Errors of writing to standard error cannot be reported.
    if error.use_stderr() { Ok(code) } else { after(printed, code) }
}

fn after(printed: io::Result<()>, code: ExitCode) -> Result<ExitCode, Box<dyn Error>> {
    match printed {
        Ok(()) => Ok(code),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(ExitCode::from(exit_code::BROKEN_PIPE)),
        Err(error) => Err(format!("cannot write to standard output: {error}").into()),
    }
}
