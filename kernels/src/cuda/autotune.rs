//! Autotuning: selects the fastest algorithm for a pass by benchmarking, and caches the selection.
//!
//! The libraries have several algorithms for the same product, and this crate has a kernel of its own; which is the
//! fastest depends on the shape, the GPU and the versions. So all candidates are benchmarked when a layer is set up,
//! round-robin, on memory filled with numbers. What is timed is a captured graph of many runs: a training step runs
//! them that way, the launch overhead stays out of the measurement, and algorithms that cannot be captured drop out.
//! A candidate that fails, or whose results differ from those of the crate's own kernel, is rejected: a library that
//! does not support a combination of types costs speed, but never makes a run fail.
//!
//! The selection is written to the cache of compiled kernels, so that the next run computes with the same algorithms and
//! therefore with the same rounding. When several ranks tune at the same time, the first one to write decides for all.

use std::time::Instant;

use half::bf16;

use super::algorithm::LibraryAlgorithm;
use super::error::{Error, Result};
use super::{Device, Graph, Source, Stream, View, cache};
use crate::DType;
use crate::Precision;

/// Which algorithms a layer may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AutotuneOptions {
    /// Only algorithms whose results are the same bits every time.
    pub deterministic: bool,
    /// Whose algorithms are candidates.
    pub libraries: Libraries,
}

impl Default for AutotuneOptions {
    fn default() -> Self {
        AutotuneOptions { deterministic: true, libraries: Libraries::Auto }
    }
}

/// Whose algorithms a layer may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Libraries {
    /// cuDNN's and cuBLASLt's, if installed and faster than this crate's kernels.
    Auto,
    /// This crate's kernels only.
    Builtin,
}

impl Libraries {
    /// The name used on command lines: `auto` or `builtin`.
    pub const fn name(self) -> &'static str {
        match self {
            Libraries::Auto => "auto",
            Libraries::Builtin => "builtin",
        }
    }
}

impl std::fmt::Display for Libraries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Libraries {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let all = [Libraries::Auto, Libraries::Builtin];
        let found = all.into_iter().find(|libraries| libraries.name() == text);
        found.ok_or_else(|| "known are auto and builtin".into())
    }
}

/// The three passes of a layer, each of which is one product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    BackwardInput,
    BackwardWeights,
}

impl Pass {
    pub(crate) const ALL: [Pass; 3] = [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeights];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::BackwardInput => "backward input",
            Pass::BackwardWeights => "backward weights",
        }
    }
}

/// Maximum number of bytes of workspace that an algorithm may need.
pub(crate) const WORKSPACE_LIMIT: usize = 256 << 20;

/// The algorithm selected for a pass.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Selection {
    /// The library's algorithm; `None` for this crate's own kernel.
    pub(crate) algorithm: Option<LibraryAlgorithm>,
    /// Bytes of workspace that the algorithm needs.
    pub(crate) workspace: usize,
    /// Time of one run; `None` if nothing was benchmarked.
    pub(crate) milliseconds: Option<f64>,
}

impl Selection {
    /// This crate's own kernel, without benchmarking.
    pub(crate) fn builtin() -> Self {
        Selection { algorithm: None, workspace: 0, milliseconds: None }
    }
}

impl std::fmt::Display for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.algorithm {
            Some(algorithm) => write!(f, "{algorithm}")?,
            None => f.write_str("built in")?,
        }
        match self.milliseconds {
            Some(milliseconds) => write!(f, " {milliseconds:.3} ms"),
            None => Ok(()),
        }
    }
}

/// Version of the autotuning rules; selections made under other rules are not used.
const RULES_VERSION: &str = "2";

/// The cache key: everything that a selection depends on. `problem` says what is computed, `own` is the source of
/// this crate's kernel that the library is benchmarked against.
pub(crate) fn key(device: &Device, library: &str, problem: &str, own: &Source, pass: Pass) -> String {
    let (architecture, driver) = (device.architecture(), device.driver());
    let machine = format!("{architecture:?} {driver:?} {}", device.multiprocessors());
    cache::key(&[
        env!("CARGO_PKG_VERSION"),
        RULES_VERSION,
        device.name(),
        &machine,
        library,
        problem,
        own.text,
        pass.name(),
    ])
}

const FILE: &str = "choice";

/// The cached selection, or else the result of `tune`, which is then cached. A cached algorithm is used only if
/// `supported` returns that it needs no larger workspace than it did.
pub(crate) fn cached_or_tuned(
    key: &str,
    supported: impl Fn(&LibraryAlgorithm) -> Result<usize>,
    tune: impl FnOnce() -> Result<Option<Selection>>,
) -> Result<Option<Selection>> {
    let is_valid = |selection: &Selection| match &selection.algorithm {
        Some(algorithm) => supported(algorithm).is_ok_and(|workspace| workspace <= selection.workspace),
        None => true,
    };
    if let Some(earlier) = read_cached(key).filter(is_valid) {
        return Ok(Some(earlier));
    }
    let Some(selection) = tune()? else { return Ok(None) };
    cache::write_first(FILE, key, encode(&selection).as_bytes());
    // Another rank's selection, if that rank wrote first.
    Ok(Some(read_cached(key).filter(is_valid).unwrap_or(selection)))
}

fn read_cached(key: &str) -> Option<Selection> {
    let content = cache::read(FILE, key)?;
    decode(std::str::from_utf8(&content).ok()?)
}

/// The line of text that the cache holds for a selection.
fn encode(selection: &Selection) -> String {
    let algorithm = selection.algorithm.as_ref().map_or("built-in".to_owned(), LibraryAlgorithm::encode);
    format!("{algorithm} {} {}\n", selection.workspace, selection.milliseconds.unwrap_or_default())
}

fn decode(line: &str) -> Option<Selection> {
    let mut words = line.split_whitespace();
    let algorithm = match words.next()? {
        "built-in" => None,
        word => Some(LibraryAlgorithm::decode(word)?),
    };
    let workspace = words.next()?.parse().ok()?;
    Some(Selection { algorithm, workspace, milliseconds: Some(words.next()?.parse().ok()?) })
}

/// Something of a library that cannot be used, and why.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Note {
    pub(crate) what: String,
    pub(crate) why: String,
}

impl Note {
    pub(crate) fn new(what: impl std::fmt::Display, why: impl std::fmt::Display) -> Self {
        Note { what: what.to_string(), why: why.to_string() }
    }

    /// Adds `notes` about one pass, merging those with the same reason.
    pub(crate) fn collect(all: &mut Vec<Note>, pass: Pass, notes: Vec<Note>) {
        let mut reasons: Vec<Note> = Vec::new();
        for note in notes {
            match reasons.iter_mut().find(|known| known.why == note.why) {
                Some(known) => known.what.push_str(&format!(", {}", note.what)),
                None => reasons.push(Note { what: format!("{} {}", pass.name(), note.what), ..note }),
            }
        }
        all.append(&mut reasons);
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

/// One line about a layer: what it is, what computes its passes, and notes about what cannot be used.
pub(crate) fn describe(
    layer: &str,
    precision: Precision,
    passes: &[Option<Selection>; 3],
    notes: &[Note],
) -> String {
    let of_pass = |(pass, selection): (Pass, &Option<Selection>)| {
        Some(format!("{} {}", pass.name(), selection.as_ref()?))
    };
    let passes = Pass::ALL.into_iter().zip(passes).filter_map(of_pass);
    let mut line = format!("{layer}, {precision}: {}", passes.collect::<Vec<_>>().join(", "));
    if !notes.is_empty() {
        let notes: Vec<_> = notes.iter().map(Note::to_string).collect();
        line.push_str(&format!(" ({})", notes.join("; ").replace('\n', " ")));
    }
    line
}

/// Panics unless there are at most `max_images`, and the workspace has at least `bytes`.
#[track_caller]
pub(crate) fn check_batch(images: usize, max_images: usize, workspace: View<'_>, bytes: usize) {
    assert!(images <= max_images, "{images} images, but the layer was set up for {max_images}");
    assert!(
        workspace.bytes() >= bytes && (bytes == 0 || workspace.address().is_multiple_of(256)),
        "a workspace of {} bytes at {:#x}, but {bytes} bytes at a multiple of 256 are needed",
        workspace.bytes(),
        workspace.address()
    );
}

const COMPARISON: &str = "comparison with the built-in kernel";

/// An algorithm of a library that is to be benchmarked.
pub(crate) struct Candidate {
    pub(crate) algorithm: LibraryAlgorithm,
    pub(crate) workspace: usize,
}

/// The result of autotuning one pass.
pub(crate) struct Outcome {
    pub(crate) selection: Selection,
    /// Candidates that failed or computed something else.
    pub(crate) rejected: Vec<Note>,
}

/// Runs this crate's own kernel (`run(None)`) and every candidate, and selects the fastest one that writes the same
/// to `output`, up to rounding. If there is a `bias` (f32), a NaN in the bias has to appear in the results as well: a
/// library's ReLU may turn NaN into zero, and a diverged training run would then continue unnoticed.
pub(crate) fn tune(
    stream: &Stream,
    precision: Precision,
    output: View<'_>,
    bias: Option<View<'_>>,
    candidates: Vec<Candidate>,
    run: &dyn Fn(Option<&LibraryAlgorithm>) -> Result<()>,
) -> Result<Outcome> {
    stream.zero(output)?;
    run(None)?;
    let expected = sample(stream, output)?;
    // Which of the sampled elements are NaN if the first bias is.
    let nan_mask = |algorithm: Option<&LibraryAlgorithm>| -> Result<Option<Vec<bool>>> {
        let Some(bias) = bias else { return Ok(None) };
        let first = bias.slice(0..1);
        let value = first.to_vec::<f32>(stream)?;
        stream.upload(&[f32::NAN], first)?;
        let ran = run(algorithm);
        let values = sample(stream, output)?;
        stream.upload(&value, first)?;
        ran.map(|()| Some(values.iter().map(|value| value.is_nan()).collect()))
    };
    let expected_nan_mask = nan_mask(None)?;
    let mut benchmarks: Vec<Benchmark> =
        Benchmark::new(stream, f64::INFINITY, &|| run(None))?.into_iter().collect();
    let mut fastest = benchmarks[0].once;
    let mut accepted = Vec::new();
    let mut rejected = Vec::new();
    for candidate in candidates {
        let algorithm = &candidate.algorithm;
        let attempt = || -> Result<Option<Benchmark>> {
            stream.zero(output)?;
            run(Some(algorithm))?;
            let deviation = deviation(&expected, &sample(stream, output)?);
            if deviation.is_nan() || deviation > tolerance(precision) {
                let text = format!("results deviate by {deviation:.0e} of the largest value");
                return Err(Error::Library { call: COMPARISON, text });
            }
            if nan_mask(Some(algorithm))? != expected_nan_mask {
                let text = "NaN in the bias does not reach the output".to_owned();
                return Err(Error::Library { call: COMPARISON, text });
            }
            Benchmark::new(stream, ABANDON_RATIO * fastest, &|| run(Some(algorithm)))
        };
        match attempt() {
            Ok(Some(benchmark)) => {
                fastest = fastest.min(benchmark.once);
                benchmarks.push(benchmark);
                accepted.push(candidate);
            }
            Ok(None) => {}
            Err(error) => {
                // If the GPU itself has failed, that is an error and not a slow candidate.
                stream.synchronize()?;
                rejected.push(Note::new(candidate.algorithm, error));
            }
        }
    }
    // Round-robin, so that a GPU that is still cold, or busy with other work for a moment, slows down all candidates
    // alike.
    for _ in 0..ROUNDS {
        for benchmark in &mut benchmarks {
            benchmark.run(stream)?;
        }
    }
    let milliseconds = Some(benchmarks[0].milliseconds());
    let mut selection = Selection { algorithm: None, workspace: 0, milliseconds };
    for (Candidate { algorithm, workspace }, benchmark) in accepted.into_iter().zip(&benchmarks[1..]) {
        let milliseconds = Some(benchmark.milliseconds());
        if milliseconds < selection.milliseconds {
            selection = Selection { algorithm: Some(algorithm), workspace, milliseconds };
        }
    }
    Ok(Outcome { selection, rejected })
}

/// How often each candidate is timed; its best time counts.
const ROUNDS: usize = 4;

/// A candidate that takes this many times as long as the fastest so far is not timed again.
const ABANDON_RATIO: f64 = 4.0;

/// The benchmark of one candidate: a captured graph of many runs, and its shortest time.
struct Benchmark {
    graph: Graph,
    runs: u32,
    /// Seconds of a single run at the beginning.
    once: f64,
    /// Seconds of the graph, the minimum so far.
    seconds: f64,
}

impl Benchmark {
    /// `None` if a run takes longer than `limit` seconds.
    fn new(stream: &Stream, limit: f64, run: &dyn Fn() -> Result<()>) -> Result<Option<Self>> {
        const TARGET_SECONDS: f64 = 0.002;
        // The first run loads kernels, which must not happen during a capture.
        run()?;
        stream.synchronize()?;
        let start = Instant::now();
        run()?;
        stream.synchronize()?;
        let once = start.elapsed().as_secs_f64();
        if once > limit {
            return Ok(None);
        }
        let runs = (TARGET_SECONDS / once).clamp(1.0, 32.0) as u32;
        stream.begin_capture()?;
        let captured = (0..runs).try_for_each(|_| run());
        // The capture is ended even after an error, so that the stream can be used again.
        let graph = stream.end_capture();
        captured?;
        Ok(Some(Benchmark { graph: graph?, runs, once, seconds: f64::INFINITY }))
    }

    fn run(&mut self, stream: &Stream) -> Result<()> {
        let start = Instant::now();
        // SAFETY: the memory that the runs work on outlives the benchmark.
        unsafe { stream.launch_graph(&self.graph) }?;
        stream.synchronize()?;
        self.seconds = self.seconds.min(start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Time of one run within the graph.
    fn milliseconds(&self) -> f64 {
        self.seconds / f64::from(self.runs) * 1e3
    }
}

/// Largest accepted [`deviation`]. Algorithms differ in the order of their sums, and in when they round to bf16.
fn tolerance(precision: Precision) -> f32 {
    match precision {
        Precision::F32 => 1e-4,
        Precision::Tf32 => 1e-2,
        Precision::Bf16 => 4e-2,
    }
}

/// The first and the last elements, up to `LEN` each.
fn sample(stream: &Stream, view: View<'_>) -> Result<Vec<f32>> {
    const LEN: usize = 8192;
    let len = view.len();
    let mut values = Vec::new();
    for part in [view.slice(0..len.min(LEN)), view.slice(len - len.min(LEN)..len)] {
        match part.dtype() {
            DType::Bf16 => values.extend(part.to_vec::<bf16>(stream)?.iter().map(|value| value.to_f32())),
            _ => values.extend(part.to_vec::<f32>(stream)?),
        }
    }
    Ok(values)
}

/// The largest difference, relative to the largest expected value; NaN if a found value is NaN.
fn deviation(expected: &[f32], found: &[f32]) -> f32 {
    let largest = expected.iter().fold(f32::MIN_POSITIVE, |largest, value| largest.max(value.abs()));
    let differences = expected.iter().zip(found).map(|(expected, found)| (expected - found).abs());
    // `f32::max` drops NaN.
    differences.fold(0.0, |most: f32, next| if next > most || next.is_nan() { next } else { most }) / largest
}

/// Fills `view` with numbers from -1 to 1: kernels run at another speed on zeros, and comparing zeros proves nothing.
pub(crate) fn fill(stream: &Stream, view: View<'_>, seed: u64) -> Result<()> {
    const LEN: usize = 1 << 14;
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    };
    let values: Vec<f32> = (0..LEN.min(view.len())).map(|_| next()).collect();
    let mut done = values.len();
    match view.dtype() {
        DType::Bf16 => {
            let values: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
            stream.upload(&values, view.slice(0..done))?;
        }
        _ => stream.upload(&values, view.slice(0..done))?,
    }
    while done < view.len() {
        let more = done.min(view.len() - done);
        stream.copy(view.slice(0..more), view.slice(done..done + more))?;
        done += more;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::algorithm::Form;

    fn cudnn() -> LibraryAlgorithm {
        LibraryAlgorithm::cudnn(7, Form::Plain)
    }

    #[test]
    fn a_selection_survives_encode_and_decode() {
        for algorithm in [None, Some(cudnn())] {
            let selection = Selection { algorithm, workspace: 512, milliseconds: Some(0.125) };
            assert_eq!(decode(&encode(&selection)), Some(selection));
        }
        for broken in ["", "built-in", "built-in 512", "seven 512 1", "built-in -1 1", "built-in 512 soon"] {
            assert_eq!(decode(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_selection_displays_the_algorithm_and_its_time() {
        let text = |algorithm, milliseconds| Selection { algorithm, workspace: 0, milliseconds }.to_string();
        assert_eq!(text(Some(cudnn()), Some(0.1254)), "cuDNN 7 0.125 ms");
        assert_eq!(text(None, Some(2.0)), "built in 2.000 ms");
        assert_eq!(text(None, None), "built in");
    }

    #[test]
    fn notes_with_the_same_reason_are_merged() {
        let mut all = Vec::new();
        let notes = vec![
            Note::new("cuDNN 1", "too slow"),
            Note::new("cuDNN 2", "refused"),
            Note::new("cuDNN 3", "too slow"),
        ];
        Note::collect(&mut all, Pass::Forward, notes);
        let texts: Vec<_> = all.iter().map(Note::to_string).collect();
        assert_eq!(texts, ["forward cuDNN 1, cuDNN 3: too slow", "forward cuDNN 2: refused"]);
    }

    #[test]
    fn deviations_and_nan_are_detected() {
        assert!(deviation(&[1.0, -2.0], &[1.0, -2.0]) == 0.0);
        assert!(deviation(&[1.0, -2.0], &[1.5, -2.0]) == 0.25);
        assert!(deviation(&[1.0, -2.0], &[f32::NAN, -2.0]).is_nan());
        assert!(deviation(&[1.0, -2.0], &[f32::NAN, 7.0]).is_nan());
    }
}
