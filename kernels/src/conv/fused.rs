//! Neighbours of a layer that are computed within its passes on a GPU: pooling and dropout after it in the forward
//! pass, activation, pooling and dropout before it in the backward pass.
//!
//! Every step rounds as when it is launched by itself, so the results have the same bits.

use crate::DType;
use crate::cuda::View;
use crate::cuda::elements::{check, count};
use crate::dropout::cuda::{Dropout, Parameters};
use crate::pool::PoolShape;

use super::ConvShape;
use super::cuda::{ImageExtents, LINEAR};

/// What follows a layer's activation.
#[derive(Debug, Clone, Copy, Default)]
pub struct After<'a> {
    /// Max-pooling of the output; the view receives the chosen positions.
    pub pool: Option<(&'a PoolShape, View<'a>)>,
    /// Dropout of the output, after pooling.
    pub dropout: Option<Dropout<'a>>,
}

/// `struct After` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub(super) struct AfterParameters {
    chosen: u64,
    state: u64,
    pooled: ImageExtents,
    mask: Parameters,
}

impl After<'_> {
    /// Pixels of the output of `images` images.
    pub(super) fn pixels(&self, shape: &ConvShape, images: usize) -> usize {
        let [height, width] = self.extents(shape);
        images * height * width
    }

    /// Rows and columns of the output.
    fn extents(&self, shape: &ConvShape) -> [usize; 2] {
        match self.pool {
            Some((pool, _)) => [pool.out_height(), pool.out_width()],
            None => [shape.out_height(), shape.out_width()],
        }
    }

    /// Checks that it fits the layer, and an output of `len` elements.
    #[track_caller]
    pub(super) fn check(&self, shape: &ConvShape, len: usize) {
        if let Some((pool, chosen)) = self.pool {
            assert_eq!(
                [pool.height, pool.width],
                [shape.out_height(), shape.out_width()],
                "extents of a pooled convolution"
            );
            check("the chosen positions of a pooling layer", chosen, DType::U8, len);
        }
    }

    /// For the kernels, if the output has `len` elements.
    #[track_caller]
    pub(super) fn parameters(&self, shape: &ConvShape, images: usize, len: usize) -> AfterParameters {
        let [height, width] = self.extents(shape);
        AfterParameters {
            chosen: self.pool.map_or(0, |(_, chosen)| chosen.address()),
            state: self.dropout.map_or(0, |dropout| dropout.state.address()),
            pooled: ImageExtents::new(images, shape.filters, height, width),
            mask: self.dropout.map_or_else(Parameters::default, |dropout| dropout.parameters(len)),
        }
    }
}

/// What precedes a layer, whose input is the output of an activation, perhaps pooled and dropped out.
#[derive(Debug, Clone, Copy)]
pub struct Before<'a> {
    /// The layer's input and the slope of the activation for negative values, if there is one.
    pub activated: Option<(View<'a>, f32)>,
    /// Max-pooling before the layer, after the activation, and the positions that it has chosen.
    pub pool: Option<(&'a PoolShape, View<'a>)>,
    /// Dropout before the layer, after pooling.
    pub dropout: Option<Dropout<'a>>,
}

impl Before<'_> {
    /// Nothing precedes the layer.
    pub const NOTHING: Before<'static> = Before { activated: None, pool: None, dropout: None };
}

/// `struct Before` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub(super) struct BeforeParameters {
    y: u64,
    chosen: u64,
    state: u64,
    channels: u32,
    height: u32,
    width: u32,
    unpooled_height: u32,
    unpooled_width: u32,
    slope: f32,
    mask: Parameters,
}

impl Before<'_> {
    /// Number of elements of the gradient of an input of `len` elements.
    ///
    /// # Panics
    /// If the input is not a whole number of pooled pixels of `images` images.
    #[track_caller]
    pub(super) fn gradient_len(&self, images: usize, len: usize) -> usize {
        self.pool.map_or(len, |(pool, _)| images * self.channels(images, len) * pool.height * pool.width)
    }

    /// Channels of the pooled images.
    #[track_caller]
    fn channels(&self, images: usize, len: usize) -> usize {
        let Some((pool, _)) = self.pool else { return 1 };
        let pixels = images * pool.out_height() * pool.out_width();
        assert!(len.is_multiple_of(pixels), "{len} elements of {pixels} pooled pixels");
        len / pixels
    }

    /// For the kernels, if the input has `len` elements of type `dtype`.
    #[track_caller]
    pub(super) fn parameters(&self, images: usize, dtype: DType, len: usize) -> BeforeParameters {
        if let Some((y, _)) = self.activated {
            check("a layer's input", y, dtype, len);
        }
        let mut extents = [1; 4];
        if let Some((pool, chosen)) = self.pool {
            check("the chosen positions of a pooling layer", chosen, DType::U8, len);
            extents = [pool.out_height(), pool.out_width(), pool.height, pool.width];
        }
        let [height, width, unpooled_height, unpooled_width] = extents.map(count);
        BeforeParameters {
            y: self.activated.map_or(0, |(y, _)| y.address()),
            chosen: self.pool.map_or(0, |(_, chosen)| chosen.address()),
            state: self.dropout.map_or(0, |dropout| dropout.state.address()),
            channels: count(self.channels(images, len)),
            height,
            width,
            unpooled_height,
            unpooled_width,
            slope: self.activated.map_or(LINEAR, |(_, slope)| slope),
            mask: self.dropout.map_or_else(Parameters::default, |dropout| dropout.parameters(len)),
        }
    }

    /// What kernels read besides a layer's own operands: for alignment.
    pub(super) fn views(&self) -> impl Iterator<Item = View<'_>> {
        self.activated.map(|(y, _)| y).into_iter().chain(self.pool.map(|(_, chosen)| chosen))
    }
}
