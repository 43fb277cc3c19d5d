//! The program `mgpurun`: see the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    mgpurun::cli::main()
}
