//! The example `collective_perf` by its other name, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::collective_perf::main()
}
