//! The launch plan: what every rank runs and sees, from the arguments and the machine. Pure: no I/O.

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
use crate::placement::{self, Bind, CoreSet, Gpu, Topology, place};

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

/// The user's request.
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
    /// Make only its own GPU visible to each rank.
    pub isolate_gpus: bool,
    /// Let several ranks use one GPU.
    pub share_gpus: bool,
    /// Faults to inject.
    pub injections: Vec<Injection>,
    /// Which cores each rank may use.
    pub bind: Bind,
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

/// The launch plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchPlan {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The ranks, in order.
    pub ranks: Vec<RankPlan>,
    /// Messages to print before the start.
    pub notices: Vec<String>,
}

/// The part of the plan for one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlan {
    /// The rank.
    pub rank: u32,
    /// The environment variables that are known before the start, in documented order.
    pub environment: Vec<(&'static str, String)>,
    /// The cores it is bound to, if it is.
    pub cores: Option<CoreSet>,
    /// One line about cores, threads and GPU.
    pub location: String,
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
        }
    }
}

impl LaunchPlan {
    /// Program and arguments as one line, for people.
    pub fn command_line(&self) -> String {
        let name = self.program.file_name().unwrap_or(self.program.as_os_str());
        let words = std::iter::once(name).chain(self.arguments.iter().map(OsString::as_os_str));
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
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

/// Makes the launch plan.
///
/// # Errors
/// If the request cannot be met on this machine; the text says what to request instead.
pub fn plan(request: &Request, machine: &Machine) -> Result<LaunchPlan, PlanError> {
    let gpus = machine.gpus.len();
    let ranks = match request.ranks {
        Ranks::Auto => gpus.max(1) as u32,
        Ranks::Count(0) => return Err(PlanError::NoRanks),
        Ranks::Count(count) if count > MAX_RANKS => return Err(PlanError::TooManyRanks(count)),
        Ranks::Count(count) => count,
    };
    let (backend, notice) = choose_backend(request.backend, ranks, gpus, request.share_gpus, NCCL_IS_BUILT)?;
    if let Some(wrong) = request.injections.iter().find(|injection| injection.rank >= ranks) {
        return Err(PlanError::NoRankToInject(*wrong, ranks));
    }
    // A rank uses device LOCAL_RANK, modulo the number of GPUs if they are shared. With fewer GPUs than ranks and no
    // sharing it is unknown which rank uses which GPU.
    let uses_gpus =
        request.backend != BackendChoice::Cpu && gpus > 0 && (gpus >= ranks as usize || request.share_gpus);
    let gpu = |rank: u32| machine.gpus.get(rank as usize % gpus.max(1)).filter(|_| uses_gpus);
    let near: Vec<_> = (0..ranks).map(|rank| gpu(rank).and_then(|gpu| gpu.node)).collect();
    let places = place(&machine.topology, request.bind, &near);
    let unmet = placement::unmet(&machine.topology, request.bind, &places);
    let shares_gpus = request.share_gpus && backend == "nccl" && gpus < ranks as usize;
    let idle = (request.share_gpus && !shares_gpus).then(|| match backend {
        "nccl" => format!("--share-gpus has no effect: {gpus} GPUs are enough for {ranks} ranks"),
        _ => "--share-gpus has no effect: no GPU is used".to_owned(),
    });
    // CUDA lets a process use only the first MIG instance in its list, so each rank gets a list of one.
    let isolates = request.isolate_gpus || machine.gpus.iter().any(|gpu| gpu.name.starts_with("MIG-"));
    let faults = request.injections.iter().map(|injection| format!("a fault will be injected: {injection}"));
    let notices = notice.into_iter().chain(idle).chain(unmet).chain(faults).collect();
    let rank_plan = |(rank, place): (u32, placement::Placement)| {
        let mut environment = vec![
            (RANK, rank.to_string()),
            (WORLD_SIZE, ranks.to_string()),
            (LOCAL_RANK, rank.to_string()),
            (LOCAL_WORLD_SIZE, ranks.to_string()),
            (MGPU_BACKEND, backend.to_string()),
        ];
        let isolated = if uses_gpus { gpu(rank) } else { machine.gpus.get(rank as usize) };
        if isolates && let Some(gpu) = isolated {
            // The rank sees this GPU only, so its index is 0.
            environment.extend([("CUDA_VISIBLE_DEVICES", gpu.name.clone()), (MGPU_DEVICE, "0".into())]);
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
        if !request.injections.is_empty() {
            environment.push((MGPU_INJECT, inject::join(&request.injections)));
        }
        for name in [MGPU_THREADS, OMP_NUM_THREADS] {
            if !machine.thread_variables.contains(&name) {
                environment.push((name, place.threads.to_string()));
            }
        }
        if !machine.python_unbuffered_is_set {
            environment.push((PYTHONUNBUFFERED, "1".into()));
        }
        let location = placement::describe(&machine.topology, rank, &place, gpu(rank));
        RankPlan { rank, environment, cores: place.cores, location }
    };
    Ok(LaunchPlan {
        program: request.program.clone(),
        arguments: request.arguments.clone(),
        ranks: (0..ranks).zip(places).map(rank_plan).collect(),
        notices,
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

fn sharing(ranks: u32, gpus: &str) -> String {
    format!("{ranks} ranks share {gpus}: timings of this run are meaningless")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(ranks: Ranks) -> Request {
        Request {
            program: "/bin/true".into(),
            arguments: vec![],
            ranks,
            backend: BackendChoice::Auto,
            isolate_gpus: false,
            share_gpus: false,
            injections: vec![],
            bind: Bind::Auto,
        }
    }

    fn machine(gpus: usize) -> Machine {
        let gpu = |gpu: usize| Gpu { name: format!("GPU-{gpu}"), bus: None, node: Some(0) };
        Machine { gpus: (0..gpus).map(gpu).collect(), ..Machine::default() }
    }

    /// Two nodes of two cores, and two GPUs, the first on the second node.
    fn two_nodes() -> Machine {
        let node = |number: u32, cores: [usize; 2]| crate::placement::Node {
            number,
            cores: cores.iter().map(|core| CoreSet::from_iter([*core])).collect(),
        };
        let topology = Topology { nodes: vec![node(0, [0, 1]), node(1, [2, 3])], usable: 4 };
        let gpu = |index: u32| Gpu {
            name: index.to_string(),
            bus: Some(format!("0000:0{index}:00.0")),
            node: Some(1 - index),
        };
        Machine { gpus: vec![gpu(0), gpu(1)], topology, ..Machine::default() }
    }

    proptest! {
        #[test]
        fn every_rank_gets_its_variables(count in 1u32..100, gpus in 0usize..10, isolate: bool) {
            let cpu = BackendChoice::Cpu;
            let request = Request { isolate_gpus: isolate, backend: cpu, ..request(Ranks::Count(count)) };
            let plan = plan(&request, &machine(gpus)).unwrap();
            prop_assert_eq!(plan.ranks.len(), count as usize);
            for (index, rank) in plan.ranks.iter().enumerate() {
                let value = |name| rank.environment.iter().find(|(key, _)| *key == name).map(|(_, v)| v.clone());
                prop_assert_eq!(value(RANK), Some(index.to_string()));
                prop_assert_eq!(value(LOCAL_RANK), Some(index.to_string()));
                prop_assert_eq!(value(WORLD_SIZE), Some(count.to_string()));
                let gpu = (isolate && index < gpus).then(|| format!("GPU-{index}"));
                prop_assert_eq!(value(MGPU_DEVICE), gpu.as_ref().map(|_| "0".to_owned()));
                prop_assert_eq!(value("CUDA_VISIBLE_DEVICES"), gpu);
            }
        }

        #[test]
        fn the_backend_depends_on_ranks_and_gpus(ranks in 1u32..20, gpus in 0usize..20) {
            let nccl = choose_backend(BackendChoice::Nccl, ranks, gpus, false, true);
            prop_assert_eq!(nccl.is_ok(), gpus == 0 || gpus >= ranks as usize);
            let shared = choose_backend(BackendChoice::Nccl, ranks, gpus, true, true).unwrap();
            prop_assert_eq!((shared.0, shared.1.is_some()), ("nccl", gpus < ranks as usize));
            let chosen = choose_backend(BackendChoice::Auto, ranks, gpus, false, true);
            match gpus {
                0 => prop_assert_eq!(chosen.unwrap().0, "cpu"),
                _ if gpus >= ranks as usize => prop_assert_eq!(chosen.unwrap().0, "nccl"),
                _ => {
                    let error = chosen.unwrap_err().to_string();
                    let remedy = format!("-n {gpus}");
                    prop_assert!(error.contains(&remedy) && error.contains("--backend cpu"));
                }
            }
        }
    }

    #[test]
    fn the_variables_of_torchrun_are_set() {
        let plan = plan(&request(Ranks::Count(3)), &machine(0)).unwrap();
        let context = RunContext {
            restart_count: 1,
            max_restarts: 4,
            run_id: "run".into(),
            ..RunContext::placeholder()
        };
        let environment = plan.ranks[2].full_environment(&context);
        for (name, value) in [
            (RANK, "2"),
            (MGPU_RESTART_COUNT, "1"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_RANK", "2"),
            ("ROLE_WORLD_SIZE", "3"),
            ("ROLE_NAME", "default"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("TORCHELASTIC_MAX_RESTARTS", "4"),
            ("TORCHELASTIC_RUN_ID", "run"),
        ] {
            let found: Vec<&str> =
                environment.iter().filter(|(key, _)| *key == name).map(|(_, value)| value.as_str()).collect();
            assert_eq!(found, [value], "{name}");
        }
        let mut names: Vec<&str> = environment.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        assert!(!names.contains(&"TORCHELASTIC_USE_AGENT_STORE"));
    }

    #[test]
    fn auto_is_one_rank_per_gpu_or_one_rank() {
        assert_eq!(plan(&request(Ranks::Auto), &machine(0)).unwrap().ranks.len(), 1);
        let planned = plan(&request(Ranks::Auto), &machine(8)).unwrap();
        assert_eq!(planned.ranks.len(), 8);
        assert_eq!(planned.notices.len(), usize::from(!NCCL_IS_BUILT));
        let (backend, notice) = choose_backend(BackendChoice::Auto, 8, 8, false, false).unwrap();
        assert_eq!((backend, notice.unwrap().contains("8 GPU(s) are not used")), ("cpu", true));
        let refused = choose_backend(BackendChoice::Nccl, 8, 8, false, false);
        assert_eq!(refused, Err(PlanError::NoNccl));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn ranks_that_share_a_gpu_get_nccl_variables_that_the_user_has_not_set() {
        let request = Request { share_gpus: true, ..request(Ranks::Count(3)) };
        let machine = Machine { nccl_variables: vec!["NCCL_NET"], ..machine(2) };
        let plan = plan(&request, &machine).unwrap();
        assert!(plan.notices[0].starts_with("3 ranks share 2 GPUs"), "{:?}", plan.notices);
        let rank = &plan.ranks[2];
        assert_eq!((rank.value(MGPU_BACKEND), rank.value(MGPU_SHARE_GPUS)), ("nccl".into(), "1".into()));
        assert_eq!(
            (rank.value("NCCL_HOSTID"), rank.value("NCCL_NET")),
            ("mgpu-rank-2".into(), String::new())
        );
        assert_eq!(rank.value("NCCL_SOCKET_IFNAME"), "lo");
        assert!(rank.location.ends_with("GPU GPU-0"), "{}", rank.location);
    }

    #[test]
    fn share_gpus_without_need_has_no_effect_but_a_notice() {
        let request = Request { share_gpus: true, ..request(Ranks::Count(2)) };
        for (gpus, text) in [(2, "2 GPUs are enough for 2 ranks"), (0, "no GPU is used")] {
            let plan = plan(&request, &machine(gpus)).unwrap();
            assert_eq!(plan.notices, [format!("--share-gpus has no effect: {text}")]);
            assert_eq!(plan.ranks[1].value("NCCL_HOSTID") + &plan.ranks[1].value(MGPU_SHARE_GPUS), "");
        }
    }

    #[test]
    fn a_rank_sees_only_its_own_mig_instance() {
        let gpu = |name: &str| Gpu { name: name.into(), ..Gpu::default() };
        let machine = Machine { gpus: vec![gpu("MIG-a"), gpu("MIG-b")], ..Machine::default() };
        let plan = plan(&request(Ranks::Count(2)), &machine).unwrap();
        let rank = &plan.ranks[1];
        assert_eq!(
            (rank.value("CUDA_VISIBLE_DEVICES"), rank.value(MGPU_DEVICE)),
            ("MIG-b".into(), "0".into())
        );
    }

    #[test]
    fn ranks_are_bound_to_the_node_of_their_gpu() {
        let ranks = |request: &Request| plan(request, &two_nodes()).unwrap().ranks;
        let near = ranks(&request(Ranks::Auto));
        assert_eq!(near[0].location, "rank 0: cores 2-3 (NUMA node 1), 2 threads, GPU 0 at 0000:00:00.0");
        assert_eq!(near[1].location, "rank 1: cores 0-1 (NUMA node 0), 2 threads, GPU 1 at 0000:01:00.0");
        // Ranks without a known GPU are placed in the order of the nodes.
        let cpu = ranks(&Request { backend: BackendChoice::Cpu, ..request(Ranks::Count(2)) });
        assert_eq!(cpu[0].location, "rank 0: cores 0-1 (NUMA node 0), 2 threads");
        let cpu = Request { backend: BackendChoice::Cpu, ..request(Ranks::Count(4)) };
        assert_eq!(ranks(&cpu)[3].location, "rank 3: cores 2-3 (NUMA node 1), 1 thread");
        let free = ranks(&Request { bind: Bind::None, ..request(Ranks::Count(2)) });
        assert_eq!(free[1].location, "rank 1: not bound (cores 0-3), 2 threads, GPU 1 at 0000:01:00.0");
        assert_eq!(free[1].cores, None);
        let many = Request { bind: Bind::Core, backend: BackendChoice::Cpu, ..request(Ranks::Count(5)) };
        let notice = plan(&many, &two_nodes()).unwrap().notices.remove(0);
        assert!(
            notice.starts_with("ranks are not bound: 5 ranks are more than the 4 available cores"),
            "{notice}"
        );
    }

    #[test]
    fn thread_variables_set_by_the_user_are_kept() {
        let values = |machine: &Machine| {
            let rank = plan(&request(Ranks::Count(1)), machine).unwrap().ranks.remove(0);
            let value = |name| rank.environment.iter().find(|(key, _)| *key == name).map(|(_, v)| v.clone());
            (value(MGPU_THREADS), value(OMP_NUM_THREADS))
        };
        let machine = Machine { gpus: Vec::new(), ..two_nodes() };
        assert_eq!(values(&machine), (Some("4".into()), Some("4".into())));
        let set = Machine { thread_variables: vec![OMP_NUM_THREADS], ..machine };
        assert_eq!(values(&set), (Some("4".into()), None));
    }

    #[test]
    fn pythonunbuffered_is_set_unless_the_user_has_set_it() {
        let value = |python_unbuffered_is_set| {
            let machine = Machine { python_unbuffered_is_set, ..machine(0) };
            plan(&request(Ranks::Count(1)), &machine).unwrap().ranks.remove(0).value(PYTHONUNBUFFERED)
        };
        assert_eq!([value(false), value(true)], ["1", ""]);
    }

    #[test]
    fn requests_that_cannot_be_met_are_errors() {
        assert_eq!(plan(&request(Ranks::Count(0)), &machine(0)), Err(PlanError::NoRanks));
        assert_eq!(plan(&request(Ranks::Count(5000)), &machine(0)), Err(PlanError::TooManyRanks(5000)));
        let nccl = Request { backend: BackendChoice::Nccl, ..request(Ranks::Count(2)) };
        let few = if NCCL_IS_BUILT { PlanError::TooFewGpus { ranks: 2, gpus: 1 } } else { PlanError::NoNccl };
        assert_eq!(plan(&nccl, &machine(1)), Err(few));
        let wrong = "rank=2,step=1,fault=hang".parse().unwrap();
        let inject = Request { injections: vec![wrong], ..request(Ranks::Count(2)) };
        let error = plan(&inject, &machine(0)).unwrap_err().to_string();
        assert_eq!(
            error,
            "--inject rank=2,step=1,fault=hang: there is no rank 2 among 2 (ranks count from 0)"
        );
    }
}
