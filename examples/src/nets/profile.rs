//! Where the time of a step goes: kept for each stage of a network, where it is asked for, and shown on a timeline.
//!
//! A pass is cut into laps: each goes from the end of the last one to now, and belongs to a stage, to communication (which
//! others measure) or to the rest. So every moment is counted once, and a lap costs one reading of the clock.

use std::time::Duration;

use mgpu::timeline::{Name, Span, Timeline, now};

/// Times of a network's stages, summed over steps.
#[derive(Debug, Clone)]
pub struct Profile {
    /// When the pass began, and the current lap.
    pass: u64,
    last: u64,
    spans: Option<TimelineSpans>,
    forward: Vec<Duration>,
    backward: Vec<Duration>,
    other: Duration,
    pub(super) steps: u32,
    pub(super) images: usize,
}

/// Where laps are shown, and what those of each stage are called.
#[derive(Debug, Clone)]
pub(super) struct TimelineSpans {
    timeline: Timeline,
    forward: Vec<Name>,
    backward: Vec<Name>,
}

impl TimelineSpans {
    /// `stages` are their names.
    pub(super) fn new(timeline: &Timeline, stages: &[String]) -> Self {
        let names =
            |pass: &str| stages.iter().map(|stage| timeline.name(&format!("{pass} {stage}"))).collect();
        TimelineSpans { forward: names("forward"), backward: names("backward"), timeline: timeline.clone() }
    }

    fn show(&self, name: Name, begin: u64, end: u64) {
        self.timeline.record(Span { name, number: None, begin, end, bytes: 0 });
    }
}

/// What a lap's time goes to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lap {
    /// A stage's passes, by its place.
    Forward(usize),
    Backward(usize),
    Loss,
    /// Of the images, from their order in memory to the first stage's.
    Input,
    /// Collectives are measured and shown by their timeline.
    Communication,
}

/// What one stage took on average.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTimes {
    /// Index in the spec of its first layer, and what it does.
    pub name: String,
    /// What computes it.
    pub kernel: String,
    /// Seconds a step for the forward pass.
    pub forward: f64,
    /// Seconds a step for the backward pass.
    pub backward: f64,
    /// Multiplications and additions of its definition a step: none but those of convolutions and dense layers count.
    pub operations: f64,
}

impl Profile {
    pub(super) fn new(stages: usize, spans: Option<TimelineSpans>) -> Self {
        Profile {
            pass: 0,
            last: 0,
            spans,
            forward: vec![Duration::ZERO; stages],
            backward: vec![Duration::ZERO; stages],
            other: Duration::ZERO,
            steps: 0,
            images: 0,
        }
    }

    /// Steps that were measured.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Seconds a step that were spent on the loss, and on bringing images to the first layer.
    pub fn loss(&self) -> f64 {
        self.mean(self.other)
    }

    fn mean(&self, sum: Duration) -> f64 {
        sum.as_secs_f64() / f64::from(self.steps.max(1))
    }

    /// Images of a step.
    pub(super) fn images(&self) -> f64 {
        self.images as f64 / f64::from(self.steps.max(1))
    }

    /// Seconds a step for the forward and the backward pass of the stage at `place`.
    pub(super) fn stage(&self, index: usize) -> [f64; 2] {
        [self.forward[index], self.backward[index]].map(|sum| self.mean(sum))
    }
}

/// Starts a pass.
pub(super) fn start(profile: &mut Option<Profile>) {
    if let Some(profile) = profile {
        profile.last = now();
        profile.pass = profile.last;
    }
}

/// Adds the time since the last lap to what it belongs to.
pub(super) fn lap(profile: &mut Option<Profile>, lap: Lap) {
    let Some(profile) = profile else { return };
    let (begin, end) = (profile.last, now());
    profile.last = end;
    let spans = profile.spans.as_ref();
    let (sum, name) = match lap {
        Lap::Forward(index) => (&mut profile.forward[index], spans.map(|spans| spans.forward[index])),
        Lap::Backward(index) => (&mut profile.backward[index], spans.map(|spans| spans.backward[index])),
        Lap::Loss => (&mut profile.other, Some(Name::new("loss"))),
        Lap::Input => (&mut profile.other, Some(Name::new("input"))),
        Lap::Communication => return,
    };
    *sum += Duration::from_nanos(end - begin);
    if let Some((spans, name)) = spans.zip(name) {
        spans.show(name, begin, end);
    }
}

/// Ends a pass with the last lap.
pub(super) fn end(profile: &Option<Profile>, pass: &'static str) {
    if let Some(Profile { pass: begin, last, spans: Some(spans), .. }) = profile {
        spans.show(Name::new(pass), *begin, *last);
    }
}
