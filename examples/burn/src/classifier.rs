//! A small convolutional network for digits, written with burn.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Int, Tensor, TensorData};
use mgpu_examples::data::{CLASSES, Dataset, IMAGE_LEN, SIDE};

/// Two convolutions of 5×5, each with ReLU and 2×2 max pooling, and a dense layer: 28 → 24 → 12 → 8 → 4 pixels a side.
#[derive(Module, Debug)]
pub struct Classifier<B: Backend> {
    first: Conv2d<B>,
    second: Conv2d<B>,
    pool: MaxPool2d,
    dense: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    /// Creates the network on `device`, with random initial values.
    pub fn new(device: &B::Device) -> Self {
        Classifier {
            first: Conv2dConfig::new([1, 8], [5, 5]).init(device),
            second: Conv2dConfig::new([8, 16], [5, 5]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dense: LinearConfig::new(16 * 4 * 4, CLASSES).init(device),
        }
    }

    /// Images [N, 1, 28, 28] to logits [N, 10].
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let first = self.pool.forward(relu(self.first.forward(images)));
        let second = self.pool.forward(relu(self.second.forward(first)));
        self.dense.forward(second.flatten(1, 3))
    }

    /// The mean cross entropy over `samples` of `data`, and the number of correct predictions.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn loss(&self, data: &Dataset, samples: &[u32], device: &B::Device) -> (Tensor<B, 1>, u32) {
        let (mut images, mut labels) = (vec![0.0; samples.len() * IMAGE_LEN], vec![0; samples.len()]);
        data.gather(samples, &mut images, &mut labels);
        let labels: Vec<i64> = labels.into_iter().map(i64::from).collect();
        let labels: Tensor<B, 1, Int> = Tensor::from_data(TensorData::new(labels, [samples.len()]), device);
        let images = TensorData::new(images, [samples.len(), 1, SIDE, SIDE]);
        let logits = self.forward(Tensor::from_data(images, device));
        let predictions = logits.clone().argmax(1).flatten(0, 1);
        let right: i64 = predictions.equal(labels.clone()).int().sum().into_scalar().elem();
        (CrossEntropyLossConfig::new().init(device).forward(logits, labels), right as u32)
    }
}
