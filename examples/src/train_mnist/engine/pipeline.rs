//! Training on CPUs as a [pipeline](crate::pipeline).

use std::time::{Duration, Instant};

use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::optimizer::OptimizerConfig;
use mgpu::timeline::Timeline;
use mgpu::{Communicator, Element, ReduceOp, Sampler};
use mgpu_kernels::Storage;
use mgpu_kernels::cuda::Device;
use serde::Serialize;

use super::super::args::Args;
use super::super::profile::StepProfile;
use super::super::report::round;
use super::super::step_images::StepImages;
use super::super::trainer::WARM_UP;
use super::{
    Engine, Evaluated, PIECE, StepObserver, StopCheck, Stretch, TrainingConfig, check_finite,
    evaluate_in_parts, over_ranks, read,
};
use crate::data::{CLASSES, Dataset, Samples};
use crate::nets::{DropoutKey, LossReport, Mode};
use crate::parallel::Grid;
use crate::pipeline::{PipelineConfig, Place, Stage};

/// A stage of a pipeline on this rank. Images between layers are stored as `E`.
pub(in super::super) struct Pipeline<E> {
    /// Of all ranks.
    comm: Communicator,
    grid: Grid,
    stage: Stage<E>,
    /// Whether the cuts were measured.
    measured: bool,
    training_config: TrainingConfig,
    optimizer: OptimizerConfig,
    threads: usize,
    step_images: StepImages,
    /// The losses of this rank's images in this epoch, on the last stage.
    score: LossReport,
    /// After the warm-up: time of the steps, and of waiting for other stages.
    steps_time: Duration,
    idle_time: Duration,
}

/// How the layers are cut over ranks, for the summary.
#[derive(Debug, Serialize)]
pub(in super::super) struct PipelineReport {
    /// Number of parts, and the layers before which the network is cut.
    stages: u32,
    cuts: Vec<usize>,
    /// Share of the time of a step that a rank waits for other stages, mean over ranks; none without measured steps.
    idle: Option<f64>,
    /// Of each rank: the largest number of micro-batches whose activations were kept at the same time, and the memory of
    /// activations in MiB.
    rank_in_flight: Vec<usize>,
    rank_activations_mib: Vec<f64>,
}

impl PipelineReport {
    /// Of the ranks of `comm`, with this number of stages and ends of parts. `idle` is this rank's share, which has had
    /// `in_flight` micro-batches between their passes and has memory of `bytes` for their activations. Collective.
    pub(super) fn gather(
        comm: &mut Communicator,
        (stages, ends): (u32, &[usize]),
        idle: Option<f64>,
        (in_flight, bytes): (usize, usize),
    ) -> mgpu::Result<Self> {
        let mib = bytes as f64 / f64::from(1 << 20);
        let all = comm.all_gather_slice(&[idle.unwrap_or_default(), in_flight as f64, mib])?;
        let (ranks, _) = all.as_chunks::<3>();
        let mean = ranks.iter().map(|[share, ..]| share).sum::<f64>() / ranks.len() as f64;
        Ok(PipelineReport {
            stages,
            cuts: ends[1..ends.len() - 1].to_vec(),
            idle: idle.map(|_| round(mean)),
            rank_in_flight: ranks.iter().map(|[_, most, _]| *most as usize).collect(),
            rank_activations_mib: ranks.iter().map(|[.., mib]| round(*mib)).collect(),
        })
    }
}

/// The layers of each part, in words. `measured` says whether they are cut by their measured times.
pub(super) fn describe_parts(place: &Place, measured: bool) -> String {
    let layers = |part: &[usize]| match part[1] - part[0] {
        1 => part[0].to_string(),
        _ => format!("{}-{}", part[0], part[1] - 1),
    };
    let parts: Vec<String> = place.ends().windows(2).map(layers).collect();
    let how = if measured { ", cut by their measured times" } else { "" };
    format!("parts of the network: layers {}{how}", parts.join(" | "))
}

/// Refuses `--profile`, for which a rank would need all layers.
pub(super) fn refuse_profile(args: &Args) -> mgpu::Result<()> {
    if !args.profile {
        return Ok(());
    }
    let problem = "--placement layers and --profile are incompatible: no rank has all layers; see --timeline";
    Err(mgpu::Error::program(problem))
}

impl<E: Storage + Element> Pipeline<E> {
    pub(in super::super) fn new(
        training_config: &TrainingConfig,
        args: &Args,
        grid: Grid,
        mut comm: Communicator,
        timeline: &Timeline,
        threads: usize,
    ) -> mgpu::Result<Self> {
        refuse_profile(args)?;
        let spec = args.net();
        let (optimizer, cuts) = (training_config.optimizer(&spec), args.parallel.cuts());
        let &TrainingConfig { division, seed, .. } = training_config;
        division.require_equal_micro_batches().map_err(mgpu::Error::program)?;
        let config = PipelineConfig {
            grid,
            cuts,
            micro_batch: division.largest_micro_batch(),
            threads,
            conv: args.conv,
            stage: args.parallel.config(optimizer, threads, (grid.replicas, division.micro_batches())),
        };
        let timeline = (timeline, args.timeline.is_some());
        let mut stage = Stage::new(&mut comm, &spec, config, |net| net.initial_parameters(seed), timeline)?;
        stage.divide_loss_by(division.mean_micro_batch());
        let step_images = StepImages::new(training_config).with_labels_only(!stage.place.is_first());
        Ok(Pipeline {
            comm,
            grid,
            stage,
            measured: cuts.is_empty(),
            training_config: *training_config,
            optimizer,
            threads,
            step_images,
            score: LossReport::default(),
            steps_time: Duration::ZERO,
            idle_time: Duration::ZERO,
        })
    }
}

impl<E: Storage + Element> Engine for Pipeline<E> {
    fn comm(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    fn traffic(&mut self) -> Option<u64> {
        self.stage.traffic()
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
        let seed = self.training_config.seed;
        let first_of_rank = self.training_config.first_sample();
        let stage = &mut self.stage;
        while stage.steps() < until && !should_stop()? {
            let step = stage.steps();
            let (begin, waited) = (Instant::now(), stage.place.waited());
            let (data, samples) = self.step_images.batch(data, sampler, step)?;
            let mode = |first: usize| {
                let first_sample = first_of_rank + first as u64;
                Mode::Train { dropout: Some(DropoutKey { seed, step, first_sample }) }
            };
            let report = stage.step(data, samples, mode, |_, _| ())?;
            if step >= WARM_UP {
                self.steps_time += begin.elapsed();
                self.idle_time += stage.place.waited() - waited;
            }
            if stage.place.is_last() {
                self.score += report;
            }
            observer(step + 1, report.loss());
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
        let model = self.stage.model();
        let Some(own) = self.optimizer.l2_penalty(model.layout(), model.parameters()) else {
            return Ok(None);
        };
        let mut sum = [own];
        self.stage.place.row().all_reduce_slice(&mut sum, ReduceOp::Sum)?;
        Ok(Some(sum[0]))
    }

    fn evaluate(
        &mut self,
        data: &Samples,
        shard: &[u32],
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<Option<Evaluated>> {
        let stage = &mut self.stage;
        let batch = self.training_config.division.largest_micro_batch();
        // All stages of a replica have the same shard, and leave out the same batches.
        let mut evaluate = |stage: &mut Stage<E>, parameters: Option<&[f32]>| {
            let mut score = LossReport::default();
            let all = evaluate_in_parts(shard.len().div_ceil(batch), should_stop, |part| {
                let samples = part.start * batch..shard.len().min(part.end * batch);
                data.in_pieces(&shard[samples], PIECE.next_multiple_of(batch), |data, samples| {
                    stage.predict(parameters, data, samples, |net, labels| score += net.score(labels))
                })
            })?;
            Ok::<_, mgpu::Error>(all.then_some(score))
        };
        let Some(score) = evaluate(stage, None)? else { return Ok(None) };
        let Some(average) = stage.model().averaged_parameters()? else { return Ok(Some((score, None))) };
        Ok(evaluate(stage, Some(&average))?.map(|average| (score, Some(average))))
    }

    fn verify(&mut self) -> mgpu::Result<u64> {
        let model = self.stage.model();
        check_finite(model.layout(), model.parameters())?;
        model.verify()?;
        let mut sum = [self.stage.checksum()?.cast_signed()];
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
        let all: Vec<u32> = (0..count as u32).collect();
        let mut logits = Vec::with_capacity(count * CLASSES);
        self.stage.predict(None, data, &all, |net, _| logits.extend_from_slice(net.logits()))?;
        logits.resize(count * CLASSES, 0.0);
        self.stage.place.row().broadcast_slice(&mut logits, self.grid.stages - 1)?;
        Ok(logits)
    }

    fn gpu(&self) -> Option<&Device> {
        None
    }

    fn describe_device(&self) -> String {
        format!("{} thread{}", self.threads, if self.threads == 1 { "" } else { "s" })
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
        let Pipeline { comm, grid, stage, steps_time, idle_time, .. } = self;
        let idle = (*steps_time > Duration::ZERO).then(|| idle_time.as_secs_f64() / steps_time.as_secs_f64());
        let in_flight = (stage.most_in_flight(), stage.net().activation_bytes());
        PipelineReport::gather(comm, (grid.stages, stage.place.ends()), idle, in_flight).map(Some)
    }
}
