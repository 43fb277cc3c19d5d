//! `mgpurun -n 2 own_optimizer`: like [`train_mlp`](crate::train_mlp), with an optimizer that the runtime does not
//! provide.
//!
//! [`mgpu::Reducer`] averages gradients and contains no optimizer. The program does the rest of data-parallel
//! training: it starts with the same parameters on every rank and applies the same update on every rank, so
//! parameters stay equal.

use std::ops::Range;
use std::process::ExitCode;

use clap::Parser;
use mgpu::replicate::{replicate, verify_equal};
use mgpu::{Reducer, ReducerConfig, Sampler, SamplerConfig, World};

use crate::data::{Dataset, Split, digits};
use crate::nets::{Mode, Net, Spec};
use crate::print::{outln, parse_arguments};

/// Global batch size in images.
const BATCH: usize = 120;
const TRAINING_IMAGES: usize = 3000;
const SEED: u64 = 1;

/// Trains a small network on generated digits with a custom optimizer.
#[derive(Debug, Parser)]
#[command(name = "own_optimizer", version)]
struct Args {
    /// Training steps
    #[arg(long, default_value_t = 150)]
    steps: usize,
}

/// The program.
pub fn main() -> ExitCode {
    crate::exit::report_code("own_optimizer", train(&parse_arguments()).map_err(|error| error.to_string()))
}

fn train(args: &Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let mut world = World::from_env()?;
    let (rank, ranks) = (world.rank(), world.size());
    let batch = (BATCH / ranks as usize).max(1);
    let mut net = Net::new(&Spec::named("mlp-gelu")?, batch, world.thread_share());
    let mut comm = world.communicator()?;

    let (layout, mut parameters) = (net.layout().clone(), net.initial_parameters(SEED));
    replicate(&mut comm, &layout, &mut parameters)?;
    let mut lion = Lion { lr: 2e-4, momentum: vec![0.0; parameters.len()] };
    let mut reducer = Reducer::new(comm, layout.clone(), ReducerConfig::new())?;

    let (images, labels) = digits::generate(SEED, Split::Train, 0..TRAINING_IMAGES);
    let data = Dataset { images, labels };
    let mut sampler = Sampler::new(SamplerConfig { samples: data.len(), batch, rank, ranks, seed: SEED })?;
    let (mut images, mut labels) = (vec![0.0; batch * net.image_len()], vec![0; batch]);
    for step in 0..args.steps {
        // All ranks stop after the same step. A longer training would save its state here.
        if world.stop_requested()? {
            if rank == 0 {
                outln!("stopped on request after step {step}");
            }
            return Ok(crate::exit::stopped());
        }
        let (epoch, place) = (step / sampler.steps_per_epoch(), step % sampler.steps_per_epoch());
        data.gather(sampler.batch(epoch as u64, place), &mut images, &mut labels);

        let report = reducer.reduce(|gradients| {
            net.forward(&parameters, &mut [], &images, Mode::Train { dropout: None }, gradients)?;
            net.backward(&parameters, &labels, gradients)
        })?;
        for tensor in 0..layout.tensors().len() {
            lion.update(&mut parameters, layout.range(tensor), reducer.gradient(tensor)?);
        }
        if rank == 0 && (step + 1) % 50 == 0 {
            outln!("step {}: loss {:.4} on rank 0", step + 1, report.loss());
        }
    }
    let weights = verify_equal(reducer.comm(), &layout, &parameters)?;
    if rank == 0 {
        outln!("{ranks} ranks: weights {weights:016x} on all");
    }
    Ok(ExitCode::SUCCESS)
}

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): every parameter changes by the same
/// amount.
struct Lion {
    lr: f32,
    momentum: Vec<f32>,
}

impl Lion {
    /// Updates one tensor, at `range` of the parameters.
    fn update(&mut self, parameters: &mut [f32], range: Range<usize>, gradient: &[f32]) {
        let (parameters, momentum) = (&mut parameters[range.clone()], &mut self.momentum[range]);
        for ((parameter, momentum), gradient) in parameters.iter_mut().zip(momentum).zip(gradient) {
            let direction = 0.9 * *momentum + 0.1 * gradient;
            if direction != 0.0 {
                *parameter -= self.lr * direction.signum();
            }
            *momentum = 0.99 * *momentum + 0.01 * gradient;
        }
    }
}
