//! `mgpurun -n 4 hello_ring`: a token goes around the ranks, and each adds itself.
//!
//! The smallest program there is: join the world, make a communicator, talk to the neighbours.

use std::process::ExitCode;

use clap::Parser;
use mgpu::{Buffer, ReduceOp, World};

use crate::print::{outln, parse_arguments};

/// Sends a token around the ranks, to which each adds its number.
#[derive(Debug, Parser)]
#[command(name = "hello_ring", version)]
struct Args {}

/// The program.
pub fn main() -> ExitCode {
    let Args {} = parse_arguments();
    crate::exit::report("hello_ring", run())
}

fn run() -> mgpu::Result<()> {
    let mut world = World::from_env()?;
    let (rank, size) = (world.rank(), world.size());
    let mut comm = world.communicator()?;

    let mut token = Buffer::from_slice(&[0i64]);
    if size > 1 {
        let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
        // Rank 0 starts the token and gets it back last.
        if rank > 0 {
            token = comm.recv(token, left)?.wait()?;
        }
        token.as_mut_slice::<i64>()[0] += i64::from(rank);
        token = comm.send(token, right)?.wait()?;
        if rank == 0 {
            token = comm.recv(token, left)?.wait()?;
        }
    }
    let mut ranks = [i64::from(rank)];
    comm.all_reduce_slice(&mut ranks, ReduceOp::Sum)?;
    outln!("hello from rank {rank} of {size} ({} backend): the ranks sum to {}", comm.backend(), ranks[0]);
    if rank == 0 {
        outln!("the token came back with {}", token.as_slice::<i64>()[0]);
    }
    Ok(())
}
