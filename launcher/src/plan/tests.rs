use proptest::prelude::*;

use super::*;

fn request(ranks: Ranks) -> Request {
    Request { ranks, ..Request::new("/bin/true") }
}

fn machine(gpus: usize) -> Machine {
    let gpu = |gpu: usize| Gpu { name: format!("GPU-{gpu}"), node: Some(0), ..Gpu::default() };
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
        ..Gpu::default()
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
    let context =
        RunContext { restart_count: 1, max_restarts: 4, run_id: "run".into(), ..RunContext::placeholder() };
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
    assert_eq!((rank.value("NCCL_HOSTID"), rank.value("NCCL_NET")), ("mgpu-rank-2".into(), String::new()));
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
    assert_eq!((rank.value("CUDA_VISIBLE_DEVICES"), rank.value(MGPU_DEVICE)), ("MIG-b".into(), "0".into()));
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
    assert_eq!(error, "--inject rank=2,step=1,fault=hang: there is no rank 2 among 2 (ranks count from 0)");
}
