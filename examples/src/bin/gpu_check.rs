//! See [`mgpu_examples::gpu_check`].

fn main() -> std::process::ExitCode {
    mgpu_examples::gpu_check::main()
}
