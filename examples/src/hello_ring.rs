//! `mgpurun -n 4 hello_ring`: sends a token around the ranks; each rank adds its number to it.
//!
//! The smallest program: join the world, create a communicator, exchange messages with the neighbours.

use std::process::ExitCode;

use clap::Parser;
use mgpu::{Buffer, ReduceOp, World};

use crate::print::{outln, parse_arguments};

/// Sends a token around the ring of ranks; each rank adds its number to it.
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
        // Rank 0 sends the token first and receives it last.
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
