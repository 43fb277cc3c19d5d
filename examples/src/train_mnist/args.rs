//! The command line of `train_mnist`, and the values derived from it.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, Parser, ValueEnum};

use mgpu::optimizer::LossScaler;
use mgpu_kernels::cuda::{AutotuneOptions, Libraries};
use mgpu_kernels::{Precision, tile_engine};

use super::division::Division;
use super::engine::Options;
use super::schedule::ScheduleKind;
use crate::data::{Split, digits};
use crate::exit::{refuse, refuse_usage};
use crate::nets::{ConvPolicy, Spec};
use crate::parallel::{Parallel, PlacementChoice, above_0, given, positive};

/// Trains a network on MNIST, on one rank or under mgpurun on several.
///
/// Every rank trains on its own part of each global batch. Gradients are averaged over ranks in every step, so all
/// ranks hold the same weights.
///
/// Data without --data, --synthetic or --download: the folder in MGPU_DATA if that is set, else MNIST from an earlier
/// download, else generated digits. An empty MGPU_DATA counts as set and means the current folder.
#[derive(Debug, Parser)]
#[command(name = "train_mnist", version)]
#[command(group(ArgGroup::new("source").args(["data", "synthetic", "download"])))]
#[command(group(ArgGroup::new("generated").args(["synthetic", "write_digits"])))]
#[command(group(ArgGroup::new("length").args(["epochs", "steps"])))]
#[command(group(ArgGroup::new("images_a_step").args(["batch", "global_batch"])))]
#[command(after_help = "Example: mgpurun -n 2 train_mnist --net lenet5 --epochs 3")]
pub(super) struct Args {
    /// Network: lenet5, deep, keras, ensemble2400, ensemble4800, layers, conv6 or mlp-gelu [default: lenet5; with
    /// --evaluate the checkpoint's].
    #[arg(long, value_name = "NAME", value_parser = parse_net)]
    pub(super) net: Option<Spec>,
    /// Folder with the four MNIST files, gzipped or not [default: $MGPU_DATA].
    #[arg(long, value_name = "DIR")]
    pub(super) data: Option<PathBuf>,
    /// Train on generated digits; needs no files.
    #[arg(long)]
    pub(super) synthetic: bool,
    /// Train nothing: write --images generated digits and 10,000 test digits to this folder, as files that --data reads.
    /// With 10,000,000 images the files have 7.8 GB.
    #[arg(long, value_name = "DIR", requires = "images", conflicts_with_all = ["source", "length", "evaluate", "checkpoint_dir"])]
    pub(super) write_digits: Option<PathBuf>,
    /// Number of training images of --synthetic [default: 60000] or --write-digits.
    #[arg(long, value_name = "N", requires = "generated", value_parser = clap::value_parser!(u32).range(1..))]
    images: Option<u32>,
    /// Download MNIST (11 MB) unless it is in the cache already.
    #[arg(long)]
    pub(super) download: bool,
    /// Where the images are kept: device (GPU memory; on CPUs as host), host (memory of the host) or disk (their file,
    /// which must be uncompressed; each rank reads batches ahead of the step that needs them). auto takes the first one
    /// with enough memory.
    ///
    /// On GPUs, images on host or disk are copied through pinned memory while earlier steps run. The trained weights are
    /// the same. There is enough memory on a GPU if the training set takes at most half of what is free, and on the host
    /// if all its ranks together take at most half of what is available for a set.
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = DataOn::Auto, hide_possible_values = true)]
    pub(super) data_on: DataOn,
    /// Epochs: passes over the training set [default: 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    epochs: Option<u64>,
    /// Total number of training steps, instead of --epochs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Batch size of each rank, in images [default: the network's own].
    #[arg(long, value_name = "N", value_parser = positive)]
    batch: Option<usize>,
    /// Global batch size: the images of a step on all ranks together, instead of --batch. The number of ranks then changes
    /// neither the steps of an epoch nor the learning rate, and a run continues on any number of ranks.
    ///
    /// If the ranks cannot have equally many images, the first ones have one more, and a line says so. Every image has the
    /// same weight. With --world-size-invariant the number of ranks changes no bit.
    #[arg(long, value_name = "N", value_parser = positive)]
    global_batch: Option<usize>,
    /// Initial learning rate [default: the network's own].
    #[arg(long, value_name = "X", value_parser = above_0)]
    lr: Option<f64>,
    /// Learning rate schedule: linear or cosine (decay to 0 at the end; cosine:0.1 decays to a tenth), constant, or
    /// step:N:X (multiply by X after every N steps).
    #[arg(long, value_name = "NAME", default_value_t = ScheduleKind::Linear)]
    pub(super) schedule: ScheduleKind,
    /// Warm-up: the number of steps in which the learning rate rises linearly at the beginning.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) warm_up: u64,
    /// Seed of initial weights, shuffling, dropout and generated digits [default: 1; with --evaluate the
    /// checkpoint's].
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<u64>,
    /// Precision: f32, bf16, fp16 or, on GPUs only, tf32. On the CPU, bf16 and fp16 store images between layers in 16 bits,
    /// and bf16 is multiplied as such if the processor is faster at that than at f32 (--show-kernels says where). Sums and
    /// parameters are always f32.
    ///
    /// fp16 is for GPUs without tensor cores for bf16, older than compute capability 8.0. Its numbers end at 65,504 and
    /// 6e-8, so the gradient of the loss is scaled: see --loss-scale.
    #[arg(long, value_name = "P", default_value_t = Precision::F32)]
    pub(super) precision: Precision,
    /// With --precision fp16: the factor of the loss's gradient in the first step [default: 65536].
    ///
    /// A step whose gradients overflow is skipped, and the factor is halved; after 2000 steps in a row that are not
    /// skipped it is doubled, as PyTorch's GradScaler does. Skipped steps are counted in the line of an epoch, in
    /// --metrics and with --json.
    #[arg(long, value_name = "X", value_parser = above_0)]
    loss_scale: Option<f64>,
    /// Kernels of convolutions and dense layers on a GPU: auto (the fastest of cuDNN, cuBLASLt and our own) or
    /// builtin (our own only).
    #[arg(long, value_name = "NAME", default_value_t = Libraries::Auto)]
    kernels: Libraries,
    /// With --precision bf16 or fp16 on a GPU: round gradients of weights to that type wherever that makes them faster.
    /// Without this flag they are f32, except where cuDNN's only kernels write the narrow type.
    #[arg(long)]
    narrow_gradients: bool,
    /// Convolution algorithm on the CPU: auto (the one expected to be fastest for each layer) or direct.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub(super) conv: ConvPolicy,
    /// Print which kernel computes each layer before training; on a GPU also its time.
    #[arg(long)]
    pub(super) show_kernels: bool,
    /// Print a profile after training: the time of each layer and of everything else in a step. On the CPU it is the
    /// mean of all steps after the warm-up, with the share of peak FLOP/s; on a GPU of up to 100 steps, which are
    /// launched one at a time.
    #[arg(long)]
    pub(super) profile: bool,
    /// Launch each kernel separately on a GPU instead of replaying CUDA graphs. For debugging.
    #[arg(long)]
    no_graph: bool,
    /// CPU threads of each rank [default: the cores divided by the ranks].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    pub(super) parallel: Parallel,
    /// Write a checkpoint to this folder after every epoch. See --keep and --resume.
    ///
    /// The folder is created if needed. It is refused if it already contains checkpoints and --resume is not given,
    /// or if another running process writes checkpoints to it.
    #[arg(long, value_name = "DIR")]
    pub(super) checkpoint_dir: Option<PathBuf>,
    /// Also write a checkpoint after every N training steps.
    #[arg(long, value_name = "N", requires = "checkpoint_dir", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) checkpoint_every: Option<u64>,
    /// Keep the newest N checkpoints.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    keep: u16,
    /// Keep each checkpoint on N hosts, which need not share a file system.
    ///
    /// After rank 0 has written a checkpoint, it is sent to the first ranks of N - 1 other hosts, at the next checkpoint
    /// or at the end of the training. They verify it and keep it in --checkpoint-dir on their disks. --resume takes the
    /// newest intact checkpoint that any host has, so the run survives the loss of N - 1 hosts with their disks.
    ///
    /// A copy that cannot be written is an error. If there are fewer hosts, or hosts share the folder, a line says on how
    /// many hosts checkpoints are kept.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "checkpoint_dir", value_parser = clap::value_parser!(u16).range(1..))]
    checkpoint_copies: u16,
    /// Resume from the newest checkpoint in --checkpoint-dir; start at step 0 if there is none.
    ///
    /// Refused, with a list of the differences, if the checkpoint is of another run: another network, seed, global
    /// batch size (--global-batch, or --batch times ranks), --lr, --schedule, --warm-up, --clip-norm, --gradients,
    /// --reduction, --precision or training set. With the schedules linear and cosine the total number of steps must be the same too;
    /// with constant and step a run can be extended. With batch normalisation the micro-batches must be the same.
    ///
    /// Other numbers of ranks or threads, kernels or devices are allowed; a line says if the weights will therefore
    /// not be bit-equal to those of an uninterrupted run.
    ///
    /// A damaged checkpoint is renamed to damaged-… and the previous one is used; it is an error if all are damaged.
    /// Ranks restarted by mgpurun resume without this flag, but only from checkpoints of the same launch.
    #[arg(long, requires = "checkpoint_dir")]
    pub(super) resume: bool,
    /// Print a line after every N training steps: loss and accuracy of these steps on all ranks, and images/s.
    ///
    /// For that line the ranks add up their results, and on GPUs the stream runs empty. So a small N slows the
    /// training down. With --tensorboard these values are also in the event file.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) log_every: Option<u64>,
    /// Append one JSON object per epoch to this file.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) metrics: Option<PathBuf>,
    /// Plot loss and accuracy to this file after every epoch: as PNG if its name ends with .png, else as SVG.
    #[arg(long, value_name = "FILE.svg|png")]
    pub(super) plot: Option<PathBuf>,
    /// Write loss and accuracy to a TensorBoard event file in this folder.
    #[arg(long, value_name = "DIR")]
    pub(super) tensorboard: Option<PathBuf>,
    /// Write a timeline of all ranks at the end, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: the
    /// first 65536 spans of each rank. On GPUs the recorded steps are launched one at a time, so choose them with
    /// --timeline-steps.
    #[arg(long, value_name = "FILE.json")]
    pub(super) timeline: Option<PathBuf>,
    /// Record the timeline only from step FIRST to step LAST, counted from 1.
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_steps, requires = "timeline")]
    timeline_steps: Option<RangeInclusive<u64>>,
    /// Write the first 100 test images and the trained network's logits for them to this file, as JSON.
    #[arg(long, value_name = "FILE.json")]
    pub(super) logits: Option<PathBuf>,
    /// Train nothing: load this checkpoint, evaluate it on the test set, and write nothing to its folder.
    ///
    /// CHECKPOINT is a folder step-…, or a folder of checkpoints; then the newest is used, or, if that is damaged, the
    /// newest that is intact. The network and the seed are the checkpoint's. Any number of ranks, precision and
    /// device will do. If the optimizer keeps a moving average of the weights, that is evaluated too.
    #[arg(long, value_name = "CHECKPOINT", conflicts_with_all = OF_TRAINING)]
    pub(super) evaluate: Option<PathBuf>,
    /// With --evaluate: classify the images of this IDX file, gzipped or not, into --output.
    #[arg(long, value_name = "IMAGES.idx", requires_all = ["evaluate", "output"])]
    pub(super) predict: Option<PathBuf>,
    /// File for the predictions. If its name ends in .idx or -ubyte, an IDX file of labels; else JSON lines, one for
    /// each image, with the keys index, class and probabilities.
    #[arg(long, value_name = "FILE", requires = "predict")]
    pub(super) output: Option<PathBuf>,
    /// Print a summary as one JSON object in the last line of standard output. Under mgpurun the line starts with the
    /// prefix of rank 0 ("[0] "); mgpurun --no-prefix leaves prefixes out.
    #[arg(long)]
    pub(super) json: bool,
    /// Skip evaluation on the test set. For benchmarks.
    #[arg(long)]
    pub(super) skip_test: bool,
}

/// The flags that mean nothing without a training.
const OF_TRAINING: [&str; 28] = [
    "epochs",
    "steps",
    "global_batch",
    "lr",
    "schedule",
    "warm_up",
    "loss_scale",
    "narrow_gradients",
    "profile",
    "no_graph",
    "bucket",
    "shard_optimizer",
    "overlap",
    "accumulate",
    "world_size_invariant",
    "clip_norm",
    "gradients",
    "reduction",
    "checkpoint_dir",
    "checkpoint_every",
    "keep",
    "checkpoint_copies",
    "resume",
    "log_every",
    "metrics",
    "plot",
    "tensorboard",
    "timeline",
];

fn parse_net(text: &str) -> Result<Spec, String> {
    Spec::named(text).map_err(|error| error.to_string())
}

fn parse_steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let steps = text.split_once('-').and_then(|(first, last)| Some(first.parse().ok()?..=last.parse().ok()?));
    let some = |steps: &RangeInclusive<u64>| *steps.start() > 0 && !steps.is_empty();
    steps.filter(some).ok_or_else(|| "it should be two steps, such as 101-120".into())
}

/// Where the images of a set are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DataOn {
    /// The first of the others that has enough memory.
    Auto,
    /// In the memory of the GPU; on CPUs the same as `Host`.
    Device,
    /// In the memory of the host.
    Host,
    /// In their file.
    Disk,
}

/// The length of the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Length {
    Epochs(u64),
    Steps(u64),
}

impl Args {
    /// The network that was asked for, or the default.
    pub(super) fn net(&self) -> Spec {
        let default = || Spec::named("lenet5").expect("a network of the catalogue");
        self.net.clone().unwrap_or_else(default)
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed.unwrap_or(1)
    }

    pub(super) fn length(&self) -> Length {
        match self.steps {
            Some(steps) => Length::Steps(steps),
            None => Length::Epochs(self.epochs.unwrap_or(3)),
        }
    }

    pub(super) fn batch(&self) -> usize {
        self.batch.unwrap_or_else(|| self.net().batch)
    }

    /// Global batch size, if it was given.
    pub(super) fn global_batch(&self) -> Option<usize> {
        self.global_batch
    }

    /// How the images of a step are divided, for rank `rank` of `ranks` ranks with different images.
    ///
    /// # Errors
    /// If they cannot be divided.
    pub(super) fn division(&self, (rank, ranks): (u32, u32)) -> Result<Division, String> {
        let global_batch = match self.global_batch {
            Some(images) => images,
            None => {
                self.parallel.micro_batches(self.batch(), ranks)?;
                self.batch().saturating_mul(ranks as usize)
            }
        };
        Division::new(&self.parallel, global_batch, (rank, ranks))
    }

    /// How the loss scale follows the gradients, with --precision fp16.
    pub(super) fn loss_scaler(&self) -> Option<LossScaler> {
        let default = LossScaler::default();
        let scale = self.loss_scale.map_or(default.scale, |scale| scale as f32);
        (self.precision == Precision::F16).then(|| default.with_scale(scale.max(LossScaler::LEAST)))
    }

    /// Generated training images that are kept in memory: 784 MB.
    const MOST_IN_MEMORY: u32 = 1_000_000;

    /// The exit code of a usage error, after printing it, if flags are incompatible.
    pub(super) fn refuse(&self) -> Option<ExitCode> {
        if self.loss_scale.is_some() && self.precision != Precision::F16 {
            let problem = format!("--loss-scale is for --precision fp16, not {}", self.precision);
            return Some(refuse_usage("train_mnist", &problem));
        }
        if self.digits(Split::Train) > Self::MOST_IN_MEMORY {
            let problem = format!(
                "--synthetic keeps its images in memory, at most {}: write more with --write-digits, and train with --data",
                Self::MOST_IN_MEMORY
            );
            return Some(refuse_usage("train_mnist", &problem));
        }
        refuse("train_mnist", self.precision, &self.parallel)
    }

    pub(super) fn lr(&self) -> f64 {
        self.lr.unwrap_or_else(|| self.net().optimizer.rule.lr())
    }

    /// Number of generated images of a set.
    pub(super) fn digits(&self, split: Split) -> u32 {
        match (split, self.images) {
            (Split::Train, Some(images)) => images,
            _ => digits::count(split) as u32,
        }
    }

    /// The steps whose timeline is recorded, counted from 1.
    pub(super) fn timeline_steps(&self) -> RangeInclusive<u64> {
        self.timeline_steps.clone().unwrap_or(1..=u64::MAX)
    }

    /// Number of checkpoints to keep.
    pub(super) fn keep(&self) -> usize {
        usize::from(self.keep)
    }

    /// Number of hosts that keep each checkpoint.
    pub(super) fn checkpoint_copies(&self) -> usize {
        usize::from(self.checkpoint_copies)
    }

    /// How kernels are chosen on a GPU or a CPU, in words.
    pub(super) fn choice_of_kernels(&self, on_gpu: bool) -> String {
        match (on_gpu, self.conv) {
            (true, _) if self.narrow_gradients => format!("{}, narrow gradients", self.kernels),
            (true, _) => self.kernels.to_string(),
            (false, conv) => {
                let conv = if conv == ConvPolicy::Direct { "direct" } else { "auto" };
                let engine = tile_engine::choose().filter(|_| self.precision == Precision::Bf16);
                engine.map_or(conv.to_owned(), |engine| format!("{conv}, bf16 by {engine}"))
            }
        }
    }

    /// GPU options.
    pub(super) fn gpu(&self) -> Options {
        let choice = AutotuneOptions {
            libraries: self.kernels,
            narrow_gradients: self.narrow_gradients,
            ..AutotuneOptions::default()
        };
        let on_host = self.parallel.is_on_host();
        Options { precision: self.precision, choice, graph: !self.no_graph, on_host, data_on: self.data_on }
    }

    /// All flags, with their values, that decide what is trained or which collectives ranks call. They must be equal
    /// on all ranks.
    ///
    /// The data source is not included: ranks compare the data itself. Thread counts may differ between ranks, except
    /// in world-size-invariant runs, where they would change the weights.
    pub(super) fn settings(&self, threads: usize) -> Vec<(&'static str, String)> {
        let length = match self.length() {
            Length::Epochs(epochs) => ("--epochs", epochs.to_string()),
            Length::Steps(steps) => ("--steps", steps.to_string()),
        };
        let mut settings = vec![
            ("--net", self.net().name),
            length,
            ("--batch", self.batch().to_string()),
            ("--global-batch", given(self.global_batch)),
            ("--lr", self.lr().to_string()),
            ("--schedule", self.schedule.to_string()),
            ("--warm-up", self.warm_up.to_string()),
            ("--seed", self.seed().to_string()),
            ("--precision", self.precision.to_string()),
            ("--loss-scale", given(self.loss_scale)),
            ("--kernels", self.kernels.to_string()),
            ("--narrow-gradients", self.narrow_gradients.to_string()),
            ("--conv", format!("{:?}", self.conv).to_lowercase()),
            ("--no-graph", self.no_graph.to_string()),
            ("--data-on", format!("{:?}", self.data_on).to_lowercase()),
        ];
        settings.extend(self.parallel.settings());
        if self.parallel.is_world_size_invariant() {
            settings.push(("--threads", threads.to_string()));
        }
        let is_given = |path: &Option<PathBuf>| if path.is_some() { "given" } else { "none" }.to_owned();
        if matches!(self.parallel.placement(), PlacementChoice::Layers(_)) {
            // All ranks that share the layers compute logits together.
            settings.push(("--logits", is_given(&self.logits)));
        }
        settings.extend([
            ("--evaluate", is_given(&self.evaluate)),
            ("--predict", is_given(&self.predict)),
            ("--log-every", given(self.log_every)),
            ("--checkpoint-dir", is_given(&self.checkpoint_dir)),
            ("--checkpoint-every", given(self.checkpoint_every)),
            ("--checkpoint-copies", self.checkpoint_copies.to_string()),
            ("--resume", self.resume.to_string()),
            ("--timeline", is_given(&self.timeline)),
            ("--skip-test", self.skip_test.to_string()),
        ]);
        settings
    }

    /// The flags that decide which steps are launched with a trace on GPUs. They must be equal on all ranks.
    pub(super) fn traced_settings(&self) -> Vec<(&'static str, String)> {
        let steps = self.timeline.is_some().then(|| format!("{:?}", self.timeline_steps()));
        vec![
            ("--profile", self.profile.to_string()),
            ("--timeline-steps", steps.unwrap_or_else(|| "none".to_owned())),
        ]
    }

    /// Threads of a rank whose share of the cores is `share`.
    pub(super) fn threads(&self, share: usize) -> usize {
        self.parallel.threads(self.threads, share)
    }
}
