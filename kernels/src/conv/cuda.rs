//! Convolution on a GPU by this crate's own kernels.
//!
//! They are matrix products whose operands are gathered on the fly (`conv.cuh`, over the tiles of `tiles.cuh`);
//! images of one channel, whose products would be too thin, have kernels of their own (`conv_first.cu`). Every result
//! is a function of the operands alone: the order of all sums is fixed.
//!
//! On the device, images are NHWC (channels fastest) and weights are \[F, K, K, C\]. Activations, their gradients and
//! the weights are of the precision's [storage](Precision::storage) type; bias, the gradients of weights and bias,
//! and the workspace are f32. The kernels move 16 bytes at a time if channels and filters are multiples of 4 (f32) or
//! 8 (bf16) and all addresses are multiples of 16; otherwise slower kernels move single elements.
//!
//! GPUs without tensor cores for a type (compute capability below 8.0) use plain multiply-adds.
//!
//! All calls return at once, after enqueuing their kernels. They panic if lengths or types do not fit, or if a batch
//! has 2^31 pixels or more; their errors are those of compiling, loading and launching a kernel.

use super::ConvShape;
use super::partition::{self, Bands, Reciprocal, Slices, Tile};
use crate::DType;
use crate::Precision;
use crate::cuda::elements::{aligned, check, count, run};
use crate::cuda::{Arg, Grid, Result, Source, Stream, View};

pub use super::partition::workspace_bytes;

/// The `slope` of [`forward`] that means no activation.
pub const LINEAR: f32 = 1.0;

macro_rules! product_source {
    ($name:literal) => {
        Source {
            name: $name,
            text: concat!(
                "#line 1 \"tiles.cuh\"\n",
                include_str!("tiles.cuh"),
                "#line 1 \"conv.cuh\"\n",
                include_str!("conv.cuh"),
                concat!("#line 1 \"", $name, ".cu\"\n"),
                include_str!(concat!($name, ".cu"))
            ),
        }
    };
}

/// The matrix products, indexed by [`Precision`].
pub static PRODUCTS: [Source; 3] =
    [product_source!("conv_f32"), product_source!("conv_tf32"), product_source!("conv_bf16")];

/// The kernels for images of one channel.
pub static FIRST: Source = Source { name: "conv_first", text: include_str!("conv_first.cu") };

/// Sums of rows.
pub static SUMS: Source = Source { name: "conv_sums", text: include_str!("conv_sums.cu") };

/// Flips weights for the transposed convolution.
pub static FLIP: Source = Source { name: "conv_flip", text: include_str!("conv_flip.cu") };

/// `struct ImageExtents` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct ImageExtents {
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
    fn new(images: usize, channels: usize, height: usize, width: usize) -> Self {
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

/// `struct OneChannel` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct OneChannel {
    images: u32,
    height: u32,
    width: u32,
    filters: u32,
    out_height: u32,
    out_width: u32,
    pad: u32,
    rows: u32,
    bands: u32,
    slope: f32,
}

impl OneChannel {
    #[track_caller]
    fn new(shape: &ConvShape, images: usize, bands: &Bands, slope: f32) -> Self {
        count(images * shape.height * shape.width);
        OneChannel {
            images: count(images),
            height: count(shape.height),
            width: count(shape.width),
            filters: count(shape.filters),
            out_height: count(shape.out_height()),
            out_width: count(shape.out_width()),
            pad: count(shape.pad()),
            rows: count(bands.rows),
            bands: count(bands.count),
            slope,
        }
    }
}

/// The kernel of `pass` for images of one channel, and its grid for all filters if `blocks` blocks share the bands.
fn first_kernel(pass: &str, shape: &ConvShape, precision: Precision, blocks: usize) -> (String, Grid) {
    let (filters, of_block) = match shape.filters {
        0..=8 => ("few", 8),
        9..=32 => ("x1", 32),
        _ => ("x2", 64),
    };
    let name = format!("conv_first_{pass}_{}_k{}_{filters}", precision.storage(), shape.kernel);
    let groups = count(shape.filters.div_ceil(of_block));
    (name, Grid { blocks: [count(blocks), groups, 1], threads: 256, shared: 0 })
}

/// True if the kernels that move 16 bytes at a time may be used.
fn vectors(shape: &ConvShape, precision: Precision, views: &[View<'_>]) -> bool {
    let pack = 16 / precision.storage().size();
    shape.channels.is_multiple_of(pack)
        && shape.filters.is_multiple_of(pack)
        && views.iter().all(|view| aligned(16 / view.dtype().size(), &[*view]))
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
    let source = match precision {
        Precision::F32 => &PRODUCTS[0],
        Precision::Tf32 => &PRODUCTS[1],
        Precision::Bf16 => &PRODUCTS[2],
    };
    let grid = Grid {
        blocks: [count(tile.count(rows, columns)), count(slices), 1],
        threads: tile.threads(),
        shared: 0,
    };
    // SAFETY: the caller's promise.
    unsafe { run(stream, source, &format!("conv_{pass}_{precision}_{}", tile.name()), grid, arguments) }
}

/// The tile for a pass whose result has the size of a batch of images.
fn tile(
    stream: &Stream,
    shape: &ConvShape,
    precision: Precision,
    views: &[View<'_>],
    rows: usize,
    columns: usize,
) -> Tile {
    if vectors(shape, precision, views) {
        Tile::choose(rows, columns, stream.device().multiprocessors())
    } else {
        Tile::Scalar
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
) -> Result<()> {
    shape.check();
    let dtype = precision.storage();
    check("a convolution's input", x, dtype, images * shape.input_len());
    check("a convolution's weights", weights, dtype, shape.weights_len());
    check("a convolution's bias", bias, DType::F32, shape.filters);
    check("a convolution's output", y, dtype, images * shape.output_len());
    if y.is_empty() {
        return Ok(());
    }
    let operands = [x.into(), weights.into(), bias.into(), y.into()];
    if let Some(bands) = Bands::new(shape, images) {
        let blocks = bands.count.min(4 * stream.device().multiprocessors() as usize);
        let (name, grid) = first_kernel("forward", shape, precision, blocks);
        let [x, weights, bias, y] = operands;
        let arguments = [x, weights, bias, y, Arg::of(&OneChannel::new(shape, images, &bands, slope))];
        // SAFETY: the views have the lengths that the extents say, and bands lie within the images.
        return unsafe { run(stream, &FIRST, &name, grid, &arguments) };
    }
    let (rows, columns) = (partition::pixels(shape, images), shape.filters);
    let tile = tile(stream, shape, precision, &[x, weights, y], rows, columns);
    let [x, weights, bias, y] = operands;
    let arguments = [x, weights, bias, y, Arg::of(&Convolution::new(shape, images, 0, slope))];
    // SAFETY: the views have the lengths that the extents say.
    unsafe { run_product(stream, "forward", precision, tile, (rows, columns, 1), &arguments) }
}

/// Overwrites `dx` \[N, H, W, C\] with the gradient of the input, for `dy` \[N, H', W', F\].
#[track_caller]
pub fn backward_input(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    weights: View<'_>,
    dy: View<'_>,
    dx: View<'_>,
) -> Result<()> {
    shape.check();
    let dtype = precision.storage();
    check("a convolution's weights", weights, dtype, shape.weights_len());
    check("the gradient of a convolution's output", dy, dtype, images * shape.output_len());
    check("the gradient of a convolution's input", dx, dtype, images * shape.input_len());
    if dx.is_empty() {
        return Ok(());
    }
    let (rows, columns) = (images * shape.height * shape.width, shape.channels);
    let tile = tile(stream, shape, precision, &[weights, dy, dx], rows, columns);
    let extents = Convolution::new(shape, images, 0, LINEAR);
    let arguments = [weights.into(), dy.into(), dx.into(), Arg::of(&extents)];
    // SAFETY: the views have the lengths that the extents say.
    unsafe { run_product(stream, "backward_input", precision, tile, (rows, columns, 1), &arguments) }
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

/// Overwrites `dw` \[F, K, K, C\], in f32, with the gradient of the weights, summed over all images. The workspace is
/// f32 and has at least [`workspace_bytes`]; its contents do not matter.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn backward_weights(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    x: View<'_>,
    dy: View<'_>,
    workspace: View<'_>,
    dw: View<'_>,
) -> Result<()> {
    shape.check();
    let dtype = precision.storage();
    check("a convolution's input", x, dtype, images * shape.input_len());
    check("the gradient of a convolution's output", dy, dtype, images * shape.output_len());
    check("the gradient of a convolution's weights", dw, DType::F32, shape.weights_len());
    if images == 0 {
        return stream.zero(dw);
    }
    if let Some(bands) = Bands::new(shape, images) {
        let slices = bands.slices();
        let sums = slice_sums(&slices, workspace, dw);
        let (name, grid) = first_kernel("backward_weights", shape, precision, slices.count);
        let extents = OneChannel::new(shape, images, &bands, LINEAR);
        let arguments = [x.into(), dy.into(), sums.into(), Arg::of(&extents)];
        // SAFETY: the views have the lengths that the extents say, and `sums` has a gradient for every block.
        unsafe { run(stream, &FIRST, &name, grid, &arguments) }?;
        return add_slices(stream, &slices, sums, dw);
    }
    // Whether the workspace is aligned decides too, since the sums of slices are written to it.
    let (tile, slices) = partition::partition_weights(
        shape,
        images,
        precision,
        vectors(shape, precision, &[x, dy, dw, workspace]),
    );
    let sums = slice_sums(&slices, workspace, dw);
    let extents = Convolution::new(shape, images, slices.len, LINEAR);
    let arguments = [x.into(), dy.into(), sums.into(), Arg::of(&extents)];
    let grid = (shape.filters, shape.filter_len(), slices.count);
    // SAFETY: the views have the lengths that the extents say, and `sums` has a gradient for every slice.
    unsafe { run_product(stream, "backward_weights", precision, tile, grid, &arguments) }?;
    add_slices(stream, &slices, sums, dw)
}

/// Overwrites `db` \[F\], in f32, with the gradient of the bias, summed over all images and positions. The workspace
/// is as for [`backward_weights`], and both may share one on the same stream.
#[track_caller]
pub fn backward_bias(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    dy: View<'_>,
    workspace: View<'_>,
    db: View<'_>,
) -> Result<()> {
    shape.check();
    check("the gradient of a convolution's output", dy, precision.storage(), images * shape.output_len());
    check("the gradient of a convolution's bias", db, DType::F32, shape.filters);
    if images == 0 {
        return stream.zero(db);
    }
    bias_sums(stream, shape, images, None, dy, workspace, db)
}

/// Replaces `dy`, the gradient of the activated output `y`, in place by that of the output before its activation, and
/// overwrites `db` \[F\], in f32, with the gradient of the bias: both in one pass over memory. Slope and workspace
/// are as for [`forward`] and [`backward_bias`].
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
    workspace: View<'_>,
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
    bias_sums(stream, shape, images, Some((y, slope)), dy, workspace, db)
}

/// The gradient of the bias. Given `activated`, the output and the slope, `dy` is first replaced by the gradient
/// before the activation.
fn bias_sums(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    activated: Option<(View<'_>, f32)>,
    dy: View<'_>,
    workspace: View<'_>,
    db: View<'_>,
) -> Result<()> {
    let slices = partition::bias_slices(shape, images);
    let sums = slice_sums(&slices, workspace, db);
    bias_slices(stream, shape.filters, &slices, activated, dy, sums)?;
    add_slices(stream, &slices, sums, db)
}

/// The sums over the rows of each slice of `dy`.
fn bias_slices(
    stream: &Stream,
    columns: usize,
    slices: &Slices,
    activated: Option<(View<'_>, f32)>,
    dy: View<'_>,
    sums: View<'_>,
) -> Result<()> {
    let (y, slope) = activated.unzip();
    let pack = 16 / dy.dtype().size();
    let wide = columns.is_multiple_of(pack) && aligned(pack, &[dy, y.unwrap_or(dy)]);
    let threads = 256;
    let packs = if wide { columns / pack } else { columns };
    let blocks = [count(packs.div_ceil(threads)), count(slices.count), 1];
    let arguments = [
        y.map_or(Arg::of(&0u64), Arg::from),
        dy.into(),
        count(dy.len() / columns).into(),
        count(columns).into(),
        count(slices.len).into(),
        slope.unwrap_or(LINEAR).into(),
        sums.into(),
        u32::from(wide).into(),
    ];
    let grid = Grid { blocks, threads: threads as u32, shared: 0 };
    // SAFETY: both matrices have this number of rows and columns, and `sums` has a row for every slice.
    unsafe { run(stream, &SUMS, &format!("conv_bias_{}", dy.dtype()), grid, &arguments) }
}

/// Overwrites `total` (f32) with the sum of `parts`, each as long as `total`.
#[track_caller]
pub(super) fn sum_parts(stream: &Stream, parts: View<'_>, total: View<'_>) -> Result<()> {
    check("a sum of gradients", total, DType::F32, total.len());
    let slices = Slices { count: 1, len: parts.len() / total.len() };
    check("gradients", parts, parts.dtype(), slices.len * total.len());
    bias_slices(stream, total.len(), &slices, None, parts, total)
}

/// Where the slices' sums are written: to the workspace, or directly to `total` if there is only one slice.
#[track_caller]
fn slice_sums<'a>(slices: &Slices, workspace: View<'a>, total: View<'a>) -> View<'a> {
    if slices.count == 1 {
        return total;
    }
    assert_eq!(workspace.dtype(), DType::F32, "element type of a convolution's workspace");
    let wanted = slices.count * total.len();
    assert!(
        workspace.len() >= wanted,
        "a workspace of {} elements, but {wanted} are needed",
        workspace.len()
    );
    workspace.slice(0..wanted)
}

/// Adds up the slices' sums, unless the only one was written to `total`.
fn add_slices(stream: &Stream, slices: &Slices, sums: View<'_>, total: View<'_>) -> Result<()> {
    if slices.count == 1 {
        return Ok(());
    }
    let (rows, columns) = (count(slices.count), count(total.len()));
    let grid = Grid { blocks: [columns.div_ceil(32), 1, 1], threads: 256, shared: 0 };
    let arguments = [sums.into(), rows.into(), columns.into(), rows.into(), total.into()];
    // SAFETY: `sums` has this number of rows, each as long as `total`.
    unsafe { run(stream, &SUMS, "conv_sum_f32", grid, &arguments) }
}
