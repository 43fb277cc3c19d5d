//! `mgpurun -n 2 train_mlp`: trains a small network on generated digits, data-parallel.
//!
//! Data-parallel training adds three things to a training loop: [`DataParallel`] holds the parameters and makes them
//! equal on all ranks once; [`Sampler`] gives each rank its part of every batch; [`DataParallel::step`] averages
//! gradients over ranks before the update. `train_mnist` is a complete training program.

use std::process::ExitCode;

use clap::Parser;
use mgpu::evaluation_shard;
use mgpu::optimizer::{Adam, OptimizerConfig, Rule};
use mgpu::{DataParallel, ReduceOp, Sampler, SamplerConfig, World};

use crate::data::{Dataset, Split, digits};
use crate::nets::{Mode, Net, Spec};
use crate::print::{outln, parse_arguments};

/// Global batch size in images.
const BATCH: usize = 120;
const TRAINING_IMAGES: usize = 3000;
const TEST_IMAGES: usize = 500;
const SEED: u64 = 1;

/// Trains a small network on generated digits with an optimizer of the runtime.
#[derive(Debug, Parser)]
#[command(name = "train_mlp", version)]
struct Args {
    /// Training steps
    #[arg(long, default_value_t = 150)]
    steps: usize,
}

/// The program.
pub fn main() -> ExitCode {
    crate::exit::report_code("train_mlp", train(&parse_arguments()).map_err(|error| error.to_string()))
}

fn train(args: &Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let mut world = World::from_env()?;
    let (rank, ranks, threads) = (world.rank(), world.size(), world.thread_share());
    let batch = (BATCH / ranks as usize).max(1);

    // The network computes; the program owns the parameters, one slice.
    let mut net = Net::new(&Spec::named("mlp-gelu")?, batch, threads);
    let mut statistics = net.initial_buffers();
    let adam = OptimizerConfig::new(Rule::Adam(Adam { lr: 1e-3, ..Adam::default() }));
    let (layout, start) = (net.layout().clone(), net.initial_parameters(SEED));
    let mut model = DataParallel::new(world.communicator()?, layout, start, adam, threads)?;

    let data = generated(Split::Train, TRAINING_IMAGES);
    let mut sampler = Sampler::new(SamplerConfig { samples: data.len(), batch, rank, ranks, seed: SEED })?;
    let (mut images, mut labels) = (vec![0.0; batch * net.image_len()], vec![0; batch]);
    for step in 0..args.steps {
        // All ranks stop after the same step. A longer training would save a checkpoint here, as `train_mnist` does.
        if world.stop_requested()? {
            if rank == 0 {
                outln!("stopped on request after step {step}");
            }
            return Ok(crate::exit::stopped());
        }
        let (epoch, place) = (step / sampler.steps_per_epoch(), step % sampler.steps_per_epoch());
        data.gather(sampler.batch(epoch as u64, place), &mut images, &mut labels);
        let report = model.step(|parameters, gradients| {
            net.forward(parameters, &mut statistics, &images, Mode::Train { dropout: None }, gradients)?;
            net.backward(parameters, &labels, gradients)
        })?;
        if rank == 0 && (step + 1) % 50 == 0 {
            outln!("step {}: loss {:.4} on rank 0", step + 1, report.loss());
        }
    }

    // Each rank tests its part; the counts are summed.
    let test = generated(Split::Test, TEST_IMAGES);
    let part: Vec<u32> = evaluation_shard(test.len(), rank, ranks)?.map(|sample| sample as u32).collect();
    let mut right = [0i64];
    for samples in part.chunks(batch) {
        let (images, labels) = (&mut images[..samples.len() * net.image_len()], &mut labels[..samples.len()]);
        test.gather(samples, images, labels);
        net.predict(model.parameters(), &statistics, images);
        right[0] += net.score(labels).correct as i64;
    }
    model.comm().all_reduce_slice(&mut right, ReduceOp::Sum)?;
    let weights = model.verify()?;
    if rank == 0 {
        outln!(
            "{ranks} ranks: {} of {TEST_IMAGES} test images correct; weights {weights:016x} on all",
            right[0]
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn generated(split: Split, count: usize) -> Dataset {
    let (images, labels) = digits::generate(SEED, split, 0..count);
    Dataset { images, labels }
}
