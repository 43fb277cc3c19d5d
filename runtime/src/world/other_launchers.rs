//! Ranks that another launcher has started: what torchrun, Open MPI, hydra (MPICH, Intel MPI) and Slurm tell them.
//!
//! Each says which rank a process is and how many there are. None says where the ranks meet, so they need a name for
//! the job that is the same on all its ranks and on those of no other job: rank 0 serves the rendezvous under it.
//!
//! | | rank, size, on this host | the job's name |
//! |---|---|---|
//! | torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `TORCHELASTIC_RUN_ID`, `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, … | `PMIX_NAMESPACE`, else `OMPI_MCA_ess_base_jobid` |
//! | hydra | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | `PMI_PORT`, else its process on this host |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID` | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//!
//! `MGPU_RUN_ID` names the job under any of them. Launchers start each other (`srun` the proxies of hydra, a batch script
//! `mpirun`, `mpirun` a `torchrun` per host) and their variables are inherited, so they are looked for from the inside out,
//! in the order of the table. Slurm shows a batch script and an interactive shell variables of a rank, too: only those of a
//! step that `srun` started count.

use std::fmt;
use std::num::NonZeroUsize;

use super::variable::{self, check_size, wrong};
use crate::protocol::*;
use crate::{Error, Result};

/// A rank as its launcher describes it: consistent, and on one host with all others.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LaunchedRank {
    pub(super) launcher: Launcher,
    pub(super) rank: u32,
    pub(super) world_size: u32,
    pub(super) local_rank: u32,
    pub(super) restart_count: u32,
    /// What the launcher calls the job; `None` if it gives it no name.
    pub(super) job: Option<Job>,
    /// Cores that the launcher has set aside for this rank, where it says so.
    pub(super) threads: Option<NonZeroUsize>,
}

/// Who has started the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Launcher {
    Torchrun,
    OpenMpi,
    Hydra,
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Hydra => "hydra",
            Launcher::Slurm => "Slurm",
        })
    }
}

/// A run of a launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Job {
    launcher: Launcher,
    name: String,
}

impl Job {
    /// For errors.
    pub(super) fn title(&self) -> String {
        format!("{} job {}", self.launcher, self.name)
    }

    /// The run's identifier: 32 hexadecimal digits like those of a launcher of our own. One of another start is another.
    pub(super) fn run_id(&self, restart_count: u32) -> String {
        self.identifier(&restart_count.to_string())
    }

    /// The launch's identifier, of all its starts. `None` if that of torchrun cannot be told: unless somebody gives them one,
    /// its launches all have one name and one port, and only `parent`, its process, tells them apart.
    pub(super) fn launch_id(&self, parent: impl FnOnce() -> Option<String>) -> Option<String> {
        let starter = match self.launcher {
            Launcher::Torchrun => parent()?,
            _ => String::new(),
        };
        Some(self.identifier(&starter))
    }

    fn identifier(&self, start: &str) -> String {
        let Job { launcher, name } = self;
        // None can contain a zero byte, so different ones are different texts.
        let text = format!("{launcher}\0{name}\0{start}");
        format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()))
    }
}

/// The names of one launcher's variables. The first of those that are set counts.
struct VariableNames {
    launcher: Launcher,
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static str,
    local_size: Option<&'static str>,
    restarts: Option<&'static str>,
}

const TORCHRUN: VariableNames = VariableNames {
    launcher: Launcher::Torchrun,
    rank: RANK,
    size: &[WORLD_SIZE],
    local_rank: LOCAL_RANK,
    local_size: Some(LOCAL_WORLD_SIZE),
    restarts: Some("TORCHELASTIC_RESTART_COUNT"),
};
const OPEN_MPI: VariableNames = VariableNames {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    restarts: None,
};
const HYDRA: VariableNames = VariableNames {
    launcher: Launcher::Hydra,
    rank: "PMI_RANK",
    size: &["PMI_SIZE"],
    local_rank: "MPI_LOCALRANKID",
    local_size: Some("MPI_LOCALNRANKS"),
    restarts: None,
};
const SLURM: VariableNames = VariableNames {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_size: None,
    restarts: Some("SLURM_RESTART_COUNT"),
};
/// Hosts of the step, else of the allocation.
const SLURM_NODES: [&str; 2] = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"];
/// Slurm's numbers from here on are no steps of `srun`, but the batch script's and the interactive shell's own.
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// What a rank's environment is read through.
pub(super) struct LaunchEnvironment<'a> {
    pub(super) variable: &'a dyn Fn(&str) -> Option<String>,
    /// Names hydra's process on this host that has started this one, if there is one.
    pub(super) hydra: &'a dyn Fn() -> Option<String>,
    /// Names the process that has started this one.
    pub(super) parent: &'a dyn Fn() -> Option<String>,
}

impl LaunchEnvironment<'_> {
    /// The rank that another launcher describes; `None` where none has started this process.
    ///
    /// # Errors
    /// If variables are missing, contradict each other, or speak of several hosts.
    pub(super) fn launched(&self) -> Result<Option<LaunchedRank>> {
        let Some(names) = self.launcher() else { return Ok(None) };
        let (size_name, world_size) = match self.first(names.size)? {
            Some(found) => found,
            None => return Err(wrong(names.size[0], format!("is missing while {} is set", names.rank))),
        };
        check_size(size_name, world_size)?;
        let Some(rank) = self.number(names.rank)? else {
            return Err(wrong(names.rank, format!("is missing while {size_name} is set")));
        };
        if rank >= world_size {
            return Err(wrong(
                names.rank,
                format!("is {rank} in a world of {world_size}; ranks count from 0"),
            ));
        }
        if let Some(local_size_name) = names.local_size
            && let Some(local_size) = self.number(local_size_name)?
            && local_size != world_size
        {
            return Err(match local_size < world_size {
                true => several_hosts(
                    local_size_name,
                    format!("is {local_size} where {size_name} is {world_size}"),
                ),
                false => wrong(local_size_name, format!("is {local_size} where {size_name} is {world_size}")),
            });
        }
        if names.launcher == Launcher::Slurm
            && let Some((name, nodes)) = self.first(&SLURM_NODES)?
            && nodes > 1
        {
            return Err(several_hosts(name, format!("is {nodes}")));
        }
        let local_rank = self.number(names.local_rank)?.unwrap_or(rank);
        if local_rank >= world_size {
            let problem = format!("is {local_rank} where {world_size} ranks are on this host");
            return Err(wrong(names.local_rank, problem));
        }
        let restarts = names.restarts.map(|name| self.number(name)).transpose()?.flatten();
        Ok(Some(LaunchedRank {
            launcher: names.launcher,
            rank,
            world_size,
            local_rank,
            restart_count: restarts.unwrap_or(0),
            job: self.job(&names),
            threads: self.threads(&names),
        }))
    }

    /// The innermost launcher that has given this process a rank; else, for an error, one that has given it a world size.
    fn launcher(&self) -> Option<VariableNames> {
        let is_set = |name: &str| (self.variable)(name).is_some();
        let is_slurm_step = self.is_slurm_step();
        let speaks = |names: &VariableNames| match names.launcher {
            Launcher::Torchrun | Launcher::OpenMpi => true,
            // Slurm can set these two as well, for MPI programs.
            Launcher::Hydra => is_set(names.local_rank) || !is_slurm_step,
            Launcher::Slurm => is_slurm_step,
        };
        let speaking = || [TORCHRUN, OPEN_MPI, HYDRA, SLURM].into_iter().filter(speaks);
        let has_size = |names: &VariableNames| names.size.iter().any(|name| is_set(name));
        speaking().find(|names| is_set(names.rank)).or_else(|| speaking().find(has_size))
    }

    /// True in a step that `srun` has started.
    fn is_slurm_step(&self) -> bool {
        let step = (self.variable)("SLURM_STEP_ID").and_then(|step| step.trim().parse::<u32>().ok());
        step.is_some_and(|step| step < FIRST_SPECIAL_STEP)
    }

    /// What the ranks of this job, and no others, call it.
    fn job(&self, names: &VariableNames) -> Option<Job> {
        let text = |name: &str| (self.variable)(name).filter(|value| !value.is_empty());
        let all = |wanted: &[&str]| -> Option<String> {
            let values: Option<Vec<String>> = wanted.iter().map(|name| text(name)).collect();
            values.map(|values| values.join("."))
        };
        let name = text(MGPU_RUN_ID).or_else(|| match names.launcher {
            // Where nobody has chosen an id it may be `none` for every run; no two can have one port.
            Launcher::Torchrun => {
                let (id, port) = (text("TORCHELASTIC_RUN_ID"), all(&[MASTER_ADDR, MASTER_PORT]));
                let parts: Vec<String> = id.into_iter().chain(port).collect();
                (!parts.is_empty()).then(|| parts.join(" at "))
            }
            Launcher::OpenMpi => text("PMIX_NAMESPACE")
                .or_else(|| text("OMPI_MCA_ess_base_jobid"))
                .or_else(|| text("OMPI_MCA_orte_ess_jobid")),
            Launcher::Hydra => text("PMI_PORT").or_else(|| (self.hydra)()),
            Launcher::Slurm => all(&["SLURM_JOB_ID", "SLURM_STEP_ID"]),
        })?;
        Some(Job { launcher: names.launcher, name })
    }

    /// The cores of this rank alone, where the launcher gives their number.
    fn threads(&self, names: &VariableNames) -> Option<NonZeroUsize> {
        let cores = (names.launcher == Launcher::Slurm).then(|| (self.variable)("SLURM_CPUS_PER_TASK"))??;
        cores.trim().parse().ok()
    }

    /// The first of `names` that is set, and its value.
    fn first(&self, names: &[&'static str]) -> Result<Option<(&'static str, u32)>> {
        for name in names {
            if let Some(value) = self.number(name)? {
                return Ok(Some((name, value)));
            }
        }
        Ok(None)
    }

    fn number(&self, name: &'static str) -> Result<Option<u32>> {
        variable::number(self.variable, name)
    }
}

fn several_hosts(name: &'static str, finding: String) -> Error {
    wrong(
        name,
        format!("{finding}: the ranks are on several hosts, and have to be on one; start all of them there"),
    )
}

/// Shells that a launcher may have started this process by.
const SHELLS: [&str; 6] = ["sh", "bash", "dash", "ksh", "zsh", "fish"];

/// Names the process that has started this one, but for shells in between: its number, and when it was started, because numbers
/// are given again.
pub(super) fn parent() -> Option<String> {
    ancestor(std::os::unix::process::parent_id(), |name| !SHELLS.contains(&name))
}

/// Names the process of hydra that has started this one, in the same way. All ranks on a host are children of one, or of shells
/// that are.
pub(super) fn hydra_proxy() -> Option<String> {
    ancestor(std::process::id(), |name| name.starts_with("hydra"))
}

/// Names the first process that `is_it`, by its name, from `process` upwards.
fn ancestor(mut process: u32, is_it: impl Fn(&str) -> bool) -> Option<String> {
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        let (name, parent, started) = parse_stat(&stat)?;
        if is_it(name) {
            return Some(format!("{process} of {started}"));
        }
        process = Some(parent).filter(|parent| *parent > 0)?;
    }
}

/// Name, parent and start of the process that a `/proc/PID/stat` is of. The name may contain anything; it ends at the
/// last parenthesis.
fn parse_stat(stat: &str) -> Option<(&str, u32, u64)> {
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some((name, fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

#[cfg(test)]
mod tests;
