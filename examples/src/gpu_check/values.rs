//! Random numbers, the types they are rounded to, and the order they lie in.

use half::bf16;
use mgpu_kernels::cuda::Precision;
use mgpu_kernels::rng::Stream;

/// A source of numbers that never repeats.
#[derive(Debug)]
pub(super) struct Random {
    stream: Stream,
    next: u64,
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random { stream: Stream::new(seed, 0), next: 0 }
    }

    /// `len` numbers in [-1, 1).
    pub(super) fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| 2.0 * self.uniform() - 1.0).collect()
    }

    /// `len` numbers in [0, 256).
    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        // Not perfectly even, which nobody needs here.
        ((f64::from(self.uniform()) * end as f64) as usize).min(end - 1)
    }

    fn uniform(&mut self) -> f32 {
        self.next += 1;
        self.stream.uniform(self.next)
    }
}

pub(super) fn to_bf16(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

/// The nearest number with 10 bits of mantissa, of two the one farther from zero: as kernels round.
pub(super) fn to_tf32(value: f32) -> f32 {
    f32::from_bits((value.to_bits() + 0x1000) & 0xffff_e000)
}

/// Values as a precision keeps them.
pub(super) fn stored(precision: Precision, mut values: Vec<f32>) -> Vec<f32> {
    if precision == Precision::Bf16 {
        values.iter_mut().for_each(|value| *value = to_bf16(*value));
    }
    values
}

/// Values as they enter products. Without tensor cores TF32 is plain f32.
pub(super) fn multiplied(precision: Precision, tensor_cores: bool, values: &[f32]) -> Vec<f64> {
    let round = |value: &f32| match precision {
        Precision::Tf32 if tensor_cores => f64::from(to_tf32(*value)),
        _ => f64::from(*value),
    };
    values.iter().map(round).collect()
}

/// From \[N, C, P\], as CPUs have it, to \[N, P, C\], as GPUs have it.
pub(super) fn to_device<T: Copy>(values: &[T], channels: usize, plane: usize) -> Vec<T> {
    transposed(values, channels, plane)
}

/// From \[N, P, C\] to \[N, C, P\].
pub(super) fn to_host<T: Copy>(values: &[T], channels: usize, plane: usize) -> Vec<T> {
    transposed(values, plane, channels)
}

/// Every matrix of `rows` by `columns` transposed.
fn transposed<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    let matrices = values.chunks_exact(rows * columns);
    matrices.flat_map(|m| (0..rows * columns).map(move |at| m[at % rows * columns + at / rows])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_each_others_inverse() {
        // Two images, two channels, three positions.
        let host = [1, 2, 3, 11, 12, 13, 21, 22, 23, 31, 32, 33];
        let device = to_device(&host, 2, 3);
        assert_eq!(device, [1, 11, 2, 12, 3, 13, 21, 31, 22, 32, 23, 33]);
        assert_eq!(to_host(&device, 2, 3), host);
    }

    #[test]
    fn tf32_keeps_ten_bits_and_rounds_ties_away_from_zero() {
        let ulp = 1.0 / 1024.0;
        for (value, rounded) in
            [(1.0, 1.0), (1.0 + ulp / 2.0, 1.0 + ulp), (-1.0 - ulp / 2.0, -1.0 - ulp), (1.0 + ulp / 4.0, 1.0)]
        {
            assert_eq!(to_tf32(value), rounded);
        }
    }
}
