//! Max-pooling on a GPU, of NHWC images: a thread owns a window of some channels.
//!
//! The chosen positions have the layout of the outputs, one byte each. The fused passes also apply the bias and
//! activation that precede pooling in a network: their results are bitwise equal to those of the separate passes, and
//! they avoid writing and reading the image in between.

use super::PoolShape;
use crate::DType;
use crate::cuda::elements::{aligned, check, count, grid, pack, run, typed};
use crate::cuda::{Arg, Result, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "pool", text: include_str!("pool.cu") };

/// `struct PoolShape` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Extents {
    images: u32,
    height: u32,
    width: u32,
    out_height: u32,
    out_width: u32,
    channels: u32,
}

impl Extents {
    #[track_caller]
    fn new(shape: &PoolShape, channels: usize, input: View<'_>, output: View<'_>, chosen: View<'_>) -> Self {
        let image = channels * shape.input_len();
        let images = input.len() / image;
        check("the input of a pooling layer", input, output.dtype(), images * image);
        let outputs = images * channels * shape.output_len();
        check("the output of a pooling layer", output, input.dtype(), outputs);
        check("the chosen positions of a pooling layer", chosen, DType::U8, outputs);
        count(input.len());
        Extents {
            images: count(images),
            height: count(shape.height),
            width: count(shape.width),
            out_height: count(shape.out_height()),
            out_width: count(shape.out_width()),
            channels: count(channels),
        }
    }

    /// Number of windows of one element each, rounded up at the edges: as many threads as either pass may need.
    fn windows(&self) -> usize {
        let [images, height, width, channels] =
            [self.images, self.height, self.width, self.channels].map(|extent| extent as usize);
        images * height.div_ceil(2) * width.div_ceil(2) * channels
    }
}

/// Runs a kernel with `arguments` between the extents and the flag for whole packs.
fn run_windows(
    stream: &Stream,
    name: &str,
    extents: Extents,
    views: &[View<'_>],
    arguments: &[Arg],
) -> Result<()> {
    let pack = pack(views[0].dtype());
    let wide = (extents.channels as usize).is_multiple_of(pack) && aligned(pack, views);
    let mut all = vec![Arg::of(&extents)];
    all.extend_from_slice(arguments);
    all.push(u32::from(wide).into());
    let grid = grid(stream, if wide { extents.windows() / pack } else { extents.windows() });
    // SAFETY: the views have the lengths that the extents say.
    unsafe { run(stream, &SOURCE, &typed(name, views[0]), grid, &all) }
}

/// Overwrites `y` with the maxima and `chosen` with their positions in the windows.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn forward(
    stream: &Stream,
    shape: &PoolShape,
    channels: usize,
    x: View<'_>,
    y: View<'_>,
    chosen: View<'_>,
) -> Result<()> {
    let extents = Extents::new(shape, channels, x, y, chosen);
    run_windows(stream, "pool_forward", extents, &[x, y, chosen], &[x.into(), y.into(), chosen.into()])
}

/// Overwrites `y` with the maxima of `x` after adding the bias (f32) of each channel and applying the activation.
/// `x` stays as it is.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn forward_fused(
    stream: &Stream,
    shape: &PoolShape,
    slope: f32,
    bias: View<'_>,
    x: View<'_>,
    y: View<'_>,
    chosen: View<'_>,
) -> Result<()> {
    let extents = Extents::new(shape, bias.len(), x, y, chosen);
    check("a bias", bias, DType::F32, bias.len());
    let arguments = [x.into(), bias.into(), slope.into(), y.into(), chosen.into()];
    run_windows(stream, "pool_forward_fused", extents, &[x, y, chosen, bias], &arguments)
}

/// Overwrites `dx` with the gradient of the input, given the positions that the forward pass chose.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn backward(
    stream: &Stream,
    shape: &PoolShape,
    channels: usize,
    dy: View<'_>,
    chosen: View<'_>,
    dx: View<'_>,
) -> Result<()> {
    let extents = Extents::new(shape, channels, dx, dy, chosen);
    run_windows(stream, "pool_backward", extents, &[dx, dy, chosen], &[dy.into(), chosen.into(), dx.into()])
}

/// Overwrites `dx` with the gradient of the input of [`forward_fused`], from that of its output `y`.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
#[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
pub fn backward_fused(
    stream: &Stream,
    shape: &PoolShape,
    channels: usize,
    slope: f32,
    dy: View<'_>,
    y: View<'_>,
    chosen: View<'_>,
    dx: View<'_>,
) -> Result<()> {
    let extents = Extents::new(shape, channels, dx, dy, chosen);
    check("the output of a pooling layer", y, dy.dtype(), dy.len());
    let arguments = [dy.into(), y.into(), chosen.into(), slope.into(), dx.into()];
    run_windows(stream, "pool_backward_fused", extents, &[dx, dy, y, chosen], &arguments)
}
