//! Threads as ranks and processes as ranks run the same collectives.

use mgpu_tests::{collectives, threads};

fn in_threads(ranks: u32) {
    for (rank, result) in threads::run(ranks, collectives::all).into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
}

#[test]
fn one_to_three_threads() {
    (1..=3).for_each(in_threads);
}

#[test]
fn four_and_five_threads() {
    (4..=5).for_each(in_threads);
}

#[test]
fn six_and_seven_threads() {
    (6..=7).for_each(in_threads);
}

#[test]
fn eight_and_nine_threads() {
    (8..=9).for_each(in_threads);
}
