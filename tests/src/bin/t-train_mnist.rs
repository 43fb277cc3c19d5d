//! The example `train_mnist`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::train_mnist::main()
}
