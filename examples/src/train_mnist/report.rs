//! The output: a progress line, a line per epoch, and a summary.

use std::error::Error;
use std::fmt;
use std::io::stdout;
use std::path::Path;
use std::time::{Duration, Instant};

use mgpu::optimizer::LossScale;
use serde::{Deserialize, Serialize};
use terminal_size::terminal_size_of;

use super::args::Args;
use super::byproducts::AppendedFile;
use super::engine::{Engine, PipelineReport};
use super::profile::StepProfile;
use super::trainer::Trainer;
use crate::nets::LossReport;
use crate::print::{is_watched, outln, print};

/// The results of an epoch, or of the part that was trained.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct EpochReport {
    /// Counted from 1.
    pub(super) epoch: u64,
    /// Steps since the beginning of the training.
    pub(super) step: u64,
    pub(super) train_loss: f64,
    pub(super) train_acc: f64,
    /// The L2 penalty of the weights at the end, which is not part of `train_loss`; none if the optimizer has none, and
    /// where a GPU is working on the next epoch already.
    pub(super) l2_loss: Option<f64>,
    pub(super) train_s: f64,
    pub(super) images_per_s: f64,
    /// Share of training time in collectives, mean over ranks; none with one rank, and on GPUs.
    pub(super) communication: Option<f64>,
    pub(super) test_loss: Option<f64>,
    pub(super) test_acc: Option<f64>,
    /// Accuracy with the moving average of the weights, if there is one.
    pub(super) test_acc_average: Option<f64>,
    pub(super) test_s: f64,
    /// With --precision fp16.
    #[serde(flatten)]
    pub(super) loss_scale: Option<LossScaleReport>,
    /// The data source, in words.
    pub(super) data: String,
}

/// The loss scale after some steps, and how many of all steps so far were skipped because gradients had overflowed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct LossScaleReport {
    /// As f64, whose text is exact.
    loss_scale: f64,
    skipped_steps: u64,
}

impl From<LossScale> for LossScaleReport {
    fn from(LossScale { scale, skipped, .. }: LossScale) -> Self {
        LossScaleReport { loss_scale: scale.into(), skipped_steps: skipped }
    }
}

impl fmt::Display for LossScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LossScaleReport { loss_scale, skipped_steps } = self;
        let steps = if *skipped_steps == 1 { "step" } else { "steps" };
        write!(f, "loss scale {loss_scale}, {skipped_steps} {steps} skipped")
    }
}

/// Results on the test set.
#[derive(Debug, Clone, Copy)]
pub(super) struct TestResult {
    pub(super) score: LossReport,
    /// With the moving average of the weights, if there is one.
    pub(super) average: Option<LossReport>,
    pub(super) seconds: f64,
}

impl fmt::Display for TestResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "test {:.2}% loss {:.4}", self.score.accuracy() * 100.0, self.score.loss())?;
        if let Some(average) = self.average {
            let (percent, loss) = (average.accuracy() * 100.0, average.loss());
            write!(f, " (averaged weights {percent:.2}% loss {loss:.4})")?;
        }
        write!(f, " in {:.1} s", self.seconds)
    }
}

impl EpochReport {
    pub(super) fn set_test(&mut self, tested: &TestResult) {
        self.test_loss = Some(tested.score.loss());
        self.test_acc = Some(tested.score.accuracy());
        self.test_acc_average = tested.average.map(|score| score.accuracy());
        self.test_s = tested.seconds;
    }

    /// The line printed for an epoch.
    pub(super) fn line(&self, epochs: u64, tested: Option<&TestResult>) -> String {
        let l2 = self.l2_loss.map_or(String::new(), |l2| format!(" + {l2:.4} (L2)"));
        let scale = self.loss_scale.map_or(String::new(), |scale| format!(", {scale}"));
        let train = format!(
            "epoch {}/{epochs}: train {:.2}% loss {:.4}{l2} in {:.1} s ({:.0} images/s){scale}",
            self.epoch,
            self.train_acc * 100.0,
            self.train_loss,
            self.train_s,
            self.images_per_s
        );
        match tested {
            Some(tested) => format!("{train}; {tested}"),
            None => train,
        }
    }
}

/// What a training and an evaluation have in common in the last line of standard output with `--json`.
#[derive(Debug, Serialize)]
pub(super) struct ModelSummary {
    #[serde(rename = "impl")]
    implementation: &'static str,
    net: String,
    pub(super) ranks: u32,
    placement: String,
    /// Batch size of each rank, or of the ranks that share the layers, in images.
    /// Of rank 0.
    batch: usize,
    /// With --global-batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) global_batch: Option<usize>,
    device: &'static str,
    dtype: &'static str,
    steps: u64,
    test_acc: Option<f64>,
    test_loss: Option<f64>,
    /// With the moving average of the weights, if there is one.
    test_acc_average: Option<f64>,
    test_loss_average: Option<f64>,
    /// The L2 penalty of the weights, if the optimizer has one; no loss includes it.
    pub(super) l2_loss: Option<f64>,
    /// Name of rank 0's GPU.
    gpu: Option<String>,
    #[serde(flatten)]
    memory: RankMemory,
    threads: usize,
    seed: u64,
    data: String,
    /// XXH3 checksum of the weights, equal on all ranks.
    pub(super) weights: String,
}

impl ModelSummary {
    /// `batch` is the number of images of a step on rank 0, `data` the data source in words, `checksum` that of the
    /// weights.
    pub(super) fn new(
        (args, batch): (&Args, usize),
        engine: &mut dyn Engine,
        (tested, l2_loss, checksum): (Option<TestResult>, Option<f64>, u64),
        (memory, threads): (RankMemory, usize),
        data: String,
    ) -> Self {
        let average = tested.and_then(|tested| tested.average);
        ModelSummary {
            implementation: "mgpu",
            net: args.net().name,
            ranks: engine.comm().size(),
            placement: args.parallel.placement().to_string(),
            batch,
            global_batch: None,
            device: if engine.gpu().is_some() { "cuda" } else { "cpu" },
            dtype: args.precision.name(),
            steps: engine.steps(),
            test_acc: tested.map(|tested| tested.score.accuracy()),
            test_loss: tested.map(|tested| tested.score.loss()),
            test_acc_average: average.map(|average| average.accuracy()),
            test_loss_average: average.map(|average| average.loss()),
            l2_loss,
            gpu: engine.gpu().map(|gpu| gpu.name().to_owned()),
            memory,
            threads,
            seed: args.seed(),
            data,
            weights: format!("{checksum:016x}"),
        }
    }
}

/// The last line of standard output of a training with `--json`.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    #[serde(flatten)]
    model: ModelSummary,
    epochs: u64,
    images_per_s: f64,
    ms_per_step: f64,
    /// Shares of the measured time in collectives, and waiting for peers in collectives, mean over ranks; none with
    /// one rank, and on GPUs.
    communication: Option<f64>,
    waiting: Option<f64>,
    /// Bytes that all ranks together move between ranks in a step, without evaluations; none on GPUs.
    bytes_per_step: Option<u64>,
    train_s: f64,
    test_s: f64,
    /// Times of each epoch that this run has trained.
    epochs_train_s: Vec<f64>,
    epochs_test_s: Vec<f64>,
    /// Number of checkpoints, and the milliseconds that training was blocked by each.
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoints: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ms_per_checkpoint: Option<f64>,
    /// With --precision fp16.
    #[serde(flatten)]
    pub(super) loss_scale: Option<LossScaleReport>,
    /// If the layers are cut over ranks.
    #[serde(flatten)]
    pub(super) pipeline: Option<PipelineReport>,
    /// With `--profile`.
    #[serde(flatten)]
    pub(super) profile: Option<StepProfile>,
}

impl Summary {
    pub(super) fn new(model: ModelSummary, trainer: &Trainer, bytes_per_step: Option<u64>) -> Self {
        let (totals, times, cost) = (trainer.totals(), trainer.epoch_times(), trainer.checkpoint_cost());
        let each = |seconds: &[f64]| seconds.iter().copied().map(round).collect();
        Summary {
            model,
            epochs: trainer.epoch(),
            images_per_s: round(totals.images_per_s()),
            ms_per_step: round(totals.ms_per_step()),
            communication: None,
            waiting: None,
            bytes_per_step,
            train_s: round(totals.train_s),
            test_s: round(totals.test_s),
            epochs_train_s: each(&times.train_s),
            epochs_test_s: each(&times.test_s),
            checkpoints: cost.map(|(saved, _)| saved),
            ms_per_checkpoint: cost.map(|(_, ms)| round(ms)),
            loss_scale: None,
            pipeline: None,
            profile: None,
        }
    }

    /// Adds the shares of time in collectives, and waiting for peers there.
    pub(super) fn set_communication(&mut self, shares: [f64; 2]) {
        [self.communication, self.waiting] = shares.map(|share| Some(round(share)));
    }
}

/// Peak memory of all ranks in MiB.
#[derive(Debug, Serialize)]
pub(super) struct RankMemory {
    /// Resident memory of the rank with the most, and of each.
    rss_mib: f64,
    rank_rss_mib: Vec<f64>,
    /// GPU memory as far as this program allocated it, of the rank with the most, and of each; none on the CPU.
    max_gpu_mib: Option<u64>,
    rank_gpu_mib: Option<Vec<u64>>,
}

impl RankMemory {
    /// Gathers the memory of all ranks. Collective.
    pub(super) fn gather(engine: &mut dyn Engine) -> Result<Self, Box<dyn Error>> {
        let gpu_mib = engine.gpu().map(|gpu| gpu.memory_peak() as f64 / f64::from(1 << 20));
        let all = engine.comm().all_gather_slice(&[peak_resident_mib()?, gpu_mib.unwrap_or(0.0)])?;
        let rank_rss_mib: Vec<f64> = all.chunks(2).map(|rank| round(rank[0])).collect();
        let rank_gpu_mib =
            gpu_mib.map(|_| all.chunks(2).map(|rank| rank[1].ceil() as u64).collect::<Vec<_>>());
        Ok(RankMemory {
            rss_mib: rank_rss_mib.iter().copied().fold(0.0, f64::max),
            max_gpu_mib: rank_gpu_mib.as_ref().and_then(|ranks| ranks.iter().copied().max()),
            rank_rss_mib,
            rank_gpu_mib,
        })
    }
}

pub(super) fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// A non-finite loss ends the training before its state is saved.
pub(super) fn check_finite(what: &str, epoch: u64, loss: f64) -> Result<(), String> {
    if loss.is_finite() {
        return Ok(());
    }
    Err(format!(
        "the training has diverged: the {what} of epoch {epoch} is {loss}; this state is not saved, earlier \
         checkpoints are unchanged; try a lower --lr, --warm-up or --clip-norm"
    ))
}

/// Peak resident memory of this process, in MiB (VmHWM of `/proc/self/status`).
fn peak_resident_mib() -> Result<f64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    let kib: f64 = line.split_whitespace().next().unwrap_or_default().parse().unwrap_or(0.0);
    Ok(kib / 1024.0)
}

/// Appends the metrics of each epoch to a file.
pub(super) struct Metrics(AppendedFile);

impl Metrics {
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        AppendedFile::open("--metrics", path).map(Metrics)
    }

    pub(super) fn append(&mut self, report: &EpochReport) -> Result<(), String> {
        let line = serde_json::to_string(report).map_err(|error| error.to_string())?;
        self.0.push((line + "\n").as_bytes())?;
        self.0.flush()
    }
}

/// The progress line, on a terminal or for a launcher that displays it. It is written to standard output like the
/// lines of epochs, so it cannot overtake them.
pub(super) struct ProgressDisplay {
    shown: bool,
    /// Clears the rest of an earlier, longer line, also if the terminal has become narrower. A launcher does that by
    /// itself.
    clear: &'static str,
    next: Instant,
}

/// Minimum time between two updates of the line.
const REFRESH: Duration = Duration::from_millis(200);

impl ProgressDisplay {
    pub(super) fn new(rank: u32) -> Self {
        let launcher = std::env::var_os(mgpu::protocol::MGPU_PROGRESS).is_some_and(|value| value == "1");
        let alone = rank == 0 && !launcher && is_watched();
        let clear = if alone { "\x1b[J" } else { "" };
        ProgressDisplay { shown: alone || rank == 0 && launcher, clear, next: Instant::now() }
    }

    /// Shows the result of `text`, unless the line was updated less than [`REFRESH`] ago.
    pub(super) fn update(&mut self, text: impl FnOnce() -> String) {
        if self.shown && Instant::now() >= self.next {
            self.next = Instant::now() + REFRESH;
            // A line that wraps would leave a row behind. The last column stays free, because the cursor after it may
            // already be in the next row. (A launcher truncates by itself.)
            let columns =
                terminal_size_of(stdout()).map_or(usize::MAX, |(width, _)| usize::from(width.0) - 1);
            let line: String = text().chars().take(columns).collect();
            print(format_args!("{line}{}\r", self.clear));
        }
    }

    /// Prints a line in place of the progress line.
    pub(super) fn line(&self, text: &str) {
        outln!("{text}{}", self.clear);
    }
}
