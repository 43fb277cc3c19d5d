//! The plan of one world, from the GPUs and cores of its ranks.

use mgpu_control::inject::{self, Injection};
use mgpu_control::protocol::{
    LOCAL_RANK, LOCAL_WORLD_SIZE, MAX_RANKS, MGPU_BACKEND, MGPU_DEVICE, MGPU_INJECT, MGPU_SHARE_GPUS,
    MGPU_THREADS, OMP_NUM_THREADS, RANK, WORLD_SIZE,
};

use super::gpus::Share;
use super::{
    BackendChoice, ERROR_HANDLING, GpuChoice, LaunchPlan, Machine, NCCL_IS_BUILT, PYTHONUNBUFFERED,
    PlanError, ProgramCommand, ROLE_NAME, ROLE_RANK, ROLE_WORLD_SIZE, RankPlan, Request, choose_backend,
};
use crate::nccl;
use crate::placement::{self, Gpu, Placement};

/// The ranks of one request.
pub(super) struct Part<'a> {
    pub(super) request: &'a Request,
    pub(super) share: Share,
    /// The number of its first rank in the world, and the number of all ranks there.
    in_world: (u32, u32),
    pub(super) places: Vec<Placement>,
}

impl<'a> Part<'a> {
    /// The parts of the worlds of all `requests`: one world, or one for each.
    pub(super) fn all(requests: &'a [Request], shares: Vec<Share>, one_world: bool) -> Vec<Self> {
        let all: u32 = shares.iter().map(|share| share.ranks).sum();
        let mut first = 0;
        let part = |(request, share): (&'a Request, Share)| {
            let in_world = if one_world { (first, all) } else { (0, share.ranks) };
            first += share.ranks;
            Part { request, share, in_world, places: Vec::new() }
        };
        requests.iter().zip(shares).map(part).collect()
    }

    /// The GPU of its `index`-th rank, if that is known.
    ///
    /// A rank uses device LOCAL_RANK, modulo the number of GPUs if they are shared. With fewer GPUs than ranks and no
    /// sharing it is unknown which rank uses which GPU.
    fn gpu(&self, index: u32) -> Option<&Gpu> {
        let gpus = &self.share.gpus;
        let (first, ranks) = if self.share.is_narrowed { (0, self.share.ranks) } else { self.in_world };
        let is_known = self.request.backend != BackendChoice::Cpu
            && (gpus.len() >= ranks as usize || self.request.share_gpus);
        gpus.get((first + index) as usize % gpus.len().max(1)).filter(|_| is_known)
    }

    /// The NUMA node of each rank's GPU.
    pub(super) fn nodes(&self) -> Vec<Option<u32>> {
        (0..self.share.ranks).map(|index| self.gpu(index).and_then(|gpu| gpu.node)).collect()
    }
}

/// Checks the options that all ranks of a world have in common.
pub(super) fn check_same(requests: &[Request]) -> Result<(), PlanError> {
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
pub(super) fn plan_world(parts: &[Part<'_>], machine: &Machine) -> Result<LaunchPlan, PlanError> {
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
    let shares_gpus = first.share_gpus && backend == "nccl" && gpus < ranks as usize;
    let idle = (first.share_gpus && !shares_gpus).then(|| match backend {
        "nccl" => format!("--share-gpus has no effect: {gpus} GPUs are enough for {ranks} ranks"),
        _ => "--share-gpus has no effect: no GPU is used".to_owned(),
    });
    let unmet =
        parts.iter().filter_map(|part| placement::unmet(&machine.topology, part.request.bind, &part.places));
    let is_chosen = parts.iter().any(|part| part.request.gpus != GpuChoice::All);
    let used = visible.iter().filter(|_| is_chosen).filter_map(|gpu| Some((gpu, gpu.user.as_ref()?)));
    let used = used.map(|(gpu, user)| format!("GPU {} is used by {user}, too", gpu.name));
    let faults = injections.iter().map(|injection| format!("a fault will be injected: {injection}"));
    let notices = notice.into_iter().chain(idle).chain(unmet).chain(used).chain(faults).collect();

    let world = World { parts, ranks, backend, visible, shares_gpus, injections: &injections, machine };
    let all = parts
        .iter()
        .enumerate()
        .flat_map(|(command, part)| (0..part.share.ranks).map(move |index| (command, part, index)));
    let plan = |(rank, (command, part, index))| world.plan_rank(rank, command, part, index);
    let plans: Vec<RankPlan> = (0..).zip(all).map(plan).collect();
    let is_narrowed = parts.iter().any(|part| part.share.is_narrowed);
    let reserved = match is_narrowed {
        true => world.visible.into_iter().cloned().collect(),
        false => plans.iter().filter_map(|rank| rank.gpu.clone()).collect(),
    };
    let command = |part: &Part<'_>| ProgramCommand {
        program: part.request.program.clone(),
        arguments: part.request.arguments.clone(),
    };
    Ok(LaunchPlan {
        commands: parts.iter().map(command).collect(),
        ranks: plans,
        gpus: reserved,
        owns_gpus: is_chosen && !first.share_gpus,
        notices,
        injections,
    })
}

/// What all ranks of a world have in common.
struct World<'a> {
    parts: &'a [Part<'a>],
    ranks: u32,
    backend: &'static str,
    /// The GPUs of all ranks.
    visible: Vec<&'a Gpu>,
    shares_gpus: bool,
    injections: &'a [Injection],
    machine: &'a Machine,
}

impl World<'_> {
    /// The plan of a rank, the `index`-th one of `part`.
    fn plan_rank(&self, rank: u32, command: usize, part: &Part<'_>, index: u32) -> RankPlan {
        let (place, gpu) = (&part.places[index as usize], part.gpu(index));
        let local_rank = if part.request.virtual_local_rank { 0 } else { rank };
        let mut environment = vec![
            (RANK, rank.to_string()),
            (WORLD_SIZE, self.ranks.to_string()),
            (LOCAL_RANK, local_rank.to_string()),
            (LOCAL_WORLD_SIZE, self.ranks.to_string()),
            (MGPU_BACKEND, self.backend.to_string()),
        ];
        environment.extend(self.devices(rank, part, index));
        if self.backend == "nccl" {
            let mut variables = nccl::on_one_host();
            if self.shares_gpus {
                environment.push((MGPU_SHARE_GPUS, "1".into()));
                variables.extend(nccl::on_one_gpu(rank, self.machine.nccl));
            }
            let is_free = |(name, _): &(&'static str, String)| !self.machine.nccl_variables.contains(name);
            environment.extend(variables.into_iter().filter(is_free));
        }
        if !self.injections.is_empty() {
            environment.push((MGPU_INJECT, inject::join(self.injections)));
        }
        for name in [MGPU_THREADS, OMP_NUM_THREADS] {
            if !self.machine.thread_variables.contains(&name) {
                environment.push((name, place.threads.to_string()));
            }
        }
        if !self.machine.python_unbuffered_is_set {
            environment.push((PYTHONUNBUFFERED, "1".into()));
        }
        if !self.machine.error_handling_is_set {
            environment.push((ERROR_HANDLING, "1".into()));
        }
        environment.extend(self.role(command, index));
        let location = placement::describe(&self.machine.topology, rank, place, gpu);
        let Placement { cores, threads } = place.clone();
        RankPlan { rank, command, environment, cores, threads, location, gpu: gpu.cloned() }
    }

    /// The role of the `index`-th rank of a part, and its place among the ranks of the same role, as far as they are not
    /// those of all ranks.
    fn role(&self, part: usize, index: u32) -> Vec<(&'static str, String)> {
        let role = |part: &Part<'_>| part.request.role.clone();
        let own = role(&self.parts[part]);
        let with_it = |parts: &[Part<'_>]| -> u32 {
            parts.iter().filter(|part| role(part) == own).map(|part| part.share.ranks).sum()
        };
        let all = with_it(self.parts);
        let mut variables = Vec::new();
        if all < self.ranks {
            let number = with_it(&self.parts[..part]) + index;
            variables.extend([(ROLE_RANK, number.to_string()), (ROLE_WORLD_SIZE, all.to_string())]);
        }
        variables.extend(own.map(|name| (ROLE_NAME, name)));
        variables
    }

    /// The variables that tell a rank which GPUs it sees; none if it sees all.
    fn devices(&self, rank: u32, part: &Part<'_>, index: u32) -> Vec<(&'static str, String)> {
        let (gpu, Share { gpus, is_narrowed, .. }) = (part.gpu(index), &part.share);
        // CUDA lets a process use only the first MIG instance in its list, so each rank gets a list of one. A rank that
        // would not find its GPU by its number in the list of the world's GPUs gets a list of one, too.
        let isolates = part.request.isolate_gpus
            || part.request.virtual_local_rank
            || gpus.iter().any(|gpu| gpu.name.starts_with("MIG-"))
            || *is_narrowed && gpu.is_some() && self.visible.get(rank as usize).copied() != gpu;
        if isolates && let Some(gpu) = gpu.or_else(|| gpus.get(index as usize)) {
            // The rank sees this GPU only, so its index is 0.
            let name = if *is_narrowed { gpu.lasting_name() } else { &gpu.name };
            return vec![("CUDA_VISIBLE_DEVICES", name.to_owned()), (MGPU_DEVICE, "0".into())];
        }
        if !is_narrowed || self.visible.is_empty() {
            return Vec::new();
        }
        let names: Vec<&str> = self.visible.iter().map(|gpu| gpu.lasting_name()).collect();
        vec![("CUDA_VISIBLE_DEVICES", names.join(","))]
    }
}
