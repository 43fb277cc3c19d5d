//! Training on CPUs as a pipeline: the layers are cut over ranks (`--placement layers`).
//!
//! A rank has one part of the network, a *stage*. Activations are sent to the next stage, their gradients to the one
//! before; [`schedule`] says when. A stage is a [`DataParallel`] of its own tensors, on the communicator of the ranks
//! that have the same stage: with several copies of the network these average its gradients, and all that a step does
//! besides (accumulation, reduction, update, checks) is as for a whole network. With one copy each of these
//! communicators has one rank.
//!
//! The ranks form a grid. With p stages, rank r has stage r mod p of copy ⌊r / p⌋. A copy's ranks are a *row*, those
//! with the same stage a *column*. The stages' arenas, one behind the other, are the arena of the whole network, so
//! checkpoints and checksums are those of any other placement ([`state`]).

mod cuts;
mod neighbours;
mod schedule;
mod state;

use std::ops::Range;
use std::time::{Duration, Instant};

use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::optimizer::OptimizerConfig;
use mgpu::timeline::{Name, Timeline};
use mgpu::{Communicator, DataParallel, Element, MicroBatch, ReduceOp, Sampler};
use mgpu_kernels::Storage;
use mgpu_kernels::cuda::Device;
use serde::Serialize;

use super::super::args::Args;
use super::super::profile::StepProfile;
use super::super::trainer::WARM_UP;
use super::{Engine, StepObserver, Stretch, TrainingConfig, check_finite, over_ranks};
use crate::data::{CLASSES, Dataset, IMAGE_LEN};
use crate::nets::{DropoutKey, LossReport, Mode, Net};
use crate::parallel::Grid;
use neighbours::Neighbours;
use schedule::{Action, Schedule};
use state::Layouts;

/// One stage of a pipeline. Images between layers are stored as `E`.
pub(in super::super) struct Pipeline<E> {
    /// Of all ranks.
    comm: Communicator,
    grid: Grid,
    row: Neighbours,
    /// On the column.
    model: DataParallel,
    net: Net<E>,
    /// Of the whole network and of its parts.
    layouts: Layouts,
    /// The ends of the parts, as indices of layers.
    ends: Vec<usize>,
    /// Whether the cuts were measured.
    measured: bool,
    schedule: Schedule,
    /// The [actions](Schedule::until_backward) up to each backward pass.
    actions: Vec<Vec<Action>>,
    timeline: Timeline,
    training_config: TrainingConfig,
    optimizer: OptimizerConfig,
    threads: usize,
    /// A micro-batch, for the first and the last stage.
    images: Vec<f32>,
    labels: Vec<u8>,
    /// The losses of this rank's images in this epoch, on the last stage.
    score: LossReport,
    /// The largest number of micro-batches that were between their passes.
    most_in_flight: usize,
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

impl<E: Storage + Element> Pipeline<E> {
    pub(in super::super) fn new(
        training_config: &TrainingConfig,
        args: &Args,
        grid: Grid,
        mut comm: Communicator,
        timeline: &Timeline,
        threads: usize,
    ) -> mgpu::Result<Self> {
        let (rank, stages) = (comm.rank(), grid.stages as usize);
        let (spec, micro_batches) = (args.net(), training_config.micro_batches);
        let micro_batch = training_config.batch / micro_batches;
        cuts::check_count(&spec, stages).map_err(mgpu::Error::program)?;
        let given = args.parallel.cuts();
        let ends = if given.is_empty() {
            cuts::measure::<E>(&mut comm, &spec, stages, (micro_batch, threads, args.conv))?
        } else {
            cuts::check(&spec, given, stages).map_err(mgpu::Error::program)?
        };
        let own_group = "a rank with a colour has a group";
        let row = comm.split(Some(grid.replica(rank)), 0)?.expect(own_group);
        let column = comm.split(Some(grid.stage(rank)), 0)?.expect(own_group);

        let stage = grid.stage(rank) as usize;
        let schedule = Schedule { stage, stages, micro_batches };
        let in_flight = schedule.in_flight();
        let layers = ends[stage]..ends[stage + 1];
        let mut net = Net::part(&spec, layers, (micro_batch, in_flight), threads, args.conv);
        if args.timeline.is_some() {
            net.record_on(timeline);
        }
        let (layout, parameters) = (net.layout().clone(), net.initial_parameters(training_config.seed));
        let optimizer = training_config.optimizer(&spec);
        let config = args.parallel.config(optimizer, threads, (grid.replicas, micro_batches));
        let model = DataParallel::with_config(timeline.observe(column), layout, parameters, config)?;
        let model = model.with_buffers(net.initial_buffers())?;
        Ok(Pipeline {
            row: Neighbours::new(row, timeline),
            model,
            layouts: Layouts::new(&spec, &ends),
            measured: given.is_empty(),
            ends,
            schedule,
            actions: (0..micro_batches).map(|index| schedule.until_backward(index)).collect(),
            timeline: timeline.clone(),
            training_config: *training_config,
            optimizer,
            threads,
            images: vec![0.0; if schedule.is_first() { micro_batch * IMAGE_LEN } else { 0 }],
            labels: vec![0; micro_batch],
            score: LossReport::default(),
            most_in_flight: 0,
            steps_time: Duration::ZERO,
            idle_time: Duration::ZERO,
            comm,
            grid,
            net,
        })
    }

    /// Makes one step on `samples`. Returns the losses of the images on the last stage and on the first, where they are
    /// shown.
    fn step(&mut self, data: &Dataset, samples: &[u32]) -> mgpu::Result<LossReport> {
        let Pipeline {
            row, model, net, schedule, actions, timeline, training_config, images, labels, ..
        } = self;
        let (stage, in_flight, most) = (row.stage(), schedule.in_flight(), &mut self.most_in_flight);
        let TrainingConfig { seed, first_sample, .. } = *training_config;
        let (step, micro_batch) = (model.steps(), labels.len());
        let (mut report, mut kept) = (LossReport::default(), 0);
        model.step_accumulated(|batch| {
            let MicroBatch { index, parameters, buffers, gradients } = batch;
            for action in &actions[index] {
                net.select_batch(number_of(*action) % in_flight, number_of(*action));
                match *action {
                    Action::ReceiveActivation(_) => row.receive(net.input(micro_batch), stage - 1)?,
                    Action::Forward(number) => {
                        kept += 1;
                        *most = kept.max(*most);
                        let first = number * micro_batch;
                        let samples = &samples[first..first + micro_batch];
                        let gathering = timeline.begin();
                        let images = load(data, samples, images, labels);
                        timeline.end(gathering, Name::new("gather"));
                        let first_sample = first_sample + first as u64;
                        let mode = Mode::Train { dropout: Some(DropoutKey { seed, step, first_sample }) };
                        net.forward_part(parameters, buffers, images, mode, gradients)?;
                    }
                    Action::SendActivation(_) => row.send(net.output(), stage + 1)?,
                    Action::ReceiveGradient(_) => row.receive(net.output_gradient(), stage + 1)?,
                    Action::Backward(_) if schedule.is_last() => {
                        report += net.backward(parameters, labels, gradients)?;
                        kept -= 1;
                    }
                    Action::Backward(_) => {
                        net.backward_part(parameters, gradients)?;
                        kept -= 1;
                    }
                    Action::SendGradient(_) => row.send(net.input_gradient(), stage - 1)?,
                }
            }
            Ok(())
        })?;
        self.row.report_to_first(report)
    }

    /// Runs the samples of `shard` through all stages, batch by batch, with this stage's current parameters or others. On
    /// the last stage `scored` gets the network with the logits, and the labels.
    fn predict(
        &mut self,
        parameters: Option<&[f32]>,
        data: &Dataset,
        shard: &[u32],
        mut scored: impl FnMut(&Net<E>, &[u8]),
    ) -> mgpu::Result<()> {
        let Pipeline { row, model, net, schedule, images, labels, .. } = self;
        let stage = row.stage();
        let (parameters, buffers) = (parameters.unwrap_or(model.parameters()), model.buffers());
        net.select_batch(0, 0);
        for samples in shard.chunks(labels.len()) {
            if !schedule.is_first() {
                row.receive(net.input(samples.len()), stage - 1)?;
            }
            let labels = &mut labels[..samples.len()];
            net.predict_part(parameters, buffers, load(data, samples, images, labels));
            if schedule.is_last() {
                scored(net, labels);
            } else {
                row.send(net.output(), stage + 1)?;
            }
        }
        Ok(())
    }

    /// The layers of a stage.
    fn layers(&self, stage: usize) -> Range<usize> {
        self.ends[stage]..self.ends[stage + 1]
    }
}

/// The micro-batch of an action.
fn number_of(action: Action) -> usize {
    match action {
        Action::ReceiveActivation(number)
        | Action::Forward(number)
        | Action::SendActivation(number)
        | Action::ReceiveGradient(number)
        | Action::Backward(number)
        | Action::SendGradient(number) => number,
    }
}

/// Reads the labels of `samples`, and their images if there is memory for them: on the first stage.
fn load<'a>(data: &Dataset, samples: &[u32], images: &'a mut [f32], labels: &mut [u8]) -> Option<&'a [f32]> {
    if images.is_empty() {
        for (label, sample) in labels.iter_mut().zip(samples) {
            *label = data.labels[*sample as usize];
        }
        return None;
    }
    let images = &mut images[..samples.len() * IMAGE_LEN];
    data.gather(samples, images, labels);
    Some(images)
}

impl<E: Storage + Element> Engine for Pipeline<E> {
    fn comm(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    fn replica(&mut self) -> (u32, u32) {
        (self.grid.replica(self.comm.rank()), self.grid.replicas)
    }

    fn parameters(&self) -> usize {
        self.layouts.parameters.len()
    }

    fn steps(&self) -> u64 {
        self.model.steps()
    }

    fn train(
        &mut self,
        data: &Dataset,
        sampler: &mut Sampler,
        Stretch { until, .. }: Stretch,
        observer: &mut StepObserver<'_>,
    ) -> mgpu::Result<()> {
        let steps_per_epoch = self.training_config.steps_per_epoch;
        while self.model.steps() < until {
            let step = self.model.steps();
            let (begin, waited) = (Instant::now(), self.row.waited());
            let samples = sampler.batch(step / steps_per_epoch, (step % steps_per_epoch) as usize);
            let report = self.step(data, samples)?;
            if step >= WARM_UP {
                self.steps_time += begin.elapsed();
                self.idle_time += self.row.waited() - waited;
            }
            if self.schedule.is_last() {
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
        let Some(own) = self.optimizer.l2_penalty(self.net.layout(), self.model.parameters()) else {
            return Ok(None);
        };
        let mut sum = [own];
        self.row.comm().all_reduce_slice(&mut sum, ReduceOp::Sum)?;
        Ok(Some(sum[0]))
    }

    fn evaluate(&mut self, data: &Dataset, shard: &[u32]) -> mgpu::Result<(LossReport, Option<LossReport>)> {
        let (mut score, mut averaged) = (LossReport::default(), LossReport::default());
        self.predict(None, data, shard, |net, labels| score += net.score(labels))?;
        let Some(average) = self.model.averaged_parameters()? else { return Ok((score, None)) };
        self.predict(Some(&average), data, shard, |net, labels| averaged += net.score(labels))?;
        Ok((score, Some(averaged)))
    }

    fn verify(&mut self) -> mgpu::Result<u64> {
        check_finite(self.net.layout(), self.model.parameters())?;
        self.model.verify()?;
        self.checksum()
    }

    fn snapshot(&mut self) -> mgpu::Result<Option<Snapshot>> {
        self.gather_snapshot()
    }

    fn restore(&mut self, step: u64, checkpoint: Option<&Checkpoint>) -> mgpu::Result<()> {
        self.scatter_checkpoint(step, checkpoint)
    }

    fn logits(&mut self, data: &Dataset, count: usize) -> mgpu::Result<Vec<f32>> {
        let all: Vec<u32> = (0..count as u32).collect();
        let mut logits = Vec::with_capacity(count * CLASSES);
        self.predict(None, data, &all, |net, _| logits.extend_from_slice(net.logits()))?;
        logits.resize(count * CLASSES, 0.0);
        let last = self.row.stages() - 1;
        self.row.comm().broadcast_slice(&mut logits, last)?;
        Ok(logits)
    }

    fn gpu(&self) -> Option<&Device> {
        None
    }

    fn describe_device(&self) -> String {
        format!("{} thread{}", self.threads, if self.threads == 1 { "" } else { "s" })
    }

    fn kernels(&self) -> Vec<String> {
        self.net.describe()
    }

    fn profile(&self) -> Option<StepProfile> {
        None
    }

    fn describe_parts(&self) -> Option<String> {
        let of = |stage| {
            let Range { start, end } = self.layers(stage);
            if start + 1 == end { start.to_string() } else { format!("{start}-{}", end - 1) }
        };
        let parts: Vec<String> = (0..self.ends.len() - 1).map(of).collect();
        let how = if self.measured { ", cut by their measured times" } else { "" };
        Some(format!("parts of the network: layers {}{how}", parts.join(" | ")))
    }

    fn pipeline(&mut self) -> mgpu::Result<Option<PipelineReport>> {
        let share = self.idle_time.as_secs_f64() / self.steps_time.as_secs_f64().max(1e-9);
        let mib = self.net.activation_bytes() as f64 / f64::from(1 << 20);
        let all = self.comm.all_gather_slice(&[share, self.most_in_flight as f64, mib])?;
        let (ranks, _) = all.as_chunks::<3>();
        let mean = ranks.iter().map(|[share, ..]| share).sum::<f64>() / ranks.len() as f64;
        let round = |value: f64| (value * 1e3).round() / 1e3;
        Ok(Some(PipelineReport {
            stages: self.grid.stages,
            cuts: self.ends[1..self.ends.len() - 1].to_vec(),
            idle: (self.steps_time > Duration::ZERO).then(|| round(mean)),
            rank_in_flight: ranks.iter().map(|[_, most, _]| *most as usize).collect(),
            rank_activations_mib: ranks.iter().map(|[.., mib]| round(*mib)).collect(),
        }))
    }
}
