//! The example `embed`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::embed::main()
}
