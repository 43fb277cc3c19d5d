//! How the work of a convolution is divided among the blocks of a GPU: pure functions of its extents.
//!
//! The division of sums is a function of the extents alone, not of the GPU: the same batch gives the same bits on any GPU
//! whose products round alike. Only the tile of the passes whose result has the size of a batch depends on the number of
//! multiprocessors. It does not affect the order of their sums; but tensor cores of a warpgroup ([`Tile::Group`]) round
//! otherwise than those of a warp, so it is the same for all batches of a layer.
//!
//! **Slices of the depth.** A dense layer has few results: 1,024 images and 10 outputs are 16 tiles, for 132
//! multiprocessors. A block that is alone on its multiprocessor waits for memory in every step, about 0.3 µs on an H100,
//! so the 150 steps of 4,800 inputs in bf16 would take 45 µs. So the depth of the forward pass and of the gradient of the
//! input is cut into slices until there are about two blocks for each multiprocessor ([`BLOCKS`]). A slice has at least
//! [`STEPS_OF_SLICE`] steps, in which its start and its partial sums are paid off: a tile's sums are as many bytes as two
//! steps read. There are at most [`SLICES_OF_DEPTH`] of them, since one block adds them up; it reads a slice in about the
//! time of a step, so the sum of both times is least if there are about as many slices as steps in each, and 16 slices
//! suffice for 256 steps. All this is for a number of images that is fixed when a layer is set up: the bits of an image
//! do not depend on how many others are in its batch.

use super::{ConvShape, direct};
use crate::Precision;

/// Target number of blocks: two per multiprocessor of the largest supported GPUs (H100: 132).
pub(super) const BLOCKS: usize = 264;

/// Minimum number of depth steps in a slice that amortises the start of the loop.
const STEPS_OF_SLICE: usize = 8;

/// Maximum number of slices of the depth, which one block adds up.
const SLICES_OF_DEPTH: usize = 16;

/// Replaces the kernels' divisions by multiplications: `struct Reciprocal` of `conv.cuh`, which has the formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::NoUninit)]
#[repr(C)]
pub(super) struct Reciprocal {
    magic: u32,
    shift: u32,
}

impl Reciprocal {
    pub(super) fn of(divisor: usize) -> Self {
        let divisor = u64::try_from(divisor).expect("64 bits");
        assert!(
            (1..1 << 31).contains(&divisor),
            "kernels divide by numbers from 1 to 2^31 - 1, not by {divisor}"
        );
        let shift = divisor.next_power_of_two().trailing_zeros();
        Reciprocal { magic: (1u64 << (31 + shift)).div_ceil(divisor) as u32, shift }
    }
}

/// The tile of a matrix product that one block computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tile {
    /// 128 × 128 results by the four warps of a warpgroup.
    Group,
    /// 128 × 128 results by 256 threads, or by 128 whose operands are copied ahead.
    Large,
    /// 64 × 64 results by 128 threads.
    Small,
    /// As `Small`, for inputs with fewer channels than 16 bytes hold.
    Narrow,
    /// As `Small`, for dense layers whose last 16 bytes of a row are not whole.
    Even,
    /// As `Small`, but moves single elements: for any extents and addresses.
    Scalar,
}

/// How the kernels read the operands of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Units {
    /// 16 bytes at a time.
    Whole,
    /// The channels of the input are less than 16 bytes, and are read together.
    Narrow,
    /// Up to 16 bytes of a dense layer's row, in words of two elements.
    Even,
    /// Single elements.
    Elements,
}

impl Units {
    /// What the channels and filters of `shape` permit, if all addresses are multiples of 16.
    pub(super) fn of(shape: &ConvShape, precision: Precision) -> Self {
        let unit = 16 / precision.storage().size();
        match Self::of_forward(shape, precision) {
            units if shape.filters.is_multiple_of(unit) => units,
            Units::Whole | Units::Even if may_be_even(shape, unit) && shape.filters.is_multiple_of(2) => {
                Units::Even
            }
            _ => Units::Elements,
        }
    }

    /// As [`of`](Self::of), for the forward pass: it does not read along the filters.
    pub(super) fn of_forward(shape: &ConvShape, precision: Precision) -> Self {
        let unit = 16 / precision.storage().size();
        match shape.channels {
            channels if channels.is_multiple_of(unit) => Units::Whole,
            channels if may_be_even(shape, unit) && channels.is_multiple_of(2) => Units::Even,
            2 | 4 | 6 if unit == 8 => Units::Narrow,
            _ => Units::Elements,
        }
    }

    /// Columns of the product that computes the gradient of the weights, and depth of the forward pass: with narrow units,
    /// each tap has eight channels.
    pub(super) fn weight_columns(self, shape: &ConvShape) -> usize {
        match self {
            Units::Narrow => 8 * shape.kernel * shape.kernel,
            Units::Whole | Units::Even | Units::Elements => shape.filter_len(),
        }
    }
}

/// Whether there are kernels for even numbers of channels or filters, if `unit` of them are 16 bytes.
fn may_be_even(shape: &ConvShape, unit: usize) -> bool {
    shape.is_dense() && unit == 8
}

impl Tile {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Tile::Group => "group",
            Tile::Large => "large",
            Tile::Small => "small",
            Tile::Narrow => "narrow",
            Tile::Even => "even",
            Tile::Scalar => "scalar",
        }
    }

    pub(super) const fn side(self) -> usize {
        match self {
            Tile::Group | Tile::Large => 128,
            Tile::Small | Tile::Narrow | Tile::Even | Tile::Scalar => 64,
        }
    }

    /// Threads of a block. `ahead`: the operands are copied to shared memory ahead, for tensor cores.
    pub(super) const fn threads(self, ahead: bool) -> u32 {
        match self {
            Tile::Large if ahead => 128,
            Tile::Large => 256,
            Tile::Group | Tile::Small | Tile::Narrow | Tile::Even | Tile::Scalar => 128,
        }
    }

    /// Bytes of dynamic shared memory of a block. Those of a warpgroup are three stages of two operands, of 128 lines and 64 depths
    /// in 16 bits, and what aligns them (`groups.cuh`); other tiles need no more than a kernel has without asking.
    pub(super) const fn shared(self) -> u32 {
        if matches!(self, Tile::Group) { 3 * 2 * 128 * 64 * 2 + 1024 } else { 0 }
    }

    /// Number of tiles of a matrix.
    pub(super) const fn count(self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.side()) * columns.div_ceil(self.side())
    }

    /// The faster one of the two tiles that move 16 bytes at a time, for a product of `rows` by `columns` on a GPU
    /// with this number of multiprocessors. A large tile has four times the results of a small one, with half the
    /// memory traffic per result, so its cost is taken as that of three small ones. So small tiles are selected if
    /// large ones would leave multiprocessors idle, or exceed the matrix's edge by far.
    pub(super) fn choose(rows: usize, columns: usize, multiprocessors: u32) -> Self {
        let rounds = |tile: Tile| tile.count(rows, columns).div_ceil(multiprocessors.max(1) as usize);
        if 3 * rounds(Tile::Large) <= rounds(Tile::Small) { Tile::Large } else { Tile::Small }
    }
}

/// A long sum divided into slices, each of which becomes one row of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slices {
    /// Number of slices, at least one.
    pub count: usize,
    /// Items of a slice; the last slice may have fewer.
    pub len: usize,
}

impl Slices {
    /// About `wanted` slices of `items`, with a length that is a multiple of `step`.
    fn new(items: usize, step: usize, wanted: usize) -> Self {
        let len = items.div_ceil(step).div_ceil(wanted.max(1)).max(1) * step;
        Slices { count: items.div_ceil(len).max(1), len }
    }

    /// Elements of workspace for sums of `len` elements: none if there is a single slice.
    fn workspace(&self, len: usize) -> usize {
        if self.count == 1 { 0 } else { self.count * len }
    }

    /// Elements of workspace for slices of the depth of `rows` by `columns` results, which are stored in whole tiles.
    pub(super) fn tile_sums(&self, rows: usize, columns: usize) -> usize {
        self.workspace(Tile::Small.count(rows, columns) * Tile::Small.side().pow(2))
    }
}

/// The slices of the depth of a pass with `rows` by `columns` results.
fn depth_slices(rows: usize, columns: usize, depth: usize, precision: Precision) -> Slices {
    let step = 64 / precision.storage().size();
    let most = (depth / (step * STEPS_OF_SLICE)).clamp(1, SLICES_OF_DEPTH);
    let tiles = Tile::Small.count(rows, columns).max(1);
    Slices::new(depth, step, (BLOCKS / tiles).clamp(1, most))
}

/// The slices of the depth of a forward pass, for whole batches of `images`. They do not depend on whether the output is
/// pooled, so pooling by itself has the same bits; but the four rows for each window of single pixels are not worth it.
pub(super) fn forward_slices(
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    units: Units,
    is_pooled: bool,
) -> Slices {
    let depth = units.weight_columns(shape);
    if is_pooled && shape.out_height() * shape.out_width() == 1 {
        return Slices { count: 1, len: depth };
    }
    depth_slices(pixels(shape, images), shape.filters, depth, precision)
}

/// The slices of the depth of the gradient of the input, for whole batches of `images`.
pub(super) fn input_slices(shape: &ConvShape, images: usize, precision: Precision) -> Slices {
    let rows = images * shape.height * shape.width;
    depth_slices(rows, shape.channels, shape.kernel * shape.kernel * shape.filters, precision)
}

/// The tile of a pass that moves 16 bytes at a time, and whose depth has these slices: only small tiles have several.
pub(super) fn tile(slices: &Slices, rows: usize, columns: usize, multiprocessors: u32) -> Tile {
    if slices.count > 1 { Tile::Small } else { Tile::choose(rows, columns, multiprocessors) }
}

/// Output pixels of a batch.
pub(super) fn pixels(shape: &ConvShape, images: usize) -> usize {
    images * shape.out_height() * shape.out_width()
}

/// The tile of the product that computes the weights' gradient, and the slices of its sum over the output pixels.
pub(super) fn partition_weights(
    shape: &ConvShape,
    images: usize,
    precision: Precision,
    units: Units,
) -> (Tile, Slices) {
    let (rows, columns, pixels) = (shape.filters, units.weight_columns(shape), pixels(shape, images));
    let step = 64 / precision.storage().size();
    let most = (pixels / (step * STEPS_OF_SLICE)).max(1);
    let (large, small) = (Tile::Large.count(rows, columns), Tile::Small.count(rows, columns));
    let tile = match units {
        Units::Elements => Tile::Scalar,
        Units::Narrow => Tile::Narrow,
        Units::Even => Tile::Even,
        Units::Whole if 3 * large <= small && large * most >= BLOCKS / 2 => Tile::Large,
        Units::Whole => Tile::Small,
    };
    let blocks = if tile == Tile::Large { BLOCKS } else { 2 * BLOCKS };
    (tile, Slices::new(pixels, step, (blocks / tile.count(rows, columns)).clamp(1, most)))
}

/// The slices of the bias's gradient. Within a slice a block sums up to some hundred filters.
pub(super) fn bias_slices(shape: &ConvShape, images: usize) -> Slices {
    let pixels = pixels(shape, images);
    // The block's threads process several rows at a time, each thread the filters of one access.
    let across = if shape.filters.is_multiple_of(8) { shape.filters / 8 } else { shape.filters };
    let side_by_side = (256 / across).max(1);
    // A single slice, if a second kernel to add up slices is not worth its launch.
    let wanted = if pixels <= 32 * side_by_side { 1 } else { pixels / (16 * side_by_side) };
    Slices::new(pixels, 1, wanted.clamp(1, BLOCKS))
}

/// The division of images of one channel into bands, if the kernels for one channel apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bands {
    /// Output rows of a band, or pairs of them if they are pooled.
    pub rows: usize,
    /// Number of bands in the batch.
    pub count: usize,
}

impl Bands {
    /// Values of a band including its border: `BAND_VALUES` of the kernels.
    const VALUES: usize = 4096;
    /// With fewer output rows a band would consist mostly of its border.
    const ROWS: usize = 4;

    /// `None` if the kernels do not support the shape. `pooled` are the rows of the pooled output, if it is pooled.
    pub(super) fn new(shape: &ConvShape, images: usize, pooled: Option<usize>) -> Option<Self> {
        if shape.channels != 1 || ![3, 5].contains(&shape.kernel) {
            return None;
        }
        let (height, high) = pooled.map_or((shape.out_height(), 1), |rows| (rows, 2));
        let stride = shape.out_width().next_multiple_of(4) + 4;
        let most = (Self::VALUES / stride).saturating_sub(shape.kernel - 1) / high;
        if most == 0 {
            return None;
        }
        let wanted = BLOCKS.div_ceil(images.max(1)).min(height.div_ceil(Self::ROWS / high));
        let rows = height.div_ceil(wanted).min(most);
        Some(Bands { rows, count: images * height.div_ceil(rows) })
    }
}

/// Up to so many filters of images with one channel are computed by blocks for few of them.
pub(super) const FEW_FILTERS: usize = 8;

/// Maximum number of slices of the gradients of a layer of one channel. With few filters in 16 bits a slice is small, and
/// twice as many blocks fit on a multiprocessor.
pub(super) fn first_slices(shape: &ConvShape, precision: Precision) -> usize {
    if shape.filters <= FEW_FILTERS && precision.is_half() { 2 * BLOCKS } else { BLOCKS }
}

/// The division of images into bands of rows, for direct convolutions: `struct RowBands` of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::NoUninit)]
#[repr(C)]
pub(super) struct RowBands {
    /// Rows of a band, or pairs of them if they are pooled.
    pub rows: u32,
    /// Number of bands in the batch.
    pub count: u32,
}

impl RowBands {
    /// Pixels of a band including its border: `BAND_UNITS` of the kernels.
    const PIXELS: usize = 512;

    /// For results of `height` by `width`, each of them the `high` by `high` pixels that are pooled. `None` if the images are
    /// too wide.
    pub(super) fn new(
        images: usize,
        [height, width]: [usize; 2],
        high: usize,
        kernel: usize,
    ) -> Option<Self> {
        let border = kernel - 1;
        let most = (Self::PIXELS / (high * width + border)).saturating_sub(border) / high;
        if most == 0 {
            return None;
        }
        let wanted = BLOCKS.div_ceil(images.max(1)).min(height.div_ceil(Bands::ROWS / high));
        let rows = height.div_ceil(wanted).min(most);
        Some(RowBands { rows: rows as u32, count: u32::try_from(images * height.div_ceil(rows)).ok()? })
    }

    /// The slices of the gradient of the weights, in bands: each block has sums of its own.
    pub(super) fn slices(self) -> Slices {
        let bands = self.count as usize;
        let count = bands.clamp(1, 3 * BLOCKS / 2);
        Slices { count, len: bands.div_ceil(count) }
    }
}

/// Bytes of f32 workspace that every pass of a layer needs for a batch of this size. The gradients of a smaller batch may
/// need a few slices more than those of a larger one, so ask for each size that is used.
pub fn workspace_bytes(shape: &ConvShape, images: usize, precision: Precision) -> usize {
    let gradients = gradient_workspace_bytes(shape, images, precision);
    let forward = forward_workspace_bytes(shape, images, precision);
    gradients.max(forward).max(input_workspace_bytes(shape, images, precision))
}

/// Bytes of workspace for the forward pass, if whole batches have this size.
pub(super) fn forward_workspace_bytes(shape: &ConvShape, images: usize, precision: Precision) -> usize {
    // With pooling there are four rows for each window.
    let rows = match [shape.out_height(), shape.out_width()] {
        [1, 1] => images,
        extents => images * extents.map(|extent| extent.next_multiple_of(2)).iter().product::<usize>(),
    };
    let sums = [Units::Elements, Units::of_forward(shape, precision)]
        .map(|units| forward_slices(shape, images, precision, units, false).tile_sums(rows, shape.filters));
    size_of::<f32>() * sums.into_iter().fold(0, usize::max)
}

/// Bytes of workspace for the gradient of the input, if whole batches have this size.
pub(super) fn input_workspace_bytes(shape: &ConvShape, images: usize, precision: Precision) -> usize {
    let rows = images * shape.height * shape.width;
    size_of::<f32>() * input_slices(shape, images, precision).tile_sums(rows, shape.channels)
}

/// Bytes of workspace for the gradients of weights and bias of a batch of this size.
pub(super) fn gradient_workspace_bytes(shape: &ConvShape, images: usize, precision: Precision) -> usize {
    // The gradient of the bias is computed with that of the weights.
    let len = shape.weights_len() + shape.filters;
    let weights = match Bands::new(shape, images, None) {
        Some(_) => first_slices(shape, precision) * len,
        // How operands are read depends on addresses as well.
        None => {
            let bands = direct::weight_bands(shape, images, precision);
            let direct = bands.map_or(0, |bands| bands.slices().workspace(len));
            [Units::Elements, Units::of(shape, precision)]
                .map(|units| partition_weights(shape, images, precision, units).1.workspace(len))
                .into_iter()
                .fold(direct, usize::max)
        }
    };
    size_of::<f32>() * weights.max(bias_slices(shape, images).workspace(shape.filters))
}

#[cfg(test)]
mod tests {
    use super::super::Padding;
    use super::*;
    use crate::pool::{PoolShape, Rounding};
    use proptest::prelude::*;

    fn divide(value: u32, by: Reciprocal) -> u32 {
        (((u64::from(value) * u64::from(by.magic)) >> 31) as u32) >> by.shift
    }

    proptest! {
        #[test]
        fn multiplying_by_the_reciprocal_divides(
            value in 0u32..1 << 31, divisor in prop_oneof![1usize..5000, 1usize..1 << 31], power in 0u32..31,
        ) {
            for divisor in [divisor, 1 << power] {
                let by = Reciprocal::of(divisor);
                // Wrong quotients would appear first at multiples and right below them.
                let multiple = value - value % divisor as u32;
                for value in [value, multiple, multiple.saturating_sub(1), (1 << 31) - 1] {
                    prop_assert_eq!(divide(value, by), value / divisor as u32);
                }
            }
        }

        #[test]
        fn slices_cover_all_items_and_none_is_empty(
            items in 0usize..1_000_000, step in prop_oneof![Just(1usize), Just(16), Just(32)], wanted in 1usize..600,
        ) {
            let slices = Slices::new(items, step, wanted);
            prop_assert!(slices.count >= 1 && slices.count <= wanted && slices.len.is_multiple_of(step));
            prop_assert!(slices.count * slices.len >= items);
            prop_assert!(items == 0 || (slices.count - 1) * slices.len < items);
        }

        #[test]
        fn bands_fit_the_shared_memory_and_cover_the_image(
            images in 0usize..3000, height in 5usize..300, width in 5usize..1100, five: bool, same: bool, pooled: bool,
        ) {
            let padding = if same { Padding::Same } else { Padding::Valid };
            let kernel = if five { 5 } else { 3 };
            let shape = ConvShape { channels: 1, height, width, filters: 64, kernel, padding };
            let (rows, high) = match pooled {
                true => (shape.out_height().div_ceil(2), 2),
                false => (shape.out_height(), 1),
            };
            let Some(bands) = Bands::new(&shape, images, pooled.then_some(rows)) else {
                prop_assert!(shape.out_width() > 600, "only very wide images are too wide");
                return Ok(());
            };
            let stride = shape.out_width().next_multiple_of(4) + 4;
            prop_assert!(bands.rows >= 1 && (high * bands.rows + kernel - 1) * stride <= Bands::VALUES);
            prop_assert_eq!(bands.count, images * rows.div_ceil(bands.rows));
        }
    }

    proptest! {
        #[test]
        fn bands_of_rows_fit_the_shared_memory_and_cover_the_images(
            images in 0usize..3000, height in 1usize..300, width in 1usize..200, five: bool, pooled: bool,
        ) {
            let (high, border) = (if pooled { 2 } else { 1 }, if five { 4 } else { 2 });
            let Some(bands) = RowBands::new(images, [height, width], high, border + 1) else {
                prop_assert!(high * width > 80, "only wide images are too wide");
                return Ok(());
            };
            let (rows, count) = (bands.rows as usize, bands.count as usize);
            prop_assert!(rows >= 1 && (high * rows + border) * (high * width + border) <= RowBands::PIXELS);
            prop_assert_eq!(count, images * height.div_ceil(rows));
            let slices = bands.slices();
            prop_assert!((1..=3 * BLOCKS / 2).contains(&slices.count) && slices.count <= count.max(1));
            prop_assert!(slices.count * slices.len >= count);
        }
    }

    #[test]
    fn few_channels_and_filters_have_bands() {
        let bands = |channels, side, filters, precision| {
            direct::weight_bands(&conv(channels, side, filters, 5), 1024, precision)
        };
        let whole = |rows| Some(RowBands { rows, count: 1024 });
        assert_eq!([2, 4, 6, 8].map(|channels| bands(channels, 14, 16, Precision::Bf16)), [whole(14); 4]);
        assert_eq!(bands(6, 12, 8, Precision::F16), whole(12));
        assert_eq!([3, 10].map(|channels| bands(channels, 14, 16, Precision::Bf16)), [None; 2]);
        assert_eq!([10, 24].map(|filters| bands(6, 14, filters, Precision::Bf16)), [None; 2]);
        assert_eq!([Precision::F32, Precision::Tf32].map(|precision| bands(6, 14, 16, precision)), [None; 2]);
        assert_eq!(bands(6, 110, 16, Precision::Bf16), None, "a row and its border are too long");
    }

    fn conv(channels: usize, side: usize, filters: usize, kernel: usize) -> ConvShape {
        ConvShape { channels, height: side, width: side, filters, kernel, padding: Padding::Same }
    }

    #[test]
    fn narrow_units_are_for_few_channels_of_16_bits() {
        let units = |channels, filters, precision| Units::of(&conv(channels, 12, filters, 5), precision);
        assert_eq!([2, 4, 6].map(|channels| units(channels, 16, Precision::Bf16)), [Units::Narrow; 3]);
        assert_eq!([1, 3, 5, 10].map(|channels| units(channels, 16, Precision::Bf16)), [Units::Elements; 4]);
        assert_eq!(units(6, 10, Precision::Bf16), Units::Elements, "whole units of filters only");
        let dense = |channels, filters, precision| Units::of(&dense(channels, filters), precision);
        let last = [(84, 10), (1152, 10), (120, 84), (400, 120), (4800, 5)];
        let expected = [Units::Even, Units::Even, Units::Even, Units::Whole, Units::Elements];
        assert_eq!(last.map(|(channels, filters)| dense(channels, filters, Precision::Bf16)), expected);
        assert_eq!(dense(84, 10, Precision::Tf32), Units::Elements, "single elements are words");
        let forward = |channels| Units::of_forward(&conv(channels, 12, 10, 5), Precision::Bf16);
        assert_eq!([6, 8, 10].map(forward), [Units::Narrow, Units::Whole, Units::Elements], "any filters");
        assert_eq!(units(6, 16, Precision::Tf32), Units::Elements, "six channels are 24 bytes");
        assert_eq!(units(4, 16, Precision::Tf32), Units::Whole);
        assert_eq!(units(8, 16, Precision::Bf16), Units::Whole);
        let shape = conv(6, 14, 16, 5);
        let (tile, slices) = partition_weights(&shape, 1024, Precision::Bf16, Units::Narrow);
        assert_eq!(
            (tile, slices.count),
            (Tile::Narrow, 131),
            "25 taps of 8 channels are 4 tiles; 528 blocks"
        );
    }

    #[test]
    fn large_tiles_are_selected_if_they_fill_the_gpu_and_the_matrix() {
        assert_eq!(Tile::choose(1024 * 784, 128, 132), Tile::Large);
        assert_eq!(Tile::choose(1024 * 784, 64, 132), Tile::Small, "half of a large tile would be empty");
        assert_eq!(Tile::choose(128, 1024, 132), Tile::Small, "eight large tiles");
        assert_eq!(Tile::choose(128, 1024, 4), Tile::Large, "a GPU of four multiprocessors is full of them");
        assert_eq!(Tile::choose(2048, 4800, 132), Tile::Large);
        assert_eq!(Tile::choose(1, 1, 132), Tile::Small);
    }

    fn dense(channels: usize, filters: usize) -> ConvShape {
        ConvShape { channels, height: 1, width: 1, filters, kernel: 1, padding: Padding::Valid }
    }

    #[test]
    fn the_depth_is_split_until_the_gpu_is_busy() {
        let forward = |channels, filters, images, precision| {
            let slices = forward_slices(&dense(channels, filters), images, precision, Units::Whole, false);
            (slices.count, slices.len)
        };
        assert_eq!(forward(4800, 10, 1024, Precision::Bf16), (15, 320), "16 tiles, 150 steps");
        assert_eq!(forward(4800, 10, 128, Precision::Bf16), (15, 320), "2 tiles, but at most 16 slices");
        assert_eq!(forward(1152, 10, 1024, Precision::Bf16), (4, 288), "36 steps");
        assert_eq!(forward(1152, 10, 1024, Precision::Tf32), (9, 128), "72 steps");
        assert_eq!(forward(15488, 128, 1024, Precision::Bf16), (8, 1952), "32 tiles, 256 blocks");
        assert_eq!(forward(6272, 1024, 128, Precision::Bf16), (8, 800), "32 tiles");
        assert_eq!(forward(6272, 1024, 1024, Precision::Bf16).0, 1, "256 tiles");
        assert_eq!(forward(400, 120, 1024, Precision::Bf16).0, 1, "13 steps are too few");
        let input = |channels, filters| input_slices(&dense(channels, filters), 128, Precision::Bf16).count;
        assert_eq!([input(1024, 1024), input(4800, 10), input(15488, 128)], [4, 1, 1]);
        let large = conv(128, 28, 128, 5);
        assert_eq!(forward_slices(&large, 128, Precision::Bf16, Units::Whole, true).count, 1);
        assert_eq!(tile(&Slices::new(4800, 32, 15), 1 << 20, 128, 132), Tile::Small);
    }

    proptest! {
        /// Whatever a layer's forward pass computes besides, and however its operands are read.
        #[test]
        fn the_workspace_holds_the_sums_of_every_pass(
            images in 1usize..40, channels in 1usize..700, [height, width] in [1usize..9, 1usize..9],
            filters in 1usize..300, kernel in 0usize..3, precision in 0usize..4, ceil: bool,
        ) {
            let (kernel, precision) = (2 * kernel + 1, Precision::ALL[precision]);
            let shape = ConvShape { channels, height, width, filters, kernel, padding: Padding::Same };
            let rounding = if ceil { Rounding::Ceil } else { Rounding::Floor };
            let pool = PoolShape { height, width, rounding };
            let bytes = workspace_bytes(&shape, images, precision);
            let windows = images * pool.out_height() * pool.out_width();
            for (rows, is_pooled) in [(pixels(&shape, images), false), (4 * windows, true)] {
                for units in [Units::Elements, Units::of_forward(&shape, precision)] {
                    let slices = forward_slices(&shape, images, precision, units, is_pooled);
                    prop_assert!(slices.count * slices.len >= units.weight_columns(&shape));
                    prop_assert!(4 * slices.tile_sums(rows, filters) <= bytes);
                }
            }
            let slices = input_slices(&shape, images, precision);
            prop_assert!(4 * slices.tile_sums(pixels(&shape, images), channels) <= bytes);
        }
    }

    #[test]
    fn gradients_of_weights_are_split_until_the_gpu_is_busy() {
        let (tile, slices) = partition_weights(&conv(128, 28, 128, 5), 1024, Precision::Bf16, Units::Whole);
        assert_eq!((tile, slices.count), (Tile::Large, 10), "25 tiles, 264 blocks");
        let (tile, slices) = partition_weights(&conv(64, 14, 64, 3), 128, Precision::Bf16, Units::Whole);
        assert_eq!((tile, slices.count), (Tile::Small, 56), "9 tiles, 528 blocks");
        let (tile, slices) = partition_weights(&dense(3136, 1024), 256, Precision::Bf16, Units::Whole);
        assert_eq!((tile, slices.count), (Tile::Large, 1), "enough tiles");
        assert_eq!(
            partition_weights(&conv(3, 32, 16, 3), 8, Precision::F32, Units::Elements).0,
            Tile::Scalar
        );
    }

    #[test]
    fn a_workspace_holds_a_gradient_for_every_slice() {
        let shape = conv(128, 28, 128, 5);
        assert_eq!(workspace_bytes(&shape, 1024, Precision::Bf16), 10 * (shape.weights_len() + 128) * 4);
        assert_eq!(workspace_bytes(&shape, 0, Precision::F32), 0);
        let few = ConvShape { padding: Padding::Valid, ..conv(6, 14, 16, 5) };
        assert_eq!(workspace_bytes(&few, 1024, Precision::Bf16), 396 * (few.weights_len() + 16) * 4);
        let first = conv(1, 28, 64, 5);
        assert_eq!(workspace_bytes(&first, 1024, Precision::Bf16), 264 * 64 * 26 * 4);
        let six = conv(1, 28, 6, 5);
        assert_eq!(workspace_bytes(&six, 1024, Precision::Bf16), 528 * 6 * 26 * 4);
        let last = dense(4800, 10);
        assert_eq!(workspace_bytes(&last, 1024, Precision::Bf16), 15 * 16 * 64 * 64 * 4, "of 16 tiles");
        let tiny = conv(8, 2, 8, 1);
        assert_eq!(
            workspace_bytes(&tiny, 1, Precision::Tf32),
            0,
            "a single slice writes to the result directly"
        );
    }
}
