//! Output of the programs: `outln!` and `errln!` replace `println!` and `eprintln!`, which panic if a write fails.
//!
//! - If the reader of standard output has closed it, as `head` does, the program exits at once and silently, like
//!   `cat`, with the exit code that a shell shows for `cat`, 141 (128 + SIGPIPE). Exit code 0 would claim that
//!   everything was done. (Rust's runtime ignores the signal itself, and only unsafe code could change that.)
//! - If standard output fails for another reason, such as a full disk, that is reported once, the program finishes
//!   its work, and its exit code is 1.
//! - If standard error fails, there is nowhere to report it.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use mgpu::World;

/// Exit code after the reader has closed standard output: 128 + SIGPIPE.
const READER_LEFT: i32 = 141;

/// Set if some output was lost.
static LOST: AtomicBool = AtomicBool::new(false);

/// Prints a line to standard output.
macro_rules! outln {
    ($($argument:tt)*) => {
        $crate::print::print(format_args!("{}\n", format_args!($($argument)*)))
    };
}

/// Prints a line to standard error.
macro_rules! errln {
    ($($argument:tt)*) => {
        $crate::print::print_error(format_args!("{}\n", format_args!($($argument)*)))
    };
}

pub(crate) use {errln, outln};

/// Prints text to standard output.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    let mut stdout = io::stdout().lock();
    take_result(stdout.write_fmt(text).and_then(|()| stdout.flush()));
}

/// Prints text to standard error.
pub(crate) fn print_error(text: fmt::Arguments<'_>) {
    // There is nowhere to report a failure.
    let _ = io::stderr().write_fmt(text);
}

/// Parses the program's arguments. Help is printed in the same way.
pub(crate) fn parse_arguments<P: Parser>() -> P {
    P::try_parse().unwrap_or_else(|error| end(&error))
}

/// Prints a usage error or help, and exits.
pub(crate) fn end(error: &clap::Error) -> ! {
    let printed = error.print();
    if !error.use_stderr() {
        take_result(printed);
    }
    process::exit(if LOST.load(Ordering::Relaxed) { 1 } else { error.exit_code() })
}

/// `code`, unless output was lost.
pub(crate) fn exit_code(code: ExitCode) -> ExitCode {
    if LOST.load(Ordering::Relaxed) { ExitCode::FAILURE } else { code }
}

/// Prints what the user should know about the run, on one of its ranks.
pub(crate) fn print_notices(program: &str, world: &World) {
    for notice in world.notices().iter().filter(|_| world.rank() == 0) {
        errln!("{program}: {notice}");
    }
}

/// True if standard output is a terminal that a person watches.
pub(crate) fn is_watched() -> bool {
    // Open MPI also gives its ranks a terminal, reads from it, and writes the output elsewhere.
    io::stdout().is_terminal() && std::env::var_os("OMPI_COMM_WORLD_RANK").is_none()
}

fn take_result(result: io::Result<()>) {
    match result {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => process::exit(READER_LEFT),
        Err(error) => {
            if !LOST.swap(true, Ordering::Relaxed) {
                let path = std::env::args_os().next().unwrap_or_default();
                let program = Path::new(&path).file_name().unwrap_or(OsStr::new("mgpu"));
                errln!("{}: cannot write to standard output: {error}", program.display());
            }
        }
    }
}
