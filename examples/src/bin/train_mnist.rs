//! See [`mgpu_examples::train_mnist`].

fn main() -> std::process::ExitCode {
    mgpu_examples::train_mnist::main()
}
