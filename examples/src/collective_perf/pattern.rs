//! Inputs whose results are known exactly, and the verification of results.
//!
//! The input of rank r at index i is a whole number that every element type represents exactly:
//! - In general `1 + (i + 17 r) mod 251`. It distinguishes ranks and positions. The sum over n ranks stays below 2²⁴
//!   for up to 66 thousand ranks, so it is exact in f32, in which 16-bit floats are accumulated; the result is
//!   rounded once, as `expected` does.
//! - For products: 1, except 2 or 3 in turn on rank i mod n. The product is that 2 or 3 for any number of ranks, and
//!   a contribution that is lost or counted twice changes it.

use half::{bf16, f16};
use mgpu::{Communicator, DType, Element, ReduceOp};

use super::Failure;
use super::collective::{Collective, Contents};

/// Period of the general pattern: prime, so that blocks of any size differ.
const PERIOD: usize = 251;

/// Element types that hold small whole numbers.
pub(super) trait Value: Element {
    fn from_number(number: u32) -> Self;
    /// The average of `ranks` values whose sum is `sum`.
    fn average(sum: u32, ranks: u32) -> Self;
    /// The number as a double, exact or rounded.
    fn to_double(self) -> f64;
    /// Relative distance between neighbouring numbers; 0 for integers.
    const STEP: f64;
}

/// The order and precision of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReductionOrder {
    /// In rank order, in an accumulator, rounded once.
    InRankOrder,
    /// In any order, in the element type, rounded at each step; sums of bytes wrap before the division.
    Nccl,
}

impl ReductionOrder {
    /// True if `found` is a possible result of reducing `ranks` values.
    fn allow<T: Value>(self, found: T, expected: T, ranks: u32) -> bool {
        let (found_number, expected_number) = (found.to_double(), expected.to_double());
        let tolerance = match self {
            ReductionOrder::InRankOrder => return found == expected,
            ReductionOrder::Nccl => T::STEP * f64::from(ranks),
        };
        (found_number - expected_number).abs() <= tolerance * expected_number.abs()
    }
}

macro_rules! values {
    ($($type:ty: $from:expr, $average:expr, $double:expr, $step:expr;)*) => {$(
        impl Value for $type {
            fn from_number(number: u32) -> Self {
                $from(number)
            }
            fn average(sum: u32, ranks: u32) -> Self {
                $average(sum, ranks)
            }
            fn to_double(self) -> f64 {
                $double(self)
            }
            const STEP: f64 = $step;
        }
    )*};
}
values! {
    f32: |x: u32| x as f32, |sum: u32, ranks: u32| sum as f32 / ranks as f32, f64::from, 1.2e-7;
    f64: |x: u32| f64::from(x), |sum: u32, ranks: u32| f64::from(sum) / f64::from(ranks), |x| x, 2.3e-16;
    f16: |x: u32| f16::from_f32(x as f32), |sum: u32, ranks: u32| f16::from_f32(sum as f32 / ranks as f32), f16::to_f64, 9.8e-4;
    bf16: |x: u32| bf16::from_f32(x as f32), |sum: u32, ranks: u32| bf16::from_f32(sum as f32 / ranks as f32), bf16::to_f64, 7.9e-3;
    i32: |x: u32| x as i32, |sum: u32, ranks: u32| (sum / ranks) as i32, f64::from, 0.0;
    i64: |x: u32| i64::from(x), |sum: u32, ranks: u32| i64::from(sum / ranks), |x| x as f64, 0.0;
    // Sums of bytes wrap.
    u8: |x: u32| x as u8, |sum: u32, ranks: u32| (sum / ranks) as u8, f64::from, 0.0;
}

/// The input pattern of a world of `ranks` ranks.
#[derive(Debug, Clone, Copy)]
struct Pattern {
    ranks: u32,
    op: ReduceOp,
    sums: ReductionOrder,
}

impl Pattern {
    /// Number of elements after which inputs and results repeat.
    fn period(self) -> usize {
        if self.op == ReduceOp::Prod { 2 * self.ranks as usize } else { PERIOD }
    }

    /// The input of `rank` at `index`.
    fn input(self, rank: u32, index: usize) -> u32 {
        let (ranks, rank) = (self.ranks as usize, rank as usize);
        match self.op {
            ReduceOp::Prod if index % ranks == rank => 2 + (index / ranks % 2) as u32,
            ReduceOp::Prod => 1,
            _ => 1 + ((index + 17 * rank) % PERIOD) as u32,
        }
    }

    /// The expected value at `index`.
    fn expected<T: Value>(self, contents: Contents, index: usize) -> T {
        let values = (0..self.ranks).map(|rank| self.input(rank, index));
        match (contents, self.op) {
            (Contents::InputOf(rank), _) => T::from_number(self.input(rank, index)),
            (Contents::MovedInputOf { rank, by }, _) => {
                let index = (index as isize + by).rem_euclid(self.period() as isize);
                T::from_number(self.input(rank, index as usize))
            }
            (Contents::Reduction, ReduceOp::Sum) => T::from_number(values.sum()),
            (Contents::Reduction, ReduceOp::Avg)
                if T::DTYPE == DType::U8 && self.sums == ReductionOrder::Nccl =>
            {
                T::average(values.sum::<u32>() % 256, self.ranks)
            }
            (Contents::Reduction, ReduceOp::Avg) => T::average(values.sum(), self.ranks),
            (Contents::Reduction, ReduceOp::Min) => T::from_number(values.min().unwrap_or_default()),
            (Contents::Reduction, ReduceOp::Max) => T::from_number(values.max().unwrap_or_default()),
            (Contents::Reduction, ReduceOp::Prod) => T::from_number(values.product()),
        }
    }

    /// One period of the expected values.
    fn expected_period<T: Value>(self, contents: Contents) -> Vec<T> {
        (0..self.period()).map(|index| self.expected(contents, index)).collect()
    }
}

/// Writes the input of `rank` for a reduction by `op`.
pub(super) fn fill<T: Value>(values: &mut [T], rank: u32, ranks: u32, op: ReduceOp) {
    let inputs = Pattern { ranks, op, sums: ReductionOrder::InRankOrder }
        .expected_period::<T>(Contents::InputOf(rank));
    for part in values.chunks_mut(inputs.len()) {
        part.copy_from_slice(&inputs[..part.len()]);
    }
}

/// Verifies every element of a result.
pub(super) fn compare<T: Value>(
    values: &[T],
    rank: u32,
    ranks: u32,
    collective: Collective,
    op: ReduceOp,
    sums: ReductionOrder,
) -> Result<(), Failure> {
    let (pattern, len) = (Pattern { ranks, op, sums }, values.len());
    for (range, contents) in collective.outcome(rank, ranks, len) {
        let expected = pattern.expected_period::<T>(contents);
        let found = values[range.clone()].iter();
        let is_wrong = |index: usize, found: T| !sums.allow(found, expected[index % expected.len()], ranks);
        if let Some((index, found)) = range.zip(found).find(|(index, found)| is_wrong(*index, **found)) {
            let (found, expected) = (format!("{found:?}"), format!("{:?}", expected[index % expected.len()]));
            return Err(Failure::WrongResult { rank, collective, len, index, found, expected });
        }
    }
    Ok(())
}

/// Runs the collective on the pattern and verifies every element of its result.
pub(super) fn check<T: Value>(
    comm: &mut Communicator,
    collective: Collective,
    op: ReduceOp,
    mut buffer: mgpu::Buffer,
) -> Result<mgpu::Buffer, Failure> {
    let (rank, ranks) = (comm.rank(), comm.size());
    fill::<T>(buffer.as_mut_slice(), rank, ranks, op);
    let buffer = collective.run(comm, buffer, op)?;
    let sums = if comm.capabilities().sums_in_rank_order {
        ReductionOrder::InRankOrder
    } else {
        ReductionOrder::Nccl
    };
    compare::<T>(buffer.as_slice(), rank, ranks, collective, op, sums)?;
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rounding_errors_are_allowed() {
        let allowed = |found: f32| ReductionOrder::Nccl.allow(found, 1000.0, 4);
        assert!(allowed(1000.0) && allowed(1000.0001) && !allowed(1000.01) && !allowed(f32::NAN));
        assert!(!ReductionOrder::InRankOrder.allow(1000.0001f32, 1000.0, 4));
        assert!(!ReductionOrder::Nccl.allow(7u8, 8, 4) && ReductionOrder::Nccl.allow(8u8, 8, 4));
    }

    #[test]
    fn reductions_stay_exact_for_any_number_of_ranks() {
        for ranks in [1, 2, 3, 64, 1000] {
            let pattern = Pattern { ranks, op: ReduceOp::Prod, sums: ReductionOrder::InRankOrder };
            let product: Vec<u8> = pattern.expected_period(Contents::Reduction);
            assert!(product.iter().all(|value| [2, 3].contains(value)), "{ranks} ranks");
            let pattern = Pattern { ranks, op: ReduceOp::Sum, sums: ReductionOrder::InRankOrder };
            let sum: Vec<f32> = pattern.expected_period(Contents::Reduction);
            assert!(sum.iter().all(|sum| *sum < (1 << 24) as f32), "{ranks} ranks");
        }
    }

    #[test]
    fn inputs_are_whole_in_every_type() {
        let pattern = Pattern { ranks: 3, op: ReduceOp::Sum, sums: ReductionOrder::InRankOrder };
        for index in 0..PERIOD {
            let input = pattern.input(2, index);
            assert_eq!(bf16::from_number(input).to_f32(), input as f32);
            assert_eq!(u32::from(u8::from_number(input)), input);
        }
    }
}
