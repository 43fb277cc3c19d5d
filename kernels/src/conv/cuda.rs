//! Convolution on a GPU by this crate's own kernels.
//!
//! They are matrix products whose operands are gathered on the fly (`conv.cuh`, over the tiles of `tiles.cuh`);
//! images of one channel, whose products would be too thin, have kernels of their own (`conv_first.cu`), and so have few
//! channels with few filters in bf16 and f16 (`conv_direct.cu`). Every result is a function of the operands alone: the order of
//! all sums is fixed.
//!
//! On the device, images are NHWC (channels fastest) and weights are \[F, K, K, C\]. Activations, their gradients and
//! the weights are of the precision's [storage](Precision::storage) type; bias, the gradients of weights and bias,
//! and the workspace are f32. The kernels move 16 bytes at a time if channels and filters are multiples of 4 (f32) or
//! 8 (bf16, f16) and all addresses are multiples of 16; the forward pass needs that of the channels only. Inputs of 2, 4 or 6
//! channels in bf16 or f16 are read pixel by pixel, as if they had eight, and even numbers of a dense layer in words of two;
//! otherwise slower kernels move single elements.
//!
//! Passes with few results, such as those of dense layers and small batches, cut their sums into slices, and the last
//! block of a tile adds these up.
//!
//! GPUs without tensor cores for a type (compute capability below 8.0) use plain multiply-adds.
//!
//! All calls return at once, after enqueuing their kernels. They panic if lengths or types do not fit, or if a batch
//! has 2^31 pixels or more; their errors are those of compiling, loading and launching a kernel.

use super::ConvShape;
use super::direct;
use super::first::{self, Images, OutputGradient};
use super::partition::{self, Reciprocal, Slices, Tile, Units};
use super::workspace::DepthSums;
use crate::DType;
use crate::Precision;
use crate::cuda::counters::{ColumnSums, check_counters};
use crate::cuda::elements::{aligned, check, count, run};
use crate::cuda::{Arg, Grid, Result, Source, Stream, View, kernel_source};

pub use super::fused::{After, Before};
pub use super::partition::workspace_bytes;
pub use super::workspace::Workspace;

pub(super) use super::workspace::WeightSums;

/// The `slope` of [`forward`] that means no activation.
pub const LINEAR: f32 = 1.0;

/// The compute capability with tensor cores that four warps use together (`groups.cuh`).
const WARPGROUPS: (u32, u32) = (9, 0);

/// The matrix products, indexed by [`Precision`].
pub static PRODUCTS: [Source; 4] = [
    kernel_source!("conv_f32": "tiles.cuh", "extents.cuh", "results.cuh", "conv.cuh"),
    kernel_source!("conv_tf32": "tiles.cuh", "extents.cuh", "results.cuh", "conv.cuh"),
    kernel_source!("conv_bf16": "tiles.cuh", "groups.cuh", "extents.cuh", "results.cuh", "conv.cuh"),
    kernel_source!("conv_f16": "tiles.cuh", "groups.cuh", "extents.cuh", "results.cuh", "conv.cuh"),
];

/// Sums of rows.
pub static SUMS: Source = Source { name: "conv_sums", text: include_str!("conv_sums.cu") };

/// Flips weights for the transposed convolution.
pub static FLIP: Source = Source { name: "conv_flip", text: include_str!("conv_flip.cu") };

/// The source of the kernels for most operands of a layer.
pub(super) fn source(shape: &ConvShape, precision: Precision) -> &'static Source {
    let is_direct = direct::is_supported(shape, precision);
    if is_direct { &direct::SOURCE } else { &PRODUCTS[precision as usize] }
}

/// `struct ImageExtents` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub(super) struct ImageExtents {
    channels: u32,
    height: u32,
    width: u32,
    pixels: u32,
    by_channels: Reciprocal,
    by_width: Reciprocal,
    by_plane: Reciprocal,
}

impl ImageExtents {
    #[track_caller]
    pub(super) fn new(images: usize, channels: usize, height: usize, width: usize) -> Self {
        // Line indices of the last tile exceed the last pixel.
        let pixels = count(images * height * width + Tile::Large.side()) - Tile::Large.side() as u32;
        ImageExtents {
            channels: count(channels),
            height: count(height),
            width: count(width),
            pixels,
            by_channels: Reciprocal::of(channels),
            by_width: Reciprocal::of(width),
            by_plane: Reciprocal::of(height * width),
        }
    }
}

/// `struct Convolution` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Convolution {
    input: ImageExtents,
    output: ImageExtents,
    by_kernel: Reciprocal,
    kernel: u32,
    pad: u32,
    slice: u32,
    slope: f32,
}

impl Convolution {
    #[track_caller]
    fn new(shape: &ConvShape, images: usize, slice: usize, slope: f32) -> Self {
        // Offsets within the weights, and within a tile of any result, are 32-bit numbers.
        count(shape.weights_len() + Tile::Large.side() * shape.filter_len());
        assert!(
            shape.filters.max(shape.filter_len()) < 1 << 24,
            "{shape:?}: too many filters or weights of each"
        );
        Convolution {
            input: ImageExtents::new(images, shape.channels, shape.height, shape.width),
            output: ImageExtents::new(images, shape.filters, shape.out_height(), shape.out_width()),
            by_kernel: Reciprocal::of(shape.kernel),
            kernel: count(shape.kernel),
            pad: count(shape.pad()),
            slice: count(slice),
            slope,
        }
    }
}

/// Whether all addresses are multiples of 16.
pub(super) fn are_aligned(views: &[View<'_>]) -> bool {
    views.iter().all(|view| aligned(16 / view.dtype().size(), &[*view]))
}

/// How the kernels read these operands, if the extents permit `units`.
fn if_aligned(units: Units, views: &[View<'_>]) -> Units {
    if are_aligned(views) { units } else { Units::Elements }
}

/// Runs the matrix product of `pass`, with a block for every tile of `rows` by `columns` and every slice.
///
/// # Safety
/// `arguments` are the kernel's, for these extents.
unsafe fn run_product(
    stream: &Stream,
    pass: &str,
    precision: Precision,
    tile: Tile,
    (rows, columns, slices): (usize, usize, usize),
    arguments: &[Arg],
) -> Result<()> {
    let (source, operands) = match precision {
        Precision::F32 => (&PRODUCTS[0], "f32"),
        Precision::Tf32 => (&PRODUCTS[1], "tf32"),
        Precision::Bf16 => (&PRODUCTS[2], "bf16"),
        Precision::F16 => (&PRODUCTS[3], "f16"),
    };
    let ahead = precision != Precision::F32 && stream.device().architecture() >= (8, 0);
    let grid = Grid {
        blocks: [count(tile.count(rows, columns)), count(slices), 1],
        threads: tile.threads(ahead),
        shared: tile.shared(),
    };
    // SAFETY: the caller's promise.
    unsafe { run(stream, source, &format!("conv_{pass}_{operands}_{}", tile.name()), grid, arguments) }
}

/// The tile for a pass whose result has the size of a batch of images: `rows` of whole batches, whatever the size of this one.
fn tile(
    stream: &Stream,
    precision: Precision,
    units: Units,
    slices: &Slices,
    rows: usize,
    columns: usize,
) -> Tile {
    match units {
        Units::Whole => {
            let multiprocessors = stream.device().multiprocessors();
            by_group(stream, precision, partition::tile(slices, rows, columns, multiprocessors))
        }
        Units::Narrow => Tile::Narrow,
        Units::Even => Tile::Even,
        Units::Elements => Tile::Scalar,
    }
}

/// A large tile by a warpgroup, if the GPU has their tensor cores, for types of 16 bits.
fn by_group(stream: &Stream, precision: Precision, tile: Tile) -> Tile {
    let has_groups = precision.is_half() && stream.device().architecture() == WARPGROUPS;
    if has_groups && tile == Tile::Large { Tile::Group } else { tile }
}

/// Whether GPUs of this compute capability have a kernel of [`PRODUCTS`]: those of a warpgroup are for 9.0 alone, where they
/// replace large tiles in types of 16 bits.
pub fn exists(kernel: &str, architecture: (u32, u32)) -> bool {
    let is_half = kernel.contains("_bf16_") || kernel.contains("_f16_");
    match kernel.rsplit_once('_') {
        Some((_, "group")) => architecture == WARPGROUPS,
        Some((_, "large")) => !is_half || architecture != WARPGROUPS,
        _ => true,
    }
}

/// Overwrites `y` \[N, H', W', F\] with the convolution of `x` \[N, H, W, C\] with `weights` \[F, K, K, C\], plus
/// `bias` \[F\], activated: `v` for positive values, `slope · v` otherwise. A slope of 0 is ReLU, [`LINEAR`] no
/// activation.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn forward(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    x: View<'_>,
    weights: View<'_>,
    bias: View<'_>,
    slope: f32,
    y: View<'_>,
    workspace: &Workspace<'_>,
) -> Result<()> {
    let operands = [x, weights, bias, y];
    forward_fused(stream, shape, images, precision, operands, slope, &After::default(), workspace)
}

/// As [`forward`], with what follows the activation; the operands are those of `forward`, in the same order.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn forward_fused(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    operands: [View<'_>; 4],
    slope: f32,
    after: &After<'_>,
    workspace: &Workspace<'_>,
) -> Result<()> {
    shape.check();
    let dtype = precision.storage();
    let [x, weights, bias, y] = operands;
    if first::is_supported(shape, after.pool.map(|(pool, _)| pool)) {
        let (x, operands) = (Images::Stored(x), [weights, bias, y]);
        return first::forward(stream, shape, images, precision, &x, operands, slope, after);
    }
    let pixels = after.pixels(shape, images);
    check("a convolution's input", x, dtype, images * shape.input_len());
    check("a convolution's weights", weights, dtype, shape.weights_len());
    check("a convolution's bias", bias, DType::F32, shape.filters);
    check("a convolution's output", y, dtype, pixels * shape.filters);
    after.check(shape, y.len());
    if y.is_empty() {
        return Ok(());
    }
    let (pool, chosen) = after.pool.unzip();
    // With pooling, rows are the four pixels of each window.
    let rows = if pool.is_some() { 4 * pixels } else { pixels };
    count(rows + Tile::Large.side());
    let views: Vec<View<'_>> = [x, weights, y].into_iter().chain(chosen).collect();
    let chosen_bytes = chosen.map_or(0, |chosen| chosen.bytes());
    let after = Arg::of(&after.parameters(shape, images, pixels * shape.filters)).moving(chosen_bytes);
    let [x, weights, bias, y] = operands.map(Arg::from);
    let arguments = |slice, last| {
        [x, weights, bias, y, Arg::of(&Convolution::new(shape, images, slice, slope)), after, last]
    };
    if let Some(bands) = direct::forward_bands(shape, images, precision, pool)
        && direct::suits(stream, precision, &views)
    {
        let (blocks, arguments) = (direct::blocks(stream, bands), arguments(0, Arg::of(&bands)));
        // SAFETY: the views have the lengths that the extents say, and bands lie within the images.
        return unsafe { direct::launch(stream, "forward", shape, precision, blocks, &arguments) };
    }
    let units = match if_aligned(Units::of_forward(shape, precision), &views) {
        // Lines are samples, not the pixels of windows.
        Units::Even if pool.is_some() => Units::Elements,
        units => units,
    };
    let slices = partition::forward_slices(shape, workspace.batch, precision, units, pool.is_some());
    let whole = partition::pixels(shape, workspace.batch);
    let tile = tile(stream, precision, units, &slices, whole, shape.filters);
    let sums = DepthSums::argument(workspace, &slices, tile, rows, shape.filters);
    let grid = (rows, shape.filters, slices.count);
    // SAFETY: the views have the lengths that the extents say, and the workspace has the sums of every slice.
    unsafe { run_product(stream, "forward", precision, tile, grid, &arguments(slices.len, sums)) }
}

/// Overwrites `dx` \[N, H, W, C\] with the gradient of the input, for `dy` \[N, H', W', F\].
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn backward_input(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    weights: View<'_>,
    dy: View<'_>,
    dx: View<'_>,
    workspace: &Workspace<'_>,
) -> Result<()> {
    backward_input_fused(stream, shape, images, precision, [weights, dy, dx], &Before::NOTHING, workspace)
}

/// As [`backward_input`], but through what precedes the layer: `dx` becomes the gradient before that, of the extents
/// before pooling. The operands are those of `backward_input`, in the same order.
#[track_caller]
pub fn backward_input_fused(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    [weights, dy, dx]: [View<'_>; 3],
    before: &Before<'_>,
    workspace: &Workspace<'_>,
) -> Result<()> {
    shape.check();
    let (dtype, len) = (precision.storage(), images * shape.input_len());
    check("a convolution's weights", weights, dtype, shape.weights_len());
    check("the gradient of a convolution's output", dy, dtype, images * shape.output_len());
    if len == 0 {
        return Ok(());
    }
    let before_len = before.gradient_len(images, len);
    check("the gradient of a convolution's input", dx, dtype, before_len);
    count(before_len);
    let (rows, columns) = (images * shape.height * shape.width, shape.channels);
    let views: Vec<View<'_>> = [weights, dy, dx].into_iter().chain(before.views()).collect();
    let read = before.views().map(|view| view.bytes()).sum();
    let before = Arg::of(&before.parameters(images, dtype, len)).moving(read);
    let arguments = |slice, last| {
        let extents = Arg::of(&Convolution::new(shape, images, slice, LINEAR));
        [weights.into(), dy.into(), dx.into(), extents, before, last]
    };
    if let Some(bands) = direct::input_bands(shape, images, precision)
        && direct::suits(stream, precision, &views)
    {
        let (blocks, arguments) = (direct::blocks(stream, bands), arguments(0, Arg::of(&bands)));
        // SAFETY: as in `forward_fused`.
        return unsafe { direct::launch(stream, "backward_input", shape, precision, blocks, &arguments) };
    }
    let units = if_aligned(Units::of(shape, precision), &views);
    let slices = partition::input_slices(shape, workspace.batch, precision);
    let whole = workspace.batch * shape.height * shape.width;
    let tile = tile(stream, precision, units, &slices, whole, columns);
    let sums = DepthSums::argument(workspace, &slices, tile, rows, columns);
    let arguments = arguments(slices.len, sums);
    let grid = (rows, columns, slices.count);
    // SAFETY: the views have the lengths that the extents say, and the workspace has the sums of every slice.
    unsafe { run_product(stream, "backward_input", precision, tile, grid, &arguments) }
}

/// Whether the blocks of [`backward_input`] for a batch of `images` are enough for all multiprocessors of a GPU.
pub(super) fn backward_input_fills(
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    multiprocessors: u32,
) -> bool {
    if let Some(bands) = direct::input_bands(shape, images, precision) {
        return bands.count >= multiprocessors;
    }
    let (rows, columns) = (images * shape.height * shape.width, shape.channels);
    let slices = partition::input_slices(shape, images, precision);
    let tile = partition::tile(&slices, rows, columns, multiprocessors);
    tile.count(rows, columns) * slices.count >= multiprocessors as usize
}

/// Overwrites `flipped` \[C, K, K, F\] with the weights of the transposed convolution, with channels and filters
/// exchanged and kernels rotated by 180°: applied to `dy` with a padding of K − 1 − P, it computes the gradient of
/// the input.
#[track_caller]
pub fn flip_weights(
    stream: &Stream,
    shape: &ConvShape,
    precision: Precision,
    weights: View<'_>,
    flipped: View<'_>,
) -> Result<()> {
    let dtype = precision.storage();
    check("a convolution's weights", weights, dtype, shape.weights_len());
    check("a convolution's flipped weights", flipped, dtype, shape.weights_len());
    let (filters, channels) = (count(shape.filters), count(shape.channels));
    let taps = count(shape.kernel * shape.kernel);
    let tiles = filters.div_ceil(32) * channels.div_ceil(32);
    let grid = Grid { blocks: [tiles, taps, 1], threads: 256, shared: 0 };
    let arguments = [weights.into(), filters.into(), taps.into(), channels.into(), flipped.into()];
    // SAFETY: both views have the lengths that the extents say.
    unsafe { run(stream, &FLIP, &format!("conv_flip_{dtype}"), grid, &arguments) }
}

/// Overwrites `dw` \[F, K, K, C\] with the gradient of the weights and, if it is given, `db` \[F\] with that of the
/// bias, both f32, summed over all images. In TF32 the sums of the bias are those of rounded gradients.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn backward_weights(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    x: View<'_>,
    dy: View<'_>,
    workspace: &Workspace<'_>,
    dw: View<'_>,
    db: Option<View<'_>>,
) -> Result<()> {
    shape.check();
    if first::is_supported(shape, None) {
        let gradient = OutputGradient { dy, activated: None, pool: None };
        let x = Images::Stored(x);
        return first::backward(stream, shape, images, precision, &x, &gradient, workspace, dw, db);
    }
    let dtype = precision.storage();
    check("a convolution's input", x, dtype, images * shape.input_len());
    check("the gradient of a convolution's output", dy, dtype, images * shape.output_len());
    check("the gradient of a convolution's weights", dw, DType::F32, shape.weights_len());
    if let Some(db) = db {
        check("the gradient of a convolution's bias", db, DType::F32, shape.filters);
    }
    if images == 0 {
        stream.zero(dw)?;
        return db.map_or(Ok(()), |db| stream.zero(db));
    }
    // Whether the workspace is aligned decides too, since the sums of slices are written to it.
    let views = [x, dy, dw, workspace.sums];
    if let Some(bands) = direct::weight_bands(shape, images, precision)
        && direct::suits(stream, precision, &views)
        && db.is_none_or(|db| are_aligned(&[db]))
    {
        let (slices, rows) = (bands.slices().count, shape.filters);
        let sums = WeightSums::new(workspace, slices, 1, dw, db, rows).argument(slices, dw, rows);
        let extents = Arg::of(&Convolution::new(shape, images, 0, LINEAR));
        let arguments = [x.into(), dy.into(), extents, sums, Arg::of(&bands)];
        // SAFETY: as in `forward_fused`; the workspace has the sums of every block.
        return unsafe { direct::launch(stream, "backward_weights", shape, precision, slices, &arguments) };
    }
    let units = if_aligned(Units::of(shape, precision), &views);
    let (tile, slices) = partition::partition_weights(shape, images, precision, units);
    let tile = by_group(stream, precision, tile);
    let (rows, columns) = (shape.filters, units.weight_columns(shape));
    let sums = WeightSums::new(workspace, slices.count, tile.count(rows, columns), dw, db, rows);
    let extents = Convolution::new(shape, images, slices.len, LINEAR);
    let sums = sums.argument(slices.count, dw, rows);
    let arguments = [x.into(), dy.into(), Arg::of(&extents), sums];
    let grid = (rows, columns, slices.count);
    // SAFETY: the views have the lengths that the extents say, and the workspace has the sums of every slice.
    unsafe { run_product(stream, "backward_weights", precision, tile, grid, &arguments) }
}

/// Overwrites `db` \[F\], in f32, with the gradient of the bias, summed over all images and positions.
#[track_caller]
pub fn backward_bias(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    dy: View<'_>,
    workspace: &Workspace<'_>,
    db: View<'_>,
) -> Result<()> {
    shape.check();
    check("the gradient of a convolution's output", dy, precision.storage(), images * shape.output_len());
    check("the gradient of a convolution's bias", db, DType::F32, shape.filters);
    if images == 0 {
        return stream.zero(db);
    }
    let slices = partition::bias_slices(shape, images);
    bias_sums(stream, shape.filters, &slices, None, dy, Some(workspace), db)
}

/// Replaces `dy`, the gradient of the activated output `y`, in place by that of the output before its activation, and
/// overwrites `db` \[F\], in f32, with the gradient of the bias: both in one pass over memory. The slope is that of
/// [`forward`].
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn backward_activation(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    slope: f32,
    y: View<'_>,
    dy: View<'_>,
    workspace: &Workspace<'_>,
    db: View<'_>,
) -> Result<()> {
    shape.check();
    let (dtype, len) = (precision.storage(), images * shape.output_len());
    check("a convolution's output", y, dtype, len);
    check("the gradient of a convolution's output", dy, dtype, len);
    check("the gradient of a convolution's bias", db, DType::F32, shape.filters);
    if images == 0 {
        return stream.zero(db);
    }
    let slices = partition::bias_slices(shape, images);
    bias_sums(stream, shape.filters, &slices, Some((y, slope)), dy, Some(workspace), db)
}

/// `struct BiasSums` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct BiasSums {
    rows: u32,
    columns: u32,
    slice: u32,
    slope: f32,
    to: ColumnSums,
}

/// The sums of the columns of `dy`. Given `activated`, the output and the slope, `dy` is first replaced by the gradient
/// before the activation. A single slice needs no workspace.
fn bias_sums(
    stream: &Stream,
    columns: usize,
    slices: &Slices,
    activated: Option<(View<'_>, f32)>,
    dy: View<'_>,
    workspace: Option<&Workspace<'_>>,
    total: View<'_>,
) -> Result<()> {
    let (y, slope) = activated.unzip();
    let pack = 16 / dy.dtype().size();
    let wide = columns.is_multiple_of(pack) && aligned(pack, &[dy, y.unwrap_or(dy)]);
    let threads = 256;
    let packs = if wide { columns / pack } else { columns };
    let across = packs.div_ceil(threads);
    if let Some(workspace) = workspace {
        check_counters(workspace.counters, across, slices.count);
    }
    let sums = BiasSums {
        rows: count(dy.len() / columns),
        columns: count(columns),
        slice: count(slices.len),
        slope: slope.unwrap_or(LINEAR),
        to: ColumnSums {
            slices: workspace.map_or(0, |workspace| workspace.rows(slices.count, columns)),
            total: total.address(),
            counters: workspace.map_or(0, |workspace| workspace.counters.address()),
        },
    };
    let name = format!("conv_bias_{}", dy.dtype());
    let moved = slices.count * columns * size_of::<f32>();
    let dy = if y.is_some() { Arg::updated(dy) } else { dy.into() };
    let arguments = [y.into(), dy, Arg::of(&sums).moving(moved), u32::from(wide).into()];
    let grid = Grid { blocks: [count(across), count(slices.count), 1], threads: threads as u32, shared: 0 };
    // SAFETY: both matrices have this number of rows and columns, and the workspace has a row for every slice.
    unsafe { run(stream, &SUMS, &name, grid, &arguments) }
}

/// Overwrites `total` (f32) with the sum of `parts`, each as long as `total`.
#[track_caller]
pub(super) fn sum_parts(stream: &Stream, parts: View<'_>, total: View<'_>) -> Result<()> {
    check("a sum of gradients", total, DType::F32, total.len());
    let slices = Slices { count: 1, len: parts.len() / total.len() };
    check("gradients", parts, parts.dtype(), slices.len * total.len());
    bias_sums(stream, total.len(), &slices, None, parts, None, total)
}
