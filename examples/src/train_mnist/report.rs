//! The output: a progress line, a line per epoch, and a summary.

use std::error::Error;
use std::fmt;
use std::io::stdout;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use terminal_size::terminal_size_of;

use super::args::Args;
use super::byproducts::AppendedFile;
use super::profile::StepProfile;
use super::trainer::Trainer;
use crate::nets::LossReport;
use crate::print::{is_watched, outln, print};

/// The results of an epoch, or of the part that was trained.
#[derive(Debug, Clone, Serialize)]
pub(super) struct EpochReport {
    /// Counted from 1.
    pub(super) epoch: u64,
    /// Steps since the beginning of the training.
    pub(super) step: u64,
    pub(super) train_loss: f64,
    pub(super) train_acc: f64,
    pub(super) train_s: f64,
    pub(super) images_per_s: f64,
    /// Share of training time in collectives, mean over ranks; none with one rank, and on GPUs.
    pub(super) communication: Option<f64>,
    pub(super) test_loss: Option<f64>,
    pub(super) test_acc: Option<f64>,
    /// Accuracy with the moving average of the weights, if there is one.
    pub(super) test_acc_average: Option<f64>,
    pub(super) test_s: f64,
    /// The data source, in words.
    pub(super) data: String,
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
            write!(f, " (averaged weights {:.2}%)", average.accuracy() * 100.0)?;
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
        let train = format!(
            "epoch {}/{epochs}: train {:.2}% loss {:.4} in {:.1} s ({:.0} images/s)",
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

/// The last line of standard output with `--json`.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    #[serde(rename = "impl")]
    pub(super) implementation: &'static str,
    pub(super) net: String,
    pub(super) ranks: u32,
    /// Batch size of each rank, in images.
    pub(super) batch: usize,
    pub(super) device: &'static str,
    pub(super) dtype: &'static str,
    pub(super) epochs: u64,
    pub(super) steps: u64,
    pub(super) images_per_s: f64,
    pub(super) ms_per_step: f64,
    /// Shares of the measured time in collectives, and waiting for peers in collectives, mean over ranks; none with
    /// one rank, and on GPUs.
    pub(super) communication: Option<f64>,
    pub(super) waiting: Option<f64>,
    pub(super) train_s: f64,
    pub(super) test_s: f64,
    pub(super) test_acc: Option<f64>,
    pub(super) test_loss: Option<f64>,
    pub(super) test_acc_average: Option<f64>,
    /// Peak GPU memory of the rank with the most, as far as this program allocated it; none on the CPU.
    pub(super) max_gpu_mib: Option<u64>,
    /// Name of rank 0's GPU.
    pub(super) gpu: Option<String>,
    /// Peak resident memory of the rank with the most.
    pub(super) rss_mib: f64,
    pub(super) threads: usize,
    pub(super) seed: u64,
    pub(super) data: String,
    /// Number of checkpoints, and the milliseconds that training was blocked by each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) checkpoints: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ms_per_checkpoint: Option<f64>,
    /// XXH3 checksum of the weights, equal on all ranks.
    pub(super) weights: String,
    /// With `--profile`.
    #[serde(flatten)]
    pub(super) profile: Option<StepProfile>,
}

impl Summary {
    /// `memory` is the peak resident memory and the peak GPU memory in MiB, each the maximum over ranks.
    pub(super) fn new(
        args: &Args,
        trainer: &mut Trainer,
        tested: Option<TestResult>,
        [rss_mib, gpu_mib]: [f64; 2],
        threads: usize,
        checksum: u64,
    ) -> Self {
        let (totals, cost) = (trainer.totals(), trainer.checkpoint_cost());
        Summary {
            implementation: "mgpu",
            net: args.net.name.clone(),
            ranks: trainer.engine().comm().size(),
            batch: args.batch(),
            device: if trainer.engine().gpu().is_some() { "cuda" } else { "cpu" },
            dtype: args.precision.name(),
            epochs: trainer.epoch(),
            steps: trainer.steps(),
            images_per_s: round(totals.images_per_s()),
            ms_per_step: round(totals.ms_per_step()),
            communication: None,
            waiting: None,
            train_s: round(totals.train_s),
            test_s: round(totals.test_s),
            test_acc: tested.map(|tested| tested.score.accuracy()),
            test_loss: tested.map(|tested| tested.score.loss()),
            test_acc_average: tested.and_then(|tested| Some(tested.average?.accuracy())),
            max_gpu_mib: trainer.engine().gpu().map(|_| gpu_mib.ceil() as u64),
            gpu: trainer.engine().gpu().map(|gpu| gpu.name().to_owned()),
            rss_mib: round(rss_mib),
            threads,
            seed: args.seed,
            data: trainer.data().to_owned(),
            checkpoints: cost.map(|(saved, _)| saved),
            ms_per_checkpoint: cost.map(|(_, ms)| round(ms)),
            weights: format!("{checksum:016x}"),
            profile: None,
        }
    }

    /// Adds the shares of time in collectives, and waiting for peers there.
    pub(super) fn set_communication(&mut self, shares: [f64; 2]) {
        [self.communication, self.waiting] = shares.map(|share| Some(round(share)));
    }
}

fn round(value: f64) -> f64 {
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
pub(super) fn peak_resident_mib() -> Result<f64, Box<dyn Error>> {
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
