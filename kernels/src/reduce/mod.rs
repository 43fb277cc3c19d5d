//! Element-wise reductions over the buffers of several ranks.
//!
//! # Contract
//! For every element `i` the result is `finish(((s0[i] ∘ s1[i]) ∘ s2[i]) ∘ …)`, always combined in rank order 0…n−1.
//! Floating-point addition is not associative, so this fixed order makes the result the same on every rank, in every
//! run and for every block size and algorithm. Each type is combined in its accumulator and rounded to the element
//! type once, at the end:
//!
//! | element | accumulator | sum, prod | avg |
//! |---|---|---|---|
//! | f32, f64 | itself | rounded at each step | divided by n, rounded once more |
//! | f16, bf16 | f32 | rounded to 16 bits once | divided by n in f32 |
//! | u8, i32 | u32, i64 | wraps to the element's width | exact sum divided by n, towards zero |
//! | i64 | itself | wraps | wrapped sum divided by n, towards zero |
//!
//! `min` and `max` return NaN when any rank has NaN there: a diverged rank must not be masked by a healthy one.

mod cpu;
pub(crate) mod half_floats;

pub use cpu::{Output, accumulate, finish, reduce, reduce_from, start};

use crate::DType;

/// How the elements of all ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum over ranks.
    Sum = 0,
    /// The sum over ranks divided by their number.
    Avg = 1,
    /// The smallest; NaN if any is NaN.
    Min = 2,
    /// The largest; NaN if any is NaN.
    Max = 3,
    /// The product over ranks.
    Prod = 4,
}

impl ReduceOp {
    /// All reductions, in the order of their numbers.
    pub const ALL: [ReduceOp; 5] =
        [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];

    /// The name used on command lines and in messages: `sum`, `avg`, …
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Prod => "prod",
        }
    }
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for ReduceOp {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        ReduceOp::ALL.into_iter().find(|op| op.name() == text).ok_or_else(|| {
            let known = ReduceOp::ALL.map(ReduceOp::name).join(", ");
            format!("unknown reduction `{text}`; known are {known}")
        })
    }
}

/// Size in bytes of one accumulator of `dtype` (see the table above).
pub const fn accumulator_size(dtype: DType) -> usize {
    match dtype {
        DType::F32 | DType::F16 | DType::Bf16 | DType::U8 => 4,
        DType::F64 | DType::I64 | DType::I32 => 8,
    }
}
