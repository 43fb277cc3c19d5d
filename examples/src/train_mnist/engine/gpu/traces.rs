//! Traced steps, for the profile and for the timeline.
//!
//! A traced step is launched alone, as a graph of one step that records the times of its stages, and the host reads
//! them before it launches the next one. So only some steps are traced: those of `--timeline-steps`, and with
//! `--profile` the first ones after the warm-up. All ranks trace the same steps.

use std::ops::{Range, RangeInclusive};

use mgpu::Result;
use mgpu::device::{DeviceClock, StepGraph, StepTrace};
use mgpu::timeline::{Timeline, now};

use super::super::super::args::Args;
use super::super::super::profile::{Measured, StepProfile, Sums};
use super::Gpu;
use super::launches::FIRST_STEPS;
use crate::nets::{DeviceNet, DeviceTimes};

/// Steps that are profiled.
const PROFILED_STEPS: u32 = 100;

/// Which steps are traced, and the trace of the last one.
pub(super) struct Traces {
    timeline: Timeline,
    /// The steps whose spans are recorded on the timeline, counted from 1; none without a timeline.
    recorded: Option<RangeInclusive<u64>>,
    /// Steps still to be profiled.
    to_profile: u32,
    times: DeviceTimes,
    /// A step with its trace.
    graph: Option<StepGraph>,
    trace: Option<StepTrace>,
    clock: Option<DeviceClock>,
    /// When the last traced step was launched.
    launched_at: u64,
}

impl Traces {
    /// What the arguments ask for. Registers the names of the network's stages.
    pub(super) fn new(args: &Args, timeline: &Timeline, net: &mut DeviceNet) -> Result<Self> {
        let to_profile = if args.profile { PROFILED_STEPS } else { 0 };
        if args.timeline.is_some() {
            net.record_on(timeline);
        } else if args.profile {
            // Names only.
            net.record_on(&Timeline::new(0)?);
        }
        Ok(Traces {
            timeline: timeline.clone(),
            recorded: args.timeline.is_some().then(|| args.timeline_steps()),
            to_profile,
            times: DeviceTimes::default(),
            graph: None,
            trace: None,
            clock: None,
            launched_at: 0,
        })
    }

    fn is_profiled(&self, launched: u64) -> bool {
        self.to_profile > 0 && launched >= FIRST_STEPS
    }

    fn is_recorded(&self, step: u64) -> bool {
        self.recorded.as_ref().is_some_and(|steps| steps.contains(&(step + 1)))
    }

    /// Whether the step after `step` steps is traced, of which this engine has launched `launched`.
    pub(super) fn wants(&self, step: u64, launched: u64) -> bool {
        self.is_profiled(launched) || self.is_recorded(step)
    }

    /// How many steps after `step` can be launched together until the next one that is traced.
    pub(super) fn until_next(&self, step: u64) -> u64 {
        let first = self.recorded.as_ref().map(|steps| steps.start() - 1).filter(|first| *first > step);
        first.map_or(u64::MAX, |first| first - step)
    }
}

impl Gpu {
    /// Launches one step with a trace. Nothing else is in flight.
    pub(super) fn launch_traced(&mut self) -> Result<()> {
        if self.traces.clock.as_ref().is_none_or(DeviceClock::is_outdated) {
            self.traces.clock = Some(DeviceClock::new(self.model.stream())?);
        }
        self.traces.launched_at = now();
        // A graph would not contain the host's part of a step.
        if self.graphs.is_empty() || self.options.on_host {
            self.model.start_trace();
            self.launch_each(1)?;
            self.traces.trace = Some(self.model.take_trace()?);
            return Ok(());
        }
        if self.traces.graph.is_none() {
            self.model.start_trace();
            let graph = self.capture_steps(1)?;
            (self.traces.graph, self.traces.trace) = (Some(graph), Some(self.model.take_trace()?));
        }
        self.model.replay(self.traces.graph.as_ref().expect("it was captured"))
    }

    /// Reads the trace of `step` (counted from 1), which is done.
    pub(super) fn read_trace(&mut self, step: u64) -> Result<()> {
        let Gpu { model, net, traces, launched, .. } = self;
        let (Some(trace), Some(clock)) = (&traces.trace, &traces.clock) else { return Ok(()) };
        let spans = trace.read()?;
        if traces.is_recorded(step - 1) {
            let limits: Range<u64> = traces.launched_at..now();
            trace.record(&spans, step as u32, (clock, limits), &traces.timeline)?;
        }
        // Steps that load kernels are not profiled.
        if traces.is_profiled(*launched - 1) {
            net.profile_step(&spans, model.micro_batches(), &mut traces.times);
            traces.to_profile -= 1;
        }
        Ok(())
    }

    /// The profile of the traced steps.
    pub(super) fn traced_profile(&self) -> Option<StepProfile> {
        let (profile, stages) = self.net.profile().filter(|(profile, _)| profile.steps() > 0)?;
        let DeviceTimes { gather, communication, optimizer, steps } = self.traces.times;
        let sums = Sums { gather, communication, optimizer, steps };
        let measured = if self.options.graph && !self.options.on_host {
            Measured::InGraphs
        } else {
            Measured::BetweenLaunches
        };
        Some(StepProfile::new(measured, (profile, stages), sums))
    }
}
