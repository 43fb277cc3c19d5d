//! A program that embeds the runtime and the launcher.
//!
//! `embed 4` needs no mgpurun: it uses the launcher's library to start four copies of itself as ranks and waits for
//! them. Each copy detects that it was launched ([`World::is_launched`]) and joins the world. Under `mgpurun -n 4
//! embed` the program is started as ranks directly, and a plain `embed` is a world of one rank.
//!
//! Signals belong to the program: here Ctrl-C and SIGTERM shut the ranks down.

use std::process::ExitCode;

use clap::Parser;
use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
use mgpu::{DataParallel, Layout, World};

use crate::print::{errln, outln, parse_arguments};

/// Number of points: at least one for each rank.
const POINTS: u32 = 100;

/// Fits a line to points that are distributed over ranks. Starts its own ranks, runs under a launcher, or alone.
#[derive(Debug, Parser)]
#[command(name = "embed", version)]
struct Args {
    /// Number of ranks to start, at most 100. Ignored if this process is a rank already.
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(POINTS)))]
    ranks: Option<u32>,
}

/// The program.
pub fn main() -> ExitCode {
    match parse_arguments::<Args>().ranks {
        Some(ranks) if !World::is_launched() => start_ranks(ranks),
        _ => crate::exit::report("embed", train()),
    }
}

/// Starts copies of this program as ranks and waits for them.
fn start_ranks(ranks: u32) -> ExitCode {
    let launch = || -> Result<u8, Box<dyn std::error::Error>> {
        let launch = mgpurun::Launch::new(std::env::current_exe()?).ranks(ranks);
        let interrupter = launch.interrupter();
        ctrlc::set_handler(move || interrupter.interrupt())?;
        Ok(launch.run()?.exit_code)
    };
    match launch() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            errln!("embed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Fits `y = a·x + b` to points; each rank has its own part of the points.
fn train() -> mgpu::Result<()> {
    let mut world = World::from_env()?;
    let (rank, size) = (world.rank(), world.size());
    let points: Vec<(f32, f32)> = (0..POINTS)
        .filter(|i| i % size == rank)
        .map(|i| i as f32 / (POINTS / 2) as f32 - 1.0)
        .map(|x| (x, 2.0 * x + 0.5))
        .collect();

    let mut layout = Layout::new();
    let (a, b) = (layout.push("a", [1]), layout.push("b", [1]));
    let rule = Rule::Sgd(Sgd { lr: 0.5, ..Sgd::default() });
    let mut model =
        DataParallel::new(world.communicator()?, layout, vec![0.0, 0.0], OptimizerConfig::new(rule), 1)?;
    for _ in 0..100 {
        model.step(|parameters, gradients| {
            let residual = |(x, y): &(f32, f32)| parameters[0] * x + parameters[1] - y;
            let mean = |sum: f32| sum / points.len() as f32;
            gradients.gradient(b)[0] = mean(points.iter().map(residual).sum());
            gradients.ready(b)?;
            gradients.gradient(a)[0] = mean(points.iter().map(|point| residual(point) * point.0).sum());
            gradients.ready(a)
        })?;
    }
    let checksum = model.verify()?;
    if rank == 0 {
        let [a, b] = [model.parameters()[0], model.parameters()[1]];
        outln!("{size} ranks agree on y = {a:.3} x + {b:.3} (weights {checksum:016x})");
    }
    Ok(())
}
