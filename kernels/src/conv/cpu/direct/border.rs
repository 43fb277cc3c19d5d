//! Images in the middle of zeros, so that a kernel may look past their edges.

use crate::conv::Shape;

/// The extents of an image with its border.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bordered {
    /// Rows, with the border's.
    pub(super) height: usize,
    /// Columns, with the border's.
    pub(super) width: usize,
    pub(super) channels: usize,
    /// Rows or columns of zeros on each side.
    pub(super) border: usize,
}

impl Bordered {
    /// The input of a convolution.
    pub(super) fn input(shape: &Shape) -> Bordered {
        let border = shape.pad();
        Bordered {
            height: shape.height + 2 * border,
            width: shape.width + 2 * border,
            channels: shape.channels,
            border,
        }
    }

    /// The gradient of its result before activation and pooling, with a border if it is to be convolved.
    pub(super) fn gradient(shape: &Shape, convolved: bool) -> Bordered {
        let border = if convolved { shape.kernel - 1 - shape.pad() } else { 0 };
        Bordered {
            height: shape.out_height() + 2 * border,
            width: shape.out_width() + 2 * border,
            channels: shape.filters,
            border,
        }
    }

    /// Elements of a row.
    pub(super) fn line(&self) -> usize {
        self.width * self.channels
    }

    /// Elements of the image with its border.
    pub(super) fn len(&self) -> usize {
        self.height * self.line()
    }

    /// The first element that is not of the border.
    pub(super) fn interior(&self) -> usize {
        self.border * (self.line() + self.channels)
    }

    /// Copies an image without border to the middle of `to`.
    pub(super) fn copy(&self, from: &[f32], to: &mut [f32]) {
        let inner = (self.width - 2 * self.border) * self.channels;
        let rows = to[self.interior()..].chunks_mut(self.line());
        for (from, to) in from.chunks_exact(inner).zip(rows) {
            to[..inner].copy_from_slice(from);
        }
    }
}
