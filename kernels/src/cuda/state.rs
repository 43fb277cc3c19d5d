//! The values that change from step to step.

use std::ops::Range;

use bytemuck::Zeroable;

use super::{Memory, Result, Stream, View};
use crate::DType;
use crate::loss_scale::{LossScale, LossScaler};

/// The state of the current training step, in the GPU's memory: `struct StepState` of the kernels.
///
/// A captured graph is replayed with the arguments that it was captured with. So values that differ between steps are
/// not arguments: kernels read them from here, and
/// [`optimizer::cuda::begin_step`](crate::optimizer::cuda::begin_step) advances them at the start of every step.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepState {
    /// Index of the current step, from 0.
    pub step: u64,
    /// Index of the step within its epoch.
    pub position: u64,
    /// Its learning rate.
    pub learning_rate: f64,
    /// Those constants of the optimizer that depend on the step.
    pub constants: [f32; 8],
    /// The sum of the squares of all gradients, if they are clipped.
    pub squares: f64,
    /// The Euclidean norm of the gradients before clipping, if they are clipped; NaN before the first step.
    pub norm: f64,
    /// The factor by which the optimizer multiplies the gradients.
    pub scale: f32,
    /// Not 0 if an earlier step had non-finite gradients, and not because of its loss scale. The update of that step was
    /// skipped, and so is every further one until the state is overwritten.
    pub halted: u32,
    /// The mark of the tensor with non-finite gradients, as passed to
    /// [`find_non_finite`](crate::digest::cuda::find_non_finite); 0 for none.
    pub non_finite: u64,
    /// The learning rate with the bias correction of Adam's first moment, to be multiplied by the factor of a
    /// tensor's group.
    pub step_size: f64,
    /// The learning rate times the weight decay, which AdamW subtracts from parameters.
    pub shrink: f64,
    /// The factor of the loss's gradient in this step; 1 without a [`LossScaler`].
    pub loss_scale: f32,
    /// Number of steps before this one since that scale changed.
    pub good_steps: u32,
    /// Number of steps before this one that were skipped, because their gradients have overflowed.
    pub skipped: u64,
    /// Not 0 once a step has begun with this state.
    pub begun: u64,
}

impl StepState {
    /// Size in bytes.
    pub const BYTES: usize = size_of::<Self>();

    /// The bytes of [`squares`](Self::squares), which are summed over ranks.
    pub const SQUARES: Range<usize> = 56..64;

    /// The bytes of [`non_finite`](Self::non_finite), of which ranks take the maximum.
    pub const NON_FINITE: Range<usize> = 80..88;

    /// The bytes of [`loss_scale`](Self::loss_scale).
    pub const LOSS_SCALE: Range<usize> = 104..108;

    /// The state after `step` steps: the next step has that index.
    pub fn after(step: u64) -> Self {
        // One less than 0 is `u64::MAX`, and the kernel's increment wraps around to 0.
        let step = step.wrapping_sub(1);
        StepState { step, norm: f64::NAN, scale: 1.0, loss_scale: 1.0, ..Zeroable::zeroed() }
    }

    /// The same, whose next step has this loss scale.
    #[must_use]
    pub fn with_loss_scale(self, state: LossScale) -> Self {
        let LossScale { scale, good_steps, skipped } = state;
        StepState { loss_scale: scale, good_steps, skipped, ..self }
    }

    /// The loss scale of this step.
    pub fn loss_scale(&self) -> LossScale {
        LossScale { scale: self.loss_scale, good_steps: self.good_steps, skipped: self.skipped }
    }

    /// Whether the update of this step was skipped because of its loss scale.
    pub fn is_skipped(&self) -> bool {
        self.non_finite != 0 && self.loss_scale().may_fall()
    }

    /// The loss scale after this step, which has ended: what the next step begins with.
    pub fn next_loss_scale(&self, scaler: &LossScaler) -> LossScale {
        let is_over = self.begun != 0 && (self.non_finite == 0 || self.is_skipped());
        if is_over { scaler.after(self.loss_scale(), self.non_finite != 0) } else { self.loss_scale() }
    }

    /// Copies the state to the GPU of `stream`, as bytes.
    ///
    /// # Errors
    /// If there is not enough memory, or the driver refuses.
    pub fn upload(&self, stream: &Stream) -> Result<Memory> {
        Memory::from_slice(stream, bytemuck::bytes_of(self))
    }

    /// Copies the state to the host, after the work on `stream` so far has finished.
    ///
    /// # Errors
    /// If that work failed.
    ///
    /// # Panics
    /// If `state` is not the memory of a `StepState`.
    pub fn download(state: View<'_>, stream: &Stream) -> Result<Self> {
        Self::check(state);
        Ok(bytemuck::pod_read_unaligned(&state.to_vec::<u8>(stream)?))
    }

    /// # Panics
    /// If `state` is not the memory of a `StepState`.
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
    fn the_layout_is_that_of_the_kernels() {
        let state = StepState {
            learning_rate: 0.5,
            constants: [0.25; 8],
            squares: 3.0,
            non_finite: 7,
            shrink: 0.125,
            begun: 1,
            ..StepState::after(2).with_loss_scale(LossScale { scale: 8.0, good_steps: 3, skipped: 5 })
        };
        let bytes = bytemuck::bytes_of(&state);
        assert_eq!(bytes.len(), 128);
        assert_eq!(bytes[16..24], 0.5f64.to_ne_bytes());
        assert_eq!(bytes[52..56], 0.25f32.to_ne_bytes());
        assert_eq!(bytes[StepState::SQUARES], 3.0f64.to_ne_bytes());
        assert_eq!(bytes[72..76], 1.0f32.to_ne_bytes());
        assert_eq!(bytes[StepState::NON_FINITE], 7u64.to_ne_bytes());
        assert_eq!(bytes[96..104], 0.125f64.to_ne_bytes());
        assert_eq!(bytes[StepState::LOSS_SCALE], 8.0f32.to_ne_bytes());
        assert_eq!(bytes[108..112], 3u32.to_ne_bytes());
        assert_eq!(bytes[112..120], 5u64.to_ne_bytes());
        assert_eq!(bytes[120..128], 1u64.to_ne_bytes());
        assert_eq!(StepState::after(0).step.wrapping_add(1), 0);
    }
}
