//! Recorded environments of engines, and what `mgpurun` makes of them.

use super::super::settings::{NodeSettings, Ports, settings};
use super::*;
use crate::cli::NodeArgs;

/// The value of a variable in a recorded environment.
fn value(environment: &str, name: &str) -> Option<String> {
    let line = |line: &str| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned());
    environment.lines().find_map(line)
}

/// The settings in a recorded environment, and the notices.
fn read(environment: &str, args: &NodeArgs) -> Result<(Option<NodeSettings>, Vec<String>), String> {
    let file = |path: &str| {
        Some(match path {
            "/home/user/.lsbatch/rankfile" => "batch1\nh36n11\nh36n12\n".to_owned(),
            "/var/spool/pbs/aux/4711.server" => "n01\nn01\nn02\nn02\n".to_owned(),
            _ => return None,
        })
    };
    let surroundings = Surroundings { variable: &|name| value(environment, name), file: &file };
    let mut notices = Vec::new();
    let settings = settings(args, &surroundings, &mut notices).map_err(|error| error.to_string())?;
    Ok((settings, notices))
}

fn nnodes(count: &str) -> NodeArgs {
    NodeArgs { nnodes: Some(count.into()), ..NodeArgs::default() }
}

/// The node, the number of nodes, the endpoint, the run id and the engine.
fn essence(environment: &str, args: &NodeArgs) -> String {
    let (settings, notices) = read(environment, args).unwrap();
    assert_eq!(notices, [] as [String; 0], "{environment}");
    let settings = settings.unwrap_or_else(|| panic!("several nodes in {environment}"));
    let rank = settings.node_rank.map_or("?".into(), |rank| rank.to_string());
    let endpoint = match settings.endpoint {
        Some((host, Ports::One(port))) => format!("{host} {port}"),
        Some((host, Ports::OfJob)) => format!("{host} of job"),
        None => "?".into(),
    };
    let (min, max) = settings.nodes.into_inner();
    let run_id = settings.run_id.unwrap_or("-".into());
    let engine = settings.engine.map_or("-".into(), |engine| engine.to_string());
    format!("{rank} of {min}-{max}, {endpoint}, {run_id}, {engine}")
}

macro_rules! fixture {
    ($name:literal) => {
        include_str!(concat!("../fixtures/", $name, ".env"))
    };
}

#[test]
fn agents_of_engines() {
    for (environment, expected) in [
        (fixture!("slurm-agent"), "1 of 2-2, mgpu0 of job, 1.0, Slurm"),
        (fixture!("slurm-agent-ports"), "1 of 2-2, mgpu0 26918, 1.0, Slurm"),
        (fixture!("openmpi4-first"), "0 of 2-2, 192.0.2.2 of job, 847708161, Open MPI"),
        (fixture!("openmpi4-agent"), "1 of 2-2, 192.0.2.2 of job, 847708161, Open MPI"),
        (fixture!("openmpi5-agent"), "1 of 2-2, a of job, prterun-a-24219@1, Open MPI"),
        (fixture!("mpich-agent"), "1 of 2-2, ?, -, MPICH"),
        (fixture!("intel-mpi"), "1 of 2-2, ?, -, MPICH"),
        (fixture!("torchrun-agent"), "1 of 2-2, localhost of job, job7:42103, torchrun"),
        (fixture!("torchrun-static"), "1 of 2-2, localhost of job, none:29412, torchrun"),
        (fixture!("trainjob"), "1 of 2-2, mnist-node-0-0.mnist 29500, -, Kubernetes"),
        (fixture!("pytorchjob-static"), "1 of 2-2, mnist-master-0 23456, -, -"),
        (
            fixture!("aws-batch"),
            "1 of 4-4, 10.0.8.17 of job, 0d3e5a3c-7e2f-4f1c-9a0e-6a5ec6c3d9a1, AWS Batch",
        ),
        (
            fixture!("aws-batch-main"),
            "0 of 4-4, localhost of job, 0d3e5a3c-7e2f-4f1c-9a0e-6a5ec6c3d9a1, AWS Batch",
        ),
        (fixture!("sagemaker"), "1 of 2-2, algo-1 of job, mnist-2026-11-23, SageMaker"),
        (fixture!("jsrun"), "1 of 2-2, h36n11 of job, 4711, jsrun"),
    ] {
        assert_eq!(essence(environment, &NodeArgs::default()), expected);
    }
}

#[test]
fn engines_that_do_not_tell_the_number_of_nodes() {
    let endpoint = NodeArgs { rdzv_endpoint: Some("mnist-0.mnist".into()), ..nnodes("2") };
    assert_eq!(essence(fixture!("indexed-job"), &endpoint), "1 of 2-2, mnist-0.mnist 29400, -, Kubernetes");
    assert_eq!(essence(fixture!("lsf"), &nnodes("2")), "? of 2-2, hostA of job, 4711, LSF");
    assert_eq!(essence(fixture!("pbs"), &nnodes("2")), "? of 2-2, n01 of job, 4711.server, PBS");
    let error = read(fixture!("indexed-job"), &nnodes("2")).unwrap_err();
    assert_eq!(
        error,
        "2 nodes, and it is unknown where node 0 is: add --rdzv-endpoint HOST[:PORT] with the name of pod 0 and its headless service, JOB-0.SERVICE"
    );
}

#[test]
fn an_elastic_job_of_kubeflow_reports_what_has_no_effect() {
    let (settings, notices) = read(fixture!("pytorchjob-elastic"), &NodeArgs::default()).unwrap();
    let settings = settings.unwrap();
    assert_eq!((settings.nodes, settings.node_rank), (1..=3, None));
    assert_eq!(settings.endpoint, Some(("mnist-worker-0".into(), Ports::One(23456))));
    assert_eq!(settings.join_timeout, Some(std::time::Duration::from_secs(900)));
    assert_eq!(settings.run_id.as_deref(), Some("mnist"));
    assert_eq!(notices, ["read_timeout of PET_RDZV_CONF has no effect"]);
}

#[test]
fn one_node_of_an_engine_is_a_job_on_one_node() {
    for (environment, notice) in [
        (fixture!("slurm-one-node"), Some("Slurm has started 2 mgpurun on this node, and each of them")),
        (
            fixture!("slurm-batch"),
            Some("one of the 2 nodes that Slurm has allocated; srun --ntasks-per-node 1"),
        ),
        (fixture!("slurm-interactive"), Some("one of the 2 nodes that Slurm has allocated")),
        (fixture!("openmpi4-one-node"), Some("Open MPI has started 2 mgpurun on this node")),
        (fixture!("mpich-one-node"), Some("MPICH has started 2 mgpurun on this node")),
        (fixture!("torchrun-one-node"), Some("torchrun has started 2 mgpurun on this node")),
        (fixture!("lsf"), Some("one of the 2 nodes that LSF has allocated; blaunch mgpurun --nnodes 2")),
        (fixture!("pbs"), Some("one of the 2 nodes that PBS has allocated; pbsdsh -u mgpurun --nnodes 2")),
        (fixture!("indexed-job"), None),
        ("", None),
        ("SLURM_NODEID=", None),
        ("PET_NNODES=1\nPET_NODE_RANK=0\nPET_MASTER_ADDR=a\nPET_MASTER_PORT=29500", None),
    ] {
        let (settings, notices) = read(environment, &NodeArgs::default()).unwrap();
        assert_eq!(settings, None, "{environment}");
        assert_eq!(notices.len(), usize::from(notice.is_some()), "{notices:?}");
        assert!(notices.iter().all(|text| text.contains(notice.unwrap())), "{notices:?}");
    }
}

#[test]
fn several_tasks_on_each_of_several_nodes_are_refused() {
    let four = "OMPI_COMM_WORLD_SIZE=4\nOMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=2";
    let torch = "TORCHELASTIC_RUN_ID=a\nRANK=3\nWORLD_SIZE=4\nLOCAL_WORLD_SIZE=2";
    for (environment, text) in [
        (
            fixture!("slurm-tasks"),
            "srun has started 4 tasks on 2 nodes (SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES), but one mgpurun starts all ranks of a node: add --ntasks-per-node 1 to srun, and -n to mgpurun",
        ),
        (
            four,
            "Open MPI has started 2 of 4 mgpurun on this node (OMPI_COMM_WORLD_LOCAL_SIZE=2, OMPI_COMM_WORLD_SIZE=4), but one mgpurun starts all ranks of a node: add -N 1 to mpirun, and -n to mgpurun",
        ),
        (torch, "start torchrun with --nproc-per-node 1, and mgpurun with -n"),
    ] {
        let error = read(environment, &NodeArgs::default()).unwrap_err();
        assert!(error.contains(text), "{error}");
        // Also if only the rank would be the engine's, but not if the engine is not asked.
        let endpoint = NodeArgs { rdzv_endpoint: Some("a".into()), ..nnodes("2") };
        assert_eq!(read(environment, &endpoint).unwrap_err(), error);
        let all = NodeArgs { node_rank: Some("1".into()), ..endpoint };
        assert_eq!(read(environment, &all).unwrap().0.unwrap().node_rank, Some(1));
        let standalone = NodeArgs { standalone: true, ..NodeArgs::default() };
        assert_eq!(read(environment, &standalone), Ok((None, Vec::new())));
    }
}

#[test]
fn where_node_0_is_cannot_be_told_if_mpirun_runs_elsewhere() {
    let error = read(fixture!("openmpi5-elsewhere"), &NodeArgs::default()).unwrap_err();
    assert_eq!(
        error,
        "2 nodes, and it is unknown where node 0 is: mpirun tells it only if it runs on the first host of its list; add --rdzv-endpoint HOST[:PORT] with that host"
    );
    let endpoint = NodeArgs { rdzv_endpoint: Some("b:4000".into()), ..NodeArgs::default() };
    let expected = "0 of 2-2, b 4000, prterun-a-30120@1, Open MPI";
    assert_eq!(essence(fixture!("openmpi5-elsewhere"), &endpoint), expected);
}

#[test]
fn the_innermost_engine_counts() {
    let mpi_in_slurm = [fixture!("slurm-agent"), fixture!("mpich-agent")].concat();
    assert_eq!(essence(&mpi_in_slurm, &NodeArgs::default()), "1 of 2-2, ?, -, MPICH");
    let torchrun_in_slurm = [fixture!("slurm-agent"), fixture!("torchrun-static")].concat();
    assert!(essence(&torchrun_in_slurm, &NodeArgs::default()).ends_with("torchrun"));
    // srun --mpi=pmi2 sets variables of PMI, too.
    let pmi = [fixture!("slurm-agent"), "PMI_FD=11\nPMI_JOBID=3.0\nPMI_RANK=1\nPMI_SIZE=2\n"].concat();
    assert_eq!(essence(&pmi, &NodeArgs::default()), "1 of 2-2, mgpu0 of job, 1.0, Slurm");
    // A rank of another mgpurun: the variables of its starter are not meant for this one.
    let nested = [fixture!("slurm-agent"), "MGPU_RENDEZVOUS=unix:/x\nPET_NNODES=2\nMGPU_NNODES=2\n"].concat();
    assert_eq!(read(&nested, &NodeArgs::default()), Ok((None, Vec::new())));
}

#[test]
fn impossible_values_are_errors() {
    for (environment, text) in [
        ("OMPI_COMM_WORLD_SIZE=two", "the variable OMPI_COMM_WORLD_SIZE is `two`, not a number"),
        (
            "SLURM_JOB_ID=1\nSLURM_STEP_ID=0\nSLURM_STEP_NUM_NODES=2\nSLURM_NODEID=0\nSLURM_STEP_NODELIST=a[",
            "the variable SLURM_STEP_NODELIST is `a[`, not a list of hosts",
        ),
        ("SM_HOSTS=a\nSM_CURRENT_HOST=a", "the variable SM_HOSTS is `a`, not a JSON array of names"),
        ("SM_HOSTS=[\"a\",\"b\"]\nSM_CURRENT_HOST=c", "SM_CURRENT_HOST is `c`, which is not in SM_HOSTS"),
    ] {
        let error = read(environment, &NodeArgs::default()).unwrap_err();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn a_single_core_for_all_ranks_is_reported() {
    let notice = |engine, usable, present| binding_notice(engine, usable, present);
    assert!(notice(Engine::OpenMpi, 1, 8).unwrap().ends_with("add --bind-to none to mpirun"));
    assert!(notice(Engine::OpenMpi, 4, 8).unwrap().contains("leaves 4 of 8 cores"));
    assert!(notice(Engine::Slurm, 1, 8).unwrap().contains("--cpus-per-task"));
    assert_eq!(notice(Engine::Slurm, 4, 8), None);
    assert_eq!(notice(Engine::OpenMpi, 8, 8), None);
    assert_eq!(notice(Engine::Kubernetes, 1, 8), None);
}
