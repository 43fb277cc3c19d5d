//! `mgpurun -n 2 mgpu-burn`: trains a burn model on generated digits, data-parallel.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use burn::backend::ndarray::NdArrayDevice;
use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::Backend;
use clap::Parser;
use mgpu::protocol::EXIT_STOPPED;
use mgpu::{ReduceOp, Sampler, SamplerConfig, World, evaluation_shard};
use mgpu_burn::{Classifier, Cpu};
use mgpu_examples::data::{Dataset, Split, digits};
use update::{Model, Update};

mod update;

/// Steps that are not timed, because memory is touched for the first time.
const WARM_UP: usize = 5;
/// Batch size of evaluation.
const TEST_BATCH: usize = 250;
const DEVICE: NdArrayDevice = NdArrayDevice::Cpu;

/// Trains a burn model on generated digits.
#[derive(Parser)]
struct Args {
    /// Training steps
    #[arg(long, default_value_t = 200)]
    steps: usize,
    /// Batch size of each rank, in images
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Learning rate
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Seed of the digits and of their order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of training images
    #[arg(long, default_value_t = 10_000)]
    train: usize,
    /// Number of test images
    #[arg(long, default_value_t = 2_000)]
    test: usize,
    /// Who averages the gradients and updates the weights
    #[arg(long, value_enum, default_value_t = Update::Replica)]
    update: Update,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            // If standard error fails too, there is nowhere to report it.
            let _ = writeln!(io::stderr(), "mgpu-burn: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let mut world = World::from_env()?;
    let (rank, ranks, threads) = (world.rank(), world.size(), world.thread_share());
    if args.update == Update::Burn && ranks > 1 {
        return Err(format!("--update burn trains on one rank, and there are {ranks}").into());
    }
    // burn computes on rayon's threads: use this rank's share of the cores, not all of them.
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;

    Cpu::seed(&DEVICE, args.seed);
    let module = Classifier::<Cpu>::new(&DEVICE);
    let parameters = module.num_params();
    let mut model = Model::new(args.update, world.communicator()?, module, args.lr, threads)?;
    if rank == 0 {
        let images = args.batch * ranks as usize;
        writeln!(
            io::stdout(),
            "burn, {parameters} parameters; ranks: {ranks}, threads of each: {threads}, images a step: {images}"
        )?;
    }

    let train = generate(args.seed, Split::Train, args.train);
    let (samples, batch, seed) = (train.len(), args.batch, args.seed);
    let mut sampler = Sampler::new(SamplerConfig { samples, batch, rank, ranks, seed })?;
    let mut start = Instant::now();
    for step in 0..args.steps {
        if step == WARM_UP {
            start = Instant::now();
        }
        // All ranks stop after the same step. A longer training would save a checkpoint here.
        if world.stop_requested()? {
            if rank == 0 {
                writeln!(io::stdout(), "stopped on request after step {step}")?;
            }
            return Ok(ExitCode::from(EXIT_STOPPED));
        }
        world.report_step(step as u64 + 1);
        let (epoch, batch) = (step / sampler.steps_per_epoch(), step % sampler.steps_per_epoch());
        let (loss, _) = model.module().loss(&train, sampler.batch(epoch as u64, batch), &DEVICE);
        model.step(loss)?;
    }
    let timed = args.steps.saturating_sub(WARM_UP) * args.batch * ranks as usize;
    let images_per_s = timed as f64 / start.elapsed().as_secs_f64();

    // Each rank tests its shard; the counts are summed.
    let test = generate(args.seed, Split::Test, args.test);
    let shard: Vec<u32> = evaluation_shard(test.len(), rank, ranks)?.map(|sample| sample as u32).collect();
    let mut right = [0i64];
    let trained = model.module().valid();
    for samples in shard.chunks(TEST_BATCH) {
        right[0] += i64::from(trained.loss(&test, samples, &DEVICE).1);
    }
    model.comm().all_reduce_slice(&mut right, ReduceOp::Sum)?;
    let weights = model.verify()?;
    if rank == 0 {
        let accuracy = 100.0 * right[0] as f64 / test.len() as f64;
        let mut stdout = io::stdout();
        writeln!(stdout, "{} steps: {images_per_s:.0} images/s; test {accuracy:.2}%", args.steps)?;
        if let Some(weights) = weights {
            writeln!(stdout, "weights {weights:016x} on all ranks")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn generate(seed: u64, split: Split, count: usize) -> Dataset {
    let (images, labels) = digits::generate(seed, split, 0..count);
    Dataset { images, labels }
}
