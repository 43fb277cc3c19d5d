//! Threads as ranks and processes as ranks run the same collectives.

use mgpu::{DType, ReduceOp, Result, World};
use mgpu_tests::collectives::{self, Case, Collective, Place};
use mgpu_tests::process::{command, run};
use mgpu_tests::threads;
use proptest::prelude::*;
use proptest::sample::select;

fn in_threads(ranks: u32, body: impl Fn(World) -> Result<()> + Sync) {
    for (rank, result) in threads::run(ranks, body).into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
}

fn in_processes(ranks: u32, body: &str) {
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_t-collectives"), body]);
    run(&mut launcher).expect(0, &[]);
}

#[test]
fn threads_1_to_5() {
    (1..=5).for_each(|ranks| in_threads(ranks, collectives::all));
}

#[test]
fn threads_6_to_9() {
    (6..=9).for_each(|ranks| in_threads(ranks, collectives::all));
}

#[test]
fn processes_1_to_5() {
    (1..=5).for_each(|ranks| in_processes(ranks, "all"));
}

#[test]
fn processes_6_to_9() {
    (6..=9).for_each(|ranks| in_processes(ranks, "all"));
}

#[test]
fn two_communicators_share_memory_and_take_turns() {
    for ranks in [1, 2, 3, 5] {
        in_threads(ranks, collectives::two_communicators);
        in_processes(ranks, "two-communicators");
    }
}

#[test]
fn messages_wait_while_a_ring_runs() {
    for ranks in [2, 3, 5] {
        in_threads(ranks, collectives::messages_during_a_ring);
        in_processes(ranks, "messages-during-a-ring");
    }
}

/// In processes only: a rank looks at what its process holds.
#[test]
fn a_shortage_of_memory_is_told_and_survived() {
    for ranks in [2, 3, 5] {
        in_processes(ranks, "shortage");
    }
}

/// Lengths where one path ends and the next begins, in bytes: within a line, two kinds of slots, one and more blocks,
/// chunks of a channel for some numbers of ranks, and staging areas.
const BORDERS: [usize; 9] =
    [48, 768, 16 << 10, 32 << 10, 52 << 10, 88 << 10, 128 << 10, 256 << 10, 512 << 10];
/// Longest buffer, in elements.
const MOST: usize = 200_000;

/// Lengths, in elements of `dtype`: half of them small, a third at borders.
fn lengths(dtype: DType) -> impl Strategy<Value = usize> {
    let border = (select(&BORDERS[..]), 0usize..5)
        .prop_map(move |(bytes, beyond)| (bytes / dtype.size() + beyond).saturating_sub(2).min(MOST));
    prop_oneof![3 => 0usize..300, 2 => border, 1 => 0..=MOST]
}

fn collective() -> impl Strategy<Value = Collective> {
    prop_oneof![
        4 => Just(Collective::AllReduce),
        1 => Just(Collective::ReduceScatter),
        1 => Just(Collective::AllGather),
        1 => (0u32..9).prop_map(Collective::Broadcast),
        1 => (0u32..9).prop_map(Collective::Reduce),
        1 => Just(Collective::Messages),
        1 => Just(Collective::Barrier),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let place = select(&[Place::Arena, Place::Private][..]);
    let dtype = select(&DType::ALL[..]).prop_flat_map(|dtype| (Just(dtype), lengths(dtype)));
    let op = select(&ReduceOp::ALL[..]);
    (place, 0usize..40, dtype, op, collective()).prop_map(|(place, offset, (dtype, len), op, collective)| {
        Case { place, offset, dtype, op, len, collective }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every algorithm is compared with the same fold, so that all have the same bits. Operations follow each other in
    /// one world: what one of them leaves behind must not disturb the next one.
    #[test]
    fn any_operation_gives_the_bits_of_the_fold_in_rank_order(
        ranks in 1u32..=9,
        cases in prop::collection::vec(case(), 1..8),
    ) {
        in_threads(ranks, |mut world| {
            let mut comm = world.communicator()?;
            cases.iter().try_for_each(|case| case.run(&mut *comm))
        });
    }
}
