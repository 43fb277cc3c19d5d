//! What changes from step to step.

use super::{Memory, Result, Stream, View};
use crate::DType;

/// Which step is being made, in the GPU's memory: `struct StepState` of the kernels.
///
/// A captured graph is replayed with the arguments it was captured with. What differs between steps is therefore not an
/// argument: kernels read it from here, and [`optimizer::cuda::begin`](crate::optimizer::cuda::begin) advances it at the
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
}

impl StepState {
    /// Bytes of memory that hold one.
    pub const BYTES: usize = size_of::<Self>();

    /// The state after `step` steps: the next one that begins has that index.
    pub fn after(step: u64) -> Self {
        // One less than 0 is the largest number, to which the kernel adds 1 all the same.
        StepState { step: step.wrapping_sub(1), position: 0, learning_rate: 0.0, constants: [0.0; 8] }
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
        let state = StepState { step: 1, position: 2, learning_rate: 0.5, constants: [0.25; 8] };
        let bytes = bytemuck::bytes_of(&state);
        assert_eq!(bytes.len(), 56);
        assert_eq!(bytes[16..24], 0.5f64.to_ne_bytes());
        assert_eq!(bytes[52..], 0.25f32.to_ne_bytes());
        assert_eq!(StepState::after(0).step.wrapping_add(1), 0);
    }
}
