//! Direct convolutions of images with few channels and few filters on a GPU: the launches of `conv_direct.cu`.
//!
//! They need tensor cores for elements of 16 bits, and 2, 4, 6 or 8 channels, 8 or 16 filters, and kernels of 3×3 or 5×5,
//! as the second layer of LeNet-5 has. Other layers of so few channels are matrix products.

use super::ConvShape;
use super::cuda::are_aligned;
use super::partition::RowBands;
use crate::Precision;
use crate::cuda::elements::{count, run};
use crate::cuda::{Arg, Grid, Result, Source, Stream, View, kernel_source};
use crate::pool::PoolShape;

/// The kernels for few channels and filters.
pub static SOURCE: Source =
    kernel_source!("conv_direct": "tiles.cuh", "extents.cuh", "results.cuh", "direct.cuh");

/// How many blocks of a pass whose result has the size of a batch are on a multiprocessor at once.
const RESIDENT: usize = 4;

/// Whether there are kernels for a layer, if its images are not too wide.
pub(super) fn is_supported(shape: &ConvShape, precision: Precision) -> bool {
    precision.is_half()
        && matches!(shape.channels, 2 | 4 | 6 | 8)
        && matches!(shape.filters, 8 | 16)
        && matches!(shape.kernel, 3 | 5)
}

/// The bands of the forward pass, with or without pooling; `None` if there is no kernel for the layer.
pub(super) fn forward_bands(
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    pool: Option<&PoolShape>,
) -> Option<RowBands> {
    let (extents, high) = match pool {
        Some(pool) => ([pool.out_height(), pool.out_width()], 2),
        None => ([shape.out_height(), shape.out_width()], 1),
    };
    is_supported(shape, precision).then(|| RowBands::new(images, extents, high, shape.kernel))?
}

/// The bands of the gradient of the input.
pub(super) fn input_bands(shape: &ConvShape, images: usize, precision: Precision) -> Option<RowBands> {
    let extents = [shape.height, shape.width];
    is_supported(shape, precision).then(|| RowBands::new(images, extents, 1, shape.kernel))?
}

/// The bands of the gradients of weights and bias.
pub(super) fn weight_bands(shape: &ConvShape, images: usize, precision: Precision) -> Option<RowBands> {
    forward_bands(shape, images, precision, None)
}

/// Whether the kernels run on this GPU, on operands at these addresses.
pub(super) fn suits(stream: &Stream, precision: Precision, views: &[View<'_>]) -> bool {
    let tensor_cores = if precision == Precision::F16 { (7, 5) } else { (8, 0) };
    stream.device().architecture() >= tensor_cores && are_aligned(views)
}

/// Blocks of a pass whose result has the size of a batch.
pub(super) fn blocks(stream: &Stream, bands: RowBands) -> usize {
    (bands.count as usize).min(RESIDENT * stream.device().multiprocessors() as usize)
}

/// Runs the kernel of `pass` with this number of blocks.
///
/// # Safety
/// `arguments` are the kernel's for this shape, the last ones the bands.
pub(super) unsafe fn launch(
    stream: &Stream,
    pass: &str,
    shape: &ConvShape,
    precision: Precision,
    blocks: usize,
    arguments: &[Arg],
) -> Result<()> {
    let threads = if pass == "backward_weights" { 256 } else { 128 };
    let grid = Grid { blocks: [count(blocks), 1, 1], threads, shared: 0 };
    let name = format!("conv_direct_{pass}_{}_k{}", precision.storage(), shape.kernel);
    // SAFETY: the caller's promise.
    unsafe { run(stream, &SOURCE, &name, grid, arguments) }
}
