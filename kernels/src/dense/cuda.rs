//! Dense layers on a GPU: a dense layer is a convolution with a 1×1 kernel on images of one pixel.
//!
//! So every pass is that of the convolution, and [its rules](crate::conv::cuda) for types, workspace, panics and
//! errors apply here. For a layer that uses the fastest available kernels, including a library's, set up a
//! [`Conv`](crate::conv::gpu::Conv) with the same [convolution].

use super::DenseShape;
use crate::Precision;
use crate::conv::{self, Padding};
use crate::cuda::{Result, Stream, View};

pub use crate::conv::cuda::{LINEAR, Workspace};

/// The layer as a convolution: its inputs are channels, its outputs filters.
pub fn convolution(shape: &DenseShape) -> conv::ConvShape {
    let DenseShape { inputs, outputs } = *shape;
    conv::ConvShape {
        channels: inputs,
        height: 1,
        width: 1,
        filters: outputs,
        kernel: 1,
        padding: Padding::Valid,
    }
}

/// Bytes of f32 workspace that every pass needs.
pub fn workspace_bytes(shape: &DenseShape, samples: usize, precision: Precision) -> usize {
    conv::cuda::workspace_bytes(&convolution(shape), samples, precision)
}

/// Overwrites `y` \[N, O\] with `x · Wᵀ + b`, activated: `v` for positive values, `slope · v` otherwise.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn forward(
    stream: &Stream,
    shape: &DenseShape,
    samples: usize,
    precision: Precision,
    x: View<'_>,
    weights: View<'_>,
    bias: View<'_>,
    slope: f32,
    y: View<'_>,
    workspace: &Workspace<'_>,
) -> Result<()> {
    let shape = &convolution(shape);
    conv::cuda::forward(stream, shape, samples, precision, x, weights, bias, slope, y, workspace)
}

/// Overwrites `dx` \[N, I\] with the gradient of the input.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn backward_input(
    stream: &Stream,
    shape: &DenseShape,
    samples: usize,
    precision: Precision,
    weights: View<'_>,
    dy: View<'_>,
    dx: View<'_>,
    workspace: &Workspace<'_>,
) -> Result<()> {
    conv::cuda::backward_input(stream, &convolution(shape), samples, precision, weights, dy, dx, workspace)
}

/// Overwrites `dw` \[O, I\] with the gradient of the weights and, if it is given, `db` \[O\] with that of the bias, both
/// f32, summed over all samples.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
pub fn backward_weights(
    stream: &Stream,
    shape: &DenseShape,
    samples: usize,
    precision: Precision,
    x: View<'_>,
    dy: View<'_>,
    workspace: &Workspace<'_>,
    dw: View<'_>,
    db: Option<View<'_>>,
) -> Result<()> {
    conv::cuda::backward_weights(stream, &convolution(shape), samples, precision, x, dy, workspace, dw, db)
}

/// Overwrites `db` \[O\], in f32, with the gradient of the bias, summed over all samples.
#[track_caller]
pub fn backward_bias(
    stream: &Stream,
    shape: &DenseShape,
    samples: usize,
    precision: Precision,
    dy: View<'_>,
    workspace: &Workspace<'_>,
    db: View<'_>,
) -> Result<()> {
    conv::cuda::backward_bias(stream, &convolution(shape), samples, precision, dy, workspace, db)
}
