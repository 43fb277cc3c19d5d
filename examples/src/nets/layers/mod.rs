//! The kinds of layers, one file each: definition, and passes on the CPU and on a GPU.
//!
//! A [`Layer`] is an entry of a network's list. There is a trait for each stage of its use:
//!
//! 1. [`Definition`]: the shape of its output, and its tensors with their names in PyTorch's state dict;
//! 2. [`Operation`]: the layer with all shapes known, as a stage of the [plan](super::plan). A convolution or a dense
//!    layer fuses following layers ([`Epilogue`]);
//! 3. [`OnCpu`] and [`OnGpu`]: the operation with its private memory, and its forward and backward passes.
//!
//! A new kind of layer is a file here with its implementations, a variant of [`Layer`] and one of [`CpuLayer`].

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

use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::conv::Padding;
use mgpu_kernels::conv::cpu::ConvPolicy;
use mgpu_kernels::pool::Rounding;
use mgpu_kernels::tile_engine::Engine;
use mgpu_kernels::{DType, Storage};

use super::tensors::Tensors;
pub(super) use cpu::{BackwardPass, ForwardPass, OnCpu, PassState, StageTensors, Step};
pub use dropout::{DeviceDropout, DropoutKey};
pub(super) use gpu::{
    BackwardEnd, BatchPlace, DataBatch, DevicePass, DeviceStageTensors, DeviceStep, Neighbourhood, OnGpu,
    SetUp, SharedWorkspace, Transposed, WorkspaceNeeds,
};
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
    /// Normalisation of each channel over the global batch, with a learned scale and shift.
    BatchNorm,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0.2 x)`.
    LeakyRelu,
    /// `x · Φ(x)`, the exact Gaussian error linear unit.
    Gelu,
    /// Maximum over windows of 2×2, stride 2.
    MaxPool(Rounding),
    /// In training, zeroes each value with this probability and scales the rest.
    Dropout(f32),
    /// Flattens an image into a vector. Moves no data, but counts as a layer in tensor names.
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

    /// Channels, rows and columns of its output for an input of shape `extents`.
    ///
    /// # Panics
    /// If a kernel does not fit its image.
    pub fn output(self, extents: [usize; 3]) -> [usize; 3] {
        self.definition().output(extents)
    }

    /// True for activation functions that zero about half of their inputs, like a rectifier.
    pub(super) fn rectifies(self) -> bool {
        self.definition().rectifies()
    }

    /// As [`Definition::plan`].
    pub(super) fn plan(self, tensors: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>> {
        self.definition().plan(tensors, context)
    }
}

/// The shape of images in memory. Flattening does not change it.
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

/// The context of a layer in its network.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerContext {
    /// Its index in the spec, which is part of its tensors' names.
    pub(super) layer: usize,
    /// Channels, rows and columns of its input.
    pub(super) extents: [usize; 3],
    /// The input as stored in memory.
    pub(super) image: Image,
    /// Whether a rectifier follows.
    pub(super) rectified: bool,
}

/// The definition of a kind of layer.
trait Definition {
    /// As [`Layer::output`].
    fn output(&self, extents: [usize; 3]) -> [usize; 3] {
        extents
    }

    /// As [`Layer::rectifies`].
    fn rectifies(&self) -> bool {
        false
    }

    /// Adds its tensors and returns its operation in `context`; `None` if there is nothing to compute.
    ///
    /// # Panics
    /// If it does not fit its input.
    fn plan(&self, tensors: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>>;
}

/// A layer with all shapes known except the number of images, including the layers fused into it.
pub(super) trait Operation: fmt::Debug + Send + Sync {
    /// A description in words.
    fn describe(&self) -> String;

    /// Multiplications (with additions) of its definition in the forward pass of one image. Sums and comparisons do
    /// not count.
    fn multiply_adds(&self) -> usize {
        0
    }

    /// The index of its weight tensor, if it has parameters. The bias is the next tensor.
    fn weight(&self) -> Option<usize> {
        None
    }

    /// Which of its passes work in place.
    fn in_place(&self) -> InPlace {
        InPlace::Neither
    }

    /// True if it works on vectors only: images are flattened first, and its weights number features in \[C, H, W\]
    /// order.
    fn takes_vectors(&self) -> bool {
        false
    }

    /// What the preceding operation needs to fuse this one, if that is possible.
    fn as_epilogue(&self) -> Option<Epilogue> {
        None
    }

    /// Fuses the following operation; false if that is impossible.
    fn fuse(&mut self, _epilogue: Epilogue) -> bool {
        false
    }

    /// The layout of its weights on a GPU, if it differs from the CPU. `flattened` is the image that its input was.
    fn transposed(&self, _flattened: Option<Image>) -> Option<Transposed> {
        None
    }

    /// Chooses its kernel on the CPU, and allocates the kernel's memory.
    fn on_cpu(&self, kernels: CpuKernels) -> CpuLayer;

    /// Allocates what its backward pass on the CPU needs besides input and output, for batches of up to `max_batch`
    /// images.
    fn pass_state(&self, _max_batch: usize) -> PassState {
        PassState::default()
    }

    /// Allocates its memory on a GPU, and chooses its kernels.
    ///
    /// # Errors
    /// If memory is short, or kernels do not compile.
    fn on_gpu(&self, set_up: &SetUp<'_>) -> mgpu::Result<Box<dyn OnGpu>>;
}

/// What decides the kernel of a layer on the CPU, besides its shape.
#[derive(Debug, Clone, Copy)]
pub(super) struct CpuKernels {
    /// The choice among the algorithms of a convolution.
    pub(super) conv: ConvPolicy,
    /// What computes products, if operands may be rounded to bf16.
    pub(super) engine: Option<Engine>,
    /// The type that activations are stored in.
    pub(super) storage: DType,
}

/// Which passes of an operation work in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InPlace {
    Neither,
    /// The gradient of the input overwrites that of the output.
    Backward,
    /// Also, the output overwrites the input. The backward pass needs only the output.
    Both,
}

/// An operation that the preceding one can fuse.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Epilogue {
    /// The rectified linear unit, with a slope for negative values.
    Rectifier {
        slope: f32,
    },
    MaxPool(PoolOp),
}

/// An operation on the CPU.
#[derive(Debug)]
pub(super) enum CpuLayer {
    Rectifier(activation::Rectifier),
    BatchNorm(batch_norm::Cpu),
    Conv(Box<conv::Cpu>),
    Dense(dense::Cpu),
    Dropout(dropout::DropoutOp),
    Gelu(gelu::Gelu),
    MaxPool(PoolOp),
}

impl CpuLayer {
    /// Its passes on images, stored as `T`.
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

    /// The name of its kernel.
    pub(super) fn kernel(&self) -> String {
        match self {
            CpuLayer::Conv(layer) => layer.algorithm(),
            CpuLayer::Dense(layer) => {
                layer.engine().map_or("product".to_owned(), |engine| format!("product, bf16 by {engine}"))
            }
            _ => "pass".to_owned(),
        }
    }

    /// True if its kernel was chosen among several.
    pub(super) fn is_chosen(&self) -> bool {
        match self {
            CpuLayer::Conv(_) => true,
            CpuLayer::Dense(layer) => layer.engine().is_some(),
            _ => false,
        }
    }
}
