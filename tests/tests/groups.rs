//! Groups of a world: their collectives, and who is told what when one of them fails.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use mgpu::replicate::{verify_layout, verify_same};
use mgpu::{Buffer, Communicator, Error, Layout, Result, World};
use mgpu_tests::process::{command, run};
use mgpu_tests::{collectives, threads};

#[test]
fn groups_run_every_collective_in_threads() {
    for ranks in 1..=9 {
        for (rank, result) in threads::run(ranks, collectives::groups).into_iter().enumerate() {
            result.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        }
    }
}

#[test]
fn groups_run_every_collective_in_processes() {
    for ranks in [2, 3, 6] {
        let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
        launcher.args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_t-collectives"), "groups"]);
        run(&mut launcher).expect(0, &[]);
    }
}

/// Threads of a rank split communicators of their own at the same time: each group has memory of its own.
#[test]
fn communicators_are_split_in_several_threads() {
    const THREADS: u32 = 3;
    let results = threads::run(2, |mut world| -> Result<()> {
        let comms = (0..THREADS).map(|_| world.communicator()).collect::<Result<Vec<_>>>()?;
        std::thread::scope(|scope| {
            let split = |(mut comm, thread): (Communicator, u32)| {
                scope.spawn(move || -> Result<()> {
                    for round in 0..20 {
                        let mut group = comm.split(Some(0), 0)?.expect("a rank with a colour has a group");
                        for element in 0..50 {
                            let mut values = [i64::from(thread * 10_000 + round * 100 + element)];
                            let expected = 2 * values[0];
                            group.all_reduce_slice(&mut values, mgpu::ReduceOp::Sum)?;
                            assert_eq!(values, [expected]);
                        }
                    }
                    Ok(())
                })
            };
            let threads: Vec<_> = comms.into_iter().zip(0..).map(split).collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })
    });
    for result in results {
        result.unwrap();
    }
}

/// The rows and columns of a grid of `width` columns.
fn grid(world: &mut World, width: u32) -> Result<(Communicator, Communicator)> {
    let (row, column) = (world.rank() / width, world.rank() % width);
    let rows = world.split(Some(row), 0)?.expect("a row");
    let columns = world.split(Some(column), 0)?.expect("a column");
    Ok((rows, columns))
}

/// Two ranks of a row call different collectives; the two others wait for them in columns. All get an error that names
/// one of the two, and none can use any group afterwards.
#[test]
fn a_mismatch_in_one_group_is_known_in_all() {
    let errors = threads::run(4, |mut world| {
        let (mut row, mut column) = grid(&mut world, 2).unwrap();
        let result = match world.rank() {
            2 => row.barrier(),
            // The root of a small broadcast is told in its next operation.
            3 => row.broadcast(Buffer::zeroed::<f32>(3), 1).and_then(|_| row.barrier()),
            _ => column.barrier(),
        };
        let error = result.unwrap_err();
        for group in [&mut row, &mut column] {
            assert!(matches!(group.barrier().unwrap_err(), Error::Poisoned { .. }));
        }
        // From a split before or after: the world's groups have one fate.
        assert!(matches!(world.split(None, 0).unwrap_err(), Error::Poisoned { .. }));
        // Other communicators of the world still work.
        world.communicator().unwrap().barrier().unwrap();
        error
    });
    let group = "group 1 (ranks 2, 3)";
    for (error, peer) in errors[2..].iter().zip([3, 2]) {
        assert!(matches!(error, Error::Mismatch { .. }) && error.culprit() == Some(peer), "{error}");
        assert!(error.to_string().contains("broadcast(3 f32, root 1, inline)"), "{error}");
        assert!(error.to_string().ends_with(group), "{error}");
    }
    for error in &errors[..2] {
        assert!(matches!(error, Error::PeerLost { peer: 2 | 3, .. }), "{error}");
        assert!(error.to_string().contains("barrier"), "{error}");
    }
}

/// Rank 3 leaves while the others wait: rank 2 in its row and rank 1 in its column for rank 3, rank 0 for rank 2.
#[test]
fn the_end_of_a_rank_is_known_in_groups_without_it() {
    let errors = threads::run(4, |mut world| {
        let (mut row, mut column) = grid(&mut world, 2).unwrap();
        match world.rank() {
            3 => None,
            2 => Some(row.barrier().unwrap_err()),
            _ => Some(column.barrier().unwrap_err()),
        }
    });
    assert_eq!(errors.iter().flatten().count(), 3);
    for error in errors.iter().flatten() {
        assert_eq!(error.culprit(), Some(3), "{error}");
    }
}

/// Rank 3 hangs. Rank 2 waits for it in its row, and rank 0 for rank 2 in its column: both name rank 3.
#[test]
fn a_timeout_names_the_rank_that_holds_up_other_groups() {
    let (finish, finished) = channel::<()>();
    let hung = std::sync::Mutex::new(finished);
    let errors = threads::run(4, |mut world| {
        world.set_timeout(Duration::from_secs(2));
        let (mut row, mut column) = grid(&mut world, 2).unwrap();
        match world.rank() {
            3 => {
                let _ = hung.lock().unwrap().recv_timeout(Duration::from_secs(30));
                None
            }
            1 => None,
            0 => Some(column.barrier().unwrap_err()),
            _ => {
                // Both have timed out, or been told of it, before the last rank goes on.
                let error = row.barrier().unwrap_err();
                let _ = finish.send(());
                Some(error)
            }
        }
    });
    for error in errors.iter().flatten() {
        assert_eq!(error.culprit(), Some(3), "{error}");
    }
    let row = errors[2].as_ref().unwrap().to_string();
    assert!(
        row.starts_with("rank 2 waited ")
            && row.contains(" s for rank 3 in operation 1 of group 1 (ranks 2, 3), barrier"),
        "{row}"
    );
}

/// Ranks 0 and 1 work in their group for several timeouts, while rank 2 waits for them in the world.
#[test]
fn a_rank_that_works_in_another_group_has_not_timed_out() {
    let results = threads::run(3, |mut world| {
        let timeout = Duration::from_millis(600);
        world.set_timeout(timeout);
        let mut comm = world.communicator()?;
        let pair = comm.split((comm.rank() < 2).then_some(0), 0)?;
        if let Some(mut pair) = pair {
            let begin = Instant::now();
            let mut working = [1i32];
            while working[0] > 0 {
                working[0] = i32::from(begin.elapsed() < 4 * timeout);
                pair.broadcast_slice(&mut working, 0)?;
            }
        }
        comm.barrier()
    });
    for result in results {
        result.unwrap();
    }
}

/// A rank that cannot take part in a split fails it on all ranks.
#[test]
fn a_split_that_a_rank_does_not_join_is_an_error_on_all() {
    let errors = threads::run(3, |mut world| {
        let mut comm = world.communicator().unwrap();
        match world.rank() {
            1 => comm.barrier().unwrap_err(),
            _ => comm.split(Some(0), 0).unwrap_err(),
        }
    });
    for error in errors {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

/// What is compared between the ranks of a group is reported with ranks of the world.
#[test]
fn differences_within_a_group_name_ranks_of_the_world() {
    let errors = threads::run(6, |mut world| {
        let rank = world.rank();
        let (mut row, _column) = grid(&mut world, 3).unwrap();
        let mut layout = Layout::new();
        layout.push("w", vec![2 + usize::from(rank == 4)]);
        let steps = verify_same(&mut row, "steps", i64::from(rank == 2)).err();
        [verify_layout(&mut row, &layout).err(), steps].map(|error| error.map(|error| error.to_string()))
    });
    for (rank, [layout, steps]) in errors.into_iter().enumerate() {
        let different =
            "rank 3 and rank 4 hold different models: tensor `w` has shape [3] on rank 4 and [2] on rank 3";
        let more = "rank 2 has 1 steps where rank 0 has 0";
        assert_eq!(
            (layout.as_deref(), steps.as_deref()),
            if rank < 3 { (None, Some(more)) } else { (Some(different), None) }
        );
    }
}
