//! A dense layer on a GPU, by whichever kernels are fastest there.
//!
//! [`Dense`] is set up once for a layer and a batch size. Where cuBLASLt is installed its algorithms race against this
//! crate's kernels, pass by pass ([`Options`] says whether they may); the winners serve from then on. A batch of another
//! size, such as the last of an epoch, is left to this crate's kernels: the library's algorithms were chosen for one size,
//! and a step that is captured has no time to choose.
//!
//! All calls put work on a stream, allocate nothing, and can be captured once they have run.

use super::cublaslt::{ALIGNMENT, Algorithm, Library, Plan};
use super::{Shape, cuda};
use crate::cuda::choice::{self, Choice, Note, Pass, WORKSPACE_LIMIT};
use crate::cuda::elements::check;
use crate::cuda::{Error, Libraries, Memory, Options, Precision, Result, Stream, View};
use crate::{DType, activation, conv};

/// A dense layer, set up for one GPU and one size of batches.
///
/// Samples lie in rows as \[N, I\] and \[N, O\], weights as \[O, I\], all in the precision's [storage](Precision::storage)
/// type. Bias and the gradients of weights and bias are f32, and so is the workspace, which may be shared by all that runs
/// on one stream.
pub struct Dense {
    shape: Shape,
    samples: usize,
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

impl std::fmt::Debug for Dense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Dense").field(&self.describe()).finish()
    }
}

impl Dense {
    /// Sets up a layer for batches of `samples` (fewer are possible, and slower). Its activation is `v` where it is
    /// positive, else `slope · v`: 0 is the rectified linear unit, 1 no activation. `input_gradient` says whether
    /// [`backward_input`](Self::backward_input) will be called.
    ///
    /// Memory for some batches is needed meanwhile, and returned.
    ///
    /// # Errors
    /// If this crate's own kernels cannot be compiled or run. What is wrong with a library is in
    /// [`describe`](Self::describe).
    pub fn new(
        stream: &Stream,
        shape: Shape,
        samples: usize,
        precision: Precision,
        slope: f32,
        input_gradient: bool,
        options: Options,
    ) -> Result<Self> {
        // Fewer samples are cut into slices in another way.
        let own = (1..=samples).map(|samples| cuda::workspace_bytes(&shape, samples, precision)).max();
        let mut dense = Dense {
            shape,
            samples,
            precision,
            slope,
            plan: None,
            forward: Choice::builtin(),
            backward_input: input_gradient.then_some(Choice::builtin()),
            backward_weights: Choice::builtin(),
            workspace: own.unwrap_or(0),
            notes: Vec::new(),
        };
        if options.libraries == Libraries::Builtin || samples == 0 {
            return Ok(dense);
        }
        let opened = Library::on(stream.device()).and_then(|library| {
            let version = library.version();
            Ok((Plan::new(library, &shape, samples, precision, slope)?, version))
        });
        let version = match opened {
            Ok((plan, version)) => {
                dense.plan = Some(plan);
                version
            }
            Err(error) => {
                dense.notes.push(Note::new("cuBLASLt", error));
                return Ok(dense);
            }
        };
        let own_kernels = &conv::cuda::PRODUCTS[precision as usize];
        let problem = format!("dense {shape:?} {samples} {precision} {slope} {}", options.deterministic);
        // There from the first race on.
        let mut bench = None;
        for pass in [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeights] {
            if pass == Pass::BackwardInput && !input_gradient {
                continue;
            }
            let key = choice::key(stream.device(), &version, &problem, own_kernels, pass);
            let choice = dense.settle(stream, pass, &key, options.deterministic, &mut bench)?;
            dense.workspace = dense.workspace.max(choice.workspace);
            match pass {
                Pass::Forward => dense.forward = choice,
                Pass::BackwardInput => dense.backward_input = Some(choice),
                Pass::BackwardWeights => dense.backward_weights = choice,
            }
        }
        Ok(dense)
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
                match Bench::new(stream, &self.shape, self.samples, self.precision, self.workspace) {
                    Ok(new) => *bench = Some(new),
                    // The race alone has this price; without it the layer still works.
                    Err(Error::OutOfMemory { .. }) => {
                        notes.push(Note::new("cuBLASLt", "too little memory to try its algorithms"));
                        return Ok(None);
                    }
                    Err(error) => return Err(error),
                }
            }
            let Some(bench) = bench else { return Ok(None) };
            let [x, w, y, bias, dx, dw, workspace] = bench.views();
            let (candidates, refused) = plan.candidates(pass, deterministic);
            notes.extend(refused);
            for (seed, view) in [x, w, y, bias].into_iter().enumerate() {
                choice::fill(stream, view, seed as u64)?;
            }
            let samples = self.samples;
            let run = |algorithm: Option<&Algorithm>| match pass {
                Pass::Forward => self.run_forward(algorithm, stream, samples, x, w, bias, y, workspace),
                Pass::BackwardInput => {
                    self.run_backward_input(algorithm, stream, samples, w, y, dx, workspace)
                }
                Pass::BackwardWeights => {
                    self.run_backward_weights(algorithm, stream, samples, x, y, dw, workspace)
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
        let Shape { inputs, outputs } = self.shape;
        choice::describe(
            &format!("dense {outputs} of {inputs}, {} samples", self.samples),
            self.precision,
            [Some(&self.forward), self.backward_input.as_ref(), Some(&self.backward_weights)],
            &self.notes,
        )
    }

    /// The library's algorithm, if the batch and the memory are what it was chosen for.
    fn chosen<'a>(
        &self,
        choice: &'a Choice<Algorithm>,
        samples: usize,
        views: &[View<'_>],
    ) -> Option<&'a Algorithm> {
        let aligned = views.iter().all(|view| view.address().is_multiple_of(ALIGNMENT.into()));
        choice.algorithm.as_ref().filter(|_| samples == self.samples && aligned)
    }

    /// Overwrites `y` \[N, O\] with the layer's activated output.
    ///
    /// # Errors
    /// If the work cannot be put on the stream.
    ///
    /// # Panics
    /// If lengths or types do not fit, or there are more samples than the layer was set up for.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn forward(
        &self,
        stream: &Stream,
        samples: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        y: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.check_batch(samples, workspace);
        let algorithm = self.chosen(&self.forward, samples, &[x, weights, bias, y]);
        self.run_forward(algorithm, stream, samples, x, weights, bias, y, workspace)
    }

    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn run_forward(
        &self,
        algorithm: Option<&Algorithm>,
        stream: &Stream,
        samples: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        y: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (shape, precision) = (&self.shape, self.precision);
        let (Some(plan), Some(algorithm)) = (&self.plan, algorithm) else {
            return cuda::forward(stream, shape, samples, precision, x, weights, bias, self.slope, y);
        };
        let dtype = precision.storage();
        check("a dense layer's input", x, dtype, samples * shape.inputs);
        check("a dense layer's weights", weights, dtype, shape.inputs * shape.outputs);
        check("a dense layer's bias", bias, DType::F32, shape.outputs);
        check("a dense layer's output", y, dtype, samples * shape.outputs);
        let fused = algorithm.fused.then_some(bias);
        plan.multiply(Pass::Forward, stream, algorithm, [weights, x, y], fused, workspace)?;
        if algorithm.fused { Ok(()) } else { activation::cuda::bias(stream, self.slope, bias, y) }
    }

    /// Overwrites `dx` \[N, I\] with the gradient of the input, given that of the output before its activation.
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
        samples: usize,
        weights: View<'_>,
        dy: View<'_>,
        dx: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.check_batch(samples, workspace);
        let choice = self.backward_input.as_ref();
        let algorithm = choice.and_then(|choice| self.chosen(choice, samples, &[weights, dy, dx]));
        self.run_backward_input(algorithm, stream, samples, weights, dy, dx, workspace)
    }

    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn run_backward_input(
        &self,
        algorithm: Option<&Algorithm>,
        stream: &Stream,
        samples: usize,
        weights: View<'_>,
        dy: View<'_>,
        dx: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (shape, precision) = (&self.shape, self.precision);
        let (Some(plan), Some(algorithm)) = (&self.plan, algorithm) else {
            return cuda::backward_input(stream, shape, samples, precision, weights, dy, dx);
        };
        let dtype = precision.storage();
        check("a dense layer's weights", weights, dtype, shape.inputs * shape.outputs);
        check("the gradient of a dense layer's output", dy, dtype, samples * shape.outputs);
        check("the gradient of a dense layer's input", dx, dtype, samples * shape.inputs);
        plan.multiply(Pass::BackwardInput, stream, algorithm, [weights, dy, dx], None, workspace)
    }

    /// Overwrites `dw` \[O, I\], in f32, with the gradient of the weights, summed over all samples, given that of the output
    /// before its activation.
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
        samples: usize,
        x: View<'_>,
        dy: View<'_>,
        dw: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.check_batch(samples, workspace);
        let algorithm = self.chosen(&self.backward_weights, samples, &[x, dy, dw]);
        self.run_backward_weights(algorithm, stream, samples, x, dy, dw, workspace)
    }

    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn run_backward_weights(
        &self,
        algorithm: Option<&Algorithm>,
        stream: &Stream,
        samples: usize,
        x: View<'_>,
        dy: View<'_>,
        dw: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let (shape, precision) = (&self.shape, self.precision);
        let (Some(plan), Some(algorithm)) = (&self.plan, algorithm) else {
            return cuda::backward_weights(stream, shape, samples, precision, x, dy, workspace, dw);
        };
        let dtype = precision.storage();
        check("a dense layer's input", x, dtype, samples * shape.inputs);
        check("the gradient of a dense layer's output", dy, dtype, samples * shape.outputs);
        check("the gradient of a dense layer's weights", dw, DType::F32, shape.inputs * shape.outputs);
        plan.multiply(Pass::BackwardWeights, stream, algorithm, [x, dy, dw], None, workspace)
    }

    /// Overwrites `db` \[O\], in f32, with the gradient of the bias.
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
        samples: usize,
        dy: View<'_>,
        db: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.check_batch(samples, workspace);
        cuda::backward_bias(stream, &self.shape, samples, self.precision, dy, workspace, db)
    }

    #[track_caller]
    fn check_batch(&self, samples: usize, workspace: View<'_>) {
        choice::check_batch(samples, self.samples, workspace, self.workspace);
    }
}

/// Memory to try algorithms on: x, w, y, bias, dx, dw and the workspace.
struct Bench([Memory; 7]);

impl Bench {
    fn new(
        stream: &Stream,
        shape: &Shape,
        samples: usize,
        precision: Precision,
        workspace: usize,
    ) -> Result<Self> {
        let zeroed = |dtype, len| Memory::zeroed(stream.device(), dtype, len);
        let dtype = precision.storage();
        let Shape { inputs, outputs } = *shape;
        Ok(Bench([
            zeroed(dtype, samples * inputs)?,
            zeroed(dtype, inputs * outputs)?,
            zeroed(dtype, samples * outputs)?,
            zeroed(DType::F32, outputs)?,
            zeroed(dtype, samples * inputs)?,
            zeroed(DType::F32, inputs * outputs)?,
            zeroed(DType::F32, workspace.max(WORKSPACE_LIMIT).div_ceil(4))?,
        ]))
    }

    fn views(&self) -> [View<'_>; 7] {
        self.0.each_ref().map(Memory::view)
    }
}
