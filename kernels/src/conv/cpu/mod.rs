//! Convolutions on the CPU, fused with the activation and the pooling that follow them.
//!
//! Images are NHWC: the channels of a pixel are contiguous, so that every kernel works on vectors of channels and no
//! pass transposes anything. Weights keep the contract's layout, \[F, C, K, K\], and are repacked in every step,
//! which is little work compared to using them for a batch.
//!
//! There are two algorithms in f32. [`ConvAlgorithm::choose`] selects one for each layer:
//!
//! - `direct`: sums over the kernel's rows, in register tiles of pixels and filters.
//! - `winograd`: tiles of pixels are transformed, multiplied and transformed back, with 2 to 6 times fewer
//!   multiplications (Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016).
//!
//! A layer with an engine for products of bf16 ([`ConvOptions::engine`]) is computed directly by it (`tiles`), if its shape
//! suits.
//!
//! The selection depends on the shape and the options alone, so a run is reproducible bit for bit.

mod direct;
#[cfg(test)]
mod tests;
mod winograd;

use std::fmt;
use std::str::FromStr;

use super::ConvShape;
use crate::pool::{self, Rounding};
use crate::simd::Simd;
use crate::threads::Threads;
use crate::tile_engine::Engine;

use direct::Direct;
use direct::tiles::{self, TiledDirect};
use winograd::Winograd;

use crate::{DType, Scratch, Storage};

/// The operations fused with a convolution, applied while its outputs are in the cache: `y = pool(activation(conv +
/// bias))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epilogue {
    /// Slope of the activation for negative values (see [`crate::activation`]); `None` for no activation.
    pub slope: Option<f32>,
    /// Max-pooling over windows of 2×2 (see [`crate::pool`]); `None` for no pooling.
    pub pool: Option<Rounding>,
}

/// How a convolution is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvAlgorithm {
    /// By the definition.
    Direct,
    /// F(m×m, K×K): tiles of m×m outputs from (m+K−1)² products for each pair of channels.
    Winograd {
        /// Rows and columns of a tile of outputs in the forward pass, m.
        forward: usize,
        /// The same for the backward passes.
        backward: usize,
    },
    /// By the definition, with products of bf16.
    Tiles(Engine),
}

/// The algorithms that a network may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConvPolicy {
    /// For each layer the one that is expected to be the fastest.
    #[default]
    Auto,
    /// `direct` for all layers.
    Direct,
}

/// What decides on the algorithm of a layer, besides its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions {
    /// The algorithms that are allowed.
    pub policy: ConvPolicy,
    /// What multiplies operands rounded to bf16, where it is faster; `None` if products are those of f32.
    pub engine: Option<Engine>,
    /// The type that images are stored in. What is rounded to 16 bits may be computed with less accuracy.
    pub storage: DType,
}

impl Default for ConvOptions {
    /// Everything in f32.
    fn default() -> Self {
        ConvOptions { policy: ConvPolicy::default(), engine: None, storage: DType::F32 }
    }
}

/// A convolution with its epilogue.
#[derive(Debug)]
pub struct Conv {
    shape: ConvShape,
    epilogue: Epilogue,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Direct(Direct),
    Winograd(Box<Winograd>),
    Tiles(TiledDirect),
}

/// Inputs of the backward pass: operands and result of the last forward pass, and the gradient of the result.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a, E = f32> {
    /// Input, \[N, H, W, C\].
    pub x: &'a [E],
    /// Weights, \[F, C, K, K\]: those of the forward pass.
    pub weights: &'a [f32],
    /// Result, after activation and pooling.
    pub y: &'a [E],
    /// For each element of `y` the position of the maximum in the pooling window; empty without pooling.
    pub chosen: &'a [u8],
    /// Gradient of `y`.
    pub dy: &'a [E],
}

impl Epilogue {
    /// Neither activation nor pooling.
    pub const NONE: Epilogue = Epilogue { slope: None, pool: None };

    /// The shape of the pooling of the outputs, if there is pooling.
    pub(crate) fn pooling(&self, shape: &ConvShape) -> Option<pool::PoolShape> {
        let rounding = self.pool?;
        Some(pool::PoolShape { height: shape.out_height(), width: shape.out_width(), rounding })
    }

    /// Rows and columns of an image of the result.
    pub fn result(&self, shape: &ConvShape) -> (usize, usize) {
        match self.pooling(shape) {
            Some(pool) => (pool.out_height(), pool.out_width()),
            None => (shape.out_height(), shape.out_width()),
        }
    }
}

/// The activation with `slope` for negative values.
#[inline(always)]
fn activate<S: Simd>(simd: S, value: S::F32, slope: S::F32) -> S::F32 {
    simd.select(simd.greater(value, simd.splat(0.0)), value, simd.mul(value, slope))
}

/// The gradient before the activation from the result `y` and its gradient.
#[inline(always)]
fn before_activation<S: Simd>(simd: S, y: S::F32, dy: S::F32, slope: S::F32) -> S::F32 {
    simd.mul(dy, simd.select(simd.greater(y, simd.splat(0.0)), simd.splat(1.0), slope))
}

impl ConvAlgorithm {
    /// The algorithm for `shape`, a function of the arguments alone.
    pub fn choose(shape: &ConvShape, options: ConvOptions) -> ConvAlgorithm {
        let in_f32 = ConvAlgorithm::choose_in_f32(shape, options);
        match options.engine.filter(|_| tiles::suits(shape)) {
            Some(engine) if engine.beats_winograd() || in_f32 == ConvAlgorithm::Direct => {
                ConvAlgorithm::Tiles(engine)
            }
            _ => in_f32,
        }
    }

    fn choose_in_f32(shape: &ConvShape, options: ConvOptions) -> ConvAlgorithm {
        match options.policy {
            ConvPolicy::Auto => {
                let tiles = winograd::tiles(shape, options.storage);
                tiles.map_or(ConvAlgorithm::Direct, |(forward, backward)| ConvAlgorithm::Winograd {
                    forward,
                    backward,
                })
            }
            ConvPolicy::Direct => ConvAlgorithm::Direct,
        }
    }
}

impl fmt::Display for ConvAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConvAlgorithm::Direct => f.write_str("direct"),
            ConvAlgorithm::Winograd { forward, backward } if forward == backward => {
                write!(f, "winograd {forward}x{forward}")
            }
            ConvAlgorithm::Winograd { forward, backward } => {
                write!(f, "winograd {forward}x{forward}, {backward}x{backward}")
            }
            ConvAlgorithm::Tiles(engine) => write!(f, "direct, bf16 by {engine}"),
        }
    }
}

impl FromStr for ConvPolicy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(ConvPolicy::Auto),
            "direct" => Ok(ConvPolicy::Direct),
            _ => Err("it should be auto or direct".to_owned()),
        }
    }
}

impl Conv {
    /// Sets up a convolution of `shape` with its epilogue.
    ///
    /// # Panics
    /// If the kernel does not fit the image.
    pub fn new(shape: ConvShape, epilogue: Epilogue, options: ConvOptions) -> Conv {
        shape.check();
        let kind = match ConvAlgorithm::choose(&shape, options) {
            ConvAlgorithm::Tiles(engine) => Kind::Tiles(TiledDirect::new(shape, epilogue, engine)),
            ConvAlgorithm::Direct => Kind::Direct(Direct::new(shape, epilogue)),
            ConvAlgorithm::Winograd { forward, backward } => {
                Kind::Winograd(Box::new(Winograd::new(shape, epilogue, forward, backward)))
            }
        };
        Conv { shape, epilogue, kind }
    }

    /// The algorithm in use.
    pub fn algorithm(&self) -> ConvAlgorithm {
        match &self.kind {
            Kind::Direct(_) => ConvAlgorithm::Direct,
            Kind::Winograd(winograd) => {
                let (forward, backward) = winograd.tiles();
                ConvAlgorithm::Winograd { forward, backward }
            }
            Kind::Tiles(tiles) => ConvAlgorithm::Tiles(tiles.engine()),
        }
    }

    /// Elements of the result for one image, after pooling.
    pub fn result_len(&self) -> usize {
        let (height, width) = self.epilogue.result(&self.shape);
        height * width * self.shape.filters
    }

    /// Overwrites `y` with the result for the images `x`, and `chosen` with the positions of the maxima in their
    /// windows (2u + v, as long as `y`; empty without pooling).
    ///
    /// # Panics
    /// If lengths do not fit the shape.
    #[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
    pub fn forward<E: Storage>(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        x: &[E],
        weights: &[f32],
        bias: &[f32],
        y: &mut [E],
        chosen: &mut [u8],
    ) {
        E::conv_forward(self, threads, scratch, x, weights, bias, y, chosen);
    }

    #[expect(clippy::too_many_arguments, reason = "those of `forward`")]
    pub(crate) fn forward_as<E: Storage>(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        x: &[E],
        weights: &[f32],
        bias: &[f32],
        y: &mut [E],
        chosen: &mut [u8],
    ) {
        let images = self.images(x.len(), y.len(), chosen.len());
        assert_eq!(weights.len(), self.shape.weights_len(), "weights of a convolution");
        assert_eq!(bias.len(), self.shape.filters, "bias of a convolution");
        match &mut self.kind {
            Kind::Direct(direct) => direct.forward(threads, scratch, images, x, weights, bias, y, chosen),
            Kind::Winograd(winograd) => {
                winograd.forward(threads, scratch, images, x, weights, bias, y, chosen);
            }
            Kind::Tiles(tiles) => tiles.forward(threads, scratch, images, x, weights, bias, y, chosen),
        }
    }

    /// Overwrites `dw` and `db` with the gradients of weights and bias, summed over all images, and `dx`, if given,
    /// with the gradient of the input.
    ///
    /// # Panics
    /// If lengths do not fit the shape.
    pub fn backward<E: Storage>(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        from: Backward<'_, E>,
        dw: &mut [f32],
        db: &mut [f32],
        dx: Option<&mut [E]>,
    ) {
        E::conv_backward(self, threads, scratch, from, dw, db, dx);
    }

    pub(crate) fn backward_as<E: Storage>(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        from: Backward<'_, E>,
        dw: &mut [f32],
        db: &mut [f32],
        dx: Option<&mut [E]>,
    ) {
        let images = self.images(from.x.len(), from.y.len(), from.chosen.len());
        assert_eq!(from.dy.len(), from.y.len(), "gradient of a convolution's result");
        assert_eq!(from.weights.len(), self.shape.weights_len(), "weights of a convolution");
        assert_eq!(dw.len(), self.shape.weights_len(), "gradient of a convolution's weights");
        assert_eq!(db.len(), self.shape.filters, "gradient of a convolution's bias");
        assert!(dx.as_ref().is_none_or(|dx| dx.len() == from.x.len()), "gradient of a convolution's input");
        match &mut self.kind {
            Kind::Direct(direct) => direct.backward(threads, scratch, images, from, dw, db, dx),
            Kind::Winograd(winograd) => winograd.backward(threads, scratch, images, from, dw, db, dx),
            Kind::Tiles(tiles) => tiles.backward(threads, scratch, images, from, dw, db, dx),
        }
    }

    /// Number of images in a batch.
    fn images(&self, x: usize, y: usize, chosen: usize) -> usize {
        let images = x / self.shape.input_len();
        assert_eq!(x, images * self.shape.input_len(), "input of a convolution");
        assert_eq!(y, images * self.result_len(), "result of a convolution");
        assert_eq!(
            chosen,
            if self.epilogue.pool.is_some() { y } else { 0 },
            "positions of the maxima of a convolution's pooling"
        );
        images
    }
}
