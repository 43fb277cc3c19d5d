//! What changes from step to step.

use std::ops::Range;

use bytemuck::Zeroable;

use super::{Memory, Result, Stream, View};
use crate::DType;

/// Which step is being made, in the GPU's memory: `struct StepState` of the kernels.
///
/// A captured graph is replayed with the arguments it was captured with. What differs between steps is therefore not an
/// argument: kernels read it from here, and [`optimizer::cuda::begin_step`](crate::optimizer::cuda::begin_step) advances it at the
/// start of every step.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepState {
    /// Index of the step being made, from 0.
    pub step: u64,
    /// Index of that step within its epoch.
    pub position: u64,
    /// Its learning rate.
    pub learning_rate: f64,
    /// The optimizer's numbers that depend on the step.
    pub constants: [f32; 8],
    /// The sum of its gradients' squares, where they are clipped.
    pub squares: f64,
    /// The Euclidean norm of its gradients before they were clipped, where they are; not a number before the first step.
    pub norm: f64,
    /// What the optimizer multiplies its gradients with.
    pub scale: f32,
    /// Not 0 if an earlier step had gradients that are no numbers. That step's update was not made, and none is until the state
    /// is overwritten.
    pub halted: u32,
    /// The mark of those gradients, as [`find_non_finite`](crate::digest::cuda::find_non_finite) was told; 0 for none.
    pub non_finite: u64,
    /// The learning rate with the correction of Adam's first moment: what tensors' factors multiply.
    pub step_size: f64,
    /// The learning rate times the weight decay: what AdamW takes from parameters.
    pub shrink: f64,
}

impl StepState {
    /// Bytes of memory that hold one.
    pub const BYTES: usize = size_of::<Self>();

    /// The bytes of [`squares`](Self::squares), which ranks add up.
    pub const SQUARES: Range<usize> = 56..64;

    /// The bytes of [`non_finite`](Self::non_finite), of which ranks take the largest.
    pub const NON_FINITE: Range<usize> = 80..88;

    /// The state after `step` steps: the next one that begins has that index.
    pub fn after(step: u64) -> Self {
        // One less than 0 is the largest number, to which the kernel adds 1 all the same.
        StepState { step: step.wrapping_sub(1), norm: f64::NAN, scale: 1.0, ..Zeroable::zeroed() }
    }

    /// A copy on the GPU of `stream`, as bytes.
    ///
    /// # Errors
    /// If memory is short, or the driver refuses.
    pub fn upload(&self, stream: &Stream) -> Result<Memory> {
        Memory::from_slice(stream, bytemuck::bytes_of(self))
    }

    /// A copy on the host, once the work on `stream` so far is over.
    ///
    /// # Errors
    /// If that work failed.
    ///
    /// # Panics
    /// If `state` is not the memory of one.
    pub fn download(state: View<'_>, stream: &Stream) -> Result<Self> {
        Self::check(state);
        Ok(bytemuck::pod_read_unaligned(&state.to_vec::<u8>(stream)?))
    }

    /// # Panics
    /// If `state` is not the memory of one.
    #[track_caller]
    pub(crate) fn check(state: View<'_>) {
        assert_eq!((state.dtype(), state.len()), (DType::U8, Self::BYTES), "memory of a step's state");
        assert_eq!(state.address() % 8, 0, "address of a step's state");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_lies_as_the_kernels_have_it() {
        let state = StepState {
            learning_rate: 0.5,
            constants: [0.25; 8],
            squares: 3.0,
            non_finite: 7,
            shrink: 0.125,
            ..StepState::after(2)
        };
        let bytes = bytemuck::bytes_of(&state);
        assert_eq!(bytes.len(), 104);
        assert_eq!(bytes[16..24], 0.5f64.to_ne_bytes());
        assert_eq!(bytes[52..56], 0.25f32.to_ne_bytes());
        assert_eq!(bytes[StepState::SQUARES], 3.0f64.to_ne_bytes());
        assert_eq!(bytes[72..76], 1.0f32.to_ne_bytes());
        assert_eq!(bytes[StepState::NON_FINITE], 7u64.to_ne_bytes());
        assert_eq!(bytes[96..104], 0.125f64.to_ne_bytes());
        assert_eq!(StepState::after(0).step.wrapping_add(1), 0);
    }
}
