//! See [`mgpu_examples::golden_check`].

fn main() -> std::process::ExitCode {
    mgpu_examples::golden_check::main()
}
