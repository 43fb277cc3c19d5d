//! Another name of `collective_perf`: see [`mgpu_examples::collective_perf`].

fn main() -> std::process::ExitCode {
    mgpu_examples::collective_perf::main()
}
