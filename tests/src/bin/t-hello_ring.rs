//! The example `hello_ring`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::hello_ring::main()
}
