//! See [`mgpu_examples::own_optimizer`].

fn main() -> std::process::ExitCode {
    mgpu_examples::own_optimizer::main()
}
