//! Inputs whose outcome is known exactly, and the comparison with it.
//!
//! Rank r holds at index i, as a whole number that every element type has exactly:
//! - `1 + (i + 17 r) mod 251` in general. It tells ranks and positions apart, and the sum over n ranks stays below
//!   2²⁴ up to 66 thousand ranks, exact in the single precision in which 16-bit floats are added up; they round it
//!   once, as `expected` does.
//! - For products 1, but on rank i mod n 2 or 3 by turns: the product is that 2 or 3 for any number of ranks, and a
//!   contribution that is lost or counted twice changes it.

use half::{bf16, f16};
use mgpu::{Communicator, Element, ReduceOp};

use super::Failure;
use super::collective::{Collective, Holds};

/// Elements after which the general pattern repeats: prime, so that blocks of any size differ.
const PERIOD: usize = 251;

/// Element types that hold small whole numbers.
pub(super) trait Value: Element {
    fn from_number(number: u32) -> Self;
    /// The average of `ranks` values that add up to `sum`.
    fn average(sum: u32, ranks: u32) -> Self;
}

macro_rules! values {
    ($($type:ty: $from:expr, $average:expr;)*) => {$(
        impl Value for $type {
            fn from_number(number: u32) -> Self {
                $from(number)
            }
            fn average(sum: u32, ranks: u32) -> Self {
                $average(sum, ranks)
            }
        }
    )*};
}
values! {
    f32: |x: u32| x as f32, |sum: u32, ranks: u32| sum as f32 / ranks as f32;
    f64: |x: u32| f64::from(x), |sum: u32, ranks: u32| f64::from(sum) / f64::from(ranks);
    f16: |x: u32| f16::from_f32(x as f32), |sum: u32, ranks: u32| f16::from_f32(sum as f32 / ranks as f32);
    bf16: |x: u32| bf16::from_f32(x as f32), |sum: u32, ranks: u32| bf16::from_f32(sum as f32 / ranks as f32);
    i32: |x: u32| x as i32, |sum: u32, ranks: u32| (sum / ranks) as i32;
    i64: |x: u32| i64::from(x), |sum: u32, ranks: u32| i64::from(sum / ranks);
    // Sums of bytes wrap.
    u8: |x: u32| x as u8, |sum: u32, ranks: u32| (sum / ranks) as u8;
}

/// The inputs of a world of `ranks` ranks.
#[derive(Debug, Clone, Copy)]
struct Pattern {
    ranks: u32,
    op: ReduceOp,
}

impl Pattern {
    /// Elements after which inputs and results repeat.
    fn period(self) -> usize {
        if self.op == ReduceOp::Prod { 2 * self.ranks as usize } else { PERIOD }
    }

    /// What `rank` holds at `index`.
    fn input(self, rank: u32, index: usize) -> u32 {
        let (ranks, rank) = (self.ranks as usize, rank as usize);
        match self.op {
            ReduceOp::Prod if index % ranks == rank => 2 + (index / ranks % 2) as u32,
            ReduceOp::Prod => 1,
            _ => 1 + ((index + 17 * rank) % PERIOD) as u32,
        }
    }

    /// What an outcome has at `index`.
    fn expected<T: Value>(self, holds: Holds, index: usize) -> T {
        let values = (0..self.ranks).map(|rank| self.input(rank, index));
        match (holds, self.op) {
            (Holds::InputOf(rank), _) => T::from_number(self.input(rank, index)),
            (Holds::Reduction, ReduceOp::Sum) => T::from_number(values.sum()),
            (Holds::Reduction, ReduceOp::Avg) => T::average(values.sum(), self.ranks),
            (Holds::Reduction, ReduceOp::Min) => T::from_number(values.min().unwrap_or_default()),
            (Holds::Reduction, ReduceOp::Max) => T::from_number(values.max().unwrap_or_default()),
            (Holds::Reduction, ReduceOp::Prod) => T::from_number(values.product()),
        }
    }

    /// One period of what an outcome has.
    fn expected_period<T: Value>(self, holds: Holds) -> Vec<T> {
        (0..self.period()).map(|index| self.expected(holds, index)).collect()
    }
}

/// Runs the operation on the pattern and compares every element of its outcome.
pub(super) fn check<T: Value>(
    comm: &mut dyn Communicator,
    collective: Collective,
    op: ReduceOp,
    mut buffer: mgpu::Buffer,
) -> Result<mgpu::Buffer, Failure> {
    let (rank, ranks, len) = (comm.rank(), comm.size(), buffer.len());
    let pattern = Pattern { ranks, op };
    let inputs = pattern.expected_period::<T>(Holds::InputOf(rank));
    for part in buffer.as_mut_slice::<T>().chunks_mut(inputs.len()) {
        part.copy_from_slice(&inputs[..part.len()]);
    }
    let buffer = collective.run(comm, buffer, op)?;
    for (range, holds) in collective.outcome(rank, ranks, len) {
        let expected = pattern.expected_period::<T>(holds);
        let found = buffer.as_slice::<T>()[range.clone()].iter();
        let wrong = range.zip(found).find(|(index, found)| **found != expected[index % expected.len()]);
        if let Some((index, found)) = wrong {
            let (found, expected) = (format!("{found:?}"), format!("{:?}", expected[index % expected.len()]));
            return Err(Failure::WrongResult { rank, collective, len, index, found, expected });
        }
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_stay_exact_for_any_number_of_ranks() {
        for ranks in [1, 2, 3, 64, 1000] {
            let pattern = Pattern { ranks, op: ReduceOp::Prod };
            let product: Vec<u8> = pattern.expected_period(Holds::Reduction);
            assert!(product.iter().all(|value| [2, 3].contains(value)), "{ranks} ranks");
            let pattern = Pattern { ranks, op: ReduceOp::Sum };
            let sum: Vec<f32> = pattern.expected_period(Holds::Reduction);
            assert!(sum.iter().all(|sum| *sum < (1 << 24) as f32), "{ranks} ranks");
        }
    }

    #[test]
    fn inputs_are_whole_in_every_type() {
        let pattern = Pattern { ranks: 3, op: ReduceOp::Sum };
        for index in 0..PERIOD {
            let input = pattern.input(2, index);
            assert_eq!(bf16::from_number(input).to_f32(), input as f32);
            assert_eq!(u32::from(u8::from_number(input)), input);
        }
    }
}
