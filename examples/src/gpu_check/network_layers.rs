//! The convolutions and dense layers of the networks, each once.

use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::conv::ConvShape;
use mgpu_kernels::conv::cuda::LINEAR;
use mgpu_kernels::dense;

use crate::nets::{Layer, Spec, names};

/// The networks, most important first.
pub(super) const ORDER: [&str; 7] =
    ["conv6", "keras", "deep", "layers", "ensemble2400", "ensemble4800", "lenet5"];

/// A layer with its activation, and the networks that have it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NetworkLayer {
    pub(super) networks: Vec<&'static str>,
    pub(super) shape: ConvShape,
    /// That of the activation for negative values.
    pub(super) slope: f32,
    /// Whether the gradient of its input is needed.
    pub(super) input_gradient: bool,
}

/// The distinct layers of all networks, in the order of their first network.
pub(super) fn layers() -> Vec<NetworkLayer> {
    let rest = names().iter().copied().filter(|name| !ORDER.contains(name));
    let mut layers: Vec<NetworkLayer> = Vec::new();
    for name in ORDER.into_iter().chain(rest) {
        for layer in of_network(name) {
            let same = |known: &&mut NetworkLayer| {
                known.shape == layer.shape
                    && known.slope == layer.slope
                    && known.input_gradient == layer.input_gradient
            };
            match layers.iter_mut().find(same) {
                Some(known) if known.networks.contains(&name) => {}
                Some(known) => known.networks.push(name),
                None => layers.push(layer),
            }
        }
    }
    layers
}

fn of_network(name: &'static str) -> Vec<NetworkLayer> {
    let spec = Spec::named(name).expect("a known name");
    let mut layers: Vec<NetworkLayer> = Vec::new();
    let mut extents = spec.input;
    for (at, layer) in spec.layers.iter().enumerate() {
        let [channels, height, width] = extents;
        extents = layer.output(extents);
        let shape = match *layer {
            Layer::Conv { filters, kernel, padding } => {
                ConvShape { channels, height, width, filters, kernel, padding }
            }
            Layer::Dense(outputs) => {
                dense::cuda::convolution(&dense::DenseShape { inputs: channels, outputs })
            }
            _ => continue,
        };
        let slope = match spec.layers.get(at + 1) {
            Some(Layer::Relu) => 0.0,
            Some(Layer::LeakyRelu) => LEAKY_SLOPE,
            _ => LINEAR,
        };
        let input_gradient = !layers.is_empty();
        layers.push(NetworkLayer { networks: vec![name], shape, slope, input_gradient });
    }
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_of_every_network_occurs_once() {
        let layers = layers();
        assert_eq!(layers[0].networks[0], "conv6");
        let order: Vec<_> =
            layers.chunk_by(|a, b| a.networks[0] == b.networks[0]).map(|of| of[0].networks[0]).collect();
        assert_eq!(order[..4], ["conv6", "keras", "deep", "layers"]);
        for name in names() {
            let own: Vec<_> = of_network(name);
            assert!(
                !own.is_empty()
                    && !own[0].input_gradient
                    && own.iter().skip(1).all(|layer| layer.input_gradient)
            );
            for layer in own {
                let same =
                    |known: &&NetworkLayer| known.shape == layer.shape && known.networks.contains(name);
                assert!(layers.iter().any(|known| same(&known)), "{layer:?}");
            }
        }
        for (at, layer) in layers.iter().enumerate() {
            let twice = |other: &NetworkLayer| other.shape == layer.shape && other.slope == layer.slope;
            assert!(
                !layers[at + 1..]
                    .iter()
                    .any(|other| twice(other) && other.input_gradient == layer.input_gradient)
            );
        }
    }
}
