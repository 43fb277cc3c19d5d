//! A convolutional layer on a GPU, by whichever kernels are fastest there.
//!
//! [`Conv`] is set up once for a layer and a batch size. Where cuDNN is installed its algorithms race against this crate's
//! kernels, pass by pass ([`Options`] says whether they may); the winners serve from then on. Two cases are this crate's
//! own without a race:
//!
//! - images with one channel, on which cuDNN spends most of its time rearranging them;
//! - a batch of another size than was set up, such as the last of an epoch: the library's algorithms were chosen for one
//!   size, and a step that is captured has no time to choose.
//!
//! All calls put work on a stream, allocate nothing, and can be captured once they have run.

use super::cudnn::{Algorithm, Buffers, Form, Library, Plan};
use super::{Shape, cuda};
use crate::cuda::choice::{self, Choice, Note, Pass, WORKSPACE_LIMIT};
use crate::cuda::elements::{aligned, check};
use crate::cuda::{Error, Libraries, Memory, Options, Precision, Result, Stream, View};
use crate::{DType, activation, arena};

/// A convolutional layer, set up for one GPU and one size of batches.
///
/// Images lie as \[N, H, W, C\] and weights as \[F, K, K, C\], both in the precision's [storage](Precision::storage) type.
/// Bias and the gradients of weights and bias are f32, and so is the workspace, which may be shared by all that runs on
/// one stream.
pub struct Conv {
    shape: Shape,
    images: usize,
    precision: Precision,
    slope: f32,
    plan: Option<Plan>,
    forward: Choice<Algorithm>,
    /// None where nobody asks for it.
    backward_input: Option<Choice<Algorithm>>,
    backward_weights: Choice<Algorithm>,
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
        shape: Shape,
        images: usize,
        precision: Precision,
        slope: f32,
        input_gradient: bool,
        options: Options,
    ) -> Result<Self> {
        shape.check();
        // Fewer images are cut into slices in another way.
        let own = (1..=images).map(|images| cuda::workspace_bytes(&shape, images, precision)).max();
        let mut conv = Conv {
            shape,
            images,
            precision,
            slope,
            plan: None,
            forward: Choice::builtin(),
            backward_input: input_gradient.then_some(Choice::builtin()),
            backward_weights: Choice::builtin(),
            workspace: own.unwrap_or(0),
            notes: Vec::new(),
        };
        if options.libraries == Libraries::Builtin || shape.channels == 1 || images == 0 {
            return Ok(conv);
        }
        let opened = Library::on(stream.device()).and_then(|library| {
            let version = library.version();
            Ok((Plan::new(library, &shape, images, precision, slope)?, version))
        });
        let version = match opened {
            Ok((plan, version)) => {
                conv.plan = Some(plan);
                version
            }
            Err(error) => {
                conv.notes.push(Note::new("cuDNN", error));
                return Ok(conv);
            }
        };
        let own_kernels = &cuda::PRODUCTS[precision as usize];
        let problem = format!("conv {shape:?} {images} {precision} {slope} {}", options.deterministic);
        // There from the first race on.
        let mut bench = None;
        for pass in [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeights] {
            if pass == Pass::BackwardInput && !input_gradient {
                continue;
            }
            let key = choice::key(stream.device(), &version, &problem, own_kernels, pass);
            let choice = conv.settle(stream, pass, &key, options.deterministic, &mut bench)?;
            conv.workspace = conv.workspace.max(choice.workspace);
            match pass {
                Pass::Forward => conv.forward = choice,
                Pass::BackwardInput => conv.backward_input = Some(choice),
                Pass::BackwardWeights => conv.backward_weights = choice,
            }
        }
        Ok(conv)
    }

    /// The choice for a pass, remembered or made now.
    fn settle(
        &mut self,
        stream: &Stream,
        pass: Pass,
        key: &str,
        deterministic: bool,
        bench: &mut Option<Bench>,
    ) -> Result<Choice<Algorithm>> {
        let Some(plan) = &self.plan else { return Ok(Choice::builtin()) };
        let mut notes = Vec::new();
        let supported = |algorithm: &Algorithm| plan.workspace(pass, algorithm);
        let choice = choice::settle(key, supported, || {
            if bench.is_none() {
                match Bench::new(stream, &self.shape, self.images, self.precision, self.workspace) {
                    Ok(new) => *bench = Some(new),
                    // The race alone has this price; without it the layer still works.
                    Err(Error::OutOfMemory { .. }) => {
                        notes.push(Note::new("cuDNN", "too little memory to try its algorithms"));
                        return Ok(None);
                    }
                    Err(error) => return Err(error),
                }
            }
            let Some(bench) = bench else { return Ok(None) };
            let buffers = bench.buffers();
            let (candidates, refused) = plan.candidates(pass, stream, deterministic, &buffers);
            notes.extend(refused);
            for (seed, view) in [buffers.x, buffers.w, buffers.y, bench.bias.view()].into_iter().enumerate() {
                choice::fill(stream, view, seed as u64)?;
            }
            let Buffers { x, w, y, dx, dw, workspace } = buffers;
            let bias = bench.bias.view();
            let run = |algorithm: Option<&Algorithm>| match pass {
                Pass::Forward => self.run_forward(algorithm, stream, self.images, x, w, bias, y, workspace),
                Pass::BackwardInput => {
                    self.run_backward_input(algorithm, stream, self.images, w, y, dx, workspace)
                }
                Pass::BackwardWeights => {
                    self.run_backward_weights(algorithm, stream, self.images, x, y, dw, workspace)
                }
            };
            let output = match pass {
                Pass::Forward => y,
                Pass::BackwardInput => dx,
                Pass::BackwardWeights => dw,
            };
            let poison = (pass == Pass::Forward).then_some(bias);
            let outcome = choice::race(stream, self.precision, output, poison, candidates, &run)?;
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
        let Shape { channels, height, width, filters, kernel, .. } = self.shape;
        choice::describe(
            &format!(
                "conv {filters} {kernel}x{kernel} of {channels}x{height}x{width}, {} images",
                self.images
            ),
            self.precision,
            [Some(&self.forward), self.backward_input.as_ref(), Some(&self.backward_weights)],
            &self.notes,
        )
    }

    /// The library's algorithm, if the batch and the memory are what it was chosen for.
    fn chosen<'a>(
        &self,
        choice: &'a Choice<Algorithm>,
        images: usize,
        views: &[View<'_>],
    ) -> Option<&'a Algorithm> {
        let fits =
            images == self.images && views.iter().all(|view| aligned(16 / view.dtype().size(), &[*view]));
        choice.algorithm.as_ref().filter(|_| fits)
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
        self.check_batch(images, workspace);
        let algorithm = self.chosen(&self.forward, images, &[x, weights, bias, y]);
        self.run_forward(algorithm, stream, images, x, weights, bias, y, workspace)
    }

    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn run_forward(
        &self,
        algorithm: Option<&Algorithm>,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        y: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (shape, precision) = (&self.shape, self.precision);
        let (Some(plan), Some(algorithm)) = (&self.plan, algorithm) else {
            return cuda::forward(stream, shape, images, precision, x, weights, bias, self.slope, y);
        };
        let dtype = precision.storage();
        check("a convolution's input", x, dtype, images * shape.input_len());
        check("a convolution's weights", weights, dtype, shape.weights_len());
        check("a convolution's bias", bias, DType::F32, shape.filters);
        check("a convolution's output", y, dtype, images * shape.output_len());
        plan.forward(stream, algorithm, x, weights, bias, y, workspace)?;
        match algorithm.form {
            Form::Fused => Ok(()),
            _ => activation::cuda::bias(stream, self.slope, bias, y),
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
        self.check_batch(images, workspace);
        let choice = self.backward_input.as_ref();
        let algorithm = choice.and_then(|choice| self.chosen(choice, images, &[weights, dy, dx]));
        self.run_backward_input(algorithm, stream, images, weights, dy, dx, workspace)
    }

    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn run_backward_input(
        &self,
        algorithm: Option<&Algorithm>,
        stream: &Stream,
        images: usize,
        weights: View<'_>,
        dy: View<'_>,
        dx: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (shape, precision) = (&self.shape, self.precision);
        let (Some(plan), Some(algorithm)) = (&self.plan, algorithm) else {
            return cuda::backward_input(stream, shape, images, precision, weights, dy, dx);
        };
        let dtype = precision.storage();
        check("a convolution's weights", weights, dtype, shape.weights_len());
        check("the gradient of a convolution's output", dy, dtype, images * shape.output_len());
        check("the gradient of a convolution's input", dx, dtype, images * shape.input_len());
        plan.backward_input(stream, algorithm, weights, dy, dx, workspace)
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
        self.check_batch(images, workspace);
        let algorithm = self.chosen(&self.backward_weights, images, &[x, dy, dw]);
        self.run_backward_weights(algorithm, stream, images, x, dy, dw, workspace)
    }

    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn run_backward_weights(
        &self,
        algorithm: Option<&Algorithm>,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        dy: View<'_>,
        dw: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (shape, precision) = (&self.shape, self.precision);
        let (Some(plan), Some(algorithm)) = (&self.plan, algorithm) else {
            return cuda::backward_weights(stream, shape, images, precision, x, dy, workspace, dw);
        };
        let dtype = precision.storage();
        check("a convolution's input", x, dtype, images * shape.input_len());
        check("the gradient of a convolution's output", dy, dtype, images * shape.output_len());
        check("the gradient of a convolution's weights", dw, DType::F32, shape.weights_len());
        plan.backward_weights(stream, algorithm, x, dy, dw, workspace)?;
        match algorithm.form {
            Form::Narrow => arena::cuda::widen(stream, plan.narrow_gradient(workspace), dw),
            _ => Ok(()),
        }
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
        self.check_batch(images, workspace);
        cuda::backward_bias(stream, &self.shape, images, self.precision, dy, workspace, db)
    }

    #[track_caller]
    fn check_batch(&self, images: usize, workspace: View<'_>) {
        choice::check_batch(images, self.images, workspace, self.workspace);
    }
}

/// Memory to try algorithms on.
struct Bench {
    x: Memory,
    w: Memory,
    bias: Memory,
    y: Memory,
    dx: Memory,
    dw: Memory,
    workspace: Memory,
}

impl Bench {
    fn new(
        stream: &Stream,
        shape: &Shape,
        images: usize,
        precision: Precision,
        workspace: usize,
    ) -> Result<Self> {
        let zeroed = |dtype, len| Memory::zeroed(stream.device(), dtype, len);
        let dtype = precision.storage();
        Ok(Bench {
            x: zeroed(dtype, images * shape.input_len())?,
            w: zeroed(dtype, shape.weights_len())?,
            bias: zeroed(DType::F32, shape.filters)?,
            y: zeroed(dtype, images * shape.output_len())?,
            dx: zeroed(dtype, images * shape.input_len())?,
            dw: zeroed(DType::F32, shape.weights_len())?,
            workspace: zeroed(DType::F32, workspace.max(WORKSPACE_LIMIT).div_ceil(4))?,
        })
    }

    fn buffers(&self) -> Buffers<'_> {
        Buffers {
            x: self.x.view(),
            w: self.w.view(),
            y: self.y.view(),
            dx: self.dx.view(),
            dw: self.dw.view(),
            workspace: self.workspace.view(),
        }
    }
}
