//! Training on the CPU.

use std::time::{Duration, Instant};

use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::replicate::replicate;
use mgpu::{Communicator, DataParallel, DataParallelConfig, Sampler};
use mgpu_kernels::Storage;
use mgpu_kernels::cuda::Device;

use super::super::args::Args;
use super::super::profile::StepProfile;
use super::super::trainer::WARM_UP;
use super::{Engine, Recipe, Seen, read};
use crate::data::{Dataset, IMAGE_LEN};
use crate::nets::{DropoutKey, LossReport, Mode, Net};

/// A network with its memory, and its parameters. Images between layers are kept as `E`.
pub(in super::super) struct Cpu<E> {
    model: DataParallel,
    net: Net<E>,
    recipe: Recipe,
    threads: usize,
    /// Running statistics of batch normalisation.
    buffers: Vec<f32>,
    images: Vec<f32>,
    labels: Vec<u8>,
    /// Whether to measure where the time goes, and that, once the first steps are over.
    profile: bool,
    measured: Option<Measured>,
}

/// Time of the steps that are measured, but for what the network and the model measure.
#[derive(Debug, Default)]
struct Measured {
    /// For filling batches.
    gather: Duration,
    /// In all.
    steps: Duration,
}

impl<E: Storage> Cpu<E> {
    pub(in super::super) fn new(
        recipe: &Recipe,
        args: &Args,
        comm: Box<dyn Communicator>,
        threads: usize,
    ) -> mgpu::Result<Self> {
        let spec = &args.net;
        let net = Net::with_choice(spec, recipe.batch, threads, args.conv);
        let parameters = net.initial_parameters(recipe.seed);
        let mut config = DataParallelConfig::new(spec.optimizer, threads);
        config.bucket = args.bucket_bytes().unwrap_or(config.bucket);
        config.shard_from = args.shard_optimizer.shard_from();
        let model = DataParallel::with_config(comm, net.layout().clone(), parameters, config)?;
        Ok(Cpu {
            buffers: net.initial_buffers(),
            model,
            net,
            recipe: *recipe,
            threads,
            images: vec![0.0; recipe.batch * IMAGE_LEN],
            labels: vec![0; recipe.batch],
            profile: args.profile,
            measured: None,
        })
    }
}

impl<E: Storage> Engine for Cpu<E> {
    fn comm(&mut self) -> &mut dyn Communicator {
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
        data: &Dataset,
        sampler: &mut Sampler,
        until: u64,
        seen: &mut Seen<'_>,
    ) -> mgpu::Result<LossReport> {
        let Cpu { model, net, recipe, buffers, images, labels, profile, measured, .. } = self;
        let Recipe { seed, first_sample, steps_per_epoch, .. } = *recipe;
        let mut score = LossReport::default();
        while model.steps() < until {
            let step = model.steps();
            if *profile && measured.is_none() && step >= WARM_UP {
                *measured = Some(Measured::default());
                net.start_profile();
                model.start_times();
            }
            let begin = measured.as_ref().map(|_| Instant::now());
            let samples = sampler.batch(step / steps_per_epoch, (step % steps_per_epoch) as usize);
            data.gather(samples, images, labels);
            let gathered = begin.map(|begin| begin.elapsed());

            model.set_learning_rate(recipe.learning_rate(step));
            let mode = Mode::Train { dropout: Some(DropoutKey { seed, step, first_sample }) };
            let report = model.step(|parameters, ranks| {
                net.forward(parameters, buffers, images, mode, ranks)?;
                net.backward(parameters, labels, ranks)
            })?;

            if let (Some(measured), Some(begin), Some(gathered)) = (measured.as_mut(), begin, gathered) {
                measured.gather += gathered;
                measured.steps += begin.elapsed();
            }
            score += report;
            seen(step + 1, report.loss());
        }
        Ok(score)
    }

    fn evaluate(&mut self, data: &Dataset, shard: &[u32]) -> mgpu::Result<(LossReport, Option<LossReport>)> {
        let Cpu { model, net, buffers, images, labels, .. } = self;
        let mut evaluate = |parameters: &[f32]| {
            let mut score = LossReport::default();
            for samples in shard.chunks(labels.len()) {
                let (images, labels) =
                    (&mut images[..samples.len() * IMAGE_LEN], &mut labels[..samples.len()]);
                data.gather(samples, images, labels);
                net.predict(parameters, buffers, images);
                score += net.score(labels);
            }
            score
        };
        let score = evaluate(model.parameters());
        Ok((score, model.averaged_parameters()?.map(|average| evaluate(&average))))
    }

    fn verify(&mut self) -> mgpu::Result<u64> {
        self.model.verify()
    }

    fn snapshot(&mut self) -> mgpu::Result<Option<Snapshot>> {
        let mut snapshot = Snapshot::of(&mut self.model)?;
        if let Some(snapshot) = &mut snapshot {
            snapshot.add("buffers", self.net.buffers_layout(), &self.buffers[..]);
        }
        Ok(snapshot)
    }

    fn restore(&mut self, step: u64, checkpoint: Option<&Checkpoint>) -> mgpu::Result<()> {
        self.model.restore(step, |name, layout| read(checkpoint, name, layout))?;
        let layout = self.net.buffers_layout();
        self.buffers = read(checkpoint, "buffers", layout)?;
        replicate(self.model.comm(), layout, &mut self.buffers)?;
        Ok(())
    }

    fn logits(&mut self, data: &Dataset, count: usize) -> mgpu::Result<Vec<f32>> {
        let Cpu { model, net, buffers, images, labels, .. } = self;
        let (mut logits, all): (_, Vec<u32>) = (Vec::new(), (0..count as u32).collect());
        for samples in all.chunks(labels.len()) {
            let (images, labels) = (&mut images[..samples.len() * IMAGE_LEN], &mut labels[..samples.len()]);
            data.gather(samples, images, labels);
            logits.extend_from_slice(net.predict(model.parameters(), buffers, images));
        }
        Ok(logits)
    }

    fn gpu(&self) -> Option<&Device> {
        None
    }

    fn place(&self) -> String {
        format!("{} thread{}", self.threads, if self.threads == 1 { "" } else { "s" })
    }

    fn kernels(&self) -> Vec<String> {
        self.net.describe()
    }

    fn profile(&self) -> Option<StepProfile> {
        let Measured { gather, steps } = self.measured.as_ref()?;
        let (net, stages) = self.net.profile()?;
        let times = self.model.times()?;
        Some(StepProfile::new(self.net.threads(), (net, stages), times, *gather, *steps))
    }
}
