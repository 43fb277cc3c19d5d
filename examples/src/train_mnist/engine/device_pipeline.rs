//! Training on GPUs as a [pipeline](crate::pipeline).

use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::device::DeviceConfig;
use mgpu::optimizer::OptimizerConfig;
use mgpu::replicate::verify_equal;
use mgpu::timeline::Timeline;
use mgpu::{Communicator, DeviceCommunicator, ReduceOp, Sampler};
use mgpu_kernels::cuda::Device;

use super::super::args::{Args, DataOn};
use super::super::profile::StepProfile;
use super::gpu::{EPOCHS, Options, TrainingSet, upload};
use super::pipeline::{PipelineReport, describe_parts, refuse_profile};
use super::{
    Engine, Evaluated, StepObserver, StopCheck, Stretch, TrainingConfig, check_finite, over_ranks, read,
};
use crate::data::{CLASSES, Dataset, Samples};
use crate::nets::{DeviceData, DeviceDropout, LossReport};
use crate::parallel::Grid;
use crate::pipeline::{DeviceStage, DeviceStageConfig};

/// A stage of a pipeline on this rank's GPU.
pub(in super::super) struct DevicePipeline {
    /// Of all ranks, in host memory.
    comm: Communicator,
    grid: Grid,
    stage: DeviceStage,
    /// Whether the cuts were measured.
    measured: bool,
    training_config: TrainingConfig,
    optimizer: OptimizerConfig,
    options: Options,
    train: Option<TrainingSet>,
    test: Option<DeviceData>,
    /// The losses of this rank's images in this epoch, on the last stage.
    score: LossReport,
}

impl DevicePipeline {
    pub(in super::super) fn new(
        training_config: &TrainingConfig,
        args: &Args,
        grid: Grid,
        (device, mut comm): (&DeviceCommunicator, Communicator),
        timeline: &Timeline,
        threads: usize,
    ) -> mgpu::Result<Self> {
        refuse_profile(args)?;
        if matches!(args.data_on, DataOn::Host | DataOn::Disk) {
            let problem = "--placement layers on GPUs keeps the images in GPU memory: leave --data-on out, or use device";
            return Err(mgpu::Error::program(problem));
        }
        let (spec, options, cuts) = (args.net(), args.gpu(), args.parallel.cuts());
        let &TrainingConfig { division, steps_per_epoch, seed, .. } = training_config;
        division.require_equal_micro_batches().map_err(mgpu::Error::program)?;
        let optimizer = training_config.optimizer(&spec);
        let parallel = args.parallel.config(optimizer, threads, (grid.replicas, division.micro_batches()));
        let config = DeviceStageConfig {
            grid,
            cuts,
            micro_batch: division.largest_micro_batch(),
            precision: options.precision,
            kernels: options.choice,
            stage: DeviceConfig::new(parallel)
                .with_steps_per_epoch(steps_per_epoch * EPOCHS)
                .with_copy_in(options.precision.storage()),
            seed,
        };
        let mut stage = DeviceStage::new((device, &mut comm), &spec, config, timeline)?;
        stage.divide_loss_by(division.mean_micro_batch());
        // Memory used while benchmarking kernels does not count as training memory.
        stage.stream().device().reset_memory_peak();
        Ok(DevicePipeline {
            comm,
            grid,
            stage,
            measured: cuts.is_empty(),
            training_config: *training_config,
            optimizer,
            options,
            train: None,
            test: None,
            score: LossReport::default(),
        })
    }

    /// A data set on the GPU, with an order of its samples.
    fn upload(&self, data: &Samples, order: &[u32]) -> mgpu::Result<DeviceData> {
        let on_gpu = upload(self.stage.stream(), data, order.len())?;
        on_gpu.set_order(self.stage.stream(), order)?;
        Ok(on_gpu)
    }
}

impl Engine for DevicePipeline {
    fn comm(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    fn traffic(&mut self) -> Option<u64> {
        None
    }

    fn replica(&mut self) -> (u32, u32) {
        (self.stage.place.replica(), self.grid.replicas)
    }

    fn parameters(&self) -> usize {
        self.stage.place.layout().len()
    }

    fn steps(&self) -> u64 {
        self.stage.steps()
    }

    fn train(
        &mut self,
        data: &Samples,
        sampler: &mut Sampler,
        Stretch { until, .. }: Stretch,
        observer: &mut StepObserver<'_>,
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<()> {
        let DevicePipeline { stage, train, training_config, score, .. } = self;
        let TrainingConfig { seed, steps_per_epoch, .. } = *training_config;
        let first_sample = training_config.first_sample();
        if train.is_none() {
            *train = Some(TrainingSet::new(stage.model(), data, training_config)?);
        }
        let train = train.as_mut().expect("the training set is on the GPU");
        while stage.steps() < until && !should_stop()? {
            let epoch = stage.steps() / steps_per_epoch;
            train.prepare(stage.model(), sampler, epoch)?;
            let report = stage.step(train.data(), DeviceDropout { seed, first_sample })?;
            if stage.place.is_last() {
                *score += report;
            }
            observer(stage.steps(), report.loss());
        }
        Ok(())
    }

    fn score_so_far(&mut self) -> mgpu::Result<LossReport> {
        over_ranks(self.score, &mut self.comm)
    }

    fn take_score(&mut self) -> mgpu::Result<LossReport> {
        over_ranks(std::mem::take(&mut self.score), &mut self.comm)
    }

    fn l2_loss(&mut self) -> mgpu::Result<Option<f64>> {
        if self.optimizer.rule.l2() == 0.0 {
            return Ok(None);
        }
        let own = self.stage.parameters()?;
        let own = self.optimizer.l2_penalty(self.stage.net().host_layout(), &own);
        let mut sum = [own.unwrap_or_default()];
        self.stage.place.row().all_reduce_slice(&mut sum, ReduceOp::Sum)?;
        Ok(Some(sum[0]))
    }

    fn evaluate(
        &mut self,
        data: &Samples,
        shard: &[u32],
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<Option<Evaluated>> {
        if self.test.is_none() {
            self.test = Some(self.upload(data, shard)?);
        }
        let DevicePipeline { stage, test, .. } = self;
        let test = test.as_ref().expect("the test set is on the GPU");
        if should_stop()? {
            return Ok(None);
        }
        let score = stage.predict(test, shard.len(), |_, _, _| Ok(()))?;
        if !stage.model().has_average() {
            return Ok(Some((score, None)));
        }
        if should_stop()? {
            return Ok(None);
        }
        stage.model().swap_average()?;
        let average = stage.predict(test, shard.len(), |_, _, _| Ok(()))?;
        stage.model().swap_average()?;
        Ok(Some((score, Some(average))))
    }

    fn verify(&mut self) -> mgpu::Result<u64> {
        let values = self.stage.parameters()?;
        let layout = self.stage.net().host_layout().clone();
        check_finite(&layout, &values)?;
        verify_equal(self.stage.model().comm(), &layout, &values)?;
        let mut sum = [self.stage.place.checksum(&values)?.cast_signed()];
        self.comm.broadcast_slice(&mut sum, 0)?;
        Ok(sum[0].cast_unsigned())
    }

    fn snapshot(&mut self) -> mgpu::Result<Option<Snapshot>> {
        let mut snapshot = Snapshot::new(self.steps());
        self.stage.gather_arenas(|name, layout, values| snapshot.add(name, layout, values))?;
        Ok((self.comm.rank() == 0).then_some(snapshot))
    }

    fn restore(&mut self, step: u64, checkpoint: Option<&Checkpoint>) -> mgpu::Result<()> {
        self.stage.scatter_arenas(step, |name, layout| read(checkpoint, name, layout))
    }

    fn logits(&mut self, data: &Dataset) -> mgpu::Result<Vec<f32>> {
        let count = data.len();
        let order: Vec<u32> = (0..count as u32).collect();
        let stream = self.stage.stream();
        let data = DeviceData::new(stream, &data.images, &data.labels, count)?;
        data.set_order(stream, &order)?;
        let mut logits = Vec::with_capacity(count * CLASSES);
        self.stage.predict(&data, count, |net, stream, images| {
            logits.extend(net.logits(stream, images)?);
            Ok(())
        })?;
        logits.resize(count * CLASSES, 0.0);
        self.stage.place.row().broadcast_slice(&mut logits, self.grid.stages - 1)?;
        Ok(logits)
    }

    fn gpu(&self) -> Option<&Device> {
        Some(self.stage.stream().device())
    }

    fn describe_device(&self) -> String {
        format!("one {}, {}", self.stage.stream().device().name(), self.options.precision)
    }

    fn kernels(&self) -> Vec<String> {
        self.stage.net().describe()
    }

    fn profile(&self) -> Option<StepProfile> {
        None
    }

    fn describe_parts(&self) -> Option<String> {
        Some(describe_parts(&self.stage.place, self.measured))
    }

    fn pipeline(&mut self) -> mgpu::Result<Option<PipelineReport>> {
        let DevicePipeline { comm, grid, stage, .. } = self;
        let in_flight = (stage.place.in_flight(), stage.net().activation_bytes());
        PipelineReport::gather(comm, (grid.stages, stage.place.ends()), None, in_flight).map(Some)
    }
}
