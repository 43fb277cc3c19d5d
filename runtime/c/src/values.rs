//! Numbers of element types, reductions and phases. They are plain integers, because an enum of C may have any value.

use mgpu::{DType, Phase, ReduceOp};

use crate::call::Result;
use crate::status::Failure;

/// Type of elements: one of `MGPU_F32` … `MGPU_U8`.
pub type ElementType = i32;
/// IEEE 754 binary32, `float`.
pub const MGPU_F32: ElementType = 0;
/// IEEE 754 binary64, `double`.
pub const MGPU_F64: ElementType = 1;
/// IEEE 754 binary16. Reductions accumulate in float and round once.
pub const MGPU_F16: ElementType = 2;
/// bfloat16. Reductions accumulate in float and round once.
pub const MGPU_BF16: ElementType = 3;
/// `int32_t`.
pub const MGPU_I32: ElementType = 4;
/// `int64_t`.
pub const MGPU_I64: ElementType = 5;
/// `uint8_t`.
pub const MGPU_U8: ElementType = 6;

/// Reduction over ranks: one of `MGPU_SUM` … `MGPU_PROD`.
pub type Operation = i32;
/// The sum.
pub const MGPU_SUM: Operation = 0;
/// The sum divided by the number of ranks.
pub const MGPU_AVG: Operation = 1;
/// The smallest; NaN if any is NaN.
pub const MGPU_MIN: Operation = 2;
/// The largest; NaN if any is NaN.
pub const MGPU_MAX: Operation = 3;
/// The product.
pub const MGPU_PROD: Operation = 4;

/// Phase of the work: one of `MGPU_PHASE_START` … `MGPU_PHASE_FINALISE`.
pub type PhaseNumber = i32;
/// Before the first step.
pub const MGPU_PHASE_START: PhaseNumber = 0;
/// In a training step.
pub const MGPU_PHASE_STEP: PhaseNumber = 1;
/// Evaluating the model.
pub const MGPU_PHASE_EVALUATION: PhaseNumber = 2;
/// Writing or reading a checkpoint.
pub const MGPU_PHASE_CHECKPOINT: PhaseNumber = 3;
/// Ending.
pub const MGPU_PHASE_FINALISE: PhaseNumber = 4;

fn pick<T: Copy>(all: &[T], number: i32, what: &str) -> Result<T> {
    let found = usize::try_from(number).ok().and_then(|index| all.get(index));
    found.copied().ok_or_else(|| {
        Failure::argument(format!(
            "{what} {number} does not exist: they are numbered from 0 to {}",
            all.len() - 1
        ))
    })
}

pub(crate) fn dtype(number: ElementType) -> Result<DType> {
    pick(&DType::ALL, number, "element type")
}

pub(crate) fn reduction(number: Operation) -> Result<ReduceOp> {
    pick(&ReduceOp::ALL, number, "reduction")
}

pub(crate) fn phase(number: PhaseNumber) -> Result<Phase> {
    let all = [Phase::Start, Phase::Step, Phase::Evaluation, Phase::Checkpoint, Phase::Finalise];
    pick(&all, number, "phase")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        let types = [MGPU_F32, MGPU_F64, MGPU_F16, MGPU_BF16, MGPU_I32, MGPU_I64, MGPU_U8];
        assert_eq!(types.map(|number| dtype(number).unwrap()), DType::ALL);
        let reductions = [MGPU_SUM, MGPU_AVG, MGPU_MIN, MGPU_MAX, MGPU_PROD];
        assert_eq!(reductions.map(|number| reduction(number).unwrap()), ReduceOp::ALL);
        assert_eq!(phase(MGPU_PHASE_CHECKPOINT).unwrap(), Phase::Checkpoint);
        for number in [-1, 7, i32::MIN, i32::MAX] {
            assert!(dtype(number).is_err() && reduction(number).is_err() && phase(number).is_err());
        }
    }
}
