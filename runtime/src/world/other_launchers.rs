//! Ranks started by other launchers: the variables of torchrun, Open MPI, hydra (MPICH, Intel MPI) and Slurm.
//!
//! Each launcher says which rank a process is and how many ranks there are. None says where the ranks meet, so they
//! need a name that is the same on all ranks of a job and different from other jobs: rank 0 serves the rendezvous
//! under it. What is needed on several hosts, [`several_hosts`](super::several_hosts) finds.
//!
//! | | rank, size, on this host | the job's name |
//! |---|---|---|
//! | torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `TORCHELASTIC_RUN_ID`, `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, … | `PMIX_NAMESPACE`, else `OMPI_MCA_ess_base_jobid` |
//! | hydra | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | `PMI_PORT`, else its process on this host |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID` | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//!
//! `MGPU_RUN_ID` overrides the job's name under all of them. Launchers can be nested (`srun` starts hydra's proxies,
//! a batch script starts `mpirun`, `mpirun` starts one `torchrun` per host) and their variables are inherited. So
//! they are looked up from the innermost to the outermost, in the order of the table. Slurm also sets a rank's
//! variables for a batch script and an interactive shell; only those of a step started by `srun` count.

use std::fmt;
use std::num::NonZeroUsize;

use super::several_hosts::{Finding, HostOfRank, Place};
use super::variable::{self, check_size, variable_error};
use crate::Result;
use crate::protocol::*;

/// A rank as its launcher describes it: validated.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LaunchedRank {
    pub(super) launcher: Launcher,
    pub(super) rank: u32,
    pub(super) world_size: u32,
    pub(super) local_rank: u32,
    pub(super) restart_count: u32,
    /// The launcher's name of the job; `None` if it has none.
    pub(super) job: Option<Job>,
    /// Number of cores that the launcher has reserved for this rank, if it says so.
    pub(super) threads: Option<NonZeroUsize>,
    /// This host, if there are others.
    pub(super) host: Option<HostOfRank>,
}

/// The launcher that started the ranks.
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

/// A job of a launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Job {
    launcher: Launcher,
    name: String,
}

impl Job {
    /// The name for error texts.
    pub(super) fn title(&self) -> String {
        format!("{} job {}", self.launcher, self.name)
    }

    /// The run's identifier: 32 hexadecimal digits, like those of `mgpurun`. It differs after a restart.
    pub(super) fn run_id(&self, restart_count: u32) -> String {
        self.identifier(&restart_count.to_string())
    }

    /// The launch's identifier, the same after restarts. `None` if it cannot be determined for torchrun: unless the
    /// user sets an id, all launches of torchrun have the same name and port, and only the parent process tells them
    /// apart.
    pub(super) fn launch_id(&self, parent: impl FnOnce() -> Option<String>) -> Option<String> {
        let starter = match self.launcher {
            Launcher::Torchrun => parent()?,
            _ => String::new(),
        };
        Some(self.identifier(&starter))
    }

    fn identifier(&self, start: &str) -> String {
        let Job { launcher, name } = self;
        // None of the parts can contain a zero byte, so different parts give different texts.
        let text = format!("{launcher}\0{name}\0{start}");
        format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()))
    }
}

/// Names of one launcher's variables. If there are several, the first that is set counts.
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
/// Number of hosts of the step, or else of the allocation.
const SLURM_NODES: [&str; 2] = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"];
/// Slurm's step numbers from here on are not steps of `srun`, but of the batch script and the interactive shell.
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// Where a rank's environment is read from; tests replace it.
pub(super) struct LaunchEnvironment<'a> {
    pub(super) variable: &'a dyn Fn(&str) -> Option<String>,
    /// Identifies hydra's process on this host that started this one, if there is one.
    pub(super) hydra: &'a dyn Fn() -> Option<String>,
    /// Identifies the process that started this one.
    pub(super) parent: &'a dyn Fn() -> Option<String>,
}

impl LaunchEnvironment<'_> {
    /// The rank that another launcher describes; `None` if no launcher started this process.
    ///
    /// # Errors
    /// If variables are missing or contradict each other.
    pub(super) fn launched(&self) -> Result<Option<LaunchedRank>> {
        let Some(names) = self.launcher() else { return Ok(None) };
        let (size_name, world_size) = match self.first(names.size)? {
            Some(found) => found,
            None => {
                return Err(variable_error(names.size[0], format!("is missing while {} is set", names.rank)));
            }
        };
        check_size(size_name, world_size)?;
        let Some(rank) = self.number(names.rank)? else {
            return Err(variable_error(names.rank, format!("is missing while {size_name} is set")));
        };
        if rank >= world_size {
            return Err(variable_error(
                names.rank,
                format!("is {rank} in a world of {world_size}; ranks count from 0"),
            ));
        }
        let local_size = names.local_size.map(|name| self.number(name)).transpose()?.flatten();
        if let (Some(name), Some(local_size)) = (names.local_size, local_size)
            && local_size > world_size
        {
            return Err(variable_error(name, format!("is {local_size} where {size_name} is {world_size}")));
        }
        let local_rank = self.number(names.local_rank)?;
        let finding = self.several_hosts(&names, local_size, (size_name, world_size))?;
        let place = Place { rank, world_size, local_rank, local_size };
        let host = finding.map(|finding| self.host_of_rank(names.launcher, place, &finding)).transpose()?;
        let (local_rank, ranks_here) =
            (local_rank.unwrap_or(rank), host.as_ref().map_or(world_size, |host| host.ranks));
        if host.is_none() && local_rank >= ranks_here {
            let problem = format!("is {local_rank} where {ranks_here} ranks are on this host");
            return Err(variable_error(names.local_rank, problem));
        }
        let restarts = names.restarts.map(|name| self.number(name)).transpose()?.flatten();
        Ok(Some(LaunchedRank {
            launcher: names.launcher,
            rank,
            world_size,
            local_rank,
            restart_count: restarts.unwrap_or(0),
            job: self.job(&names, host.as_ref()),
            threads: self.threads(&names),
            host,
        }))
    }

    /// The variable that says that the ranks are on several hosts, if one does.
    fn several_hosts(
        &self,
        names: &VariableNames,
        local_size: Option<u32>,
        (size_name, world_size): (&str, u32),
    ) -> Result<Option<Finding>> {
        if names.launcher == Launcher::Slurm {
            let nodes = self.first(&SLURM_NODES)?.filter(|(_, nodes)| *nodes > 1);
            return Ok(nodes.map(|(name, nodes)| Finding { name, text: format!("is {nodes}") }));
        }
        let several = names.local_size.zip(local_size).filter(|(_, local_size)| *local_size < world_size);
        Ok(several.map(|(name, local_size)| {
            let text = format!("is {local_size} where {size_name} is {world_size}");
            Finding { name, text }
        }))
    }

    /// The innermost launcher that gives this process a rank; or else, so that the error can name it, one that gives
    /// it a world size.
    fn launcher(&self) -> Option<VariableNames> {
        let is_set = |name: &str| (self.variable)(name).is_some();
        let is_slurm_step = self.is_slurm_step();
        let is_candidate = |names: &VariableNames| match names.launcher {
            Launcher::Torchrun | Launcher::OpenMpi => true,
            // Slurm can set PMI_RANK and PMI_SIZE as well, for MPI programs.
            Launcher::Hydra => is_set(names.local_rank) || !is_slurm_step,
            Launcher::Slurm => is_slurm_step,
        };
        let candidates = || [TORCHRUN, OPEN_MPI, HYDRA, SLURM].into_iter().filter(is_candidate);
        let has_size = |names: &VariableNames| names.size.iter().any(|name| is_set(name));
        candidates().find(|names| is_set(names.rank)).or_else(|| candidates().find(has_size))
    }

    /// True within a step that `srun` has started.
    fn is_slurm_step(&self) -> bool {
        let step = (self.variable)("SLURM_STEP_ID").and_then(|step| step.trim().parse::<u32>().ok());
        step.is_some_and(|step| step < FIRST_SPECIAL_STEP)
    }

    /// The job's name: the same on all ranks of this job, and only there.
    fn job(&self, names: &VariableNames, host: Option<&HostOfRank>) -> Option<Job> {
        let text = |name: &str| (self.variable)(name).filter(|value| !value.is_empty());
        let all = |wanted: &[&str]| -> Option<String> {
            let values: Option<Vec<String>> = wanted.iter().map(|name| text(name)).collect();
            values.map(|values| values.join("."))
        };
        let name = text(MGPU_RUN_ID).or_else(|| match names.launcher {
            // The default id may be `none` for every run, but two runs cannot share a port.
            Launcher::Torchrun => {
                let (id, port) = (text("TORCHELASTIC_RUN_ID"), all(&[MASTER_ADDR, MASTER_PORT]));
                let parts: Vec<String> = id.into_iter().chain(port).collect();
                (!parts.is_empty()).then(|| parts.join(" at "))
            }
            Launcher::OpenMpi => text("PMIX_NAMESPACE")
                .or_else(|| text("OMPI_MCA_ess_base_jobid"))
                .or_else(|| text("OMPI_MCA_orte_ess_jobid")),
            // On each host hydra has another process and another port.
            Launcher::Hydra if host.is_some() => host.map(|host| host.endpoint.to_string()),
            Launcher::Hydra => text("PMI_PORT").or_else(|| (self.hydra)()),
            Launcher::Slurm => all(&["SLURM_JOB_ID", "SLURM_STEP_ID"]),
        })?;
        Some(Job { launcher: names.launcher, name })
    }

    /// Number of cores reserved for this rank, if the launcher tells.
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

    pub(super) fn number(&self, name: &'static str) -> Result<Option<u32>> {
        variable::number(self.variable, name)
    }
}

/// Shells that may lie between the launcher and this process.
const SHELLS: [&str; 6] = ["sh", "bash", "dash", "ksh", "zsh", "fish"];

/// Identifies the process that started this one, skipping shells: by process id and start time, because process ids
/// are reused.
pub(super) fn parent() -> Option<String> {
    ancestor(std::os::unix::process::parent_id(), |name| !SHELLS.contains(&name))
}

/// Identifies the hydra process that started this one, in the same way. All ranks on a host are children of one, or
/// of shells that are.
pub(super) fn hydra_proxy() -> Option<String> {
    ancestor(std::process::id(), |name| name.starts_with("hydra"))
}

/// Identifies the nearest process, from `process` upwards, whose name satisfies `matches`.
fn ancestor(mut process: u32, matches: impl Fn(&str) -> bool) -> Option<String> {
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        let (name, parent, started) = parse_stat(&stat)?;
        if matches(name) {
            return Some(format!("{process} of {started}"));
        }
        process = Some(parent).filter(|parent| *parent > 0)?;
    }
}

/// Name, parent and start time from the text of `/proc/PID/stat`. The name may contain anything; it ends at the last
/// parenthesis.
fn parse_stat(stat: &str) -> Option<(&str, u32, u64)> {
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some((name, fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

#[cfg(test)]
mod tests;
