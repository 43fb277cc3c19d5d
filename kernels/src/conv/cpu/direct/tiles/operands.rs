//! The operands of a convolution's products, in the layouts of an engine.

use half::bf16;

use crate::AlignedVec;
use crate::conv::ConvShape;
use crate::conv::cpu::direct::border::PaddedImage;
use crate::gemm::transpose::Transpose;
use crate::simd::{Simd, Task, dispatch};
use crate::storage::Storage;
use crate::threads::{PerPart, Rows, Threads};
use crate::tile_engine::pack::{steps, store_pairs};
use crate::tile_engine::{BLOCK, DEPTH, SIDE, TILE};

/// A padded image as the left operand of a convolution: row p is the run of inputs under a kernel row at pixel p, pixels
/// numbered through whole rows *including* the border. So rows of the image follow each other without gaps, and the few
/// results at border pixels are dropped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Runs {
    pub(super) image: PaddedImage,
    pub(super) kernel: usize,
}

impl Runs {
    /// Tiles of the depth under one kernel row.
    pub(super) fn steps(&self) -> usize {
        steps(self.kernel * self.image.channels)
    }

    /// Rows and columns of the result.
    pub(super) fn result(&self) -> (usize, usize) {
        (self.image.height + 1 - self.kernel, self.image.width + 1 - self.kernel)
    }

    /// Numbered pixels, from the first to the last of the result.
    pub(super) fn pixels(&self) -> usize {
        let (height, width) = self.result();
        (height - 1) * self.image.width + width
    }

    /// Elements of the image and what is read after it, which has to be finite.
    pub(super) fn len(&self) -> usize {
        let PaddedImage { channels, .. } = self.image;
        let last = self.pixels().next_multiple_of(BLOCK) - 1;
        let read = last * channels + (self.kernel - 1) * self.image.line() + self.steps() * DEPTH;
        read.max(self.image.len())
    }
}

/// The filters of a convolution as its right operand: \[panel, kernel row, pair of (kernel column, channel)\].
#[derive(Debug, Clone, Copy)]
pub(super) struct Filters {
    pub(super) channels: usize,
    pub(super) filters: usize,
    pub(super) kernel: usize,
}

impl Filters {
    /// Elements of a kernel row in a panel.
    pub(super) fn segment(&self) -> usize {
        steps(self.kernel * self.channels) * TILE
    }

    /// Elements of a panel.
    pub(super) fn panel(&self) -> usize {
        self.kernel * self.segment()
    }

    /// Panels of whole blocks.
    pub(super) fn panels(&self) -> usize {
        self.filters.div_ceil(BLOCK) * 2
    }

    /// Elements of all panels.
    pub(super) fn len(&self) -> usize {
        self.panels() * self.panel()
    }

    /// Rounds and packs the filters. `parts` is scratch memory.
    pub(super) fn pack(
        &self,
        threads: &Threads,
        parts: &mut [AlignedVec],
        weights: Weights<'_>,
        packed: &mut [bf16],
    ) {
        let Filters { channels, filters, kernel } = *self;
        let places = kernel * kernel;
        let outputs = (Rows::new(packed, self.panel()), PerPart::new(parts));
        threads.divide(self.panels(), 1, outputs, |range, (packed, part)| {
            // The 16 weights of each channel and place.
            let rows = part.own().reserve(channels * places * SIDE);
            for (panel, to) in range.zip(packed.values.chunks_exact_mut(self.panel())) {
                let columns = SIDE.min(filters.saturating_sub(panel * SIDE));
                if columns < SIDE {
                    rows.fill(0.0);
                }
                if columns > 0 {
                    for (channel, rows) in rows.chunks_exact_mut(places * SIDE).enumerate() {
                        let from =
                            &weights.values[panel * SIDE * weights.filter + channel * weights.channel..];
                        Transpose { from, rows: columns, columns: places, row: weights.filter }
                            .to(rows, SIDE);
                    }
                }
                dispatch(PackPanel { layout: *self, rows, is_rotated: weights.is_rotated, to });
            }
        });
    }
}

/// The weights of a layer, \[F, C, K, K\], as those of a convolution.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weights<'a> {
    values: &'a [f32],
    /// Elements from one filter of the convolution to the next.
    filter: usize,
    /// Elements from one channel of the convolution to the next.
    channel: usize,
    /// Whether the kernel is rotated by 180°.
    is_rotated: bool,
}

impl<'a> Weights<'a> {
    /// For the forward pass.
    pub(super) fn of_forward(shape: &ConvShape, values: &'a [f32]) -> Self {
        let (filter, channel) = (shape.filter_len(), shape.kernel * shape.kernel);
        Weights { values, filter, channel, is_rotated: false }
    }

    /// For the input gradient: the layer's filters are the channels.
    pub(super) fn of_input_gradient(shape: &ConvShape, values: &'a [f32]) -> Self {
        let (filter, channel) = (shape.kernel * shape.kernel, shape.filter_len());
        Weights { values, filter, channel, is_rotated: true }
    }
}

struct PackPanel<'a, 'b> {
    layout: Filters,
    /// \[channel, place, column\].
    rows: &'a [f32],
    is_rotated: bool,
    to: &'b mut [bf16],
}

impl Task for PackPanel<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PackPanel { layout, rows, is_rotated, to } = self;
        let Filters { channels, kernel, .. } = layout;
        let places = kernel * kernel;
        let row = |kernel_row: usize, depth: usize| -> &[f32; SIDE] {
            if depth >= kernel * channels {
                return &[0.0; SIDE];
            }
            let place = kernel_row * kernel + depth / channels;
            let place = if is_rotated { places - 1 - place } else { place };
            let at = depth % channels * places + place;
            rows[at * SIDE..].first_chunk().expect("the weights of a place")
        };
        for (kernel_row, to) in to.chunks_exact_mut(layout.segment()).enumerate() {
            let (pairs, _) = to.as_chunks_mut::<{ 2 * SIDE }>();
            for (pair, to) in pairs.iter_mut().enumerate() {
                store_pairs(simd, row(kernel_row, 2 * pair), row(kernel_row, 2 * pair + 1), to);
            }
        }
    }
}

/// A padded image as the left operand of the weight gradient: row c is channel c, and its depth runs over the pixels,
/// numbered as for [`Runs`]. The operand of another place in the kernel begins some pixels further on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planes {
    image: PaddedImage,
    /// Numbered pixels of the result, rounded up to whole tiles.
    pub(super) depth: usize,
    /// Elements from one channel to the next.
    pub(super) plane: usize,
}

impl Planes {
    pub(super) fn new(shape: &ConvShape) -> Planes {
        let image = PaddedImage::input(shape);
        let depth = steps(shape.out_height() * image.width) * DEPTH;
        let last = (shape.kernel - 1) * (image.width + 1) + depth;
        Planes { image, depth, plane: (steps(last) | 1) * DEPTH }
    }

    /// Channels of whole blocks.
    pub(super) fn channels(&self) -> usize {
        self.image.channels.next_multiple_of(BLOCK)
    }

    /// Elements of an image.
    pub(super) fn len(&self) -> usize {
        self.channels() * self.plane
    }

    /// Pairs of pixels, with the border.
    fn pairs(&self) -> usize {
        (self.image.height * self.image.width).div_ceil(2)
    }

    /// Elements of the memory that [`copy`](Self::copy) needs.
    pub(super) fn memory_len(&self) -> [usize; 2] {
        let pairs = self.pairs() * self.image.channels;
        [2 * pairs, pairs]
    }

    /// Rounds and transposes an image without border to the interior of `to`. `padded` has zeros around the last image.
    pub(super) fn copy<E: Storage>(
        &self,
        from: &[E],
        to: &mut [bf16],
        padded: &mut [bf16],
        interleaved: &mut [f32],
    ) {
        let PaddedImage { channels, .. } = self.image;
        self.image.copy(from, padded);
        dispatch(Interleave { pixels: padded, channels, pairs: bytemuck::cast_slice_mut(interleaved) });
        // A pair is moved as one element of 32 bits.
        let pairs = Transpose { from: interleaved, rows: self.pairs(), columns: channels, row: channels };
        pairs.to(bytemuck::cast_slice_mut(to), self.plane / 2);
    }
}

/// Interleaves every two pixels.
struct Interleave<'a, 'b> {
    /// An even number.
    pixels: &'a [bf16],
    /// At least 16.
    channels: usize,
    /// As long as `pixels`.
    pairs: &'b mut [bf16],
}

impl Task for Interleave<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Interleave { pixels, channels, pairs } = self;
        assert!(channels >= SIDE && pixels.len() == pairs.len(), "pairs of pixels");
        for (two, to) in pixels.chunks_exact(2 * channels).zip(pairs.chunks_exact_mut(2 * channels)) {
            for channel in (0..channels).step_by(S::LANES) {
                // The last vector may overlap the one before.
                let channel = channel.min(channels - S::LANES);
                // SAFETY: both pixels have a vector from this channel on, and `to` as many pairs.
                unsafe {
                    let [even, odd] = [0, channels].map(|at| simd.load_bf16(two.as_ptr().add(at + channel)));
                    simd.store_bf16_pairs(even, odd, to.as_mut_ptr().add(2 * channel));
                }
            }
        }
    }
}
