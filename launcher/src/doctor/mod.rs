//! `mgpurun doctor`: reports what this machine has of what ranks may need, and what to install for the rest.
//!
//! It checks files and queries the kernel. It opens no library, because a broken library may crash while it is loaded; but
//! for UCX, whose file does not tell the version, and which is opened in another process.
//! All its inputs are in [`Host`], including the root of the file system, so that tests can fake machines.
//!
//! | module | part |
//! |---|---|
//! | `system` | kernel, cores, memory, limits, and the kernel features that the CPU backend needs |
//! | `nvidia` | driver, GPUs, device files |
//! | `libraries` | the NVIDIA libraries |
//! | `network` | what connects ranks of different hosts |
//! | `report` | findings → text |
//! | `nodes` | `--nodes`: all nodes of a job, and every pair of them |
//! | `trial` | `--test`: ranks and copies really run |
//!
//! The exit code is 0 if the CPU backend can be used, which works on every machine unless something is broken. A machine
//! without GPUs is healthy.

mod libraries;
mod loader;
mod network;
mod nodes;
mod nvidia;
mod report;
mod system;
mod trial;

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::cli::{NodeArgs, parse_seconds};
use crate::nodes::net::probe_ucx;
use crate::plan::NCCL_IS_BUILT;
use crate::{exit_code, stdout};
use report::{Item, Mark, Report, Section};
pub(crate) use system::Host;

/// Show this machine's cores, memory, GPUs, drivers and libraries, and what is missing for ranks.
///
/// Nothing is started or changed. The exit code is 0 if the cpu backend can be used, else 1. On a machine without GPUs what
/// is missing for GPUs is only counted: --all lists it.
///
/// With --test two ranks really run on the CPU: they join, share memory and reduce, and the times are compared with what
/// this machine needs for the memory traffic alone. Where CUDA's driver is found, copies from, to and between GPUs are
/// measured, and NCCL reduces over all of them. All this takes less than 20 s. The exit code is 1 if a test fails.
///
/// With --nodes the nodes of a job check each other: names, addresses, ports, clocks, versions, round trips and
/// bandwidth. Start it in the same way as the job: `srun ... mgpurun doctor --nodes`, or mgpurun doctor --nodes --hosts a,b.
/// The exit code is 0 if no problem is found, else 1.
///
/// To start a program named doctor: mgpurun -- doctor
#[derive(Debug, Parser)]
#[command(name = "mgpurun doctor", bin_name = "mgpurun doctor", max_term_width = 100)]
pub(crate) struct Args {
    /// Print the report as one JSON object.
    #[arg(long)]
    json: bool,

    /// Start ranks on the CPU and on GPUs, measure copies between GPUs, and explain what fails or is slow.
    #[arg(long, conflicts_with = "nodes")]
    test: bool,

    /// Also list what is missing for GPUs on a machine without one.
    #[arg(long)]
    all: bool,

    /// Check all nodes of a job, and every pair of them.
    #[arg(long)]
    nodes: bool,

    /// Run as a rank of --nodes.
    #[arg(long, hide = true, conflicts_with = "nodes")]
    nodes_probe: bool,

    /// Print the version of UCX, for another mgpurun.
    #[arg(long, hide = true, conflicts_with_all = ["nodes", "nodes_probe"])]
    ucx_probe: bool,

    /// Seconds for all nodes to join, or for all tests (18).
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    timeout: Option<Duration>,

    #[command(flatten)]
    of_nodes: NodeArgs,
}

/// The command, with the arguments from `doctor` on.
pub(crate) fn main(arguments: &[OsString]) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let args: Args = match stdout::parse(arguments.iter().cloned())? {
        Ok(args) => args,
        Err(code) => return Ok(code),
    };
    if args.nodes_probe {
        return nodes::probe(args.json);
    }
    if args.ucx_probe {
        let (text, code) = match probe_ucx() {
            Ok(version) => (version, exit_code::SUCCESS),
            Err(why) => (why, exit_code::LAUNCHER),
        };
        return stdout::print(&(text + "\n"), ExitCode::from(code));
    }
    if args.nodes {
        return nodes::main(&args, arguments);
    }
    if args.of_nodes != NodeArgs::default() {
        let text = "options of several nodes need --nodes";
        return stdout::refuse(&Args::command().error(ErrorKind::MissingRequiredArgument, text));
    }
    if args.timeout.is_some() && !args.test {
        let text = "--timeout needs --nodes or --test";
        return stdout::refuse(&Args::command().error(ErrorKind::MissingRequiredArgument, text));
    }
    let host = Host::detect();
    let (mut report, mut healthy) = examine(&host);
    if args.test {
        let executable = std::env::current_exe()?;
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let found = |name| {
            let mut items = report.sections.iter().flat_map(|section| &section.items);
            items.any(|item| item.name == name && item.mark == Mark::Ok)
        };
        let parts = trial::Parts {
            cores,
            driver: NCCL_IS_BUILT && found("libcuda.so.1"),
            nccl: found(nccl_sys::LIBRARY_NAME),
            gpus: nvidia::section(&host).1,
            time: args.timeout.unwrap_or(trial::TIME),
        };
        let tested = trial::sections(&host, &executable, parts);
        healthy &= tested.iter().flat_map(|section| &section.items).all(|item| item.mark != Mark::Failed);
        report.sections.splice(0..0, tested);
    }
    if args.all {
        report.folded.clear();
    }
    let code = if healthy { exit_code::SUCCESS } else { exit_code::LAUNCHER };
    let text = if args.json { serde_json::to_string(&report)? + "\n" } else { report.to_string() };
    stdout::print(&text, ExitCode::from(code))
}

/// The report, and whether the CPU backend can be used.
fn examine(host: &Host) -> (Report, bool) {
    let needs = system::needs(host);
    let (nvidia, gpus) = nvidia::section(host);
    let libraries = libraries::section(host);
    let lacking = |sections: &[&Section], needed: &[&str]| -> Vec<String> {
        let items = sections.iter().flat_map(|section| &section.items);
        let missing = items.filter(|item| item.mark == Mark::Missing && needed.contains(&item.name.as_str()));
        missing.map(|item| item.name.clone()).collect()
    };
    let broken: Vec<&Item> = needs.items.iter().filter(|item| item.mark == Mark::Missing).collect();
    let healthy = broken.is_empty();
    let cpu = match broken.first() {
        None => "cpu can be used".to_owned(),
        Some(first) => format!("cpu cannot be used ({} is missing)", first.name),
    };
    let lacks = lacking(&[&nvidia, &libraries], &["driver", "GPUs", "libcuda.so.1", "libnccl.so.2"]);
    let nccl = match (NCCL_IS_BUILT, lacks.as_slice()) {
        (true, []) => format!("nccl can be used on {gpus} GPU{}", if gpus == 1 { "" } else { "s" }),
        (true, lacks) => format!("nccl cannot be used (missing: {})", lacks.join(", ")),
        (false, []) => "nccl is not part of this build, though the machine has what it needs".to_owned(),
        (false, lacks) => {
            format!("nccl is not part of this build (also missing: {})", lacks.join(", "))
        }
    };
    let verdict = format!("Backends: {cpu}; {nccl}");
    let folded = if gpus == 0 { vec![nvidia.title, libraries.title] } else { Vec::new() };
    (
        Report {
            sections: vec![system::section(host), needs, network::section(host), nvidia, libraries],
            verdict,
            folded,
        },
        healthy,
    )
}

#[cfg(test)]
mod tests;
