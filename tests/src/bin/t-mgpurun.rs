//! The launcher, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpurun::cli::main()
}
