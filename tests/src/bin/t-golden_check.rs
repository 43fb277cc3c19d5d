//! The example `golden_check`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::golden_check::main()
}
