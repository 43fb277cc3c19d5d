//! Hosts with different numbers of ranks: all collectives on each layout, and whoever makes a mistake is found in each place.

use std::sync::Barrier;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use super::arrivals::Arrival;
use super::frame::{ARRIVAL_BYTES, FrameKind, Header};
use super::tests::{mismatches, on_hosts, transport};
use super::wait::{Awaited, Wait};
use super::{HostsTransport, Net, bundle, wire};
use crate::comm::call::Call;
use crate::comm::signature::Signature;
use crate::comm::{DType, shard};
use crate::{Buffer, Communicator, ReduceOp, Result};

/// Ranks of each host: few and many runs, of one rank and of several.
const LAYOUTS: [&[u32]; 8] =
    [&[1, 1, 1, 1], &[2, 2], &[2, 3], &[3, 2, 1], &[1, 1, 1, 1, 1], &[2, 2, 2, 2], &[1, 3, 1, 2], &[3]];

on_both_wires! {
    all_collectives_of_every_layout,
    collectives_of_groups_in_any_order,
    many_small_collectives_in_a_row,
    any_rank_with_another_call_is_named,
    any_rank_that_receives_instead_is_named,
    a_rank_that_leaves_too_early_is_named,
    a_rank_that_is_late_is_named,
    a_leader_that_hangs_after_the_announcements_is_named,
    a_leader_that_tells_its_run_nothing_is_named,
    a_late_rank_with_another_call_is_at_fault,
    ranks_leave_after_their_last_collective,
}

/// What rank `rank` contributes in place `at`: sums of them are exact.
fn value(rank: u32, at: usize) -> f32 {
    ((rank as usize * 7 + at * 3) % 31) as f32
}

fn values(rank: u32, len: usize) -> Vec<f32> {
    (0..len).map(|at| value(rank, at)).collect()
}

/// Calls every collective with `each` elements a rank, and checks all results.
fn check_all(comm: &mut Communicator, each: usize, is_shared: bool) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let len = each * ranks as usize;
    let root = (each as u32 + 1) % ranks;
    let own = shard(len, ranks, rank);
    let filled = |comm: &mut Communicator| -> Result<Buffer> {
        let mut buffer = if is_shared { comm.allocate(DType::F32, len)? } else { Buffer::zeroed::<f32>(len) };
        buffer.as_mut_slice::<f32>().copy_from_slice(&values(rank, len));
        Ok(buffer)
    };
    let sum = |at: usize| (0..ranks).map(|rank| value(rank, at)).sum::<f32>();
    let sums: Vec<f32> = (0..len).map(sum).collect();

    let buffer = filled(comm)?;
    let result = comm.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
    assert_eq!(result.as_slice::<f32>(), sums, "all_reduce of {len}");
    let buffer = filled(comm)?;
    let result = comm.reduce_scatter(buffer, ReduceOp::Sum)?.wait()?;
    assert_eq!(result.as_slice::<f32>()[own.clone()], sums[own.clone()], "reduce_scatter of {len}");
    let buffer = filled(comm)?;
    let result = comm.reduce(buffer, ReduceOp::Sum, root)?.wait()?;
    if rank == root {
        assert_eq!(result.as_slice::<f32>(), sums, "reduce of {len}");
    }
    let gathered: Vec<f32> =
        (0..ranks).flat_map(|from| shard(len, ranks, from).map(move |at| value(from, at))).collect();
    let buffer = filled(comm)?;
    let result = comm.all_gather(buffer)?.wait()?;
    assert_eq!(result.as_slice::<f32>(), gathered, "all_gather of {len}");
    let buffer = filled(comm)?;
    let result = comm.gather(buffer, root)?.wait()?;
    assert_eq!(result.as_slice::<f32>(), if rank == root { gathered } else { values(rank, len) });
    let buffer = filled(comm)?;
    let result = comm.broadcast(buffer, root)?.wait()?;
    assert_eq!(result.as_slice::<f32>(), values(root, len), "broadcast of {len}");
    let buffer = filled(comm)?;
    let result = comm.scatter(buffer, root)?.wait()?;
    assert_eq!(result.as_slice::<f32>()[own.clone()], values(root, len)[own], "scatter of {len}");
    let buffer = filled(comm)?;
    let result = comm.all_to_all(buffer)?.wait()?;
    let exchanged = (0..ranks).flat_map(|from| shard(len, ranks, rank).map(move |at| value(from, at)));
    assert!(result.as_slice::<f32>().iter().copied().eq(exchanged), "all_to_all of {len}");
    comm.barrier()
}

fn all_collectives_of_every_layout(net: Net) {
    for hosts in LAYOUTS {
        let results = on_hosts(net, hosts, |mut world| -> Result<()> {
            let mut comm = world.communicator()?;
            // With the arrival, with a part for each rank, and after it.
            for each in [0, 1, 60, 700, 5000, 12_000, 60_000] {
                check_all(&mut comm, each, each % 7 == 0)?;
            }
            Ok(())
        });
        assert!(results.iter().all(Result::is_ok), "{hosts:?}: {results:?}");
    }
}

/// The ranks of a host are not next to each other: it has several runs, or they are in another order.
fn collectives_of_groups_in_any_order(net: Net) {
    for (hosts, keys) in
        [(&[2u32, 3][..], &[4, 0, 3, 1, 2][..]), (&[2, 2], &[3, 2, 1, 0]), (&[4, 2], &[0, 1, 4, 5, 2, 3])]
    {
        let results = on_hosts(net, hosts, |mut world| -> Result<()> {
            let mut group = world.split(Some(0), keys[world.rank() as usize])?.expect("a group of all");
            for each in [1, 5000, 20_000] {
                check_all(&mut group, each, true)?;
            }
            // Two smaller ones, which both of them use at the same time.
            let colour = world.rank() % 2;
            let mut part = world.split(Some(colour), -keys[world.rank() as usize])?.expect("a group");
            for each in [1, 5000] {
                check_all(&mut part, each, true)?;
                check_all(&mut group, each, false)?;
            }
            Ok(())
        });
        assert!(results.iter().all(Result::is_ok), "{hosts:?}: {results:?}");
    }
}

/// Slots and sheets are used again at once; ranks are late in turn, sleep, and wake each other.
fn many_small_collectives_in_a_row(net: Net) {
    for (hosts, is_crowded) in [(&[3u32, 2][..], false), (&[2, 2, 2, 1], true), (&[4], true)] {
        let results = on_hosts(net, hosts, |mut world| -> Result<()> {
            let mut comm = world.communicator()?;
            if is_crowded {
                comm.set_oversubscribed();
            }
            let (rank, ranks) = (comm.rank(), comm.size());
            for turn in 0..400u32 {
                if turn % ranks == rank {
                    std::thread::yield_now();
                }
                let len = 1 + (turn as usize * 97) % 600;
                let sum = comm
                    .all_reduce(Buffer::from_slice(&vec![(turn + rank) as i32; len]), ReduceOp::Sum)?
                    .wait()?;
                let expected = (ranks * turn + ranks * (ranks - 1) / 2) as i32;
                assert!(sum.as_slice::<i32>().iter().all(|found| *found == expected), "turn {turn}");
                if turn % 5 == 0 {
                    comm.barrier()?;
                }
            }
            Ok(())
        });
        assert!(results.iter().all(Result::is_ok), "{hosts:?}: {results:?}");
    }
}

/// Leaders and others, in the first and the last run, with few runs and with many.
const CULPRITS: [(&[u32], &[u32]); 3] =
    [(&[2, 2], &[0, 1, 2, 3]), (&[3, 1, 2], &[1, 3, 5]), (&[1, 2, 1, 1], &[0, 1, 2, 4])];

fn any_rank_with_another_call_is_named(net: Net) {
    for (hosts, culprits) in CULPRITS {
        for culprit in culprits {
            // One call is sent in bundles, and others directly.
            for other in 0..3 {
                let errors = mismatches(net, hosts, |comm| match (comm.rank() == *culprit, other) {
                    (false, _) => comm.all_reduce(Buffer::zeroed::<f32>(100), ReduceOp::Sum).map(drop),
                    (true, 0) => comm.all_reduce(Buffer::zeroed::<f32>(1 << 20), ReduceOp::Sum).map(drop),
                    (true, 1) => comm.all_to_all(Buffer::zeroed::<f32>(comm.size() as usize * 10)).map(drop),
                    (true, _) => comm.barrier(),
                });
                for (rank, error) in (0..).zip(errors) {
                    let error = error.unwrap_or_else(|| panic!("rank {rank} of {hosts:?} gets no error"));
                    let names = |rank: u32| error.contains(&format!("rank {rank} calls "));
                    assert!(names(rank) && names(*culprit), "rank {rank} of {hosts:?}: {error}");
                    assert!(
                        error.contains("calls all_reduce(100 f32, sum)"),
                        "rank {rank} of {hosts:?}: {error}"
                    );
                }
            }
        }
    }
}

/// A rank receives from one that waits for it: no timeout is needed.
fn any_rank_that_receives_instead_is_named(net: Net) {
    for (hosts, culprits) in CULPRITS {
        for culprit in culprits {
            let from = (culprit + 1) % hosts.iter().sum::<u32>();
            let errors = mismatches(net, hosts, |comm| match comm.rank() == *culprit {
                true => comm.recv(Buffer::zeroed::<u8>(1), from)?.wait().map(drop),
                false => comm.barrier(),
            });
            let receives = format!("rank {culprit} calls recv(1 u8, from rank {from})");
            for (rank, error) in errors.into_iter().enumerate() {
                let error = error.unwrap_or_else(|| panic!("rank {rank} of {hosts:?} gets no error"));
                assert!(error.contains(&receives), "rank {rank} of {hosts:?}: {error}");
                assert!(error.contains("calls barrier"), "rank {rank} of {hosts:?}: {error}");
            }
        }
    }
}

/// A rank leaves before its arrival, or has arrived and does not send what it knows as the leader of its run.
fn a_rank_that_leaves_too_early_is_named(net: Net) {
    for (hosts, culprit, has_arrived) in [
        (&[2u32, 2][..], 3, false),
        (&[2, 2], 2, false),
        (&[2, 2], 2, true),
        (&[1, 1, 1, 2], 3, true),
        (&[1, 1, 1, 2], 4, false),
    ] {
        let done = Barrier::new(hosts.iter().sum::<u32>() as usize);
        let errors = on_hosts(net, hosts, |mut world| {
            let error = if world.rank() == culprit {
                let mut transport = transport(&world, 1);
                if has_arrived {
                    transport.sequence = 1;
                    let call = Signature::of(&Call::Barrier, &Buffer::zeroed::<f32>(0));
                    transport.arrive(&call, 0, &[]);
                }
                drop(transport);
                None
            } else {
                Some(world.communicator().unwrap().barrier().unwrap_err())
            };
            done.wait();
            error
        });
        for (rank, error) in errors.into_iter().enumerate().filter(|(rank, _)| *rank as u32 != culprit) {
            let error = error.expect("an error");
            assert_eq!(error.culprit(), Some(culprit), "rank {rank} of {hosts:?}: {error}");
        }
    }
}

/// A timeout names the one rank that has not arrived, although its leader passes on nothing meanwhile.
fn a_rank_that_is_late_is_named(net: Net) {
    for (hosts, culprit) in [(&[2u32, 2][..], 2), (&[2, 3], 4), (&[1, 1, 2, 1], 1), (&[1, 1, 2, 1], 3)] {
        let done = Barrier::new(hosts.iter().sum::<u32>() as usize);
        let errors = on_hosts(net, hosts, |mut world| {
            world.set_timeout(Duration::from_millis(600));
            let mut comm = world.communicator().unwrap();
            let error = (world.rank() != culprit).then(|| comm.barrier().unwrap_err());
            done.wait();
            error
        });
        for (rank, error) in errors.into_iter().enumerate().filter(|(rank, _)| *rank as u32 != culprit) {
            let error = error.expect("an error");
            assert_eq!(error.culprit(), Some(culprit), "rank {rank} of {hosts:?}: {error}");
        }
    }
}

/// Who has what it needs may go, although others are still on their way to the same.
fn ranks_leave_after_their_last_collective(net: Net) {
    for hosts in [&[2u32, 2][..], &[1, 2, 1, 2]] {
        let results = on_hosts(net, hosts, |mut world| -> Result<()> {
            for turn in 0..5 {
                let mut comm = world.communicator()?;
                let sum = comm.all_reduce(Buffer::from_slice(&[turn]), ReduceOp::Sum)?.wait()?;
                assert_eq!(sum.as_slice::<i32>(), [turn * world.size() as i32]);
            }
            Ok(())
        });
        assert!(results.iter().all(Result::is_ok), "{hosts:?}: {results:?}");
    }
}

/// The call of a barrier.
fn barrier() -> Signature {
    Signature::of(&Call::Barrier, &Buffer::zeroed::<u8>(0)).without_location()
}

/// Arrives at the first collective, without waiting.
fn arrive(transport: &mut HostsTransport, call: &Signature) {
    transport.sequence = 1;
    transport.waiting = Some(Wait { awaited: Awaited::Arrivals, number: 1, call: call.encode() });
    transport.arrive(call, 0, &[]);
}

/// All wait for rank 3, and know it; then its leader hangs, and rank 3 comes. Nobody waits for what rank 3 sends any more.
fn a_leader_that_hangs_after_the_announcements_is_named(net: Net) {
    let (hung, done) = (Barrier::new(2), Barrier::new(4));
    let errors = on_hosts(net, &[2, 2], |mut world| {
        let error = if world.rank() == 2 {
            world.set_timeout(Duration::from_millis(300));
            let mut transport = transport(&world, 1);
            let error = transport.enter(&barrier(), &[]).unwrap_err();
            assert_eq!(error.culprit(), Some(3), "{error}");
            hung.wait();
            done.wait();
            return None;
        } else {
            world.set_timeout(Duration::from_millis(2500));
            let mut comm = world.communicator().unwrap();
            if world.rank() == 3 {
                hung.wait();
            }
            comm.barrier().unwrap_err()
        };
        done.wait();
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.culprit(), Some(2), "{error}");
    }
}

/// A leader has sent its bundle, and hangs before it writes its sheet: the other run goes on, and waits for it in the next
/// collective. A rank of its run does not know that the others have arrived.
fn a_leader_that_tells_its_run_nothing_is_named(net: Net) {
    let done = Barrier::new(4);
    let errors = on_hosts(net, &[2, 2], |mut world| {
        world.set_timeout(Duration::from_millis(1500));
        if world.rank() == 2 {
            let (mut transport, call) = (transport(&world, 1), barrier());
            arrive(&mut transport, &call);
            // Reads nothing from connections.
            while transport.watched(Awaited::Arrivals) != super::gathering::Watched::Nothing {
                transport.gather(Awaited::Arrivals, &call).unwrap();
                std::thread::yield_now();
            }
            transport.wire.advance(&mut transport.empty_transfer()).unwrap();
            done.wait();
            return None;
        }
        let mut comm = world.communicator().unwrap();
        let error = comm.barrier().and_then(|()| comm.barrier()).unwrap_err();
        done.wait();
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.culprit(), Some(2), "{error}");
    }
}

/// A leader that comes last knows from the frames of other hosts that it alone makes another call, and blames nobody.
fn a_late_rank_with_another_call_is_at_fault(net: Net) {
    for culprit in [0, 2] {
        let (waiting, done) = (AtomicU32::new(0), Barrier::new(4));
        let results = on_hosts(net, &[2, 2], |mut world| {
            let mut comm = world.communicator().unwrap();
            let (rank, membership) = (world.rank(), world.membership().unwrap());
            let error = if rank == culprit {
                // The other hosts have sent all that they know when their ranks wait.
                while waiting.load(Acquire) < 3 {
                    std::thread::yield_now();
                }
                let page = membership.page();
                let waits = || page.progress(rank + 1).operation.is_some_and(|last| last.waits_for.is_some());
                let deadline = Instant::now() + Duration::from_secs(30);
                while !waits() && Instant::now() < deadline {
                    std::thread::yield_now();
                }
                comm.all_reduce(Buffer::zeroed::<f32>(100), ReduceOp::Sum).map(drop).unwrap_err()
            } else {
                waiting.fetch_add(1, Release);
                comm.barrier().unwrap_err()
            };
            let blamed = membership.page().blame_of(rank).map(|blame| blame.culprit);
            done.wait();
            (error, blamed)
        });
        for (rank, (error, blamed)) in (0..).zip(results) {
            if rank == culprit {
                assert_eq!(blamed, None, "rank {rank}: {error}");
            } else {
                assert_eq!((error.culprit(), blamed), (Some(culprit), Some(culprit)), "rank {rank}: {error}");
            }
        }
    }
}

/// What a rank sends for others is checked before it is passed on.
#[test]
fn bundles_and_contributions_that_cannot_be_are_rejected() {
    let done = Barrier::new(4);
    on_hosts(Net::Tcp, &[2, 2], |world| {
        let (mut transport, call) = (transport(&world, 1), barrier());
        let header = Header::new(FrameKind::Bundle, 1, call.encode());
        arrive(&mut transport, &call);
        let receive = |transport: &mut HostsTransport, from: u32, rank: u32, length: usize| {
            let contribution = vec![0; length];
            let entry = bundle::Entry { rank, location: 0, payload: &contribution };
            let mut result = Ok(());
            bundle::encode(std::iter::once(entry), &mut Vec::new(), |payload| {
                result = transport.receive_bundle(from, &header, payload);
            });
            result
        };
        let most = transport.small_bytes();
        if world.rank() == 1 {
            assert!(receive(&mut transport, 2, 3, 0).unwrap_err().contains("leads no run"));
        } else if world.rank() == 0 {
            // Of its own run, from a rank that is no leader, and of nobody.
            for (from, rank) in [(2, 0), (2, 1), (3, 3), (1, 3), (2, 4), (2, u32::MAX)] {
                let error = receive(&mut transport, from, rank, 0).unwrap_err();
                assert_eq!(error, format!("an arrival of rank {rank}"));
            }
            receive(&mut transport, 2, 2, most).unwrap();
            // Rank 3 sends its contribution directly, where more is allowed, and the neighbour has arrived.
            let long = Some(vec![0; ARRIVAL_BYTES]);
            let arrival = Arrival { sequence: 1, call: call.encode(), location: 0, payload: long };
            transport.note_arrival(3, arrival).unwrap();
            let error = loop {
                if let Err(error) = transport.gather(Awaited::Arrivals, &call) {
                    break error;
                }
                std::thread::yield_now();
            };
            assert_eq!(error.culprit(), Some(3), "{error}");
            assert!(error.to_string().contains(&format!("{ARRIVAL_BYTES} bytes of rank 3")), "{error}");
        }
        done.wait();
    });
}
