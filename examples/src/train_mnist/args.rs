//! The command line of `train_mnist`, as typed and as resolved.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{ArgGroup, Parser};

use mgpu_kernels::Precision;
use mgpu_kernels::cuda::Libraries;

use super::engine::Options;
use super::schedule::ScheduleKind;
use crate::nets::{Choice, Spec};
use crate::parallel::{Parallel, above_0, given, positive};

/// Trains a network on MNIST, on one rank or under mgpurun on several.
///
/// Every rank trains on its own part of each global batch; gradients are averaged over ranks in every step, so all
/// ranks hold the same weights. With neither --data, --synthetic nor --download it takes the folder in MGPU_DATA,
/// then digits downloaded earlier, then generated digits.
#[derive(Debug, Parser)]
#[command(name = "train_mnist", version)]
#[command(group(ArgGroup::new("source").args(["data", "synthetic", "download"])))]
#[command(group(ArgGroup::new("length").args(["epochs", "steps"])))]
#[command(after_help = "Example: mgpurun -n 2 train_mnist --net lenet5 --epochs 3")]
pub(super) struct Args {
    /// Network: lenet5, deep, keras, ensemble2400, ensemble4800, layers or conv6.
    #[arg(long, value_name = "NAME", default_value = "lenet5", value_parser = parse_net)]
    pub(super) net: Spec,
    /// Folder with the four MNIST files, gzipped or not.
    #[arg(long, value_name = "DIR")]
    pub(super) data: Option<PathBuf>,
    /// Train on generated digits, which need no files.
    #[arg(long)]
    pub(super) synthetic: bool,
    /// Download MNIST (11 MB), unless it is there already.
    #[arg(long)]
    pub(super) download: bool,
    /// Passes over the training set [default: 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    epochs: Option<u64>,
    /// Training steps in all, in place of --epochs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Images a step on each rank [default: the network's own].
    #[arg(long, value_name = "N", value_parser = positive)]
    batch: Option<usize>,
    /// Learning rate at the beginning [default: the network's own].
    #[arg(long, value_name = "X", value_parser = above_0)]
    lr: Option<f64>,
    /// How the learning rate goes on: linear or cosine (to 0 at the end; cosine:0.1: to a tenth), constant, or step:N:X
    /// (times X after every N steps).
    #[arg(long, value_name = "NAME", default_value_t = ScheduleKind::Linear)]
    pub(super) schedule: ScheduleKind,
    /// Steps at the beginning in which the learning rate rises.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) warm_up: u64,
    /// Seed of weights, shuffling, dropout and generated digits.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,
    /// Arithmetic: f32; bf16 (on the CPU images between layers only, in half the memory); on a GPU also tf32. Parameters
    /// are f32 in all of them.
    #[arg(long, value_name = "P", default_value_t = Precision::F32)]
    pub(super) precision: Precision,
    /// Convolutions and dense layers on a GPU: auto (the fastest of cuDNN, cuBLASLt and our own) or builtin (our own).
    #[arg(long, value_name = "NAME", default_value_t = Libraries::Auto)]
    kernels: Libraries,
    /// Convolutions on the CPU: auto (what is expected to be the fastest for each layer) or direct (by their definition).
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub(super) conv: Choice,
    /// Say, before the training, which kernels make each layer; on a GPU also how long each takes.
    #[arg(long)]
    pub(super) show_kernels: bool,
    /// Say, after a training on the CPU, what each layer and all else took of a step, and how near that is to the peak.
    #[arg(long)]
    pub(super) profile: bool,
    /// Launch every kernel by itself on a GPU, in place of replaying whole steps: for debugging.
    #[arg(long)]
    no_graph: bool,
    /// Threads of each rank on the CPU [default: the cores divided by the ranks].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    pub(super) parallel: Parallel,
    /// Write a checkpoint into this folder after every epoch; see --keep.
    #[arg(long, value_name = "DIR")]
    pub(super) checkpoint_dir: Option<PathBuf>,
    /// Write one after every N steps of the training as well.
    #[arg(long, value_name = "N", requires = "checkpoint_dir", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) checkpoint_every: Option<u64>,
    /// Checkpoints that are kept: the newest N.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    keep: u16,
    /// Go on from the newest checkpoint in --checkpoint-dir, or begin if there is none.
    #[arg(long, requires = "checkpoint_dir")]
    pub(super) resume: bool,
    /// Append one JSON object an epoch to this file.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) metrics: Option<PathBuf>,
    /// Draw loss and accuracy to this file after every epoch.
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
    /// Write loss and accuracy as an event file for TensorBoard into this folder.
    #[arg(long, value_name = "DIR")]
    pub(super) tensorboard: Option<PathBuf>,
    /// Write what every rank did when as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, at the end: on the CPU,
    /// the first 65536 spans of each rank.
    #[arg(long, value_name = "FILE.json")]
    pub(super) timeline: Option<PathBuf>,
    /// Record the timeline of these steps only, counted from 1, and of what lies between them.
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_steps, requires = "timeline")]
    timeline_steps: Option<RangeInclusive<u64>>,
    /// Write what the trained network says to the first 100 test images, and those, as JSON to this file.
    #[arg(long, value_name = "FILE.json")]
    pub(super) logits: Option<PathBuf>,
    /// Print a summary as one JSON object on the last line of standard output.
    #[arg(long)]
    pub(super) json: bool,
    /// Leave the test set out: for measurements.
    #[arg(long)]
    pub(super) skip_test: bool,
}

fn parse_net(text: &str) -> Result<Spec, String> {
    Spec::named(text).map_err(|error| error.to_string())
}

fn parse_steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let steps = text.split_once('-').and_then(|(first, last)| Some(first.parse().ok()?..=last.parse().ok()?));
    let some = |steps: &RangeInclusive<u64>| *steps.start() > 0 && !steps.is_empty();
    steps.filter(some).ok_or_else(|| "it should be two steps, such as 101-120".into())
}

/// How long to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Length {
    Epochs(u64),
    Steps(u64),
}

impl Args {
    pub(super) fn length(&self) -> Length {
        match self.steps {
            Some(steps) => Length::Steps(steps),
            None => Length::Epochs(self.epochs.unwrap_or(3)),
        }
    }

    pub(super) fn batch(&self) -> usize {
        self.batch.unwrap_or(self.net.batch)
    }

    pub(super) fn lr(&self) -> f64 {
        self.lr.unwrap_or(self.net.optimizer.rule.lr())
    }

    /// Steps whose timeline is recorded, from 1.
    pub(super) fn timeline_steps(&self) -> RangeInclusive<u64> {
        self.timeline_steps.clone().unwrap_or(1..=u64::MAX)
    }

    /// Checkpoints that are kept.
    pub(super) fn keep(&self) -> usize {
        usize::from(self.keep)
    }

    /// By which choice kernels are taken, on a GPU or a CPU, in words.
    pub(super) fn choice_of_kernels(&self, on_gpu: bool) -> String {
        match (on_gpu, self.conv) {
            (true, _) => self.kernels.to_string(),
            (false, Choice::Direct) => "direct".to_owned(),
            (false, _) => "auto".to_owned(),
        }
    }

    /// How a GPU is to be used.
    pub(super) fn gpu(&self) -> Options {
        Options { precision: self.precision, libraries: self.kernels, graph: !self.no_graph }
    }

    /// The flags by name, with their values, that decide what is trained or what ranks do together: all need the same.
    ///
    /// Where the digits come from is compared with the digits. How many threads a rank has is its own affair, unless the
    /// weights are to have the same bits on any number of ranks.
    pub(super) fn settings(&self, threads: usize) -> Vec<(&'static str, String)> {
        let length = match self.length() {
            Length::Epochs(epochs) => ("--epochs", epochs.to_string()),
            Length::Steps(steps) => ("--steps", steps.to_string()),
        };
        let mut settings = vec![
            ("--net", self.net.name.clone()),
            length,
            ("--batch", self.batch().to_string()),
            ("--lr", self.lr().to_string()),
            ("--schedule", self.schedule.to_string()),
            ("--warm-up", self.warm_up.to_string()),
            ("--seed", self.seed.to_string()),
            ("--precision", self.precision.to_string()),
            ("--kernels", self.kernels.to_string()),
            ("--conv", format!("{:?}", self.conv).to_lowercase()),
            ("--no-graph", self.no_graph.to_string()),
        ];
        settings.extend(self.parallel.settings());
        if self.parallel.is_world_size_invariant() {
            settings.push(("--threads", threads.to_string()));
        }
        settings.extend([
            ("--checkpoint-dir", if self.checkpoint_dir.is_some() { "given" } else { "none" }.to_owned()),
            ("--checkpoint-every", given(self.checkpoint_every)),
            ("--resume", self.resume.to_string()),
            ("--timeline", if self.timeline.is_some() { "given" } else { "none" }.to_owned()),
            ("--skip-test", self.skip_test.to_string()),
        ]);
        settings
    }

    /// Threads of a rank whose share of the cores is `share`.
    pub(super) fn threads(&self, share: usize) -> usize {
        self.parallel.threads(self.threads, share)
    }
}
