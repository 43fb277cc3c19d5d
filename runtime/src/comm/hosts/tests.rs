//! Ranks of one process that believe to be on several hosts: what goes wrong between them.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use super::acceptor::Acceptor;
use super::frame::HEADER_BYTES;
use super::hello::{HELLO_BYTES, Hello};
use super::{HostsTransport, Net, wire};
use crate::comm::call::Call;
use crate::comm::signature::Signature;
use crate::{Buffer, Communicator, Error, ReduceOp, Result, World};

/// Runs `body` on every rank of hosts with this many ranks, connected by `net`. Returns the results in rank order.
pub(super) fn on_hosts<R: Send>(net: Net, hosts: &[u32], body: impl Fn(World) -> R + Sync) -> Vec<R> {
    let first_ranks: Vec<u32> = (0..hosts.len()).map(|host| hosts[..host].iter().sum()).collect();
    let mut worlds = World::threads_on_hosts(&first_ranks, hosts.iter().sum()).unwrap();
    worlds.iter_mut().for_each(|world| world.set_net(net));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| body(world))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Makes two tests of each function, one for each wire. That of UCX says that it is skipped where there is no UCX.
macro_rules! on_both_wires {
    ($($test:ident),* $(,)?) => {
        mod over_tcp {
            $(#[test]
            fn $test() {
                super::$test(super::Net::Tcp);
            })*
        }
        mod over_ucx {
            $(#[test]
            fn $test() {
                match super::wire::ucx::open() {
                    Ok(_) => super::$test(super::Net::Ucx),
                    Err(problem) => eprintln!("skipped: {problem}"),
                }
            })*
        }
    };
}

on_both_wires! {
    sums_of_several_hosts,
    a_mismatch_is_named_on_all_hosts,
    cycles_of_waits_are_reported,
    messages_that_differ_are_reported_by_the_receiver,
    many_messages_wait_for_their_receiver,
    a_rank_that_dies_in_a_transfer_is_named,
    a_rank_that_hangs_in_a_transfer_is_named,
    a_lost_connection_names_its_rank,
    a_timeout_names_the_rank_that_hangs,
    an_error_in_one_group_is_known_in_all,
}

/// The transport of a communicator of the world of `world`, without its rules.
pub(super) fn transport(world: &World, number: u32) -> HostsTransport {
    let membership = world.membership().unwrap();
    let host = world.host_address(membership).unwrap().unwrap();
    let place = (membership.everyone(world.size()), number);
    let key = format!("communicator-{number}");
    HostsTransport::connect(membership, host, place, (&key, &key), Default::default(), world.timeout())
        .unwrap()
}

fn sums_of_several_hosts(net: Net) {
    let results = on_hosts(net, &[2, 2], |mut world| -> Result<()> {
        let mut comm = world.communicator()?;
        for len in [0usize, 1, 5000, 3_000_000] {
            let mine = Buffer::from_slice(&vec![world.rank() as f32; len]);
            let sum = comm.all_reduce(mine, ReduceOp::Sum)?.wait()?;
            assert_eq!(sum.as_slice::<f32>(), vec![6.0; len]);
        }
        Ok(())
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// The errors of ranks that each make a different call, by rank.
pub(super) fn mismatches(
    net: Net,
    hosts: &[u32],
    call: impl Fn(&mut Communicator) -> Result<()> + Sync,
) -> Vec<Option<String>> {
    on_hosts(net, hosts, |mut world| {
        let error = call(&mut world.communicator().unwrap()).err()?;
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        Some(error.to_string())
    })
}

fn a_mismatch_is_named_on_all_hosts(net: Net) {
    let errors = mismatches(net, &[1, 2], |comm| {
        let len = if comm.rank() == 2 { 1 << 20 } else { 100 };
        comm.all_reduce(Buffer::zeroed::<f32>(len), ReduceOp::Sum).map(drop)
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let error = error.unwrap();
        // Rank 2 names the rank that has come first.
        let few = |rank: usize| error.contains(&format!("rank {rank} calls all_reduce(100 f32, sum)"));
        assert!(if rank == 2 { few(0) || few(1) } else { few(rank) }, "rank {rank}: {error}");
        assert!(error.contains("rank 2 calls all_reduce(1048576 f32, sum)"), "rank {rank}: {error}");
    }
}

/// No timeout is needed for calls that can never meet.
fn cycles_of_waits_are_reported(net: Net) {
    // Every rank receives from the next one.
    let errors = mismatches(net, &[2, 1, 2], |comm| {
        let next = (comm.rank() + 1) % comm.size();
        comm.recv(Buffer::zeroed::<u8>(1), next)?.wait().map(drop)
    });
    assert!(errors.iter().all(Option::is_some), "{errors:?}");
    // One rank receives from a rank that is in a barrier with all others.
    let errors = mismatches(net, &[1, 1, 1], |comm| match comm.rank() {
        1 => comm.recv(Buffer::zeroed::<u8>(1), 0)?.wait().map(drop),
        _ => comm.barrier(),
    });
    for error in errors {
        let error = error.expect("every rank gets an error");
        assert!(error.contains("rank 1 calls recv(1 u8, from rank 0)"), "{error}");
        assert!(error.contains("calls barrier") && error.contains("operation 1:"), "{error}");
    }
    // Large messages to each other.
    let errors = mismatches(net, &[1, 1], |comm| {
        comm.send(Buffer::zeroed::<f32>(1 << 20), 1 - comm.rank())?.wait().map(drop)
    });
    for error in errors {
        let error = error.expect("both ranks get an error");
        for call in ["rank 0 calls send(1048576 f32, to rank 1)", "rank 1 calls send(1048576 f32, to rank 0)"]
        {
            assert!(error.contains(call), "{error}");
        }
    }
}

fn messages_that_differ_are_reported_by_the_receiver(net: Net) {
    let errors = mismatches(net, &[1, 1], |comm| match comm.rank() {
        0 => comm.send(Buffer::zeroed::<f32>(8), 1)?.wait().map(drop),
        _ => comm.recv(Buffer::zeroed::<f32>(4), 0)?.wait().map(drop),
    });
    assert_eq!(errors[0], None);
    let error = errors[1].as_deref().unwrap();
    assert!(
        error.contains("rank 1 calls recv(4 f32, from rank 0), rank 0 calls send(8 f32, to rank 1)"),
        "{error}"
    );
}

/// More small messages than may be on their way, and then some in the other direction.
fn many_messages_wait_for_their_receiver(net: Net) {
    let results = on_hosts(net, &[1, 1], |mut world| -> Result<()> {
        let mut comm = world.communicator()?;
        for turn in 0..300i32 {
            let len = [0, 1, 4000][turn as usize % 3];
            let message = Buffer::from_slice(&vec![turn; len]);
            if (comm.rank() == 0) == (turn < 200) {
                let _ = comm.send(message, 1 - comm.rank())?.wait()?;
            } else {
                let found = comm.recv(Buffer::zeroed_of(message.dtype(), len), 1 - comm.rank())?.wait()?;
                assert_eq!(found.as_slice::<i32>(), message.as_slice::<i32>());
            }
        }
        comm.barrier()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// Rank 3 panics in the middle of a large all-reduce: all others name it.
fn a_rank_that_dies_in_a_transfer_is_named(net: Net) {
    let errors = on_hosts(net, &[2, 2], |mut world| {
        let buffer = Buffer::zeroed::<f32>(4 << 20);
        if world.rank() < 3 {
            let mut comm = world.communicator().unwrap();
            return Some(comm.all_reduce(buffer, ReduceOp::Sum).unwrap_err());
        }
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut transport = transport(&world, 1);
            let call = Signature::of(&Call::AllReduce(ReduceOp::Sum), &buffer);
            transport.enter(&call, &[]).unwrap();
            let world = world;
            std::panic::resume_unwind(Box::new(world.rank()));
        }));
        assert!(died.is_err());
        None
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(error, Error::PeerLost { peer: 3, .. }), "{error}");
        let text = error.to_string();
        // UCX closes for up to a second, before the rank says how it has ended.
        let closed = net == Net::Ucx && text.contains("rank 3 closed its connection");
        assert!(closed || text.contains("rank 3 panicked"), "{text}");
        assert!(text.contains("all_reduce(4194304 f32, sum)"), "{text}");
    }
}

/// Makes the ranks above `world`'s connect to it through a proxy that flips a bit in the byte `at` of what `damaged`
/// sends.
fn damage(world: &World, damaged: u32, at: usize) {
    let membership = world.membership().unwrap();
    let host = world.host_address(membership).unwrap().unwrap();
    let acceptor = Acceptor::bind(host.address, host.run, world.rank()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (target, proxy) = (acceptor.address(), listener.local_addr().unwrap());
    *membership.listener.0.lock().unwrap() = Some(Arc::new(acceptor.behind(proxy)));
    let peers = world.size() - 1 - world.rank();
    std::thread::spawn(move || {
        for peer in listener.incoming().take(peers as usize) {
            let mut peer = peer.unwrap();
            let mut rank = TcpStream::connect(target).unwrap();
            let (mut from_rank, mut to_peer) = (rank.try_clone().unwrap(), peer.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from_rank, &mut to_peer));
            std::thread::spawn(move || {
                let mut hello = [0; HELLO_BYTES];
                peer.read_exact(&mut hello).unwrap();
                rank.write_all(&hello).unwrap();
                if Hello::decode(&hello).unwrap().from == damaged {
                    let mut before = vec![0; at + 1];
                    peer.read_exact(&mut before).unwrap();
                    before[at] ^= 1;
                    rank.write_all(&before).unwrap();
                }
                let _ = std::io::copy(&mut peer, &mut rank);
                let _ = rank.shutdown(Shutdown::Write);
            });
        }
    });
}

/// In the order of a group, ranks of one host are not next to each other; so they do not share all of its memory.
#[test]
fn buffers_of_a_group_in_another_order() {
    let results = on_hosts(Net::Tcp, &[4, 1], |mut world| -> Result<()> {
        let key = [0, 1, 3, 4, 2][world.rank() as usize];
        let mut group = world.split(Some(0), key)?.expect("a group of all");
        let mut whole = world.communicator()?;
        for len in [100, 30_000] {
            let filled = |mut buffer: Buffer| {
                buffer.as_mut_slice::<f32>().fill(1.0);
                buffer
            };
            let buffer = filled(group.allocate(crate::DType::F32, len * 5)?);
            let sum = whole.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
            assert_eq!(sum.as_slice::<f32>(), vec![5.0; len * 5]);
            let buffer = filled(group.allocate(crate::DType::F32, len * 5)?);
            let sum = whole.reduce(buffer, ReduceOp::Sum, 2)?.wait()?;
            assert_eq!(sum.as_slice::<f32>()[0], if whole.rank() == 2 { 5.0 } else { 1.0 });
            let buffer = filled(group.allocate(crate::DType::F32, len * 5)?);
            let sum = group.reduce_scatter(buffer, ReduceOp::Sum)?.wait()?;
            assert_eq!(sum.as_slice::<f32>()[group.rank() as usize * len], 5.0);
            let _ = whole.broadcast(filled(group.allocate(crate::DType::F32, len)?), 3)?.wait()?;
            let _ = group.all_gather(filled(whole.allocate(crate::DType::F32, len * 5)?))?.wait()?;
        }
        Ok(())
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// A bit that changes on the way from rank 2 to rank 0: in a header, in a small payload, in a large one.
#[test]
fn damaged_payloads_are_reported_on_all_ranks() {
    let small = HEADER_BYTES + 40;
    for (len, at) in [(100, 30), (100, small), (1 << 20, 3 * HEADER_BYTES + 100_000)] {
        // A large payload goes from each rank to each, without a barrier before. Nobody leaves before all know.
        let done = Barrier::new(3);
        let errors = on_hosts(Net::Tcp, &[1, 1, 1], |mut world| {
            if world.rank() == 0 {
                damage(&world, 2, at);
            }
            let mut comm = world.communicator().unwrap();
            let buffer = Buffer::zeroed::<f32>(len * 3);
            // The others may have all that they need, and learn of it in the next operation.
            let exchanged = comm.all_to_all(buffer).and_then(|pending| pending.wait());
            let error = exchanged.and_then(|_| comm.barrier()).unwrap_err();
            done.wait();
            error
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert!(text.contains("rank 2 sent a bad message: "), "rank {rank}, byte {at}: {text}");
            assert!(text.contains("damaged on the way: "), "rank {rank}, byte {at}: {text}");
            assert!(text.contains("all_to_all("), "rank {rank}, byte {at}: {text}");
            assert!(rank == 2 || error.culprit() == Some(2), "rank {rank}, byte {at}: {text}");
        }
    }
}

/// Nobody says how the rank at the end of a lost connection has ended.
fn a_lost_connection_names_its_rank(net: Net) {
    let done = Barrier::new(2);
    let errors = on_hosts(net, &[1, 1], |mut world| {
        if world.rank() == 0 {
            let error = world.communicator().unwrap().barrier().unwrap_err();
            done.wait();
            return Some(error);
        }
        drop(transport(&world, 1));
        done.wait();
        None
    });
    let error = errors[0].as_ref().unwrap();
    assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{error}");
    assert!(error.to_string().ends_with("rank 1 closed its connection"), "{error}");
}

/// Rank 3 hangs, and rank 2 waits for it in a message: all name rank 3.
fn a_timeout_names_the_rank_that_hangs(net: Net) {
    let (finish, finished) = channel::<()>();
    let hung = std::sync::Mutex::new(finished);
    let errors = on_hosts(net, &[2, 2], |mut world| {
        world.set_timeout(Duration::from_millis(400));
        let mut comm = world.communicator().unwrap();
        match world.rank() {
            3 => {
                let _ = hung.lock().unwrap().recv_timeout(Duration::from_secs(30));
                None
            }
            2 => Some(comm.recv(Buffer::zeroed::<u8>(1), 3).unwrap_err()),
            1 => {
                let error = comm.barrier().unwrap_err();
                let _ = finish.send(());
                Some(error)
            }
            _ => Some(comm.barrier().unwrap_err()),
        }
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.culprit(), Some(3), "{error}");
    }
}

/// Rank 0 arrives at a large all-reduce, and hangs: those that wait for it by way of others name it, too.
fn a_rank_that_hangs_in_a_transfer_is_named(net: Net) {
    let done = Barrier::new(6);
    let errors = on_hosts(net, &[2, 2, 2], |mut world| {
        world.set_timeout(Duration::from_millis(1200));
        let buffer = Buffer::zeroed::<f32>(4 << 20);
        if world.rank() == 0 {
            let mut transport = transport(&world, 1);
            let call = Signature::of(&Call::AllReduce(ReduceOp::Sum), &buffer);
            transport.enter(&call, &[]).unwrap();
            done.wait();
            return None;
        }
        let error = world.communicator().unwrap().all_reduce(buffer, ReduceOp::Sum).unwrap_err();
        done.wait();
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.culprit(), Some(0), "{error}");
    }
}

/// Two ranks of a row call different collectives; the two others wait for them in columns.
fn an_error_in_one_group_is_known_in_all(net: Net) {
    let errors = on_hosts(net, &[1, 2, 1], |mut world| {
        let (row, column) = (world.rank() / 2, world.rank() % 2);
        let mut row = world.split(Some(row), 0).unwrap().unwrap();
        let mut column = world.split(Some(column), 0).unwrap().unwrap();
        let result = match world.rank() {
            2 => row.barrier(),
            3 => row.broadcast(Buffer::zeroed::<f32>(3), 1).map(drop),
            _ => column.barrier(),
        };
        let error = result.unwrap_err();
        for group in [&mut row, &mut column] {
            assert!(matches!(group.barrier().unwrap_err(), Error::Poisoned { .. }));
        }
        // Other communicators of the world still work.
        world.communicator().unwrap().barrier().unwrap();
        error
    });
    for (error, peer) in errors[2..].iter().zip([3, 2]) {
        assert!(matches!(error, Error::Mismatch { .. }) && error.culprit() == Some(peer), "{error}");
    }
    for error in &errors[..2] {
        assert!(matches!(error, Error::PeerLost { peer: 2 | 3, .. }), "{error}");
        assert!(error.to_string().contains("barrier"), "{error}");
    }
}
