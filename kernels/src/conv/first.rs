//! Convolutions of images with one channel on a GPU: the launches of `conv_first.cu`.
//!
//! The backward pass takes the gradient of the layer's output as it is, pooled and after the activation, and computes
//! the gradients of weights and bias from it in one launch.

use bytemuck::Zeroable;

use crate::cuda::elements::{check, count, run};
use crate::cuda::{Arg, Grid, Result, Source, Stream, View, kernel_source};
use crate::dropout::cuda::Parameters;
use crate::gather::cuda::{Batch, Parameters as Gathered};
use crate::pool::PoolShape;
use crate::{DType, Precision};

use super::ConvShape;
use super::cuda::{LINEAR, WeightSums, Workspace};
use super::fused::After;
use super::partition::{Bands, FEW_FILTERS, first_slices};

/// The kernels for images of one channel.
pub static SOURCE: Source =
    kernel_source!("conv_first": "../gather/gather.cuh", "first.cuh", "first_tensors.cuh");

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
    pooled_height: u32,
    pooled_width: u32,
}

impl OneChannel {
    #[track_caller]
    fn new(shape: &ConvShape, images: usize, bands: &Bands, slope: f32, pool: Option<&PoolShape>) -> Self {
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
            pooled_height: pool.map_or(0, |pool| count(pool.out_height())),
            pooled_width: pool.map_or(0, |pool| count(pool.out_width())),
        }
    }
}

/// The images that a first layer reads.
#[derive(Debug, Clone, Copy)]
pub enum Images<'a> {
    /// In memory, in the layer's precision.
    Stored(View<'a>),
    /// Those of a batch, read from its data set as bytes. The forward pass writes the labels of the batch, too: to the
    /// view, whose type is u8.
    Gathered(Batch<'a>, View<'a>),
}

impl Images<'_> {
    /// The arguments `x` and `batch` of the kernels for `images` images, and the address of `labels`.
    ///
    /// # Panics
    /// If lengths or types do not fit.
    #[track_caller]
    fn arguments(&self, shape: &ConvShape, images: usize, precision: Precision) -> [Arg; 3] {
        let null = || Arg::from(None);
        match *self {
            Images::Stored(x) => {
                check("a convolution's input", x, precision.storage(), images * shape.input_len());
                [x.into(), Arg::of(&Gathered::zeroed()), null()]
            }
            Images::Gathered(batch, labels) => {
                let found = (batch.len(), batch.sample_len());
                assert_eq!(found, (images, shape.input_len()), "images of a batch, and their pixels");
                [null(), Arg::of(&batch.parameters(labels)).moving(batch.bytes()), labels.into()]
            }
        }
    }
}

/// `struct FirstDropout` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Dropped {
    state: u64,
    mask: Parameters,
}

/// The bands of a layer with or without pooling; `None` if there are no such kernels for it.
pub(super) fn bands(shape: &ConvShape, images: usize, pool: Option<&PoolShape>) -> Option<Bands> {
    Bands::new(shape, images, pool.map(PoolShape::out_height))
}

/// The filters of a block, and what kernels for so many are called.
fn filters_of_block(shape: &ConvShape, precision: Precision) -> (usize, &'static str) {
    match shape.filters {
        0..=FEW_FILTERS => (FEW_FILTERS, "few"),
        33.. if precision.storage() == DType::F32 => (64, "x2"),
        _ => (32, "x1"),
    }
}

/// How many blocks at most share the bands, if all filters have `blocks` blocks. In f32 each group of filters has as many;
/// kernels for tensor cores take longer to begin and to end.
fn sharing(blocks: usize, shape: &ConvShape, precision: Precision) -> usize {
    let groups = shape.filters.div_ceil(filters_of_block(shape, precision).0);
    if precision.storage() == DType::F32 { blocks } else { (blocks / groups).max(1) }
}

/// The kernel of `pass`, and its grid for all filters if `blocks` blocks share the bands.
fn kernel(
    pass: &str,
    pool: Option<&PoolShape>,
    shape: &ConvShape,
    precision: Precision,
    blocks: usize,
) -> (String, Grid) {
    let (of_block, filters) = filters_of_block(shape, precision);
    let pooled = if pool.is_some() { "_pooled" } else { "" };
    let name = format!("conv_first_{pass}{pooled}_{}_k{}_{filters}", precision.storage(), shape.kernel);
    let groups = count(shape.filters.div_ceil(of_block));
    (name, Grid { blocks: [count(blocks), groups, 1], threads: 256, shared: 0 })
}

/// Overwrites `y` \[N, H', W', F\] with the layer's output, after its activation and what follows that.
///
/// # Errors
/// As all [kernels](super::cuda).
///
/// # Panics
/// As all kernels, and if the layer is [not supported](is_supported).
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn forward(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    from: &Images<'_>,
    [weights, bias, y]: [View<'_>; 3],
    slope: f32,
    after: &After<'_>,
) -> Result<()> {
    shape.check();
    let dtype = precision.storage();
    let [x, batch, labels] = from.arguments(shape, images, precision);
    check("a convolution's weights", weights, dtype, shape.weights_len());
    check("a convolution's bias", bias, DType::F32, shape.filters);
    check("a convolution's output", y, dtype, after.pixels(shape, images) * shape.filters);
    after.check(shape, y.len());
    if y.is_empty() {
        return Ok(());
    }
    let multiprocessors = stream.device().multiprocessors() as usize;
    let resident = if precision.storage() == DType::F32 || shape.filters <= FEW_FILTERS { 4 } else { 2 };
    let (pool, chosen) = after.pool.unzip();
    let bands = bands(shape, images, pool).expect("a layer with one channel");
    let blocks = bands.count.min(sharing(resident * multiprocessors, shape, precision));
    let (name, grid) = kernel("forward", pool, shape, precision, blocks);
    let dropped = Dropped {
        state: after.dropout.map_or(0, |dropout| dropout.state.address()),
        mask: after.dropout.map_or_else(Parameters::default, |dropout| dropout.parameters(y.len())),
    };
    let extents = OneChannel::new(shape, images, &bands, slope, pool);
    let arguments = [
        x,
        batch,
        labels,
        weights.into(),
        bias.into(),
        y.into(),
        chosen.into(),
        Arg::of(&extents),
        Arg::of(&dropped),
    ];
    // SAFETY: the views have the lengths that the extents say, and bands lie within the images.
    unsafe { run(stream, &SOURCE, &name, grid, &arguments) }
}

/// The gradient of a layer's output.
#[derive(Debug, Clone, Copy)]
pub struct OutputGradient<'a> {
    /// That of the pooled output, if there is pooling.
    pub dy: View<'a>,
    /// The output, and the slope of the activation for negative values; `None` if `dy` is that before the activation.
    pub activated: Option<(View<'a>, f32)>,
    /// The pooling layer, and the positions that it has chosen.
    pub pool: Option<(&'a PoolShape, View<'a>)>,
}

/// True if the passes here compute a layer with such a pooling layer after it.
pub fn is_supported(shape: &ConvShape, pool: Option<&PoolShape>) -> bool {
    bands(shape, 1, pool).is_some()
}

/// Overwrites `dw` \[F, K, K\] and `db` \[F\], both f32, with the gradients of weights and bias, summed over all
/// images, in one launch. The workspace is that of [`super::cuda::backward_weights`].
///
/// # Errors
/// As all [kernels](super::cuda).
///
/// # Panics
/// As all kernels, and if the layer is [not supported](is_supported).
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn backward(
    stream: &Stream,
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    from: &Images<'_>,
    gradient: &OutputGradient<'_>,
    workspace: &Workspace<'_>,
    dw: View<'_>,
    db: Option<View<'_>>,
) -> Result<()> {
    shape.check();
    let dtype = precision.storage();
    let &OutputGradient { dy, activated, pool } = gradient;
    let after = After { pool, dropout: None };
    let len = after.pixels(shape, images) * shape.filters;
    after.check(shape, len);
    let [x, batch, _] = from.arguments(shape, images, precision);
    check("the gradient of a convolution's output", dy, dtype, len);
    check("the gradient of a convolution's weights", dw, DType::F32, shape.weights_len());
    if let Some(db) = db {
        check("the gradient of a convolution's bias", db, DType::F32, shape.filters);
    }
    if let Some((y, _)) = activated {
        check("a convolution's output", y, dtype, len);
    }
    if images == 0 {
        stream.zero(dw)?;
        return db.map_or(Ok(()), |db| stream.zero(db));
    }
    let (pool, chosen) = pool.unzip();
    let bands = bands(shape, images, pool).expect("a layer with one channel");
    let slices = bands.count.clamp(1, sharing(first_slices(shape, precision), shape, precision));
    let (name, grid) = kernel("backward", pool, shape, precision, slices);
    let sums = WeightSums::new(workspace, slices, grid.blocks[1] as usize, dw, db, shape.filters);
    let slope = activated.map_or(LINEAR, |(_, slope)| slope);
    let extents = OneChannel::new(shape, images, &bands, slope, pool);
    let y = activated.map(|(y, _)| y);
    let sums = sums.argument(slices, dw, shape.filters);
    let arguments = [x, batch, y.into(), dy.into(), chosen.into(), sums, Arg::of(&extents)];
    // SAFETY: the views have the lengths that the extents say, and the workspace has the sums of every block.
    unsafe { run(stream, &SOURCE, &name, grid, &arguments) }
}
