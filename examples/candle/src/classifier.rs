//! A small convolutional network for digits, written with candle.

use candle_core::{D, Result, Tensor};
use candle_nn::{Conv2d, Linear, Module, VarBuilder, conv2d, linear, loss};
use mgpu_examples::data::{CLASSES, Dataset, IMAGE_LEN, SIDE};

/// Two convolutions of 5×5, each with ReLU and 2×2 max pooling, and a dense layer: 28 → 24 → 12 → 8 → 4 pixels a side.
#[derive(Debug)]
pub struct Classifier {
    first: Conv2d,
    second: Conv2d,
    dense: Linear,
}

impl Classifier {
    /// Creates the network's variables in `builder`, with random initial values.
    ///
    /// # Errors
    /// As candle's.
    pub fn new(builder: VarBuilder<'_>) -> Result<Self> {
        Ok(Classifier {
            first: conv2d(1, 8, 5, Default::default(), builder.pp("first"))?,
            second: conv2d(8, 16, 5, Default::default(), builder.pp("second"))?,
            dense: linear(16 * 4 * 4, CLASSES, builder.pp("dense"))?,
        })
    }

    /// The mean cross entropy over `samples` of `data`, and the number of correct predictions (u32), on the device of
    /// the variables.
    ///
    /// # Errors
    /// As candle's.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn loss(&self, data: &Dataset, samples: &[u32]) -> Result<(Tensor, Tensor)> {
        let (mut images, mut labels) = (vec![0.0; samples.len() * IMAGE_LEN], vec![0; samples.len()]);
        data.gather(samples, &mut images, &mut labels);
        let labels: Vec<u32> = labels.into_iter().map(u32::from).collect();
        let device = self.dense.weight().device();
        let labels = Tensor::from_vec(labels, samples.len(), device)?;
        let logits = self.forward(&Tensor::from_vec(images, (samples.len(), 1, SIDE, SIDE), device)?)?;
        let right = logits.argmax(D::Minus1)?.eq(&labels)?.to_dtype(candle_core::DType::U32)?.sum_all()?;
        Ok((loss::cross_entropy(&logits, &labels)?, right))
    }
}

impl Module for Classifier {
    /// Images [N, 1, 28, 28] to logits [N, 10].
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let first = self.first.forward(images)?.relu()?.max_pool2d(2)?;
        let second = self.second.forward(&first)?.relu()?.max_pool2d(2)?;
        self.dense.forward(&second.flatten_from(1)?)
    }
}
