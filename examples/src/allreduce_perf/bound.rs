//! How fast memory could do it: the time below which no all-reduce of buffers in memory comes.
//!
//! With a result for each of n ranks, n·S bytes are read and n·S written at least. A scaling in place, `x ← c x`,
//! by all ranks at once on their own buffers moves the same bytes with next to no arithmetic. Its time is the
//! bound; `2·n·S` by that time is the bandwidth. Both mean memory only where the footprint is larger than the
//! caches: below, they are those of the cache.

use std::hint::black_box;
use std::time::Duration;

use half::{bf16, f16};
use mgpu::{Buffer, Communicator, Element, Result};

use super::measure::{Plan, sample};

/// Bytes that a timed pass goes over at least, so that the barrier at its end does not count.
const PASS_BYTES: usize = 1 << 20;

/// The floor of an all-reduce.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    pub(super) micros: f64,
    pub(super) gbps: f64,
}

/// Measures the bound on the memory of `buffer`, which holds zeros. Collective.
pub(super) fn measure<T: Scale>(comm: &mut dyn Communicator, buffer: Buffer) -> Result<Bound> {
    let bytes = buffer.bytes();
    let passes = (PASS_BYTES / bytes.max(1)).clamp(1, 1 << 16);
    let plan = Plan { warm_up: 2, runs: 15, limit: Duration::from_secs(1) };
    // The barrier belongs to the time: where ranks take turns on a core, no single rank's time is that of all.
    let (_, times) = sample(comm, buffer, plan, |comm, mut buffer| {
        for _ in 0..passes {
            T::scale(black_box(buffer.as_mut_slice()));
        }
        comm.barrier()?;
        Ok(buffer)
    })?;
    let micros = times.p50 / passes as f64;
    let moved = 2.0 * f64::from(comm.size()) * bytes as f64;
    Ok(Bound { micros, gbps: moved / micros / 1e3 })
}

/// Element types that can be read, changed and written about as fast as memory is.
pub(super) trait Scale: Element {
    /// Changes every element by a factor the compiler does not know. Zeros stay zeros.
    fn scale(values: &mut [Self]);
}

macro_rules! scale {
    ($($type:ty: $factor:expr, $product:expr;)*) => {$(
        impl Scale for $type {
            fn scale(values: &mut [Self]) {
                let factor = black_box($factor);
                for value in values {
                    *value = $product(*value, factor);
                }
            }
        }
    )*};
}
scale! {
    f32: 1.5, |x: f32, factor: f32| x * factor;
    f64: 1.5, |x: f64, factor: f64| x * factor;
    // Products of these take longer than memory does. Masking their bits moves the same bytes.
    f16: 3, |x: f16, mask: u16| f16::from_bits(x.to_bits() & mask);
    bf16: 3, |x: bf16, mask: u16| bf16::from_bits(x.to_bits() & mask);
    i32: 3, |x: i32, mask: i32| x & mask;
    i64: 3, |x: i64, mask: i64| x & mask;
    u8: 3, |x: u8, mask: u8| x & mask;
}
