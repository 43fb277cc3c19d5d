//! `World::stop_requested` on ranks that are threads, on one host and on several.

use std::thread;

use mgpu::{ReduceOp, World};

/// The number of calls after which each rank was told to stop. Rank `who` asks for it after `after` calls; the ranks meet
/// in a collective after each call if they are `coupled`.
fn last_calls(worlds: Vec<World>, who: u32, after: u64, coupled: bool) -> Vec<u64> {
    let rank = |mut world: World| {
        move || {
            let mut comm = world.communicator().unwrap();
            let mut calls = 0;
            while !world.stop_requested().unwrap() {
                calls += 1;
                if world.rank() == who && calls == after {
                    world.request_stop();
                }
                if coupled {
                    comm.all_reduce_slice(&mut [1.0f32], ReduceOp::Sum).unwrap();
                }
            }
            assert!(world.stop_requested().unwrap(), "it stays requested");
            comm.barrier().unwrap();
            calls
        }
    };
    let ranks: Vec<_> = worlds.into_iter().map(|world| thread::spawn(rank(world))).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn all_ranks_are_told_at_the_same_call() {
    for coupled in [true, false] {
        for (number, size) in [1, 2, 3, 4].into_iter().enumerate().cycle().take(24) {
            let last = last_calls(World::threads(size).unwrap(), number as u32 % size, 5, coupled);
            assert!(last[0] >= 5 || !coupled && last[0] > 0, "{last:?}");
            assert!(last.iter().all(|calls| *calls == last[0]), "{last:?}");
        }
    }
}

#[test]
fn ranks_of_several_hosts_are_told_at_the_same_call() {
    for coupled in [true, false] {
        for first_ranks in [&[0, 1][..], &[0, 2], &[0, 1, 2]] {
            for who in 0..4 {
                let worlds = World::threads_on_hosts(first_ranks, 4).unwrap();
                let last = last_calls(worlds, who, 3, coupled);
                assert!(last.iter().all(|calls| *calls == last[0]), "{first_ranks:?} {last:?}");
            }
        }
    }
}

#[test]
fn a_world_of_one_needs_no_launcher() {
    let world = World::from_env().unwrap();
    assert!(!world.stop_requested().unwrap());
    world.request_stop();
    assert!(world.stop_requested().unwrap() && world.stop_requested().unwrap());
}

#[test]
fn a_rank_that_waits_for_the_agreement_notices_a_failure() {
    // Host 1 never answers, because its rank is not served: it has ended.
    let mut worlds = World::threads_on_hosts(&[0, 1], 2).unwrap();
    let lost = worlds.pop().unwrap();
    let first = worlds.pop().unwrap();
    first.request_stop();
    let panicked = thread::spawn(move || {
        let _world = lost;
        panic!("expected by the test");
    });
    assert!(panicked.join().is_err());
    // Either they had agreed before, or the failure is named.
    loop {
        match first.stop_requested() {
            Ok(false) => {}
            Ok(true) => break,
            Err(error) => {
                assert_eq!(error.culprit(), Some(1), "{error}");
                break;
            }
        }
    }
}
