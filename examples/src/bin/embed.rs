//! See [`mgpu_examples::embed`].

fn main() -> std::process::ExitCode {
    mgpu_examples::embed::main()
}
