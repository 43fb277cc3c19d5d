//! The example `all_reduce`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::all_reduce::main()
}
