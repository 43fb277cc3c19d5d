//! The example `collective_perf`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::collective_perf::main()
}
