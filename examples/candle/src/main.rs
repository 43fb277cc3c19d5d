//! `mgpurun -n 2 mgpu-candle`: trains a candle model on generated digits, data-parallel.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use mgpu::optimizer::{Adam, OptimizerConfig, Rule};
use mgpu::protocol::EXIT_STOPPED;
use mgpu::{ReduceOp, Sampler, World};
use mgpu::{SamplerConfig, evaluation_shard};
use mgpu_candle::Classifier;
#[cfg(feature = "cuda")]
use mgpu_candle::DeviceReplica;
#[cfg(not(feature = "cuda"))]
use mgpu_candle::Replica;
use mgpu_examples::data::{Dataset, Split, digits};

/// Steps that are not timed, because memory is touched for the first time.
const WARM_UP: usize = 5;
/// Batch size of evaluation.
const TEST_BATCH: usize = 250;

/// Trains a candle model on generated digits.
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
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            // If standard error fails too, there is nowhere to report it.
            let _ = writeln!(io::stderr(), "mgpu-candle: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let mut world = World::from_env()?;
    let (rank, ranks, threads) = (world.rank(), world.size(), world.thread_share());
    // candle computes on rayon's threads: use this rank's share of the cores, not all of them.
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;

    let adam = OptimizerConfig::new(Rule::Adam(Adam { lr: args.lr, ..Adam::default() }));
    let (classifier, mut replica) = create(&mut world, adam)?;
    if rank == 0 {
        let parameters: usize = replica.parallel().layout().tensors().iter().map(|tensor| tensor.len()).sum();
        let images = args.batch * ranks as usize;
        writeln!(
            io::stdout(),
            "candle, {parameters} parameters; ranks: {ranks}, threads of each: {threads}, images a step: {images}"
        )?;
    }

    let train = generate(args.seed, Split::Train, args.train);
    let (samples, batch, seed) = (train.len(), args.batch, args.seed);
    let mut sampler = Sampler::new(SamplerConfig { samples, batch, rank, ranks, seed })?;
    let mut start = Instant::now();
    for step in 0..args.steps {
        if step == WARM_UP {
            #[cfg(feature = "cuda")]
            replica.parallel().check()?;
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
        let (loss, _) = classifier.loss(&train, sampler.batch(epoch as u64, batch))?;
        replica.step(&loss)?;
    }
    // On a GPU the host is ahead: wait for the last step, and for its errors.
    #[cfg(feature = "cuda")]
    replica.parallel().check()?;
    let timed = args.steps.saturating_sub(WARM_UP) * args.batch * ranks as usize;
    let images_per_s = timed as f64 / start.elapsed().as_secs_f64();

    // Each rank tests its shard; the counts are summed.
    let test = generate(args.seed, Split::Test, args.test);
    let shard: Vec<u32> = evaluation_shard(test.len(), rank, ranks)?.map(|sample| sample as u32).collect();
    let mut right = [0i64];
    for samples in shard.chunks(TEST_BATCH) {
        right[0] += i64::from(classifier.loss(&test, samples)?.1.to_scalar::<u32>()?);
    }
    replica.parallel().comm().all_reduce_slice(&mut right, ReduceOp::Sum)?;
    let weights = replica.parallel().verify()?;
    if rank == 0 {
        let accuracy = 100.0 * right[0] as f64 / test.len() as f64;
        let mut stdout = io::stdout();
        writeln!(stdout, "{} steps: {images_per_s:.0} images/s; test {accuracy:.2}%", args.steps)?;
        writeln!(stdout, "weights {weights:016x} on all ranks")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The classifier, with the same variables on all ranks.
#[cfg(not(feature = "cuda"))]
fn create(world: &mut World, optimizer: OptimizerConfig) -> Result<(Classifier, Replica), Box<dyn Error>> {
    let variables = VarMap::new();
    let classifier = Classifier::new(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let replica = Replica::new(world.communicator()?, &variables, optimizer, world.thread_share())?;
    Ok((classifier, replica))
}

/// The classifier, with the same variables on all ranks, on the GPU that the launcher has given this rank.
#[cfg(feature = "cuda")]
fn create(
    world: &mut World,
    optimizer: OptimizerConfig,
) -> Result<(Classifier, DeviceReplica), Box<dyn Error>> {
    let (comm, host) = world.communicators()?;
    let device = Device::new_cuda(comm.device().ordinal() as usize)?;
    let variables = VarMap::new();
    let classifier = Classifier::new(VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let replica = DeviceReplica::new(comm, host, &device, &variables, optimizer)?;
    Ok((classifier, replica))
}

fn generate(seed: u64, split: Split, count: usize) -> Dataset {
    let (images, labels) = digits::generate(seed, split, 0..count);
    Dataset { images, labels }
}
