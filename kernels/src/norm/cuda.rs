//! Batch normalisation on a GPU, of NHWC images.
//!
//! Sums are f64 \[2C + 1\] as on the CPU: first sums, second sums, count. They stay on the GPU, where a communicator
//! sums them over ranks. Statistics are f32 \[2C\]: means, then inverse deviations.
//!
//! Sums are computed in f64 by as many blocks as the workspace has room for, and added up in a fixed order, so they
//! are the same from run to run. Each pass is two launches, between which a communicator may sum over ranks.

use super::{EPSILON, MOMENTUM};
use crate::DType;
use crate::cuda::counters::check_counters;
use crate::cuda::elements::{THREADS, aligned, blocks, check, count, grid, pack, run, typed};
use crate::cuda::{Arg, Grid, Result, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "norm", text: include_str!("norm.cu") };

/// Number of blocks per multiprocessor that compute sums: enough to saturate memory, few enough to be added up
/// quickly.
const SUMMING: usize = 4;

/// Number of f64 elements of the workspace with which [`sum_inputs`] and [`sum_gradients`] are fastest, on a GPU with
/// this number of multiprocessors. Calls on the same stream may share a workspace.
pub fn workspace_len(multiprocessors: u32, channels: usize) -> usize {
    SUMMING * multiprocessors as usize * 2 * channels
}

/// `struct NormShape` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Extents {
    rows: u32,
    channels: u32,
}

/// Extents of images, and whether `views` and `parameters` are all aligned for whole packs of channels.
struct Rows {
    extents: Extents,
    pack: usize,
    wide: bool,
}

impl Rows {
    #[track_caller]
    fn new(channels: usize, views: &[View<'_>], parameters: &[View<'_>]) -> Self {
        let (dtype, len) = (views[0].dtype(), views[0].len());
        assert!(len.is_multiple_of(channels), "{len} elements in rows of {channels}");
        for view in views {
            check("images to be normalised", *view, dtype, len);
        }
        count(len);
        let pack = pack(dtype);
        let wide = channels.is_multiple_of(pack) && aligned(pack, views) && aligned(4, parameters);
        let extents = Extents { rows: count(len / channels), channels: count(channels) };
        Rows { extents, pack: if wide { pack } else { 1 }, wide }
    }

    /// The grid that `norm_position` of the kernels expects, of at most `blocks` blocks in x.
    fn grid(&self, blocks: usize) -> Grid {
        let packs = self.extents.channels as usize / self.pack;
        let tile = packs.min(THREADS as usize);
        let lanes = THREADS as usize / tile;
        let rows = (self.extents.rows as usize).div_ceil(lanes);
        Grid {
            blocks: [count(rows.clamp(1, blocks)), count(packs.div_ceil(tile)), 1],
            threads: THREADS,
            shared: 0,
        }
    }

    fn wide(&self) -> Arg {
        u32::from(self.wide).into()
    }
}

/// Number of channels of `sums`.
#[track_caller]
fn channels_of(sums: View<'_>) -> usize {
    let channels = sums.len() / 2;
    assert!(channels > 0, "sums of no channel");
    check("sums", sums, DType::F64, 2 * channels + 1);
    channels
}

/// Number of blocks that `workspace` has room for.
#[track_caller]
fn max_blocks(workspace: View<'_>, channels: usize) -> usize {
    check("a workspace", workspace, DType::F64, workspace.len());
    let blocks = workspace.len() / (2 * channels);
    assert!(blocks > 0, "a workspace of {} elements for {channels} channels", workspace.len());
    blocks
}

/// `struct NormTotals` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Totals {
    workspace: u64,
    sums: u64,
    dgamma: u64,
    dbeta: u64,
    counters: u64,
}

/// Overwrites `sums` with this rank's sums of `x` and `x²` and the number of pixels.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn sum_inputs(
    stream: &Stream,
    x: View<'_>,
    workspace: View<'_>,
    counters: View<'_>,
    sums: View<'_>,
) -> Result<()> {
    let channels = channels_of(sums);
    let rows = Rows::new(channels, &[x], &[]);
    let grid = rows.grid(max_blocks(workspace, channels));
    check_grid(counters, grid);
    let totals = Totals {
        workspace: workspace.address(),
        sums: sums.address(),
        dgamma: 0,
        dbeta: 0,
        counters: counters.address(),
    };
    let arguments = [Arg::of(&rows.extents), x.into(), Arg::of(&totals), rows.wide()];
    // SAFETY: `x` has rows · channels elements, the workspace 2 · channels for each block, and `sums` 2 · channels + 1.
    unsafe { run(stream, &SOURCE, &typed("norm_sum_inputs", x), grid, &arguments) }
}

#[track_caller]
fn check_grid(counters: View<'_>, grid: Grid) {
    let [slices, rows, _] = grid.blocks;
    check_counters(counters, rows as usize, slices as usize);
}

/// `struct NormBatch` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Batch {
    sums: u64,
    statistics: u64,
    running_mean: u64,
    running_var: u64,
    epsilon: f64,
    momentum: f64,
}

/// The statistics of a batch: where they come from, and what they change.
#[derive(Debug, Clone, Copy)]
pub struct BatchStatistics<'a> {
    /// The batch's sums of `x` and `x²`, summed over all ranks.
    pub sums: View<'a>,
    /// Receives the statistics, for the backward pass.
    pub statistics: View<'a>,
    /// The running means, which move towards the batch's.
    pub running_mean: View<'a>,
    /// The running variances, which move towards the batch's.
    pub running_var: View<'a>,
}

/// As [`normalise`], by the statistics of the batch itself, which it computes first.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn normalise_batch(
    stream: &Stream,
    batch: &BatchStatistics<'_>,
    gamma: View<'_>,
    beta: View<'_>,
    x: View<'_>,
    y: View<'_>,
) -> Result<()> {
    let &BatchStatistics { sums, statistics, running_mean, running_var } = batch;
    let channels = channels_of(sums);
    check("a running mean", running_mean, DType::F32, channels);
    check("a running variance", running_var, DType::F32, channels);
    let batch = Batch {
        sums: sums.address(),
        statistics: statistics.address(),
        running_mean: running_mean.address(),
        running_var: running_var.address(),
        epsilon: EPSILON,
        momentum: MOMENTUM,
    };
    run_normalise(stream, batch, statistics, gamma, beta, x, y)
}

/// Computes the statistics from the running statistics, for evaluation.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn running_statistics(
    stream: &Stream,
    running_mean: View<'_>,
    running_var: View<'_>,
    statistics: View<'_>,
) -> Result<()> {
    let channels = running_mean.len();
    check("statistics", statistics, DType::F32, 2 * channels);
    check("a running mean", running_mean, DType::F32, channels);
    check("a running variance", running_var, DType::F32, channels);
    let arguments =
        [count(channels).into(), running_mean.into(), running_var.into(), EPSILON.into(), statistics.into()];
    // SAFETY: the lengths fit the number of channels.
    unsafe { run(stream, &SOURCE, "norm_running_statistics", grid(stream, channels), &arguments) }
}

/// Overwrites `y` with `x` normalised by `statistics`, scaled by `gamma` and shifted by `beta` (both f32).
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn normalise(
    stream: &Stream,
    statistics: View<'_>,
    gamma: View<'_>,
    beta: View<'_>,
    x: View<'_>,
    y: View<'_>,
) -> Result<()> {
    let batch = Batch {
        sums: 0,
        statistics: statistics.address(),
        running_mean: 0,
        running_var: 0,
        epsilon: EPSILON,
        momentum: MOMENTUM,
    };
    run_normalise(stream, batch, statistics, gamma, beta, x, y)
}

fn run_normalise(
    stream: &Stream,
    batch: Batch,
    statistics: View<'_>,
    gamma: View<'_>,
    beta: View<'_>,
    x: View<'_>,
    y: View<'_>,
) -> Result<()> {
    let channels = gamma.len();
    let rows = Rows::new(channels, &[x, y], &[gamma, beta]);
    check("statistics", statistics, DType::F32, 2 * channels);
    check("a scale", gamma, DType::F32, channels);
    check("a shift", beta, DType::F32, channels);
    let arguments =
        [Arg::of(&rows.extents), Arg::of(&batch), gamma.into(), beta.into(), x.into(), y.into(), rows.wide()];
    let grid = rows.grid(blocks(stream) as usize);
    // SAFETY: the lengths fit the numbers of rows and channels.
    unsafe { run(stream, &SOURCE, &typed("norm_normalise", x), grid, &arguments) }
}

/// Overwrites `sums` with this rank's sums of `dy` and `dy·xhat` and the number of pixels, and `dgamma` and `dbeta`
/// (both f32) with the gradients of the parameters, which are these sums before they are summed over ranks.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
#[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
pub fn sum_gradients(
    stream: &Stream,
    statistics: View<'_>,
    x: View<'_>,
    dy: View<'_>,
    workspace: View<'_>,
    counters: View<'_>,
    sums: View<'_>,
    dgamma: View<'_>,
    dbeta: View<'_>,
) -> Result<()> {
    let channels = channels_of(sums);
    check("statistics", statistics, DType::F32, 2 * channels);
    check("the gradient of a scale", dgamma, DType::F32, channels);
    check("the gradient of a shift", dbeta, DType::F32, channels);
    let rows = Rows::new(channels, &[x, dy], &[]);
    let grid = rows.grid(max_blocks(workspace, channels));
    check_grid(counters, grid);
    let totals = Totals {
        workspace: workspace.address(),
        sums: sums.address(),
        dgamma: dgamma.address(),
        dbeta: dbeta.address(),
        counters: counters.address(),
    };
    let extents = Arg::of(&rows.extents);
    let arguments = [extents, statistics.into(), x.into(), dy.into(), Arg::of(&totals), rows.wide()];
    // SAFETY: the lengths fit the numbers of rows and channels; the workspace has 2 · channels elements for each
    // block.
    unsafe { run(stream, &SOURCE, &typed("norm_sum_gradients", x), grid, &arguments) }
}

/// Replaces the gradient of the output in place by that of the input, given [`sum_gradients`] summed over all ranks;
/// or, if that is the output of an activation, by that before the activation. `slope` is that of the activation for
/// negative values, 1 without one.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn backward_input(
    stream: &Stream,
    statistics: View<'_>,
    sums: View<'_>,
    gamma: View<'_>,
    x: View<'_>,
    gradient: View<'_>,
    slope: f32,
) -> Result<()> {
    let channels = channels_of(sums);
    check("statistics", statistics, DType::F32, 2 * channels);
    check("a scale", gamma, DType::F32, channels);
    let rows = Rows::new(channels, &[x, gradient], &[statistics, gamma]);
    let arguments = [
        Arg::of(&rows.extents),
        statistics.into(),
        sums.into(),
        gamma.into(),
        x.into(),
        Arg::updated(gradient),
        slope.into(),
        rows.wide(),
    ];
    let grid = rows.grid(blocks(stream) as usize);
    // SAFETY: the lengths fit the numbers of rows and channels.
    unsafe { run(stream, &SOURCE, &typed("norm_backward_input", x), grid, &arguments) }
}
