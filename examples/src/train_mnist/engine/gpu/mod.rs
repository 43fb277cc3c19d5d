//! Training on a GPU: the data set is in GPU memory, and steps are replayed from CUDA graphs.
//!
//! The first steps launch each kernel separately, which also compiles and loads every kernel. Then graphs are
//! captured, of a single step, of several steps, and of the steps that several leave of an epoch; the rest of the
//! training replays them. The host only enqueues replays and reads the losses that the GPU accumulated. It is at most
//! two launches ahead of the GPU, so it notices a lost rank quickly.
//!
//! With `--placement host` the host updates the weights, so there is only a graph of a single step, without the update.

mod launches;
mod orders;
mod traces;

use std::collections::VecDeque;
use std::sync::Arc;

use launches::{LaunchMark, TotalScore};
use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::device::{DeviceConfig, DeviceDataParallel, StepGraph};
use mgpu::optimizer::OptimizerConfig;
use mgpu::replicate::{checksum, replicate, verify_equal};
use mgpu::timeline::Timeline;
use mgpu::{Communicator, DeviceCommunicator, Layout, Sampler};
use mgpu_kernels::Precision;
use mgpu_kernels::cuda::{AutotuneOptions, Device, Stream};
pub(super) use orders::{EPOCHS, TrainingSet};
use traces::Traces;

use super::super::args::Args;
use super::super::profile::StepProfile;
use super::{Engine, Evaluated, StepObserver, StopCheck, Stretch, TrainingConfig, check_finite, read};
use crate::data::Dataset;
use crate::nets::{DeviceData, DeviceNet, LossReport};

/// The GPU options of the user.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Options {
    pub(in super::super) precision: Precision,
    /// Which kernels a layer may use.
    pub(in super::super) choice: AutotuneOptions,
    /// Replay steps from graphs.
    pub(in super::super) graph: bool,
    /// The host updates the weights, in every step.
    pub(in super::super) on_host: bool,
}

/// A network on this rank's GPU.
pub(in super::super) struct Gpu {
    graphs: Vec<StepGraph>,
    traces: Traces,
    model: DeviceDataParallel,
    net: DeviceNet,
    training_config: TrainingConfig,
    /// As for gradients that are averaged.
    optimizer: OptimizerConfig,
    options: Options,
    train: Option<TrainingSet>,
    test: Option<DeviceData>,
    total: TotalScore,
    /// Marks of the launches in flight, oldest first, and marks for later launches.
    in_flight: VecDeque<LaunchMark>,
    idle: Vec<LaunchMark>,
    /// Steps enqueued since the engine was created.
    launched: u64,
    /// Steps whose marks were read.
    reported: u64,
    /// This rank's score at the last mark that was read.
    score: LossReport,
    /// All ranks' score at the last stop.
    epoch_score: LossReport,
    /// Whether the score in GPU memory is to be cleared before the next step.
    score_has_ended: bool,
}

impl Gpu {
    pub(in super::super) fn new(
        training_config: &TrainingConfig,
        args: &Args,
        (device, host): (Arc<DeviceCommunicator>, Communicator),
        timeline: &Timeline,
        threads: usize,
    ) -> mgpu::Result<Self> {
        let (set_up, options) = (Stream::new(device.device())?, args.gpu());
        let division = training_config.division;
        division.require_equal_micro_batches().map_err(mgpu::Error::program)?;
        let (spec, micro_batch) = (args.net(), division.largest_micro_batch());
        let mut net = DeviceNet::new(&spec, micro_batch, options.precision, options.choice, &set_up)?;
        net.divide_loss_by(division.mean_micro_batch());
        let traces = Traces::new(args, timeline, &mut net)?;
        let parameters = net.to_device(&net.initial_parameters(training_config.seed));
        let optimizer = training_config.optimizer(&spec);
        let parallel = args.parallel.config(optimizer, threads, (device.size(), division.micro_batches()));
        let config = DeviceConfig::new(parallel)
            .with_steps_per_epoch(training_config.steps_per_epoch * EPOCHS)
            .with_bf16_copy(options.precision == Precision::Bf16);
        let total = TotalScore::new(Arc::clone(&device))?;
        let model = DeviceDataParallel::new(device, host, net.layout().clone(), parameters, config)?;
        let model = model.with_buffers(&net.initial_buffers())?;
        let idle = (0..launches::AHEAD).map(|_| LaunchMark::new(&model)).collect::<mgpu::Result<_>>()?;
        // Memory used while benchmarking kernels does not count as training memory.
        model.stream().device().reset_memory_peak();
        Ok(Gpu {
            graphs: Vec::new(),
            traces,
            model,
            net,
            training_config: *training_config,
            optimizer,
            options,
            train: None,
            test: None,
            total,
            in_flight: VecDeque::new(),
            idle,
            launched: 0,
            reported: 0,
            score: LossReport::default(),
            epoch_score: LossReport::default(),
            score_has_ended: true,
        })
    }

    /// Evaluates the first `images` samples of the test order.
    fn score(&mut self, images: usize) -> mgpu::Result<LossReport> {
        let Gpu { model, net, test, score_has_ended, .. } = self;
        *score_has_ended = true;
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

impl Engine for Gpu {
    fn comm(&mut self) -> &mut Communicator {
        self.model.comm()
    }

    fn parameters(&self) -> usize {
        self.host_layout().len()
    }

    fn steps(&self) -> u64 {
        self.reported
    }

    fn train(
        &mut self,
        data: &Dataset,
        sampler: &mut Sampler,
        Stretch { until, stop }: Stretch,
        observer: &mut StepObserver<'_>,
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<()> {
        if self.train.is_none() {
            self.train = Some(TrainingSet::new(&self.model, data, &self.training_config)?);
        }
        while self.reported < until {
            while self.in_flight.len() < self.ahead() && self.model.steps() < stop && !should_stop()? {
                self.launch_next(sampler, stop)?;
            }
            if self.in_flight.is_empty() {
                // The ranks stop here.
                break;
            }
            self.report_oldest(observer)?;
        }
        Ok(())
    }

    fn score_so_far(&mut self) -> mgpu::Result<LossReport> {
        Ok(self.epoch_score)
    }

    fn take_score(&mut self) -> mgpu::Result<LossReport> {
        Ok(std::mem::take(&mut self.epoch_score))
    }

    fn l2_loss(&mut self) -> mgpu::Result<Option<f64>> {
        if self.optimizer.rule.l2() == 0.0 {
            return Ok(None);
        }
        let parameters = self.model.parameters()?;
        Ok(self.optimizer.l2_penalty(self.model.layout(), &parameters))
    }

    fn evaluate(
        &mut self,
        data: &Dataset,
        shard: &[u32],
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<Option<Evaluated>> {
        if self.test.is_none() {
            let test = DeviceData::new(self.model.stream(), &data.images, &data.labels, shard.len())?;
            test.set_order(self.model.stream(), shard)?;
            self.test = Some(test);
        }
        if should_stop()? {
            return Ok(None);
        }
        let score = self.score(shard.len())?;
        if !self.model.has_average() {
            return Ok(Some((score, None)));
        }
        if should_stop()? {
            return Ok(None);
        }
        self.model.swap_average()?;
        let average = self.score(shard.len())?;
        self.model.swap_average()?;
        Ok(Some((score, Some(average))))
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
        self.reported = step;
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
        self.traced_profile()
    }
}
