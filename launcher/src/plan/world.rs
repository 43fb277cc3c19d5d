//! The plan of one world, from the GPUs and cores of its ranks.

use mgpu_control::inject::{self, Injection};
use mgpu_control::protocol::{
    LOCAL_RANK, LOCAL_WORLD_SIZE, MAX_RANKS, MGPU_BACKEND, MGPU_DEVICE, MGPU_INJECT, MGPU_SHARE_GPUS,
    MGPU_THREADS, OMP_NUM_THREADS, RANK, WORLD_SIZE,
};

use super::gpus::Share;
use super::{
    BackendChoice, GpuChoice, LaunchPlan, Machine, NCCL_IS_BUILT, PYTHONUNBUFFERED, PlanError,
    ProgramCommand, RankPlan, Request, choose_backend,
};
use crate::nccl;
use crate::placement::{self, Gpu, Placement};

/// The ranks of one request.
pub(super) struct Part<'a> {
    pub(super) request: &'a Request,
    pub(super) share: Share,
    pub(super) places: Vec<Placement>,
}

impl<'a> Part<'a> {
    pub(super) fn new(request: &'a Request, share: Share) -> Self {
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
