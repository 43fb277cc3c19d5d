//! The peak performance of a processor, to which kernels are compared.

use std::hint::black_box;
use std::time::Instant;

use crate::simd::{Simd, Task, dispatch};
use crate::threads::{PerPart, Threads};

/// Independent chains of sums: more than two units have in flight.
const CHAINS: usize = 12;
/// Multiply-adds of each chain in one round.
const LENGTH: usize = 1 << 20;
/// Number of rounds; the fastest counts.
const ROUNDS: usize = 6;

/// GFLOP/s of fused multiply-adds on `f32` in registers, on all of `threads` at once. Takes some milliseconds.
pub fn measure(threads: &Threads) -> f64 {
    let mut lanes = vec![0; threads.count()];
    let mut quickest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        threads.divide(threads.count(), 1, PerPart::new(&mut lanes), |_, lanes| {
            *lanes.own() = dispatch(MultiplyAdd);
        });
        quickest = quickest.min(start.elapsed().as_secs_f64());
    }
    let lanes: usize = lanes.iter().sum();
    (lanes * CHAINS * LENGTH * 2) as f64 / quickest / 1e9
}

struct MultiplyAdd;

impl Task for MultiplyAdd {
    /// Lanes of a vector.
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> usize {
        let factor = simd.splat(black_box(0.5));
        let term = simd.splat(black_box(1.0));
        let mut sums = [term; CHAINS];
        for _ in 0..LENGTH {
            for sum in &mut sums {
                *sum = simd.mul_add(*sum, factor, term);
            }
        }
        black_box(sums);
        S::LANES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_positive() {
        assert!(measure(&Threads::new(1)) > 0.0);
    }
}
