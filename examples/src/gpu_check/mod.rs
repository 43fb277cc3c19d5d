//! `gpu_check`: verifies every CUDA kernel on a GPU.
//!
//! The project's tests run the CUDA kernels on a fake GPU, built with another compiler. This program launches them
//! through their public functions on a real GPU, with new random numbers, for the shapes of the networks and for
//! unusual ones, in all precisions. Each result is compared
//!
//! - with the CPU implementation of the operation or, where rounding matters, with a sum in f64 (`reference`) of
//!   operands rounded to the precision, within a derived bound (`bound`);
//! - with itself: every kernel is launched twice, on different initial contents, and must give the same bits;
//! - with its limits: the bytes around each output must stay unchanged.
//!
//! Each check prints a line with its error and the allowed error. Exit code 1 if one is larger.

mod arena;
mod args;
mod bandwidth;
mod bound;
mod candidates;
mod compile;
mod conv;
mod dropout;
mod flip;
mod fused;
mod gather;
mod gathered;
mod gelu;
mod harness;
mod layers;
mod links;
mod loss;
mod network_layers;
mod norm;
mod optimizer;
mod plain;
mod pool;
mod reference;
mod replay;
mod report;
mod shapes;
mod slices;
mod steps;
mod values;

use std::error::Error;
use std::process::ExitCode;

use mgpu_kernels::cuda::{Device, Stream, compiler_version, sources};

use args::Args;
use harness::Harness;
use report::{Machine, Report};

use crate::print::{self, errln, outln};

/// Part of the name of a fake GPU. Its times mean nothing.
pub(crate) const FAKE: &str = "FAKE GPU";

/// Runs the program.
pub fn main() -> ExitCode {
    let args: Args = print::parse_arguments();
    match run(&args) {
        Ok(true) => print::exit_code(ExitCode::SUCCESS),
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            errln!("gpu_check: {error}");
            ExitCode::FAILURE
        }
    }
}

/// True if all checks passed.
fn run(args: &Args) -> Result<bool, Box<dyn Error>> {
    if args.list {
        for source in sources() {
            source.kernels().iter().for_each(|kernel| outln!("{}/{kernel}", source.name));
        }
        return Ok(true);
    }
    if args.compile_only {
        return Ok(compile::run(args.table)?);
    }
    if args.links {
        return Ok(links::run()?);
    }
    let device = Device::open(args.device)?;
    let machine = Machine::of(&device, compiler_version().ok());
    outln!("{machine}");
    let fake = device.name().contains(FAKE);
    if args.steps {
        return steps::run(&machine, args, fake);
    }
    let stream = Stream::new(&device)?;
    if args.layers {
        return candidates::run(&stream, &machine, args, fake);
    }
    if args.bandwidth {
        if fake {
            outln!("a fake GPU is not measured");
            return Ok(true);
        }
        let figures = bandwidth::measure(&stream)?;
        figures.iter().for_each(|figure| outln!("{}: {figure}", device.name()));
        report::write(args.json.as_deref(), &(machine, figures))?;
        return Ok(true);
    }
    let seed = args.seed();
    outln!("seed {seed}{}", if args.quick { ", quick" } else { "" });
    let mut harness = Harness::new(stream, seed, args.quick, args.only.clone());
    let checks: [fn(&mut Harness) -> harness::Outcome; 16] = [
        arena::check,
        pool::check,
        norm::check,
        dropout::check,
        gather::check,
        gelu::check,
        loss::check,
        optimizer::check,
        replay::check,
        flip::check,
        plain::check,
        conv::check,
        slices::check,
        fused::check,
        gathered::check,
        layers::check,
    ];
    // A kernel that damages the GPU ends all later checks; the results so far are reported.
    let ended = checks.into_iter().try_for_each(|check| check(&mut harness));
    let Report { checks, failed } = harness.finish();
    let launched = device.kernels();
    let all = sources().into_iter().flat_map(|source| source.kernels());
    let all = all.filter(|kernel| mgpu_kernels::conv::cuda::exists(kernel, device.architecture()));
    let unreached: Vec<&str> = all.filter(|kernel| !launched.iter().any(|name| name == kernel)).collect();
    let complete = args.only.is_none() && !args.quick && ended.is_ok();
    if args.only.is_none() && !unreached.is_empty() {
        outln!("kernels without a check: {}", unreached.join(", "));
    }
    if let Err(error) = &ended {
        outln!("FAILED: {error}; the remaining checks were not run");
    }
    outln!("{} checks on {}, {failed} failed", checks.len(), device.name());
    let good = failed == 0 && ended.is_ok() && (unreached.is_empty() || !complete);
    let error = ended.err().map(|error| error.to_string());
    let summary = report::Summary { machine, seed, quick: args.quick, failed, unreached, error, checks };
    report::write(args.json.as_deref(), &summary)?;
    Ok(good)
}
