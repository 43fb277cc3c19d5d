//! Launches of steps: which graphs there are, and how far the host is ahead of the GPU.
//!
//! Every launch is followed by read-backs of the score and the status, whose place in the stream is a mark. The host
//! enqueues up to [`AHEAD`] launches, waits for the oldest mark, and reports its steps. So the stream never runs empty,
//! not even between two epochs, unless the trainer stops there.

use std::sync::Arc;

use mgpu::device::{DeviceDataParallel, Readback, StatusReadback, StepGraph};
use mgpu::{DType, DeviceCommunicator, ReduceOp, Result, Sampler};
use mgpu_kernels::cuda::{Memory, View};
use mgpu_kernels::loss::cuda::Score;

use super::super::{StepObserver, TrainingConfig};
use super::{Gpu, TrainingImages};
use crate::nets::{DeviceDropout, DeviceNet, LossReport};

/// Steps that launch each kernel separately.
pub(super) const FIRST_STEPS: u64 = 3;
/// Steps in the largest graph.
pub(super) const STEPS_A_LAUNCH: u64 = 10;
/// Launches that the host may be ahead of the GPU.
pub(super) const AHEAD: usize = 2;

/// A position in the stream's work after a launch, with the read-backs enqueued there.
pub(super) struct LaunchMark {
    score: Readback,
    /// The score of all ranks, at the end of an epoch and where the trainer stops.
    total: Option<Readback>,
    status: StatusReadback,
    launch: Launch,
}

/// What was launched before a mark.
#[derive(Debug, Clone, Copy, Default)]
struct Launch {
    /// Steps done after it.
    step: u64,
    /// Whether the score was cleared before it.
    is_first: bool,
    /// Whether the score ends with it.
    is_last: bool,
    /// Whether it was one step with a trace.
    is_traced: bool,
}

impl LaunchMark {
    pub(super) fn new(model: &DeviceDataParallel) -> Result<Self> {
        let readback = || Readback::new(model.stream().device(), Score::BYTES);
        Ok(LaunchMark {
            score: readback()?,
            total: (model.ranks() > 1).then(readback).transpose()?,
            status: StatusReadback::new(model)?,
            launch: Launch::default(),
        })
    }
}

/// The score over all ranks, summed on the GPU, so that the host need not wait for a collective of its own.
pub(super) struct TotalScore {
    comm: Arc<DeviceCommunicator>,
    bytes: Memory,
}

impl TotalScore {
    pub(super) fn new(comm: Arc<DeviceCommunicator>) -> Result<Self> {
        let bytes = Memory::zeroed(comm.device(), DType::U8, Score::BYTES)?;
        Ok(TotalScore { comm, bytes })
    }

    /// Enqueues the sum of all ranks' `score`. Collective.
    fn enqueue(&self, model: &DeviceDataParallel, score: View<'_>) -> Result<View<'_>> {
        // The loss, and two counts.
        let counts = size_of::<f64>()..Score::BYTES;
        let (loss, counts) = ((0..counts.start, DType::F64), (counts, DType::I64));
        self.comm.group(|group| {
            [loss, counts].into_iter().try_for_each(|(range, dtype)| {
                let [from, to] = [score, self.bytes.view()].map(|of| of.slice(range.clone()).cast(dtype));
                group.all_reduce_into(model.stream(), from, to, ReduceOp::Sum)
            })
        })?;
        Ok(self.bytes.view())
    }
}

impl Gpu {
    /// Number of steps of the next launch, of `left` until the epoch's end or a stop. Single steps come first, so that
    /// an epoch ends with its largest graphs.
    fn launch_length(&self, left: u64) -> u64 {
        let (rest, over) = (self.rest(), left % STEPS_A_LAUNCH);
        if self.graphs.is_empty() || self.options.on_host || (over > 0 && over != rest) {
            return 1;
        }
        left.min(STEPS_A_LAUNCH)
    }

    /// Steps at the end of an epoch that do not fill the largest graph.
    fn rest(&self) -> u64 {
        self.training_config.steps_per_epoch % STEPS_A_LAUNCH
    }

    /// Captures the graphs, after every kernel has been launched once.
    fn capture(&mut self) -> Result<()> {
        let mut lengths = if self.options.on_host { vec![1] } else { vec![1, self.rest(), STEPS_A_LAUNCH] };
        lengths.retain(|steps| (1..=self.training_config.steps_per_epoch).contains(steps));
        lengths.dedup();
        for steps in lengths {
            let graph = self.capture_steps(steps)?;
            self.graphs.push(graph);
        }
        Ok(())
    }

    /// Captures a graph of `steps` steps.
    pub(super) fn capture_steps(&mut self, steps: u64) -> Result<StepGraph> {
        let Gpu { model, net, train, training_config, .. } = self;
        model.capture(|model| enqueue_steps(model, net, train.as_ref(), training_config, steps))
    }

    /// Launches that may be in flight. Without graphs, and if it is traced, a step is reported before the next one is
    /// launched.
    pub(super) fn ahead(&self) -> usize {
        if self.graphs.is_empty() || self.traces.wants(self.model.steps(), self.launched) { 1 } else { AHEAD }
    }

    /// Enqueues the next launch, which ends at `stop` at the latest, and its mark.
    pub(super) fn launch_next(&mut self, sampler: &mut Sampler, stop: u64) -> Result<()> {
        if self.options.graph && self.graphs.is_empty() && self.launched >= FIRST_STEPS {
            self.capture()?;
        }
        let (step, per_epoch) = (self.model.steps(), self.training_config.steps_per_epoch);
        let epoch = step / per_epoch;
        let end = stop.min((epoch + 1) * per_epoch);
        let is_traced = self.traces.wants(step, self.launched);
        let steps = if is_traced { 1 } else { self.launch_length(end - step) };
        let steps = if steps > self.traces.until_next(step) { 1 } else { steps };
        match self.train.as_mut().expect("there are training images") {
            TrainingImages::Resident(set) => set.prepare(&self.model, sampler, epoch)?,
            TrainingImages::Staged(set) => {
                set.prepare(&self.model, sampler, (self.reported, step + steps))?;
            }
        }
        let is_first = std::mem::take(&mut self.score_has_ended);
        if is_first {
            self.net.clear_score(self.model.stream())?;
        }
        if is_traced { self.launch_traced() } else { self.launch(steps) }?;
        self.launched += steps;
        let step = self.model.steps();
        self.enqueue_mark(Launch { step, is_first, is_last: step == end, is_traced })?;
        self.score_has_ended = step.is_multiple_of(per_epoch);
        // The host shuffles and copies while the GPU works.
        match self.train.as_mut().expect("there are training images") {
            TrainingImages::Resident(set) if (epoch + 1) * per_epoch < self.training_config.steps => {
                set.prepare(&self.model, sampler, epoch + 1)?;
            }
            TrainingImages::Resident(_) => {}
            TrainingImages::Staged(set) => set.prepare_next(&self.model, sampler, self.reported)?,
        }
        Ok(())
    }

    /// Enqueues `steps` steps on the stream.
    fn launch(&mut self, steps: u64) -> Result<()> {
        if let Some(graph) = self.graphs.iter().find(|graph| graph.steps() == steps) {
            return self.model.replay(graph);
        }
        self.launch_each(steps)
    }

    /// Enqueues `steps` steps, kernel by kernel.
    pub(super) fn launch_each(&mut self, steps: u64) -> Result<()> {
        let Gpu { model, net, train, training_config, .. } = self;
        enqueue_steps(model, net, train.as_ref(), training_config, steps)
    }

    /// Enqueues the read-backs after a launch.
    fn enqueue_mark(&mut self, launch: Launch) -> Result<()> {
        let Gpu { model, net, total, idle, in_flight, .. } = self;
        let mut mark = idle.pop().map_or_else(|| LaunchMark::new(model), Ok)?;
        mark.launch = launch;
        model.enqueue_readback(net.score(), &mut mark.score)?;
        if let Some(readback) = mark.total.as_mut().filter(|_| launch.is_last) {
            model.enqueue_readback(total.enqueue(model, net.score())?, readback)?;
        }
        model.enqueue_status_readback(&mut mark.status)?;
        in_flight.push_back(mark);
        Ok(())
    }

    /// Waits for the oldest mark and reports its steps.
    pub(super) fn report_oldest(&mut self, observer: &mut StepObserver<'_>) -> Result<()> {
        let mut mark = self.in_flight.pop_front().expect("a launch is in flight");
        self.model.read_status(&mut mark.status)?;
        let score: LossReport = Score::from_bytes(self.model.read(&mut mark.score)?).into();
        let Launch { step, is_first, is_last, is_traced } = mark.launch;
        let before = if is_first { LossReport::default() } else { self.score };
        let samples = (score.samples - before.samples).max(1);
        let loss = (score.loss_sum - before.loss_sum) / samples as f64;
        self.score = score;
        if is_last {
            self.epoch_score = match &mut mark.total {
                Some(total) => Score::from_bytes(self.model.read(total)?).into(),
                None => score,
            };
        }
        if is_traced {
            self.read_trace(step)?;
        }
        let steps = std::mem::replace(&mut self.reported, step)..step;
        self.idle.push(mark);
        steps.for_each(|step| observer(step + 1, loss));
        Ok(())
    }
}

/// Enqueues `steps` steps on the stream, kernel by kernel.
fn enqueue_steps(
    model: &mut DeviceDataParallel,
    net: &mut DeviceNet,
    train: Option<&TrainingImages>,
    training_config: &TrainingConfig,
    steps: u64,
) -> mgpu::Result<()> {
    let data = train.expect("there are training images").data();
    let dropout = DeviceDropout { seed: training_config.seed, first_sample: training_config.first_sample() };
    (0..steps).try_for_each(|_| net.step(model, data, Some(dropout)))
}
