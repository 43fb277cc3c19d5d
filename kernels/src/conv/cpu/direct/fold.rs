//! The input gradient for layers with few channels.
//!
//! As a convolution with C outputs it would use only C lanes of a vector, and multiply a border of zeros on all
//! sides. Instead each pixel of a row of the result's gradient is multiplied by the K·C weights of a kernel row, and
//! the K runs of channels are added to the pixels that they belong to:
//!
//! `t[i,j,(v,c)] = Σ_{u,f} dy[i−u+P, j, f] · w[f,c,u,v]`, `dx[i,q,c] = Σ_v t[i, q−v+P, (v,c)]`.

use super::border::PaddedImage;
use super::lines;
use crate::conv::ConvShape;
use crate::gemm::tile::{Left, Lines, PANEL, Product, Right, Start};
use crate::simd::{MAX_LANES, Simd};
use crate::storage::lanes::Lanes;

/// Whether this computes the input gradient of `shape` faster.
pub(super) fn is_faster(shape: &ConvShape) -> bool {
    let ConvShape { channels, kernel, .. } = *shape;
    let vectors = |columns: usize| columns.div_ceil(MAX_LANES);
    4 * shape.out_width() * vectors(kernel * channels) < 3 * shape.width * kernel * vectors(channels)
}

/// Elements of packed filters.
pub(super) fn packed_len(shape: &ConvShape) -> usize {
    let ConvShape { channels, filters, kernel, .. } = *shape;
    (kernel * channels).div_ceil(PANEL) * kernel * filters * PANEL
}

/// Writes the filters as \[panel, u, filter, (v, channel) within the panel\], with u from the last to the first.
pub(super) fn pack(shape: &ConvShape, weights: &[f32], packed: &mut [f32]) {
    let ConvShape { channels, filters, kernel, .. } = *shape;
    packed.fill(0.0);
    for (f, filter) in weights.chunks_exact(shape.filter_len()).enumerate() {
        for (c, places) in filter.chunks_exact(kernel * kernel).enumerate() {
            for (u, places) in places.chunks_exact(kernel).rev().enumerate() {
                for (v, &weight) in places.iter().enumerate() {
                    let column = v * channels + c;
                    let row = (column / PANEL * kernel + u) * filters + f;
                    packed[row * PANEL + column % PANEL] = weight;
                }
            }
        }
    }
}

/// The result's gradient, with a border above and below only.
pub(super) fn gradient(shape: &ConvShape) -> PaddedImage {
    let above = shape.kernel - 1 - shape.pad();
    PaddedImage {
        height: shape.out_height() + 2 * above,
        width: shape.out_width(),
        channels: shape.filters,
        above,
        beside: 0,
    }
}

/// Elements of the products of an image, t.
pub(super) fn products_len(shape: &ConvShape) -> usize {
    shape.height * shape.out_width() * lines(shape.kernel * shape.channels)
}

/// Overwrites `dx` with the input gradient of an image.
#[inline(always)]
pub(super) fn input_gradient<S: Simd>(
    simd: S,
    shape: &ConvShape,
    dy: &[f32],
    packed: &[f32],
    products: &mut [f32],
    dx: &mut [f32],
) {
    let ConvShape { channels, height, width, filters, kernel, .. } = *shape;
    let (runs, stride) = (shape.out_width(), lines(kernel * channels));
    let line = runs * filters;
    let product = Product {
        rows: runs,
        // Whole vectors: packed filters and products have zeros behind their last column.
        columns: stride,
        depth: filters,
        segments: kernel,
        left: Left { values: dy, row: filters, depth: 1, segment: line },
        right: Right {
            values: packed,
            depth: PANEL,
            segment: filters * PANEL,
            panel: kernel * filters * PANEL,
        },
        start: Start::Zero,
        slope: 1.0,
    };
    product.compute_lines(simd, Lines { count: height, left: line, c: runs * stride }, products, stride);
    assert!(products.len() >= height * runs * stride && dx.len() == height * width * channels, "an image");
    for (i, column) in (0..height * width).map(|at| (at / width, at % width)) {
        // Those v for which the result's gradient has a pixel.
        let place = column + shape.pad();
        let (first, end) = ((place + 1).saturating_sub(runs), kernel.min(place + 1));
        for channel in (0..channels).step_by(S::LANES) {
            let count = S::LANES.min(channels - channel);
            let mut sum = simd.splat(0.0);
            // SAFETY: runs `place − v` exist for these `v`, and channels lie within the run and the pixel.
            unsafe {
                for v in first..end {
                    let run = (i * runs + place - v) * stride + v * channels + channel;
                    let from = products.as_ptr().add(run);
                    sum = simd.add(sum, f32::load_at_least(simd, from, count, products.len() - run));
                }
                // What is written beyond the channels is overwritten by the next pixel's.
                let to = (i * width + column) * channels + channel;
                f32::store_at_least(simd, sum, dx.as_mut_ptr().add(to), count, dx.len() - to);
            }
        }
    }
}
