//! The tensors of a network's layers: names as in PyTorch's state dict, shapes, offsets, and the role in
//! initialisation.

use std::ops::Range;

use mgpu::Layout;

/// The role of a parameter tensor, which determines its initial values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Role {
    /// Weights that sum over `fan_in` inputs, followed by a rectifier or not.
    Weight { fan_in: usize, rectified: bool },
    /// Bias of a convolution or dense layer.
    Bias,
    /// Scale of a normalisation.
    Scale,
    /// Shift of a normalisation.
    Shift,
}

/// The tensors of a network.
#[derive(Debug, Default)]
pub(super) struct Tensors {
    pub(super) parameters: Layout,
    /// The role of each parameter tensor.
    pub(super) roles: Vec<Role>,
    /// Running statistics.
    pub(super) buffers: Layout,
    /// The number of parameter tensors of the whole network before these, which are a part of it.
    pub(super) before: usize,
}

impl Tensors {
    /// Adds a layer's weight and bias tensors and returns the index of the weight.
    pub(super) fn add_pair(&mut self, layer: usize, shape: &[usize], weight: Role, bias: Role) -> usize {
        self.roles.extend([weight, bias]);
        let index = self.parameters.push(format!("{layer}.weight"), shape);
        self.parameters.push(format!("{layer}.bias"), [shape[0]]);
        index
    }

    /// Adds a running statistic of `channels` elements and returns its range in the buffers.
    pub(super) fn add_buffer(&mut self, layer: usize, name: &str, channels: usize) -> Range<usize> {
        let index = self.buffers.push(format!("{layer}.{name}"), [channels]);
        self.buffers.range(index)
    }
}
