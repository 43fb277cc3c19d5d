//! Sums over ranks that do not depend on how many there are.
//!
//! The rank order of all other reductions, ((g₀ + g₁) + g₂) + g₃, cannot be that of two ranks with two micro-batches each,
//! (g₀ + g₁) + (g₂ + g₃). Here ranks exchange and add by recursive doubling: with the neighbour in the lowest bit of the
//! rank, then in the next, so that every rank holds the balanced tree over all. Addition commutes to the last bit, so
//! both of a pair compute the same.

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
        // One of the two listens first: a message may be sent only once it is waited for.
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
