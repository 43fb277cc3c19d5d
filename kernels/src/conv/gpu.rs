//! A convolutional or dense layer on a GPU, by whichever kernels are fastest there.
//!
//! [`Conv`] is set up once for a layer and a batch size. Where NVIDIA's library for it is installed, its algorithms race
//! against this crate's kernels, pass by pass ([`AutotuneOptions`] says whether they may); the winners serve from then on. The
//! library is cuBLASLt for a dense layer, which is a convolution with a kernel of 1 × 1 of images of one pixel, and cuDNN
//! for any other. Two cases are this crate's own without a race:
//!
//! - images with one channel, on which cuDNN spends most of its time rearranging them;
//! - a batch of another size than was set up, such as the last of an epoch: the library's algorithms were chosen for one
//!   size, and a step that is captured has no time to choose.
//!
//! All calls put work on a stream, allocate nothing, and can be captured once they have run.

use super::passes::Passes;
use super::{ConvShape, cublaslt, cuda, cudnn};
use crate::Precision;
use crate::cuda::algorithm::{Algorithm, Form, Library};
use crate::cuda::choice::{self, Choice, Note, Pass, WORKSPACE_LIMIT};
use crate::cuda::elements::{aligned, check, pack};
use crate::cuda::{AutotuneOptions, Error, Libraries, Memory, Result, Stream, View};
use crate::{DType, activation, pool};

/// A convolutional or dense layer, set up for one GPU and one size of batches.
///
/// Images lie as \[N, H, W, C\] and weights as \[F, K, K, C\], both in the precision's [storage](Precision::storage) type;
/// for a dense layer that makes rows \[N, C\] and \[F, C\]. Bias and the gradients of weights and bias are f32, and so is
/// the workspace, which may be shared by all that runs on one stream.
pub struct Conv {
    shape: ConvShape,
    images: usize,
    precision: Precision,
    slope: f32,
    vendor: Option<Box<dyn Passes>>,
    /// By [`Pass`]; none where nobody asks for it.
    choices: [Option<Choice>; 3],
    workspace: usize,
    notes: Vec<Note>,
}

impl std::fmt::Debug for Conv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Conv").field(&self.describe()).finish()
    }
}

impl Conv {
    /// Sets up a layer for batches of `images` (fewer are possible, and slower). Its activation is `v` where it is positive,
    /// else `slope · v`: 0 is the rectified linear unit, 1 no activation. `input_gradient` says whether
    /// [`backward_input`](Self::backward_input) will be called.
    ///
    /// Memory for some batches is needed meanwhile, and returned.
    ///
    /// # Errors
    /// If this crate's own kernels cannot be compiled or run. What is wrong with a library is in
    /// [`describe`](Self::describe).
    ///
    /// # Panics
    /// If the kernel does not fit the images.
    pub fn new(
        stream: &Stream,
        shape: ConvShape,
        images: usize,
        precision: Precision,
        slope: f32,
        input_gradient: bool,
        options: AutotuneOptions,
    ) -> Result<Self> {
        shape.check();
        // Fewer images are cut into slices in another way.
        let own = (1..=images).map(|images| cuda::workspace_bytes(&shape, images, precision)).max();
        let asked_for = |pass| input_gradient || pass != Pass::BackwardInput;
        let mut conv = Conv {
            shape,
            images,
            precision,
            slope,
            vendor: None,
            choices: Pass::ALL.map(|pass| asked_for(pass).then(Choice::builtin)),
            workspace: own.unwrap_or(0),
            notes: Vec::new(),
        };
        let thin = shape.channels == 1 && !shape.is_dense();
        if options.libraries == Libraries::Builtin || thin || images == 0 {
            return Ok(conv);
        }
        match conv.open(stream) {
            Ok(library) => conv.vendor = Some(library),
            Err(error) => conv.notes.push(Note::new(conv.vendor_name(), error)),
        }
        // There from the first race on.
        let mut bench = None;
        for pass in Pass::ALL.into_iter().filter(|pass| asked_for(*pass)) {
            let choice = conv.settle(stream, pass, options.deterministic, &mut bench)?;
            conv.workspace = conv.workspace.max(choice.workspace);
            conv.choices[pass as usize] = Some(choice);
        }
        Ok(conv)
    }

    fn vendor_name(&self) -> Library {
        if self.shape.is_dense() { Library::CublasLt } else { Library::CuDnn }
    }

    /// Describes the layer to its library.
    fn open(&self, stream: &Stream) -> Result<Box<dyn Passes>> {
        let &Conv { ref shape, images, precision, slope, .. } = self;
        let device = stream.device();
        Ok(match self.vendor_name() {
            Library::CublasLt => Box::new(cublaslt::Plan::new(device, shape, images, precision, slope)?),
            Library::CuDnn => Box::new(cudnn::Plan::new(device, shape, images, precision, slope)?),
        })
    }

    /// The choice for a pass, remembered or made now.
    fn settle(
        &mut self,
        stream: &Stream,
        pass: Pass,
        deterministic: bool,
        bench: &mut Option<Bench>,
    ) -> Result<Choice> {
        let Some(library) = &self.vendor else { return Ok(Choice::builtin()) };
        let &Conv { shape, images, precision, slope, .. } = &*self;
        let problem = format!("layer {shape:?} {images} {precision} {slope} {deterministic}");
        let own_kernels = &cuda::PRODUCTS[precision as usize];
        let key = choice::key(stream.device(), &library.version(), &problem, own_kernels, pass);
        let mut notes = Vec::new();
        let supported = |algorithm: &Algorithm| library.workspace(pass, algorithm);
        let choice = choice::settle(&key, supported, || {
            if bench.is_none() {
                match Bench::new(stream, self) {
                    Ok(new) => *bench = Some(new),
                    // The race alone has this price; without it the layer still works.
                    Err(Error::OutOfMemory { .. }) => {
                        let why = "too little memory to try its algorithms";
                        notes.push(Note::new(self.vendor_name(), why));
                        return Ok(None);
                    }
                    Err(error) => return Err(error),
                }
            }
            let Some(bench) = bench else { return Ok(None) };
            let [x, w, y, bias, dx, dw, workspace] = bench.0.each_ref().map(Memory::view);
            let (operands, bias_of_pass) = match pass {
                Pass::Forward => ([x, w, y], Some(bias)),
                Pass::BackwardInput => ([w, y, dx], None),
                Pass::BackwardWeights => ([x, y, dw], None),
            };
            let (candidates, refused) = library.candidates(pass, deterministic, workspace.bytes());
            notes.extend(refused);
            for (seed, view) in [x, w, y, bias].into_iter().enumerate() {
                choice::fill(stream, view, seed as u64)?;
            }
            let run = |algorithm: Option<&Algorithm>| {
                self.run(pass, algorithm, stream, images, operands, bias_of_pass, workspace)
            };
            let outcome = choice::race(stream, precision, operands[2], bias_of_pass, candidates, &run)?;
            notes.extend(outcome.rejected);
            Ok(Some(outcome.choice))
        })?;
        Note::collect(&mut self.notes, pass, notes);
        Ok(choice.unwrap_or(Choice::builtin()))
    }

    /// Bytes of workspace, of f32, that the passes need.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    /// One line for a log: who makes each pass, how long it takes, and what was wrong with other candidates.
    pub fn describe(&self) -> String {
        let ConvShape { channels, height, width, filters, kernel, .. } = self.shape;
        let layer = if self.shape.is_dense() {
            format!("dense {filters} of {channels}, {} samples", self.images)
        } else {
            format!("conv {filters} {kernel}x{kernel} of {channels}x{height}x{width}, {} images", self.images)
        };
        choice::describe(&layer, self.precision, &self.choices, &self.notes)
    }

    /// Overwrites `y` \[N, H', W', F\] with the layer's activated output.
    ///
    /// # Errors
    /// If the work cannot be put on the stream.
    ///
    /// # Panics
    /// If lengths or types do not fit, or there are more images than the layer was set up for.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn forward(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        y: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.run_chosen(Pass::Forward, stream, images, [x, weights, y], Some(bias), workspace)
    }

    /// As [`forward`](Self::forward), with max-pooling behind it: overwrites `y` with the maxima of the activated output,
    /// and `chosen` with their places ([`pool::cuda::forward`]). `raw` has room for the output before pooling; what it
    /// holds afterwards is nobody's business.
    ///
    /// # Errors
    /// If the work cannot be put on the stream.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn forward_pooled(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        raw: View<'_>,
        window: &pool::PoolShape,
        y: View<'_>,
        chosen: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let operands = [x, weights, raw];
        let algorithm = self.chosen(Pass::Forward, images, operands, Some(bias), workspace);
        if self.product(Pass::Forward, algorithm, stream, images, operands, Some(bias), workspace)? {
            pool::cuda::forward(stream, window, self.shape.filters, raw, y, chosen)
        } else {
            pool::cuda::forward_fused(stream, window, self.slope, bias, raw, y, chosen)
        }
    }

    /// Overwrites `dx` \[N, H, W, C\] with the gradient of the input, given that of the output before its activation.
    ///
    /// # Errors
    /// If the work cannot be put on the stream.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn backward_input(
        &self,
        stream: &Stream,
        images: usize,
        weights: View<'_>,
        dy: View<'_>,
        dx: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.run_chosen(Pass::BackwardInput, stream, images, [weights, dy, dx], None, workspace)
    }

    /// Overwrites `dw` \[F, K, K, C\], in f32, with the gradient of the weights, summed over all images, given that of the
    /// output before its activation.
    ///
    /// # Errors
    /// If the work cannot be put on the stream.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn backward_weights(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        dy: View<'_>,
        dw: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.run_chosen(Pass::BackwardWeights, stream, images, [x, dy, dw], None, workspace)
    }

    /// Overwrites `db` \[F\], in f32, with the gradient of the bias.
    ///
    /// # Errors
    /// If the work cannot be put on the stream.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn backward_bias(
        &self,
        stream: &Stream,
        images: usize,
        dy: View<'_>,
        db: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        choice::check_batch(images, self.images, workspace, self.workspace);
        cuda::backward_bias(stream, &self.shape, images, self.precision, dy, workspace, db)
    }

    /// Turns `dy`, the gradient of the activated output `y`, in place into that of the output before its activation, and
    /// overwrites `db` \[F\], in f32, with the gradient of the bias.
    ///
    /// # Errors
    /// If the work cannot be put on the stream.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn backward_activation(
        &self,
        stream: &Stream,
        images: usize,
        y: View<'_>,
        dy: View<'_>,
        db: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        choice::check_batch(images, self.images, workspace, self.workspace);
        let &Conv { ref shape, precision, slope, .. } = self;
        cuda::backward_activation(stream, shape, images, precision, slope, y, dy, workspace, db)
    }

    /// Makes a pass by the library's algorithm, if it won and the batch and the memory are what it was chosen for.
    #[track_caller]
    fn run_chosen(
        &self,
        pass: Pass,
        stream: &Stream,
        images: usize,
        operands: [View<'_>; 3],
        bias: Option<View<'_>>,
        workspace: View<'_>,
    ) -> Result<()> {
        let algorithm = self.chosen(pass, images, operands, bias, workspace);
        self.run(pass, algorithm, stream, images, operands, bias, workspace)
    }

    /// The library's algorithm, if it won and the batch and the memory are what it was chosen for.
    #[track_caller]
    fn chosen(
        &self,
        pass: Pass,
        images: usize,
        operands: [View<'_>; 3],
        bias: Option<View<'_>>,
        workspace: View<'_>,
    ) -> Option<&Algorithm> {
        choice::check_batch(images, self.images, workspace, self.workspace);
        let mut views = operands.into_iter().chain(bias);
        let fits = images == self.images && views.all(|view| aligned(pack(view.dtype()), &[view]));
        let choice = self.choices[pass as usize].as_ref().filter(|_| fits);
        choice.and_then(|choice| choice.algorithm.as_ref())
    }

    /// Makes a pass, by this crate's kernel where no algorithm is given, with bias and activation if it is the forward one.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn run(
        &self,
        pass: Pass,
        algorithm: Option<&Algorithm>,
        stream: &Stream,
        images: usize,
        operands: [View<'_>; 3],
        bias: Option<View<'_>>,
        workspace: View<'_>,
    ) -> Result<()> {
        let activated = self.product(pass, algorithm, stream, images, operands, bias, workspace)?;
        match bias {
            Some(bias) if !activated => activation::cuda::bias(stream, self.slope, bias, operands[2]),
            _ => Ok(()),
        }
    }

    /// Makes a pass, by this crate's kernel where no algorithm is given. False if bias and activation are left to do.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn product(
        &self,
        pass: Pass,
        algorithm: Option<&Algorithm>,
        stream: &Stream,
        images: usize,
        operands: [View<'_>; 3],
        bias: Option<View<'_>>,
        workspace: View<'_>,
    ) -> Result<bool> {
        let &Conv { ref shape, precision, slope, .. } = self;
        let [from, by, to] = operands;
        let (Some(library), Some(algorithm)) = (&self.vendor, algorithm) else {
            match pass {
                Pass::Forward => {
                    let bias = bias.expect("a forward pass has a bias");
                    cuda::forward(stream, shape, images, precision, from, by, bias, slope, to)
                }
                Pass::BackwardInput => cuda::backward_input(stream, shape, images, precision, from, by, to),
                Pass::BackwardWeights => {
                    cuda::backward_weights(stream, shape, images, precision, from, by, workspace, to)
                }
            }?;
            return Ok(true);
        };
        let dtype = precision.storage();
        let x = ("a layer's input or its gradient", dtype, images * shape.input_len());
        let y = ("a layer's output or its gradient", dtype, images * shape.output_len());
        let w = ("a layer's weights", dtype, shape.weights_len());
        let dw = ("the gradient of a layer's weights", DType::F32, shape.weights_len());
        let expected = match pass {
            Pass::Forward => [x, w, y],
            Pass::BackwardInput => [w, y, x],
            Pass::BackwardWeights => [x, y, dw],
        };
        for ((what, dtype, len), view) in expected.into_iter().zip(operands) {
            check(what, view, dtype, len);
        }
        if let Some(bias) = bias {
            check("a layer's bias", bias, DType::F32, shape.filters);
        }
        library.run(pass, stream, algorithm, operands, bias, workspace)?;
        Ok(algorithm.form == Form::Fused)
    }
}

/// Memory to try algorithms on: x, w, y, bias, dx, dw and the workspace.
struct Bench([Memory; 7]);

impl Bench {
    fn new(stream: &Stream, layer: &Conv) -> Result<Self> {
        let zeroed = |dtype, len| Memory::zeroed(stream.device(), dtype, len);
        let &Conv { ref shape, images, precision, .. } = layer;
        let dtype = precision.storage();
        Ok(Bench([
            zeroed(dtype, images * shape.input_len())?,
            zeroed(dtype, shape.weights_len())?,
            zeroed(dtype, images * shape.output_len())?,
            zeroed(DType::F32, shape.filters)?,
            zeroed(dtype, images * shape.input_len())?,
            zeroed(DType::F32, shape.weights_len())?,
            zeroed(DType::F32, layer.workspace.max(WORKSPACE_LIMIT).div_ceil(4))?,
        ]))
    }
}
