//! The example `own_optimizer`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::own_optimizer::main()
}
