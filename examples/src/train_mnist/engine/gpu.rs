//! Training on a GPU: the data set lies in its memory, and steps are replayed from graphs.
//!
//! The first steps are launched kernel by kernel, which also compiles and loads every kernel. Then two graphs are
//! captured, of one step and of several, and the rest of the training is replays of them: the host says "ten more" now
//! and then, and reads the losses that the GPU has added up. It never runs more than two launches ahead, so that it
//! notices within moments when a rank is lost, and says so.

use std::sync::Arc;

use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::device::{DeviceConfig, DeviceDataParallel, Health, Reading, StepGraph};
use mgpu::replicate::{checksum, replicate, verify_equal};
use mgpu::{Communicator, DeviceCommunicator, Layout, Sampler};
use mgpu_kernels::Precision;
use mgpu_kernels::cuda::{self, Device, Libraries, Stream};
use mgpu_kernels::loss::cuda::Score;

use super::super::args::Args;
use super::super::profile::StepProfile;
use super::{Engine, TrainingConfig, StepObserver, check_finite, read};
use crate::data::Dataset;
use crate::nets::{DeviceData, DeviceDropout, DeviceNet, LossReport};

/// Steps that are launched kernel by kernel.
const FIRST_STEPS: u64 = 3;
/// Steps of the longer graph.
const STEPS_A_LAUNCH: u64 = 10;
/// Launches that the host may be ahead of the GPU.
const AHEAD: usize = 2;

/// What the user may choose of how a GPU is used.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Options {
    pub(in super::super) precision: Precision,
    pub(in super::super) libraries: Libraries,
    /// Replay steps from graphs.
    pub(in super::super) graph: bool,
}

/// A place in the stream's work, and how things stood there.
struct LaunchMark {
    score: Reading,
    health: Health,
    /// Steps that had been made.
    step: u64,
}

/// A network on this rank's GPU.
pub(in super::super) struct Gpu {
    graphs: Vec<StepGraph>,
    model: DeviceDataParallel,
    net: DeviceNet,
    recipe: TrainingConfig,
    options: Options,
    train: Option<DeviceData>,
    /// The epoch whose order the training data has.
    epoch: Option<u64>,
    test: Option<DeviceData>,
    marks: Vec<LaunchMark>,
    /// Steps since the engine was made.
    launched: u64,
}

impl Gpu {
    pub(in super::super) fn new(
        recipe: &TrainingConfig,
        args: &Args,
        device: Arc<DeviceCommunicator>,
        host: Communicator,
    ) -> mgpu::Result<Self> {
        let (set_up, options) = (Stream::new(device.device())?, args.gpu());
        let choice = cuda::Options { deterministic: true, libraries: options.libraries };
        let micro_batch = recipe.batch / recipe.micro_batches;
        let net = DeviceNet::new(&args.net, micro_batch, options.precision, choice, &set_up)?;
        let parameters = net.to_device(&net.initial_parameters(recipe.seed));
        let parallel = args.parallel.config(recipe.optimizer(&args.net), 1, recipe.micro_batches);
        let config = DeviceConfig::new(parallel)
            .with_steps_per_epoch(recipe.steps_per_epoch)
            .with_bf16_copy(options.precision == Precision::Bf16);
        let model = DeviceDataParallel::new(device, host, net.layout().clone(), parameters, config)?;
        let model = model.with_buffers(&net.initial_buffers())?;
        let device = model.stream().device();
        let mark = |_| -> mgpu::Result<LaunchMark> {
            let (score, health) = (Reading::new(device, Score::BYTES)?, Health::new(&model)?);
            Ok(LaunchMark { score, health, step: 0 })
        };
        // What set-up took to time kernels with is not the training's.
        device.reset_memory_peak();
        Ok(Gpu {
            graphs: Vec::new(),
            marks: (0..AHEAD).map(mark).collect::<mgpu::Result<_>>()?,
            model,
            net,
            recipe: *recipe,
            options,
            train: None,
            epoch: None,
            test: None,
            launched: 0,
        })
    }

    /// Brings the training set and this rank's order of `epoch` to the GPU, unless they are there.
    fn load(&mut self, data: &Dataset, sampler: &mut Sampler, epoch: u64) -> mgpu::Result<()> {
        if self.epoch == Some(epoch) {
            return Ok(());
        }
        let stream = self.model.stream();
        let steps = self.recipe.steps_per_epoch as usize;
        if self.train.is_none() {
            let places = steps * self.recipe.batch;
            self.train = Some(DeviceData::new(stream, &data.images, &data.labels, places)?);
        }
        let order: Vec<u32> = (0..steps).flat_map(|step| sampler.batch(epoch, step).to_vec()).collect();
        if let Some(train) = &self.train {
            train.set_order(stream, &order)?;
        }
        self.epoch = Some(epoch);
        Ok(())
    }

    /// Puts `steps` steps on the stream.
    fn launch(&mut self, steps: u64) -> mgpu::Result<()> {
        if let Some(graph) = self.graphs.iter().find(|graph| graph.steps() == steps) {
            return self.model.replay(graph);
        }
        let Gpu { model, net, train, recipe, .. } = self;
        launch_each(model, net, train.as_ref(), recipe, steps)
    }

    /// Captures the graphs, once every kernel has been launched.
    fn capture(&mut self) -> mgpu::Result<()> {
        for steps in [STEPS_A_LAUNCH, 1] {
            let Gpu { model, net, train, recipe, .. } = self;
            let graph = model.capture(|model| launch_each(model, net, train.as_ref(), recipe, steps))?;
            self.graphs.push(graph);
        }
        Ok(())
    }

    /// Evaluates the first `images` places of the test set's order.
    fn score(&mut self, images: usize) -> mgpu::Result<LossReport> {
        let Gpu { model, net, test, .. } = self;
        // What follows is this rank's own affair.
        model.wait("training step")?;
        let test = test.as_ref().expect("the test set is on the GPU");
        net.clear_score(model.stream())?;
        for first in (0..images).step_by(net.max_batch()) {
            net.evaluate(model, test, first, (images - first).min(net.max_batch()))?;
        }
        model.wait_local("evaluation")?;
        net.read_score(model.stream())
    }

    /// The arena `values` of the device, as it is in checkpoints.
    fn host_layout(&self) -> &Layout {
        self.net.host_layout()
    }
}

/// Puts `steps` steps on the stream, kernel by kernel.
fn launch_each(
    model: &mut DeviceDataParallel,
    net: &mut DeviceNet,
    data: Option<&DeviceData>,
    recipe: &TrainingConfig,
    steps: u64,
) -> mgpu::Result<()> {
    let data = data.expect("the training set is on the GPU");
    let dropout = DeviceDropout { seed: recipe.seed, first_sample: recipe.first_sample };
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
        seen: &mut StepObserver<'_>,
    ) -> mgpu::Result<LossReport> {
        let begin = self.model.steps();
        self.load(data, sampler, begin / self.recipe.steps_per_epoch)?;
        self.net.clear_score(self.model.stream())?;
        // Told so far: steps, and the score as of the last mark that was read.
        let (mut told, mut score) = (begin, LossReport::default());
        let mut launches = 0;
        while self.model.steps() < until {
            if self.options.graph && self.graphs.is_empty() && self.launched >= FIRST_STEPS {
                self.capture()?;
            }
            let longest = if self.graphs.is_empty() { 1 } else { STEPS_A_LAUNCH };
            let steps = if self.model.steps() + longest <= until { longest } else { 1 };
            let place = launches % AHEAD;
            // The mark's last use is over before it is used again: that keeps the host from running ahead.
            if launches >= AHEAD {
                let step = self.marks[place].step;
                score = self.read(place, score, told..step, seen)?;
                told = step;
            }
            self.launch(steps)?;
            self.launched += steps;
            let Gpu { model, net, marks, .. } = self;
            let mark = &mut marks[place];
            model.read_later(net.score(), &mut mark.score)?;
            model.look_later(&mut mark.health)?;
            mark.step = model.steps();
            launches += 1;
            if self.graphs.is_empty() {
                // Without a graph every step is told as it ends.
                self.model.wait("training step")?;
            }
        }
        for launch in launches.saturating_sub(AHEAD)..launches {
            let step = self.marks[launch % AHEAD].step;
            score = self.read(launch % AHEAD, score, told..step, seen)?;
            told = step;
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
            snapshot.add_later(name, self.host_layout(), move || to_host(&values));
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
    /// Waits for mark `place` and tells of its steps. Returns the score as it was there; `before` is that of the mark
    /// before.
    fn read(
        &mut self,
        place: usize,
        before: LossReport,
        steps: std::ops::Range<u64>,
        seen: &mut StepObserver<'_>,
    ) -> mgpu::Result<LossReport> {
        self.model.look(&mut self.marks[place].health)?;
        let bytes = self.model.read(&mut self.marks[place].score)?;
        let score: LossReport = Score::from_bytes(bytes).into();
        let samples = (score.samples - before.samples).max(1);
        let loss = (score.loss_sum - before.loss_sum) / samples as f64;
        steps.for_each(|step| seen(step + 1, loss));
        Ok(score)
    }
}
