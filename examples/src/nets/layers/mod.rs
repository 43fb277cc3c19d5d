//! The kinds of layers, one file each: what a layer is, and its passes on the CPU and on a GPU.
//!
//! A [`Layer`] is an entry of a network's list. There is a trait for each part of its life:
//!
//! 1. [`Definition`]: its output's extents, and its tensors with their names in PyTorch's state dict;
//! 2. [`Operation`]: the layer with its shapes worked out, which is what a stage of the [plan](super::plan) does. A
//!    convolution or a dense layer takes the layers behind it along ([`Epilogue`]);
//! 3. [`OnCpu`] and [`OnGpu`]: the operation with the memory that it alone needs, and its forward and backward passes.
//!
//! A further kind of layer is a file here with its implementations, a variant of [`Layer`] and one of [`CpuLayer`].

mod activation;
mod batch_norm;
mod conv;
mod cpu;
mod dense;
mod dropout;
mod flatten;
mod gelu;
mod gpu;
mod max_pool;

use std::fmt;

use mgpu_kernels::Storage;
use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::conv::Padding;
use mgpu_kernels::conv::cpu::Choice;
use mgpu_kernels::pool::Rounding;

use super::tensors::Tensors;
pub(super) use cpu::{BackwardPass, ForwardPass, OnCpu, StageTensors, Step};
pub use dropout::{DeviceDropout, DropoutKey};
pub(super) use gpu::{WorkspaceNeeds, DevicePass, DeviceStageTensors, DeviceStep, OnGpu, SetUp, SharedWorkspace, Transposed};
pub(super) use max_pool::PoolOp;

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
    /// `x · Φ(x)`, the Gaussian error linear unit in its exact form.
    Gelu,
    /// Maximum over windows of 2×2, stride 2.
    MaxPool(Rounding),
    /// Zeroes each value with this probability while training, and scales the rest.
    Dropout(f32),
    /// Turns the channels of an image into one vector. Moves no data, but counts as a layer in names.
    Flatten,
    /// Fully connected, with this many outputs and a bias for each.
    Dense(usize),
}

impl Layer {
    fn definition(self) -> Box<dyn Definition> {
        match self {
            Layer::Conv { filters, kernel, padding } => Box::new(conv::Conv { filters, kernel, padding }),
            Layer::BatchNorm => Box::new(batch_norm::BatchNorm),
            Layer::Relu => Box::new(activation::Rectifier { slope: 0.0 }),
            Layer::LeakyRelu => Box::new(activation::Rectifier { slope: LEAKY_SLOPE }),
            Layer::Gelu => Box::new(gelu::Gelu),
            Layer::MaxPool(rounding) => Box::new(max_pool::MaxPool { rounding }),
            Layer::Dropout(probability) => Box::new(dropout::Dropout { probability }),
            Layer::Flatten => Box::new(flatten::Flatten),
            Layer::Dense(outputs) => Box::new(dense::Dense { outputs }),
        }
    }

    /// Channels, rows and columns of its output for an input of `extents`.
    ///
    /// # Panics
    /// If a kernel does not fit its image.
    pub fn output(self, extents: [usize; 3]) -> [usize; 3] {
        self.definition().output(extents)
    }

    /// True if it is an activation function that drops about half of its inputs, as a rectifier does.
    pub(super) fn rectifies(self) -> bool {
        self.definition().rectifies()
    }

    /// As [`Definition::plan`].
    pub(super) fn plan(self, tensors: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>> {
        self.definition().plan(tensors, context)
    }
}

/// Extents of the images in memory. Flattening moves no data: a flattened image is still one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Image {
    pub(super) channels: usize,
    /// Rows times columns.
    pub(super) plane: usize,
}

impl Image {
    pub(super) fn of([channels, height, width]: [usize; 3]) -> Self {
        Image { channels, plane: height * width }
    }
}

/// Where a layer stands in its network.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerContext {
    /// Its index in the spec, which names its tensors.
    pub(super) layer: usize,
    /// Channels, rows and columns of its input.
    pub(super) extents: [usize; 3],
    /// The input as it lies in memory.
    pub(super) image: Image,
    /// Whether a rectifier follows.
    pub(super) rectified: bool,
}

/// What a kind of layer is.
trait Definition {
    /// As [`Layer::output`].
    fn output(&self, extents: [usize; 3]) -> [usize; 3] {
        extents
    }

    /// As [`Layer::rectifies`].
    fn rectifies(&self) -> bool {
        false
    }

    /// Adds its tensors and works out what it does at its place; `None` if that is nothing.
    ///
    /// # Panics
    /// If it does not fit its input.
    fn plan(&self, tensors: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>>;
}

/// A layer with everything about its shape but the number of images, and with the layers that it takes along.
pub(super) trait Operation: fmt::Debug + Send + Sync {
    /// What it does, in words.
    fn describe(&self) -> String;

    /// Products of its definition in the forward pass of one image. Sums and comparisons do not count.
    fn multiply_adds(&self) -> usize {
        0
    }

    /// The tensor of its weights, if it has parameters. That of the bias is the next one.
    fn weight(&self) -> Option<usize> {
        None
    }

    /// Which of its passes replace values where they lie.
    fn in_place(&self) -> InPlace {
        InPlace::Neither
    }

    /// True if it works on vectors alone: images are flattened for it, and its weights count features as \[C, H, W\].
    fn takes_vectors(&self) -> bool {
        false
    }

    /// What the operation before it needs to know to take it along, if any can.
    fn as_epilogue(&self) -> Option<Epilogue> {
        None
    }

    /// Takes the operation behind it along; false if it cannot.
    fn fuse(&mut self, _epilogue: Epilogue) -> bool {
        false
    }

    /// How the elements of its weights lie on a GPU, if not as on the CPU. `flattened` is the image that its input was.
    fn transposed(&self, _flattened: Option<Image>) -> Option<Transposed> {
        None
    }

    /// Allocates what it needs on the CPU for batches of up to `max_batch` images. `choice` is of convolutions.
    fn on_cpu(&self, max_batch: usize, choice: Choice) -> CpuLayer;

    /// Allocates what it needs on a GPU, and chooses its kernels.
    ///
    /// # Errors
    /// If memory is short, or kernels do not compile.
    fn on_gpu(&self, set_up: &SetUp<'_>) -> mgpu::Result<Box<dyn OnGpu>>;
}

/// Which passes of an operation replace values where they lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InPlace {
    Neither,
    /// The gradient of the input takes the place of the output's.
    Backward,
    /// And the output that of the input. The backward pass makes do with the output.
    Both,
}

/// An operation that the one before it can take along.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Epilogue {
    /// The rectified linear unit with a slope for negative values.
    Rectifier {
        slope: f32,
    },
    MaxPool(PoolOp),
}

/// What computes an operation on the CPU.
#[derive(Debug)]
pub(super) enum CpuLayer {
    Rectifier(activation::Rectifier),
    BatchNorm(batch_norm::Cpu),
    Conv(Box<conv::Cpu>),
    Dense(dense::Cpu),
    Dropout(dropout::DropoutOp),
    Gelu(gelu::Gelu),
    MaxPool(max_pool::Cpu),
}

impl CpuLayer {
    /// Its passes on images, which are kept as `T`.
    pub(super) fn on_images<T: Storage>(&mut self) -> &mut dyn OnCpu<T> {
        match self {
            CpuLayer::Rectifier(layer) => layer,
            CpuLayer::BatchNorm(layer) => layer,
            CpuLayer::Conv(layer) => layer.as_mut(),
            CpuLayer::Dense(_) => panic!("a dense layer takes vectors"),
            CpuLayer::Dropout(layer) => layer,
            CpuLayer::Gelu(layer) => layer,
            CpuLayer::MaxPool(layer) => layer,
        }
    }

    /// Its passes on vectors.
    pub(super) fn on_vectors(&mut self) -> &mut dyn OnCpu<f32> {
        match self {
            CpuLayer::Dense(layer) => layer,
            layer => layer.on_images(),
        }
    }

    /// What its kernel is called.
    pub(super) fn kernel(&self) -> String {
        match self {
            CpuLayer::Conv(layer) => layer.algorithm(),
            CpuLayer::Dense(_) => "product".to_owned(),
            _ => "pass".to_owned(),
        }
    }

    /// True if its kernel is one of several that would do.
    pub(super) fn is_chosen(&self) -> bool {
        matches!(self, CpuLayer::Conv(_))
    }
}
