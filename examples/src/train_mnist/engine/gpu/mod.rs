//! Training on a GPU: steps are replayed from CUDA graphs, and read images from GPU memory.
//!
//! The whole training set is there (`orders`) or, if it is too large, the batches of the next steps (`staging`).
//!
//! The first steps launch each kernel separately, which also compiles and loads every kernel. Then graphs are
//! captured, of a single step, of several steps, and of the steps that several leave of an epoch; the rest of the
//! training replays them. The host only enqueues replays and reads the losses that the GPU accumulated. It is at most
//! two launches ahead of the GPU, so it notices a lost rank quickly.
//!
//! With `--placement host` the host updates the weights, so there is only a graph of a single step, without the update.

mod launches;
mod orders;
mod staging;
mod traces;

use std::collections::VecDeque;
use std::sync::Arc;

use launches::{LaunchMark, TotalScore};
use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::device::{DeviceConfig, DeviceDataParallel, StepGraph};
use mgpu::optimizer::{LossScale, OptimizerConfig};
use mgpu::replicate::{checksum, replicate, verify_equal};
use mgpu::timeline::Timeline;
use mgpu::{BufferAccess, Communicator, DeviceCommunicator, Layout, ReduceOp, Sampler};
use mgpu_kernels::Precision;
use mgpu_kernels::cuda::{AutotuneOptions, Device, Stream};
pub(super) use orders::{EPOCHS, TrainingSet};
use staging::{SLOTS, StagedSet};
use traces::Traces;

use super::super::args::{Args, DataOn};
use super::super::profile::StepProfile;
use super::{
    Engine, Evaluated, PIECE, StepObserver, StopCheck, Stretch, TrainingConfig, check_finite, read,
    saved_loss_scale,
};
use crate::data::{Dataset, IMAGE_LEN, Samples};
use crate::nets::{DeviceData, DeviceNet, LossReport};
use crate::print::errln;

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
    pub(in super::super) data_on: DataOn,
}

/// Where steps find their images.
enum TrainingImages {
    /// All of them are on the GPU.
    Resident(Box<TrainingSet>),
    /// Those of the next steps.
    Staged(Box<StagedSet>),
}

impl TrainingImages {
    fn data(&self) -> &DeviceData {
        match self {
            TrainingImages::Resident(set) => set.data(),
            TrainingImages::Staged(set) => set.data(),
        }
    }
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
    /// Whether the training images are copied to the GPU for each step.
    is_staged: bool,
    threads: usize,
    train: Option<TrainingImages>,
    /// The test set, if it is on the GPU.
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
        (device, mut host): (Arc<DeviceCommunicator>, Communicator),
        timeline: &Timeline,
        threads: usize,
    ) -> mgpu::Result<Self> {
        let (set_up, options) = (Stream::new(device.device())?, args.gpu());
        let division = training_config.division;
        division.require_equal_micro_batches().map_err(mgpu::Error::program)?;
        let is_staged = match options.data_on {
            DataOn::Auto => !fits_everywhere(training_config.resident_bytes, device.device(), &mut host)?,
            DataOn::Device => false,
            DataOn::Host | DataOn::Disk => true,
        };
        let ring = if is_staged { SLOTS } else { training_config.steps_per_epoch * EPOCHS };
        let (spec, micro_batch) = (args.net(), division.largest_micro_batch());
        let mut net = DeviceNet::new(&spec, micro_batch, options.precision, options.choice, &set_up)?;
        net.divide_loss_by(division.mean_micro_batch());
        let traces = Traces::new(args, timeline, &mut net)?;
        let parameters = net.to_device(&net.initial_parameters(training_config.seed));
        let optimizer = training_config.optimizer(&spec);
        let parallel = args.parallel.config(optimizer, threads, (device.size(), division.micro_batches()));
        let parallel = parallel.with_loss_scaler(args.loss_scaler());
        let config =
            DeviceConfig::new(parallel).with_steps_per_epoch(ring).with_copy_in(options.precision.storage());
        let total = TotalScore::new(Arc::clone(&device))?;
        let model = DeviceDataParallel::new(device, host, net.layout().clone(), parameters, config)?;
        let model = model.with_buffers(&net.initial_buffers())?;
        if let (0, access @ BufferAccess::Failed(_)) = (model.rank(), model.gradient_access()) {
            errln!("train_mnist: NCCL accesses gradients {access}");
        }
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
            is_staged,
            threads,
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

    /// Evaluates the samples `shard` of `data`.
    fn score(&mut self, data: &Samples, shard: &[u32]) -> mgpu::Result<LossReport> {
        self.score_has_ended = true;
        // The rest concerns this rank only; wait for its peers' last collective first.
        self.model.wait("training step")?;
        self.net.clear_score(self.model.stream())?;
        match self.test.take() {
            Some(test) => {
                let evaluated = self.evaluate_images(&test, shard.len());
                self.test = Some(test);
                evaluated?;
            }
            None => {
                let piece = PIECE.next_multiple_of(self.net.max_batch());
                let on_gpu = DeviceData::zeroed(self.model.stream(), piece, IMAGE_LEN)?;
                let mut batch = Dataset::default();
                for samples in shard.chunks(piece) {
                    data.read(samples, &mut batch)?;
                    let (images, labels) = on_gpu.part(0..samples.len());
                    self.model.stream().upload(&batch.images, images)?;
                    self.model.stream().upload(&batch.labels, labels)?;
                    self.evaluate_images(&on_gpu, samples.len())?;
                }
            }
        }
        self.net.read_score(self.model.stream())
    }

    /// Evaluates the first `images` samples of the order of `test`, and waits for that.
    fn evaluate_images(&mut self, test: &DeviceData, images: usize) -> mgpu::Result<()> {
        let Gpu { model, net, .. } = self;
        for first in (0..images).step_by(net.max_batch()) {
            net.evaluate(model, test, first, (images - first).min(net.max_batch()))?;
        }
        model.wait_local("evaluation")
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
        data: &Samples,
        sampler: &mut Sampler,
        Stretch { until, stop }: Stretch,
        observer: &mut StepObserver<'_>,
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<()> {
        if self.train.is_none() {
            let (model, config) = (&self.model, &self.training_config);
            self.train = Some(if self.is_staged {
                TrainingImages::Staged(Box::new(StagedSet::new(model, data, config, self.threads)?))
            } else {
                TrainingImages::Resident(Box::new(TrainingSet::new(model, data, config)?))
            });
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

    fn loss_scale(&self) -> Option<LossScale> {
        self.model.loss_scale()
    }

    fn evaluate(
        &mut self,
        data: &Samples,
        shard: &[u32],
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<Option<Evaluated>> {
        let (stream, is_wanted) = (self.model.stream(), self.options.data_on == DataOn::Device);
        if self.test.is_none()
            && (is_wanted || !self.is_staged && fits(resident_bytes(data, shard.len()), stream.device())?)
        {
            let test = upload(stream, data, shard.len())?;
            test.set_order(stream, shard)?;
            self.test = Some(test);
        }
        if should_stop()? {
            return Ok(None);
        }
        let score = self.score(data, shard)?;
        if !self.model.has_average() {
            return Ok(Some((score, None)));
        }
        if should_stop()? {
            return Ok(None);
        }
        self.model.swap_average()?;
        let average = self.score(data, shard)?;
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
        let mut snapshot = Snapshot::new(self.model.steps()).with_loss_scale(self.model.loss_scale());
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
        model.restore_loss_scale(saved_loss_scale(checkpoint))?;
        self.reported = step;
        let layout = net.buffers_layout();
        let mut buffers = read(checkpoint, "buffers", layout)?;
        replicate(model.comm(), layout, &mut buffers)?;
        Ok(model.stream().upload(&buffers, model.buffers())?)
    }

    fn logits(&mut self, data: &Dataset) -> mgpu::Result<Vec<f32>> {
        let Gpu { model, net, .. } = self;
        let count = data.len();
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
        let mut lines = self.net.describe();
        if self.model.ranks() > 1 && !self.options.on_host {
            lines.push(format!("gradients: NCCL accesses them {}", self.model.gradient_access()));
        }
        lines
    }

    fn profile(&self) -> Option<StepProfile> {
        self.traced_profile()
    }
}

/// Bytes of a set on the GPU, with an order of `places` samples.
pub(in super::super) fn resident_bytes(data: &Samples, places: usize) -> u64 {
    (data.len() * (IMAGE_LEN + 1) + places * size_of::<u32>()) as u64
}

/// Whether `bytes` bytes of images fit on the GPU beside everything else.
fn fits(bytes: u64, device: &Device) -> mgpu::Result<bool> {
    let (free, _) = device.free_and_total()?;
    Ok(bytes <= free / 2)
}

/// Whether they fit on the GPU of every rank. Collective.
fn fits_everywhere(bytes: u64, device: &Device, comm: &mut Communicator) -> mgpu::Result<bool> {
    let mut fit = [f64::from(u8::from(fits(bytes, device)?))];
    comm.all_reduce_slice(&mut fit, ReduceOp::Min)?;
    Ok(fit[0] > 0.0)
}

/// A set on the GPU, with memory for an order of `places` samples.
pub(super) fn upload(stream: &Stream, data: &Samples, places: usize) -> mgpu::Result<DeviceData> {
    if let Samples::InMemory(data) = data {
        return DeviceData::new(stream, &data.images, &data.labels, places);
    }
    let on_gpu = DeviceData::with_capacity(stream, data.len(), IMAGE_LEN, places)?;
    let (mut first, all) = (0, (0..data.len() as u32).collect::<Vec<_>>());
    data.in_pieces(&all, PIECE, |piece, _| {
        let (images, labels) = on_gpu.part(first..first + piece.len());
        first += piece.len();
        stream.upload(&piece.images, images)?;
        Ok::<_, mgpu::Error>(stream.upload(&piece.labels, labels)?)
    })?;
    Ok(on_gpu)
}
