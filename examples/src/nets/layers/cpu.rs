//! The passes of an operation on the CPU, and what they have at hand.
//!
//! Passes are generic over what activations are kept as, but for those of dense layers, which are f32 throughout. See
//! [`memory`](crate::nets::memory) for which layers that leaves.

use mgpu::{GradientSink, Layout, Result};
use mgpu_kernels::{Scratch, Threads};

use super::DropoutKey;
use crate::nets::profile::{Lap, Profile, lap};

/// An operation on the CPU, with memory for what it alone needs.
pub(in crate::nets) trait OnCpu<T> {
    /// Overwrites `y` with the output. An operation in place finds its input there, and nothing in `x`.
    ///
    /// # Errors
    /// If the ranks cannot be summed over.
    fn forward(&mut self, step: Step<'_>, x: &[T], y: &mut [T], pass: &mut ForwardPass<'_>) -> Result<()>;

    /// Overwrites the gradient of the input, and hands those of parameters to the sink.
    ///
    /// # Errors
    /// As the sink's.
    fn backward(&mut self, step: Step<'_>, tensors: StageTensors<'_, T>, pass: BackwardPass<'_>) -> Result<()>;
}

/// What the passes of a stage have at hand.
pub(in crate::nets) struct Step<'a> {
    /// The stage's place among all.
    pub(in crate::nets) stage: usize,
    pub(in crate::nets) threads: &'a Threads,
    pub(in crate::nets) scratch: &'a mut Scratch,
    /// Where each tensor lies in `params`.
    pub(in crate::nets) layout: &'a Layout,
    /// All parameters.
    pub(in crate::nets) params: &'a [f32],
    pub(in crate::nets) profile: &'a mut Option<Profile>,
}

impl<'a> Step<'a> {
    /// The values of parameter tensor `index`.
    pub(super) fn tensor(&self, index: usize) -> &'a [f32] {
        &self.params[self.layout.range(index)]
    }

    /// Announces the gradients of a stage's weights and bias.
    pub(super) fn hand_over(&mut self, sink: &mut dyn GradientSink, weight: usize, db: &[f32]) -> Result<()> {
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
    /// Gradient of the output; where the backward pass works in place, afterwards that of the input.
    pub(in crate::nets) dy: &'a mut [T],
    /// Gradient of the input, if it is asked for and has a place of its own.
    pub(in crate::nets) dx: Option<&'a mut [T]>,
}

/// What a forward pass is for, and the running statistics that it moves or reads.
pub(in crate::nets) enum ForwardPass<'a> {
    Train { buffers: &'a mut [f32], dropout: Option<DropoutKey>, ranks: &'a mut dyn GradientSink },
    Eval { buffers: &'a [f32] },
}

/// What a backward pass does with gradients of parameters, and where they go.
pub(in crate::nets) struct BackwardPass<'a> {
    /// Whether the gradient of the stage's input is asked for.
    pub(in crate::nets) input_gradient: bool,
    pub(in crate::nets) dropout: Option<DropoutKey>,
    pub(in crate::nets) sink: &'a mut dyn GradientSink,
    /// Room for the gradient of a bias, on its way to the sink.
    pub(in crate::nets) bias: &'a mut [f32],
}
