//! What a network is made of, before memory and numbers.

use mgpu::optimizer::OptimizerConfig;

use super::layers::Layer;

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
