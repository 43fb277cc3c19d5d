//! The example `allreduce_perf`, as a binary of this package.

fn main() -> std::process::ExitCode {
    mgpu_examples::allreduce_perf::main()
}
