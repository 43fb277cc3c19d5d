//! Reference results of the collectives: inputs as a function of rank and index, and reductions as a fold in rank order,
//! which the bits of every backend that sums in rank order must equal.

use std::ops::Range;

use half::{bf16, f16};
use mgpu::{Element, ReduceOp};

/// An element type with test values, and the definition of reductions.
pub(super) trait Sample: Element {
    fn sample(seed: u64) -> Self;
    fn fold(values: impl Iterator<Item = Self>, op: ReduceOp, ranks: u32) -> Self;
    /// Bitwise equality: zeros of different sign differ.
    fn is_same(&self, other: &Self) -> bool;
}

fn mix(seed: u64) -> u64 {
    let z = (seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32
}

macro_rules! sample {
    ($($type:ty, $acc:ty, $widen:expr, $narrow:expr, $sample:expr;)*) => {$(
        impl Sample for $type {
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
        }
    )*};
}
sample! {
    f32, f32, |x| x, |x| x, |r| (r % 20011) as f32 / 7.0 - 1429.0;
    f64, f64, |x| x, |x| x, |r| (r % 20011) as f64 / 7.0 - 1429.0;
    f16, f32, f16::to_f32, f16::from_f32, |r| f16::from_f32((r % 401) as f32 / 128.0 - 1.5);
    bf16, f32, bf16::to_f32, bf16::from_f32, |r| bf16::from_f32((r % 401) as f32 / 128.0 - 1.5);
    i32, i64, i64::from, |x| x as i32, |r| (r % 200) as i32 - 100;
    i64, i64, |x| x, |x| x, |r| (r % 100) as i64 - 50;
    u8, u64, u64::from, |x| x as u8, |r| (r % 128) as u8;
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

/// A length from 0 to `len` that differs between ranks.
pub(super) fn uneven(len: usize, from: u32, to: u32) -> usize {
    len * ((from + 2 * to + 1) % 4) as usize / 3
}
