//! The shapes of the checks: those of the networks, random unusual ones, and some for kernels that no other shape
//! selects.

use std::fmt;

use mgpu_kernels::conv::{ConvShape, Padding};
use mgpu_kernels::pool;

use super::values::Random;
use crate::nets::{Layer, Spec, names};

/// A convolution of some images. A dense layer is a convolution of single pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Conv {
    pub(super) shape: ConvShape,
    pub(super) images: usize,
}

impl Conv {
    /// Of images that are one pixel wider than high.
    pub(super) fn new(
        images: usize,
        channels: usize,
        height: usize,
        filters: usize,
        kernel: usize,
        padding: Padding,
    ) -> Self {
        let shape = ConvShape { channels, height, width: height + 1, filters, kernel, padding };
        Conv { shape, images }
    }

    pub(super) fn dense(samples: usize, inputs: usize, outputs: usize) -> Self {
        let padding = Padding::Valid;
        let shape = ConvShape { channels: inputs, height: 1, width: 1, filters: outputs, kernel: 1, padding };
        Conv { shape, images: samples }
    }

    pub(super) fn is_dense(&self) -> bool {
        let ConvShape { height, width, kernel, .. } = self.shape;
        (height, width, kernel) == (1, 1, 1)
    }
}

impl fmt::Display for Conv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Conv { images, shape: ConvShape { channels, height, width, filters, kernel, padding } } = self;
        if self.is_dense() {
            return write!(f, "{images}x{channels} to {filters}");
        }
        let padding = if *padding == Padding::Same { "same" } else { "valid" };
        write!(f, "{images}x{channels}x{height}x{width}, {filters} of {kernel}x{kernel} {padding}")
    }
}

/// A batch of images with channels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Images {
    pub(super) images: usize,
    pub(super) channels: usize,
    pub(super) height: usize,
    pub(super) width: usize,
}

impl Images {
    pub(super) fn plane(&self) -> usize {
        self.height * self.width
    }

    pub(super) fn len(&self) -> usize {
        self.images * self.channels * self.plane()
    }
}

impl fmt::Display for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Images { images, channels, height, width } = self;
        write!(f, "{images}x{channels}x{height}x{width}")
    }
}

/// The layer shapes of the networks, without duplicates.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    pub(super) convs: Vec<Conv>,
    pub(super) pools: Vec<(Images, pool::Rounding)>,
    pub(super) norms: Vec<Images>,
    pub(super) dropouts: Vec<Images>,
}

impl Shapes {
    pub(super) fn of_networks(images: usize) -> Self {
        let mut shapes = Shapes::default();
        for name in names() {
            let spec = Spec::named(name).expect("a known name");
            let mut extents = spec.input;
            for layer in &spec.layers {
                let [channels, height, width] = extents;
                let here = Images { images, channels, height, width };
                match *layer {
                    Layer::Conv { filters, kernel, padding } => {
                        let shape = ConvShape { channels, height, width, filters, kernel, padding };
                        push(&mut shapes.convs, Conv { shape, images });
                    }
                    Layer::Dense(outputs) => {
                        push(&mut shapes.convs, Conv::dense(images, channels, outputs));
                    }
                    Layer::MaxPool(rounding) => push(&mut shapes.pools, (here, rounding)),
                    Layer::BatchNorm => push(&mut shapes.norms, here),
                    Layer::Dropout(_) => push(&mut shapes.dropouts, here),
                    _ => {}
                }
                extents = layer.output(extents);
            }
        }
        shapes
    }
}

fn push<T: PartialEq>(all: &mut Vec<T>, one: T) {
    if !all.contains(&one) {
        all.push(one);
    }
}

/// A small convolution of odd extents.
pub(super) fn awkward_conv(random: &mut Random) -> Conv {
    let kernel = 1 + 2 * random.below(3);
    let shape = ConvShape {
        channels: 1 + random.below(9),
        height: 5 + random.below(13),
        width: 5 + random.below(13),
        filters: 1 + random.below(70),
        kernel,
        padding: if random.below(2) == 0 { Padding::Same } else { Padding::Valid },
    };
    Conv { shape, images: 1 + random.below(5) }
}

pub(super) fn awkward_images(random: &mut Random) -> Images {
    let [height, width] = [2 + random.below(14), 2 + random.below(14)];
    Images { images: 1 + random.below(5), channels: 1 + random.below(40), height, width }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_networks_have_the_layers_that_they_are_known_for() {
        let shapes = Shapes::of_networks(2);
        let described: Vec<String> = shapes.convs.iter().map(ToString::to_string).collect();
        for expected in ["2x128x28x28, 128 of 5x5 same", "2x6272 to 1024", "2x256x10x10, 512 of 3x3 valid"] {
            assert!(described.iter().any(|shape| shape == expected), "{expected} in {described:?}");
        }
        assert!(
            shapes
                .pools
                .contains(&(Images { images: 2, channels: 128, height: 7, width: 7 }, pool::Rounding::Ceil))
        );
        assert_eq!(shapes.norms.len(), 1);
    }
}
