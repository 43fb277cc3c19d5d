//! Autotuning of a layer: the operands, and the comparison of every result with that of a plain kernel.
//!
//! The plain kernel ([`super::plain`]) runs once for a pass. Each candidate then runs on an output full of garbage,
//! and all of its results are compared on the GPU, within the bounds of [`super::tolerance`]. A forward pass runs
//! again with a NaN in the bias, which has to appear in the results: a library's ReLU may turn NaN into zero, and a
//! diverged training run would then continue unnoticed.
//!
//! The plain sums of `conv6` at a batch of 1,024, all passes, are 2.4 TFLOP: two or three seconds on an H100 if they
//! reach one TFLOP/s, before the first training only.

use super::layer::Layer;
use super::library_layer::Operands;
use super::plain;
use super::tolerance::tolerance;
use crate::cuda::algorithm::LibraryAlgorithm;
use crate::cuda::autotune::{Note, workspace_limit};
use crate::cuda::compare::{compare, fill_random};
use crate::cuda::trial::{Contest, Trial};
use crate::cuda::{AutotuneOptions, Memory, Pass, Result, Stream, View};
use crate::{DType, arena};

/// The contents of an output before a candidate runs. Not NaN: a library may multiply them by zero.
const GARBAGE: f32 = -1e30;

const COMPARISON: &str = "comparison with a plain kernel failed";

/// Operands for autotuning.
pub(super) struct TuningBuffers {
    x: Memory,
    w: Memory,
    y: Memory,
    bias: Memory,
    dx: Memory,
    dw: Memory,
    /// The results of the plain kernel, f32, and its scratch.
    expected: Memory,
    transposed: Memory,
}

impl TuningBuffers {
    /// # Errors
    /// If there is not enough memory.
    pub(super) fn new(stream: &Stream, layer: &Layer) -> Result<Self> {
        let zeroed = |dtype, len| Memory::zeroed(stream.device(), dtype, len);
        let &Layer { ref shape, images, precision, .. } = layer;
        let dtype = precision.storage();
        let (inputs, outputs) = (images * shape.input_len(), images * shape.output_len());
        let weights = shape.weights_len();
        Ok(TuningBuffers {
            x: zeroed(dtype, inputs)?,
            w: zeroed(dtype, weights)?,
            y: zeroed(dtype, outputs)?,
            bias: zeroed(DType::F32, shape.filters)?,
            dx: zeroed(dtype, inputs)?,
            dw: zeroed(DType::F32, weights)?,
            expected: zeroed(DType::F32, inputs.max(outputs).max(weights))?,
            transposed: zeroed(DType::F32, weights)?,
        })
    }

    /// Fills whatever a pass reads with numbers: kernels run at another speed on zeros, and comparing zeros proves
    /// nothing.
    fn fill(&self, stream: &Stream) -> Result<()> {
        let operands = [&self.x, &self.w, &self.y, &self.bias];
        operands.into_iter().zip(1..).try_for_each(|(memory, seed)| fill_random(stream, memory.view(), seed))
    }

    fn operands<'a>(&'a self, pass: Pass, workspace: View<'a>) -> Operands<'a> {
        let TuningBuffers { x, w, y, bias, dx, dw, .. } = self;
        let [x, w, y, bias, dx, dw] = [x, w, y, bias, dx, dw].map(Memory::view);
        match pass {
            Pass::Forward => Operands::forward(x, w, bias, y, workspace),
            Pass::BackwardInput => Operands::backward_input(w, y, dx, workspace),
            Pass::BackwardWeights => Operands::backward_weights(x, y, dw, workspace),
        }
    }

    /// Tries this crate's own kernel and all algorithms of the library, and times each of them in `rounds` rounds. The
    /// notes are about algorithms that the library itself excludes.
    ///
    /// # Errors
    /// If this crate's own kernels cannot be run, there is not enough memory for the workspace, or the GPU fails.
    pub(super) fn trials(
        &self,
        stream: &Stream,
        layer: &Layer,
        pass: Pass,
        options: AutotuneOptions,
        rounds: usize,
    ) -> Result<(Vec<Trial>, Vec<Note>)> {
        let library = layer.library.as_ref();
        let (_, memory) = stream.device().free_and_total()?;
        let (candidates, notes) = library.map_or_else(Default::default, |library| {
            library.candidates(pass, options.deterministic, workspace_limit(memory))
        });
        let needs = candidates.iter().map(|candidate| candidate.workspace);
        let needed = needs.fold(layer.own_workspace(), usize::max);
        let workspace = Memory::zeroed(stream.device(), DType::F32, needed.div_ceil(4))?;
        let operands = self.operands(pass, workspace.view());
        self.fill(stream)?;
        let expected = self.expected.slice(0..operands.result.len());
        self.compute_expected(stream, layer, &operands, expected)?;
        let run =
            |algorithm: Option<&LibraryAlgorithm>| layer.run(algorithm, stream, layer.images, &operands);
        let verification = Verification { stream, layer, operands: &operands, expected, run: &run };
        let problem = |algorithm: Option<&LibraryAlgorithm>| verification.problem(algorithm);
        let narrow_gradients = options.narrow_gradients;
        let contest = Contest { stream, candidates, run: &run, problem: &problem, narrow_gradients, rounds };
        Ok((contest.trials()?, notes))
    }

    /// The results of the plain kernel.
    fn compute_expected(
        &self,
        stream: &Stream,
        layer: &Layer,
        operands: &Operands<'_>,
        to: View<'_>,
    ) -> Result<()> {
        let &Layer { ref shape, images, slope, .. } = layer;
        let [a, b] = operands.factors;
        match operands.pass {
            Pass::Forward => {
                let (bias, transposed) = (self.bias.view(), self.transposed.view());
                plain::forward(stream, shape, images, a, b, bias, slope, transposed, to)
            }
            Pass::BackwardInput => plain::backward_input(stream, shape, images, a, b, to),
            Pass::BackwardWeights => plain::backward_weights(stream, shape, images, a, b, to),
        }
    }
}

/// The comparison of a pass's results with those that are expected.
struct Verification<'a> {
    stream: &'a Stream,
    layer: &'a Layer,
    operands: &'a Operands<'a>,
    expected: View<'a>,
    run: &'a dyn Fn(Option<&LibraryAlgorithm>) -> Result<()>,
}

impl Verification<'_> {
    /// What is wrong with the results of an algorithm; `None` if they are right.
    fn problem(&self, algorithm: Option<&LibraryAlgorithm>) -> Result<Option<String>> {
        let &Verification { stream, layer, operands, expected, run } = self;
        let &Operands { result, bias, .. } = operands;
        let tolerance = tolerance(algorithm, layer.precision, self.terms(), bias.is_some(), result.dtype());
        arena::cuda::fill(stream, result, GARBAGE)?;
        run(algorithm)?;
        let found = compare(stream, expected, result, None, tolerance)?;
        if found.wrong > 0 {
            let deviation = found.largest_difference / found.largest_expected;
            return Ok(Some(format!(
                "{COMPARISON}: results deviate by {deviation:.0e} of the largest value, {} of {} by more than rounding explains",
                found.wrong,
                result.len()
            )));
        }
        let Some(bias) = bias else { return Ok(None) };
        let first = bias.slice(0..1);
        let value = first.to_vec::<f32>(stream)?;
        stream.upload(&[f32::NAN], first)?;
        let ran = run(algorithm);
        stream.upload(&value, first)?;
        ran?;
        let found = compare(stream, expected, result, Some(layer.shape.filters), tolerance)?;
        let lost = format!("{COMPARISON}: NaN in the bias does not reach the output");
        Ok((found.wrong > 0).then_some(lost))
    }

    /// The maximum number of products that a result of the pass is the sum of.
    fn terms(&self) -> usize {
        let &Layer { ref shape, images, .. } = self.layer;
        match self.operands.pass {
            Pass::Forward => shape.filter_len(),
            Pass::BackwardInput => shape.filters * shape.kernel * shape.kernel,
            Pass::BackwardWeights => images * shape.out_height() * shape.out_width(),
        }
    }
}
