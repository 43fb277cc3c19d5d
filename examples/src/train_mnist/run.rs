//! Which run a checkpoint is of.
//!
//! A run is what network, seed, data, batch of all ranks, learning rates and precision make of it. A checkpoint of another one
//! is refused, with all that differs by the flag that says so. What may differ is how the arithmetic is shared out and by
//! what it is done: then the same sums are rounded in another way, and whoever goes on is told that the weights will not have the
//! bits of a run that was not interrupted.

use mgpu::checkpoint::Position;
use mgpu_kernels::level;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::args::Args;
use super::schedule::Shape;
use crate::data::Mnist;
use crate::nets::Choice;

/// What a checkpoint remembers beside the weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) net: String,
    pub(super) seed: u64,
    /// Images a step on each rank.
    pub(super) batch: usize,
    pub(super) ranks: u32,
    /// At the beginning.
    pub(super) lr: f64,
    /// Steps by which the learning rate has fallen to its end; none if it has none. Such a run can be prolonged.
    pub(super) lr_steps: Option<u64>,
    /// What checkpoints of format 1 do not say.
    #[serde(flatten)]
    pub(super) more: Option<More>,
}

/// What else is remembered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct More {
    precision: String,
    /// Where the training images come from, in words, and XXH3 of them and their labels.
    data: String,
    data_xxh3: String,
    threads: usize,
    /// What computes.
    device: String,
    conv: String,
    #[serde(flatten)]
    update: Option<Update>,
}

/// What is between the gradients of a micro-batch and the parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Update {
    schedule: String,
    warm_up: u64,
    clip_norm: Option<f64>,
    /// What gradients travel as.
    gradients: String,
    /// How many there are and whose, in words.
    micro_batches: String,
    world_size_invariant: bool,
}

impl Run {
    pub(super) fn new(args: &Args, ranks: u32, length: u64) -> Self {
        Run {
            net: args.net.name.clone(),
            seed: args.seed,
            batch: args.batch(),
            ranks,
            lr: args.lr(),
            lr_steps: args.schedule.ends().then_some(length),
            more: None,
        }
    }

    /// Completes what a checkpoint remembers. `gpu` is the name of the GPU, where there is one.
    pub(super) fn describe(&mut self, args: &Args, data: &Mnist, threads: usize, gpu: Option<&str>) {
        let mut hash = Xxh3::new();
        hash.update(&data.train.images);
        hash.update(&data.train.labels);
        self.more = Some(More {
            precision: args.precision.name().to_owned(),
            data: data.origin.to_string(),
            data_xxh3: format!("{:016x}", hash.digest()),
            threads,
            device: gpu.map_or_else(|| format!("cpu, {}", level::name()), str::to_owned),
            update: Some(Update {
                schedule: args.schedule.to_string(),
                warm_up: args.warm_up,
                clip_norm: args.parallel.clip_norm(),
                gradients: if args.parallel.compresses() { "bf16" } else { "f32" }.to_owned(),
                micro_batches: args.parallel.describe_micro_batches(),
                world_size_invariant: args.parallel.is_world_size_invariant(),
            }),
            conv: if args.conv == Choice::Direct { "direct" } else { "auto" }.to_owned(),
        });
    }

    /// Images a step on all ranks.
    pub(super) fn global_batch(&self) -> u64 {
        self.batch as u64 * u64::from(self.ranks)
    }

    /// Where the run is after `step` steps.
    pub(super) fn position(&self, step: u64, steps_per_epoch: u64) -> Position {
        Position { seed: self.seed, epoch: step / steps_per_epoch, step: step % steps_per_epoch }
    }

    /// What makes this another run than that of a checkpoint, in one line each.
    pub(super) fn differences(&self, saved: &Run) -> Vec<String> {
        let mut lines = Vec::new();
        let mut compare = |flag: &str, saved: String, here: String| {
            if saved != here {
                lines.push(format!("{flag}: {saved} in the checkpoint, {here} here"));
            }
        };
        compare("--net", saved.net.clone(), self.net.clone());
        compare("--seed", saved.seed.to_string(), self.seed.to_string());
        if saved.global_batch() != self.global_batch() {
            compare("--batch", saved.batches(), self.batches());
        }
        compare("--lr", saved.lr.to_string(), self.lr.to_string());
        compare("--schedule", saved.schedule(), self.schedule());
        if let (Some(saved), Some(here)) = (saved.lr_steps, self.lr_steps) {
            let falls = |steps: u64| format!("a learning rate that falls over {steps} steps");
            compare("--epochs or --steps", falls(saved), falls(here));
        }
        if let (Some(saved), Some(here)) = (&saved.more, &self.more) {
            compare("--precision", saved.precision.clone(), here.precision.clone());
            if saved.data_xxh3 != here.data_xxh3 {
                compare("--data", with_checksum(saved), with_checksum(here));
            }
            if let (Some(saved), Some(here)) = (&saved.update, &here.update) {
                let clipped = |norm: Option<f64>| norm.map_or("none".to_owned(), |norm| norm.to_string());
                compare("--warm-up", saved.warm_up.to_string(), here.warm_up.to_string());
                compare("--clip-norm", clipped(saved.clip_norm), clipped(here.clip_norm));
                compare("--gradients", saved.gradients.clone(), here.gradients.clone());
            }
        }
        lines
    }

    /// Why a run that goes on from a checkpoint will not have the bits of one that was not interrupted: nothing, if it will.
    pub(super) fn roundings(&self, saved: &Run) -> Vec<String> {
        let mut lines = Vec::new();
        let mut compare = |what: &str, saved: String, here: String| {
            if saved != here {
                lines.push(format!("{what} {here} in place of {saved}"));
            }
        };
        let invariant = |run: &Run| run.update().is_some_and(|update| update.world_size_invariant);
        if !(invariant(saved) && invariant(self)) {
            compare("ranks", saved.ranks.to_string(), self.ranks.to_string());
        }
        if let (Some(saved), Some(here)) = (saved.update(), self.update()) {
            compare("micro-batches:", saved.micro_batches.clone(), here.micro_batches.clone());
        }
        if let (Some(saved), Some(here)) = (&saved.more, &self.more) {
            compare("threads", saved.threads.to_string(), here.threads.to_string());
            compare("device", saved.device.clone(), here.device.clone());
            compare("--conv", saved.conv.clone(), here.conv.clone());
        }
        lines
    }

    fn update(&self) -> Option<&Update> {
        self.more.as_ref()?.update.as_ref()
    }

    fn schedule(&self) -> String {
        // What does not say was written when there were two.
        let two = || if self.lr_steps.is_some() { Shape::Linear } else { Shape::Constant }.to_string();
        self.update().map_or_else(two, |update| update.schedule.clone())
    }

    fn batches(&self) -> String {
        format!("{} images a step, {} on each of {}", self.global_batch(), self.batch, self.ranks)
    }
}

fn with_checksum(more: &More) -> String {
    format!("{} (checksum {})", more.data, more.data_xxh3)
}
