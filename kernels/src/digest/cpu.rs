//! Digests on the CPU.

use crate::rng::splitmix64;
use crate::simd::{Simd, Task, dispatch};

/// Number of elements that are infinite or not a number.
pub fn count_non_finite(values: &[f32]) -> u64 {
    dispatch(NotFinite(values))
}

/// Counts in a plain loop, compiled for the vectors of each processor.
struct NotFinite<'a>(&'a [f32]);

impl Task for NotFinite<'_> {
    type Output = u64;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u64 {
        let mut total = 0;
        // A block's count is as narrow as the elements are, for the sake of vectors.
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

/// Elements of a cache line, and lines of which one is looked at.
const LINE: usize = 16;
const LINES: usize = 32;

/// Whether elements that are infinite or not a number are among some of them: one cache line of 32, another one for another
/// `turn`; all lines in 32 turns. That touches as little memory. The lines of neighbouring groups differ, so that columns of
/// a matrix, which such elements may fill, are met as rows of 512 elements are.
pub fn sample_has_non_finite(values: &[f32], turn: u64) -> bool {
    dispatch(OneLineOfMany { values, turn: (turn % LINES as u64) as usize })
}

struct OneLineOfMany<'a> {
    values: &'a [f32],
    turn: usize,
}

impl Task for OneLineOfMany<'_> {
    type Output = bool;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> bool {
        let (lines, rest) = self.values.as_chunks::<LINE>();
        let (groups, odd) = lines.as_chunks::<LINES>();
        // Lane by lane, so that a line is a vector or two.
        let mut counts = [0u32; LINE];
        for (index, group) in groups.iter().enumerate() {
            let line = &group[(index + index / LINES + self.turn) % LINES];
            for lane in 0..LINE {
                counts[lane] += u32::from(!line[lane].is_finite());
            }
        }
        let rest = odd.as_flattened().iter().chain(rest);
        let count = counts.iter().sum::<u32>() + rest.map(|value| u32::from(!value.is_finite())).sum::<u32>();
        count > 0
    }
}

/// The sum of all elements' squares, in f64. Its order depends on the length alone, so that every processor finds the
/// same bits.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    dispatch(SumOfSquares(values))
}

/// Sums in as many lanes as keep the widest vectors busy.
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
