//! Ranks that an engine has started one by one on several hosts, without `mgpurun`: they make one world, with the weights
//! of one host, and all of them name a rank or a host that is lost. The hosts are namespaces of this machine; where these
//! are forbidden, nothing is tested.

use std::process::{Child, Stdio};

use mgpu_tests::hosts::Hosts;
use mgpu_tests::process::{Finished, command, finish, run, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const HELLO_RING: &str = env!("CARGO_BIN_EXE_t-hello_ring");
const MISBEHAVE: &str = env!("CARGO_BIN_EXE_t-misbehave");
const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");

/// Ranks of each host.
const LOCAL: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Engine {
    Torchrun,
    OpenMpi,
    Hydra,
    Slurm,
}

impl Engine {
    const ALL: [Engine; 4] = [Engine::Torchrun, Engine::OpenMpi, Engine::Hydra, Engine::Slurm];

    /// The variables that each engine sets for `rank`; rank 0 is on host `a`.
    fn variables(self, rank: u32, hosts: u32) -> Vec<(&'static str, String)> {
        let (size, host, local) = (hosts * LOCAL, rank / LOCAL, rank % LOCAL);
        let text = |number: u32| number.to_string();
        match self {
            Engine::Torchrun => vec![
                ("RANK", text(rank)),
                ("WORLD_SIZE", text(size)),
                ("LOCAL_RANK", text(local)),
                ("LOCAL_WORLD_SIZE", text(LOCAL)),
                ("GROUP_RANK", text(host)),
                ("GROUP_WORLD_SIZE", text(hosts)),
                ("MASTER_ADDR", "a".into()),
                ("MASTER_PORT", "29500".into()),
                ("TORCHELASTIC_RUN_ID", "none".into()),
            ],
            Engine::OpenMpi => vec![
                ("OMPI_COMM_WORLD_RANK", text(rank)),
                ("OMPI_COMM_WORLD_SIZE", text(size)),
                ("OMPI_COMM_WORLD_LOCAL_RANK", text(local)),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", text(LOCAL)),
                ("PMIX_NAMESPACE", "prterun-a-24219@1".into()),
                ("PMIX_SERVER_URI41", format!("prterun-a-24219@0.{host};tcp4://10.99.0.1:4000")),
            ],
            Engine::Hydra => vec![
                ("PMI_RANK", text(rank)),
                ("PMI_SIZE", text(size)),
                ("MPI_LOCALRANKID", text(local)),
                ("MPI_LOCALNRANKS", text(LOCAL)),
                ("MGPU_RDZV_ENDPOINT", "a:29400".into()),
            ],
            Engine::Slurm => vec![
                ("SLURM_PROCID", text(rank)),
                ("SLURM_STEP_NUM_TASKS", text(size)),
                ("SLURM_LOCALID", text(local)),
                ("SLURM_NODEID", text(host)),
                ("SLURM_STEP_NUM_NODES", text(hosts)),
                ("SLURM_STEP_TASKS_PER_NODE", format!("{LOCAL}(x{hosts})")),
                ("SLURM_STEP_NODELIST", "a,b".into()),
                ("SLURM_JOB_ID", "7".into()),
                ("SLURM_STEP_ID", "0".into()),
            ],
        }
    }
}

/// The ranks of a job on all hosts, in order.
fn start(hosts: &Hosts, engine: Engine, program: &str, arguments: &[&str]) -> Vec<Child> {
    let count = hosts.count() as u32;
    let rank = |rank: u32| {
        let mut command = hosts.command((rank / LOCAL) as usize, program);
        command.args(arguments).envs(engine.variables(rank, count)).env_remove("MGPU_BACKEND");
        command.env("CUDA_VISIBLE_DEVICES", "").env("MGPU_SECRET", "a secret of the tests");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nsenter starts")
    };
    (0..count * LOCAL).map(rank).collect()
}

fn all(ranks: Vec<Child>) -> Vec<Finished> {
    ranks.into_iter().map(|mut rank| finish(&mut rank)).collect()
}

/// Waits until each rank has taken part in `World::from_env` and computes.
fn wait_until_joined(hosts: &Hosts, ranks: &[Child]) {
    let has_page = |rank: &Child| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", hosts.program(rank)));
        maps.is_ok_and(|maps| maps.contains(mgpu_control::progress::PAGE_NAME))
    };
    // A server maps the page before its ranks are admitted: the others show that they were.
    until(|| ranks.iter().all(has_page));
}

#[test]
fn ranks_of_each_engine_make_one_world() {
    let Some(hosts) = Hosts::start(2) else { return };
    for engine in Engine::ALL {
        for finished in all(start(&hosts, engine, HELLO_RING, &[])) {
            finished.expect(0, &["of 4 (cpu backend): the ranks sum to 6"]);
        }
    }
}

#[test]
fn training_has_the_weights_of_one_host() {
    let Some(hosts) = Hosts::start(2) else { return };
    let arguments = ["--synthetic", "--steps", "5", "--seed", "3", "--threads", "1"];
    let weights = |finished: &Finished| {
        let line = finished.stdout.lines().find_map(|line| Some(line.split_once("weights ")?.1.to_owned()));
        line.unwrap_or_else(|| panic!("no weights in {finished:#?}"))
    };
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    let expected = run(launcher.args(["-n", "4", "--backend", "cpu", TRAIN]).args(arguments));
    let ranks = all(start(&hosts, Engine::Slurm, TRAIN, &arguments));
    ranks.iter().for_each(|rank| _ = rank.expect(0, &[]));
    assert_eq!(weights(&ranks[0]), weights(&expected));
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    let Some(hosts) = Hosts::start(2) else { return };
    // Rank 0 serves the hub, rank 2 its host, and the others none.
    for (culprit, engine) in (0..4).zip(Engine::ALL) {
        let arguments = ["kill", &culprit.to_string(), "direct"];
        for (rank, finished) in all(start(&hosts, engine, MISBEHAVE, &arguments)).iter().enumerate() {
            if rank != culprit {
                let lost = format!("rank {rank} lost rank {culprit} in ");
                finished.expect(9, &[&lost, &format!("rank {culprit} ended without a goodbye")]);
            }
        }
    }
}

#[test]
fn a_host_that_is_turned_off_is_named() {
    for (off, culprit) in [(0, 0), (1, 2)] {
        let Some(hosts) = Hosts::start(2) else { return };
        let mut ranks = start(&hosts, Engine::OpenMpi, MISBEHAVE, &["kill", "99", "direct"]);
        wait_until_joined(&hosts, &ranks);
        hosts.power_off(off);
        let gone: Vec<Child> = ranks.drain(off * 2..off * 2 + 2).collect();
        let text = format!("rank {culprit} is lost: host {} does not answer", ["a", "b"][off]);
        for finished in all(ranks) {
            finished.expect(9, &[&text]);
        }
        all(gone);
    }
}

#[test]
fn a_stopped_rank_is_no_lost_host() {
    let Some(hosts) = Hosts::start(2) else { return };
    let ranks = start(&hosts, Engine::Torchrun, MISBEHAVE, &["kill", "99", "direct"]);
    wait_until_joined(&hosts, &ranks);
    // The rank that serves host b misses a few heartbeats and goes on; then another one ends.
    let [serving, other] = [2, 3].map(|rank: usize| hosts.program(&ranks[rank]));
    // The process that has entered the host stops with the rank, and continues it.
    let outside = Pid::from_raw(ranks[2].id() as i32);
    kill(serving, Signal::SIGSTOP).unwrap();
    until(|| {
        let status = std::fs::read_to_string(format!("/proc/{outside}/status"));
        status.is_ok_and(|status| status.contains("State:\tT"))
    });
    kill(outside, Signal::SIGCONT).unwrap();
    kill(other, Signal::SIGKILL).unwrap();
    for (rank, finished) in all(ranks).iter().enumerate().filter(|(rank, _)| *rank != 3) {
        finished.expect(9, &[&format!("rank {rank} lost rank 3 in "), "rank 3 ended without a goodbye"]);
    }
}
