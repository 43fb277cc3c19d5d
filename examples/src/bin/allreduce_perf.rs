//! See [`mgpu_examples::allreduce_perf`].

fn main() -> std::process::ExitCode {
    mgpu_examples::allreduce_perf::main()
}
