//! What a network is made of, before memory and numbers.

use mgpu::optimizer::OptimizerConfig;
use mgpu_kernels::conv::Padding;
use mgpu_kernels::pool::Rounding;

/// One entry of a network's list of layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Layer {
    /// Convolution of stride 1 with a square kernel, and a bias for each filter.
    Conv {
        /// Output channels.
        filters: usize,
        /// Rows and columns of the kernel.
        kernel: usize,
        /// Treatment of the border.
        padding: Padding,
    },
    /// Normalisation of each channel over the batch of all ranks, with a learned scale and shift.
    BatchNorm,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0.2 x)`.
    LeakyRelu,
    /// Maximum over windows of 2×2, stride 2.
    MaxPool(Rounding),
    /// Zeroes each value with this probability while training, and scales the rest.
    Dropout(f32),
    /// Turns the channels of an image into one vector. Moves no data, but counts as a layer in names.
    Flatten,
    /// Fully connected, with this many outputs and a bias for each.
    Dense(usize),
}

/// A network: its layers and how to train them.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// The network's name.
    pub name: String,
    /// Channels, rows and columns of an input image.
    pub input: [usize; 3],
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// The optimizer it is trained with.
    pub optimizer: OptimizerConfig,
    /// Images in a training batch of one rank, where the user does not say.
    pub batch: usize,
}
