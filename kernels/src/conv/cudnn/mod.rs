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
//!   so both are tried: [`Form::Plain`] writes f32; [`Form::Narrow`] writes bfloat16 to the workspace, for the caller to
//!   widen, at the price of one more rounding, to 8 bits, before the sum over ranks.
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

pub(super) use library::Library;
use library::{Address, Convolve, Descriptor, Find, Timing, WorkspaceSize};

use super::Shape;
use crate::DType;
use crate::cuda::choice::{self, Candidate, Note, Pass};
use crate::cuda::{Precision, Result, Stream, View};

/// What an algorithm of the library does beside the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Nothing.
    Plain,
    /// Bias and activation.
    Fused,
    /// The result, which is to be f32, comes in bfloat16.
    Narrow,
}

/// One of the library's algorithms for a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Algorithm {
    /// The library's number.
    number: u32,
    pub(super) form: Form,
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let form = match self.form {
            Form::Plain => "",
            Form::Fused => " fused",
            Form::Narrow => " bf16",
        };
        write!(f, "cuDNN {}{form}", self.number)
    }
}

impl choice::Algorithm for Algorithm {
    fn encode(&self) -> String {
        format!("{}/{}", self.number, self.form as u8)
    }

    fn decode(text: &str) -> Option<Self> {
        let (number, form) = text.split_once('/')?;
        let form = [Form::Plain, Form::Fused, Form::Narrow]
            .into_iter()
            .find(|known| form.parse() == Ok(*known as u8))?;
        Some(Algorithm { number: number.parse().ok()?, form })
    }
}

/// The library's algorithm for fused bias without an activation.
const IMPLICIT_PRECOMPUTED_GEMM: u32 = 1;
/// Algorithms of a pass that go on to the race.
const FINALISTS: usize = 3;

/// Memory of a layer, to try algorithms on.
#[derive(Clone, Copy)]
pub(super) struct Buffers<'a> {
    pub(super) x: View<'a>,
    pub(super) w: View<'a>,
    pub(super) y: View<'a>,
    pub(super) dx: View<'a>,
    pub(super) dw: View<'a>,
    pub(super) workspace: View<'a>,
}

/// One layer, described to the library.
pub(super) struct Plan {
    library: Arc<Library>,
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
    /// If the library does not take the description.
    pub(super) fn new(
        library: Arc<Library>,
        shape: &Shape,
        images: usize,
        precision: Precision,
        slope: f32,
    ) -> Result<Self> {
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
            library,
        })
    }

    /// Algorithms that are worth a race, and notes about what is not. The contents of `buffers` are lost.
    pub(super) fn candidates(
        &self,
        pass: Pass,
        stream: &Stream,
        deterministic: bool,
        buffers: &Buffers<'_>,
    ) -> (Vec<Candidate<Algorithm>>, Vec<Note>) {
        let forms: &[Form] = match (pass, self.precision) {
            (Pass::BackwardWeights, Precision::Bf16) => &[Form::Plain, Form::Narrow],
            _ => &[Form::Plain],
        };
        let (mut candidates, mut notes) = (Vec::new(), Vec::new());
        for &form in forms {
            let found = match self.find(pass, form, stream, buffers) {
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
                    let algorithm = Algorithm { number, form };
                    match self.workspace(pass, &algorithm) {
                        Ok(workspace) if workspace <= buffers.workspace.bytes() => {
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

    /// What the library finds out about its algorithms, fastest first.
    fn find(&self, pass: Pass, form: Form, stream: &Stream, buffers: &Buffers<'_>) -> Result<Vec<Timing>> {
        let Buffers { x, w, y, dx, dw, workspace } = *buffers;
        let f = &self.library.functions;
        type Operand<'a> = (&'a Descriptor, View<'a>);
        let (name, find, from, by, to): (_, Find, Operand<'_>, Operand<'_>, Operand<'_>) = match pass {
            Pass::Forward => (
                "cudnnFindConvolutionForwardAlgorithmEx",
                f.find_forward,
                (&self.x, x),
                (&self.w, w),
                (&self.y, y),
            ),
            Pass::BackwardInput => (
                "cudnnFindConvolutionBackwardDataAlgorithmEx",
                f.find_backward_data,
                (&self.w, w),
                (&self.y, y),
                (&self.x, dx),
            ),
            Pass::BackwardWeights => (
                "cudnnFindConvolutionBackwardFilterAlgorithmEx",
                f.find_backward_filter,
                (&self.x, x),
                (&self.y, y),
                (self.gradient(form), dw),
            ),
        };
        let mut found = [Timing::default(); 32];
        let mut count: c_int = 0;
        self.library.call(name, stream, |handle| {
            // SAFETY: descriptors that fit the memory they are given with, room for as many results as are asked for, and
            // the workspace's size.
            unsafe {
                find(
                    handle,
                    from.0.raw,
                    from.1.address() as Address,
                    by.0.raw,
                    by.1.address() as Address,
                    self.convolution.raw,
                    to.0.raw,
                    to.1.address() as *mut c_void,
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

    /// The filter that the gradient of weights is written as.
    fn gradient(&self, form: Form) -> &Descriptor {
        if form == Form::Narrow { &self.w } else { &self.dw }
    }

    /// Bytes of workspace of an algorithm.
    ///
    /// # Errors
    /// If the library does not support it for this layer.
    pub(super) fn workspace(&self, pass: Pass, algorithm: &Algorithm) -> Result<usize> {
        let f = &self.library.functions;
        let (name, size, from, by, to): (_, WorkspaceSize, _, _, _) = match pass {
            Pass::Forward => {
                ("cudnnGetConvolutionForwardWorkspaceSize", f.forward_workspace, &self.x, &self.w, &self.y)
            }
            Pass::BackwardInput => (
                "cudnnGetConvolutionBackwardDataWorkspaceSize",
                f.backward_data_workspace,
                &self.w,
                &self.y,
                &self.x,
            ),
            Pass::BackwardWeights => (
                "cudnnGetConvolutionBackwardFilterWorkspaceSize",
                f.backward_filter_workspace,
                &self.x,
                &self.y,
                self.gradient(algorithm.form),
            ),
        };
        let (convolution, number) = (self.convolution.raw, algorithm.number);
        let mut bytes = 0;
        self.library.ask(name, |handle| {
            // SAFETY: descriptors of this layer, and a place for the number.
            unsafe { size(handle, from.raw, by.raw, convolution, to.raw, number, &mut bytes) }
        })?;
        Ok(match algorithm.form {
            Form::Narrow => self.narrow().end + bytes,
            _ => bytes,
        })
    }

    /// Where in the workspace the narrow gradient of weights is: at its beginning, before what the library asks for.
    fn narrow(&self) -> std::ops::Range<usize> {
        // The library's part begins where an allocation might.
        0..(self.weights * 2).next_multiple_of(256)
    }

    /// The narrow gradient of weights in `workspace`, in bfloat16.
    pub(super) fn narrow_gradient<'a>(&self, workspace: View<'a>) -> View<'a> {
        workspace.cast(DType::U8).slice(0..self.weights * 2).cast(DType::Bf16)
    }

    /// `y = w ∗ x`, with bias and activation if the algorithm is fused.
    ///
    /// # Errors
    /// If the library refuses.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn forward(
        &self,
        stream: &Stream,
        algorithm: &Algorithm,
        x: View<'_>,
        w: View<'_>,
        bias: View<'_>,
        y: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let f = &self.library.functions;
        if algorithm.form != Form::Fused {
            let operands = [(&self.x, x), (&self.w, w), (&self.y, y)];
            return self.convolve(
                "cudnnConvolutionForward",
                f.forward,
                stream,
                algorithm,
                operands,
                workspace,
            );
        }
        let (one, zero) = (1.0f32, 0.0f32);
        self.library.call("cudnnConvolutionBiasActivationForward", stream, |handle| {
            // SAFETY: descriptors that fit the memory they are given with; `y` also stands for the addend, which is
            // multiplied by zero; the factors are read during the call.
            unsafe {
                (f.forward_fused)(
                    handle,
                    (&raw const one).cast(),
                    self.x.raw,
                    x.address() as Address,
                    self.w.raw,
                    w.address() as Address,
                    self.convolution.raw,
                    algorithm.number,
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

    /// The gradient of the input.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) fn backward_input(
        &self,
        stream: &Stream,
        algorithm: &Algorithm,
        w: View<'_>,
        dy: View<'_>,
        dx: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let operands = [(&self.w, w), (&self.y, dy), (&self.x, dx)];
        let run = self.library.functions.backward_data;
        self.convolve("cudnnConvolutionBackwardData", run, stream, algorithm, operands, workspace)
    }

    /// The gradient of the weights: to `dw`, or where the algorithm is narrow to [`narrow_gradient`](Self::narrow_gradient)
    /// of the workspace.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) fn backward_weights(
        &self,
        stream: &Stream,
        algorithm: &Algorithm,
        x: View<'_>,
        dy: View<'_>,
        dw: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (to, rest) = match algorithm.form {
            Form::Narrow => {
                let bytes = workspace.cast(DType::U8);
                (self.narrow_gradient(workspace), bytes.slice(self.narrow().end..bytes.len()))
            }
            _ => (dw, workspace),
        };
        let operands = [(&self.x, x), (&self.y, dy), (self.gradient(algorithm.form), to)];
        let run = self.library.functions.backward_filter;
        self.convolve("cudnnConvolutionBackwardFilter", run, stream, algorithm, operands, rest)
    }

    /// A product of the first two operands, written to the third.
    fn convolve(
        &self,
        name: &'static str,
        run: Convolve,
        stream: &Stream,
        algorithm: &Algorithm,
        [from, by, to]: [(&Descriptor, View<'_>); 3],
        workspace: View<'_>,
    ) -> Result<()> {
        let (one, zero) = (1.0f32, 0.0f32);
        self.library.call(name, stream, |handle| {
            // SAFETY: descriptors that fit the memory they are given with; the factors are read during the call.
            unsafe {
                run(
                    handle,
                    (&raw const one).cast(),
                    from.0.raw,
                    from.1.address() as Address,
                    by.0.raw,
                    by.1.address() as Address,
                    self.convolution.raw,
                    algorithm.number,
                    workspace.address() as *mut c_void,
                    workspace.bytes(),
                    (&raw const zero).cast(),
                    to.0.raw,
                    to.1.address() as *mut c_void,
                )
            }
        })
    }
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
    use crate::cuda::choice::Algorithm as _;

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

    #[test]
    fn an_algorithm_is_read_as_it_was_written() {
        for form in [Form::Plain, Form::Fused, Form::Narrow] {
            let algorithm = Algorithm { number: 6, form };
            assert_eq!(Algorithm::decode(&algorithm.encode()), Some(algorithm));
        }
        assert_eq!(Algorithm::decode("6/3"), None);
        assert_eq!(Algorithm::decode("fused"), None);
    }
}
