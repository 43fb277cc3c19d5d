//! Random numbers, and rounding to dtypes.

use half::{bf16, f16};
use mgpu_kernels::rng::Stream;
use mgpu_kernels::{DType, Precision};
#[cfg(test)]
use mgpu_kernels::{Scratch, Threads, transpose};

/// A source of random numbers.
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
        // Slightly uneven, which does not matter here.
        ((f64::from(self.uniform()) * end as f64) as usize).min(end - 1)
    }

    fn uniform(&mut self) -> f32 {
        self.next += 1;
        self.stream.uniform(self.next)
    }
}

/// The nearest number of a type that stores activations.
pub(super) fn round_to(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Rounds to the nearest number with 10 bits of mantissa, ties away from zero, like the kernels.
pub(super) fn to_tf32(value: f32) -> f32 {
    f32::from_bits((value.to_bits() + 0x1000) & 0xffff_e000)
}

/// Values as a precision stores them.
pub(super) fn stored(precision: Precision, mut values: Vec<f32>) -> Vec<f32> {
    values.iter_mut().for_each(|value| *value = round_to(precision.storage(), *value));
    values
}

/// Values as they enter products. Without tensor cores, TF32 is plain f32.
pub(super) fn multiplied(precision: Precision, tensor_cores: bool, values: &[f32]) -> Vec<f64> {
    let round = |value: &f32| match precision {
        Precision::Tf32 if tensor_cores => f64::from(to_tf32(*value)),
        _ => f64::from(*value),
    };
    values.iter().map(round).collect()
}

/// From \[N, C, P\], the layout of weights on CPUs, to \[N, P, C\].
#[cfg(test)]
pub(super) fn to_device(values: &[f32], channels: usize, plane: usize) -> Vec<f32> {
    let mut moved = vec![0.0; values.len()];
    let threads = Threads::new(1);
    transpose::matrices(&threads, &mut Scratch::new(&threads), (channels, plane), values, &mut moved);
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

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
