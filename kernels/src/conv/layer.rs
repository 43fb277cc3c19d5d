//! One layer: its extents, its library, and how either computes a pass.

use super::library_layer::{LibraryLayer, Operands};
use super::{ConvShape, cublaslt, cuda, cudnn, partition};
use crate::cuda::algorithm::{Form, LibraryAlgorithm, LibraryName};
use crate::cuda::elements::check;
use crate::cuda::{Counters, Pass, Result, Stream, View};
use crate::{DType, Precision, activation};

/// A layer for batches of up to `images`, and its library if that is found.
pub(super) struct Layer {
    pub(super) shape: ConvShape,
    pub(super) images: usize,
    pub(super) precision: Precision,
    pub(super) slope: f32,
    pub(super) library: Option<Box<dyn LibraryLayer>>,
    /// For this crate's own kernels.
    pub(super) counters: Counters,
    /// For the gradient of the input, which may be computed beside those of the parameters.
    input_counters: Counters,
}

impl std::fmt::Display for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let &Layer { shape, images, .. } = self;
        let ConvShape { channels, height, width, filters, kernel, .. } = shape;
        if shape.is_dense() {
            write!(f, "dense {filters} of {channels}, {images} samples")
        } else {
            write!(f, "conv {filters} {kernel}x{kernel} of {channels}x{height}x{width}, {images} images")
        }
    }
}

impl Layer {
    /// Without a library.
    ///
    /// # Errors
    /// If memory is short.
    pub(super) fn new(
        stream: &Stream,
        shape: ConvShape,
        images: usize,
        precision: Precision,
        slope: f32,
    ) -> Result<Self> {
        let [counters, input_counters] = [Counters::new(stream.device())?, Counters::new(stream.device())?];
        Ok(Layer { shape, images, precision, slope, library: None, counters, input_counters })
    }

    /// True if a library may be faster than this crate's kernels. cuDNN spends most of its time on rearranging images
    /// of one channel.
    pub(super) fn suits_libraries(&self) -> bool {
        self.images > 0 && (self.shape.channels > 1 || self.shape.is_dense())
    }

    pub(super) fn library_name(&self) -> LibraryName {
        if self.shape.is_dense() { LibraryName::CublasLt } else { LibraryName::CuDnn }
    }

    /// Describes the layer to its library.
    ///
    /// # Errors
    /// If the library is not found, or refuses the description.
    pub(super) fn open_library(&mut self, stream: &Stream) -> Result<()> {
        let &mut Layer { ref shape, images, precision, slope, .. } = self;
        let device = stream.device();
        self.library = Some(match self.library_name() {
            LibraryName::CublasLt => {
                Box::new(cublaslt::MatmulPlan::new(device, shape, images, precision, slope)?)
            }
            LibraryName::CuDnn => Box::new(cudnn::CudnnPlan::new(device, shape, images, precision, slope)?),
        });
        Ok(())
    }

    /// Bytes of workspace that this crate's own kernels need.
    pub(super) fn own_workspace(&self) -> usize {
        let &Layer { ref shape, images, precision, .. } = self;
        // The maximum over all batch sizes: the gradients of fewer images are cut into slices in another way.
        let gradients =
            (1..=images).map(|images| partition::gradient_workspace_bytes(shape, images, precision));
        let forward = partition::forward_workspace_bytes(shape, images, precision);
        gradients.fold(forward.max(self.input_workspace()), usize::max)
    }

    /// Bytes of workspace that this crate's kernel for the gradient of the input needs.
    pub(super) fn input_workspace(&self) -> usize {
        partition::input_workspace_bytes(&self.shape, self.images, self.precision)
    }

    /// The workspace of this crate's own kernels, but for the gradient of the input.
    pub(super) fn workspace<'a>(&'a self, sums: View<'a>) -> cuda::Workspace<'a> {
        cuda::Workspace { sums, counters: self.counters.view(), batch: self.images }
    }

    /// The workspace of the gradient of the input. If other kernels run at the same time, `sums` must not be theirs.
    pub(super) fn workspace_of_input<'a>(&'a self, sums: View<'a>) -> cuda::Workspace<'a> {
        cuda::Workspace { sums, counters: self.input_counters.view(), batch: self.images }
    }

    /// Computes a pass with a library's algorithm, or with this crate's kernel if there is none; the forward pass
    /// with bias and activation.
    #[track_caller]
    pub(super) fn run(
        &self,
        algorithm: Option<&LibraryAlgorithm>,
        stream: &Stream,
        images: usize,
        operands: &Operands<'_>,
    ) -> Result<()> {
        let activated = self.compute(algorithm, stream, images, operands)?;
        match operands.bias {
            Some(bias) if !activated => activation::cuda::bias(stream, self.slope, bias, operands.result),
            _ => Ok(()),
        }
    }

    /// As [`run`](Self::run), but returns false if bias and activation still have to be applied.
    #[track_caller]
    pub(super) fn compute(
        &self,
        algorithm: Option<&LibraryAlgorithm>,
        stream: &Stream,
        images: usize,
        operands: &Operands<'_>,
    ) -> Result<bool> {
        let &Layer { ref shape, precision, slope, .. } = self;
        let (Some(library), Some(algorithm)) = (&self.library, algorithm) else {
            let Operands { pass, factors: [from, by], result: to, bias, workspace } = *operands;
            match pass {
                Pass::Forward => {
                    let bias = bias.expect("a forward pass has a bias");
                    let workspace = self.workspace(workspace);
                    cuda::forward(stream, shape, images, precision, from, by, bias, slope, to, &workspace)
                }
                Pass::BackwardInput => {
                    let workspace = self.workspace_of_input(workspace);
                    cuda::backward_input(stream, shape, images, precision, from, by, to, &workspace)
                }
                Pass::BackwardWeights => {
                    let workspace = self.workspace(workspace);
                    cuda::backward_weights(stream, shape, images, precision, from, by, &workspace, to, None)
                }
            }?;
            return Ok(true);
        };
        let dtype = precision.storage();
        let x = ("a layer's input or its gradient", dtype, images * shape.input_len());
        let y = ("a layer's output or its gradient", dtype, images * shape.output_len());
        let w = ("a layer's weights", dtype, shape.weights_len());
        let dw = ("the gradient of a layer's weights", DType::F32, shape.weights_len());
        let expected = match operands.pass {
            Pass::Forward => [x, w, y],
            Pass::BackwardInput => [w, y, x],
            Pass::BackwardWeights => [x, y, dw],
        };
        for ((what, dtype, len), view) in expected.into_iter().zip(operands.views()) {
            check(what, view, dtype, len);
        }
        if let Some(bias) = operands.bias {
            check("a layer's bias", bias, DType::F32, shape.filters);
        }
        library.run(stream, algorithm, operands)?;
        Ok(algorithm.form == Form::Fused)
    }
}
