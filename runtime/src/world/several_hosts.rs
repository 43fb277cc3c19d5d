//! Ranks that another launcher has started on several hosts: which of them are on this one, where rank 0 is, and how the
//! hosts authenticate each other. Pure, except for [`HostOfRank::complete`].
//!
//! | | ranks of this host | where rank 0 is |
//! |---|---|---|
//! | torchrun | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR` |
//! | Open MPI | `OMPI_COMM_WORLD_LOCAL_RANK`, `…_SIZE` | host of `mpirun`, if that is the first of its list |
//! | hydra | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | – |
//! | Slurm | `SLURM_STEP_TASKS_PER_NODE`, `SLURM_NODEID` | first host of `SLURM_STEP_NODELIST` |
//!
//! `MGPU_RDZV_ENDPOINT` says under all of them where rank 0 is. The ranks of a host have to be consecutive. Under Slurm
//! every rank can check that; elsewhere rank 0's host finds out when the hosts come together.

use std::path::PathBuf;

use mgpu_control::nodes::host_list::first_host;
use mgpu_control::nodes::{Credentials, Endpoint, Munge, RunTag, Secret};

use super::other_launchers::{LaunchEnvironment, Launcher};
use super::variable::variable_error;
use crate::rendezvous::OwnHost;
use crate::{Error, Result};

const MGPU_RDZV_ENDPOINT: &str = "MGPU_RDZV_ENDPOINT";
const MGPU_AUTH: &str = "MGPU_AUTH";
const MGPU_SECRET: &str = "MGPU_SECRET";
const MGPU_SECRET_FILE: &str = "MGPU_SECRET_FILE";
/// What to do without a secret.
const SECRET_ADVICE: &str = "set MGPU_SECRET_FILE or MGPU_SECRET alike on all hosts (`openssl rand -hex 32` makes a secret), \
     or MGPU_AUTH=none on a network where nobody else can connect";

/// Tasks of each host of a step or a job, such as `2(x3),1`.
const SLURM_TASKS: [&str; 2] = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
const SLURM_HOSTS: [&str; 2] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];

/// A variable that says that the ranks are on several hosts, and what it says.
#[derive(Debug, Clone)]
pub(super) struct Finding {
    pub(super) name: &'static str,
    pub(super) text: String,
}

impl Finding {
    /// The error of a world on several hosts that cannot start.
    fn but(&self, problem: impl std::fmt::Display) -> Error {
        variable_error(self.name, format!("{}: the ranks are on several hosts, {problem}", self.text))
    }
}

/// A rank of a world on several hosts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) world_size: u32,
    pub(super) local_rank: Option<u32>,
    pub(super) local_size: Option<u32>,
}

/// This host, in a world on several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostOfRank {
    pub(super) first_rank: u32,
    pub(super) ranks: u32,
    pub(super) endpoint: Endpoint,
    authentication: Authentication,
}

/// Where the credentials are from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Authentication {
    SecretFile(PathBuf),
    /// The value of `MGPU_SECRET`, of which no copy is made here.
    Secret,
    Munge,
    None,
}

impl HostOfRank {
    /// Reads the secret, or opens munge.
    pub(super) fn complete(&self, run_id: &str) -> Result<OwnHost> {
        let credentials = match &self.authentication {
            Authentication::None => Credentials::None,
            Authentication::SecretFile(path) => Credentials::Secret(Secret::read(path)?),
            Authentication::Secret => {
                let secret = std::env::var_os(MGPU_SECRET).unwrap_or_default();
                Credentials::Secret(Secret::new(secret.as_encoded_bytes(), MGPU_SECRET)?)
            }
            Authentication::Munge => Credentials::Munge(Munge::open(None).map_err(|why| {
                variable_error(
                    MGPU_AUTH,
                    format!("cannot be munge, which Slurm's hosts have by default: {why}; {SECRET_ADVICE}"),
                )
            })?),
        };
        Ok(OwnHost {
            first_rank: self.first_rank,
            ranks: self.ranks,
            endpoint: self.endpoint.clone(),
            ports: RunTag::of(run_id).candidate_ports(),
            credentials,
            nccl: None,
        })
    }
}

impl LaunchEnvironment<'_> {
    /// The host of a rank, in a world on several hosts, as `finding` says.
    pub(super) fn host_of_rank(
        &self,
        launcher: Launcher,
        place: Place,
        finding: &Finding,
    ) -> Result<HostOfRank> {
        let (first_rank, ranks) = match launcher {
            Launcher::Slurm => self.slurm_ranks(place, finding)?,
            _ => local_ranks(place, finding)?,
        };
        let endpoint = match self.text(MGPU_RDZV_ENDPOINT) {
            Some(text) => text.parse().map_err(|problem| variable_error(MGPU_RDZV_ENDPOINT, format!("is wrong: {problem}")))?,
            None => self.endpoint(launcher, (first_rank, ranks)).ok_or_else(|| {
                finding.but(format_args!(
                    "and {launcher} does not say where rank 0 is: set {MGPU_RDZV_ENDPOINT}=HOST:PORT alike on all hosts, \
                     with the host of rank 0 and a port that is free there"
                ))
            })?,
        };
        let authentication = self.authentication(launcher, finding)?;
        Ok(HostOfRank { first_rank, ranks, endpoint, authentication })
    }

    /// The value of a variable that is set and not empty.
    fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|text| !text.trim().is_empty())
    }

    fn authentication(&self, launcher: Launcher, finding: &Finding) -> Result<Authentication> {
        let file = || self.text(MGPU_SECRET_FILE).map(|path| Authentication::SecretFile(path.into()));
        let secret = || file().or_else(|| self.text(MGPU_SECRET).map(|_| Authentication::Secret));
        let missing = || {
            finding.but(format_args!(
                "which authenticate each other by a secret, and there is none: {SECRET_ADVICE}"
            ))
        };
        match self.text(MGPU_AUTH).as_deref().map(str::trim) {
            None | Some("auto") => {
                let munge = (launcher == Launcher::Slurm).then_some(Authentication::Munge);
                secret().or(munge).ok_or_else(missing)
            }
            Some("secret") => secret().ok_or_else(missing),
            Some("munge") => Ok(Authentication::Munge),
            Some("none") => Ok(Authentication::None),
            Some(other) => Err(variable_error(
                MGPU_AUTH,
                format!("is `{other}`; known are auto, secret, munge and none"),
            )),
        }
    }

    /// The first rank and the number of ranks of this host under Slurm.
    fn slurm_ranks(&self, place: Place, finding: &Finding) -> Result<(u32, u32)> {
        let Some((name, text)) = SLURM_TASKS.iter().find_map(|name| Some((*name, self.text(name)?))) else {
            return Err(finding.but(format_args!("but {} is missing", SLURM_TASKS[0])));
        };
        let Some(node) = self.number("SLURM_NODEID")? else {
            return Err(finding.but("but SLURM_NODEID is missing"));
        };
        let problem = |problem: String| variable_error(name, format!("is `{text}`{problem}"));
        let Some(counts) = parse_tasks(&text) else {
            return Err(problem(" where numbers of tasks such as 2(x3),1 are expected".into()));
        };
        let Place { rank, world_size, .. } = place;
        let tasks: u64 = counts.iter().map(|(tasks, nodes)| u64::from(*tasks) * u64::from(*nodes)).sum();
        if tasks != u64::from(world_size) {
            return Err(problem(format!(", {tasks} tasks in all, in a world of {world_size}")));
        }
        let Some((first_rank, ranks)) = ranks_of_node(&counts, node) else {
            return Err(problem(format!(", which has no node {node} (SLURM_NODEID)")));
        };
        let local_rank = place.local_rank.unwrap_or_else(|| rank.wrapping_sub(first_rank));
        if local_rank >= ranks || first_rank + local_rank != rank {
            return Err(finding.but(format_args!(
                "and those of a host have to be consecutive, but SLURM_PROCID is {rank} for task {local_rank} of node {node} \
                 (SLURM_NODEID), which should have ranks {first_rank} to {} ({name} is {text}); add --distribution block to srun",
                first_rank + ranks.max(1) - 1
            )));
        }
        Ok((first_rank, ranks))
    }

    /// Where rank 0 is, if the launcher says so.
    fn endpoint(&self, launcher: Launcher, (first_rank, ranks): (u32, u32)) -> Option<Endpoint> {
        match launcher {
            Launcher::Torchrun => Some(Endpoint::of_host(&self.text("MASTER_ADDR")?)),
            Launcher::Slurm => {
                let list = SLURM_HOSTS.iter().find_map(|name| self.text(name))?;
                let host = Endpoint::of_host(&first_host(&list)?);
                let reserved = self.text("SLURM_STEP_RESV_PORTS");
                let port = reserved.and_then(|ports| ports.split(['-', ',']).next()?.trim().parse().ok());
                Some(port.filter(|port| *port > 0).map_or(host.clone(), |port| host.with_port(port)))
            }
            Launcher::OpenMpi => {
                // Hosts have the numbers of their daemons, in the order of mpirun's list, and mpirun's host is 0. If this
                // host has the number that follows from its ranks, rank 0 is on the host of mpirun.
                let uri =
                    ["PMIX_SERVER_URI41", "PMIX_SERVER_URI4"].into_iter().find_map(|name| self.text(name))?;
                let daemon: u32 = uri.split(';').next()?.rsplit_once('.')?.1.parse().ok()?;
                let name = self.text("PMIX_NAMESPACE")?;
                let (host, _) = name.strip_prefix("prterun-")?.rsplit_once('@')?.0.rsplit_once('-')?;
                (daemon == first_rank / ranks).then(|| Endpoint::of_host(host))
            }
            Launcher::Hydra => None,
        }
    }
}

/// The first rank and the number of ranks of this host, where the launcher numbers them.
fn local_ranks(place: Place, finding: &Finding) -> Result<(u32, u32)> {
    let Place { rank, world_size, local_rank, local_size } = place;
    let (Some(local_rank), Some(ranks)) = (local_rank, local_size) else {
        return Err(finding.but("but the rank within this host is missing"));
    };
    match rank.checked_sub(local_rank) {
        Some(first) if local_rank < ranks && ranks <= world_size - first => Ok((first, ranks)),
        _ => Err(finding.but(format_args!(
            "and those of a host have to be consecutive, but rank {rank} of {world_size} is number {local_rank} of {ranks} \
             on its host; start the ranks host by host (mpirun --map-by slot)"
        ))),
    }
}

/// Numbers of tasks with the numbers of consecutive nodes that have them: `2(x3),1` is 2 on 3 nodes, then 1 on 1.
fn parse_tasks(text: &str) -> Option<Vec<(u32, u32)>> {
    let part = |part: &str| {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?),
            None => (part, "1"),
        };
        Some((tasks.parse().ok()?, nodes.parse().ok().filter(|nodes| *nodes > 0)?))
    };
    text.trim().split(',').map(part).collect()
}

/// The first task and the number of tasks of a node. The sum of all tasks fits.
fn ranks_of_node(counts: &[(u32, u32)], node: u32) -> Option<(u32, u32)> {
    let (mut first_task, mut first_node) = (0, 0);
    for (tasks, nodes) in counts {
        if node - first_node < *nodes {
            return Some((first_task + (node - first_node) * tasks, *tasks));
        }
        first_task += tasks * nodes;
        first_node = first_node.checked_add(*nodes).filter(|first| *first <= node)?;
    }
    None
}

#[cfg(test)]
mod tests;
