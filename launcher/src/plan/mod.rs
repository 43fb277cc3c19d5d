//! The launch plan: what every rank runs and sees, from the arguments and the machine. Pure: no I/O.
//!
//! A launch starts one or more *jobs*, separated by `:` on the command line. Each is a world of its own and has a plan of
//! its own; they are planned together, because their GPUs and cores are disjoint. With `--one-world` the parts between
//! the colons form one world, in which ranks run different commands.

mod gpus;

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use mgpu_control::inject::{self, Injection};
use mgpu_control::protocol::{
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, MAX_RANKS, MGPU_BACKEND, MGPU_DEVICE,
    MGPU_INJECT, MGPU_PROGRESS, MGPU_RENDEZVOUS, MGPU_RESTART_COUNT, MGPU_RUN_ID, MGPU_SHARE_GPUS,
    MGPU_THREADS, OMP_NUM_THREADS, RANK, WORLD_SIZE,
};

use crate::nccl;
use crate::placement::{self, Bind, CoreSet, Gpu, Group, Placement, Topology, place_groups};
pub use gpus::GpuChoice;
use gpus::Share;

/// Whether ranks of this build can use NCCL.
pub(crate) const NCCL_IS_BUILT: bool = cfg!(feature = "cuda");

/// Python buffers output to a pipe, and loses it in a crash, unless this variable has a value.
pub(crate) const PYTHONUNBUFFERED: &str = "PYTHONUNBUFFERED";

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
}

impl Request {
    /// One rank of `program` for each GPU.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Request {
            program: program.into(),
            arguments: Vec::new(),
            ranks: Ranks::Auto,
            backend: BackendChoice::Auto,
            gpus: GpuChoice::All,
            isolate_gpus: false,
            share_gpus: false,
            injections: Vec::new(),
            bind: Bind::Auto,
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
}

/// Why there is no plan.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Zero ranks.
    #[error("at least one rank is needed, not 0")]
    NoRanks,
    /// More ranks than [`MAX_RANKS`].
    #[error("{0} ranks are more than the {MAX_RANKS} that mgpurun starts")]
    TooManyRanks(u32),
    /// There are GPUs, but fewer than ranks.
    #[error(
        "{ranks} ranks and {gpus} GPU{}: choose -n {gpus} for one rank on each GPU, or --backend cpu for {ranks} ranks without GPUs (for tests only, --share-gpus)",
        if *gpus == 1 { "" } else { "s" }
    )]
    TooFewGpus {
        /// Requested ranks.
        ranks: u32,
        /// Visible GPUs.
        gpus: usize,
    },
    /// A fault for a rank that does not exist.
    #[error("--inject {0}: there is no rank {rank} among {1} (ranks count from 0)", rank = .0.rank)]
    NoRankToInject(Injection, u32),
    /// There are GPUs, but too few that no other job of the launch takes.
    #[error(
        "{}, and the other jobs of this launch leave {left} of {gpus} GPUs: choose fewer ranks, or --backend cpu (for tests only, --share-gpus)",
        count_ranks(*ranks)
    )]
    TooFewGpusLeft {
        /// Requested ranks.
        ranks: u32,
        /// GPUs that are left.
        left: usize,
        /// Visible GPUs.
        gpus: usize,
    },
    /// Fewer GPUs are free than ranks were requested.
    #[error(
        "{} and {free} free GPUs of {gpus}: {users}; choose fewer ranks, or name GPUs with --gpus",
        count_ranks(*ranks)
    )]
    TooFewFreeGpus {
        /// Requested ranks.
        ranks: u32,
        /// GPUs that are free.
        free: usize,
        /// Visible GPUs.
        gpus: usize,
        /// Who uses the others.
        users: String,
    },
    /// A GPU was named that is not there, or cannot be used.
    #[error("--gpus {name}: {problem}")]
    NoSuchGpu {
        /// As on the command line.
        name: String,
        /// Why it cannot be used, and what can.
        problem: String,
    },
    /// GPUs were chosen for ranks that use none.
    #[error("--gpus chooses GPUs, and --backend cpu uses none: leave out one of them")]
    GpusForCpu,
    /// It is unknown which GPUs there are, so they cannot be divided.
    #[error("several jobs cannot divide the GPUs, because neither the driver nor NVML lists any: {hint}")]
    UnknownGpus {
        /// What to try next.
        hint: &'static str,
    },
    /// Two jobs ask for all remaining GPUs.
    #[error(
        "-n auto for two jobs: both would take all GPUs that the others leave; choose -n or --gpus for each"
    )]
    TwoAutos,
    /// Parts of one world differ in an option that is the same for all of its ranks.
    #[error("--one-world: {option} differs between the parts, and the ranks of one world share it")]
    Mixed {
        /// The option.
        option: &'static str,
    },
    /// The error of one of several jobs.
    #[error("job {job}: {error}")]
    InJob {
        /// The job, numbered from 0.
        job: usize,
        /// Its error.
        error: Box<PlanError>,
    },
    /// NCCL was requested, and this build does not support it.
    #[error("the nccl backend is not part of this build (feature cuda); use --backend cpu")]
    NoNccl,
}

/// Same text as [`Display`](fmt::Display): `main` prints the error that it returns by its `Debug` text.
impl fmt::Debug for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl RunContext {
    /// Placeholders for a dry run.
    pub fn placeholder() -> Self {
        RunContext {
            rendezvous: "unix:(made at the start)".into(),
            run_id: "(made at the start)".into(),
            master_port: "(free port)".into(),
            restart_count: 0,
            max_restarts: 0,
            progress: false,
            launch_ranks: 0,
        }
    }
}

impl PlanError {
    /// A launch has reserved this GPU.
    pub(crate) fn held(gpu: &Gpu, holder: &str) -> Self {
        let problem = format!("the GPU is reserved by {holder}; choose another one, or --gpus free");
        PlanError::NoSuchGpu { name: gpu.name.clone(), problem }
    }

    /// True if the command line is wrong, whatever the machine has.
    pub(crate) fn is_usage(&self) -> bool {
        match self {
            PlanError::InJob { error, .. } => error.is_usage(),
            PlanError::NoRanks
            | PlanError::TooManyRanks(_)
            | PlanError::NoRankToInject(..)
            | PlanError::GpusForCpu
            | PlanError::TwoAutos
            | PlanError::Mixed { .. } => true,
            _ => false,
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

    /// The command of a rank.
    pub fn command_of(&self, rank: &RankPlan) -> &ProgramCommand {
        &self.commands[rank.command]
    }
}

impl RankPlan {
    /// All environment variables that are set for the rank.
    ///
    /// They include those that torchrun sets for the ranks of one machine, which form one group with one role. Scripts
    /// read them, and so does PyTorch: `torch.distributed.is_torchelastic_launched()` checks for the run's identifier.
    /// `TORCHELASTIC_USE_AGENT_STORE` is not set: it would make the ranks expect a store in the launcher, as torchrun
    /// has. Without it rank 0 creates the store, at `MASTER_PORT`.
    pub fn full_environment(&self, context: &RunContext) -> Vec<(&'static str, String)> {
        let mut environment = self.environment.clone();
        let world_size = self.value(WORLD_SIZE);
        environment.extend([
            (MGPU_RENDEZVOUS, context.rendezvous.clone()),
            (MGPU_RUN_ID, context.run_id.clone()),
            (MGPU_RESTART_COUNT, context.restart_count.to_string()),
            (MASTER_ADDR, "127.0.0.1".into()),
            (MASTER_PORT, context.master_port.clone()),
            ("GROUP_RANK", "0".into()),
            ("GROUP_WORLD_SIZE", "1".into()),
            ("ROLE_RANK", self.rank.to_string()),
            ("ROLE_WORLD_SIZE", world_size),
            ("ROLE_NAME", "default".into()),
            ("TORCHELASTIC_RESTART_COUNT", context.restart_count.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", context.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", context.run_id.clone()),
        ]);
        if context.progress {
            environment.push((MGPU_PROGRESS, "1".into()));
        }
        environment
    }

    /// The value of a variable that is known before the start, empty if it is not set.
    fn value(&self, name: &str) -> String {
        let variable = self.environment.iter().find(|(key, _)| *key == name);
        variable.map(|(_, value)| value.clone()).unwrap_or_default()
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
    let mut parts: Vec<Part<'_>> =
        requests.iter().zip(shares).map(|(request, share)| Part::new(request, share)).collect();
    if one_world {
        check_same(requests)?;
    }
    let groups: Vec<Group> = if one_world && requests.iter().all(|request| request.bind == requests[0].bind) {
        // One world is placed as if all its ranks ran the same program.
        vec![Group { bind: requests[0].bind, gpus: parts.iter().flat_map(Part::nodes).collect() }]
    } else {
        parts.iter().map(|part| Group { bind: part.request.bind, gpus: part.nodes() }).collect()
    };
    let mut places = place_groups(&machine.topology, &groups).into_iter();
    parts.iter_mut().for_each(|part| part.places = places.by_ref().take(part.share.ranks as usize).collect());
    if one_world {
        return Ok(vec![plan_world(&parts, machine)?]);
    }
    let in_job = |(job, part): (usize, &Part<'_>)| {
        let named = |error| PlanError::InJob { job, error: Box::new(error) };
        plan_world(std::slice::from_ref(part), machine)
            .map_err(|error| if several { named(error) } else { error })
    };
    parts.iter().enumerate().map(in_job).collect()
}

/// The ranks of one request.
struct Part<'a> {
    request: &'a Request,
    share: Share,
    places: Vec<Placement>,
}

impl<'a> Part<'a> {
    fn new(request: &'a Request, share: Share) -> Self {
        Part { request, share, places: Vec::new() }
    }

    /// The GPU of its `index`-th rank, if that is known.
    ///
    /// A rank uses device LOCAL_RANK, modulo the number of GPUs if they are shared. With fewer GPUs than ranks and no
    /// sharing it is unknown which rank uses which GPU.
    fn gpu(&self, index: u32) -> Option<&Gpu> {
        let gpus = &self.share.gpus;
        let is_known = self.request.backend != BackendChoice::Cpu
            && (gpus.len() >= self.share.ranks as usize || self.request.share_gpus);
        gpus.get(index as usize % gpus.len().max(1)).filter(|_| is_known)
    }

    /// The NUMA node of each rank's GPU.
    fn nodes(&self) -> Vec<Option<u32>> {
        (0..self.share.ranks).map(|index| self.gpu(index).and_then(|gpu| gpu.node)).collect()
    }
}

/// Checks the options that all ranks of a world have in common.
fn check_same(requests: &[Request]) -> Result<(), PlanError> {
    let differs =
        |same: fn(&Request, &Request) -> bool| !requests.iter().all(|other| same(&requests[0], other));
    if differs(|a, b| a.backend == b.backend) {
        return Err(PlanError::Mixed { option: "--backend" });
    }
    if differs(|a, b| a.share_gpus == b.share_gpus) {
        return Err(PlanError::Mixed { option: "--share-gpus" });
    }
    Ok(())
}

/// The plan of one world, whose ranks are those of all `parts` in turn.
fn plan_world(parts: &[Part<'_>], machine: &Machine) -> Result<LaunchPlan, PlanError> {
    let first = parts[0].request;
    let ranks: u32 = parts.iter().map(|part| part.share.ranks).sum();
    if ranks > MAX_RANKS {
        return Err(PlanError::TooManyRanks(ranks));
    }
    let mut visible: Vec<&Gpu> = Vec::new();
    for gpu in parts.iter().flat_map(|part| &part.share.gpus) {
        if !visible.contains(&gpu) {
            visible.push(gpu);
        }
    }
    let gpus = visible.len();
    let (backend, notice) = choose_backend(first.backend, ranks, gpus, first.share_gpus, NCCL_IS_BUILT)?;
    let injections: Vec<Injection> = parts.iter().flat_map(|part| part.request.injections.clone()).collect();
    if let Some(wrong) = injections.iter().find(|injection| injection.rank >= ranks) {
        return Err(PlanError::NoRankToInject(*wrong, ranks));
    }
    let shares_gpus = first.share_gpus && backend == "nccl" && gpus < ranks as usize;
    let idle = (first.share_gpus && !shares_gpus).then(|| match backend {
        "nccl" => format!("--share-gpus has no effect: {gpus} GPUs are enough for {ranks} ranks"),
        _ => "--share-gpus has no effect: no GPU is used".to_owned(),
    });
    let unmet =
        parts.iter().filter_map(|part| placement::unmet(&machine.topology, part.request.bind, &part.places));
    let faults = injections.iter().map(|injection| format!("a fault will be injected: {injection}"));
    let used_too = visible
        .iter()
        .filter(|_| first.gpus != GpuChoice::All)
        .filter_map(|gpu| Some(format!("GPU {} is used by {}, too", gpu.name, gpu.user.as_ref()?)));
    let notices = notice.into_iter().chain(idle).chain(unmet).chain(used_too).chain(faults).collect();

    let all = parts
        .iter()
        .enumerate()
        .flat_map(|(command, part)| (0..part.share.ranks).map(move |index| (command, part, index)));
    let rank_plan = |(rank, (command, part, index)): (u32, (usize, &Part<'_>, u32))| {
        let place = &part.places[index as usize];
        let gpu = part.gpu(index);
        let mut environment = vec![
            (RANK, rank.to_string()),
            (WORLD_SIZE, ranks.to_string()),
            (LOCAL_RANK, rank.to_string()),
            (LOCAL_WORLD_SIZE, ranks.to_string()),
            (MGPU_BACKEND, backend.to_string()),
        ];
        // CUDA lets a process use only the first MIG instance in its list, so each rank gets a list of one. In a list of
        // a whole world's GPUs, a rank has to find its own one by its number.
        let isolates = part.request.isolate_gpus
            || part.share.gpus.iter().any(|gpu| gpu.name.starts_with("MIG-"))
            || part.share.is_narrowed && gpu.is_some() && visible.get(rank as usize).copied() != gpu;
        if isolates && let Some(gpu) = gpu.or_else(|| part.share.gpus.get(index as usize)) {
            // The rank sees this GPU only, so its index is 0.
            let name = if part.share.is_narrowed { gpu.lasting_name() } else { &gpu.name };
            environment.extend([("CUDA_VISIBLE_DEVICES", name.to_owned()), (MGPU_DEVICE, "0".into())]);
        } else if part.share.is_narrowed && !visible.is_empty() {
            let names: Vec<&str> = visible.iter().map(|gpu| gpu.lasting_name()).collect();
            environment.push(("CUDA_VISIBLE_DEVICES", names.join(",")));
        }
        if backend == "nccl" {
            let mut variables = nccl::on_one_host();
            if shares_gpus {
                environment.push((MGPU_SHARE_GPUS, "1".into()));
                variables.extend(nccl::on_one_gpu(rank, machine.nccl));
            }
            let is_free = |(name, _): &(&'static str, String)| !machine.nccl_variables.contains(name);
            environment.extend(variables.into_iter().filter(is_free));
        }
        if !injections.is_empty() {
            environment.push((MGPU_INJECT, inject::join(&injections)));
        }
        for name in [MGPU_THREADS, OMP_NUM_THREADS] {
            if !machine.thread_variables.contains(&name) {
                environment.push((name, place.threads.to_string()));
            }
        }
        if !machine.python_unbuffered_is_set {
            environment.push((PYTHONUNBUFFERED, "1".into()));
        }
        let location = placement::describe(&machine.topology, rank, place, gpu);
        RankPlan { rank, command, environment, cores: place.cores.clone(), location, gpu: gpu.cloned() }
    };
    let command = |part: &Part<'_>| ProgramCommand {
        program: part.request.program.clone(),
        arguments: part.request.arguments.clone(),
    };
    let plans: Vec<RankPlan> = (0..).zip(all).map(rank_plan).collect();
    let is_narrowed = parts.iter().any(|part| part.share.is_narrowed);
    let used = || plans.iter().filter_map(|rank| rank.gpu.clone());
    let chosen = parts.iter().any(|part| part.request.gpus != GpuChoice::All);
    Ok(LaunchPlan {
        commands: parts.iter().map(command).collect(),
        gpus: if is_narrowed { visible.into_iter().cloned().collect() } else { used().collect() },
        owns_gpus: chosen && !first.share_gpus,
        ranks: plans,
        notices,
        injections,
    })
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

/// "1 rank" or "2 ranks".
fn count_ranks(ranks: u32) -> String {
    format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" })
}

fn sharing(ranks: u32, gpus: &str) -> String {
    format!("{ranks} ranks share {gpus}: timings of this run are meaningless")
}

#[cfg(test)]
mod tests;
