//! Dropout on a GPU: the mask is computed for each element where it is applied.
//!
//! Masks are indexed by the elements of \[N, C, P\] on every backend, while activations are \[N, P, C\] in memory:
//! the kernel computes each element's index, so that GPUs and CPUs drop the same elements.

use super::{Mask, dropped, scale};
use crate::cuda::elements::{aligned, count, grid, pack, run, typed};
use crate::cuda::{Arg, Result, Source, StepState, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "dropout", text: include_str!("dropout.cu") };

/// `struct DropoutMask` of the kernels.
#[derive(Clone, Copy, Default, bytemuck::NoUninit)]
#[repr(C)]
pub(crate) struct Parameters {
    seed: u64,
    stream: u64,
    first_sample: u64,
    channels: u32,
    plane: u32,
    threshold: u32,
    scale: f32,
}

/// A dropout layer in a step.
#[derive(Debug, Clone, Copy)]
pub struct Dropout<'a> {
    /// Of dropping an element; in [0, 1).
    pub probability: f32,
    /// Which elements are dropped.
    pub mask: Mask,
    /// The memory of a [`StepState`]: masks depend on the step.
    pub state: View<'a>,
}

impl Dropout<'_> {
    /// For the kernels.
    ///
    /// # Panics
    /// Unless the probability is in [0, 1), and `len` elements are a whole number of samples.
    #[track_caller]
    pub(crate) fn parameters(&self, len: usize) -> Parameters {
        let &Dropout { probability, mask, state } = self;
        StepState::check(state);
        let Mask { seed, stream, first_sample, channels, plane } = mask;
        assert!(len.is_multiple_of(channels * plane), "{len} elements for {mask:?}");
        Parameters {
            seed,
            stream,
            first_sample,
            channels: count(channels),
            plane: count(plane),
            threshold: dropped(probability),
            scale: scale(probability),
        }
    }
}

/// Zeroes or scales every element by the mask of the step in the state: values in the forward pass, gradients in the
/// backward pass.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// Unless the probability is in [0, 1) and `values` is a whole number of samples.
pub fn apply(stream: &Stream, dropout: &Dropout<'_>, values: View<'_>) -> Result<()> {
    let parameters = dropout.parameters(values.len());
    if dropout.probability == 0.0 {
        return Ok(());
    }
    let pack = pack(values.dtype());
    let wide = dropout.mask.channels.is_multiple_of(pack) && aligned(pack, &[values]);
    let arguments = [
        Arg::updated(values),
        count(values.len()).into(),
        Arg::of(&parameters),
        dropout.state.into(),
        u32::from(wide).into(),
    ];
    let grid = grid(stream, if wide { values.len() / pack } else { values.len() });
    // SAFETY: the kernel visits as many elements as the view has, and reads the state.
    unsafe { run(stream, &SOURCE, &typed("dropout_apply", values), grid, &arguments) }
}
