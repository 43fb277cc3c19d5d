//! Convolutions by cuDNN, if it is installed.
//!
//! A [`CudnnPlan`] describes one layer to the library: tensors and filters have the channel as the fastest index, as
//! everywhere on the GPU. When the layer is set up, the library ranks its algorithms by their expected speed, and the
//! first deterministic ones become candidates of autotuning ([`crate::cuda::autotune`]). (The library could time all
//! its algorithms itself, but on an H100 some take a hundred times as long as the best, seconds for a layer.) A pass
//! is one call of the library; it allocates nothing and can be captured.
//!
//! - *Precision* is the descriptor's math type. `FMA` forbids tensor cores for f32, which the default permits with
//!   operands rounded to TF32. "Allow conversion" is never used: it would round f32 to half precision. Only the
//!   numbers of algorithms are taken from the library's ranking, and every run uses the layer's own math type.
//! - *Bias and activation* are computed with the convolution in [`Form::Fused`]. The library documents that for ReLU
//!   with all algorithms, and for no activation with a single one. It has no leaky ReLU. [`Form::Plain`] leaves both
//!   to the caller. With bfloat16 images the bias has to be bfloat16 as well, so it is rounded to the workspace.
//! - *The gradient of the weights* from bfloat16 operands is needed in f32. The library documents a bfloat16 result
//!   only, so both are candidates: [`Form::Plain`] writes f32; [`Form::Narrow`] writes bfloat16 to the workspace and
//!   widens it, with one more rounding, to 8 bits, before the sum over ranks. (PyTorch's autocast rounds there too.)
//!   The latter is tried only if no algorithm for the former works, as on an H100 with cuDNN 9.14, or if
//!   [`AutotuneOptions`](crate::cuda::AutotuneOptions) ask for it. For large batches the kernel that the library
//!   selects can be several times slower than for smaller ones, so a batch in parts is a candidate too; the gradients
//!   of the parts are added up in f32.
//! - *Transposed convolution*: a convolution is the gradient of the input of another one whose weights are transposed
//!   and rotated by 180°, and that gradient is a convolution. The library's kernels for both are not equally fast, so
//!   [`Form::Transposed`], which first flips the weights into the workspace, is a candidate as well.
//!
//! # cuDNN's legacy API
//!
//! The functions used are the library's older ones, which version 9 marks as deprecated but still has. A version
//! without them is not an error: the layer then uses this crate's kernels.
//!
//! Its newer interface describes a graph of operations, for which the library proposes *engines*. It would give
//! - epilogues that the older functions lack: a bias in f32 with bfloat16 images, leaky ReLU, the gradient of ReLU
//!   fused with a backward pass;
//! - more kernels: with channels last the older functions reach one or two algorithms for each pass, each of which
//!   selects its kernel by rules of its own, while engines with their knobs can be benchmarked one by one; and kernels
//!   that are compiled at run time;
//! - a gradient of the weights in f32 from bfloat16 operands, if an engine offers it.
//!
//! It costs a second description of every layer, several hundred lines of attributes by number, and a first call that
//! compiles for seconds. Whether it is worth that is undecided until `gpu_check --layers` has run on a GPU: its rows
//! say how far the fastest candidate is from the bound, and how much of a forward pass is bias and activation
//! (`fused` beside `plain`). A layer at half of its bound or less, in a network whose time it dominates, would decide
//! for engines; a difference between `fused` and `plain` in bfloat16 for epilogues.

mod library;

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnActivationMode_t as Activation, cudnnConvolutionMode_t as Mode, cudnnDataType_t as DataType,
    cudnnMathType_t as Math, cudnnNanPropagation_t as Nan, cudnnTensorFormat_t as Format,
};

use library::{Address, AlgorithmPerf, Convolve, Descriptor, Handle, Rank, Raw, WorkspaceSize};

use super::ConvShape;
use super::library_layer::{LibraryLayer, Operands};
use crate::Precision;
use crate::cuda::algorithm::{Form, LibraryAlgorithm};
use crate::cuda::autotune::{Note, Pass};
use crate::cuda::trial::Candidate;
use crate::cuda::{Device, Error, Result, Stream, View};
use crate::{DType, arena};

/// The library's algorithm for a fused bias without an activation.
const IMPLICIT_PRECOMPUTED_GEMM: u32 = 1;
/// Maximum number of algorithms of a pass that are benchmarked.
const MAX_CANDIDATES: usize = 3;
/// Numbers of parts into which a batch is split, and the minimum number of images of a part.
const PARTS: [usize; 3] = [2, 4, 8];
const MIN_PART_IMAGES: usize = 64;

/// One layer, described to the library.
pub(super) struct CudnnPlan {
    handle: Arc<Handle>,
    precision: Precision,
    slope: f32,
    x: Descriptor,
    y: Descriptor,
    w: Descriptor,
    /// The weights' gradient, in f32.
    dw: Descriptor,
    bias: Descriptor,
    convolution: Descriptor,
    activation: Descriptor,
    /// For each number of parts the descriptors of images and outputs of a part, for the gradient of the weights.
    parts: Vec<(usize, [Descriptor; 2])>,
    /// Weights and convolution of [`Form::Transposed`].
    flipped: (Descriptor, Descriptor),
    shape: ConvShape,
}

// SAFETY: descriptors are only read after they are set.
unsafe impl Send for CudnnPlan {}
// SAFETY: as above.
unsafe impl Sync for CudnnPlan {}

impl CudnnPlan {
    /// Describes a layer for batches of `images`, whose activation has `slope` for negative values.
    ///
    /// # Errors
    /// If the library is not found, or refuses the description.
    pub(super) fn new(
        device: &Arc<Device>,
        shape: &ConvShape,
        images: usize,
        precision: Precision,
        slope: f32,
    ) -> Result<Self> {
        let handle = Handle::for_device(device)?;
        let functions = &handle.functions;
        let (storage, math) = match precision {
            Precision::F32 => (DataType::CUDNN_DATA_FLOAT, Math::CUDNN_FMA_MATH),
            Precision::Tf32 => (DataType::CUDNN_DATA_FLOAT, Math::CUDNN_DEFAULT_MATH),
            Precision::Bf16 => (DataType::CUDNN_DATA_BFLOAT16, Math::CUDNN_TENSOR_OP_MATH),
            Precision::F16 => (DataType::CUDNN_DATA_HALF, Math::CUDNN_TENSOR_OP_MATH),
        };
        let nhwc = Format::CUDNN_TENSOR_NHWC;
        let float = DataType::CUDNN_DATA_FLOAT;
        // The extents are always given in this order; the format is their order in memory.
        let tensor = |data, [n, c, h, w]: [usize; 4]| {
            Descriptor::new(functions, functions.create_tensor, functions.destroy_tensor, |raw| {
                let [n, c, h, w] = [n, c, h, w].map(|extent| extent as c_int);
                // SAFETY: a descriptor that was just created.
                unsafe { (functions.set_tensor)(raw, nhwc, data, n, c, h, w) }
            })
        };
        let filter = |data, filters: usize, channels: usize| {
            Descriptor::new(functions, functions.create_filter, functions.destroy_filter, |raw| {
                let [f, c, k] = [filters, channels, shape.kernel].map(|extent| extent as c_int);
                // SAFETY: as above.
                unsafe { (functions.set_filter)(raw, data, nhwc, f, c, k, k) }
            })
        };
        let convolution = |pad: usize| {
            Descriptor::new(functions, functions.create_convolution, functions.destroy_convolution, |raw| {
                let (pad, mode) = (pad as c_int, Mode::CUDNN_CROSS_CORRELATION);
                // SAFETY: as above.
                match unsafe { (functions.set_convolution)(raw, pad, pad, 1, 1, 1, 1, mode, float) } {
                    // SAFETY: as above.
                    0 => unsafe { (functions.set_math)(raw, math) },
                    status => status,
                }
            })
        };
        let activation =
            Descriptor::new(functions, functions.create_activation, functions.destroy_activation, |raw| {
                let mode = match slope {
                    0.0 => Activation::CUDNN_ACTIVATION_RELU,
                    _ => Activation::CUDNN_ACTIVATION_IDENTITY,
                };
                // SAFETY: as above.
                unsafe { (functions.set_activation)(raw, mode, Nan::CUDNN_PROPAGATE_NAN, 0.0) }
            })?;
        let x = |images| tensor(storage, [images, shape.channels, shape.height, shape.width]);
        let y = |images| tensor(storage, [images, shape.filters, shape.out_height(), shape.out_width()]);
        let aligned = |parts: usize| {
            let bytes = images / parts * precision.storage().size();
            [shape.input_len(), shape.output_len()].iter().all(|len| (bytes * len).is_multiple_of(256))
        };
        let cuts = PARTS.into_iter().filter(|parts| {
            images.is_multiple_of(*parts) && images / parts >= MIN_PART_IMAGES && aligned(*parts)
        });
        Ok(CudnnPlan {
            precision,
            slope,
            x: x(images)?,
            y: y(images)?,
            parts: cuts
                .map(|parts| Ok((parts, [x(images / parts)?, y(images / parts)?])))
                .collect::<Result<_>>()?,
            w: filter(storage, shape.filters, shape.channels)?,
            dw: filter(float, shape.filters, shape.channels)?,
            bias: tensor(storage, [1, shape.filters, 1, 1])?,
            convolution: convolution(shape.pad())?,
            activation,
            flipped: (
                filter(storage, shape.channels, shape.filters)?,
                convolution(shape.kernel - 1 - shape.pad())?,
            ),
            shape: *shape,
            handle,
        })
    }

    /// The library's pass that computes this one, and its factors, convolution and result.
    fn descriptors(&self, pass: Pass, form: Form, parts: usize) -> (Pass, [Raw; 4]) {
        let CudnnPlan { x, y, w, dw, convolution, flipped: (flipped, transposed_convolution), .. } = self;
        let cut = self.parts.iter().find(|(known, _)| *known == parts);
        let [x, y] = cut.map_or([x, y], |(_, [x, y])| [x, y]);
        let (made_as, descriptors) = match (pass, form) {
            (Pass::Forward, Form::Transposed) => {
                (Pass::BackwardInput, [flipped, x, transposed_convolution, y])
            }
            (Pass::BackwardInput, Form::Transposed) => {
                (Pass::Forward, [y, flipped, transposed_convolution, x])
            }
            (Pass::Forward, _) => (pass, [x, w, convolution, y]),
            (Pass::BackwardInput, _) => (pass, [w, y, convolution, x]),
            (Pass::BackwardWeights, Form::Narrow) => (pass, [x, y, convolution, w]),
            (Pass::BackwardWeights, _) => (pass, [x, y, convolution, dw]),
        };
        (made_as, descriptors.map(|descriptor| descriptor.raw))
    }

    /// The operands of a transposed convolution, in the order of [`descriptors`](Self::descriptors); `flipped` are
    /// the flipped weights.
    fn transposed_operands<'a>(pass: Pass, operands: [View<'a>; 3], flipped: View<'a>) -> [View<'a>; 3] {
        match (pass, operands) {
            (Pass::Forward, [x, _, y]) => [flipped, x, y],
            (_, [_, dy, dx]) => [dy, flipped, dx],
        }
    }

    /// The library's ranking of its algorithms, best first.
    fn rank(&self, pass: Pass, form: Form, parts: usize) -> Result<Vec<AlgorithmPerf>> {
        let f = &self.handle.functions;
        let (pass, [from, by, convolution, to]) = self.descriptors(pass, form, parts);
        let (name, rank): (_, Rank) = match pass {
            Pass::Forward => ("cudnnGetConvolutionForwardAlgorithm_v7", f.rank_forward),
            Pass::BackwardInput => ("cudnnGetConvolutionBackwardDataAlgorithm_v7", f.rank_backward_data),
            Pass::BackwardWeights => {
                ("cudnnGetConvolutionBackwardFilterAlgorithm_v7", f.rank_backward_filter)
            }
        };
        let mut found = [AlgorithmPerf::default(); 32];
        let mut count: c_int = 0;
        self.handle.query(name, |handle| {
            // SAFETY: descriptors of this layer, and room for the requested number of results.
            unsafe {
                let room = found.len() as c_int;
                rank(handle, from, by, convolution, to, room, &mut count, found.as_mut_ptr())
            }
        })?;
        Ok(found[..(count.max(0) as usize).min(found.len())].to_vec())
    }

    /// Number of elements at the beginning of the workspace that this module uses itself: a bias, weights or their
    /// gradients.
    fn own_len(&self, form: Form, parts: usize) -> usize {
        match form {
            Form::Plain => 0,
            Form::Fused if !self.precision.is_half() => 0,
            Form::Fused => self.shape.filters,
            Form::Narrow => parts * self.shape.weights_len(),
            Form::Transposed => self.shape.weights_len(),
        }
    }

    /// The bytes of these elements, rounded up to the alignment of an allocation; the library's part of the workspace
    /// follows.
    fn own_bytes(&self, form: Form, parts: usize) -> usize {
        (self.own_len(form, parts) * self.precision.storage().size()).next_multiple_of(256)
    }

    /// The two parts of a workspace: that of [`own_len`](Self::own_len) elements, and the library's.
    fn split<'a>(&self, algorithm: &LibraryAlgorithm, workspace: View<'a>) -> (View<'a>, View<'a>) {
        let (form, parts) = (algorithm.form, algorithm.parts());
        let (workspace, dtype) = (workspace.cast(DType::U8), self.precision.storage());
        let own = workspace.slice(0..self.own_len(form, parts) * dtype.size());
        (own.cast(dtype), workspace.slice(self.own_bytes(form, parts)..workspace.len()))
    }

    /// Computes a product of the first two operands, written to the third.
    fn convolve(
        &self,
        pass: Pass,
        stream: &Stream,
        algorithm: &LibraryAlgorithm,
        operands: [View<'_>; 3],
        workspace: View<'_>,
    ) -> Result<()> {
        let f = &self.handle.functions;
        let (pass, [from, by, convolution, to]) = self.descriptors(pass, algorithm.form, algorithm.parts());
        let (name, run): (_, Convolve) = match pass {
            Pass::Forward => ("cudnnConvolutionForward", f.forward),
            Pass::BackwardInput => ("cudnnConvolutionBackwardData", f.backward_data),
            Pass::BackwardWeights => ("cudnnConvolutionBackwardFilter", f.backward_filter),
        };
        let [a, b, result] = operands.map(|view| view.address());
        let (one, zero) = (1.0f32, 0.0f32);
        self.handle.call(name, stream, |handle| {
            // SAFETY: the descriptors fit the memory; the factors are read during the call.
            unsafe {
                run(
                    handle,
                    (&raw const one).cast(),
                    from,
                    a as Address,
                    by,
                    b as Address,
                    convolution,
                    number(algorithm),
                    workspace.address() as *mut c_void,
                    workspace.bytes(),
                    (&raw const zero).cast(),
                    to,
                    result as *mut c_void,
                )
            }
        })
    }

    /// `y = w ∗ x`, with bias and activation.
    fn convolve_fused(
        &self,
        stream: &Stream,
        algorithm: &LibraryAlgorithm,
        [x, w, y]: [View<'_>; 3],
        bias: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (one, zero) = (1.0f32, 0.0f32);
        self.handle.call("cudnnConvolutionBiasActivationForward", stream, |handle| {
            // SAFETY: the descriptors fit the memory; `y` is also passed as the addend, which is multiplied by zero;
            // the factors are read during the call.
            unsafe {
                (self.handle.functions.forward_fused)(
                    handle,
                    (&raw const one).cast(),
                    self.x.raw,
                    x.address() as Address,
                    self.w.raw,
                    w.address() as Address,
                    self.convolution.raw,
                    number(algorithm),
                    workspace.address() as *mut c_void,
                    workspace.bytes(),
                    (&raw const zero).cast(),
                    self.y.raw,
                    y.address() as Address,
                    self.bias.raw,
                    bias.address() as Address,
                    self.activation.raw,
                    self.y.raw,
                    y.address() as *mut c_void,
                )
            }
        })
    }
}

impl LibraryLayer for CudnnPlan {
    fn version(&self) -> String {
        self.handle.version()
    }

    fn candidates(&self, pass: Pass, deterministic: bool, limit: usize) -> (Vec<Candidate>, Vec<Note>) {
        let mut forms = vec![(Form::Plain, 1)];
        match (pass, self.precision) {
            (Pass::BackwardWeights, Precision::Bf16 | Precision::F16) => {
                forms.push((Form::Narrow, 1));
                forms.extend(self.parts.iter().map(|(parts, _)| (Form::Narrow, *parts)));
            }
            (Pass::BackwardWeights, _) => {}
            (Pass::Forward | Pass::BackwardInput, _) => forms.push((Form::Transposed, 1)),
        }
        let (mut candidates, mut notes) = (Vec::new(), Vec::new());
        for (form, parts) in forms {
            let found = match self.rank(pass, form, parts) {
                Ok(found) => found,
                Err(error) => {
                    notes.push(Note::new("cuDNN", error));
                    continue;
                }
            };
            for number in best_algorithms(&found, deterministic) {
                let mut forms = vec![form];
                let fused = self.slope == 0.0 || self.slope == 1.0 && number == IMPLICIT_PRECOMPUTED_GEMM;
                if pass == Pass::Forward && form == Form::Plain && fused {
                    forms.push(Form::Fused);
                }
                for form in forms {
                    let algorithm = match parts {
                        1 => LibraryAlgorithm::cudnn(number, form),
                        _ => LibraryAlgorithm::cudnn_in_parts(number, form, parts),
                    };
                    match self.workspace(pass, &algorithm) {
                        Ok(workspace) if workspace <= limit => {
                            candidates.push(Candidate { algorithm, workspace });
                        }
                        Ok(workspace) => notes
                            .push(Note::new(algorithm, format!("wants a workspace of {workspace} bytes"))),
                        Err(error) => notes.push(Note::new(algorithm, error)),
                    }
                }
            }
        }
        (candidates, notes)
    }

    fn workspace(&self, pass: Pass, algorithm: &LibraryAlgorithm) -> Result<usize> {
        let parts = algorithm.parts();
        let cut = algorithm.form == Form::Narrow && self.parts.iter().any(|(known, _)| *known == parts);
        if parts != 1 && !cut {
            let text = format!("this layer's batch is not split into {parts} parts");
            return Err(Error::Library { call: "a cached selection", text });
        }
        let f = &self.handle.functions;
        let (pass, [from, by, convolution, to]) = self.descriptors(pass, algorithm.form, algorithm.parts());
        let (name, size): (_, WorkspaceSize) = match pass {
            Pass::Forward => ("cudnnGetConvolutionForwardWorkspaceSize", f.forward_workspace),
            Pass::BackwardInput => {
                ("cudnnGetConvolutionBackwardDataWorkspaceSize", f.backward_data_workspace)
            }
            Pass::BackwardWeights => {
                ("cudnnGetConvolutionBackwardFilterWorkspaceSize", f.backward_filter_workspace)
            }
        };
        let mut bytes = 0;
        self.handle.query(name, |handle| {
            // SAFETY: descriptors of this layer, and a writable number.
            unsafe { size(handle, from, by, convolution, to, number(algorithm), &mut bytes) }
        })?;
        Ok(self.own_bytes(algorithm.form, algorithm.parts()) + bytes)
    }

    fn run(&self, stream: &Stream, algorithm: &LibraryAlgorithm, operands: &Operands<'_>) -> Result<()> {
        let &Operands { pass, bias, workspace, .. } = operands;
        let operands = operands.views();
        match (algorithm.form, bias) {
            (Form::Fused, Some(bias)) if self.precision.is_half() => {
                let (narrow, rest) = self.split(algorithm, workspace);
                arena::cuda::narrow(stream, bias, narrow)?;
                self.convolve_fused(stream, algorithm, operands, narrow, rest)
            }
            (Form::Fused, Some(bias)) => self.convolve_fused(stream, algorithm, operands, bias, workspace),
            (Form::Narrow, _) => {
                let [x, dy, dw] = operands;
                let ((narrow, rest), parts) = (self.split(algorithm, workspace), algorithm.parts());
                for index in 0..parts {
                    let operands = [x, dy, narrow].map(|view| {
                        let len = view.len() / parts;
                        view.slice(index * len..(index + 1) * len)
                    });
                    self.convolve(pass, stream, algorithm, operands, rest)?;
                }
                match parts {
                    1 => arena::cuda::widen(stream, narrow, dw),
                    _ => super::cuda::sum_parts(stream, narrow, dw),
                }
            }
            (Form::Transposed, _) => {
                let (flipped, rest) = self.split(algorithm, workspace);
                let weights = operands[if pass == Pass::Forward { 1 } else { 0 }];
                super::cuda::flip_weights(stream, &self.shape, self.precision, weights, flipped)?;
                let operands = Self::transposed_operands(pass, operands, flipped);
                self.convolve(pass, stream, algorithm, operands, rest)
            }
            _ => self.convolve(pass, stream, algorithm, operands, workspace),
        }
    }
}

/// The library's number of an algorithm.
fn number(algorithm: &LibraryAlgorithm) -> u32 {
    algorithm.id[0] as u32
}

/// The highest-ranked algorithms that are supported. An algorithm counts as deterministic if all its entries say so.
fn best_algorithms(found: &[AlgorithmPerf], deterministic: bool) -> Vec<u32> {
    let strays = |number| found.iter().any(|perf| perf.algorithm == number && perf.deterministic == 0);
    let mut numbers = Vec::new();
    for perf in found.iter().filter(|perf| perf.status == 0) {
        let number = perf.algorithm;
        let out = numbers.contains(&number) || deterministic && strays(number);
        if !out {
            numbers.push(number);
        }
    }
    numbers.truncate(MAX_CANDIDATES);
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_supported_deterministic_algorithms_are_candidates() {
        let perf = |algorithm, status, deterministic| AlgorithmPerf {
            algorithm,
            status,
            deterministic,
            ..AlgorithmPerf::default()
        };
        let found = [
            perf(0, 0, 0),
            perf(5, 3000, 1),
            perf(1, 0, 1),
            perf(3, 0, 1),
            perf(1, 0, 1),
            perf(3, 0, 0),
            perf(4, 0, 1),
            perf(6, 0, 1),
            perf(7, 0, 1),
        ];
        assert_eq!(best_algorithms(&found, true), [1, 4, 6]);
        assert_eq!(best_algorithms(&found, false), [0, 1, 3]);
    }
}
