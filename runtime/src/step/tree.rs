//! World-size-invariant sums over ranks.
//!
//! All other reductions sum in rank order, ((g₀ + g₁) + g₂) + g₃, which two ranks with two micro-batches each cannot
//! reproduce: they have (g₀ + g₁) + (g₂ + g₃). Here ranks exchange and add with the neighbour in the lowest bit of the
//! rank, then in the next bit, so that every element is summed along the balanced tree over all ranks. Floating-point
//! addition is commutative, so both ranks of a pair compute the same bits.
//!
//! | buffer | algorithm | messages of a rank | its bytes, of S with n ranks |
//! |---|---|---|---|
//! | small | recursive doubling: neighbours exchange everything, and both add | log₂ n | log₂ n · S |
//! | large | recursive halving: each adds one half and goes on with it; the sums return in reverse | 2 log₂ n | 2 (n − 1)/n · S |
//!
//! With a power of two of consecutive ranks on each of H hosts, the first exchanges stay within a host, and 2 (H − 1)/H · S
//! bytes leave it.

use crate::Result;
use crate::comm::{Buffer, Communicator};

/// Up to this many bytes of a buffer recursive doubling is as fast, in shared memory and between hosts: measured with two
/// and four ranks.
const SMALL_BYTES: [usize; 2] = [16 << 10, 128 << 10];

/// Replaces the f32 elements of every rank's buffer by their sum over ranks, in the order of a balanced binary tree.
/// Collective; the number of ranks is a power of two.
///
/// # Errors
/// As [`Communicator::send_recv`].
pub(super) fn all_sum(comm: &mut Communicator, buffer: Buffer) -> Result<Buffer> {
    if comm.size() == 1 {
        return Ok(buffer);
    }
    let [in_memory, between_hosts] = SMALL_BYTES;
    let most = if comm.capabilities().shares_memory { in_memory } else { between_hosts };
    if buffer.bytes() <= most {
        let received = Buffer::zeroed::<f32>(buffer.len());
        sum_doubling(comm, buffer, received)
    } else {
        let received = Buffer::zeroed::<f32>(buffer.len().div_ceil(2));
        sum_halving(comm, buffer, received, 0)
    }
}

/// Recursive doubling. `received` has as many elements as `buffer`.
fn sum_doubling(comm: &mut Communicator, mut buffer: Buffer, mut received: Buffer) -> Result<Buffer> {
    for bit in 0..comm.size().ilog2() {
        received = comm.send_recv(&buffer, received, comm.rank() ^ 1 << bit)?.wait()?;
        add(buffer.as_mut_slice(), received.as_slice());
    }
    Ok(buffer)
}

/// Recursive halving of a part of the buffer, from the neighbour in bit `bit` on. `received` has at least half as many
/// elements, rounded up.
///
/// If the number of elements is odd, both ranks add the one in the middle: so all parts of a step have the same length.
fn sum_halving(comm: &mut Communicator, part: Buffer, received: Buffer, bit: u32) -> Result<Buffer> {
    if bit == comm.size().ilog2() {
        return Ok(part);
    }
    let (rank, peer) = (comm.rank(), comm.rank() ^ 1 << bit);
    let is_lower = rank < peer;
    let (len, half) = (part.len(), part.len().div_ceil(2));

    let (received, rest) = received.split_at(half);
    let (lower, upper) = part.split_at(if is_lower { len - half } else { half });
    let received = comm.send_recv(if is_lower { &upper } else { &lower }, received, peer)?.wait()?;
    let (lower, upper) = lower.join(upper).split_at(if is_lower { half } else { len - half });
    let (mut own, other) = if is_lower { (lower, upper) } else { (upper, lower) };
    add(own.as_mut_slice(), received.as_slice());
    let own = sum_halving(comm, own, received.join(rest), bit + 1)?;

    // The element in the middle need not travel.
    if is_lower {
        let (sent, middle) = own.split_at(len - half);
        let other = comm.send_recv(&sent, other, peer)?.wait()?;
        Ok(sent.join(middle).join(other))
    } else {
        let (middle, sent) = own.split_at(half - other.len());
        let other = comm.send_recv(&sent, other, peer)?.wait()?;
        Ok(other.join(middle).join(sent))
    }
}

fn add(sums: &mut [f32], addends: &[f32]) {
    for (sum, addend) in sums.iter_mut().zip(addends) {
        *sum += addend;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::DType;
    use crate::{Error, World};

    /// Runs `body` on every rank: on one host, which shares memory, or on hosts with this many ranks.
    /// Returns the results in rank order.
    fn on_ranks<R: Send>(layout: Layout<'_>, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
        let worlds = match layout {
            Layout::Memory(ranks) => World::threads(ranks),
            Layout::Hosts(hosts) => {
                let first_ranks: Vec<u32> = (0..hosts.len()).map(|host| hosts[..host].iter().sum()).collect();
                World::threads_on_hosts(&first_ranks, hosts.iter().sum())
            }
        };
        std::thread::scope(|scope| {
            let run = |mut world: World| {
                let body = &body;
                scope.spawn(move || body(world.communicator().unwrap()))
            };
            let ranks: Vec<_> = worlds.unwrap().into_iter().map(run).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[derive(Debug, Clone, Copy)]
    enum Layout<'a> {
        Memory(u32),
        Hosts(&'a [u32]),
    }

    const LAYOUTS: [Layout<'static>; 7] = [
        Layout::Memory(1),
        Layout::Memory(2),
        Layout::Memory(4),
        Layout::Memory(8),
        Layout::Hosts(&[2, 2]),
        Layout::Hosts(&[1, 1, 1, 1]),
        Layout::Hosts(&[4]),
    ];

    /// Numbers of very different size, whose sum depends on the order.
    fn value(rank: u32, index: usize) -> f32 {
        let mixed = (u64::from(rank) << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed >> 40) as f32 - 8e6) * [1.0, 1e-3, 1e3, 1e-6][(mixed >> 30) as usize % 4]
    }

    fn tree(values: &[f32]) -> f32 {
        match values {
            [value] => *value,
            _ => {
                let (left, right) = values.split_at(values.len() / 2);
                tree(left) + tree(right)
            }
        }
    }

    #[test]
    fn both_algorithms_have_the_bits_of_the_tree() {
        for layout in LAYOUTS {
            on_ranks(layout, |mut comm| {
                for len in [0, 1, 2, 3, 5, 7, 8, 1001, 8193, 100_003] {
                    let expected: Vec<u32> = (0..len)
                        .map(|index| {
                            let values: Vec<f32> = (0..comm.size()).map(|rank| value(rank, index)).collect();
                            tree(&values).to_bits()
                        })
                        .collect();
                    let mut buffer = comm.allocate(DType::F32, len).unwrap();
                    for algorithm in ["doubling", "halving", "by size"] {
                        let own = buffer.as_mut_slice::<f32>().iter_mut().enumerate();
                        own.for_each(|(index, own)| *own = value(comm.rank(), index));
                        let received = Buffer::zeroed::<f32>(len);
                        buffer = match algorithm {
                            "doubling" => sum_doubling(&mut comm, buffer, received),
                            "halving" => sum_halving(&mut comm, buffer, received, 0),
                            _ => all_sum(&mut comm, buffer),
                        }
                        .unwrap();
                        let found = buffer.as_slice::<f32>().iter().map(|sum| sum.to_bits());
                        assert!(found.eq(expected.iter().copied()), "{layout:?}: {len} by {algorithm}");
                    }
                }
            });
        }
    }

    #[test]
    fn a_rank_receives_each_element_less_than_twice() {
        let len = 1 << 16;
        for layout in LAYOUTS {
            on_ranks(layout, |mut comm| {
                let buffer = comm.allocate(DType::F32, len).unwrap();
                let before = comm.traffic().unwrap();
                let _ = all_sum(&mut comm, buffer).unwrap();
                let (ranks, bytes) = (u64::from(comm.size()), 4 * len as u64);
                assert_eq!(comm.traffic().unwrap() - before, 2 * (ranks - 1) * bytes / ranks, "{layout:?}");
            });
        }
    }

    /// Also after messages in one direction, which the ranks number differently.
    #[test]
    fn sums_and_messages_alternate() {
        for layout in [Layout::Memory(2), Layout::Hosts(&[1, 1])] {
            on_ranks(layout, |mut comm| {
                for len in [3, 50_000] {
                    for round in 0..3 {
                        let message = Buffer::from_slice(&vec![round; len]);
                        if comm.rank() == 0 {
                            let _ = comm.send(message, 1).unwrap().wait().unwrap();
                        } else {
                            let received = comm.recv(Buffer::zeroed::<i32>(len), 0).unwrap().wait().unwrap();
                            assert_eq!(received.as_slice::<i32>(), message.as_slice::<i32>());
                        }
                        let sum = all_sum(&mut comm, Buffer::from_slice(&vec![1.5f32; len])).unwrap();
                        assert_eq!(sum.as_slice::<f32>(), vec![3.0; len]);
                    }
                }
            });
        }
    }

    #[test]
    fn calls_that_do_not_meet_are_named() {
        type Sum = fn(&mut Communicator, usize) -> Result<Buffer>;
        let recv: Sum = |comm, len| comm.recv(Buffer::zeroed::<f32>(len), 0)?.wait();
        let longer: Sum = |comm, len| all_sum(comm, Buffer::zeroed::<f32>(len + 2));
        for layout in [Layout::Memory(2), Layout::Hosts(&[1, 1])] {
            for (len, theirs, text) in [
                (
                    9,
                    recv,
                    "rank 1 calls recv(9 f32, from rank 0), rank 0 calls send_recv(9 f32, with rank 1)",
                ),
                (9, longer, "send_recv(11 f32, with rank 0)"),
                (90_000, recv, "rank 1 calls recv(90000 f32, from rank 0), rank 0 calls send_recv(45000 f32"),
                (90_000, longer, "send_recv(45001 f32, with rank 0)"),
            ] {
                let errors = on_ranks(layout, |mut comm| match comm.rank() {
                    0 => all_sum(&mut comm, Buffer::zeroed::<f32>(len)).unwrap_err(),
                    _ => theirs(&mut comm, len).unwrap_err(),
                });
                let is_named = |error: &Error| {
                    matches!(error, Error::Mismatch { .. }) && error.to_string().contains(text)
                };
                assert!(errors.iter().any(is_named), "{layout:?}: no `{text}` in {errors:?}");
            }
        }
    }

    /// Each rank waits for the next one, which waits for another: no timeout is needed to see that.
    #[test]
    fn a_cycle_of_waits_is_reported() {
        let errors = on_ranks(Layout::Hosts(&[2, 1]), |mut comm| {
            let (send, next) = (Buffer::zeroed::<f32>(5), (comm.rank() + 1) % 3);
            comm.send_recv(&send, Buffer::zeroed::<f32>(5), next).map(drop).unwrap_err()
        });
        assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{errors:?}");
    }

    #[test]
    fn a_rank_that_has_left_is_named() {
        for layout in [Layout::Memory(4), Layout::Hosts(&[2, 2])] {
            let culprits = on_ranks(layout, |mut comm| {
                let buffer = Buffer::zeroed::<f32>(50_000);
                (comm.rank() != 3).then(|| all_sum(&mut comm, buffer).unwrap_err().culprit())
            });
            assert_eq!(culprits, [Some(Some(3)), Some(Some(3)), Some(Some(3)), None], "{layout:?}");
        }
    }
}
