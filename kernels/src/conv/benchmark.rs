//! The times of all candidates for one pass of a layer, for finding out where time is lost.

use super::ConvShape;
use super::layer::Layer;
use super::tuning::TuningBuffers;
use crate::Precision;
use crate::cuda::autotune::Note;
use crate::cuda::trial::{self, Outcome, Trial};
use crate::cuda::{AutotuneOptions, Libraries, Pass, Result, Stream};

/// One pass of one layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerPass {
    /// The layer's extents.
    pub shape: ConvShape,
    /// Images of the batch.
    pub images: usize,
    /// The precision of its products.
    pub precision: Precision,
    /// The slope of its activation for negative values: 0 is ReLU, 1 no activation.
    pub slope: f32,
    /// The pass.
    pub pass: Pass,
}

impl LayerPass {
    /// Floating-point operations, counting those with the zeros around an image.
    pub fn operations(&self) -> f64 {
        let pixels = self.images * self.shape.out_height() * self.shape.out_width();
        2.0 * pixels as f64 * self.shape.weights_len() as f64
    }

    /// Bytes that have to be moved at least: every operand read once, the result written once.
    pub fn bytes(&self) -> f64 {
        let size = self.precision.storage().size();
        let images = self.images * (self.shape.input_len() + self.shape.output_len()) * size;
        let weights = match self.pass {
            Pass::Forward => self.shape.weights_len() * size + self.shape.filters * size_of::<f32>(),
            Pass::BackwardInput => self.shape.weights_len() * size,
            Pass::BackwardWeights => self.shape.weights_len() * size_of::<f32>(),
        };
        (images + weights) as f64
    }
}

/// What became of one candidate.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// `built in`, or the library's name for it.
    pub name: String,
    /// How a library computes the pass: `plain`, `fused`, `narrow` or `transposed`; `None` for this crate's own
    /// kernel.
    pub form: Option<&'static str>,
    /// Time of one run; `None` if it was rejected.
    pub milliseconds: Option<f64>,
    /// The time is that of a single run with its launch, because the candidate is several times slower than others or
    /// because no rounds were requested.
    pub single_run: bool,
    /// Why it cannot be used.
    pub rejected: Option<String>,
    /// Training would use it, with these options.
    pub selected: bool,
}

/// The candidates of one pass, this crate's own kernel first, and notes about algorithms that are not candidates.
#[derive(Debug, Clone)]
pub struct PassBenchmark {
    /// All candidates.
    pub candidates: Vec<Candidate>,
    /// Why others are none, or why there is no library.
    pub notes: Vec<String>,
}

/// Verifies and benchmarks every candidate for a pass as autotuning does, without its cache. Gradients of weights in
/// bf16 ([`AutotuneOptions::narrow_gradients`]) are always benchmarked, and selected only if `options` say so. Each
/// candidate is timed in `rounds` rounds; if there are none, its only time is that of a single run.
///
/// # Errors
/// If this crate's own kernels cannot be compiled or run, there is not enough memory, or the GPU fails.
///
/// # Panics
/// If the kernel does not fit the images.
pub fn benchmark(
    stream: &Stream,
    layer_pass: &LayerPass,
    options: AutotuneOptions,
    rounds: usize,
) -> Result<PassBenchmark> {
    let &LayerPass { shape, images, precision, slope, pass } = layer_pass;
    shape.check();
    let mut layer = Layer::new(stream, shape, images, precision, slope)?;
    let mut notes = Vec::new();
    if options.libraries == Libraries::Auto
        && layer.suits_libraries()
        && let Err(error) = layer.open_library(stream)
    {
        notes.push(Note::new(layer.library_name(), error));
    }
    let all = AutotuneOptions { narrow_gradients: true, ..options };
    let (trials, refused) = TuningBuffers::new(stream, &layer)?.trials(stream, &layer, pass, all, rounds)?;
    notes.extend(refused);
    let selected = trial::fastest(&trial::eligible(&trials, options.narrow_gradients));
    let candidate = |trial: &Trial| {
        let name = trial.algorithm.as_ref().map_or("built in".to_owned(), ToString::to_string);
        let (milliseconds, single_run, rejected) = match &trial.outcome {
            Outcome::Timed(milliseconds) => (Some(*milliseconds), rounds == 0, None),
            Outcome::Slow(milliseconds) => (Some(*milliseconds), true, None),
            Outcome::Rejected(why) => (None, false, Some(why.clone())),
        };
        let selected = rejected.is_none()
            && selected.as_ref().is_some_and(|selection| selection.algorithm == trial.algorithm);
        let form = trial.algorithm.map(|algorithm| algorithm.form.name());
        Candidate { name, form, milliseconds, single_run, rejected, selected }
    };
    let candidates = trials.iter().map(candidate).collect();
    Ok(PassBenchmark { candidates, notes: notes.iter().map(Note::to_string).collect() })
}
