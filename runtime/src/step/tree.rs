//! World-size-invariant sums over ranks.
//!
//! All other reductions sum in rank order, ((g₀ + g₁) + g₂) + g₃, which two ranks with two micro-batches each cannot
//! reproduce: they have (g₀ + g₁) + (g₂ + g₃). Here ranks exchange and add by recursive doubling: with the neighbour
//! in the lowest bit of the rank, then in the next bit, so that every rank computes the balanced tree over all.
//! Floating-point addition is commutative, so both ranks of a pair compute the same bits.

use crate::Result;
use crate::comm::{Buffer, Communicator};

/// Replaces the f32 elements of every rank's buffer by their sum over ranks, in the order of a balanced binary tree.
/// Collective; the number of ranks is a power of two.
///
/// # Errors
/// As [`Communicator::send`] and [`Communicator::recv`].
pub(super) fn all_sum(comm: &mut Communicator, mut buffer: Buffer) -> Result<Buffer> {
    let (rank, ranks) = (comm.rank(), comm.size());
    if ranks == 1 {
        return Ok(buffer);
    }
    let mut theirs = Buffer::zeroed::<f32>(buffer.len());
    for bit in 0..ranks.ilog2() {
        let peer = rank ^ 1 << bit;
        // One of the two receives first: a send may block until the message is received.
        if rank < peer {
            buffer = comm.send(buffer, peer)?.wait()?;
            theirs = comm.recv(theirs, peer)?.wait()?;
        } else {
            theirs = comm.recv(theirs, peer)?.wait()?;
            buffer = comm.send(buffer, peer)?.wait()?;
        }
        for (mine, theirs) in buffer.as_mut_slice::<f32>().iter_mut().zip(theirs.as_slice::<f32>()) {
            *mine += theirs;
        }
    }
    Ok(buffer)
}
