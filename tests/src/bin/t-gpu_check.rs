//! The example `gpu_check`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::gpu_check::main()
}
