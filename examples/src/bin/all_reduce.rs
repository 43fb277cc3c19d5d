//! See [`mgpu_examples::all_reduce`].

fn main() -> std::process::ExitCode {
    mgpu_examples::all_reduce::main()
}
