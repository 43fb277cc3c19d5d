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
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    seed: u64,
    stream: u64,
    first_sample: u64,
    channels: u32,
    plane: u32,
    threshold: u32,
    scale: f32,
}

/// Zeroes or scales every element by the mask of the step in `state`: values in the forward pass, gradients in the
/// backward pass.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// Unless `probability` is in [0, 1) and `values` is a whole number of samples.
pub fn apply(
    stream: &Stream,
    probability: f32,
    mask: &Mask,
    state: View<'_>,
    values: View<'_>,
) -> Result<()> {
    let threshold = dropped(probability);
    StepState::check(state);
    let &Mask { channels, plane, .. } = mask;
    assert!(values.len().is_multiple_of(channels * plane), "{} elements for {mask:?}", values.len());
    if probability == 0.0 {
        return Ok(());
    }
    let pack = pack(values.dtype());
    let wide = channels.is_multiple_of(pack) && aligned(pack, &[values]);
    let parameters = Parameters {
        seed: mask.seed,
        stream: mask.stream,
        first_sample: mask.first_sample,
        channels: count(channels),
        plane: count(plane),
        threshold,
        scale: scale(probability),
    };
    let arguments = [
        values.into(),
        count(values.len()).into(),
        Arg::of(&parameters),
        state.into(),
        u32::from(wide).into(),
    ];
    let grid = grid(stream, if wide { values.len() / pack } else { values.len() });
    // SAFETY: the kernel visits as many elements as the view has, and reads the state.
    unsafe { run(stream, &SOURCE, &typed("dropout_apply", values), grid, &arguments) }
}
