//! See [`mgpu_examples::ensemble`].

fn main() -> std::process::ExitCode {
    mgpu_examples::ensemble::main()
}
