//! Images padded with zeros, so that a kernel may read beyond their edges; gradients in blocks that fit the L1 cache.

use super::lines;
use crate::conv::ConvShape;
use crate::conv::cpu::Epilogue;
use crate::gemm::tile::PANEL;
use crate::storage::{Storage, convert};

/// The extents of a padded image.
#[derive(Debug, Clone, Copy)]
pub(super) struct PaddedImage {
    /// Rows including the border.
    pub(super) height: usize,
    /// Columns including the border.
    pub(super) width: usize,
    pub(super) channels: usize,
    /// Rows of zeros above and below.
    pub(super) above: usize,
    /// Columns of zeros on each side.
    pub(super) beside: usize,
}

impl PaddedImage {
    /// The input of a convolution.
    pub(super) fn input(shape: &ConvShape) -> PaddedImage {
        let border = shape.pad();
        PaddedImage {
            height: shape.height + 2 * border,
            width: shape.width + 2 * border,
            channels: shape.channels,
            above: border,
            beside: border,
        }
    }

    /// The gradient of the result before activation and pooling, which is convolved to compute the gradient of the
    /// input.
    pub(super) fn gradient(shape: &ConvShape) -> PaddedImage {
        let border = shape.kernel - 1 - shape.pad();
        PaddedImage {
            height: shape.out_height() + 2 * border,
            width: shape.out_width() + 2 * border,
            channels: shape.filters,
            above: border,
            beside: border,
        }
    }

    /// Elements of a row.
    pub(super) fn line(&self) -> usize {
        self.width * self.channels
    }

    /// Elements of the image including its border.
    pub(super) fn len(&self) -> usize {
        self.height * self.line()
    }

    /// Index of the first element inside the border.
    pub(super) fn interior(&self) -> usize {
        self.above * self.line() + self.beside * self.channels
    }

    /// Copies an image without border to the interior of `to`.
    pub(super) fn copy<E: Storage, F: Storage>(&self, from: &[E], to: &mut [F]) {
        let inner = (self.width - 2 * self.beside) * self.channels;
        let rows = to[self.interior()..].chunks_mut(self.line());
        for (from, to) in from.chunks_exact(inner).zip(rows) {
            convert(from, &mut to[..inner]);
        }
    }
}

/// A few rows of the gradient before activation and pooling, in panels of channels: the right operand of the weight
/// gradient, which is read once for every tile of weights.
///
/// A panel of a block fills half the L1 cache. In an image of 128 channels, the same elements would map to an eighth
/// of the cache's sets and evict each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct GradientBlock {
    /// Rows of the result in a block.
    pub(super) results: usize,
    /// Rows of the gradient for each of them.
    pub(super) rows_each: usize,
    /// Elements from one pixel to the next.
    pub(super) stride: usize,
    /// Elements from one panel to the next.
    pub(super) panel: usize,
    panels: usize,
}

impl GradientBlock {
    /// The blocks of the gradient of `shape`.
    pub(super) fn new(shape: &ConvShape, epilogue: &Epilogue) -> GradientBlock {
        let rows_each = if epilogue.pool.is_some() { 2 } else { 1 };
        // Products with few rows of weights use four vectors, that is two panels.
        let pixels = if shape.kernel * shape.channels <= 6 { 100 } else { 200 };
        let results = (pixels / (rows_each * shape.out_width())).max(1);
        let stride = PANEL.min(lines(shape.filters));
        let panel = results * rows_each * shape.out_width() * stride;
        GradientBlock { results, rows_each, stride, panel, panels: shape.filters.div_ceil(PANEL) }
    }

    /// Channels including padding.
    pub(super) fn channels(&self) -> usize {
        self.panels * self.stride
    }

    /// Elements of a block.
    pub(super) fn len(&self) -> usize {
        self.panels * self.panel
    }
}
