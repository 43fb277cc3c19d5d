//! What computes a convolution or a dense layer: the fastest of what there is for it.

use mgpu::Result;
use mgpu_kernels::conv::{self, gpu::Conv};
use mgpu_kernels::cuda::{Options, Precision, Stream, View};
use mgpu_kernels::dense::{self, gpu::Dense};

/// A convolution, or a dense layer, which is one of 1×1 on images of 1×1.
#[derive(Debug)]
pub(super) enum Product {
    Conv(Conv),
    Dense(Dense),
}

impl Product {
    /// For batches of up to `images` images. `input_gradient` tells whether anybody asks for it.
    pub(super) fn new(
        stream: &Stream,
        shape: conv::Shape,
        images: usize,
        precision: Precision,
        slope: f32,
        input_gradient: bool,
        options: Options,
    ) -> Result<Self> {
        if (shape.height, shape.width, shape.kernel) == (1, 1, 1) {
            let shape = dense::Shape { inputs: shape.channels, outputs: shape.filters };
            let dense = Dense::new(stream, shape, images, precision, slope, input_gradient, options)?;
            return Ok(Product::Dense(dense));
        }
        Ok(Product::Conv(Conv::new(stream, shape, images, precision, slope, input_gradient, options)?))
    }

    pub(super) fn workspace_bytes(&self) -> usize {
        match self {
            Product::Conv(conv) => conv.workspace_bytes(),
            Product::Dense(dense) => dense.workspace_bytes(),
        }
    }

    pub(super) fn describe(&self) -> String {
        match self {
            Product::Conv(conv) => conv.describe(),
            Product::Dense(dense) => dense.describe(),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub(super) fn forward(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        y: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        match self {
            Product::Conv(conv) => conv.forward(stream, images, x, weights, bias, y, workspace)?,
            Product::Dense(dense) => dense.forward(stream, images, x, weights, bias, y, workspace)?,
        }
        Ok(())
    }

    pub(super) fn backward_input(
        &self,
        stream: &Stream,
        images: usize,
        weights: View<'_>,
        dy: View<'_>,
        dx: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        match self {
            Product::Conv(conv) => conv.backward_input(stream, images, weights, dy, dx, workspace)?,
            Product::Dense(dense) => dense.backward_input(stream, images, weights, dy, dx, workspace)?,
        }
        Ok(())
    }

    pub(super) fn backward_weights(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        dy: View<'_>,
        dw: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        match self {
            Product::Conv(conv) => conv.backward_weights(stream, images, x, dy, dw, workspace)?,
            Product::Dense(dense) => dense.backward_weights(stream, images, x, dy, dw, workspace)?,
        }
        Ok(())
    }

    pub(super) fn backward_bias(
        &self,
        stream: &Stream,
        images: usize,
        dy: View<'_>,
        db: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        match self {
            Product::Conv(conv) => conv.backward_bias(stream, images, dy, db, workspace)?,
            Product::Dense(dense) => dense.backward_bias(stream, images, dy, db, workspace)?,
        }
        Ok(())
    }
}
