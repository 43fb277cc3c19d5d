//! The definition of a network, without memory and values.

use mgpu::optimizer::OptimizerConfig;

use super::layers::Layer;

/// A network: its layers and training settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// The network's name.
    pub name: String,
    /// Channels, rows and columns of an input image.
    pub input: [usize; 3],
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// The optimizer of its training.
    pub optimizer: OptimizerConfig,
    /// Default batch size of one rank, in images.
    pub batch: usize,
}
