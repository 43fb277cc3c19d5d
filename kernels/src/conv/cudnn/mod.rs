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
//!   so both race: [`Form::Plain`] writes f32; [`Form::Narrow`] writes bfloat16 to the workspace and widens
//!   it, at the price of one more rounding, to 8 bits, before the sum over ranks. (PyTorch's autocast rounds there too. On
//!   an H100 the wide gradient is refused for most layers, and several times slower for the others.)
//! - *The other way round*: a convolution is the gradient of the input of another one, with the weights transposed and
//!   turned, and that gradient a convolution. The library's kernels for both are not equally fast, so [`Form::Turned`],
//!   which turns the weights into the workspace first, races as well.
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

use library::{Address, Convolve, Descriptor, Find, Library, Raw, Timing, WorkspaceSize};

use super::Shape;
use super::gpu::Passes;
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
    x: Descriptor,
    y: Descriptor,
    w: Descriptor,
    /// The weights' gradient, in f32.
    dw: Descriptor,
    bias: Descriptor,
    convolution: Descriptor,
    activation: Descriptor,
    /// Weights and convolution of [`Form::Turned`].
    turned: (Descriptor, Descriptor),
    shape: Shape,
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
        Ok(Plan {
            precision,
            slope,
            x: tensor(storage, [images, shape.channels, shape.height, shape.width])?,
            y: tensor(storage, [images, shape.filters, shape.out_height(), shape.out_width()])?,
            w: filter(storage, shape.filters, shape.channels)?,
            dw: filter(float, shape.filters, shape.channels)?,
            bias: tensor(float, [1, shape.filters, 1, 1])?,
            convolution: convolution(shape.pad())?,
            activation,
            turned: (
                filter(storage, shape.channels, shape.filters)?,
                convolution(shape.kernel - 1 - shape.pad())?,
            ),
            shape: *shape,
            on: library,
        })
    }

    /// The library's pass that makes this one, and its factors, convolution and result.
    fn descriptors(&self, pass: Pass, form: Form) -> (Pass, [Raw; 4]) {
        let Plan { x, y, w, dw, convolution, turned: (turned, turned_convolution), .. } = self;
        let (made_as, descriptors) = match (pass, form) {
            (Pass::Forward, Form::Turned) => (Pass::BackwardInput, [turned, x, turned_convolution, y]),
            (Pass::BackwardInput, Form::Turned) => (Pass::Forward, [y, turned, turned_convolution, x]),
            (Pass::Forward, _) => (pass, [x, w, convolution, y]),
            (Pass::BackwardInput, _) => (pass, [w, y, convolution, x]),
            (Pass::BackwardWeights, Form::Narrow) => (pass, [x, y, convolution, w]),
            (Pass::BackwardWeights, _) => (pass, [x, y, convolution, dw]),
        };
        (made_as, descriptors.map(|descriptor| descriptor.raw))
    }

    /// The operands in the order of [`descriptors`](Self::descriptors), for what goes the other way round: `first` are
    /// the turned weights.
    fn turned_operands<'a>(pass: Pass, operands: [View<'a>; 3], first: View<'a>) -> [View<'a>; 3] {
        match (pass, operands) {
            (Pass::Forward, [x, _, y]) => [first, x, y],
            (_, [_, dy, dx]) => [dy, first, dx],
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
        let (pass, [from, by, convolution, to]) = self.descriptors(pass, form);
        let (name, find): (_, Find) = match pass {
            Pass::Forward => ("cudnnFindConvolutionForwardAlgorithmEx", f.find_forward),
            Pass::BackwardInput => ("cudnnFindConvolutionBackwardDataAlgorithmEx", f.find_backward_data),
            Pass::BackwardWeights => {
                ("cudnnFindConvolutionBackwardFilterAlgorithmEx", f.find_backward_filter)
            }
        };
        let [a, b, result] = operands.map(|view| view.address());
        let mut found = [Timing::default(); 32];
        let mut count: c_int = 0;
        self.on.call(name, stream, |handle| {
            // SAFETY: descriptors that fit the memory they are given with, room for as many results as are asked for, and
            // the workspace's size.
            unsafe {
                find(
                    handle,
                    from,
                    a as Address,
                    by,
                    b as Address,
                    convolution,
                    to,
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

    /// Bytes at the workspace's beginning, before what the library asks for, for the weights or their gradient.
    fn own_bytes(&self, form: Form) -> usize {
        match form {
            Form::Plain | Form::Fused => 0,
            // The library's part begins where an allocation might.
            Form::Narrow | Form::Turned => {
                (self.shape.weights_len() * self.precision.storage().size()).next_multiple_of(256)
            }
        }
    }

    /// The two parts of a workspace: what [`own_bytes`](Self::own_bytes) is about, and the library's.
    fn split<'a>(&self, form: Form, workspace: View<'a>) -> (View<'a>, View<'a>) {
        let (workspace, dtype) = (workspace.cast(DType::U8), self.precision.storage());
        let begins = self.own_bytes(form);
        let own = workspace.slice(0..begins.min(self.shape.weights_len() * dtype.size()));
        (own.cast(dtype), workspace.slice(begins..workspace.len()))
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
        let (pass, [from, by, convolution, to]) = self.descriptors(pass, algorithm.form);
        let (name, run): (_, Convolve) = match pass {
            Pass::Forward => ("cudnnConvolutionForward", f.forward),
            Pass::BackwardInput => ("cudnnConvolutionBackwardData", f.backward_data),
            Pass::BackwardWeights => ("cudnnConvolutionBackwardFilter", f.backward_filter),
        };
        let [a, b, result] = operands.map(|view| view.address());
        let (one, zero) = (1.0f32, 0.0f32);
        self.on.call(name, stream, |handle| {
            // SAFETY: descriptors that fit the memory they are given with; the factors are read during the call.
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
            (Pass::BackwardWeights, _) => &[Form::Plain],
            (Pass::Forward | Pass::BackwardInput, _) => &[Form::Plain, Form::Turned],
        };
        let (mut candidates, mut notes) = (Vec::new(), Vec::new());
        for &form in forms {
            let operands = match form {
                Form::Turned => Self::turned_operands(pass, operands, self.split(form, space).0),
                _ => operands,
            };
            let found = match self.find(pass, form, stream, operands, self.split(form, space).1) {
                Ok(found) => found,
                Err(error) => {
                    notes.push(Note::new("cuDNN", error));
                    continue;
                }
            };
            for number in finalists(&found, deterministic) {
                let mut forms = vec![form];
                let fused = self.slope == 0.0 || self.slope == 1.0 && number == IMPLICIT_PRECOMPUTED_GEMM;
                if pass == Pass::Forward && form == Form::Plain && fused {
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
        }
        (candidates, notes)
    }

    fn workspace(&self, pass: Pass, algorithm: &Algorithm) -> Result<usize> {
        let f = &self.on.functions;
        let (pass, [from, by, convolution, to]) = self.descriptors(pass, algorithm.form);
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
        self.on.ask(name, |handle| {
            // SAFETY: descriptors of this layer, and a place for the number.
            unsafe { size(handle, from, by, convolution, to, number(algorithm), &mut bytes) }
        })?;
        Ok(self.own_bytes(algorithm.form) + bytes)
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
                let (narrow, rest) = self.split(algorithm.form, workspace);
                self.convolve(pass, stream, algorithm, [x, dy, narrow], rest)?;
                arena::cuda::widen(stream, narrow, dw)
            }
            (Form::Turned, _) => {
                let (turned, rest) = self.split(algorithm.form, workspace);
                let weights = operands[if pass == Pass::Forward { 1 } else { 0 }];
                super::cuda::turn_weights(stream, &self.shape, self.precision, weights, turned)?;
                let operands = Self::turned_operands(pass, operands, turned);
                self.convolve(pass, stream, algorithm, operands, rest)
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
