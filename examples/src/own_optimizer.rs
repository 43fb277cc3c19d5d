//! `mgpurun -n 2 own_optimizer`: as [`train_mlp`](crate::train_mlp), with an optimizer that the runtime does not have.
//!
//! What is left of data-parallel training without [`mgpu::DataParallel`]: begin with the same parameters, average the
//! gradients, and apply the same update on every rank. Parameters then stay equal by themselves.

use std::process::ExitCode;

use clap::Parser;
use mgpu::replicate::{replicate, verify_equal};
use mgpu::{Buffer, DType, GradientSink, Layout, ReduceOp, Sampler, SamplerConfig, World};

use crate::data::{Dataset, Split, digits};
use crate::nets::{Mode, Net, Spec};
use crate::print::{outln, parse_arguments};

/// Images of a batch, all ranks together.
const BATCH: usize = 120;
const TRAINING_IMAGES: usize = 3000;
const SEED: u64 = 1;

/// Trains a small network on generated digits, with an optimizer of the program's own.
#[derive(Debug, Parser)]
#[command(name = "own_optimizer", version)]
struct Args {
    /// Training steps
    #[arg(long, default_value_t = 150)]
    steps: usize,
}

/// The program.
pub fn main() -> ExitCode {
    crate::exit::report("own_optimizer", train(&parse_arguments()).map_err(|error| error.to_string()))
}

fn train(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let mut world = World::from_env()?;
    let (rank, ranks) = (world.rank(), world.size());
    let batch = (BATCH / ranks as usize).max(1);
    let mut net = Net::new(&Spec::named("mlp-gelu")?, batch, world.thread_share());
    let mut comm = world.communicator()?;

    let (layout, mut parameters) = (net.layout().clone(), net.initial_parameters(SEED));
    replicate(&mut *comm, &layout, &mut parameters)?;
    let mut lion = Lion { lr: 2e-4, momentum: vec![0.0; parameters.len()] };
    // From the communicator, so that ranks on a CPU sum it in place.
    let mut gradients = comm.allocate(DType::F32, layout.len())?;

    let (images, labels) = digits::generate(SEED, Split::Train, 0..TRAINING_IMAGES);
    let data = Dataset { images, labels };
    let mut sampler = Sampler::new(SamplerConfig { samples: data.len(), batch, rank, ranks, seed: SEED })?;
    let (mut images, mut labels) = (vec![0.0; batch * net.image_len()], vec![0; batch]);
    for step in 0..args.steps {
        let (epoch, place) = (step / sampler.steps_per_epoch(), step % sampler.steps_per_epoch());
        data.gather(sampler.batch(epoch as u64, place), &mut images, &mut labels);

        let mut sink = Gradients { layout: &layout, values: &mut gradients };
        net.forward(&parameters, &mut [], &images, Mode::Train { dropout: None }, &mut sink)?;
        let report = net.backward(&parameters, &labels, &mut sink)?;
        gradients = comm.all_reduce(gradients, ReduceOp::Avg)?.wait()?;
        lion.update(&mut parameters, gradients.as_slice());
        if rank == 0 && (step + 1) % 50 == 0 {
            outln!("step {}: loss {:.4} on rank 0", step + 1, report.loss());
        }
    }
    let weights = verify_equal(&mut *comm, &layout, &parameters)?;
    if rank == 0 {
        outln!("{ranks} ranks: weights {weights:016x} on all");
    }
    Ok(())
}

/// Where the network writes its gradients. They are reduced together, once all are there.
struct Gradients<'a> {
    layout: &'a Layout,
    values: &'a mut Buffer,
}

impl GradientSink for Gradients<'_> {
    fn gradient(&mut self, tensor: usize) -> &mut [f32] {
        &mut self.values.as_mut_slice()[self.layout.range(tensor)]
    }

    fn ready(&mut self, _: usize) -> mgpu::Result<()> {
        Ok(())
    }

    /// For batch normalisation, which this network does without.
    fn sum_over_ranks(&mut self, _: &mut [f64]) -> mgpu::Result<()> {
        Ok(())
    }
}

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): every parameter moves by the same amount.
struct Lion {
    lr: f32,
    momentum: Vec<f32>,
}

impl Lion {
    fn update(&mut self, parameters: &mut [f32], gradients: &[f32]) {
        for ((parameter, momentum), gradient) in parameters.iter_mut().zip(&mut self.momentum).zip(gradients)
        {
            let direction = 0.9 * *momentum + 0.1 * gradient;
            if direction != 0.0 {
                *parameter -= self.lr * direction.signum();
            }
            *momentum = 0.99 * *momentum + 0.01 * gradient;
        }
    }
}
