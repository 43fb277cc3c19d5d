//! A lower bound for the time of an all-reduce: the time of its memory traffic alone.
//!
//! With a result on each of n ranks, at least n·S bytes are read and n·S written. Scaling in place, `x ← c x`, by all
//! ranks on their own buffers moves the same bytes with almost no arithmetic. Its time is the bound; `2·n·S` divided
//! by it is the memory bandwidth. If the buffers fit the caches, the figures are those of the caches.

use std::hint::black_box;
use std::time::Duration;

use mgpu::{Communicator, DType, Result};
use mgpu_kernels::scale::scale;

use super::measure::{RunLimits, sample};

/// Minimum bytes of a timed pass, so that its final barrier is negligible.
const PASS_BYTES: usize = 1 << 20;

/// The lower bound of an all-reduce.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    pub(super) micros: f64,
    pub(super) gbps: f64,
}

/// Measures the bound for `bytes` bytes per rank, in an arena as large as that of the all-reduce. Collective.
pub(super) fn measure(comm: &mut Communicator, bytes: usize) -> Result<Bound> {
    let len = bytes.div_ceil(size_of::<f32>());
    let buffer = comm.allocate(DType::F32, len)?;
    let passes = (PASS_BYTES / bytes.max(1)).clamp(1, 1 << 16);
    let limits = RunLimits { warm_up: 2, runs: 15, limit: Duration::from_secs(1) };
    // The barrier is part of the time: if ranks share a core, the time of a single rank is not the time of all.
    let (_, times) = sample(comm, buffer, limits, |comm, mut buffer| {
        for _ in 0..passes {
            scale(black_box(buffer.as_mut_slice()), black_box(1.5));
        }
        comm.barrier()?;
        Ok(buffer)
    })?;
    let micros = times.p50 / passes as f64;
    let moved = 2.0 * f64::from(comm.size()) * bytes as f64;
    Ok(Bound { micros, gbps: moved / micros / 1e3 })
}
