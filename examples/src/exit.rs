//! Exit codes.

use std::fmt::Display;
use std::process::ExitCode;

use mgpu::protocol::{EXIT_STOPPED, MGPU_BACKEND};
use mgpu_kernels::Precision;

use crate::parallel::{Parallel, PlacementChoice};
use crate::print::{self, errln};

/// The exit code of a usage error, after printing it, if the precision needs a GPU and the backend is the CPU, or is
/// incompatible with the placement.
pub(crate) fn refuse(program: &str, precision: Precision, parallel: &Parallel) -> Option<ExitCode> {
    if precision == Precision::F16 && matches!(parallel.placement(), PlacementChoice::Layers(_)) {
        let placement = parallel.placement();
        return Some(refuse_usage(
            program,
            &format!(
                "--precision {precision} and --placement {placement} are incompatible: the parts of the network would \
                 not skip the same steps; use bf16, or another placement"
            ),
        ));
    }
    let on_gpu = std::env::var_os(MGPU_BACKEND).is_some_and(|backend| backend == "nccl");
    if on_gpu || precision != Precision::Tf32 {
        return None;
    }
    let problem = "needs a GPU (mgpurun --backend nccl, MGPU_BACKEND=nccl under another launcher); the cpu backend has f32, \
                   bf16 and fp16";
    Some(refuse_usage(program, &format!("--precision {precision} {problem}")))
}

/// Prints a usage error, and returns its exit code.
pub(crate) fn refuse_usage(program: &str, problem: &str) -> ExitCode {
    errln!("{program}: {problem}");
    ExitCode::from(2)
}

/// Success if all output was printed; otherwise prints the error as one line to standard error and returns exit code
/// 1.
pub(crate) fn report<E: Display>(program: &str, result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => print::exit_code(ExitCode::SUCCESS),
        Err(error) => {
            errln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// As [`report`], for a program that may have stopped on request.
pub(crate) fn report_code<E: Display>(program: &str, result: Result<ExitCode, E>) -> ExitCode {
    match result {
        Ok(code) => print::exit_code(code),
        Err(error) => report(program, Err(error)),
    }
}

/// The exit code of a program that has stopped on request, if all output was printed.
pub(crate) fn stopped() -> ExitCode {
    print::exit_code(ExitCode::from(EXIT_STOPPED))
}
