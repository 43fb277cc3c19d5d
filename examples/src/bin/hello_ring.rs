//! See [`mgpu_examples::hello_ring`].

fn main() -> std::process::ExitCode {
    mgpu_examples::hello_ring::main()
}
