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
//! | others | recursive halving: each of the two adds one half, and goes on with that; then they exchange the results in reverse | 2 log₂ n | 2 (n − 1)/n · S |
//!
//! With a power of two of consecutive ranks on each of H hosts, the first exchanges stay within a host, and 2 (H − 1)/H · S
//! bytes leave it.

use crate::Result;
use crate::comm::{Buffer, Communicator};

/// Up to this many bytes a message takes as long as half of it.
const SMALL_BYTES: usize = 32 << 10;

/// Replaces the f32 elements of every rank's buffer by their sum over ranks, in the order of a balanced binary tree.
/// Collective; the number of ranks is a power of two.
///
/// # Errors
/// As [`Communicator::exchange`].
pub(super) fn all_sum(comm: &mut Communicator, buffer: Buffer) -> Result<Buffer> {
    let is_small = buffer.bytes() <= SMALL_BYTES;
    let received = if comm.size() == 1 { 0 } else if is_small { buffer.len() } else { buffer.len().div_ceil(2) };
    let received = Buffer::zeroed::<f32>(received);
    if is_small { sum_doubling(comm, buffer, received) } else { sum_halving(comm, buffer, received, 0) }
}

/// Recursive doubling. `received` has as many elements as `buffer`.
fn sum_doubling(comm: &mut Communicator, mut buffer: Buffer, mut received: Buffer) -> Result<Buffer> {
    for bit in 0..comm.size().ilog2() {
        received = comm.exchange(&buffer, received, comm.rank() ^ 1 << bit)?.wait()?;
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
    let received = comm.exchange(if is_lower { &upper } else { &lower }, received, peer)?.wait()?;
    let (lower, upper) = lower.join(upper).split_at(if is_lower { half } else { len - half });
    let (mut own, other) = if is_lower { (lower, upper) } else { (upper, lower) };
    add(own.as_mut_slice(), received.as_slice());
    let own = sum_halving(comm, own, received.join(rest), bit + 1)?;

    // The element in the middle need not travel.
    if is_lower {
        let (sent, middle) = own.split_at(len - half);
        let other = comm.exchange(&sent, other, peer)?.wait()?;
        Ok(sent.join(middle).join(other))
    } else {
        let (middle, sent) = own.split_at(half - other.len());
        let other = comm.exchange(&sent, other, peer)?.wait()?;
        Ok(other.join(middle).join(sent))
    }
}

fn add(sums: &mut [f32], addends: &[f32]) {
    for (sum, addend) in sums.iter_mut().zip(addends) {
        *sum += addend;
    }
}
