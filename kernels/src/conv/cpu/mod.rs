//! Convolutions on the CPU, with the activation and the pooling that follow them.
//!
//! Images are NHWC here: the channels of a pixel lie together, so that every kernel works on vectors of channels and no
//! pass transposes anything. Weights stay as the contract says, \[F, C, K, K\]: they are repacked in every step, which is
//! little work beside using them for a batch.
//!
//! Two algorithms, chosen for each layer by [`Algorithm::choose`]:
//!
//! - `direct`: sums over the kernel's rows, by register tiles of pixels and filters.
//! - `winograd`: tiles of pixels are transformed, multiplied and transformed back, with 2 to 6 times fewer
//!   multiplications (Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016).
//!
//! Which one depends on the shape alone, so a run repeats bit for bit.

mod direct;
#[cfg(test)]
mod tests;
mod winograd;

use std::fmt;
use std::str::FromStr;

use super::Shape;
use crate::pool::{self, Rounding};
use crate::threads::Threads;

use direct::Direct;
use winograd::Winograd;

use crate::{Scratch, Storage};

/// What follows a convolution and is made with it, while its outputs are at hand: `y = pool(activation(conv + bias))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tail {
    /// Slope of the activation for negative values (see [`crate::activation`]); `None` for no activation.
    pub slope: Option<f32>,
    /// Max-pooling over windows of 2×2 (see [`crate::pool`]); `None` for none.
    pub pool: Option<Rounding>,
}

/// How a convolution is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// By its definition.
    Direct,
    /// F(m×m, K×K): tiles of m×m outputs from (m+K−1)² products for each pair of channels.
    Winograd {
        /// Rows and columns of a tile of outputs in the forward pass, m.
        forward: usize,
        /// The same in the backward passes.
        backward: usize,
    },
}

/// Which algorithms a network may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// For each layer what is expected to be the fastest.
    #[default]
    Auto,
    /// `direct` for all.
    Direct,
}

/// A convolution with what follows it.
#[derive(Debug)]
pub struct Conv {
    shape: Shape,
    tail: Tail,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Direct(Direct),
    Winograd(Box<Winograd>),
}

/// What the backward pass starts from: all of the last forward pass, and the gradient of its result.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a, E = f32> {
    /// Input, \[N, H, W, C\].
    pub x: &'a [E],
    /// Weights, \[F, C, K, K\]: those of the forward pass.
    pub weights: &'a [f32],
    /// Result, after activation and pooling.
    pub y: &'a [E],
    /// For each element of `y` its place in the pooling window; empty without pooling.
    pub chosen: &'a [u8],
    /// Gradient of `y`.
    pub dy: &'a [E],
}

impl Tail {
    /// Nothing follows.
    pub const NONE: Tail = Tail { slope: None, pool: None };

    /// The pooling of `shape`'s outputs.
    pub(crate) fn pooling(&self, shape: &Shape) -> Option<pool::Shape> {
        let rounding = self.pool?;
        Some(pool::Shape { height: shape.out_height(), width: shape.out_width(), rounding })
    }

    /// Rows and columns of an image of the result.
    pub fn result(&self, shape: &Shape) -> (usize, usize) {
        match self.pooling(shape) {
            Some(pool) => (pool.out_height(), pool.out_width()),
            None => (shape.out_height(), shape.out_width()),
        }
    }
}

impl Algorithm {
    /// What `shape` is computed by, a matter of the shape alone.
    pub fn choose(shape: &Shape, choice: Choice) -> Algorithm {
        match choice {
            Choice::Auto => {
                let tiles = winograd::tiles(shape);
                tiles.map_or(Algorithm::Direct, |(forward, backward)| Algorithm::Winograd {
                    forward,
                    backward,
                })
            }
            Choice::Direct => Algorithm::Direct,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Algorithm::Direct => f.write_str("direct"),
            Algorithm::Winograd { forward, backward } if forward == backward => {
                write!(f, "winograd {forward}x{forward}")
            }
            Algorithm::Winograd { forward, backward } => {
                write!(f, "winograd {forward}x{forward}, {backward}x{backward}")
            }
        }
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Choice::Auto),
            "direct" => Ok(Choice::Direct),
            _ => Err("it should be auto or direct".to_owned()),
        }
    }
}

impl Conv {
    /// Gets ready to compute convolutions of `shape` and what follows them.
    ///
    /// # Panics
    /// If the kernel does not fit the image.
    pub fn new(shape: Shape, tail: Tail, choice: Choice) -> Conv {
        shape.check();
        let kind = match Algorithm::choose(&shape, choice) {
            Algorithm::Direct => Kind::Direct(Direct::new(shape, tail)),
            Algorithm::Winograd { forward, backward } => {
                Kind::Winograd(Box::new(Winograd::new(shape, tail, forward, backward)))
            }
        };
        Conv { shape, tail, kind }
    }

    /// How it is computed.
    pub fn algorithm(&self) -> Algorithm {
        match &self.kind {
            Kind::Direct(_) => Algorithm::Direct,
            Kind::Winograd(winograd) => {
                let (forward, backward) = winograd.tiles();
                Algorithm::Winograd { forward, backward }
            }
        }
    }

    /// Elements of the result for one image: channels last, after pooling.
    pub fn result_len(&self) -> usize {
        let (height, width) = self.tail.result(&self.shape);
        height * width * self.shape.filters
    }

    /// Overwrites `y` with the result for the images `x`, and `chosen` with the places of the maxima in their windows
    /// (2u + v, as long as `y`; empty without pooling).
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
        let images = self.images(x.len(), y.len(), chosen.len());
        assert_eq!(weights.len(), self.shape.weights_len(), "weights of a convolution");
        assert_eq!(bias.len(), self.shape.filters, "bias of a convolution");
        match &mut self.kind {
            Kind::Direct(direct) => direct.forward(threads, scratch, images, x, weights, bias, y, chosen),
            Kind::Winograd(winograd) => {
                winograd.forward(threads, scratch, images, x, weights, bias, y, chosen);
            }
        }
    }

    /// Overwrites `dw` and `db` with the gradients of weights and bias, summed over all images, and `dx` with that of the
    /// input if it is asked for.
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
        let images = self.images(from.x.len(), from.y.len(), from.chosen.len());
        assert_eq!(from.dy.len(), from.y.len(), "gradient of a convolution's result");
        assert_eq!(from.weights.len(), self.shape.weights_len(), "weights of a convolution");
        assert_eq!(dw.len(), self.shape.weights_len(), "gradient of a convolution's weights");
        assert_eq!(db.len(), self.shape.filters, "gradient of a convolution's bias");
        assert!(dx.as_ref().is_none_or(|dx| dx.len() == from.x.len()), "gradient of a convolution's input");
        match &mut self.kind {
            Kind::Direct(direct) => direct.backward(threads, scratch, images, from, dw, db, dx),
            Kind::Winograd(winograd) => winograd.backward(threads, scratch, images, from, dw, db, dx),
        }
    }

    /// Number of images in a batch.
    fn images(&self, x: usize, y: usize, chosen: usize) -> usize {
        let images = x / self.shape.input_len();
        assert_eq!(x, images * self.shape.input_len(), "input of a convolution");
        assert_eq!(y, images * self.result_len(), "result of a convolution");
        assert_eq!(
            chosen,
            if self.tail.pool.is_some() { y } else { 0 },
            "choices of a convolution's pooling"
        );
        images
    }
}
