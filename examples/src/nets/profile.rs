//! Profiles a step: the time of each stage of a network, optionally recorded on a timeline.
//!
//! On the CPU a pass is divided into laps. Each lap lasts from the end of the previous one until now, and belongs to a stage, to
//! communication (which is measured elsewhere) or to the rest. So all time is counted exactly once, and a lap costs
//! one clock read. On a GPU the spans of a [`StepTrace`](mgpu::device::StepTrace) are added up; collectives within a
//! stage are left out of it there too.

use std::time::Duration;

use mgpu::device::DeviceSpan;
use mgpu::timeline::{Name, Span, Timeline, now};

/// Times of a network's stages, summed over steps.
#[derive(Debug, Clone)]
pub struct Profile {
    /// When the pass started, and when the current lap started.
    pass: u64,
    last: u64,
    spans: Option<TimelineSpans>,
    forward: Vec<Duration>,
    backward: Vec<Duration>,
    other: Duration,
    pub(super) steps: u32,
    pub(super) images: usize,
}

/// The timeline of the laps, and the span names of each stage.
#[derive(Debug, Clone)]
pub(super) struct TimelineSpans {
    timeline: Timeline,
    pub(super) forward: Vec<Name>,
    pub(super) backward: Vec<Name>,
}

impl TimelineSpans {
    /// The name of the gather of a batch.
    pub(super) const GATHER: Name = Name::new("gather");
    pub(super) const FORWARD: Name = Name::new("forward");
    pub(super) const BACKWARD: Name = Name::new("backward");
    pub(super) const LOSS: Name = Name::new("loss");

    /// `stages` are the names of the stages.
    pub(super) fn new(timeline: &Timeline, stages: &[String]) -> Self {
        let names =
            |pass: &str| stages.iter().map(|stage| timeline.name(&format!("{pass} {stage}"))).collect();
        TimelineSpans { forward: names("forward"), backward: names("backward"), timeline: timeline.clone() }
    }

    fn show(&self, name: Name, number: Option<u32>, begin: u64, end: u64) {
        self.timeline.record(Span { name, number, begin, end, bytes: 0 });
    }
}

/// What a lap's time is attributed to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lap {
    /// A pass of a stage, by its index.
    Forward(usize),
    Backward(usize),
    Loss,
    /// Reordering the images for the first stage.
    Input,
    /// Collectives are measured and recorded by their timeline.
    Communication,
}

/// Times of a step on a GPU outside of the stages and the loss, summed over steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceTimes {
    /// Gathering batches.
    pub gather: Duration,
    /// The time in which the GPU computed nothing of the step, because it waited for collectives or was in one.
    pub communication: Duration,
    /// The update, without communication.
    pub optimizer: Duration,
    /// Total.
    pub steps: Duration,
}

/// Average times of one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTimes {
    /// Index of its first layer in the spec.
    pub layer: usize,
    /// Index of its first layer in the spec, and a description.
    pub name: String,
    /// Its kernel.
    pub kernel: String,
    /// Seconds per step in the forward pass.
    pub forward: f64,
    /// Seconds per step in the backward pass.
    pub backward: f64,
    /// Multiplications and additions per step, from the definition; only convolutions and dense layers count.
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

    /// Adds the spans of a step on a GPU. `names` are those of the stages' spans.
    pub(super) fn add_step(
        &mut self,
        spans: &[DeviceSpan],
        names: &TimelineSpans,
        images: usize,
        times: &mut DeviceTimes,
    ) {
        let on_compute_stream = || spans.iter().filter(|span| !span.exchange);
        let is_communication = |name| [Name::WAIT_REDUCTIONS, Name::ALL_REDUCE].contains(&name);
        let length = |span: &DeviceSpan| span.time.end.saturating_sub(span.time.start);
        for span in on_compute_stream() {
            let within = on_compute_stream()
                .filter(|inner| is_communication(inner.name))
                .filter(|inner| span.time.start <= inner.time.start && inner.time.end <= span.time.end);
            let own = length(span).saturating_sub(within.map(length).sum());
            let stage = |of: &[Name]| of.iter().position(|name| *name == span.name);
            match span.name {
                Name::STEP => times.steps += length(span),
                Name::OPTIMIZER => times.optimizer += own,
                TimelineSpans::GATHER => times.gather += own,
                TimelineSpans::LOSS => self.other += own,
                name if is_communication(name) => times.communication += length(span),
                _ => {
                    if let Some(index) = stage(&names.forward) {
                        self.forward[index] += own;
                    } else if let Some(index) = stage(&names.backward) {
                        self.backward[index] += own;
                    }
                }
            }
        }
        self.steps += 1;
        self.images += images;
    }

    /// Number of profiled steps.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Seconds per step for the loss, and for reordering the input.
    pub fn loss(&self) -> f64 {
        self.mean(self.other)
    }

    fn mean(&self, sum: Duration) -> f64 {
        sum.as_secs_f64() / f64::from(self.steps.max(1))
    }

    /// Images per step.
    pub(super) fn images(&self) -> f64 {
        self.images as f64 / f64::from(self.steps.max(1))
    }

    /// Seconds per step of stage `index` in the forward and the backward pass.
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

/// Attributes the time since the last lap.
pub(super) fn lap(profile: &mut Option<Profile>, lap: Lap) {
    let Some(profile) = profile else { return };
    let (begin, end) = (profile.last, now());
    profile.last = end;
    let spans = profile.spans.as_ref();
    let (sum, name) = match lap {
        Lap::Forward(index) => (&mut profile.forward[index], spans.map(|spans| spans.forward[index])),
        Lap::Backward(index) => (&mut profile.backward[index], spans.map(|spans| spans.backward[index])),
        Lap::Loss => (&mut profile.other, Some(TimelineSpans::LOSS)),
        Lap::Input => (&mut profile.other, Some(Name::new("input"))),
        Lap::Communication => return,
    };
    *sum += Duration::from_nanos(end - begin);
    if let Some((spans, name)) = spans.zip(name) {
        spans.show(name, None, begin, end);
    }
}

/// Ends a pass with the last lap. `pass` is the name of its span, with the number of the micro-batch if it has one.
pub(super) fn end(profile: &Option<Profile>, (pass, number): (&'static str, Option<u32>)) {
    if let Some(Profile { pass: begin, last, spans: Some(spans), .. }) = profile {
        spans.show(Name::new(pass), number, *begin, *last);
    }
}
