//! Reference results of the collectives: inputs as a function of rank and index, and reductions as a fold in rank order,
//! which the bits of every backend that sums in rank order must equal. Another order may round differently.

use std::ops::Range;

use half::{bf16, f16};
use mgpu::{Element, ReduceOp};

/// An element type with test values, and the definition of reductions.
pub(super) trait Sample: Element {
    fn sample(seed: u64) -> Self;
    fn fold(values: impl Iterator<Item = Self>, op: ReduceOp, ranks: u32) -> Self;
    /// Bitwise equality: zeros of different sign differ.
    fn is_same(&self, other: &Self) -> bool;
    /// The distance between 1 and the next number, 0 for integers.
    const EPSILON: f64;
    fn to_f64(&self) -> f64;
}

fn mix(seed: u64) -> u64 {
    let z = (seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32
}

macro_rules! sample {
    ($($type:ty, $acc:ty, $widen:expr, $narrow:expr, $epsilon:expr, $sample:expr;)*) => {$(
        impl Sample for $type {
            const EPSILON: f64 = $epsilon;
            fn sample(seed: u64) -> Self {
                $sample(mix(seed))
            }
            fn fold(values: impl Iterator<Item = Self>, op: ReduceOp, ranks: u32) -> Self {
                let combine = |a: $acc, b: $acc| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Min => if a < b { a } else { b },
                    ReduceOp::Max => if a > b { a } else { b },
                    ReduceOp::Prod => a * b,
                };
                let total: $acc = values.map($widen).reduce(combine).unwrap();
                $narrow(if op == ReduceOp::Avg { total / (ranks as $acc) } else { total })
            }
            fn is_same(&self, other: &Self) -> bool {
                self.to_ne_bytes() == other.to_ne_bytes()
            }
            fn to_f64(&self) -> f64 {
                $widen(*self) as f64
            }
        }
    )*};
}
sample! {
    f32, f32, |x| x, |x| x, f32::EPSILON as f64, |r| (r % 20011) as f32 / 7.0 - 1429.0;
    f64, f64, |x| x, |x| x, f64::EPSILON, |r| (r % 20011) as f64 / 7.0 - 1429.0;
    f16, f32, f16::to_f32, f16::from_f32, 1.0 / 1024.0, |r| f16::from_f32((r % 401) as f32 / 128.0 - 1.5);
    bf16, f32, bf16::to_f32, bf16::from_f32, 1.0 / 128.0, |r| bf16::from_f32((r % 401) as f32 / 128.0 - 1.5);
    i32, i64, i64::from, |x| x as i32, 0.0, |r| (r % 200) as i32 - 100;
    i64, i64, |x| x, |x| x, 0.0, |r| (r % 100) as i64 - 50;
    u8, u64, u64::from, |x| x as u8, 0.0, |r| (r % 128) as u8;
}

/// The input of rank `rank`.
pub(super) fn input<T: Sample>(rank: u32, len: usize) -> Vec<T> {
    (0..len as u64).map(|i| T::sample(i * 64 + u64::from(rank))).collect()
}

/// The reduction of all ranks' inputs.
pub(super) fn reduced<T: Sample>(ranks: u32, len: usize, op: ReduceOp) -> Vec<T> {
    reduced_part(ranks, 0..len, op)
}

/// A range of [`reduced`].
pub(super) fn reduced_part<T: Sample>(ranks: u32, elements: Range<usize>, op: ReduceOp) -> Vec<T> {
    (elements.start as u64..elements.end as u64)
        .map(|i| T::fold((0..ranks).map(|rank| T::sample(i * 64 + u64::from(rank))), op, ranks))
        .collect()
}

pub(super) fn assert_equal<T: Sample>(found: &[T], expected: &[T], what: &dyn Fn() -> String) {
    assert_eq!(found.len(), expected.len(), "{}", what());
    if let Some(i) = (0..found.len()).find(|&i| !found[i].is_same(&expected[i])) {
        panic!("{}: element {i} is {:?} instead of {:?}", what(), found[i], expected[i]);
    }
}

/// The first of these reduced elements that differs from `expected` by more than another order of summation explains.
/// Each result has at most `ranks` roundings, each by at most half of EPSILON times the result of the absolute values.
pub(super) fn wrong_in_any_order<T: Sample>(
    found: &[T],
    expected: &[T],
    elements: Range<usize>,
    op: ReduceOp,
    ranks: u32,
) -> Option<usize> {
    let epsilon = if matches!(op, ReduceOp::Min | ReduceOp::Max) { 0.0 } else { T::EPSILON };
    let is_near = |i: usize| {
        let sample = |rank| T::sample((elements.start + i) as u64 * 64 + u64::from(rank));
        let absolute = f64::fold((0..ranks).map(|rank| sample(rank).to_f64().abs()), op, ranks);
        (found[i].to_f64() - expected[i].to_f64()).abs() <= f64::from(ranks) * epsilon * absolute
    };
    (0..elements.len()).find(|&i| !is_near(i))
}

/// A length from 0 to `len` that differs between ranks.
pub(super) fn uneven(len: usize, from: u32, to: u32) -> usize {
    len * ((from + 2 * to + 1) % 4) as usize / 3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepts<T: Sample>(found: &[T], op: ReduceOp) -> bool {
        wrong_in_any_order(found, &reduced(5, 100, op), 0..100, op, 5).is_none()
    }

    /// The reduction of five ranks, with one element changed.
    fn changed<T: Sample>(op: ReduceOp, change: impl Fn(&mut T)) -> Vec<T> {
        let mut reduced = reduced::<T>(5, 100, op);
        change(&mut reduced[7]);
        reduced
    }

    #[test]
    fn another_order_of_a_sum_is_accepted_and_a_wrong_sum_is_not() {
        let element = |i| f32::fold((0..5).rev().map(|rank| input(rank, 100)[i]), ReduceOp::Sum, 5);
        let backwards: Vec<f32> = (0..100).map(element).collect();
        assert!(!backwards.iter().zip(reduced(5, 100, ReduceOp::Sum)).all(|(a, b)| a.is_same(&b)));
        assert!(accepts(&backwards, ReduceOp::Sum));
        assert!(accepts(&changed(ReduceOp::Prod, |_: &mut bf16| ()), ReduceOp::Prod));

        let without_a_rank = changed(ReduceOp::Sum, |sum: &mut f32| *sum -= input::<f32>(3, 100)[7]);
        assert!(!accepts(&without_a_rank, ReduceOp::Sum));
        assert!(!accepts(&changed(ReduceOp::Sum, |sum: &mut f32| *sum = f32::NAN), ReduceOp::Sum));
        // Integers, minima and maxima are exact.
        assert!(!accepts(&changed(ReduceOp::Sum, |sum: &mut i32| *sum += 1), ReduceOp::Sum));
        assert!(!accepts(&changed(ReduceOp::Max, |most: &mut f32| *most = most.next_up()), ReduceOp::Max));
    }
}
