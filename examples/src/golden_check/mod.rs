//! `mgpurun -n 2 golden_check FILE.json…`: repeats recorded training runs and compares the results.
//!
//! A golden file records a short training run (five steps) of a network in double precision, and how far PyTorch's
//! single precision deviates from it. golden_check trains on the same batches, split over the ranks, and compares
//!
//! - the names and shapes of all parameter tensors, which must be equal;
//! - the loss of each step;
//! - the L2 norm of each tensor's averaged gradient in the first step;
//! - the L2 norm of each parameter tensor after the last step;
//! - the logits (ten) of the first image of the last batch.
//!
//! It does not compare single elements of gradients or parameters. In f32 each of the four lists must stay within ten
//! times the deviation of PyTorch's f32, or 1e-5 (1e-3 on GPUs) if that is larger. Finally all ranks must hold the
//! same parameters.

mod cpu;
mod gpu;
mod pipeline;

use std::error::Error;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use cpu::Cpu;
use gpu::Gpu;
use half::{bf16, f16};
use mgpu::optimizer::LossScaler;
use mgpu::optimizer::{Adam, OptimizerConfig, RmsProp, Rule};
use mgpu::replicate::verify_settings;
use mgpu::{Backend, Communicator, Layout, ReduceOp, World};
use mgpu_kernels::Precision;
use mgpu_kernels::cuda::Libraries;
use pipeline::Pipeline;
use serde::Deserialize;

use crate::data::{Dataset, Split, idx};
use crate::nets::ConvPolicy;
use crate::parallel::Parallel;
use crate::print::{outln, parse_arguments};

/// Repeats golden runs and compares losses, norms of gradients and of parameters, and the logits of one image.
///
/// Compares the loss of each step, the L2 norm of each tensor's gradient in the first step, the L2 norm of each
/// parameter tensor after the last step, and the ten logits of the first image of the last batch. Exit code 1 if a
/// deviation exceeds its bound.
#[derive(Debug, Parser)]
#[command(name = "golden_check", version)]
struct Args {
    /// Golden files.
    #[arg(required = true, value_name = "FILE.json")]
    files: Vec<PathBuf>,
    /// Folder with the four MNIST files [default: $MGPU_DATA; if that is empty, the current folder].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Threads of each rank [default: the cores divided by the ranks].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Precision: f32, bf16, fp16 or, on GPUs only, tf32. All but f32 have wider bounds.
    #[arg(long, value_name = "P", default_value_t = Precision::F32)]
    precision: Precision,
    /// Kernels of convolutions and dense layers on a GPU: auto (the fastest) or builtin (our own).
    #[arg(long, value_name = "NAME", default_value_t = Libraries::Auto)]
    kernels: Libraries,
    /// With --precision bf16 or fp16 on a GPU: round gradients of weights to that type wherever that makes them faster.
    #[arg(long)]
    narrow_gradients: bool,
    /// Convolution algorithm on the CPU: auto (the one expected to be fastest for each layer) or direct.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    conv: ConvPolicy,
    #[command(flatten)]
    parallel: Parallel,
}

/// The content of a golden file.
#[derive(Debug, Deserialize)]
struct Golden {
    net: String,
    seed: u64,
    batch: usize,
    steps: usize,
    optimizer: GoldenOptimizer,
    tensors: Vec<GoldenTensor>,
    loss: Vec<f64>,
    grad_norm: Vec<f64>,
    param_norm: Vec<f64>,
    logits: Vec<f64>,
    torch_f32_deviation: Deviations,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
enum GoldenOptimizer {
    Adam { lr: f64, beta1: f64, beta2: f64, eps: f64 },
    RmsProp { lr: f64, rho: f64, eps: f64, momentum: f64 },
}

#[derive(Debug, PartialEq, Deserialize)]
struct GoldenTensor {
    name: String,
    shape: Vec<usize>,
}

/// Largest deviation within each list: relative, except for logits.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Deviations {
    loss: f64,
    grad_norm: f64,
    param_norm: f64,
    logits: f64,
}

/// The results of a run.
#[derive(Debug, Default)]
struct RunResults {
    loss: Vec<f64>,
    grad_norm: Vec<f64>,
    param_norm: Vec<f64>,
    logits: Vec<f64>,
}

/// The smallest bound in f32 on GPUs. Sums in another order can change which of two nearly equal values is the
/// maximum of a window, or the sign of a value near 0. For that reason a run on an H100 deviated by up to 7e-4, and
/// PyTorch's own f32 on the CPU, with other seeds than the recorded runs, by up to 1e-3.
const MIN_BOUND_ON_GPUS: f64 = 1e-3;

/// The program.
pub fn main() -> ExitCode {
    let args: Args = parse_arguments();
    let refused = crate::exit::refuse("golden_check", args.precision, &args.parallel);
    refused.unwrap_or_else(|| crate::exit::report("golden_check", run(&args)))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let mut world = World::from_env()?;
    let folder = args.data.clone().or_else(|| std::env::var_os("MGPU_DATA").map(PathBuf::from));
    let folder = folder.ok_or("golden runs need MNIST: give its folder with --data DIR or in MGPU_DATA")?;
    let train = idx::read_split(&folder, Split::Train)?;
    let rank = world.rank();
    if let Some(device) = world.device().filter(|_| rank == 0) {
        outln!("on {}, {}", device.name(), args.precision);
    }
    let real = world.device().is_some_and(|device| !device.name().contains(crate::gpu_check::FAKE));
    let least = if real { MIN_BOUND_ON_GPUS } else { 1e-5 };
    let coarse = args.precision != Precision::F32 || args.parallel.compresses();
    let (settings, mut failed) = (args.settings(&train), Vec::new());
    for path in &args.files {
        let golden = read(path)?;
        let found = repeat(&golden, &train, &mut world, args, &settings)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        if rank == 0 && !compare(&golden, &found, coarse, least) {
            failed.push(golden.net);
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("deviation exceeds the bound: {}", failed.join(", ")).into())
    }
}

fn read(path: &Path) -> Result<Golden, String> {
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let golden: Golden = serde_json::from_reader(BufReader::new(file))
        .map_err(|error| format!("{}: not a golden file: {error}", path.display()))?;
    Ok(golden)
}

/// Runs a golden run on this rank's part of each batch.
trait GoldenBackend {
    /// Names and shapes of the parameters.
    fn layout(&self) -> &Layout;
    /// For the collectives of the check itself.
    fn comm(&mut self) -> &mut Communicator;
    /// Makes the next step on `samples`. Returns this rank's loss.
    fn step(&mut self, samples: &[u32]) -> mgpu::Result<f64>;
    /// The L2 norm of each tensor's gradient, after averaging over ranks.
    fn gradient_norms(&mut self) -> mgpu::Result<Vec<f64>>;
    /// The L2 norm of each parameter tensor.
    fn parameter_norms(&mut self) -> mgpu::Result<Vec<f64>>;
    /// The logits of the first image of the last batch.
    fn logits(&mut self) -> mgpu::Result<Vec<f64>>;
    /// Checks that all ranks hold the same parameters.
    fn verify(&mut self) -> mgpu::Result<()>;
}

/// Settings that must be equal on all ranks, by name.
type Settings = Vec<(&'static str, String)>;

impl Args {
    fn settings(&self, train: &Dataset) -> Settings {
        let files: Vec<String> = self.files.iter().map(|path| path.display().to_string()).collect();
        let mut settings = vec![
            ("golden files", files.join(" ")),
            ("--data", format!("{} images with checksum {:016x}", train.len(), train.checksum())),
            ("--precision", self.precision.to_string()),
            ("--kernels", self.kernels.to_string()),
            ("--narrow-gradients", self.narrow_gradients.to_string()),
            ("--conv", format!("{:?}", self.conv).to_lowercase()),
        ];
        settings.extend(self.parallel.settings());
        settings
    }

    /// With --precision fp16: a scale at which no step of these short runs overflows.
    fn loss_scaler(&self) -> Option<LossScaler> {
        (self.precision == Precision::F16).then(|| LossScaler::default().with_scale(1024.0))
    }
}

/// Trains as described in the file.
fn repeat(
    golden: &Golden,
    train: &Dataset,
    world: &mut World,
    args: &Args,
    settings: &Settings,
) -> Result<RunResults, Box<dyn Error>> {
    let grid = args.parallel.grid(world.size())?;
    // Ranks that share the layers of a network train on the same images.
    let (rank, ranks) = args.parallel.replica(world.rank(), world.size())?;
    let (rank, ranks) = (rank as usize, ranks as usize);
    if !golden.batch.is_multiple_of(ranks) {
        return Err(
            format!("a batch of {} images cannot be split evenly over {ranks} ranks", golden.batch).into()
        );
    }
    if golden.batch == 0 || golden.steps == 0 {
        return Err("the golden run has no images".into());
    }
    if golden.batch.checked_mul(golden.steps).is_none_or(|images| images > train.len()) {
        let (steps, batch) = (golden.steps, golden.batch);
        return Err(format!(
            "needs {steps} times {batch} training images, but there are only {}",
            train.len()
        )
        .into());
    }
    let batch = golden.batch / ranks;
    let threads = args.parallel.threads(args.threads, world.thread_share());
    let mut backend: Box<dyn GoldenBackend + '_> = match world.backend() {
        Backend::Cpu => {
            let mut comm = world.communicator()?;
            verify_settings(&mut comm, settings)?;
            if let Some(grid) = grid {
                let part = (batch, grid);
                if args.precision == Precision::Bf16 {
                    Box::new(Pipeline::<bf16>::new(golden, train, part, comm, threads, args)?)
                } else {
                    Box::new(Pipeline::<f32>::new(golden, train, part, comm, threads, args)?)
                }
            } else {
                match args.precision {
                    Precision::Bf16 => Box::new(Cpu::<bf16>::new(golden, train, batch, comm, threads, args)?),
                    Precision::F16 => Box::new(Cpu::<f16>::new(golden, train, batch, comm, threads, args)?),
                    _ => Box::new(Cpu::<f32>::new(golden, train, batch, comm, threads, args)?),
                }
            }
        }
        Backend::Nccl if grid.is_some() => return Err(args.parallel.refuse_on_gpus().into()),
        Backend::Nccl => {
            let (device, mut host) = args.parallel.communicators(world)?;
            verify_settings(&mut host, settings)?;
            Box::new(Gpu::new(golden, train, batch, (device, host), threads, args)?)
        }
    };
    let tensors = backend.layout().tensors().iter();
    let tensors: Vec<GoldenTensor> = tensors
        .map(|tensor| GoldenTensor { name: tensor.name.clone(), shape: tensor.shape.clone() })
        .collect();
    if tensors != golden.tensors {
        return Err("the tensors of the golden file differ from those of the network".into());
    }
    let mut lists = RunResults::default();
    for step in 0..golden.steps {
        let first = step * golden.batch + rank * batch;
        let samples: Vec<u32> = (first..first + batch).map(|sample| sample as u32).collect();
        let mut loss = [backend.step(&samples)?];
        backend.comm().all_reduce_slice(&mut loss, ReduceOp::Avg)?;
        lists.loss.push(loss[0]);
        if step == 0 {
            let scale = args.parallel.gradient_scale(ranks as u32).map_or(1.0, |scale| scale as f64);
            lists.grad_norm = backend.gradient_norms()?.into_iter().map(|norm| norm / scale).collect();
        }
    }
    // The first image of the last batch belongs to rank 0.
    lists.logits = backend.logits()?;
    lists.param_norm = backend.parameter_norms()?;
    backend.verify()?;
    Ok(lists)
}

impl Golden {
    fn optimizer(&self) -> OptimizerConfig {
        OptimizerConfig::new(match self.optimizer {
            GoldenOptimizer::Adam { lr, beta1, beta2, eps } => {
                Rule::Adam(Adam { lr, beta1, beta2, eps, weight_decay: 0.0 })
            }
            GoldenOptimizer::RmsProp { lr, rho, eps, momentum } => {
                Rule::RmsProp(RmsProp { lr, rho, eps, momentum, weight_decay: 0.0 })
            }
        })
    }
}

/// The L2 norm, summed in double precision.
fn norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

/// Prints the largest deviation of each list beside its bound. True if all deviations are within their bounds.
///
/// In f32 the bound is ten times the deviation of PyTorch's f32, and at least `least`. Coarser dtypes have a fixed
/// bound, or three times the f32 bound if that is larger: rounding can change which value of a window is the maximum,
/// or the sign of a value, and so move a whole contribution to the gradient. These wide bounds only distinguish a
/// wrong kernel from coarse rounding.
fn compare(golden: &Golden, found: &RunResults, is_coarse: bool, least: f64) -> bool {
    let relative = |expected: f64| expected.abs().max(1e-12);
    let absolute = |_: f64| 1.0;
    let single = golden.torch_f32_deviation;
    type List<'a> = (&'a str, &'a [f64], &'a [f64], f64, f64, fn(f64) -> f64);
    let lists: [List<'_>; 4] = [
        ("loss", &golden.loss, &found.loss, single.loss, 0.03, relative),
        ("grad_norm", &golden.grad_norm, &found.grad_norm, single.grad_norm, 0.1, relative),
        ("param_norm", &golden.param_norm, &found.param_norm, single.param_norm, 0.1, relative),
        ("logits", &golden.logits, &found.logits, single.logits, 1.5, absolute),
    ];
    let mut within_all = true;
    for (name, expected, found, single, coarse, unit) in lists {
        let distances =
            expected.iter().zip(found).map(|(expected, found)| (expected - found).abs() / unit(*expected));
        let distances: Vec<f64> = distances.collect();
        let largest = distances.iter().copied().fold(0.0, largest_or_nan);
        let fine = (10.0 * single).max(least);
        let bound = if is_coarse { coarse.max(3.0 * fine) } else { fine };
        // A NaN is not within any bound.
        let within = expected.len() == found.len() && largest <= bound;
        within_all &= within;
        let verdict = match distances.iter().position(|distance| distance.to_bits() == largest.to_bits()) {
            _ if within => "ok".to_owned(),
            Some(index) => format!("EXCEEDS THE BOUND ({})", describe_entry(golden, name, index)),
            None => "EXCEEDS THE BOUND".to_owned(),
        };
        outln!("{:<13} {name:<11} deviation {largest:9.2e}  bound {bound:9.2e}  {verdict}", golden.net);
    }
    within_all
}

/// What entry `index` of a list is about.
fn describe_entry(golden: &Golden, list: &str, index: usize) -> String {
    match list {
        "loss" => format!("step {}", index + 1),
        "logits" => format!("class {index}"),
        _ => golden.tensors[index].name.clone(),
    }
}

/// The larger of both; NaN if either is NaN.
fn largest_or_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_never_passes() {
        assert!([0.1, f64::NAN, 0.2].into_iter().fold(0.0, largest_or_nan).is_nan());
        assert_eq!([0.1, 0.3, 0.2].into_iter().fold(0.0, largest_or_nan), 0.3);
    }
}
