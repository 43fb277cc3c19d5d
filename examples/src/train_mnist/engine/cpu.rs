//! Training on the CPU.

use std::path::Path;

use mgpu::checkpoint::{self, Arena, Manifest};
use mgpu::replicate::replicate;
use mgpu::{Communicator, DataParallel, Sampler};
use mgpu_kernels::cuda::Device;

use super::{Engine, Recipe, Seen};
use crate::data::{Dataset, IMAGE_LEN};
use crate::nets::{DropoutKey, LossReport, Mode, Net, Spec};

/// A network with its memory, and its parameters.
pub(in super::super) struct Cpu {
    model: DataParallel,
    net: Net,
    recipe: Recipe,
    threads: usize,
    /// Running statistics of batch normalisation.
    buffers: Vec<f32>,
    images: Vec<f32>,
    labels: Vec<u8>,
}

impl Cpu {
    /// `bucket` is the size of an all-reduce in bytes, where the backend is not to choose.
    pub(in super::super) fn new(
        recipe: &Recipe,
        spec: &Spec,
        comm: Box<dyn Communicator>,
        threads: usize,
        bucket: Option<usize>,
    ) -> mgpu::Result<Self> {
        let net = Net::new(spec, recipe.batch, threads);
        let parameters = net.initial_parameters(recipe.seed);
        let (layout, bucket) = (net.layout().clone(), bucket.unwrap_or(mgpu::step::BUCKET));
        let model =
            DataParallel::with_bucket_size(comm, layout, parameters, spec.optimizer, threads, bucket)?;
        Ok(Cpu {
            buffers: net.initial_buffers(),
            model,
            net,
            recipe: *recipe,
            threads,
            images: vec![0.0; recipe.batch * IMAGE_LEN],
            labels: vec![0; recipe.batch],
        })
    }
}

impl Engine for Cpu {
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
        let Cpu { model, net, recipe, buffers, images, labels, .. } = self;
        let Recipe { seed, first_sample, steps_per_epoch, .. } = *recipe;
        let mut score = LossReport::default();
        while model.steps() < until {
            let step = model.steps();
            let samples = sampler.batch(step / steps_per_epoch, (step % steps_per_epoch) as usize);
            data.gather(samples, images, labels);

            model.set_learning_rate(recipe.learning_rate(step));
            let mode = Mode::Train { dropout: Some(DropoutKey { seed, step, first_sample }) };
            let report = model.step(|parameters, ranks| {
                net.forward(parameters, buffers, images, mode, ranks)?;
                net.backward(parameters, labels, ranks)
            })?;

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
        Ok((evaluate(model.parameters()), model.averaged_parameters().map(&mut evaluate)))
    }

    fn verify(&mut self) -> mgpu::Result<u64> {
        self.model.verify()
    }

    fn save(&mut self, folder: &Path, state: serde_json::Value, keep: usize) -> mgpu::Result<()> {
        let mut arenas = self.model.arenas();
        arenas.push(Arena { name: "buffers", layout: self.net.buffers_layout(), values: &self.buffers });
        checkpoint::save(folder, self.model.steps(), state, &arenas, keep)?;
        Ok(())
    }

    fn restore(&mut self, path: &Path, manifest: &Manifest) -> mgpu::Result<()> {
        self.model.restore(manifest.step, |name, layout| checkpoint::load(path, manifest, name, layout))?;
        let layout = self.net.buffers_layout();
        self.buffers = checkpoint::load(path, manifest, "buffers", layout)?;
        replicate(self.model.comm(), layout, &mut self.buffers)?;
        Ok(())
    }

    fn gpu(&self) -> Option<&Device> {
        None
    }

    fn place(&self) -> String {
        format!("{} thread{}", self.threads, if self.threads == 1 { "" } else { "s" })
    }

    fn kernels(&self) -> Vec<String> {
        Vec::new()
    }
}
