//! Training on a GPU: the data set is in GPU memory, and steps are replayed from CUDA graphs.
//!
//! The first steps launch each kernel separately, which also compiles and loads every kernel. Then two graphs are
//! captured, one of a single step and one of several steps, and the rest of the training replays them. The host only
//! enqueues replays and reads the losses that the GPU accumulated. It is at most two launches ahead of the GPU, so it
//! notices a lost rank quickly.

use std::sync::Arc;

use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::device::{DeviceConfig, DeviceDataParallel, Readback, StatusReadback, StepGraph};
use mgpu::replicate::{checksum, replicate, verify_equal};
use mgpu::{Communicator, DeviceCommunicator, Layout, Sampler};
use mgpu_kernels::Precision;
use mgpu_kernels::cuda::{AutotuneOptions, Device, Stream};
use mgpu_kernels::loss::cuda::Score;

use super::super::args::Args;
use super::super::profile::StepProfile;
use super::{Engine, StepObserver, TrainingConfig, check_finite, read};
use crate::data::Dataset;
use crate::nets::{DeviceData, DeviceDropout, DeviceNet, LossReport};

/// Steps that launch each kernel separately.
const FIRST_STEPS: u64 = 3;
/// Steps in the larger graph.
const STEPS_A_LAUNCH: u64 = 10;
/// Launches that the host may be ahead of the GPU.
const AHEAD: usize = 2;

/// The GPU options of the user.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Options {
    pub(in super::super) precision: Precision,
    /// Which kernels a layer may use.
    pub(in super::super) choice: AutotuneOptions,
    /// Replay steps from graphs.
    pub(in super::super) graph: bool,
}

/// A position in the stream's work, with the read-backs enqueued there.
struct LaunchMark {
    score: Readback,
    status: StatusReadback,
    /// Steps done at that position.
    step: u64,
}

/// A network on this rank's GPU.
pub(in super::super) struct Gpu {
    graphs: Vec<StepGraph>,
    model: DeviceDataParallel,
    net: DeviceNet,
    training_config: TrainingConfig,
    options: Options,
    train: Option<DeviceData>,
    /// The epoch that the training data is ordered for.
    epoch: Option<u64>,
    test: Option<DeviceData>,
    marks: Vec<LaunchMark>,
    /// Steps since the engine was created.
    launched: u64,
}

impl Gpu {
    pub(in super::super) fn new(
        training_config: &TrainingConfig,
        args: &Args,
        device: Arc<DeviceCommunicator>,
        host: Communicator,
    ) -> mgpu::Result<Self> {
        let (set_up, options) = (Stream::new(device.device())?, args.gpu());
        let micro_batch = training_config.batch / training_config.micro_batches;
        let net = DeviceNet::new(&args.net, micro_batch, options.precision, options.choice, &set_up)?;
        let parameters = net.to_device(&net.initial_parameters(training_config.seed));
        let parallel =
            args.parallel.config(training_config.optimizer(&args.net), 1, training_config.micro_batches);
        let config = DeviceConfig::new(parallel)
            .with_steps_per_epoch(training_config.steps_per_epoch)
            .with_bf16_copy(options.precision == Precision::Bf16);
        let model = DeviceDataParallel::new(device, host, net.layout().clone(), parameters, config)?;
        let model = model.with_buffers(&net.initial_buffers())?;
        let device = model.stream().device();
        let mark = |_| -> mgpu::Result<LaunchMark> {
            let (score, status) = (Readback::new(device, Score::BYTES)?, StatusReadback::new(&model)?);
            Ok(LaunchMark { score, status, step: 0 })
        };
        // Memory used while benchmarking kernels does not count as training memory.
        device.reset_memory_peak();
        Ok(Gpu {
            graphs: Vec::new(),
            marks: (0..AHEAD).map(mark).collect::<mgpu::Result<_>>()?,
            model,
            net,
            training_config: *training_config,
            options,
            train: None,
            epoch: None,
            test: None,
            launched: 0,
        })
    }

    /// Uploads the training set and this rank's sample order of `epoch`, unless they are there already.
    fn load(&mut self, data: &Dataset, sampler: &mut Sampler, epoch: u64) -> mgpu::Result<()> {
        if self.epoch == Some(epoch) {
            return Ok(());
        }
        let stream = self.model.stream();
        let steps = self.training_config.steps_per_epoch as usize;
        if self.train.is_none() {
            let places = steps * self.training_config.batch;
            self.train = Some(DeviceData::new(stream, &data.images, &data.labels, places)?);
        }
        let order: Vec<u32> = (0..steps).flat_map(|step| sampler.batch(epoch, step).to_vec()).collect();
        if let Some(train) = &self.train {
            train.set_order(stream, &order)?;
        }
        self.epoch = Some(epoch);
        Ok(())
    }

    /// Enqueues `steps` steps on the stream.
    fn launch(&mut self, steps: u64) -> mgpu::Result<()> {
        if let Some(graph) = self.graphs.iter().find(|graph| graph.steps() == steps) {
            return self.model.replay(graph);
        }
        let Gpu { model, net, train, training_config, .. } = self;
        launch_each(model, net, train.as_ref(), training_config, steps)
    }

    /// Captures the graphs, after every kernel has been launched once.
    fn capture(&mut self) -> mgpu::Result<()> {
        for steps in [STEPS_A_LAUNCH, 1] {
            let Gpu { model, net, train, training_config, .. } = self;
            let graph =
                model.capture(|model| launch_each(model, net, train.as_ref(), training_config, steps))?;
            self.graphs.push(graph);
        }
        Ok(())
    }

    /// Evaluates the first `images` samples of the test order.
    fn score(&mut self, images: usize) -> mgpu::Result<LossReport> {
        let Gpu { model, net, test, .. } = self;
        // The rest concerns this rank only; wait for its peers' last collective first.
        model.wait("training step")?;
        let test = test.as_ref().expect("the test set is on the GPU");
        net.clear_score(model.stream())?;
        for first in (0..images).step_by(net.max_batch()) {
            net.evaluate(model, test, first, (images - first).min(net.max_batch()))?;
        }
        model.wait_local("evaluation")?;
        net.read_score(model.stream())
    }

    /// The layout of arenas in checkpoints.
    fn host_layout(&self) -> &Layout {
        self.net.host_layout()
    }
}

/// Enqueues `steps` steps on the stream, kernel by kernel.
fn launch_each(
    model: &mut DeviceDataParallel,
    net: &mut DeviceNet,
    data: Option<&DeviceData>,
    training_config: &TrainingConfig,
    steps: u64,
) -> mgpu::Result<()> {
    let data = data.expect("the training set is on the GPU");
    let dropout = DeviceDropout { seed: training_config.seed, first_sample: training_config.first_sample };
    (0..steps).try_for_each(|_| net.step(model, data, Some(dropout)))
}

impl Engine for Gpu {
    fn comm(&mut self) -> &mut Communicator {
        self.model.comm()
    }

    fn parameters(&self) -> usize {
        self.host_layout().len()
    }

    fn steps(&self) -> u64 {
        self.model.steps()
    }

    fn train(
        &mut self,
        data: &Dataset,
        sampler: &mut Sampler,
        until: u64,
        observer: &mut StepObserver<'_>,
    ) -> mgpu::Result<LossReport> {
        let begin = self.model.steps();
        self.load(data, sampler, begin / self.training_config.steps_per_epoch)?;
        self.net.clear_score(self.model.stream())?;
        // Reported so far: steps, and the score at the last mark read.
        let (mut reported, mut score) = (begin, LossReport::default());
        let mut launches = 0;
        while self.model.steps() < until {
            if self.options.graph && self.graphs.is_empty() && self.launched >= FIRST_STEPS {
                self.capture()?;
            }
            let longest = if self.graphs.is_empty() { 1 } else { STEPS_A_LAUNCH };
            let steps = if self.model.steps() + longest <= until { longest } else { 1 };
            let place = launches % AHEAD;
            // A mark is reused only after it was read. That keeps the host from running further ahead.
            if launches >= AHEAD {
                let step = self.marks[place].step;
                score = self.read(place, score, reported..step, observer)?;
                reported = step;
            }
            self.launch(steps)?;
            self.launched += steps;
            let Gpu { model, net, marks, .. } = self;
            let mark = &mut marks[place];
            model.enqueue_readback(net.score(), &mut mark.score)?;
            model.enqueue_status_readback(&mut mark.status)?;
            mark.step = model.steps();
            launches += 1;
            if self.graphs.is_empty() {
                // Without a graph, every step is reported when it ends.
                self.model.wait("training step")?;
            }
        }
        for launch in launches.saturating_sub(AHEAD)..launches {
            let step = self.marks[launch % AHEAD].step;
            score = self.read(launch % AHEAD, score, reported..step, observer)?;
            reported = step;
        }
        Ok(score)
    }

    fn evaluate(&mut self, data: &Dataset, shard: &[u32]) -> mgpu::Result<(LossReport, Option<LossReport>)> {
        if self.test.is_none() {
            let test = DeviceData::new(self.model.stream(), &data.images, &data.labels, shard.len())?;
            test.set_order(self.model.stream(), shard)?;
            self.test = Some(test);
        }
        let score = self.score(shard.len())?;
        if !self.model.has_average() {
            return Ok((score, None));
        }
        self.model.swap_average()?;
        let average = self.score(shard.len())?;
        self.model.swap_average()?;
        Ok((score, Some(average)))
    }

    fn verify(&mut self) -> mgpu::Result<u64> {
        let values = self.model.parameters()?;
        let values = self.net.to_host(&values);
        check_finite(self.net.host_layout(), &values)?;
        verify_equal(self.model.comm(), self.net.host_layout(), &values)?;
        Ok(checksum(&values))
    }

    fn snapshot(&mut self) -> mgpu::Result<Option<Snapshot>> {
        let arenas = self.model.arenas()?;
        if self.model.rank() > 0 {
            return Ok(None);
        }
        let mut snapshot = Snapshot::new(self.model.steps());
        for (name, values) in arenas {
            let to_host = self.net.host_order();
            let values = values.into_owned();
            snapshot.add_deferred(name, self.host_layout(), move || to_host(&values));
        }
        let buffers = self.model.buffers().to_vec::<f32>(self.model.stream())?;
        snapshot.add("buffers", self.net.buffers_layout(), buffers);
        Ok(Some(snapshot))
    }

    fn restore(&mut self, step: u64, checkpoint: Option<&Checkpoint>) -> mgpu::Result<()> {
        let Gpu { model, net, .. } = self;
        let layout = net.host_layout();
        model.restore(step, |name, _| Ok(net.to_device(&read(checkpoint, name, layout)?)))?;
        let layout = net.buffers_layout();
        let mut buffers = read(checkpoint, "buffers", layout)?;
        replicate(model.comm(), layout, &mut buffers)?;
        Ok(model.stream().upload(&buffers, model.buffers())?)
    }

    fn logits(&mut self, data: &Dataset, count: usize) -> mgpu::Result<Vec<f32>> {
        let Gpu { model, net, .. } = self;
        let order: Vec<u32> = (0..count as u32).collect();
        let data = DeviceData::new(model.stream(), &data.images, &data.labels, count)?;
        data.set_order(model.stream(), &order)?;
        let mut logits = Vec::new();
        for first in (0..count).step_by(net.max_batch()) {
            let images = (count - first).min(net.max_batch());
            net.evaluate(model, &data, first, images)?;
            model.wait_local("evaluation")?;
            logits.extend(net.logits(model.stream(), images)?);
        }
        Ok(logits)
    }

    fn gpu(&self) -> Option<&Device> {
        Some(self.model.stream().device())
    }

    fn describe_device(&self) -> String {
        format!("one {}, {}", self.model.stream().device().name(), self.options.precision)
    }

    fn kernels(&self) -> Vec<String> {
        self.net.describe()
    }

    fn profile(&self) -> Option<StepProfile> {
        None
    }
}

impl Gpu {
    /// Waits for mark `place` and reports its steps. Returns the score there; `before` is the score at the previous
    /// mark.
    fn read(
        &mut self,
        place: usize,
        before: LossReport,
        steps: std::ops::Range<u64>,
        observer: &mut StepObserver<'_>,
    ) -> mgpu::Result<LossReport> {
        self.model.read_status(&mut self.marks[place].status)?;
        let bytes = self.model.read(&mut self.marks[place].score)?;
        let score: LossReport = Score::from_bytes(bytes).into();
        let samples = (score.samples - before.samples).max(1);
        let loss = (score.loss_sum - before.loss_sum) / samples as f64;
        steps.for_each(|step| observer(step + 1, loss));
        Ok(score)
    }
}
