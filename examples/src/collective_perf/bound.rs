//! How fast memory could do it: the time below which no all-reduce of buffers in memory comes.
//!
//! With a result for each of n ranks, n·S bytes are read and n·S written at least. A scaling in place, `x ← c x`,
//! by all ranks at once on their own buffers moves the same bytes with next to no arithmetic. Its time is the
//! bound; `2·n·S` by that time is the bandwidth. Both mean memory only where the footprint is larger than the
//! caches: below, they are those of the cache.

use std::hint::black_box;
use std::time::Duration;

use mgpu::{Communicator, DType, Result};
use mgpu_kernels::scale::scale;

use super::measure::{RunLimits, sample};

/// Bytes that a timed pass goes over at least, so that the barrier at its end does not count.
const PASS_BYTES: usize = 1 << 20;

/// The floor of an all-reduce.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    pub(super) micros: f64,
    pub(super) gbps: f64,
}

/// Measures the bound for `bytes` bytes a rank, in an arena as large as the all-reduce's. Collective.
pub(super) fn measure(comm: &mut Communicator, bytes: usize) -> Result<Bound> {
    let len = bytes.div_ceil(size_of::<f32>());
    let buffer = comm.allocate(DType::F32, len)?;
    let passes = (PASS_BYTES / bytes.max(1)).clamp(1, 1 << 16);
    let limits = RunLimits { warm_up: 2, runs: 15, limit: Duration::from_secs(1) };
    // The barrier belongs to the time: where ranks take turns on a core, no single rank's time is that of all.
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
