//! The interface of forward and backward passes on the CPU.
//!
//! Passes are generic over the dtype of activations, except for dense layers, which are always f32.
//! [`memory`](crate::nets::memory) says which layers that concerns.

use mgpu::{GradientSink, Layout, Result};
use mgpu_kernels::norm::Statistics;
use mgpu_kernels::{Scratch, Threads};

use super::DropoutKey;
use crate::nets::profile::{Lap, Profile, lap};

/// An operation on the CPU, with the memory of its kernel.
pub(in crate::nets) trait OnCpu<T> {
    /// Overwrites `y` with the output. An in-place operation finds its input in `y`; `x` is empty.
    ///
    /// # Errors
    /// If the sum over ranks fails.
    fn forward(&mut self, step: Step<'_>, x: &[T], y: &mut [T], pass: &mut ForwardPass<'_>) -> Result<()>;

    /// Overwrites the gradient of the input, and passes those of parameters to the sink.
    ///
    /// # Errors
    /// Errors of the sink.
    fn backward(
        &mut self,
        step: Step<'_>,
        tensors: StageTensors<'_, T>,
        pass: BackwardPass<'_>,
    ) -> Result<()>;
}

/// The context of a stage's passes.
pub(in crate::nets) struct Step<'a> {
    /// Index of the stage.
    pub(in crate::nets) stage: usize,
    pub(in crate::nets) threads: &'a Threads,
    pub(in crate::nets) scratch: &'a mut Scratch,
    /// The position of each tensor in `params`.
    pub(in crate::nets) layout: &'a Layout,
    /// All parameters.
    pub(in crate::nets) params: &'a [f32],
    /// What the stage keeps of the current batch.
    pub(in crate::nets) state: &'a mut PassState,
    pub(in crate::nets) profile: &'a mut Option<Profile>,
}

/// What a stage keeps of a batch from the forward to the backward pass, besides input and output.
#[derive(Debug, Default)]
pub(in crate::nets) struct PassState {
    /// For every pooled output, the index of the maximum in its window.
    pub(super) chosen: Vec<u8>,
    /// The statistics of the batch, for a batch normalisation.
    pub(super) statistics: Option<Statistics>,
}

impl<'a> Step<'a> {
    /// The values of parameter tensor `index`.
    pub(super) fn tensor(&self, index: usize) -> &'a [f32] {
        &self.params[self.layout.range(index)]
    }

    /// Announces the gradients of a stage's weights and bias.
    pub(super) fn announce(&mut self, sink: &mut dyn GradientSink, weight: usize, db: &[f32]) -> Result<()> {
        lap(self.profile, Lap::Backward(self.stage));
        sink.gradient(weight + 1).copy_from_slice(db);
        sink.ready(weight + 1)?;
        sink.ready(weight)?;
        lap(self.profile, Lap::Communication);
        Ok(())
    }
}

/// Input and output of a stage, and their gradients.
pub(in crate::nets) struct StageTensors<'a, T> {
    pub(in crate::nets) x: &'a [T],
    pub(in crate::nets) y: &'a [T],
    /// Gradient of the output; after an in-place backward pass, the gradient of the input.
    pub(in crate::nets) dy: &'a mut [T],
    /// Gradient of the input, if it is needed and the pass is not in place.
    pub(in crate::nets) dx: Option<&'a mut [T]>,
}

/// The kind of forward pass, with the running statistics that it updates or reads.
pub(in crate::nets) enum ForwardPass<'a> {
    Train { buffers: &'a mut [f32], dropout: Option<DropoutKey>, ranks: &'a mut dyn GradientSink },
    Eval { buffers: &'a [f32] },
}

/// The settings of a backward pass, and the sink of parameter gradients.
pub(in crate::nets) struct BackwardPass<'a> {
    /// Whether the gradient of the stage's input is needed.
    pub(in crate::nets) input_gradient: bool,
    pub(in crate::nets) dropout: Option<DropoutKey>,
    pub(in crate::nets) sink: &'a mut dyn GradientSink,
    /// Temporary memory for the gradient of a bias.
    pub(in crate::nets) bias: &'a mut [f32],
}
