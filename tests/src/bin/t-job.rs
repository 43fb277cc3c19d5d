//! A well-behaved job with all phases in which faults are injected: `t-job [STEPS]`. It joins, creates a
//! communicator, and makes steps with an all-reduce each; after the third step it simulates writing a checkpoint.
//!
//! `t-job until-stopped`: all ranks but rank 0 join and leave; rank 0 asks whether it should stop until it should.

use std::io::{self, Write};
use std::process::ExitCode;

use mgpu::Phase;
use mgpu::{ReduceOp, Result, World};

fn main() -> ExitCode {
    let argument = std::env::args().nth(1);
    let done = match argument.as_deref() {
        Some("until-stopped") => wait_for_stop(),
        argument => {
            let steps = argument.map_or(5, |steps| steps.parse().expect("STEPS is a number"));
            run(steps).map(|()| ExitCode::SUCCESS)
        }
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(9)
        }
    }
}

fn wait_for_stop() -> Result<ExitCode> {
    let world = World::from_env()?;
    if world.rank() > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    while !world.stop_requested()? {
        std::thread::yield_now();
    }
    Ok(ExitCode::from(mgpu::protocol::EXIT_STOPPED))
}

fn run(steps: u64) -> Result<()> {
    let mut world = World::from_env()?;
    let mut comm = world.communicator()?;
    // Like a program with the default handling of SIGPIPE.
    if writeln!(io::stdout(), "life {}", world.restart_count()).is_err() {
        std::process::exit(141);
    }
    let mut values = vec![1.0f32; 10_000];
    for step in 1..=steps {
        world.report_step(step);
        comm.all_reduce_slice(&mut values, ReduceOp::Avg)?;
        if step == 3 {
            world.report_phase(Phase::Checkpoint);
            comm.barrier()?;
        }
    }
    comm.barrier()
}
