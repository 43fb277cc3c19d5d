//! What the programs print: `outln!` and `errln!` in place of `println!` and `eprintln!`, which panic when a write fails.
//!
//! - The reader of standard output has left, as `head` does: the program ends at once and says nothing, as `cat` does,
//!   with the exit code that a shell shows for `cat`, 141 (128 + SIGPIPE). A code of 0 would claim that everything was
//!   done. (The signal itself is ignored by Rust's runtime, and only unsafe code could change that.)
//! - Standard output takes no more for another reason, such as a full disk: that is told once, the program does its work
//!   to the end, and its exit code is 1.
//! - Standard error takes no more: there is nobody left to be told.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;

/// Exit code of a program whose reader has left: 128 + SIGPIPE.
const READER_LEFT: i32 = 141;

/// Something that was printed is lost.
static LOST: AtomicBool = AtomicBool::new(false);

/// Prints a line on standard output.
macro_rules! outln {
    ($($argument:tt)*) => {
        $crate::print::print(format_args!("{}\n", format_args!($($argument)*)))
    };
}

/// Prints a line on standard error.
macro_rules! errln {
    ($($argument:tt)*) => {
        $crate::print::print_error(format_args!("{}\n", format_args!($($argument)*)))
    };
}

pub(crate) use {errln, outln};

/// Prints text on standard output.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    let mut stdout = io::stdout().lock();
    take_result(stdout.write_fmt(text).and_then(|()| stdout.flush()));
}

/// Prints text on standard error.
pub(crate) fn print_error(text: fmt::Arguments<'_>) {
    // There is nobody left to be told.
    let _ = io::stderr().write_fmt(text);
}

/// The arguments of the program, whose help goes the same way.
pub(crate) fn parse_arguments<P: Parser>() -> P {
    P::try_parse().unwrap_or_else(|error| end(&error))
}

/// Prints a usage error, or help, and ends the program.
pub(crate) fn end(error: &clap::Error) -> ! {
    let printed = error.print();
    if !error.use_stderr() {
        take_result(printed);
    }
    process::exit(if LOST.load(Ordering::Relaxed) { 1 } else { error.exit_code() })
}

/// The exit code of a program that would have `code` if everything was printed.
pub(crate) fn exit_code(code: ExitCode) -> ExitCode {
    if LOST.load(Ordering::Relaxed) { ExitCode::FAILURE } else { code }
}

/// True if a person sees standard output at once.
pub(crate) fn is_watched() -> bool {
    // Open MPI gives its ranks a terminal too: it reads there what it then writes elsewhere.
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
