//! The layouts of weights: that of the parameters, \[F, C, K, K\], and those of the operands of products.

use std::ops::Range;

use super::lines;
use crate::AlignedVec;
use crate::conv::ConvShape;
use crate::gemm::tile::PANEL;

/// Elements of packed filters with `channels` inputs and `filters` outputs.
pub(super) fn packed_len(channels: usize, filters: usize, kernel: usize) -> usize {
    filters.div_ceil(PANEL) * kernel * kernel * channels * PANEL
}

/// Writes the filters as \[panel, u, v, channel, filter within the panel\].
pub(super) fn pack(shape: &ConvShape, weights: &[f32], packed: &mut [f32]) {
    let ConvShape { channels, kernel, .. } = *shape;
    packed.fill(0.0);
    for (f, filter) in weights.chunks_exact(shape.filter_len()).enumerate() {
        let to = &mut packed[f / PANEL * kernel * kernel * channels * PANEL + f % PANEL..];
        for (c, places) in filter.chunks_exact(kernel * kernel).enumerate() {
            for (place, &weight) in places.iter().enumerate() {
                to[(place * channels + c) * PANEL] = weight;
            }
        }
    }
}

/// Writes the filters for the input gradient: rotated by 180°, with channels and filters exchanged, as
/// \[panel, u, v, filter, channel within the panel\].
pub(super) fn pack_flipped(shape: &ConvShape, weights: &[f32], packed: &mut [f32]) {
    let ConvShape { filters, kernel, .. } = *shape;
    packed.fill(0.0);
    for (f, filter) in weights.chunks_exact(shape.filter_len()).enumerate() {
        for (c, places) in filter.chunks_exact(kernel * kernel).enumerate() {
            let to = &mut packed[c / PANEL * kernel * kernel * filters * PANEL + c % PANEL..];
            for (place, &weight) in places.iter().rev().enumerate() {
                to[(place * filters + f) * PANEL] = weight;
            }
        }
    }
}

/// Elements of a thread's weight gradient, \[K, K·C, filters in whole cache lines\].
pub(super) fn gradient_len(shape: &ConvShape) -> usize {
    shape.filter_len() * lines(shape.filters)
}

/// Writes the weight gradients of `filters`, summed over threads, in the parameters' layout.
pub(super) fn sum_parts(shape: &ConvShape, parts: &[AlignedVec], filters: Range<usize>, dw: &mut [f32]) {
    let (places, stride) = (shape.kernel * shape.kernel, lines(shape.filters));
    for (f, dw) in filters.zip(dw.chunks_exact_mut(shape.filter_len())) {
        for (c, dw) in dw.chunks_exact_mut(places).enumerate() {
            for (place, dw) in dw.iter_mut().enumerate() {
                let at = (place * shape.channels + c) * stride + f;
                *dw = parts.iter().map(|part| part[at]).sum();
            }
        }
    }
}
