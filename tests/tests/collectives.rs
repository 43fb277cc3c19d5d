//! Threads as ranks and processes as ranks run the same collectives.

use mgpu_tests::process::{command, run};
use mgpu_tests::{collectives, threads};

fn in_threads(ranks: u32) {
    for (rank, result) in threads::run(ranks, collectives::all).into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
}

fn in_processes(ranks: u32) {
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_t-collectives")]);
    run(&mut launcher).expect(0, &[]);
}

#[test]
fn threads_1_to_5() {
    (1..=5).for_each(in_threads);
}

#[test]
fn threads_6_to_9() {
    (6..=9).for_each(in_threads);
}

#[test]
fn processes_1_to_5() {
    (1..=5).for_each(in_processes);
}

#[test]
fn processes_6_to_9() {
    (6..=9).for_each(in_processes);
}
