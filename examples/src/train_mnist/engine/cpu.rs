//! Training on the CPU.

use std::time::{Duration, Instant};

use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::optimizer::{LossScale, OptimizerConfig};
use mgpu::replicate::replicate;
use mgpu::timeline::{Name, Timeline};
use mgpu::{Communicator, DataParallel, MicroBatch, Sampler};
use mgpu_kernels::Storage;
use mgpu_kernels::cuda::Device;

use super::super::args::Args;
use super::super::profile::{Measured, StepProfile, Sums};
use super::super::step_images::StepImages;
use super::super::trainer::WARM_UP;
use super::{
    Engine, Evaluated, PIECE, StepObserver, StopCheck, Stretch, TrainingConfig, check_finite,
    evaluate_in_parts, over_ranks, read, saved_loss_scale,
};
use crate::data::{Dataset, IMAGE_LEN, Samples};
use crate::nets::{DropoutKey, LossReport, Mode, Net};

/// A network with its memory and parameters. Images between layers are stored as `E`.
pub(in super::super) struct Cpu<E> {
    model: DataParallel,
    net: Net<E>,
    /// The timeline that observes the communicator.
    timeline: Timeline,
    training_config: TrainingConfig,
    /// As for gradients that are averaged.
    optimizer: OptimizerConfig,
    threads: usize,
    step_images: StepImages,
    images: Vec<f32>,
    labels: Vec<u8>,
    /// This rank's losses in this epoch.
    score: LossReport,
    /// Whether to profile the steps after the warm-up, and the times measured so far.
    profile: bool,
    measured: Option<MeasuredTimes>,
}

/// Times of the profiled steps, except those that the network measures.
#[derive(Debug, Default)]
struct MeasuredTimes {
    /// Update time before the profiled steps.
    updated: Duration,
    /// Gathering batches.
    gather: Duration,
    /// Collectives.
    communication: Duration,
    /// Total.
    steps: Duration,
}

impl<E: Storage> Cpu<E> {
    pub(in super::super) fn new(
        training_config: &TrainingConfig,
        args: &Args,
        comm: Communicator,
        timeline: &Timeline,
        threads: usize,
    ) -> mgpu::Result<Self> {
        let division = training_config.division;
        let micro_batch = division.largest_micro_batch();
        let spec = args.net();
        let mut net = Net::with_conv_policy(&spec, micro_batch, threads, args.conv);
        net.divide_loss_by(division.mean_micro_batch());
        if args.timeline.is_some() {
            net.record_on(timeline);
        }
        let (layout, parameters) = (net.layout().clone(), net.initial_parameters(training_config.seed));
        let optimizer = training_config.optimizer(&spec);
        let config = args.parallel.config(optimizer, threads, (comm.size(), division.micro_batches()));
        let config = config.with_loss_scaler(args.loss_scaler());
        let model = DataParallel::with_config(comm, layout, parameters, config)?;
        let model = model.with_buffers(net.initial_buffers())?;
        Ok(Cpu {
            model,
            net,
            timeline: timeline.clone(),
            training_config: *training_config,
            optimizer,
            threads,
            step_images: StepImages::new(training_config),
            images: vec![0.0; micro_batch * IMAGE_LEN],
            labels: vec![0; micro_batch],
            score: LossReport::default(),
            profile: args.profile,
            measured: None,
        })
    }
}

impl<E: Storage> Engine for Cpu<E> {
    fn comm(&mut self) -> &mut Communicator {
        self.model.comm()
    }

    fn parameters(&self) -> usize {
        self.net.layout().len()
    }

    fn steps(&self) -> u64 {
        self.model.steps()
    }

    fn train(
        &mut self,
        data: &Samples,
        sampler: &mut Sampler,
        Stretch { until, .. }: Stretch,
        observer: &mut StepObserver<'_>,
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<()> {
        let Cpu { model, net, timeline, training_config, step_images, score, profile, measured, .. } = self;
        let (images, labels) = (&mut self.images, &mut self.labels);
        let TrainingConfig { seed, division, .. } = *training_config;
        let first_of_rank = training_config.first_sample();
        let mut stretch = LossReport::default();
        while model.steps() < until && !should_stop()? {
            let step = model.steps();
            if *profile && measured.is_none() && step >= WARM_UP {
                *measured = Some(MeasuredTimes { updated: model.update_time(), ..MeasuredTimes::default() });
                net.start_profile();
            }
            let (begin, communicated) = (measured.as_ref().map(|_| Instant::now()), timeline.communication());
            let mut gathered = Duration::ZERO;
            let reading = Instant::now();
            let (data, samples) = step_images.batch(data, sampler, step)?;
            gathered += reading.elapsed();

            let mut report = LossReport::default();
            net.scale_loss_by(model.loss_scale().map_or(1.0, |scale| scale.scale));
            model.step_accumulated(|batch| {
                let MicroBatch { index, parameters, buffers, gradients } = batch;
                let part = division.micro_batch(index);
                let (images, labels) = (&mut images[..part.len() * IMAGE_LEN], &mut labels[..part.len()]);
                let (begin, gathering) = (Instant::now(), timeline.begin());
                let range = mgpu::nvtx::range("gather", None);
                data.gather(&samples[part.clone()], images, labels);
                drop(range);
                timeline.end(gathering, Name::new("gather"));
                gathered += begin.elapsed();
                let first_sample = first_of_rank + part.start as u64;
                let mode = Mode::Train { dropout: Some(DropoutKey { seed, step, first_sample }) };
                net.forward(parameters, buffers, images, mode, gradients)?;
                report += net.backward(parameters, labels, gradients)?;
                Ok(())
            })?;

            if let (Some(measured), Some(begin)) = (measured.as_mut(), begin) {
                measured.gather += gathered;
                measured.steps += begin.elapsed();
                measured.communication +=
                    timeline.communication().unwrap_or_default() - communicated.unwrap_or_default();
            }
            stretch += report;
            observer(step + 1, report.loss());
        }
        *score += stretch;
        Ok(())
    }

    fn score_so_far(&mut self) -> mgpu::Result<LossReport> {
        over_ranks(self.score, self.model.comm())
    }

    fn take_score(&mut self) -> mgpu::Result<LossReport> {
        over_ranks(std::mem::take(&mut self.score), self.model.comm())
    }

    fn l2_loss(&mut self) -> mgpu::Result<Option<f64>> {
        Ok(self.optimizer.l2_penalty(self.net.layout(), self.model.parameters()))
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
        let Cpu { model, net, images, labels, .. } = self;
        let batch = labels.len();
        let mut evaluate = |parameters: &[f32], buffers: &[f32]| {
            let mut score = LossReport::default();
            let all = evaluate_in_parts(shard.len().div_ceil(batch), should_stop, |part| {
                let part = &shard[part.start * batch..shard.len().min(part.end * batch)];
                data.in_pieces(part, PIECE.next_multiple_of(batch), |data, samples| {
                    for samples in samples.chunks(batch) {
                        let (images, labels) =
                            (&mut images[..samples.len() * IMAGE_LEN], &mut labels[..samples.len()]);
                        data.gather(samples, images, labels);
                        net.predict(parameters, buffers, images);
                        score += net.score(labels);
                    }
                    Ok(())
                })
            })?;
            Ok::<_, mgpu::Error>(all.then_some(score))
        };
        let Some(score) = evaluate(model.parameters(), model.buffers())? else { return Ok(None) };
        let Some(average) = model.averaged_parameters()? else { return Ok(Some((score, None))) };
        Ok(evaluate(&average, model.buffers())?.map(|average| (score, Some(average))))
    }

    fn verify(&mut self) -> mgpu::Result<u64> {
        check_finite(self.net.layout(), self.model.parameters())?;
        self.model.verify()
    }

    fn snapshot(&mut self) -> mgpu::Result<Option<Snapshot>> {
        let mut snapshot = Snapshot::of(&mut self.model)?;
        if let Some(snapshot) = &mut snapshot {
            snapshot.add("buffers", self.net.buffers_layout(), self.model.buffers());
        }
        Ok(snapshot)
    }

    fn restore(&mut self, step: u64, checkpoint: Option<&Checkpoint>) -> mgpu::Result<()> {
        self.model.restore(step, |name, layout| read(checkpoint, name, layout))?;
        self.model.restore_loss_scale(saved_loss_scale(checkpoint))?;
        let layout = self.net.buffers_layout();
        let mut buffers = read(checkpoint, "buffers", layout)?;
        replicate(self.model.comm(), layout, &mut buffers)?;
        self.model.buffers_mut().copy_from_slice(&buffers);
        Ok(())
    }

    fn logits(&mut self, data: &Dataset) -> mgpu::Result<Vec<f32>> {
        let Cpu { model, net, images, labels, .. } = self;
        let (mut logits, all): (_, Vec<u32>) = (Vec::new(), (0..data.len() as u32).collect());
        for samples in all.chunks(labels.len()) {
            let (images, labels) = (&mut images[..samples.len() * IMAGE_LEN], &mut labels[..samples.len()]);
            data.gather(samples, images, labels);
            logits.extend_from_slice(net.predict(model.parameters(), model.buffers(), images));
        }
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
        let MeasuredTimes { updated, gather, communication, steps } = self.measured.as_ref()?;
        let (net, stages) = self.net.profile()?;
        let rest = Sums {
            gather: *gather,
            communication: *communication,
            optimizer: self.model.update_time() - *updated,
            steps: *steps,
        };
        Some(StepProfile::new(Measured::OnHost(self.net.threads()), (net, stages), rest))
    }
}
