//! `mgpurun -n 4 all_reduce`: estimates π. Every rank counts random points that fall into a circle, and one
//! all-reduce adds the counts of all ranks.

use std::process::ExitCode;

use clap::Parser;
use mgpu::{ReduceOp, World};
use mgpu_kernels::rng::Stream;

use crate::print::{outln, parse_arguments};

/// Estimates π: each rank throws random darts at a square and counts hits in a circle; an all-reduce adds the counts.
#[derive(Debug, Parser)]
#[command(name = "all_reduce", version)]
struct Args {
    /// Darts of each rank
    #[arg(long, default_value_t = 1_000_000)]
    darts: u32,
}

/// The program.
pub fn main() -> ExitCode {
    crate::exit::report("all_reduce", run(&parse_arguments()))
}

fn run(args: &Args) -> mgpu::Result<()> {
    let mut world = World::from_env()?;
    let (rank, size) = (world.rank(), world.size());
    let mut comm = world.communicator()?;

    // Each rank has its own stream of random numbers.
    let random = Stream::new(1, u64::from(rank));
    let in_circle = |dart: &u32| {
        let (x, y) = (random.uniform(2 * u64::from(*dart)), random.uniform(2 * u64::from(*dart) + 1));
        x * x + y * y < 1.0
    };
    let hits = (0..args.darts).filter(in_circle).count();

    let mut sums = [hits as f64, f64::from(args.darts)];
    comm.all_reduce_slice(&mut sums, ReduceOp::Sum)?;
    if rank == 0 {
        let [hits, darts] = sums;
        outln!(
            "{hits} of the {darts} darts of {size} ranks are in the circle: pi is about {:.3}",
            4.0 * hits / darts
        );
    }
    Ok(())
}
