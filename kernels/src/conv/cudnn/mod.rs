//! Convolutions by cuDNN, where it is installed.
//!
//! A [`Plan`] describes one layer to the library: tensors and filters with the channel fastest, as everywhere on the GPU.
//! It is asked for candidates when the layer is set up: the library times its algorithms, and those that are
//! deterministic go on to the race ([`crate::cuda::choice`]). A run is one call of the library; it allocates nothing and
//! can be captured.
//!
//! - *Precision* is the descriptor's math type. `FMA` is what forbids tensor cores for f32, which the default permits
//!   with operands rounded to TF32. "Allow conversion" is never used: it would round f32 to half precision. The library's
//!   timing tries the default beside the type it was given, so only the numbers of its algorithms are taken from it,
//!   and every run is made with the layer's own type.
//! - *Bias and activation* come with the convolution in [`Form::Fused`]. The library documents that for the rectified
//!   linear unit, with all algorithms, and without an activation, with a single one. The leaky one is not among what it
//!   knows. [`Form::Plain`] leaves both to the caller.
//! - *The gradient of weights* from bfloat16 operands is wanted in f32. The library documents a bfloat16 result only,
//!   so both are tried: [`Form::Plain`] writes f32; [`Form::Narrow`] writes bfloat16 to the workspace and widens
//!   it, at the price of one more rounding, to 8 bits, before the sum over ranks.
//!
//! The functions used are the library's older ones, which version 9 marks as deprecated and still has. A version
//! without them is no error: the layer then takes this crate's kernels.

mod library;

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnActivationMode_t as Activation, cudnnConvolutionMode_t as Mode, cudnnDataType_t as DataType,
    cudnnMathType_t as Math, cudnnNanPropagation_t as Nan, cudnnTensorFormat_t as Format,
};

use library::{Address, Convolve, Descriptor, Find, Library, Timing, WorkspaceSize};

use super::Shape;
use super::passes::Passes;
use crate::Precision;
use crate::cuda::algorithm::{Algorithm, Form};
use crate::cuda::choice::{Candidate, Note, Pass};
use crate::cuda::{Device, Result, Stream, View};
use crate::{DType, arena};

/// The library's algorithm for fused bias without an activation.
const IMPLICIT_PRECOMPUTED_GEMM: u32 = 1;
/// Algorithms of a pass that go on to the race.
const FINALISTS: usize = 3;

/// One layer, described to the library.
pub(super) struct Plan {
    on: Arc<Library>,
    precision: Precision,
    slope: f32,
    weights: usize,
    x: Descriptor,
    y: Descriptor,
    w: Descriptor,
    /// The weights' gradient, in f32.
    dw: Descriptor,
    bias: Descriptor,
    convolution: Descriptor,
    activation: Descriptor,
}

// SAFETY: descriptors are read only once they are set.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Plan {
    /// Describes a layer for batches of `images`, whose activation has `slope` for negative values.
    ///
    /// # Errors
    /// If the library is not there, or does not take the description.
    pub(super) fn new(
        device: &Arc<Device>,
        shape: &Shape,
        images: usize,
        precision: Precision,
        slope: f32,
    ) -> Result<Self> {
        let library = Library::on(device)?;
        let functions = &library.functions;
        let (storage, math) = match precision {
            Precision::F32 => (DataType::CUDNN_DATA_FLOAT, Math::CUDNN_FMA_MATH),
            Precision::Tf32 => (DataType::CUDNN_DATA_FLOAT, Math::CUDNN_DEFAULT_MATH),
            Precision::Bf16 => (DataType::CUDNN_DATA_BFLOAT16, Math::CUDNN_TENSOR_OP_MATH),
        };
        let nhwc = Format::CUDNN_TENSOR_NHWC;
        let float = DataType::CUDNN_DATA_FLOAT;
        // Extents are always named in this order; the format says how they lie.
        let tensor = |data, [n, c, h, w]: [usize; 4]| {
            Descriptor::new(functions, functions.create_tensor, functions.destroy_tensor, |raw| {
                let [n, c, h, w] = [n, c, h, w].map(|extent| extent as c_int);
                // SAFETY: a descriptor that was just created.
                unsafe { (functions.set_tensor)(raw, nhwc, data, n, c, h, w) }
            })
        };
        let filter = |data| {
            Descriptor::new(functions, functions.create_filter, functions.destroy_filter, |raw| {
                let [f, c, k] = [shape.filters, shape.channels, shape.kernel].map(|extent| extent as c_int);
                // SAFETY: as above.
                unsafe { (functions.set_filter)(raw, data, nhwc, f, c, k, k) }
            })
        };
        let convolution =
            Descriptor::new(functions, functions.create_convolution, functions.destroy_convolution, |raw| {
                let (pad, mode) = (shape.pad() as c_int, Mode::CUDNN_CROSS_CORRELATION);
                // SAFETY: as above.
                match unsafe { (functions.set_convolution)(raw, pad, pad, 1, 1, 1, 1, mode, float) } {
                    // SAFETY: as above.
                    0 => unsafe { (functions.set_math)(raw, math) },
                    status => status,
                }
            })?;
        let activation =
            Descriptor::new(functions, functions.create_activation, functions.destroy_activation, |raw| {
                let mode = match slope {
                    0.0 => Activation::CUDNN_ACTIVATION_RELU,
                    _ => Activation::CUDNN_ACTIVATION_IDENTITY,
                };
                // SAFETY: as above.
                unsafe { (functions.set_activation)(raw, mode, Nan::CUDNN_PROPAGATE_NAN, 0.0) }
            })?;
        Ok(Plan {
            precision,
            slope,
            weights: shape.weights_len(),
            x: tensor(storage, [images, shape.channels, shape.height, shape.width])?,
            y: tensor(storage, [images, shape.filters, shape.out_height(), shape.out_width()])?,
            w: filter(storage)?,
            dw: filter(float)?,
            bias: tensor(float, [1, shape.filters, 1, 1])?,
            convolution,
            activation,
            on: library,
        })
    }

    /// Factors and result of a pass.
    fn descriptors(&self, pass: Pass, form: Form) -> [&Descriptor; 3] {
        match (pass, form) {
            (Pass::Forward, _) => [&self.x, &self.w, &self.y],
            (Pass::BackwardInput, _) => [&self.w, &self.y, &self.x],
            (Pass::BackwardWeights, Form::Narrow) => [&self.x, &self.y, &self.w],
            (Pass::BackwardWeights, _) => [&self.x, &self.y, &self.dw],
        }
    }

    /// What the library finds out about its algorithms, fastest first.
    fn find(
        &self,
        pass: Pass,
        form: Form,
        stream: &Stream,
        operands: [View<'_>; 3],
        workspace: View<'_>,
    ) -> Result<Vec<Timing>> {
        let f = &self.on.functions;
        let (name, find): (_, Find) = match pass {
            Pass::Forward => ("cudnnFindConvolutionForwardAlgorithmEx", f.find_forward),
            Pass::BackwardInput => ("cudnnFindConvolutionBackwardDataAlgorithmEx", f.find_backward_data),
            Pass::BackwardWeights => {
                ("cudnnFindConvolutionBackwardFilterAlgorithmEx", f.find_backward_filter)
            }
        };
        let [from, by, to] = self.descriptors(pass, form);
        let [a, b, result] = operands.map(|view| view.address());
        let mut found = [Timing::default(); 32];
        let mut count: c_int = 0;
        self.on.call(name, stream, |handle| {
            // SAFETY: descriptors that fit the memory they are given with, room for as many results as are asked for, and
            // the workspace's size.
            unsafe {
                find(
                    handle,
                    from.raw,
                    a as Address,
                    by.raw,
                    b as Address,
                    self.convolution.raw,
                    to.raw,
                    result as *mut c_void,
                    found.len() as c_int,
                    &mut count,
                    found.as_mut_ptr(),
                    workspace.address() as *mut c_void,
                    workspace.bytes(),
                )
            }
        })?;
        Ok(found[..(count.max(0) as usize).min(found.len())].to_vec())
    }

    /// Bytes of the narrow gradient of weights, which is at the workspace's beginning, before what the library asks for.
    fn narrow_bytes(&self) -> usize {
        // The library's part begins where an allocation might.
        (self.weights * 2).next_multiple_of(256)
    }

    /// A product of the first two operands, written to the third.
    fn convolve(
        &self,
        pass: Pass,
        stream: &Stream,
        algorithm: &Algorithm,
        operands: [View<'_>; 3],
        workspace: View<'_>,
    ) -> Result<()> {
        let f = &self.on.functions;
        let (name, run): (_, Convolve) = match pass {
            Pass::Forward => ("cudnnConvolutionForward", f.forward),
            Pass::BackwardInput => ("cudnnConvolutionBackwardData", f.backward_data),
            Pass::BackwardWeights => ("cudnnConvolutionBackwardFilter", f.backward_filter),
        };
        let [from, by, to] = self.descriptors(pass, algorithm.form);
        let [a, b, result] = operands.map(|view| view.address());
        let (one, zero) = (1.0f32, 0.0f32);
        self.on.call(name, stream, |handle| {
            // SAFETY: descriptors that fit the memory they are given with; the factors are read during the call.
            unsafe {
                run(
                    handle,
                    (&raw const one).cast(),
                    from.raw,
                    a as Address,
                    by.raw,
                    b as Address,
                    self.convolution.raw,
                    number(algorithm),
                    workspace.address() as *mut c_void,
                    workspace.bytes(),
                    (&raw const zero).cast(),
                    to.raw,
                    result as *mut c_void,
                )
            }
        })
    }

    /// `y = w ∗ x`, with bias and activation.
    fn convolve_fused(
        &self,
        stream: &Stream,
        algorithm: &Algorithm,
        [x, w, y]: [View<'_>; 3],
        bias: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (one, zero) = (1.0f32, 0.0f32);
        self.on.call("cudnnConvolutionBiasActivationForward", stream, |handle| {
            // SAFETY: descriptors that fit the memory they are given with; `y` also stands for the addend, which is
            // multiplied by zero; the factors are read during the call.
            unsafe {
                (self.on.functions.forward_fused)(
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

impl Passes for Plan {
    fn version(&self) -> String {
        self.on.version()
    }

    fn candidates(
        &self,
        pass: Pass,
        stream: &Stream,
        deterministic: bool,
        operands: [View<'_>; 3],
        space: View<'_>,
    ) -> (Vec<Candidate>, Vec<Note>) {
        let forms: &[Form] = match (pass, self.precision) {
            (Pass::BackwardWeights, Precision::Bf16) => &[Form::Plain, Form::Narrow],
            _ => &[Form::Plain],
        };
        let (mut candidates, mut notes) = (Vec::new(), Vec::new());
        for &form in forms {
            let found = match self.find(pass, form, stream, operands, space) {
                Ok(found) => found,
                Err(error) => {
                    notes.push(Note::new("cuDNN", error));
                    continue;
                }
            };
            for number in finalists(&found, deterministic) {
                let mut forms = vec![form];
                let fused = self.slope == 0.0 || self.slope == 1.0 && number == IMPLICIT_PRECOMPUTED_GEMM;
                if pass == Pass::Forward && fused {
                    forms.push(Form::Fused);
                }
                for form in forms {
                    let algorithm = Algorithm::cudnn(number, form);
                    match self.workspace(pass, &algorithm) {
                        Ok(workspace) if workspace <= space.bytes() => {
                            candidates.push(Candidate { algorithm, workspace });
                        }
                        Ok(workspace) => notes
                            .push(Note::new(algorithm, format!("wants a workspace of {workspace} bytes"))),
                        Err(error) => notes.push(Note::new(algorithm, error)),
                    }
                }
            }
            // The wider result is the better one; where there is any algorithm for it, it is taken.
            if !candidates.is_empty() {
                break;
            }
        }
        (candidates, notes)
    }

    fn workspace(&self, pass: Pass, algorithm: &Algorithm) -> Result<usize> {
        let f = &self.on.functions;
        let (name, size): (_, WorkspaceSize) = match pass {
            Pass::Forward => ("cudnnGetConvolutionForwardWorkspaceSize", f.forward_workspace),
            Pass::BackwardInput => {
                ("cudnnGetConvolutionBackwardDataWorkspaceSize", f.backward_data_workspace)
            }
            Pass::BackwardWeights => {
                ("cudnnGetConvolutionBackwardFilterWorkspaceSize", f.backward_filter_workspace)
            }
        };
        let [from, by, to] = self.descriptors(pass, algorithm.form).map(|descriptor| descriptor.raw);
        let mut bytes = 0;
        self.on.ask(name, |handle| {
            // SAFETY: descriptors of this layer, and a place for the number.
            unsafe { size(handle, from, by, self.convolution.raw, to, number(algorithm), &mut bytes) }
        })?;
        Ok(if algorithm.form == Form::Narrow { self.narrow_bytes() + bytes } else { bytes })
    }

    fn run(
        &self,
        pass: Pass,
        stream: &Stream,
        algorithm: &Algorithm,
        operands: [View<'_>; 3],
        bias: Option<View<'_>>,
        workspace: View<'_>,
    ) -> Result<()> {
        match (algorithm.form, bias) {
            (Form::Fused, Some(bias)) => self.convolve_fused(stream, algorithm, operands, bias, workspace),
            (Form::Narrow, _) => {
                let [x, dy, dw] = operands;
                let workspace = workspace.cast(DType::U8);
                let narrow = workspace.slice(0..self.weights * 2).cast(DType::Bf16);
                let rest = workspace.slice(self.narrow_bytes()..workspace.len());
                self.convolve(pass, stream, algorithm, [x, dy, narrow], rest)?;
                arena::cuda::widen(stream, narrow, dw)
            }
            _ => self.convolve(pass, stream, algorithm, operands, workspace),
        }
    }
}

/// What the library calls an algorithm.
fn number(algorithm: &Algorithm) -> u32 {
    algorithm.id[0] as u32
}

/// The fastest algorithms that worked. One counts as deterministic if it was in every trial.
fn finalists(found: &[Timing], deterministic: bool) -> Vec<u32> {
    let strays = |number| found.iter().any(|timing| timing.algorithm == number && timing.deterministic == 0);
    let mut numbers = Vec::new();
    for timing in found.iter().filter(|timing| timing.status == 0) {
        let number = timing.algorithm;
        let out = numbers.contains(&number) || deterministic && strays(number);
        if !out {
            numbers.push(number);
        }
    }
    numbers.truncate(FINALISTS);
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_that_work_and_repeat_go_on() {
        let timing = |algorithm, status, deterministic| Timing {
            algorithm,
            status,
            deterministic,
            ..Timing::default()
        };
        let found = [
            timing(0, 0, 0),
            timing(5, 3000, 1),
            timing(1, 0, 1),
            timing(3, 0, 1),
            timing(1, 0, 1),
            timing(3, 0, 0),
            timing(4, 0, 1),
            timing(6, 0, 1),
            timing(7, 0, 1),
        ];
        assert_eq!(finalists(&found, true), [1, 4, 6]);
        assert_eq!(finalists(&found, false), [0, 1, 3]);
    }
}
