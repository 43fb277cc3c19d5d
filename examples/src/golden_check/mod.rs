//! `mgpurun -n 2 golden_check FILE.json…`: repeats recorded training runs and compares.
//!
//! A golden file holds what five steps of a network gave in double precision, and how far single precision alone
//! lands from that. A correct implementation stays within ten times that distance (or 1e-5, whichever is larger),
//! also when the batch is split over ranks.

use std::error::Error;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use mgpu::optimizer::{Adam, OptimizerConfig, RmsProp, Rule};
use mgpu::{Communicator, DataParallel, ReduceOp, World};
use serde::Deserialize;

use crate::data::{Dataset, IMAGE_LEN, Split, idx};
use crate::nets::{Mode, Net, Spec};

/// Repeats golden runs and compares loss, gradients, parameters and logits. Exit code 1 past a bound.
#[derive(Debug, Parser)]
#[command(name = "golden_check", version)]
struct Args {
    /// Golden files.
    #[arg(required = true, value_name = "FILE.json")]
    files: Vec<PathBuf>,
    /// Folder with the four MNIST files [default: $MGPU_DATA].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Threads of each rank [default: the cores divided by the ranks].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// What a golden file holds.
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

/// Largest deviation within each list: relative, but for the logits.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Deviations {
    loss: f64,
    grad_norm: f64,
    param_norm: f64,
    logits: f64,
}

/// The lists of a run.
#[derive(Debug, Default)]
struct Lists {
    loss: Vec<f64>,
    grad_norm: Vec<f64>,
    param_norm: Vec<f64>,
    logits: Vec<f64>,
}

/// The program.
pub fn main() -> ExitCode {
    crate::exit::report("golden_check", run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let mut world = World::from_env()?;
    let folder = args.data.clone().or_else(|| std::env::var_os("MGPU_DATA").map(PathBuf::from));
    let folder = folder.ok_or("golden runs train on MNIST: name its folder with --data DIR or MGPU_DATA")?;
    let train = idx::read_split(&folder, Split::Train)?;
    let threads = args.threads.map_or_else(|| world.thread_share(), usize::from);
    let mut failed = Vec::new();
    for path in &args.files {
        let golden = read(path)?;
        let comm = world.communicator()?;
        let rank = comm.rank();
        let found =
            repeat(&golden, &train, comm, threads).map_err(|error| format!("{}: {error}", path.display()))?;
        if rank == 0 && !compare(&golden, &found) {
            failed.push(golden.net);
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("past the bound: {}", failed.join(", ")).into()) }
}

fn read(path: &Path) -> Result<Golden, String> {
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let golden: Golden = serde_json::from_reader(BufReader::new(file))
        .map_err(|error| format!("{}: not a golden file: {error}", path.display()))?;
    Ok(golden)
}

/// Trains as the file says, this rank on its part of each batch.
fn repeat(
    golden: &Golden,
    train: &Dataset,
    comm: Box<dyn Communicator>,
    threads: usize,
) -> Result<Lists, Box<dyn Error>> {
    let (rank, ranks) = (comm.rank() as usize, comm.size() as usize);
    if !golden.batch.is_multiple_of(ranks) {
        return Err(format!("a batch of {} cannot be split over {ranks} ranks", golden.batch).into());
    }
    if golden.batch * golden.steps > train.len() {
        return Err(
            format!("needs {} training images of {}", golden.batch * golden.steps, train.len()).into()
        );
    }
    let batch = golden.batch / ranks;
    let mut net = Net::new(&Spec::named(&golden.net)?, batch, threads);
    let tensors: Vec<GoldenTensor> = net
        .layout()
        .tensors()
        .iter()
        .map(|tensor| GoldenTensor { name: tensor.name.clone(), shape: tensor.shape.clone() })
        .collect();
    if tensors != golden.tensors {
        return Err("its tensors are not those of the network".into());
    }
    let rule = match golden.optimizer {
        GoldenOptimizer::Adam { lr, beta1, beta2, eps } => {
            Rule::Adam(Adam { lr, beta1, beta2, eps, weight_decay: 0.0 })
        }
        GoldenOptimizer::RmsProp { lr, rho, eps, momentum } => {
            Rule::RmsProp(RmsProp { lr, rho, eps, momentum, weight_decay: 0.0 })
        }
    };
    let parameters = net.golden_parameters(golden.seed);
    let mut buffers = net.initial_buffers();
    let layout = net.layout().clone();
    let mut model = DataParallel::new(comm, layout.clone(), parameters, OptimizerConfig::new(rule), threads)?;
    let (mut images, mut labels) = (vec![0.0; batch * IMAGE_LEN], vec![0; batch]);
    let mut lists = Lists::default();
    for step in 0..golden.steps {
        let first = step * golden.batch + rank * batch;
        let samples: Vec<u32> = (first..first + batch).map(|sample| sample as u32).collect();
        train.gather(&samples, &mut images, &mut labels);
        let report = model.step(|parameters, sink| {
            net.forward(parameters, &mut buffers, &images, Mode::Train { dropout: None }, sink)?;
            net.backward(parameters, &labels, sink)
        })?;
        let mut loss = [report.loss()];
        model.comm().all_reduce_slice(&mut loss, ReduceOp::Avg)?;
        lists.loss.push(loss[0]);
        if step == 0 {
            lists.grad_norm = (0..tensors.len()).map(|tensor| norm(model.gradient(tensor))).collect();
        }
    }
    // The last batch's first image is rank 0's.
    lists.logits = net.logits()[..net.classes()].iter().copied().map(f64::from).collect();
    lists.param_norm =
        layout.tensors().iter().map(|tensor| norm(&model.parameters()[tensor.range()])).collect();
    model.verify()?;
    Ok(lists)
}

/// The L2 norm, summed in double precision.
fn norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

/// Prints the largest deviation of each list beside its bound. True if all are within.
fn compare(golden: &Golden, found: &Lists) -> bool {
    let relative = |expected: f64| expected.abs().max(1e-12);
    let absolute = |_: f64| 1.0;
    let single = golden.torch_f32_deviation;
    type List<'a> = (&'a str, &'a [f64], &'a [f64], f64, fn(f64) -> f64);
    let lists: [List<'_>; 4] = [
        ("loss", &golden.loss, &found.loss, single.loss, relative),
        ("grad_norm", &golden.grad_norm, &found.grad_norm, single.grad_norm, relative),
        ("param_norm", &golden.param_norm, &found.param_norm, single.param_norm, relative),
        ("logits", &golden.logits, &found.logits, single.logits, absolute),
    ];
    let mut within_all = true;
    for (name, expected, found, single, unit) in lists {
        let distances =
            expected.iter().zip(found).map(|(expected, found)| (expected - found).abs() / unit(*expected));
        let largest = distances.fold(0.0, largest_or_nan);
        let bound = (10.0 * single).max(1e-5);
        // A NaN is not within.
        let within = expected.len() == found.len() && largest <= bound;
        within_all &= within;
        let verdict = if within { "ok" } else { "PAST THE BOUND" };
        println!("{:<13} {name:<11} deviation {largest:9.2e}  bound {bound:9.2e}  {verdict}", golden.net);
    }
    within_all
}

/// The larger of both, NaN if either is.
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
