//! The example `train_mlp`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::train_mlp::main()
}
