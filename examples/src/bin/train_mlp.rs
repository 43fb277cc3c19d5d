//! See [`mgpu_examples::train_mlp`].

fn main() -> std::process::ExitCode {
    mgpu_examples::train_mlp::main()
}
