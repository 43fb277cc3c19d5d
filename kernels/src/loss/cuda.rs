//! Softmax cross-entropy on a GPU: the score of all batches since it was last zeroed stays in device memory, and is
//! copied on request.

use super::Report;
use crate::DType;
use crate::cuda::elements::{THREADS, check, count, run, typed};
use crate::cuda::{Arg, Grid, Result, Source, StepState, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "loss", text: include_str!("loss.cu") };

/// Maximum number of blocks of a launch, `LOSS_BLOCKS` of the kernels.
const BLOCKS: u32 = 128;

/// Bytes of the scratch area that every launch needs, zero before the first one. Launches on the same stream may
/// share it.
pub const SCRATCH_BYTES: usize = 8 + BLOCKS as usize * (8 + 4);

/// A [`Report`] in device memory: `struct Score` of the kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Score {
    /// Sum of the losses of all samples. NaN if a label was not a class.
    pub loss_sum: f64,
    /// Number of samples whose label has the largest logit.
    pub correct: u64,
    /// Number of samples.
    pub samples: u64,
}

impl Score {
    /// Size in bytes. All bytes zero is the initial score.
    pub const BYTES: usize = size_of::<Self>();

    /// The score in `bytes` that were copied from the GPU.
    ///
    /// # Panics
    /// If they are not [`Score::BYTES`].
    pub fn from_bytes(bytes: &[u8]) -> Self {
        bytemuck::pod_read_unaligned(bytes)
    }
}

impl From<Score> for Report {
    fn from(score: Score) -> Self {
        let Score { loss_sum, correct, samples } = score;
        Report { loss_sum, correct, samples }
    }
}

/// The arguments that both kernels share, and the grid: a warp for each sample.
struct Samples {
    arguments: [Arg; 4],
    grid: Grid,
}

impl Samples {
    #[track_caller]
    fn new(logits: View<'_>, labels: View<'_>, scratch: View<'_>, score: View<'_>) -> Self {
        let samples = labels.len();
        assert!(samples > 0, "the loss of no sample");
        let classes = logits.len() / samples;
        check("labels", labels, DType::U8, samples);
        check("logits", logits, logits.dtype(), samples * classes);
        check("the scratch area of a loss", scratch, DType::U8, SCRATCH_BYTES);
        check("a score", score, DType::U8, Score::BYTES);
        assert_eq!(
            (scratch.address() % 8, score.address() % 8),
            (0, 0),
            "addresses of scratch area and score"
        );
        count(logits.len());
        Samples {
            arguments: [logits.into(), labels.into(), count(samples).into(), count(classes).into()],
            grid: Grid::cover(samples * 32, THREADS, BLOCKS),
        }
    }
}

/// Adds loss and accuracy of a batch to `score` ([`Score`], as bytes) and overwrites `gradient` with the gradient of
/// the mean loss of the batch. Labels are bytes.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit, or there is no sample.
pub fn gradient(
    stream: &Stream,
    logits: View<'_>,
    labels: View<'_>,
    gradient: View<'_>,
    scratch: View<'_>,
    score: View<'_>,
) -> Result<()> {
    gradient_over(stream, logits, labels, labels.len() as f64, gradient, scratch, score)
}

/// As [`gradient`], of the sum of the losses divided by `samples` instead of by their number.
///
/// # Errors
/// As [`gradient`].
///
/// # Panics
/// As [`gradient`].
pub fn gradient_over(
    stream: &Stream,
    logits: View<'_>,
    labels: View<'_>,
    samples: f64,
    gradient: View<'_>,
    scratch: View<'_>,
    score: View<'_>,
) -> Result<()> {
    gradient_scaled(stream, logits, labels, (samples, None), gradient, scratch, score)
}

/// As [`gradient_over`], multiplied by the loss scale of a [`StepState`]. The score is not scaled.
///
/// # Errors
/// As [`gradient`].
///
/// # Panics
/// As [`gradient`]; if the state is not the memory of a [`StepState`].
pub fn gradient_scaled(
    stream: &Stream,
    logits: View<'_>,
    labels: View<'_>,
    (samples, state): (f64, Option<View<'_>>),
    gradient: View<'_>,
    scratch: View<'_>,
    score: View<'_>,
) -> Result<()> {
    let Samples { arguments: [a, b, c, d], grid } = Samples::new(logits, labels, scratch, score);
    check("the gradient of logits", gradient, logits.dtype(), logits.len());
    if let Some(state) = state {
        StepState::check(state);
    }
    let share = 1.0 / samples;
    let arguments = [a, b, c, d, share.into(), gradient.into(), scratch.into(), score.into(), state.into()];
    // SAFETY: the lengths fit the numbers of samples and classes.
    unsafe { run(stream, &SOURCE, &typed("loss_gradient", logits), grid, &arguments) }
}

/// Adds loss and accuracy of a batch to `score`, like [`gradient`], for evaluation.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// As [`gradient`].
pub fn score(
    stream: &Stream,
    logits: View<'_>,
    labels: View<'_>,
    scratch: View<'_>,
    score: View<'_>,
) -> Result<()> {
    let Samples { arguments: [a, b, c, d], grid } = Samples::new(logits, labels, scratch, score);
    let arguments = [a, b, c, d, scratch.into(), score.into()];
    // SAFETY: the lengths fit the numbers of samples and classes.
    unsafe { run(stream, &SOURCE, &typed("loss_score", logits), grid, &arguments) }
}
