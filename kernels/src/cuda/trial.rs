//! Trials of the candidates for one pass: each is verified, then benchmarked.
//!
//! What is timed is a captured graph of many runs: a training step runs them that way, the launch overhead stays out
//! of the measurement, and algorithms that cannot be captured drop out. The candidates take turns, so that a GPU that
//! is still cold, or busy with other work for a moment, slows down all of them alike.

use std::time::Instant;

use super::algorithm::{Form, LibraryAlgorithm};
use super::autotune::Selection;
use super::error::Result;
use super::{Graph, Stream};

/// A library's algorithm that may be selected.
pub(crate) struct Candidate {
    pub(crate) algorithm: LibraryAlgorithm,
    pub(crate) workspace: usize,
}

/// The candidates for a pass, and how to run and verify them. An algorithm of `None` is this crate's own kernel.
pub(crate) struct Contest<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) run: &'a dyn Fn(Option<&LibraryAlgorithm>) -> Result<()>,
    /// What is wrong with the results; `None` if they are right.
    pub(crate) problem: &'a dyn Fn(Option<&LibraryAlgorithm>) -> Result<Option<String>>,
    /// Whether [`Form::Narrow`] is tried even if the library has a correct [`Form::Plain`] algorithm.
    pub(crate) narrow_gradients: bool,
    /// How often each candidate is timed; its best time counts. With 0 it is that of a single run.
    pub(crate) rounds: usize,
}

/// What became of one candidate.
#[derive(Debug, Clone)]
pub(crate) struct Trial {
    /// `None` for this crate's own kernel.
    pub(crate) algorithm: Option<LibraryAlgorithm>,
    pub(crate) workspace: usize,
    pub(crate) outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    /// The time of one run, in milliseconds.
    Timed(f64),
    /// It is so slow that it was only run a few times, in this time.
    Slow(f64),
    /// It failed, or computed something else.
    Rejected(String),
}

/// A candidate that takes this many times as long as the fastest so far is not benchmarked.
const ABANDON_RATIO: f64 = 4.0;

/// What a pass by a library takes longer in a step than alone, in milliseconds: an activation, a bias or pooling that it does not
/// include is a launch of its own. Without it, steps of `lenet5` on an H200 were slower than with this crate's kernels alone.
const LAUNCH: f64 = 2e-3;

impl Contest<'_> {
    /// Verifies and benchmarks this crate's own kernel, which is the first trial, and all candidates.
    ///
    /// # Errors
    /// If this crate's own kernel cannot be run, or the GPU fails.
    pub(crate) fn trials(self) -> Result<Vec<Trial>> {
        let own = self.enter(None, f64::INFINITY)?;
        let mut fastest = own.seconds().unwrap_or(f64::INFINITY);
        let mut entries = vec![(None, 0, own)];
        let mut has_plain = false;
        for Candidate { algorithm, workspace } in &self.candidates {
            if algorithm.form == Form::Narrow && has_plain && !self.narrow_gradients {
                continue;
            }
            let entry = match self.enter(Some(algorithm), ABANDON_RATIO * fastest) {
                Ok(entry) => entry,
                Err(error) => {
                    // If the GPU itself has failed, that is an error and not a rejected candidate.
                    self.stream.synchronize()?;
                    Entry::Rejected(error.to_string())
                }
            };
            fastest = fastest.min(entry.seconds().unwrap_or(f64::INFINITY));
            has_plain |= algorithm.form == Form::Plain && entry.seconds().is_some();
            entries.push((Some(*algorithm), *workspace, entry));
        }
        for _ in 0..self.rounds {
            for (.., entry) in &mut entries {
                if let Entry::Correct(benchmark) = entry {
                    benchmark.run(self.stream)?;
                }
            }
        }
        let trial = |(algorithm, workspace, entry): (_, _, Entry)| Trial {
            algorithm,
            workspace,
            outcome: entry.outcome(),
        };
        Ok(entries.into_iter().map(trial).collect())
    }

    fn enter(&self, algorithm: Option<&LibraryAlgorithm>, limit: f64) -> Result<Entry> {
        if let Some(problem) = (self.problem)(algorithm)? {
            return Ok(Entry::Rejected(problem));
        }
        Benchmark::capture(self.stream, limit, &|| (self.run)(algorithm))
    }
}

/// The fastest of the trials in a step, if one is left.
pub(crate) fn fastest(trials: &[Trial]) -> Option<Selection> {
    let beside = |algorithm: Option<LibraryAlgorithm>| match algorithm {
        None | Some(LibraryAlgorithm { form: Form::Fused, .. }) => 0.0,
        Some(_) => LAUNCH,
    };
    let in_a_step = |&(milliseconds, algorithm, _): &(f64, _, usize)| milliseconds + beside(algorithm);
    let timed = |trial: &Trial| match trial.outcome {
        Outcome::Timed(milliseconds) => Some((milliseconds, trial.algorithm, trial.workspace)),
        _ => None,
    };
    let best = trials.iter().filter_map(timed).min_by(|a, b| in_a_step(a).total_cmp(&in_a_step(b)));
    let own_is_wrong =
        |trial: &Trial| trial.algorithm.is_none() && matches!(trial.outcome, Outcome::Rejected(_));
    best.map(|(milliseconds, algorithm, workspace)| Selection {
        algorithm,
        workspace,
        milliseconds: Some(milliseconds),
        own_is_wrong: trials.iter().any(own_is_wrong),
    })
}

/// The trials that would have taken place with this rule about [`Form::Narrow`], see [`Contest`].
pub(crate) fn eligible(trials: &[Trial], narrow_gradients: bool) -> Vec<Trial> {
    let has_form = |trial: &Trial, form| trial.algorithm.is_some_and(|algorithm| algorithm.form == form);
    let is_right = |trial: &Trial| !matches!(trial.outcome, Outcome::Rejected(_));
    let has_plain = trials.iter().any(|trial| has_form(trial, Form::Plain) && is_right(trial));
    let out = |trial: &&Trial| has_plain && !narrow_gradients && has_form(trial, Form::Narrow);
    trials.iter().filter(|trial| !out(trial)).cloned().collect()
}

/// A candidate that has been run.
enum Entry {
    Correct(Benchmark),
    Slow(f64),
    Rejected(String),
}

impl Entry {
    /// Seconds of a single run at the beginning, if the results are right.
    fn seconds(&self) -> Option<f64> {
        match self {
            Entry::Correct(benchmark) => Some(benchmark.once),
            Entry::Slow(seconds) => Some(*seconds),
            Entry::Rejected(_) => None,
        }
    }

    fn outcome(self) -> Outcome {
        match self {
            Entry::Correct(benchmark) => Outcome::Timed(benchmark.milliseconds()),
            Entry::Slow(seconds) => Outcome::Slow(seconds * 1e3),
            Entry::Rejected(why) => Outcome::Rejected(why),
        }
    }
}

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
    /// Runs the candidate, and captures many runs of it, unless one takes longer than `limit` seconds.
    fn capture(stream: &Stream, limit: f64, run: &dyn Fn() -> Result<()>) -> Result<Entry> {
        const TARGET_SECONDS: f64 = 0.002;
        // A run seems slow, too, if this process or the GPU has other work at that moment.
        const ATTEMPTS: usize = 3;
        // The first run loads kernels, which must not happen during a capture.
        run()?;
        stream.synchronize()?;
        let mut once = seconds_of(stream, run)?;
        for _ in 1..ATTEMPTS {
            if once > limit {
                once = once.min(seconds_of(stream, run)?);
            }
        }
        if once > limit {
            return Ok(Entry::Slow(once));
        }
        let runs = (TARGET_SECONDS / once).clamp(1.0, 32.0) as u32;
        stream.begin_capture()?;
        let captured = (0..runs).try_for_each(|_| run());
        // The capture is ended even after an error, so that the stream can be used again.
        let graph = stream.end_capture();
        captured?;
        Ok(Entry::Correct(Benchmark { graph: graph?, runs, once, seconds: f64::INFINITY }))
    }

    fn run(&mut self, stream: &Stream) -> Result<()> {
        // SAFETY: the memory that the runs work on outlives the benchmark.
        let seconds = seconds_of(stream, || unsafe { stream.launch_graph(&self.graph) })?;
        self.seconds = self.seconds.min(seconds);
        Ok(())
    }

    /// Time of one run within the graph.
    fn milliseconds(&self) -> f64 {
        if self.seconds.is_finite() { self.seconds / f64::from(self.runs) * 1e3 } else { self.once * 1e3 }
    }
}

/// Seconds until the stream has done `work`.
fn seconds_of(stream: &Stream, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    stream.synchronize()?;
    Ok(start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(algorithm: Option<u32>, outcome: Outcome) -> Trial {
        let algorithm = algorithm.map(|number| LibraryAlgorithm::cudnn(number, Form::Plain));
        Trial { algorithm, workspace: 64, outcome }
    }

    #[test]
    fn the_fastest_correct_trial_is_selected() {
        let wrong = || Outcome::Rejected("results deviate".into());
        let selected = |trials: &[Trial]| {
            let selection = fastest(trials)?;
            Some((selection.algorithm.map(|algorithm| algorithm.id[0]), selection.own_is_wrong))
        };
        let own = trial(None, Outcome::Timed(2.0));
        let slow = trial(Some(3), Outcome::Slow(0.5));
        assert_eq!(selected(&[own.clone(), trial(Some(1), Outcome::Timed(1.0))]), Some((Some(1), false)));
        assert_eq!(selected(&[own.clone(), trial(Some(1), Outcome::Timed(3.0))]), Some((None, false)));
        assert_eq!(
            selected(&[own.clone(), trial(Some(1), Outcome::Timed(1.999))]),
            Some((None, false)),
            "a launch"
        );
        assert_eq!(selected(&[own, slow, trial(Some(1), wrong())]), Some((None, false)));
        let candidates = [trial(None, wrong()), trial(Some(1), Outcome::Timed(3.0))];
        assert_eq!(selected(&candidates), Some((Some(1), true)));
        assert_eq!(selected(&[trial(None, wrong()), trial(Some(1), wrong())]), None);
    }

    #[test]
    fn narrow_gradients_are_eligible_on_request_or_without_plain_ones() {
        let of = |form, outcome| Trial {
            algorithm: Some(LibraryAlgorithm::cudnn(1, form)),
            workspace: 0,
            outcome,
        };
        let own = trial(None, Outcome::Timed(3.0));
        let narrow = of(Form::Narrow, Outcome::Timed(1.0));
        let right = [own.clone(), of(Form::Plain, Outcome::Slow(9.0)), narrow.clone()];
        assert_eq!(eligible(&right, false).len(), 2);
        assert_eq!(eligible(&right, true).len(), 3);
        let refused = [own, of(Form::Plain, Outcome::Rejected("not supported".into())), narrow];
        assert_eq!(eligible(&refused, false).len(), 3);
    }
}
