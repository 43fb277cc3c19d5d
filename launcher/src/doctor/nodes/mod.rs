//! `mgpurun doctor --nodes`: the nodes of a job check each other, before a training does it less readably.
//!
//! The check is itself a job of the usual machinery, with one rank a node: `mgpurun doctor --nodes-probe`. So whatever
//! starts the job starts the check, and what keeps nodes from finding each other fails here with the same text. The ranks
//! exchange what they find by the store of the rendezvous, and test every pair over TCP. Rank 0 prints the report.
//!
//! | module | job |
//! |---|---|
//! | `facts` | what a node knows about itself |
//! | `names` | what a node knows about the names of the others |
//! | `wire` | one pair: can it connect, how fast, what is the time there? |
//! | `rounds` | which pairs are tested at the same time (pure) |
//! | `findings` | all of that → table and problems (pure) |

mod facts;
mod findings;
mod names;
mod rounds;
mod wire;

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use mgpu_control::protocol::{MGPU_RENDEZVOUS, MGPU_RUN_ID, RANK, WORLD_SIZE, new_run_id};
use mgpu_control::rendezvous::message::Manifest;
use mgpu_control::rendezvous::{ServedBy, Store};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Args;
use crate::cli::{JOIN_TIMEOUT, node_settings};
use crate::guardian::{self, Role};
use crate::nodes::net::NetChoice;
use crate::nodes::ssh::Remote;
use crate::nodes::{NodeSettings, SettingsError};
use crate::{BackendChoice, Launch, OutputOptions, exit_code, stdout};
use facts::Facts;
use findings::{Pair, Report};

/// Longest wait for another node: several timeouts of a lookup or a connection.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time between SIGTERM and SIGKILL of the ranks.
const GRACE: Duration = Duration::from_secs(5);

/// The command on one node, or on the host that starts all of them.
pub(super) fn main(args: &Args, words: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    if let Some(hosts) = &args.of_nodes.hosts {
        let remote = Remote {
            hosts,
            nodes: &args.of_nodes,
            options: words,
            program: &[],
            same_folder: false,
            grace: GRACE,
            raw: false,
            signals: &[],
        };
        return remote.run();
    }
    let mut notices = Vec::new();
    let timeout = args.timeout.unwrap_or(JOIN_TIMEOUT);
    let Some(nodes) = node_settings(&args.of_nodes, timeout, &mut notices)? else {
        return Err(Box::new(SettingsError::new(
            "doctor --nodes is for several nodes, and this is one: start it as the job (srun, mpirun), with --hosts a,b, or \
             with --nnodes N --rdzv-endpoint HOST on each node",
        )));
    };
    // Its ranks have connections of their own.
    let nodes = NodeSettings { net: NetChoice::Tcp, ..nodes };
    let timeout = args.timeout.or(nodes.join_timeout).unwrap_or(JOIN_TIMEOUT);
    let json = args.json.then_some("--json");
    let mut launch = Launch::new(std::env::current_exe()?)
        .arguments(["doctor", "--nodes-probe"].into_iter().chain(json))
        .ranks(1)
        .backend(BackendChoice::Cpu)
        .output(OutputOptions { raw: true, ..OutputOptions::default() })
        .join_timeout(timeout)
        .grace(GRACE)
        .adopt_orphans()
        .notices(notices)
        .nodes(nodes)
        .attached(args.of_nodes.attached);
    match guardian::fork_guardian(&[], || ())? {
        Role::Done(code) => Ok(code),
        Role::Launcher { guardian, signals } => {
            launch.take_over(guardian, &signals)?;
            Ok(ExitCode::from(launch.run()?.exit_code))
        }
    }
}

/// The command as a rank of the check.
pub(super) fn probe(json: bool) -> Result<ExitCode, Box<dyn Error>> {
    let ranks = Ranks::join()?;
    let report = check(&ranks)?;
    ranks.store.leave();
    let Some(report) = report else { return Ok(ExitCode::SUCCESS) };
    let code = if report.is_healthy() { exit_code::SUCCESS } else { exit_code::LAUNCHER };
    let text = if json { serde_json::to_string(&report)? + "\n" } else { report.to_string() };
    stdout::print(&text, ExitCode::from(code))
}

/// Checks all nodes. Returns the report on rank 0.
fn check(ranks: &Ranks) -> Result<Option<Report>, Box<dyn Error>> {
    // Only this job's ranks know it; their connections to the store are private.
    let token = match ranks.rank {
        0 => ranks.publish("token", &new_run_id()?)?,
        _ => ranks.read("token", 0)?,
    };
    let server =
        wire::Server::start(&token).map_err(|error| format!("cannot listen for other nodes: {error}"))?;
    let facts = ranks
        .publish(&format!("facts {}", ranks.rank), &Facts::gather(ranks.store.address(), server.port()))?;
    let all: Vec<Facts> = (0..ranks.size)
        .map(|other| {
            if other == ranks.rank { Ok(facts.clone()) } else { ranks.read(&format!("facts {other}"), other) }
        })
        .collect::<Result<_, _>>()?;
    let names = names::look_up(&all);
    let mut pairs = Vec::new();
    for round in rounds::rounds(ranks.size) {
        let partner = round.iter().find_map(|(a, b)| match ranks.rank {
            rank if rank == *a => Some(*b),
            rank if rank == *b => Some(*a),
            _ => None,
        });
        // One direction after the other: they would share the link.
        for lower_begins in [true, false] {
            if let Some(partner) = partner.filter(|partner| (ranks.rank < *partner) == lower_begins) {
                let test = wire::test(&all[partner as usize], &token);
                pairs.push(Pair {
                    from: ranks.rank,
                    to: partner,
                    names: names[partner as usize].clone(),
                    test,
                });
            }
            ranks.meet()?;
        }
    }
    if ranks.rank > 0 {
        for pair in &pairs {
            ranks.publish_to(&pair_key(pair.from, pair.to), pair, 1)?;
        }
        ranks.meet()?;
        return Ok(None);
    }
    for from in 1..ranks.size {
        for to in (0..ranks.size).filter(|to| *to != from) {
            pairs.push(ranks.read(&pair_key(from, to), from)?);
        }
    }
    ranks.meet()?;
    pairs.sort_by_key(|pair| (pair.from, pair.to));
    Ok(Some(Report::new(all, pairs)))
}

fn pair_key(from: u32, to: u32) -> String {
    format!("pair {from} {to}")
}

/// The ranks of the check, one on each node.
struct Ranks {
    store: Store,
    rank: u32,
    size: u32,
}

impl Ranks {
    fn join() -> Result<Ranks, Box<dyn Error>> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| {
                SettingsError::new(format!(
                    "--nodes-probe is for the ranks of doctor --nodes: {name} is not set"
                ))
            })
        };
        let number = |name: &str| -> Result<u32, Box<dyn Error>> {
            let text = variable(name)?;
            Ok(text.parse().map_err(|_| format!("{name} is `{text}`: it should be a number"))?)
        };
        let (rank, size, run_id) = (number(RANK)?, number(WORLD_SIZE)?, variable(MGPU_RUN_ID)?);
        let stream = Store::connect(&variable(MGPU_RENDEZVOUS)?, rank)?;
        // Versions are what the report compares: a difference is no reason not to join.
        let hello = Store::send_hello(stream, ServedBy::Launcher, &run_id, rank, size, Manifest::default())?;
        let (store, _page) = hello.wait()?;
        Ok(Ranks { store, rank, size })
    }

    /// Tells all other ranks a value.
    fn publish<T: Serialize + Clone>(&self, key: &str, value: &T) -> Result<T, Box<dyn Error>> {
        self.publish_to(key, value, self.size - 1)?;
        Ok(value.clone())
    }

    fn publish_to(&self, key: &str, value: &impl Serialize, readers: u32) -> Result<(), Box<dyn Error>> {
        Ok(self.store.set(key, &serde_json::to_vec(value)?, &[], readers)?)
    }

    fn read<T: DeserializeOwned>(&self, key: &str, from: u32) -> Result<T, Box<dyn Error>> {
        let (value, _) = self.store.get(key, from, TIMEOUT)?;
        Ok(serde_json::from_slice(&value)
            .map_err(|error| format!("rank {from} has set a bad `{key}`: {error}"))?)
    }

    fn meet(&self) -> Result<(), Box<dyn Error>> {
        Ok(self.store.barrier("step", TIMEOUT)?)
    }
}
