//! The example `ensemble`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::ensemble::main()
}
