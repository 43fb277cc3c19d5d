//! Activations on a GPU: one pass over memory each.

use crate::cuda::elements::{check, count, grid, pack, packs, run, typed};
use crate::cuda::{Arg, Result, Source, Stream, View};
use crate::{DType, cuda::elements};

/// The kernels.
pub static SOURCE: Source = Source { name: "activation", text: include_str!("activation.cu") };

/// Replaces every `x` by `max(x, slope · x)`.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If the elements are neither f32 nor bf16.
pub fn forward(stream: &Stream, slope: f32, values: View<'_>) -> Result<()> {
    let name = typed("activation_forward", values);
    let packs = packs(pack(values.dtype()), &[values]);
    let arguments = [Arg::updated(values), count(values.len()).into(), packs.into(), slope.into()];
    let grid = grid(stream, values.len().div_ceil(pack(values.dtype())));
    // SAFETY: the kernel visits as many elements as the view has.
    unsafe { run(stream, &SOURCE, &name, grid, &arguments) }
}

/// Replaces the gradient of the output in place by that of the input, given the output.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If types or lengths differ.
pub fn backward(stream: &Stream, slope: f32, y: View<'_>, gradient: View<'_>) -> Result<()> {
    check("the output of an activation", y, gradient.dtype(), gradient.len());
    let name = typed("activation_backward", gradient);
    let packs = packs(pack(y.dtype()), &[y, gradient]);
    let arguments = [y.into(), Arg::updated(gradient), count(y.len()).into(), packs.into(), slope.into()];
    let grid = grid(stream, y.len().div_ceil(pack(y.dtype())));
    // SAFETY: the kernel visits as many elements as both views have.
    unsafe { run(stream, &SOURCE, &name, grid, &arguments) }
}

/// Adds to every element the bias (f32) of its channel, the fastest index, and applies the activation: for products
/// computed without both. Slope 1 means no activation.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If `values` is not a whole number of rows of channels.
pub fn bias(stream: &Stream, slope: f32, bias: View<'_>, values: View<'_>) -> Result<()> {
    let channels = bias.len();
    check("a bias", bias, DType::F32, channels);
    assert!(values.len().is_multiple_of(channels), "{} elements in rows of {channels}", values.len());
    let name = typed("activation_bias", values);
    let pack = pack(values.dtype());
    let wide = channels.is_multiple_of(pack) && elements::aligned(pack, &[bias, values]);
    let arguments = [
        Arg::updated(values),
        bias.into(),
        count(values.len()).into(),
        count(channels).into(),
        slope.into(),
        u32::from(wide).into(),
    ];
    let grid = grid(stream, if wide { values.len() / pack } else { values.len() });
    // SAFETY: the kernel visits as many elements as `values` has, and `channels` elements of the bias.
    unsafe { run(stream, &SOURCE, &name, grid, &arguments) }
}
