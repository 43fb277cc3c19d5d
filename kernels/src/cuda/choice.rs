//! Which of several ways to do the same is the fastest: measured once, and remembered.
//!
//! The libraries have several algorithms for one and the same product, this crate has a kernel of its own, and which of
//! them wins depends on the shape, the GPU and the versions. So they race when a layer is set up, on real memory full of
//! numbers, in turns. The clock runs around a captured graph of many runs: that is how a training step runs them, it keeps the
//! price of a launch out, and it throws out what cannot be captured. Who fails, or comes to other results than the
//! crate's own kernel, is out of the race as well: a library that does not support a combination of types costs speed,
//! never a run.
//!
//! The winner is written down beside the compiled kernels, so that the next run computes with the same algorithms, and so
//! with the same rounding. Of ranks that race at the same time the first to write decides.

use std::time::Instant;

use half::bf16;

use super::algorithm::Algorithm;
use super::error::{Error, Result};
use super::{Device, Graph, Source, Stream, View, cache};
use crate::DType;
use crate::Precision;

/// What a layer may choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AutotuneOptions {
    /// Only algorithms that come to the same bits every time.
    pub deterministic: bool,
    /// Whose algorithms.
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
    /// cuDNN's and cuBLASLt's where they are installed and faster than this crate's kernels.
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

/// The products of a layer.
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

/// Most bytes of workspace that an algorithm may ask for.
pub(crate) const WORKSPACE_LIMIT: usize = 256 << 20;

/// A way to make a pass, chosen.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    /// The library's algorithm; none for this crate's own kernel.
    pub(crate) algorithm: Option<Algorithm>,
    /// Bytes of workspace that the algorithm needs.
    pub(crate) workspace: usize,
    /// How long it takes; none where there was nothing to choose from.
    pub(crate) milliseconds: Option<f64>,
}

impl Choice {
    /// This crate's own kernel, since there is no other.
    pub(crate) fn builtin() -> Self {
        Choice { algorithm: None, workspace: 0, milliseconds: None }
    }
}

impl std::fmt::Display for Choice {
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

/// The rules of the race; what was chosen by others is chosen again.
const RACE: &str = "2";

/// Stands for everything that a choice depends on: `problem` says what is computed, `own` is what the library raced with.
pub(crate) fn key(device: &Device, library: &str, problem: &str, own: &Source, pass: Pass) -> String {
    let (architecture, driver) = (device.architecture(), device.driver());
    let machine = format!("{architecture:?} {driver:?} {}", device.multiprocessors());
    cache::key(&[
        env!("CARGO_PKG_VERSION"),
        RACE,
        device.name(),
        &machine,
        library,
        problem,
        own.text,
        pass.name(),
    ])
}

const FILE: &str = "choice";

/// What was chosen before, or else what `race` ends with, if there is one. An algorithm counts only if `supported` says that it needs no
/// more than it did.
pub(crate) fn settle(
    key: &str,
    supported: impl Fn(&Algorithm) -> Result<usize>,
    race: impl FnOnce() -> Result<Option<Choice>>,
) -> Result<Option<Choice>> {
    let holds = |choice: &Choice| match &choice.algorithm {
        Some(algorithm) => supported(algorithm).is_ok_and(|workspace| workspace <= choice.workspace),
        None => true,
    };
    if let Some(earlier) = recall(key).filter(holds) {
        return Ok(Some(earlier));
    }
    let Some(choice) = race()? else { return Ok(None) };
    cache::write_first(FILE, key, line(&choice).as_bytes());
    // Another rank's, if it was quicker.
    Ok(Some(recall(key).filter(holds).unwrap_or(choice)))
}

fn recall(key: &str) -> Option<Choice> {
    let content = cache::read(FILE, key)?;
    parse(std::str::from_utf8(&content).ok()?)
}

/// A choice as it is written down.
fn line(choice: &Choice) -> String {
    let algorithm = choice.algorithm.as_ref().map_or("built-in".to_owned(), Algorithm::encode);
    format!("{algorithm} {} {}\n", choice.workspace, choice.milliseconds.unwrap_or_default())
}

fn parse(line: &str) -> Option<Choice> {
    let mut words = line.split_whitespace();
    let algorithm = match words.next()? {
        "built-in" => None,
        word => Some(Algorithm::decode(word)?),
    };
    let workspace = words.next()?.parse().ok()?;
    Some(Choice { algorithm, workspace, milliseconds: Some(words.next()?.parse().ok()?) })
}

/// Something of a library that does not serve, and why.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Note {
    pub(crate) what: String,
    pub(crate) why: String,
}

impl Note {
    pub(crate) fn new(what: impl std::fmt::Display, why: impl std::fmt::Display) -> Self {
        Note { what: what.to_string(), why: why.to_string() }
    }

    /// Adds `notes` about one pass, those of one reason as one.
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

/// One line about a layer: what it is, who makes its passes, and notes about what was not chosen.
pub(crate) fn describe(
    layer: &str,
    precision: Precision,
    passes: &[Option<Choice>; 3],
    notes: &[Note],
) -> String {
    let made =
        |(pass, choice): (Pass, &Option<Choice>)| Some(format!("{} {}", pass.name(), choice.as_ref()?));
    let passes = Pass::ALL.into_iter().zip(passes).filter_map(made);
    let mut line = format!("{layer}, {precision}: {}", passes.collect::<Vec<_>>().join(", "));
    if !notes.is_empty() {
        let notes: Vec<_> = notes.iter().map(Note::to_string).collect();
        line.push_str(&format!(" ({})", notes.join("; ").replace('\n', " ")));
    }
    line
}

/// Panics unless a batch is at most as large as the layer was set up for, and the workspace at least as large.
#[track_caller]
pub(crate) fn check_batch(images: usize, most: usize, workspace: View<'_>, bytes: usize) {
    assert!(images <= most, "{images} images where the layer was set up for {most}");
    assert!(
        workspace.bytes() >= bytes && (bytes == 0 || workspace.address().is_multiple_of(256)),
        "a workspace of {} bytes at {:#x} where {bytes} are needed, at a multiple of 256",
        workspace.bytes(),
        workspace.address()
    );
}

const COMPARISON: &str = "comparison with the built-in kernel";

/// An algorithm of a library that takes part in a race.
pub(crate) struct Candidate {
    pub(crate) algorithm: Algorithm,
    pub(crate) workspace: usize,
}

/// How a race went.
pub(crate) struct Outcome {
    pub(crate) choice: Choice,
    /// Candidates that are out.
    pub(crate) rejected: Vec<Note>,
}

/// Runs this crate's own kernel (`run(None)`) and every candidate, and chooses the fastest that writes the same to
/// `output`, up to rounding. Where `bias` (f32) takes part, a bias that is no number has to be seen in the results as well:
/// a rectified linear unit may make zeros of such values, and a run that diverges would go on as if nothing had happened.
pub(crate) fn race(
    stream: &Stream,
    precision: Precision,
    output: View<'_>,
    bias: Option<View<'_>>,
    candidates: Vec<Candidate>,
    run: &dyn Fn(Option<&Algorithm>) -> Result<()>,
) -> Result<Outcome> {
    stream.zero(output)?;
    run(None)?;
    let expected = sample(stream, output)?;
    // Which of the elements are no numbers when the first bias is none.
    let spoilt = |algorithm: Option<&Algorithm>| -> Result<Option<Vec<bool>>> {
        let Some(bias) = bias else { return Ok(None) };
        let first = bias.slice(0..1);
        let value = first.to_vec::<f32>(stream)?;
        stream.upload(&[f32::NAN], first)?;
        let ran = run(algorithm);
        let values = sample(stream, output)?;
        stream.upload(&value, first)?;
        ran.map(|()| Some(values.iter().map(|value| value.is_nan()).collect()))
    };
    let expected_spoilt = spoilt(None)?;
    let mut runners: Vec<Runner> = Runner::new(stream, f64::INFINITY, &|| run(None))?.into_iter().collect();
    let mut fastest = runners[0].once;
    let mut racing = Vec::new();
    let mut rejected = Vec::new();
    for candidate in candidates {
        let algorithm = &candidate.algorithm;
        let attempt = || -> Result<Option<Runner>> {
            stream.zero(output)?;
            run(Some(algorithm))?;
            let deviation = deviation(&expected, &sample(stream, output)?);
            if deviation.is_nan() || deviation > tolerance(precision) {
                let text = format!("results deviate by {deviation:.0e} of the largest");
                return Err(Error::Library { call: COMPARISON, text });
            }
            if spoilt(Some(algorithm))? != expected_spoilt {
                let text = "what is not a number is hidden".to_owned();
                return Err(Error::Library { call: COMPARISON, text });
            }
            Runner::new(stream, HOPELESS * fastest, &|| run(Some(algorithm)))
        };
        match attempt() {
            Ok(Some(runner)) => {
                fastest = fastest.min(runner.once);
                runners.push(runner);
                racing.push(candidate);
            }
            Ok(None) => {}
            Err(error) => {
                // A GPU that is in disorder now is no matter of speed.
                stream.synchronize()?;
                rejected.push(Note::new(candidate.algorithm, error));
            }
        }
    }
    // In turns, so that none has a GPU to itself that is still cold, or that somebody else is busy with for a moment.
    for _ in 0..ROUNDS {
        for runner in &mut runners {
            runner.run(stream)?;
        }
    }
    let milliseconds = Some(runners[0].milliseconds());
    let mut choice = Choice { algorithm: None, workspace: 0, milliseconds };
    for (Candidate { algorithm, workspace }, runner) in racing.into_iter().zip(&runners[1..]) {
        let milliseconds = Some(runner.milliseconds());
        if milliseconds < choice.milliseconds {
            choice = Choice { algorithm: Some(algorithm), workspace, milliseconds };
        }
    }
    Ok(Outcome { choice, rejected })
}

/// Times that each takes part in a race.
const ROUNDS: usize = 4;

/// Who takes so many times as long as another is not tried again.
const HOPELESS: f64 = 4.0;

/// One that takes part in a race: a captured graph of many runs, and the shortest time that it took.
struct Runner {
    graph: Graph,
    runs: u32,
    /// Seconds of a single run at the beginning, and of the graph at best.
    once: f64,
    seconds: f64,
}

impl Runner {
    /// None if a run takes longer than `limit` seconds.
    fn new(stream: &Stream, limit: f64, run: &dyn Fn() -> Result<()>) -> Result<Option<Self>> {
        const WORTH_SECONDS: f64 = 0.002;
        // The first run loads kernels, which a capture forbids.
        run()?;
        stream.synchronize()?;
        let start = Instant::now();
        run()?;
        stream.synchronize()?;
        let once = start.elapsed().as_secs_f64();
        if once > limit {
            return Ok(None);
        }
        let runs = (WORTH_SECONDS / once).clamp(1.0, 32.0) as u32;
        stream.begin_capture()?;
        let captured = (0..runs).try_for_each(|_| run());
        // Ended in any case, so that the stream serves again.
        let graph = stream.end_capture();
        captured?;
        Ok(Some(Runner { graph: graph?, runs, once, seconds: f64::INFINITY }))
    }

    fn run(&mut self, stream: &Stream) -> Result<()> {
        let start = Instant::now();
        // SAFETY: the memory that the runs work on is there for the whole race.
        unsafe { stream.launch_graph(&self.graph) }?;
        stream.synchronize()?;
        self.seconds = self.seconds.min(start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Of one run among many.
    fn milliseconds(&self) -> f64 {
        self.seconds / f64::from(self.runs) * 1e3
    }
}

/// Results differ in the order of their sums, and in when they are rounded to bf16.
fn tolerance(precision: Precision) -> f32 {
    match precision {
        Precision::F32 => 1e-4,
        Precision::Tf32 => 1e-2,
        Precision::Bf16 => 4e-2,
    }
}

/// Some elements from the beginning and the end.
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

/// The largest difference, as a part of the largest expected value.
fn deviation(expected: &[f32], found: &[f32]) -> f32 {
    let largest = expected.iter().fold(f32::MIN_POSITIVE, |largest, value| largest.max(value.abs()));
    let differences = expected.iter().zip(found).map(|(expected, found)| (expected - found).abs());
    // `max` of floats forgets what is not a number.
    differences.fold(0.0, |most: f32, next| if next > most || next.is_nan() { next } else { most }) / largest
}

/// Fills `view` with numbers from -1 to 1: a race among zeros has another pace, and proves nothing.
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

    fn cudnn() -> Algorithm {
        Algorithm::cudnn(7, Form::Plain)
    }

    #[test]
    fn a_choice_is_read_as_it_was_written() {
        for algorithm in [None, Some(cudnn())] {
            let choice = Choice { algorithm, workspace: 512, milliseconds: Some(0.125) };
            assert_eq!(parse(&line(&choice)), Some(choice));
        }
        for broken in ["", "built-in", "built-in 512", "seven 512 1", "built-in -1 1", "built-in 512 soon"] {
            assert_eq!(parse(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_choice_says_who_and_how_long() {
        let choice = |algorithm, milliseconds| Choice { algorithm, workspace: 0, milliseconds }.to_string();
        assert_eq!(choice(Some(cudnn()), Some(0.1254)), "cuDNN 7 0.125 ms");
        assert_eq!(choice(None, Some(2.0)), "built in 2.000 ms");
        assert_eq!(choice(None, None), "built in");
    }

    #[test]
    fn notes_of_one_reason_are_one() {
        let mut all = Vec::new();
        let notes = vec![
            Note::new("cuDNN 1", "too slow"),
            Note::new("cuDNN 2", "lost"),
            Note::new("cuDNN 3", "too slow"),
        ];
        Note::collect(&mut all, Pass::Forward, notes);
        let texts: Vec<_> = all.iter().map(Note::to_string).collect();
        assert_eq!(texts, ["forward cuDNN 1, cuDNN 3: too slow", "forward cuDNN 2: lost"]);
    }

    #[test]
    fn what_deviates_is_seen_and_so_is_what_is_no_number() {
        assert!(deviation(&[1.0, -2.0], &[1.0, -2.0]) == 0.0);
        assert!(deviation(&[1.0, -2.0], &[1.5, -2.0]) == 0.25);
        assert!(deviation(&[1.0, -2.0], &[f32::NAN, -2.0]).is_nan());
        assert!(deviation(&[1.0, -2.0], &[f32::NAN, 7.0]).is_nan());
    }
}
