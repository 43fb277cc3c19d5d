use proptest::prelude::*;

use mgpu_control::protocol::{
    LOCAL_RANK, MGPU_BACKEND, MGPU_DEVICE, MGPU_SHARE_GPUS, MGPU_THREADS, OMP_NUM_THREADS, RANK,
};

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
    let topology =
        Topology { nodes: vec![node(0, [0, 1]), node(1, [2, 3])], usable: 4, ..Default::default() };
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
    let context = RunContext {
        restart_count: 1,
        max_restarts: 4,
        run_id: "run".into(),
        torch_run_id: "job7".into(),
        error_files: (0..3).map(|rank| format!("/private/error-{rank}.json").into()).collect(),
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
        ("TORCHELASTIC_RUN_ID", "job7"),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
        ("TORCHELASTIC_ERROR_FILE", "/private/error-2.json"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    ] {
        let found: Vec<&str> =
            environment.iter().filter(|(key, _)| *key == name).map(|(_, value)| value.as_str()).collect();
        assert_eq!(found, [value], "{name}");
    }
    let mut names: Vec<&str> = environment.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}

#[test]
fn ranks_of_a_role_are_counted_in_it() {
    let part =
        |role: Option<&str>, ranks| Request { role: role.map(str::to_owned), ..request(Ranks::Count(ranks)) };
    let roles = |requests: &[Request]| -> Vec<String> {
        let plan = plan_jobs(requests, true, &machine(0)).unwrap().remove(0);
        let role = |rank: &RankPlan| {
            let environment = rank.full_environment(&RunContext::placeholder());
            let value = |name: &str| environment.iter().find(|(key, _)| *key == name).unwrap().1.clone();
            [value("ROLE_NAME"), value("ROLE_RANK"), value("ROLE_WORLD_SIZE")].join(" ")
        };
        plan.ranks.iter().map(role).collect()
    };
    assert_eq!(roles(&[part(Some("a"), 2)]), ["a 0 2", "a 1 2"]);
    assert_eq!(
        roles(&[part(Some("a"), 1), part(None, 1), part(Some("a"), 2)]),
        ["a 0 3", "default 0 1", "a 1 3", "a 2 3"]
    );
}

#[test]
fn a_virtual_local_rank_is_0_and_its_gpu_the_only_one() {
    let request = Request { virtual_local_rank: true, ..request(Ranks::Count(2)) };
    let seen = |gpus| -> Vec<[String; 4]> {
        let plan = plan(&request, &machine(gpus)).unwrap();
        let names = [RANK, LOCAL_RANK, "CUDA_VISIBLE_DEVICES", MGPU_DEVICE];
        plan.ranks.iter().map(|rank| names.map(|name| rank.value(name))).collect()
    };
    assert_eq!(seen(2), [["0", "0", "GPU-0", "0"], ["1", "0", "GPU-1", "0"]]);
    assert_eq!(seen(0), [["0", "0", "", ""], ["1", "0", "", ""]]);
}

/// On one host NCCL needs no network. On several, no setting may lead to this host only, and no two ranks may have one host
/// id.
#[cfg(feature = "cuda")]
#[test]
fn settings_of_nccl_depend_on_the_number_of_nodes() {
    let request = Request { share_gpus: true, ..request(Ranks::Count(2)) };
    let plan = plan(&request, &machine(1)).unwrap();
    let variables = |nodes: u32, nccl_interface: &[(&'static str, String)]| {
        let place = NodePlace {
            node: 0,
            nodes,
            first_rank: 4,
            world_size: 6,
            master_addr: "10.0.0.1".into(),
            injections: String::new(),
            nccl_interface: nccl_interface.to_vec(),
            net: "tcp",
        };
        let context = RunContext { place: Some(place), ..RunContext::placeholder() };
        let all = plan.ranks[1].full_environment(&context);
        let wanted = ["NCCL_SOCKET_IFNAME", "NCCL_HOSTID", MASTER_ADDR];
        let value = |name| all.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value).to_owned();
        wanted.map(value)
    };
    assert_eq!(variables(1, &[]), ["lo", "mgpu-rank-5", "10.0.0.1"]);
    assert_eq!(variables(2, &[]), ["", "mgpu-rank-5", "10.0.0.1"]);
    assert_eq!(variables(2, &[("NCCL_SOCKET_IFNAME", "=eth0".into())])[0], "=eth0");
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

/// A request for these GPUs.
fn choosing(ranks: Ranks, gpus: &str) -> Request {
    Request { gpus: gpus.parse().unwrap(), ..request(ranks) }
}

/// A machine with GPUs of the UUIDs GPU-a, GPU-b and so on.
fn gpus_of(count: u8) -> Machine {
    let gpu = |index: u8| Gpu {
        name: index.to_string(),
        uuid: Some(format!("GPU-{}", char::from(b'a' + index))),
        ..Gpu::default()
    };
    Machine { gpus: (0..count).map(gpu).collect(), ..Machine::default() }
}

/// The GPUs that the ranks of each job see.
fn visible(requests: &[Request], machine: &Machine) -> Vec<String> {
    let plans = plan_jobs(requests, false, machine).unwrap();
    let seen = |plan: &LaunchPlan| plan.ranks[0].value("CUDA_VISIBLE_DEVICES");
    plans.iter().map(seen).collect()
}

fn jobs() -> impl Strategy<Value = Vec<Request>> {
    let backend = prop_oneof![Just(BackendChoice::Auto), Just(BackendChoice::Cpu)];
    let job =
        (1u32..4, backend).prop_map(|(ranks, backend)| Request { backend, ..request(Ranks::Count(ranks)) });
    prop::collection::vec(job, 1..5)
}

proptest! {
    #[test]
    fn jobs_get_disjoint_gpus_and_cores(jobs in jobs(), cores in 1usize..40) {
        let node = |number: u32, cores: std::ops::Range<usize>| crate::placement::Node {
            number,
            cores: cores.map(|core| CoreSet::from_iter([core])).collect(),
        };
        let topology = Topology { nodes: vec![node(0, 0..cores), node(1, cores..2 * cores)], usable: 2 * cores, ..Default::default() };
        let machine = Machine { topology, ..gpus_of(20) };
        let plans = plan_jobs(&jobs, false, &machine).unwrap();
        prop_assert_eq!(plans.len(), jobs.len());
        if jobs.len() == 1 || !NCCL_IS_BUILT {
            return Ok(());
        }
        let mut gpus: Vec<&str> = plans.iter().flat_map(|plan| plan.gpus.iter().map(|gpu| gpu.name.as_str())).collect();
        let with_gpus = jobs.iter().filter(|job| job.backend != BackendChoice::Cpu);
        prop_assert_eq!(gpus.len() as u32, with_gpus.map(|job| match job.ranks { Ranks::Count(count) => count, Ranks::Auto => 0 }).sum::<u32>());
        gpus.sort_unstable();
        gpus.dedup();
        prop_assert_eq!(gpus.len(), plans.iter().map(|plan| plan.gpus.len()).sum::<usize>());
        let ranks: usize = plans.iter().map(|plan| plan.ranks.len()).sum();
        let of_job = |plan: &LaunchPlan| plan.ranks.iter().filter_map(|rank| rank.cores.as_ref()).collect::<CoreSet>();
        let sets: Vec<CoreSet> = plans.iter().map(of_job).collect();
        prop_assert_eq!(sets.iter().all(CoreSet::is_empty), ranks > 2 * cores);
        prop_assert_eq!(sets.iter().map(CoreSet::len).sum::<usize>(), sets.iter().collect::<CoreSet>().len());
    }
}

#[cfg(feature = "cuda")]
#[test]
fn gpus_are_divided_in_order_of_the_choice() {
    let two = Ranks::Count(2);
    let jobs = [request(Ranks::Auto), choosing(two, "1,GPU-c"), request(two)];
    assert_eq!(visible(&jobs, &gpus_of(6)), ["GPU-e,GPU-f", "GPU-b,GPU-c", "GPU-a,GPU-d"]);
    let mut machine = gpus_of(5);
    machine.gpus[0].holder = Some("launch 7 (x)".into());
    machine.gpus[2].user = Some("python (pid 8)".into());
    assert_eq!(visible(&[choosing(two, "free"), request(two)], &machine), ["GPU-b,GPU-d", "GPU-a,GPU-c"]);
    assert_eq!(visible(&[choosing(Ranks::Auto, "free")], &machine), ["GPU-b,GPU-d,GPU-e"]);
    let plan = plan(&choosing(Ranks::Auto, "2"), &machine).unwrap();
    assert_eq!(
        (plan.notices, plan.owns_gpus),
        (vec!["GPU 2 is used by python (pid 8), too".to_owned()], true)
    );
}

#[cfg(feature = "cuda")]
#[test]
fn gpus_that_cannot_be_chosen_are_errors() {
    let mut machine = gpus_of(4);
    machine.gpus[0].holder = Some("launch 7 (x)".into());
    machine.gpus[2].user = Some("python (pid 8)".into());
    let (one, two) = (Ranks::Count(1), Ranks::Count(2));
    for (jobs, text) in [
        (vec![choosing(one, "4")], "--gpus 4: there is no such GPU among the visible ones, 0 to 3"),
        (vec![choosing(one, "0")], "--gpus 0: the GPU is reserved by launch 7 (x)"),
        (vec![choosing(two, "1,GPU-b")], "the GPU is named twice"),
        (
            vec![choosing(one, "1"), choosing(one, "1")],
            "job 1: --gpus 1: another job of this launch has this GPU",
        ),
        (
            vec![choosing(Ranks::Count(3), "free")],
            "3 ranks and 2 free GPUs of 4: GPU 0 is reserved by launch 7 (x), GPU 2 is used by python (pid 8)",
        ),
        (vec![request(Ranks::Auto), request(Ranks::Auto)], "-n auto for two jobs"),
        (
            vec![request(Ranks::Count(4)), request(one)],
            "job 1: 1 rank, and the other jobs of this launch leave 0 of 4 GPUs",
        ),
    ] {
        let error = plan_jobs(&jobs, false, &machine).unwrap_err().to_string();
        assert!(error.contains(text), "`{text}` should be in: {error}");
    }
    let none = plan_jobs(&[choosing(one, "free")], false, &gpus_of(0)).unwrap_err().to_string();
    assert!(none.starts_with("--gpus free: neither the driver nor NVML lists a GPU"), "{none}");
    let nccl = Request { backend: BackendChoice::Nccl, ..request(one) };
    let unknown = plan_jobs(&[nccl.clone(), nccl], false, &gpus_of(0)).unwrap_err();
    assert!(
        matches!(unknown, PlanError::InJob { error, .. } if matches!(*error, PlanError::UnknownGpus { .. }))
    );
}

#[test]
fn one_world_has_the_ranks_of_all_parts() {
    let part = |program: &str, ranks| Request { ranks: Ranks::Count(ranks), ..Request::new(program) };
    let plans = plan_jobs(&[part("/a", 2), part("/b", 1)], true, &gpus_of(3)).unwrap();
    let [plan] = &plans[..] else { panic!("{plans:?}") };
    let of_ranks: Vec<_> = plan
        .ranks
        .iter()
        .map(|rank| (rank.value(RANK), rank.value(WORLD_SIZE), plan.command_of(rank).line()))
        .collect();
    let expected = |rank: &str, program: &str| (rank.to_owned(), "3".to_owned(), program.to_owned());
    assert_eq!(of_ranks, [expected("0", "a"), expected("1", "a"), expected("2", "b")]);
    // As in a world of one program, every rank sees all GPUs.
    assert_eq!(plan.ranks[2].value("CUDA_VISIBLE_DEVICES"), "");
    let few = plan_jobs(&[part("/a", 2), part("/b", 1)], true, &gpus_of(2));
    assert_eq!(few.unwrap_err(), PlanError::TooFewGpus { ranks: 3, gpus: 2 });
    let chosen = [Request { gpus: "2".parse().unwrap(), ..part("/a", 1) }, part("/b", 1)];
    let plan = plan_jobs(&chosen, true, &gpus_of(3)).unwrap().remove(0);
    let seen: Vec<String> = plan.ranks.iter().map(|rank| rank.value("CUDA_VISIBLE_DEVICES")).collect();
    assert_eq!(seen, ["GPU-c,GPU-a", "GPU-c,GPU-a"]);
    let mixed = [part("/a", 1), Request { backend: BackendChoice::Cpu, ..part("/b", 1) }];
    assert_eq!(plan_jobs(&mixed, true, &gpus_of(3)), Err(PlanError::Mixed { option: "--backend" }));
}

#[test]
fn a_restart_goes_on_with_the_gpus_that_are_left() {
    let injections = vec!["rank=3,step=1,fault=abort".parse().unwrap()];
    let request = Request { min_ranks: Some(2), injections, ..request(Ranks::Count(4)) };
    let machine = gpus_of(4);
    let first = plan(&request, &machine).unwrap();
    let values = |plan: &LaunchPlan, name: &str| -> Vec<String> {
        plan.ranks.iter().map(|rank| rank.value(name)).collect()
    };
    assert_eq!(values(&first, "CUDA_VISIBLE_DEVICES"), ["", "", "", ""]);
    for is_alone in [true, false] {
        let next = replan(&request, (&first, &[0, 2, 3]), is_alone, &machine).unwrap();
        assert_eq!(values(&next, RANK), ["0", "1", "2"]);
        assert_eq!(values(&next, WORLD_SIZE), ["3", "3", "3"]);
        assert_eq!(values(&next, "CUDA_VISIBLE_DEVICES"), ["GPU-a,GPU-c,GPU-d"; 3]);
        assert_eq!(values(&next, MGPU_BACKEND), ["nccl"; 3]);
        assert_eq!((next.commands, next.injections), (first.commands.clone(), first.injections.clone()));
    }
}

#[test]
fn a_restart_without_gpus_is_placed_anew_or_keeps_its_cores() {
    let machine = Machine { gpus: Vec::new(), ..two_nodes() };
    let request = Request { min_ranks: Some(1), bind: Bind::Core, ..request(Ranks::Count(4)) };
    let first = plan(&request, &machine).unwrap();
    let cores = |plan: &LaunchPlan| -> Vec<String> {
        plan.ranks.iter().map(|rank| rank.cores.as_ref().unwrap().to_string()).collect()
    };
    assert_eq!(cores(&first), ["0", "1", "2", "3"]);
    let kept = |is_alone| replan(&request, (&first, &[1, 3]), is_alone, &machine).unwrap();
    assert_eq!(cores(&kept(true)), ["0-1", "2-3"]);
    assert_eq!(cores(&kept(false)), ["1", "3"]);
    assert_eq!(kept(true).ranks[1].value(MGPU_THREADS), "2");
}

#[test]
fn impossible_minima_are_refused() {
    let refused = |fewest, request: Request, one_world| {
        let elastic = Request { min_ranks: Some(fewest), ..request.clone() };
        plan_jobs(&[elastic, request], one_world, &machine(0)).unwrap_err().to_string()
    };
    let two = request(Ranks::Count(2));
    assert_eq!(
        refused(3, two.clone(), false),
        "job 0: --min-ranks 3: the job has only 2 ranks; it goes on with fewer after a failure, so choose at most 2"
    );
    let shared = Request { share_gpus: true, ..two.clone() };
    assert!(refused(1, shared, false).starts_with("--min-ranks and --share-gpus are incompatible: "));
    assert!(refused(1, two, true).starts_with("--min-ranks and --one-world with several programs are"));
}

#[test]
fn choices_of_gpus_are_parsed() {
    let parse = |text: &str| text.parse::<GpuChoice>();
    assert_eq!((parse("all"), parse("free")), (Ok(GpuChoice::All), Ok(GpuChoice::Free)));
    assert_eq!(parse("2, GPU-ab"), Ok(GpuChoice::Named(vec!["2".into(), "GPU-ab".into()])));
    for text in ["", "x", "1,", "-1", "GPU-", "free,1"] {
        assert!(parse(text).is_err(), "{text}");
    }
}
