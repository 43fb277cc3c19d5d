//! The passes of a convolution as plain sums on a GPU: slow, and obviously right.
//!
//! Autotuning compares all results of every candidate with these. Operands have the type and layout of
//! [`super::cuda`]; results are f32, summed with Kahan's compensation. So an error here is that of rounding each
//! product once and the result a few times, however long the sum.
//!
//! One thread computes one result. On an H100, where two loads for each product are the limit, that should be one to
//! a few TFLOP/s. A gradient of few weights takes the latency of its longest sum instead: some 500 cycles for each of
//! 800,000 products, 28 × 28 pixels of 1,024 images, are a quarter of a second. Neither has been measured.

use super::ConvShape;
use crate::DType;
use crate::cuda::elements::{THREADS, check, count, run, typed};
use crate::cuda::{Arg, Grid, Result, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "conv_plain", text: include_str!("conv_plain.cu") };

/// `struct PlainConvolution` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct PlainConvolution {
    images: u32,
    channels: u32,
    height: u32,
    width: u32,
    filters: u32,
    out_height: u32,
    out_width: u32,
    kernel: u32,
    pad: u32,
    slope: f32,
}

impl PlainConvolution {
    #[track_caller]
    fn new(shape: &ConvShape, images: usize, slope: f32) -> Self {
        shape.check();
        PlainConvolution {
            images: count(images),
            channels: count(shape.channels),
            height: count(shape.height),
            width: count(shape.width),
            filters: count(shape.filters),
            out_height: count(shape.out_height()),
            out_width: count(shape.out_width()),
            kernel: count(shape.kernel),
            pad: count(shape.pad()),
            slope,
        }
    }
}

/// A thread for each of `len` results.
fn grid(len: usize) -> Grid {
    Grid::cover(len, THREADS, u32::MAX)
}

/// Overwrites `y` \[N, H', W', F\] (f32) with the activated output of [`super::cuda::forward`]. `transposed` (f32) is
/// scratch for as many elements as `weights`.
///
/// # Errors
/// If a kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn forward(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    x: View<'_>,
    weights: View<'_>,
    bias: View<'_>,
    slope: f32,
    transposed: View<'_>,
    y: View<'_>,
) -> Result<()> {
    let extents = PlainConvolution::new(shape, images, slope);
    check("a convolution's input", x, x.dtype(), images * shape.input_len());
    check("a convolution's weights", weights, x.dtype(), shape.weights_len());
    check("a convolution's bias", bias, DType::F32, shape.filters);
    check("transposed weights", transposed, DType::F32, shape.weights_len());
    check("a convolution's plain output", y, DType::F32, images * shape.output_len());
    let (filters, filter_len) = (count(shape.filters), count(shape.filter_len()));
    let arguments = [weights.into(), filters.into(), filter_len.into(), transposed.into()];
    let name = typed("conv_plain_transpose", weights);
    // SAFETY: both views have the lengths that the extents say.
    unsafe { run(stream, &SOURCE, &name, grid(transposed.len()), &arguments) }?;
    let arguments = [x.into(), transposed.into(), bias.into(), y.into(), Arg::of(&extents)];
    // SAFETY: as above.
    unsafe { run(stream, &SOURCE, &typed("conv_plain_forward", x), grid(y.len()), &arguments) }
}

/// Overwrites `dx` \[N, H, W, C\] (f32) with the gradient of the input.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
#[track_caller]
pub fn backward_input(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    weights: View<'_>,
    dy: View<'_>,
    dx: View<'_>,
) -> Result<()> {
    let extents = PlainConvolution::new(shape, images, 1.0);
    check("a convolution's weights", weights, dy.dtype(), shape.weights_len());
    check("the gradient of a convolution's output", dy, dy.dtype(), images * shape.output_len());
    check("the plain gradient of a convolution's input", dx, DType::F32, images * shape.input_len());
    let arguments = [weights.into(), dy.into(), dx.into(), Arg::of(&extents)];
    // SAFETY: the views have the lengths that the extents say.
    unsafe { run(stream, &SOURCE, &typed("conv_plain_backward_input", dy), grid(dx.len()), &arguments) }
}

/// Overwrites `dw` \[F, K, K, C\] (f32) with the gradient of the weights, summed over all images.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
#[track_caller]
pub fn backward_weights(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    x: View<'_>,
    dy: View<'_>,
    dw: View<'_>,
) -> Result<()> {
    let extents = PlainConvolution::new(shape, images, 1.0);
    check("a convolution's input", x, dy.dtype(), images * shape.input_len());
    check("the gradient of a convolution's output", dy, dy.dtype(), images * shape.output_len());
    check("the plain gradient of a convolution's weights", dw, DType::F32, shape.weights_len());
    let arguments = [x.into(), dy.into(), dw.into(), Arg::of(&extents)];
    // SAFETY: the views have the lengths that the extents say.
    unsafe { run(stream, &SOURCE, &typed("conv_plain_backward_weights", dy), grid(dw.len()), &arguments) }
}
