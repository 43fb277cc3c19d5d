//! `mgpurun -n 4 ensemble`: trains several networks at once, each on a group of the ranks, and averages their
//! predictions.
//!
//! The ranks are split into as many groups as there are networks. Each group trains its network data-parallel, with a
//! communicator of its own, and waits for another group only at the end. With fewer ranks than networks, a rank
//! trains several networks one after the other.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use mgpu::replicate::verify_settings;
use mgpu::{Communicator, DataParallel, ReduceOp, Sampler, SamplerConfig, World, evaluation_shard};

use crate::data::{Dataset, IMAGE_LEN, Mnist, idx};
use crate::nets::{DropoutKey, Mode, Net, Spec};
use crate::parallel::positive;
use crate::print::{outln, parse_arguments};

const SEED: u64 = 1;

/// Trains several networks at once, each on a group of the ranks, and averages their predictions.
#[derive(Debug, Parser)]
#[command(
    name = "ensemble",
    version,
    after_help = "Example: mgpurun -n 2 ensemble --nets ensemble2400,ensemble4800"
)]
struct Args {
    /// The networks, separated by commas. A network may occur several times: each has another seed.
    #[arg(long, value_name = "NAMES", default_value = "ensemble2400,ensemble4800", value_delimiter = ',', value_parser = parse_net)]
    nets: Vec<Spec>,
    /// Epochs: passes over the training set.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Training steps of each network, instead of --epochs.
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Batch size of each rank, in images [default: the network's own].
    #[arg(long, value_name = "N", value_parser = positive)]
    batch: Option<usize>,
    /// Folder with the four MNIST files [default: $MGPU_DATA, or else generated digits].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

fn parse_net(text: &str) -> Result<Spec, String> {
    Spec::named(text).map_err(|error| error.to_string())
}

/// The program.
pub fn main() -> ExitCode {
    crate::exit::report("ensemble", run(&parse_arguments()).map_err(|error| error.to_string()))
}

fn run(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let mut world = World::from_env()?;
    let (rank, ranks, nets) = (world.rank(), world.size(), args.nets.len());
    let mut comm = world.communicator()?;
    let names: Vec<&str> = args.nets.iter().map(|net| net.name.as_str()).collect();
    let flags = format!("{:?} {:?} {:?}", args.epochs, args.steps, args.batch);
    verify_settings(&mut comm, &[("--nets", names.join(",")), ("--epochs, --steps, --batch", flags)])?;
    let data = match args.data.clone().or_else(|| std::env::var_os("MGPU_DATA").map(PathBuf::from)) {
        Some(folder) => idx::read(&folder)?,
        None => Mnist::generate(SEED),
    };

    // Neighbouring ranks form a group; a group trains every groups-th network.
    let groups = ranks.min(nets as u32);
    let group = rank * groups / ranks;
    let mut members = comm.split(Some(group), 0)?.expect("every rank is in a group");
    let mut predictions = vec![vec![0.0; data.test.len() * 10]; nets];
    for net in (group as usize..nets).step_by(groups as usize) {
        let seed = SEED + net as u64;
        // Each network has a communicator of its own; only the ranks of the group take part in this.
        let own = members.split(Some(0), 0)?.expect("every member is in it");
        let mut model =
            Model::new(&args.nets[net], own, (args.batch, data.train.len()), world.thread_share(), seed)?;
        model.train(&data.train, args)?;
        predictions[net] = model.predict(&data.test)?;
    }

    // Every image was predicted by one rank of each group; the sums over all ranks are all predictions.
    let mut average = vec![0.0; data.test.len() * 10];
    if rank == 0 {
        outln!("{nets} networks on {ranks} ranks in {groups} groups; {}", data.origin);
    }
    for (net, name) in names.iter().enumerate() {
        comm.all_reduce_slice(&mut predictions[net], ReduceOp::Sum)?;
        average.iter_mut().zip(&predictions[net]).for_each(|(sum, probability)| *sum += probability);
        if rank == 0 {
            outln!("{name}: test accuracy {:.2}%", accuracy(&predictions[net], &data.test));
        }
    }
    if rank == 0 {
        outln!("average of their predictions: test accuracy {:.2}%", accuracy(&average, &data.test));
    }
    Ok(())
}

/// A network in training on a group of ranks.
struct Model {
    net: Net,
    state: DataParallel,
    sampler: Sampler,
    batch: usize,
    seed: u64,
}

impl Model {
    fn new(
        spec: &Spec,
        group: Communicator,
        (batch, samples): (Option<usize>, usize),
        threads: usize,
        seed: u64,
    ) -> mgpu::Result<Self> {
        let batch = batch.unwrap_or(spec.batch);
        let sampler =
            Sampler::new(SamplerConfig { samples, batch, rank: group.rank(), ranks: group.size(), seed })?;
        let net = Net::new(spec, batch, threads);
        let parameters = net.initial_parameters(seed);
        let state = DataParallel::new(group, net.layout().clone(), parameters, spec.optimizer, threads)?;
        let state = state.with_buffers(net.initial_buffers())?;
        Ok(Model { net, state, sampler, batch, seed })
    }

    fn train(&mut self, data: &Dataset, args: &Args) -> Result<(), Box<dyn std::error::Error>> {
        let Model { net, state, sampler, batch, seed } = self;
        let rank = state.rank();
        let per_epoch = sampler.steps_per_epoch() as u64;
        let (mut images, mut labels) = (vec![0.0; *batch * IMAGE_LEN], vec![0; *batch]);
        for step in 0..args.steps.unwrap_or(args.epochs * per_epoch) {
            data.gather(
                sampler.batch(step / per_epoch, (step % per_epoch) as usize),
                &mut images,
                &mut labels,
            );
            let first_sample = *batch as u64 * u64::from(rank);
            let mode = Mode::Train { dropout: Some(DropoutKey { seed: *seed, step, first_sample }) };
            state.step_accumulated(|step| {
                net.forward(step.parameters, step.buffers, &images, mode, step.gradients)?;
                net.backward(step.parameters, &labels, step.gradients).map(drop)
            })?;
        }
        Ok(())
    }

    /// The probabilities \[images, 10\] of this rank's share of the images; 0 for the others.
    fn predict(&mut self, data: &Dataset) -> mgpu::Result<Vec<f32>> {
        let Model { net, state, batch, .. } = self;
        let (mut images, mut labels) = (vec![0.0; *batch * IMAGE_LEN], vec![0; *batch]);
        let share: Vec<u32> =
            evaluation_shard(data.len(), state.rank(), state.ranks())?.map(|image| image as u32).collect();
        let mut predictions = vec![0.0; data.len() * 10];
        for samples in share.chunks(*batch) {
            let images = &mut images[..samples.len() * IMAGE_LEN];
            data.gather(samples, images, &mut labels[..samples.len()]);
            let logits = net.predict(state.parameters(), state.buffers(), images);
            for (sample, logits) in samples.iter().zip(logits.chunks(10)) {
                softmax(logits, &mut predictions[*sample as usize * 10..][..10]);
            }
        }
        Ok(predictions)
    }
}

fn softmax(logits: &[f32], probabilities: &mut [f32]) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for (probability, logit) in probabilities.iter_mut().zip(logits) {
        *probability = (logit - largest).exp();
    }
    let sum: f32 = probabilities.iter().sum();
    probabilities.iter_mut().for_each(|probability| *probability /= sum);
}

/// The share of images whose most probable class is their label, in per cent.
fn accuracy(predictions: &[f32], data: &Dataset) -> f64 {
    let class = |row: &[f32]| (0..10).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0) as u8;
    let right = predictions.chunks(10).zip(&data.labels).filter(|(row, label)| class(row) == **label).count();
    100.0 * right as f64 / data.len() as f64
}
