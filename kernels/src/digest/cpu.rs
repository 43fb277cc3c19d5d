//! Digests on the CPU.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::rng::splitmix64;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::Threads;

/// Fewer elements are not worth another thread.
const GRAIN: usize = 1 << 16;

/// Number of non-finite elements (NaN or Inf).
pub fn count_non_finite(threads: &Threads, values: &[f32]) -> u64 {
    let count = AtomicU64::new(0);
    threads.divide(values.len(), GRAIN, (), |range, ()| {
        count.fetch_add(dispatch(CountNonFinite(&values[range])), Ordering::Relaxed);
    });
    count.into_inner()
}

/// Counts in a plain loop, compiled for the vectors of each processor.
struct CountNonFinite<'a>(&'a [f32]);

impl Task for CountNonFinite<'_> {
    type Output = u64;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u64 {
        let mut total = 0;
        // A block's counter is as wide as the elements, so that the loop vectorises.
        for block in self.0.chunks(1 << 12) {
            let mut count = 0u32;
            for value in block {
                count += u32::from(!value.is_finite());
            }
            total += u64::from(count);
        }
        total
    }
}

/// Elements of a cache line, and the number of lines of which one is checked.
const LINE: usize = 16;
const LINES: usize = 32;

/// Whether a sample of the elements has non-finite ones: one cache line in 32, another one in each `step`, so that 32
/// steps check all lines. This reads one 32nd of the memory. The sampled lines of consecutive groups differ, so that a
/// step finds not only non-finite runs of 512 elements, but also non-finite columns of a large matrix.
pub fn sample_has_non_finite(values: &[f32], step: u64) -> bool {
    dispatch(SampledLines { values, step: (step % LINES as u64) as usize })
}

struct SampledLines<'a> {
    values: &'a [f32],
    step: usize,
}

impl Task for SampledLines<'_> {
    type Output = bool;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> bool {
        let (lines, rest) = self.values.as_chunks::<LINE>();
        let (groups, odd) = lines.as_chunks::<LINES>();
        // Counts by lane, so that a line is one or two vectors.
        let mut counts = [0u32; LINE];
        for (index, group) in groups.iter().enumerate() {
            let line = &group[(index + index / LINES + self.step) % LINES];
            for lane in 0..LINE {
                counts[lane] += u32::from(!line[lane].is_finite());
            }
        }
        let rest = odd.as_flattened().iter().chain(rest);
        let count = counts.iter().sum::<u32>() + rest.map(|value| u32::from(!value.is_finite())).sum::<u32>();
        count > 0
    }
}

/// The sum of the squares of all elements, in f64. Its order depends on the length alone, so the bits are the same on
/// every processor.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    dispatch(SumOfSquares(values))
}

/// Sums in as many lanes as the widest vectors need.
struct SumOfSquares<'a>(&'a [f32]);

impl Task for SumOfSquares<'_> {
    type Output = f64;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        const LANES: usize = 32;
        let mut lanes = [0.0f64; LANES];
        let chunks = self.0.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] += f64::from(chunk[i]) * f64::from(chunk[i]);
            }
        }
        for (lane, value) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(*value) * f64::from(*value);
        }
        lanes.iter().sum()
    }
}

/// The hash of an arena.
pub fn hash(values: &[f32]) -> u64 {
    let terms = values.iter().zip(0u64..).map(|(value, i)| splitmix64(i << 32 | u64::from(value.to_bits())));
    terms.fold(0, u64::wrapping_add)
}
