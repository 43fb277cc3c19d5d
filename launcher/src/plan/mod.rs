//! The launch plan: what every rank runs and sees, from the arguments and the machine. Pure: no I/O.
//!
//! A launch starts one or more *jobs*, separated by `:` on the command line. Each is a world of its own and has a plan of
//! its own; they are planned together, because their GPUs and cores are disjoint. With `--one-world` the parts between
//! the colons form one world, in which ranks run different commands.

mod elastic;
mod error;
mod gpus;
mod world;

use std::ffi::OsString;
use std::path::PathBuf;

use mgpu_control::inject::Injection;
use mgpu_control::protocol::{
    MASTER_ADDR, MASTER_PORT, MGPU_BACKEND, MGPU_INJECT, MGPU_NET, MGPU_PROGRESS, MGPU_RENDEZVOUS,
    MGPU_RESTART_COUNT, MGPU_RUN_ID, RANK, WORLD_SIZE,
};

use crate::nccl;
use crate::placement::{Bind, CoreSet, Gpu, Group, Topology, place_groups};
pub(crate) use elastic::replan;
pub use error::PlanError;
pub use gpus::GpuChoice;
use world::{Part, check_same, plan_world};

/// Whether ranks of this build can use NCCL.
pub(crate) const NCCL_IS_BUILT: bool = cfg!(feature = "cuda");

/// Python buffers output to a pipe, and loses it in a crash, unless this variable has a value.
pub(crate) const PYTHONUNBUFFERED: &str = "PYTHONUNBUFFERED";

/// PyTorch ends a process whose NCCL communicator has failed if this variable is 1, as under torchrun.
pub(crate) const ERROR_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";

/// A rank's role, and its place among the ranks of that role, under torchrun.
const ROLE_NAME: &str = "ROLE_NAME";
const ROLE_RANK: &str = "ROLE_RANK";
const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";

/// Where PyTorch's `@record` writes the error that ends a rank.
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// The requested number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ranks {
    /// One for each GPU; one without GPUs.
    Auto,
    /// This many.
    Count(u32),
}

/// The requested backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BackendChoice {
    /// NCCL if there are enough GPUs, the CPU if there are none.
    Auto,
    /// NVIDIA GPUs.
    Nccl,
    /// Shared memory.
    Cpu,
}

/// The user's request for one job, or for one part of a world whose ranks run different programs.
#[derive(Debug, Clone)]
pub struct Request {
    /// The path of the program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The number of ranks.
    pub ranks: Ranks,
    /// The fewest ranks with which a restart may go on; `None`: always all.
    pub min_ranks: Option<u32>,
    /// The backend.
    pub backend: BackendChoice,
    /// The GPUs to use.
    pub gpus: GpuChoice,
    /// Make only its own GPU visible to each rank.
    pub isolate_gpus: bool,
    /// Let several ranks use one GPU.
    pub share_gpus: bool,
    /// Faults to inject.
    pub injections: Vec<Injection>,
    /// Which cores each rank may use.
    pub bind: Bind,
    /// The ranks' role, as for torchrun; `None`: the default one.
    pub role: Option<String>,
    /// Make only its own GPU visible to each rank, and 0 the `LOCAL_RANK` of all.
    pub virtual_local_rank: bool,
}

impl Request {
    /// One rank of `program` for each GPU.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Request {
            program: program.into(),
            arguments: Vec::new(),
            ranks: Ranks::Auto,
            min_ranks: None,
            backend: BackendChoice::Auto,
            gpus: GpuChoice::All,
            isolate_gpus: false,
            share_gpus: false,
            injections: Vec::new(),
            bind: Bind::Auto,
            role: None,
            virtual_local_rank: false,
        }
    }
}

/// The machine.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// The visible GPUs.
    pub gpus: Vec<Gpu>,
    /// The cores that may be used.
    pub topology: Topology,
    /// Variables for the number of threads that the user has set; they are kept.
    pub thread_variables: Vec<&'static str>,
    /// NCCL variables that the user has set; they are kept.
    pub nccl_variables: Vec<&'static str>,
    /// The user has set `PYTHONUNBUFFERED`, possibly to an empty value; it is kept.
    pub python_unbuffered_is_set: bool,
    /// The user has set `TORCH_NCCL_ASYNC_ERROR_HANDLING`; it is kept.
    pub error_handling_is_set: bool,
    /// The version of NCCL, if it matters and was found.
    pub nccl: Option<nccl_sys::Version>,
}

/// A program with its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramCommand {
    /// The path of the program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// The plan of one job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchPlan {
    /// What the ranks run: one command, or several with `--one-world`.
    pub commands: Vec<ProgramCommand>,
    /// The ranks, in order.
    pub ranks: Vec<RankPlan>,
    /// The GPUs that the ranks use or see, as far as they are known.
    pub gpus: Vec<Gpu>,
    /// No other launch may choose these GPUs or have chosen them.
    pub owns_gpus: bool,
    /// Faults to inject.
    pub injections: Vec<Injection>,
    /// Messages to print before the start.
    pub notices: Vec<String>,
}

/// The part of the plan for one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlan {
    /// The rank.
    pub rank: u32,
    /// The index of its command in [`LaunchPlan::commands`].
    pub command: usize,
    /// The environment variables that are known before the start, in documented order.
    pub environment: Vec<(&'static str, String)>,
    /// The cores it is bound to, if it is.
    pub cores: Option<CoreSet>,
    /// The number of threads it should use.
    pub threads: usize,
    /// One line about cores, threads and GPU.
    pub location: String,
    /// The GPU that it uses, if that is known.
    pub gpu: Option<Gpu>,
}

/// Values that are known only when the ranks are about to start.
#[derive(Debug, Clone)]
pub struct RunContext {
    /// Address of the rendezvous.
    pub rendezvous: String,
    /// Identifier of the run.
    pub run_id: String,
    /// Its name for PyTorch's scripts: that of `--rdzv-id`, or the identifier.
    pub torch_run_id: String,
    /// A TCP port that is reserved for the ranks.
    pub master_port: String,
    /// How often the ranks have been restarted.
    pub restart_count: u32,
    /// How often they may be.
    pub max_restarts: u32,
    /// Whether progress lines are shown.
    pub progress: bool,
    /// Number of ranks of all jobs of the launch.
    pub launch_ranks: u32,
    /// For each rank of this host the file for the error that ends it; none if there is no place for them.
    pub error_files: Vec<PathBuf>,
    /// Where the ranks of this host are among those of all hosts; `None` if there is only one.
    pub place: Option<NodePlace>,
}

/// The place of a node in a job of several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlace {
    /// Its number.
    pub node: u32,
    /// The number of nodes.
    pub nodes: u32,
    /// Its first rank.
    pub first_rank: u32,
    /// The number of ranks on all nodes.
    pub world_size: u32,
    /// Address of node 0.
    pub master_addr: String,
    /// What connects ranks of different hosts: `tcp` or `ucx`.
    pub net: &'static str,
    /// Faults to inject into ranks of the world, in the syntax of `MGPU_INJECT`.
    pub injections: String,
    /// Variables that make NCCL take another interface than it would choose.
    pub nccl_interface: Vec<(&'static str, String)>,
}

impl RunContext {
    /// Placeholders for a dry run.
    pub fn placeholder() -> Self {
        RunContext {
            rendezvous: "unix:(made at the start)".into(),
            run_id: "(made at the start)".into(),
            torch_run_id: "(made at the start)".into(),
            master_port: "(free port)".into(),
            restart_count: 0,
            max_restarts: 0,
            progress: false,
            launch_ranks: 0,
            error_files: Vec::new(),
            place: None,
        }
    }
}

impl ProgramCommand {
    /// Program and arguments as one line, for people.
    pub fn line(&self) -> String {
        let name = self.program.file_name().unwrap_or(self.program.as_os_str());
        let words = std::iter::once(name).chain(self.arguments.iter().map(OsString::as_os_str));
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }
}

impl LaunchPlan {
    /// The commands as one line, for people.
    pub fn command_line(&self) -> String {
        self.commands.iter().map(ProgramCommand::line).collect::<Vec<_>>().join(" : ")
    }

    /// Checks that the ranks exist that the requests of this plan name.
    fn check_ranks(&self, requests: &[Request]) -> Result<(), PlanError> {
        let ranks = self.ranks.len() as u32;
        if let Some(wrong) = self.injections.iter().find(|injection| injection.rank >= ranks) {
            return Err(PlanError::NoRankToInject(*wrong, ranks));
        }
        match requests.iter().find_map(|request| request.min_ranks.filter(|fewest| *fewest > ranks)) {
            Some(fewest) => Err(PlanError::TooManyAtLeast { fewest, ranks }),
            None => Ok(()),
        }
    }

    /// Whether its ranks use GPUs through NCCL.
    pub(crate) fn uses_nccl(&self) -> bool {
        self.ranks
            .iter()
            .flat_map(|rank| &rank.environment)
            .any(|(name, value)| *name == MGPU_BACKEND && value == "nccl")
    }

    /// The command of a rank.
    pub fn command_of(&self, rank: &RankPlan) -> &ProgramCommand {
        &self.commands[rank.command]
    }
}

impl RankPlan {
    /// [`location`](Self::location) with the rank's number in a world on several hosts.
    pub(crate) fn location_as(&self, rank: u32) -> String {
        let place = self.location.strip_prefix(&format!("rank {}", self.rank)).unwrap_or_default();
        format!("rank {rank}{place}")
    }

    /// All environment variables that are set for the rank.
    ///
    /// They include those that torchrun sets; the ranks of a host form a group, and all have the same role. Scripts
    /// read them, and so does PyTorch: `torch.distributed.is_torchelastic_launched()` checks for the run's identifier.
    /// `TORCHELASTIC_USE_AGENT_STORE` is `False`: otherwise the ranks would expect a store in the launcher, as torchrun
    /// has. So rank 0 creates the store, at `MASTER_PORT`.
    pub fn full_environment(&self, context: &RunContext) -> Vec<(&'static str, String)> {
        let mut environment = self.environment.clone();
        if let Some(place) = &context.place {
            place.apply(self.rank, &mut environment);
        }
        let value =
            |name: &str| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone());
        let [rank, world_size] = [RANK, WORLD_SIZE].map(|name| value(name).unwrap_or_default());
        let (node, nodes) = context.place.as_ref().map_or((0, 1), |place| (place.node, place.nodes));
        let master_addr = context.place.as_ref().map_or("127.0.0.1", |place| &place.master_addr).to_owned();
        environment.extend([
            (MGPU_RENDEZVOUS, context.rendezvous.clone()),
            (MGPU_RUN_ID, context.run_id.clone()),
            (MGPU_RESTART_COUNT, context.restart_count.to_string()),
            (MASTER_ADDR, master_addr),
            (MASTER_PORT, context.master_port.clone()),
            ("GROUP_RANK", node.to_string()),
            ("GROUP_WORLD_SIZE", nodes.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", context.restart_count.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", context.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", context.torch_run_id.clone()),
            ("TORCHELASTIC_USE_AGENT_STORE", "False".into()),
        ]);
        let roles = [(ROLE_RANK, rank), (ROLE_WORLD_SIZE, world_size), (ROLE_NAME, "default".into())];
        for (name, value) in roles {
            if environment.iter().all(|(key, _)| *key != name) {
                environment.push((name, value));
            }
        }
        let error_file = context.error_files.get(self.rank as usize).and_then(|path| path.to_str());
        environment.extend(error_file.map(|path| (ERROR_FILE, path.to_owned())));
        if context.progress {
            environment.push((MGPU_PROGRESS, "1".into()));
        }
        environment
    }

    /// The value of a variable that is known before the start, empty if it is not set.
    #[cfg(test)]
    fn value(&self, name: &str) -> String {
        let variable = self.environment.iter().find(|(key, _)| *key == name);
        variable.map(|(_, value)| value.clone()).unwrap_or_default()
    }
}

impl NodePlace {
    /// Changes the environment of the `number`-th rank of a host to that of a rank of all hosts.
    fn apply(&self, number: u32, environment: &mut Vec<(&'static str, String)>) {
        for (name, value) in environment.iter_mut() {
            match *name {
                RANK => *value = (self.first_rank + number).to_string(),
                WORLD_SIZE => *value = self.world_size.to_string(),
                nccl::HOST_ID => *value = nccl::host_id(self.first_rank + number),
                _ => {}
            }
        }
        if self.nodes > 1 {
            let on_one_host = nccl::on_one_host();
            environment.retain(|variable| !on_one_host.contains(variable));
        }
        environment.extend(self.nccl_interface.iter().cloned());
        environment.push((MGPU_NET, self.net.to_owned()));
        if !self.injections.is_empty() {
            environment.push((MGPU_INJECT, self.injections.clone()));
        }
    }
}

/// Makes the plan of a launch of one job.
///
/// # Errors
/// If the request cannot be met on this machine; the text says what to request instead.
pub fn plan(request: &Request, machine: &Machine) -> Result<LaunchPlan, PlanError> {
    Ok(plan_jobs(std::slice::from_ref(request), false, machine)?.remove(0))
}

/// Makes the plans of all jobs of a launch: one for each request, or a single one if all form one world. Different jobs
/// get different GPUs, and different cores if there is one for each rank.
///
/// # Errors
/// If the requests cannot be met on this machine; the text says what to request instead.
pub fn plan_jobs(
    requests: &[Request],
    one_world: bool,
    machine: &Machine,
) -> Result<Vec<LaunchPlan>, PlanError> {
    let several = requests.len() > 1;
    let shares = gpus::divide(requests, one_world, machine)?;
    let mut parts = Part::all(requests, shares, one_world);
    if one_world {
        check_same(requests)?;
    }
    elastic::check(requests, one_world)?;
    let groups: Vec<Group> = if one_world && requests.iter().all(|request| request.bind == requests[0].bind) {
        // One world is placed as if all its ranks ran the same program.
        vec![Group { bind: requests[0].bind, gpus: parts.iter().flat_map(Part::nodes).collect() }]
    } else {
        parts.iter().map(|part| Group { bind: part.request.bind, gpus: part.nodes() }).collect()
    };
    let mut places = place_groups(&machine.topology, &groups).into_iter();
    parts.iter_mut().for_each(|part| part.places = places.by_ref().take(part.share.ranks as usize).collect());
    if one_world {
        let plan = plan_world(&parts, machine)?;
        plan.check_ranks(requests)?;
        return Ok(vec![plan]);
    }
    let in_job = |(job, part): (usize, &Part<'_>)| {
        let named = |error| PlanError::InJob { job, error: Box::new(error) };
        let plan = plan_world(std::slice::from_ref(part), machine)
            .and_then(|plan| plan.check_ranks(&requests[job..=job]).map(|()| plan));
        plan.map_err(|error| if several { named(error) } else { error })
    };
    parts.iter().enumerate().map(in_job).collect()
}

/// The name of the backend for the ranks, and a notice if it may differ from what the user expects.
fn choose_backend(
    choice: BackendChoice,
    ranks: u32,
    gpus: usize,
    share_gpus: bool,
    nccl_is_built: bool,
) -> Result<(&'static str, Option<String>), PlanError> {
    match choice {
        BackendChoice::Cpu => Ok(("cpu", None)),
        BackendChoice::Auto if gpus == 0 => Ok(("cpu", None)),
        BackendChoice::Nccl if !nccl_is_built => Err(PlanError::NoNccl),
        BackendChoice::Auto if !nccl_is_built => {
            let notice = format!("{gpus} GPU(s) are not used: this build has the cpu backend only");
            Ok(("cpu", Some(notice)))
        }
        // On some machines the driver lists no GPU in /proc although CUDA finds them: each rank asks CUDA.
        BackendChoice::Nccl if gpus == 0 => Ok(("nccl", share_gpus.then(|| sharing(ranks, "GPUs")))),
        BackendChoice::Auto | BackendChoice::Nccl if gpus >= ranks as usize => Ok(("nccl", None)),
        BackendChoice::Auto | BackendChoice::Nccl if share_gpus => {
            let gpus = format!("{gpus} GPU{}", if gpus == 1 { "" } else { "s" });
            Ok(("nccl", Some(sharing(ranks, &gpus))))
        }
        BackendChoice::Auto | BackendChoice::Nccl => Err(PlanError::TooFewGpus { ranks, gpus }),
    }
}

fn sharing(ranks: u32, gpus: &str) -> String {
    format!("{ranks} ranks share {gpus}: timings of this run are meaningless")
}

#[cfg(test)]
mod tests;
