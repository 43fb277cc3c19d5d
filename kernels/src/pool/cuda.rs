//! Max-pooling on a GPU, of NHWC images: a thread owns a window of some channels.
//!
//! The chosen positions have the layout of the outputs, one byte each. The fused passes also apply the bias and
//! activation that precede pooling in a network: their results are bitwise equal to those of the separate passes, and
//! they avoid writing and reading the image in between.

use super::PoolShape;
use crate::DType;
use crate::cuda::counters::{ColumnSums, check_counters};
use crate::cuda::elements::{THREADS, aligned, check, count, grid, pack, run, typed};
use crate::cuda::{Arg, Grid, Result, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "pool", text: include_str!("pool.cu") };

/// Number of blocks per multiprocessor of [`backward_fused`]: enough to saturate memory, few enough for their sums to be
/// added up quickly.
const SUMMING: usize = 4;

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

/// The gradient of the bias in [`backward_fused`].
#[derive(Debug, Clone, Copy)]
pub struct BiasGradient<'a> {
    /// Receives it: f32, one for each channel.
    pub total: View<'a>,
    /// f32, whose contents do not matter: as many blocks work as it has room for [rows of channels](workspace_len).
    pub workspace: View<'a>,
    /// Zero, before and after.
    pub counters: View<'a>,
}

impl BiasGradient<'_> {
    /// For `slices` blocks in each of `rows` rows of the grid.
    #[track_caller]
    fn sums(&self, channels: usize, rows: usize, slices: usize) -> ColumnSums {
        let &BiasGradient { total, workspace, counters } = self;
        check("the gradient of a bias", total, DType::F32, channels);
        check("a workspace", workspace, DType::F32, workspace.len());
        check_counters(counters, rows, slices);
        let has = workspace.len();
        assert!(slices == 1 || has >= slices * channels, "a workspace of {has} elements");
        ColumnSums { slices: workspace.address(), total: total.address(), counters: counters.address() }
    }
}

/// Number of f32 elements of workspace with which [`backward_fused`] is fastest.
pub fn workspace_len(multiprocessors: u32, channels: usize) -> usize {
    SUMMING * multiprocessors as usize * channels
}

/// Overwrites `dx` with the gradient of the input of [`forward_fused`], from that of its output `y`, and `bias`, if it is
/// given, with the gradient of the bias.
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
    bias: Option<&BiasGradient<'_>>,
) -> Result<()> {
    let extents = Extents::new(shape, channels, dx, dy, chosen);
    check("the output of a pooling layer", y, dy.dtype(), dy.len());
    let pack = pack(dx.dtype());
    let wide = channels.is_multiple_of(pack) && aligned(pack, &[dx, dy, y, chosen]);
    let packs = channels / if wide { pack } else { 1 };
    let tile = packs.min(THREADS as usize);
    let windows = extents.windows() / channels;
    let most = SUMMING * stream.device().multiprocessors() as usize;
    let most = bias.map_or(most, |bias| (bias.workspace.len() / channels).clamp(1, most));
    let slices = windows.div_ceil(THREADS as usize / tile).clamp(1, most);
    let rows = packs.div_ceil(tile);
    let sums = bias.map_or(ColumnSums::NONE, |bias| bias.sums(channels, rows, slices));
    let arguments = [
        Arg::of(&extents),
        dy.into(),
        y.into(),
        chosen.into(),
        slope.into(),
        dx.into(),
        Arg::of(&sums),
        u32::from(wide).into(),
    ];
    let grid = Grid { blocks: [count(slices), count(rows), 1], threads: THREADS, shared: 0 };
    // SAFETY: the views have the lengths that the extents say, and the workspace has a row for each slice.
    unsafe { run(stream, &SOURCE, &typed("pool_backward_fused", dx), grid, &arguments) }
}
