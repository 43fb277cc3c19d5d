//! The same collectives on ranks as threads and ranks as processes.

use mgpu::{Buffer, Communicator, DType, Error, ReduceOp, Result, World};
use mgpu_tests::collectives::{self, BufferKind, Case, Collective};
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
fn worlds_of_threads() {
    [1, 2, 4, 7].into_iter().for_each(|ranks| in_threads(ranks, collectives::all));
}

#[test]
fn worlds_of_processes() {
    [1, 2, 3, 5].into_iter().for_each(|ranks| in_processes(ranks, "all"));
}

#[test]
#[ignore = "takes minutes"]
fn worlds_of_any_size() {
    for ranks in 1..=9 {
        in_threads(ranks, collectives::all);
        in_processes(ranks, "all");
    }
}

#[test]
fn two_communicators_share_memory_and_alternate() {
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

#[test]
fn large_private_buffers() {
    for ranks in [1, 2, 3, 5] {
        in_threads(ranks, collectives::large_private);
        in_processes(ranks, "large-private");
    }
}

#[test]
fn memory_of_the_program_is_adopted_in_place() {
    for ranks in [1, 2, 3, 5] {
        let program = env!("CARGO_BIN_EXE_t-adopt");
        run(command(program).arg(ranks.to_string())).expect(0, &[]);
        let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
        run(launcher.args(["-n", &ranks.to_string(), program])).expect(0, &[]);
    }
}

#[test]
fn adopted_memory_is_private_again_after_a_rank_was_lost() {
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.args(["-n", "3", env!("CARGO_BIN_EXE_t-adopt"), "--lose", "1"]);
    run(&mut launcher).expect(9, &["rank 1"]);
}

/// In processes only, because a rank inspects its own process.
#[test]
fn a_memory_shortage_is_an_error_and_survivable() {
    for ranks in [2, 3, 5] {
        in_processes(ranks, "shortage");
    }
}

/// The bytes that all ranks have moved in `call` on a buffer of 100,001 f32.
fn moved(ranks: u32, in_arena: bool, call: impl Fn(&mut Communicator, Buffer) -> Result<()> + Sync) -> u64 {
    let counted = threads::run(ranks, |mut world| {
        let mut comm = world.communicator().unwrap();
        let buffer = match in_arena {
            true => comm.allocate(DType::F32, LEN).unwrap(),
            false => Buffer::zeroed::<f32>(LEN),
        };
        let before = comm.traffic().unwrap();
        call(&mut comm, buffer).unwrap();
        comm.traffic().unwrap() - before
    });
    counted.iter().sum()
}

const LEN: usize = 100_001;

/// A byte counts once where it crosses from one rank to another, however a rank gets it.
#[test]
fn bytes_between_ranks_are_counted() {
    use mgpu::Algorithm;
    use mgpu::comm::shard;
    let sum = ReduceOp::Sum;
    for ranks in 1..=5u32 {
        let (bytes, others) = (4 * LEN as u64, u64::from(ranks - 1));
        for in_arena in [true, false] {
            let check =
                |what: &str,
                 expected: u64,
                 call: &(dyn Fn(&mut Communicator, Buffer) -> Result<()> + Sync)| {
                    assert_eq!(
                        moved(ranks, in_arena, call),
                        expected,
                        "{what} on {ranks} ranks, arena: {in_arena}"
                    );
                };
            for algorithm in [Algorithm::Auto, Algorithm::Direct, Algorithm::Ring] {
                check(algorithm.name(), 2 * others * bytes, &|comm, buffer| {
                    comm.set_algorithm(algorithm);
                    comm.all_reduce(buffer, sum)?.wait().map(drop)
                });
            }
            check("reduce-scatter", others * bytes, &|comm, buffer| {
                comm.reduce_scatter(buffer, sum)?.wait().map(drop)
            });
            check("all-gather", others * bytes, &|comm, buffer| comm.all_gather(buffer)?.wait().map(drop));
            check("broadcast", others * bytes, &|comm, buffer| comm.broadcast(buffer, 0)?.wait().map(drop));
            check("update + all-gather", others * bytes, &|comm, buffer| {
                comm.update_all_gather(buffer, &[0..7, 7..LEN], 1000, &mut |_, _, _| ())?.wait().map(drop)
            });
            let all_but_the_first = bytes - 4 * shard(LEN, ranks, 0).len() as u64;
            check("gather", all_but_the_first, &|comm, buffer| comm.gather(buffer, 0)?.wait().map(drop));
            check("scatter", all_but_the_first, &|comm, buffer| comm.scatter(buffer, 0)?.wait().map(drop));
            check("messages", others * bytes, &|comm, buffer| {
                if comm.rank() > 0 {
                    return comm.send(buffer, 0)?.wait().map(drop);
                }
                (1..comm.size()).try_fold(buffer, |buffer, peer| comm.recv(buffer, peer)?.wait()).map(drop)
            });
            // Every rank reads everything.
            check("a small all-reduce", u64::from(ranks) * others * 40, &|comm, buffer| {
                comm.all_reduce(buffer.split_at(10).0, sum)?.wait().map(drop)
            });
        }
        check_private_reduce(ranks, others * bytes);
    }
}

/// In an arena, all ranks share the work, and results cross to the root.
fn check_private_reduce(ranks: u32, expected: u64) {
    let reduce = |comm: &mut Communicator, buffer| comm.reduce(buffer, ReduceOp::Sum, 0)?.wait().map(drop);
    assert_eq!(moved(ranks, false, reduce), expected);
    assert!(ranks == 1 || moved(ranks, true, reduce) > expected);
}

/// The errors of ranks that each make a different call, by rank.
fn mismatch_errors(ranks: u32, call: impl Fn(&mut Communicator) -> Result<()> + Sync) -> Vec<Option<String>> {
    threads::run(ranks, |mut world| {
        let error = call(&mut world.communicator().unwrap()).err()?;
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        Some(error.to_string())
    })
}

/// The root of a small broadcast waits for nobody, so it is told in its next operation.
#[test]
fn a_mismatch_in_a_small_broadcast_is_told_later() {
    for (len, path) in [(8, "inline"), (1000, "eager")] {
        let broadcast = |comm: &mut Communicator, root| {
            comm.broadcast(Buffer::zeroed::<f32>(len), root)?.wait().map(drop)
        };
        // Rank 1 differs from the root and from rank 2.
        let errors = mismatch_errors(3, |comm| match comm.rank() {
            1 => comm.all_reduce(Buffer::zeroed::<f32>(3), ReduceOp::Sum)?.wait().map(drop),
            _ => {
                broadcast(comm, 0).expect("the root sends to itself, and to rank 2");
                comm.barrier()
            }
        });
        for error in errors {
            let error = error.expect("every rank gets an error");
            assert!(error.contains("rank 1 calls all_reduce(3 f32, sum, inline)"), "{error}");
            assert!(error.contains(&format!(" calls broadcast({len} f32, root 0, {path})")), "{error}");
            assert!(error.contains("operation 1:"), "{error}");
        }
        // Everybody is a root.
        let errors = mismatch_errors(2, |comm| {
            let rank = comm.rank();
            (0..3).for_each(|_| broadcast(comm, rank).expect("a root waits for nobody"));
            comm.barrier()
        });
        for error in errors {
            let error = error.expect("every rank gets an error");
            let call = |rank: u32| format!("rank {rank} calls broadcast({len} f32, root {rank}, {path})");
            assert!(error.contains(&call(0)) && error.contains(&call(1)), "{error}");
            assert!(error.contains("operation 1:"), "{error}");
        }
    }
}

/// The root of small broadcasts is ahead of its peers, by a limited number; each receives what was sent.
#[test]
fn a_root_runs_ahead_within_a_window() {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    const WINDOW: usize = 8;
    const ROUNDS: usize = 100;
    for len in [3, 500] {
        let sent = AtomicUsize::new(0);
        in_threads(3, |mut world| {
            let mut comm = world.communicator()?;
            for round in 0..ROUNDS {
                let mut values = vec![0; len];
                if comm.rank() == 0 {
                    values = (0..len).map(|index| (round * len + index) as i32).collect();
                } else {
                    // The root needs this rank only after as many broadcasts.
                    while sent.load(SeqCst) < (round + WINDOW).min(ROUNDS) && comm.rank() == 1 {
                        std::thread::yield_now();
                    }
                    assert!(comm.rank() != 1 || sent.load(SeqCst) <= round + WINDOW);
                }
                comm.broadcast_slice(&mut values, 0)?;
                if comm.rank() == 0 {
                    sent.fetch_add(1, SeqCst);
                }
                assert!((0..len).all(|index| values[index] == (round * len + index) as i32));
            }
            comm.barrier()
        });
    }
}

/// No timeout is needed for calls that can never match.
#[test]
fn mismatched_messages_are_named_on_waiting_ranks() {
    type CollectiveFn = fn(&mut Communicator, u32) -> Result<()>;
    let send: CollectiveFn = |comm, to| comm.send(Buffer::zeroed::<f32>(1 << 20), to)?.wait().map(drop);
    let send_few: CollectiveFn = |comm, to| comm.send(Buffer::zeroed::<f32>(3), to)?.wait().map(drop);
    let send_bytes: CollectiveFn = |comm, to| comm.send(Buffer::zeroed::<u8>(12), to)?.wait().map(drop);
    let recv: CollectiveFn = |comm, from| comm.recv(Buffer::zeroed::<f32>(1 << 20), from)?.wait().map(drop);
    let barrier: CollectiveFn = |comm, _| comm.barrier();
    let broadcast: CollectiveFn =
        |comm, root| comm.broadcast(Buffer::zeroed::<f32>(1 << 18), root)?.wait().map(drop);
    let (sends, receives) = ("send(1048576 f32, to rank ", "recv(1048576 f32, from rank ");
    for (calls, texts) in [
        ([recv, recv], [receives; 2]),
        ([send, send], [sends; 2]),
        ([send, barrier], [sends, "barrier"]),
        ([barrier, recv], ["barrier", receives]),
        ([broadcast, send], ["broadcast(262144 f32, root 1, staged)", sends]),
        ([recv, broadcast], [receives, "broadcast(262144 f32, root 0, staged)"]),
    ] {
        let errors = mismatch_errors(2, |comm| {
            let rank = comm.rank();
            calls[rank as usize](comm, 1 - rank)
        });
        for (rank, error) in errors.into_iter().enumerate() {
            let error = error.unwrap_or_else(|| panic!("rank {rank} got no error: {texts:?}"));
            for (peer, text) in texts.iter().enumerate() {
                let call = format!("rank {peer} calls {text}");
                assert!(error.contains(&call), "rank {rank} should say `{call}`: {error}");
            }
        }
    }
    // A completed send is valid: only the receiver can notice the mismatch.
    for (wrong, text) in [(send_few, "send(3 f32, to rank 1)"), (send_bytes, "send(12 u8, to rank 1)")] {
        let errors = mismatch_errors(2, |comm| if comm.rank() == 0 { wrong(comm, 1) } else { recv(comm, 0) });
        assert_eq!(errors[0], None);
        let error = errors[1].as_deref().unwrap_or_default();
        assert!(error.contains(text) && error.contains("recv(1048576 f32, from rank 0)"), "{error}");
    }
}

#[test]
fn deadlock_cycles_of_any_length_are_reported() {
    for ranks in [3, 5] {
        // Every rank receives from the next one.
        let errors = mismatch_errors(ranks, |comm| {
            let next = (comm.rank() + 1) % comm.size();
            comm.recv(Buffer::zeroed::<u8>(1), next)?.wait().map(drop)
        });
        assert!(errors.iter().all(Option::is_some), "{errors:?}");
        // One rank receives from a rank that is in a barrier with all others.
        let errors = mismatch_errors(ranks, |comm| match comm.rank() {
            1 => comm.recv(Buffer::zeroed::<u8>(1), 0)?.wait().map(drop),
            _ => comm.barrier(),
        });
        for error in errors {
            let error = error.expect("every rank gets an error");
            assert!(error.contains("rank 1 calls recv(1 u8, from rank 0)"), "{error}");
            assert!(error.contains("calls barrier") && error.contains("operation 1:"), "{error}");
        }
    }
}

/// Calls of all ranks must match; errors name the rank that differs.
#[test]
fn mismatched_exchanges_are_named_on_every_rank() {
    type CollectiveFn = fn(&mut Communicator, u32) -> Result<()>;
    let calls: [(CollectiveFn, [&str; 2]); 5] = [
        (
            |comm, other| comm.gather(Buffer::zeroed::<f32>(8), other)?.wait().map(drop),
            ["rank 0 calls gather(8 f32, root 0, inline)", "rank 1 calls gather(8 f32, root 1, inline)"],
        ),
        (
            |comm, other| match other {
                0 => comm.scatter(Buffer::zeroed::<f32>(8), 0)?.wait().map(drop),
                _ => comm.gather(Buffer::zeroed::<f32>(8), 0)?.wait().map(drop),
            },
            ["rank 0 calls scatter(8 f32, root 0, inline)", "rank 1 calls gather(8 f32, root 0, inline)"],
        ),
        (
            |comm, other| {
                let len = (2 * comm.size() as usize) << (20 * other);
                comm.all_to_all(Buffer::zeroed::<u8>(len))?.wait().map(drop)
            },
            ["rank 0 calls all_to_all(4 u8, inline)", "rank 1 calls all_to_all(4194304 u8, staged)"],
        ),
        (
            |comm, other| {
                let counts = [[3, 5], [5, 3]][other as usize];
                comm.all_gather_v(Buffer::zeroed::<f32>(8), &counts)?.wait().map(drop)
            },
            ["rank 0 calls all_gather_v(8 f32, counts ", "rank 1 calls all_gather_v(8 f32, counts "],
        ),
        (
            |comm, other| {
                // Rank 1 expects one element fewer than rank 0 sends it.
                let received = if other == 0 { [1, 2] } else { [2, 1] };
                let (send, receive) = (Buffer::zeroed::<i32>(4), Buffer::zeroed::<i32>(3));
                let sent = if other == 0 { [1, 3] } else { [2, 2] };
                comm.all_to_all_v(&send, &sent, receive, &received)?.wait().map(drop)
            },
            ["rank 0 calls all_to_all_v(3 i32 to rank 1)", "rank 1 calls all_to_all_v(2 i32 from rank 0)"],
        ),
    ];
    for (call, texts) in calls {
        for error in mismatch_errors(2, |comm| call(comm, comm.rank())) {
            let error = error.unwrap_or_else(|| panic!("every rank gets an error: {texts:?}"));
            for text in texts {
                assert!(error.contains(text), "`{text}` is missing: {error}");
            }
        }
    }
    // Ranks not involved in the mismatch also get the error.
    let errors = mismatch_errors(3, |comm| {
        let rank = comm.rank();
        let expected = [0, if rank == 2 { 1 } else { 0 }, 0];
        let receive = Buffer::zeroed::<u8>(expected.iter().sum());
        comm.all_to_all_v(&Buffer::zeroed::<u8>(0), &[0; 3], receive, &expected)?.wait().map(drop)
    });
    for error in errors {
        let error = error.expect("every rank gets an error");
        assert!(error.contains("rank 2 calls all_to_all_v(1 u8 from rank 1)"), "{error}");
    }
}

#[test]
fn invalid_lengths_are_refused_before_communication() {
    in_threads(3, |mut world| {
        let mut comm = world.communicator()?;
        type CollectiveFn = fn(&mut Communicator) -> Result<mgpu::Pending>;
        let calls: [(CollectiveFn, &str); 6] = [
            (
                |comm| comm.all_to_all(Buffer::zeroed::<f32>(4)),
                "all_to_all: 4 elements cannot be cut into equal shards for 3 ranks",
            ),
            (|comm| comm.gather(Buffer::zeroed::<f32>(3), 3), "gather: there is no rank 3 in a world of 3"),
            (|comm| comm.scatter(Buffer::zeroed::<f32>(3), 7), "scatter: there is no rank 7 in a world of 3"),
            (
                |comm| comm.all_gather_v(Buffer::zeroed::<f32>(3), &[1, 2]),
                "all_gather_v: 2 counts for 3 ranks",
            ),
            (
                |comm| comm.all_gather_v(Buffer::zeroed::<f32>(3), &[1, 1, 2]),
                "all_gather_v: counts [1, 1, 2] do not add up to the 3 elements of the buffer",
            ),
            (
                |comm| {
                    let (send, receive) = (Buffer::zeroed::<f32>(3), Buffer::zeroed::<f64>(3));
                    comm.all_to_all_v(&send, &[1; 3], receive, &[1; 3])
                },
                "all_to_all_v: the send buffer is f32 and the receive buffer is f64",
            ),
        ];
        for (call, text) in calls {
            let error = call(&mut comm).expect_err(text);
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
            assert_eq!(error.to_string(), text);
        }
        comm.barrier()
    });
}

/// A late message is not a deadlock: ranks may wait for each other for a while.
#[test]
fn a_late_message_is_waited_for() {
    in_threads(3, |mut world| {
        let (rank, mut comm) = (world.rank(), world.communicator()?);
        for turn in 0..5u8 {
            match rank {
                // Sleep until the others sleep too.
                0 => {
                    std::thread::sleep(std::time::Duration::from_millis(60));
                    let _ = comm.send(Buffer::from_slice(&[turn]), 1)?.wait()?;
                }
                1 => {
                    let message = comm.recv(Buffer::zeroed::<u8>(1), 0)?.wait()?;
                    let _ = comm.send(message, 2)?.wait()?;
                }
                _ => assert_eq!(comm.recv(Buffer::zeroed::<u8>(1), 1)?.wait()?.as_slice::<u8>(), [turn]),
            }
            comm.barrier()?;
        }
        Ok(())
    });
}

/// Arenas of two worlds have the same ids. Every operation refuses those of another world before it starts.
#[test]
fn an_arena_belongs_to_one_world() {
    let [mut first, mut second] = [3, 2].map(|ranks| World::threads(ranks).unwrap());
    std::thread::scope(|scope| {
        while let Some(mut world) = first.pop() {
            let mut other = second.pop();
            scope.spawn(move || {
                let mut comm = world.communicator().unwrap();
                let own = comm.allocate(DType::F32, 1000).unwrap();
                if let Some(other) = &mut other {
                    let mut other_comm = other.communicator().unwrap();
                    let mut rest = other_comm.allocate(DType::F32, 1400).unwrap();
                    rest.as_mut_slice::<f32>().fill(7.0);
                    type Operation = fn(&mut Communicator, Buffer) -> Result<mgpu::Pending>;
                    let operations: [Operation; 12] = [
                        |comm, buffer| comm.all_reduce(buffer, ReduceOp::Sum),
                        |comm, buffer| comm.reduce_scatter(buffer, ReduceOp::Sum),
                        |comm, buffer| comm.all_gather(buffer),
                        |comm, buffer| comm.update_all_gather(buffer, &[], 1, &mut |_, _, _| ()),
                        |comm, buffer| comm.broadcast(buffer, 0),
                        |comm, buffer| comm.reduce(buffer, ReduceOp::Sum, 0),
                        |comm, buffer| comm.send(buffer, 2),
                        |comm, buffer| comm.recv(buffer, 2),
                        |comm, buffer| comm.all_to_all(buffer),
                        |comm, buffer| comm.gather(buffer, 0),
                        |comm, buffer| comm.scatter(buffer, 1),
                        |comm, buffer| comm.all_gather_v(buffer, &[40, 0, 60]),
                    ];
                    for operation in operations {
                        let (buffer, behind) = rest.split_at(100);
                        rest = behind;
                        let error = operation(&mut comm, buffer).expect_err("a foreign arena");
                        let text = error.to_string();
                        assert!(matches!(error, Error::InvalidArgument { .. }), "{text}");
                        assert!(text.contains("arena 1 of communicator 1, which rank "), "{text}");
                        assert!(text.contains(" of 2 allocated in another world"), "{text}");
                    }
                    assert_eq!(rest.as_slice::<f32>(), [7.0; 200]);
                }
                // Nothing was sent, and no communicator is poisoned.
                let sum = comm.all_reduce(own, ReduceOp::Sum).unwrap().wait().unwrap();
                assert_eq!(sum.as_slice::<f32>(), [0.0; 1000]);
            });
        }
    });
}

#[test]
fn invalid_segments_are_refused() {
    in_threads(2, |mut world| {
        let mut comm = world.communicator()?;
        for in_arena in [true, false] {
            for (ends, block) in [
                (vec![(0, 4)], 0),
                (vec![(4, 9)], 1),
                (vec![(4, 6), (2, 3)], 1),
                (vec![(0, 3), (2, 4)], 1),
                (vec![(3, 1)], 1),
            ] {
                let segments: Vec<_> = ends.into_iter().map(|(begin, end)| begin..end).collect();
                let buffer = if in_arena { comm.allocate(DType::F32, 8)? } else { Buffer::zeroed::<f32>(8) };
                let error = comm.update_all_gather(buffer, &segments, block, &mut |_, _, _| ()).err();
                assert!(matches!(error, Some(Error::InvalidArgument { .. })), "{segments:?} {block}");
            }
        }
        comm.barrier()
    });
}

/// Lengths in bytes at the limits between paths: cache lines, two kinds of slots, one or more blocks, chunks of a
/// channel for some numbers of ranks, and staging buffers.
const BORDERS: [usize; 9] =
    [48, 768, 16 << 10, 32 << 10, 52 << 10, 88 << 10, 128 << 10, 256 << 10, 512 << 10];
/// Maximum length in elements.
const MOST: usize = 200_000;

/// Lengths in elements of `dtype`: half of them small, a third at the limits.
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
        1 => Just(Collective::AllToAll),
        1 => (0u32..9).prop_map(Collective::Gather),
        1 => (0u32..9).prop_map(Collective::Scatter),
        1 => Just(Collective::Uneven),
        1 => Just(Collective::Messages),
        1 => Just(Collective::Barrier),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let kind = select(&[BufferKind::Arena, BufferKind::Private][..]);
    let dtype = select(&DType::ALL[..]).prop_flat_map(|dtype| (Just(dtype), lengths(dtype)));
    let op = select(&ReduceOp::ALL[..]);
    (kind, 0usize..40, dtype, op, collective()).prop_map(|(kind, offset, (dtype, len), op, collective)| {
        Case { kind, offset, dtype, op, len, collective }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every algorithm is compared with the same reference result, so all give the same bits. Operations follow each
    /// other in one world, to detect leftover state.
    #[test]
    fn any_operation_gives_the_bits_of_the_fold_in_rank_order(
        ranks in 1u32..=9,
        cases in prop::collection::vec(case(), 1..8),
    ) {
        in_threads(ranks, |mut world| {
            let mut comm = world.communicator()?;
            cases.iter().try_for_each(|case| case.run(&mut comm))
        });
    }
}
