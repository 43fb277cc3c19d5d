//! Ranks without `mgpurun`, started with the variables of torchrun, Open MPI, hydra and Slurm: they find each other
//! through rank 0, name a rank that dies, and leave nothing behind.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use mgpu_control::progress::{PAGE_NAME, ProgressPage, RankState};
use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, command, finish, run, until};

const HELLO_RING: &str = env!("CARGO_BIN_EXE_t-hello_ring");
const COLLECTIVES: &str = env!("CARGO_BIN_EXE_t-collectives");
const MISBEHAVE: &str = env!("CARGO_BIN_EXE_t-misbehave");
const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");

/// The launchers.
#[derive(Debug, Clone, Copy)]
enum Launcher {
    Torchrun,
    OpenMpi,
    Hydra,
    Slurm,
}
use Launcher::{Hydra, OpenMpi, Slurm, Torchrun};

/// A job with a name that no other test uses.
#[derive(Debug, Clone)]
struct Job {
    launcher: Launcher,
    name: String,
    ranks: u32,
}

impl Job {
    fn new(launcher: Launcher, name: &str, ranks: u32) -> Self {
        Job { launcher, name: format!("{name}-{}", std::process::id()), ranks }
    }

    /// The command of `rank`, without GPUs.
    fn rank(&self, rank: u32, program: &str, arguments: &[&str]) -> Command {
        let mut command = command(program);
        command.args(arguments).env("CUDA_VISIBLE_DEVICES", "");
        self.tell(rank, command)
    }

    /// Sets the variables of the launcher for `rank`.
    fn tell(&self, rank: u32, mut command: Command) -> Command {
        let (rank, ranks) = (rank.to_string(), self.ranks.to_string());
        command.env_remove("MGPU_BACKEND");
        let variables: Vec<(&str, &str)> = match self.launcher {
            Torchrun => vec![
                ("RANK", &rank),
                ("WORLD_SIZE", &ranks),
                ("LOCAL_RANK", &rank),
                ("LOCAL_WORLD_SIZE", &ranks),
                ("MASTER_ADDR", "localhost"),
                ("MASTER_PORT", "29500"),
                ("TORCHELASTIC_RUN_ID", &self.name),
                ("TORCHELASTIC_RESTART_COUNT", "0"),
            ],
            OpenMpi => vec![
                ("OMPI_COMM_WORLD_RANK", &rank),
                ("OMPI_COMM_WORLD_SIZE", &ranks),
                ("OMPI_COMM_WORLD_LOCAL_RANK", &rank),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", &ranks),
                ("PMIX_NAMESPACE", &self.name),
            ],
            Hydra => vec![
                ("PMI_RANK", &rank),
                ("PMI_SIZE", &ranks),
                ("MPI_LOCALRANKID", &rank),
                ("MPI_LOCALNRANKS", &ranks),
                ("PMI_PORT", &self.name),
            ],
            Slurm => vec![
                ("SLURM_PROCID", &rank),
                ("SLURM_STEP_NUM_TASKS", &ranks),
                ("SLURM_LOCALID", &rank),
                ("SLURM_STEP_NUM_NODES", "1"),
                ("SLURM_JOB_ID", &self.name),
                ("SLURM_STEP_ID", "0"),
            ],
        };
        command.envs(variables);
        command
    }

    fn start(&self, rank: u32, program: &str, arguments: &[&str]) -> Child {
        spawn(&mut self.rank(rank, program, arguments))
    }

    /// Runs all ranks until they end.
    fn run(&self, program: &str, arguments: &[&str]) -> Vec<Finished> {
        let children: Vec<Child> = (0..self.ranks).map(|rank| self.start(rank, program, arguments)).collect();
        children.into_iter().map(|mut child| finish(&mut child)).collect()
    }
}

fn spawn(command: &mut Command) -> Child {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    child.unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// True if `child` serves a rendezvous that ranks can still join.
fn serves(child: &Child) -> bool {
    let links = fs::read_dir(format!("/proc/{}/fd", child.id())).into_iter().flatten().flatten();
    let links = links.filter_map(|entry| fs::read_link(entry.path()).ok()?.to_str().map(str::to_owned));
    let sockets: Vec<String> =
        links.filter_map(|link| Some(link.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect();
    // The columns: number, reference count, protocol, flags (listening), type, state, inode, name.
    let listens = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        matches!(&fields[..], [_, _, _, "00010000", _, _, inode, name]
            if name.starts_with("@mgpu-") && sockets.iter().any(|socket| socket == inode))
    };
    fs::read_to_string("/proc/net/unix").unwrap().lines().any(listens)
}

#[test]
fn the_ranks_of_each_launcher_find_each_other() {
    for launcher in [Torchrun, OpenMpi, Hydra, Slurm] {
        for ranks in 1..=4 {
            let finished = Job::new(launcher, "ring", ranks).run(HELLO_RING, &[]);
            let sum = ranks * (ranks - 1) / 2;
            finished[0].expect(0, &[&format!("the token came back with {sum}")]);
            let backend = if ranks == 1 { "solo" } else { "cpu" };
            for (rank, finished) in finished.iter().enumerate() {
                let hello =
                    format!("hello from rank {rank} of {ranks} ({backend} backend): the ranks sum to {sum}");
                finished.expect(0, &[&hello]);
            }
        }
    }
}

/// Rows and columns of a grid, groups of groups, and ranks without a group.
#[test]
fn groups_of_each_launchers_ranks_run_every_collective() {
    for (launcher, ranks) in [(Torchrun, 4), (OpenMpi, 6), (Hydra, 4), (Slurm, 4)] {
        let finished = Job::new(launcher, "groups", ranks).run(COLLECTIVES, &["groups"]);
        finished.iter().for_each(|rank| _ = rank.expect(0, &[]));
    }
}

/// Hydra gives its job no name; the process id of hydra on the host identifies it, whatever processes are in between.
#[test]
fn hydras_ranks_find_each_other_by_the_process_that_started_them() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("hydra_pmi_proxy");
    let each = r#"PMI_RANK=$rank MPI_LOCALRANKID=$rank sh -c '"$0"; exit $?' "$1" &"#;
    let text = format!("#!/bin/sh\nfor rank in 0 1 2; do {each} done; wait\n");
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    let proxy = || {
        let mut command = command(&script);
        command.arg(HELLO_RING).envs([
            ("PMI_SIZE", "3"),
            ("MPI_LOCALNRANKS", "3"),
            ("CUDA_VISIBLE_DEVICES", ""),
        ]);
        spawn(&mut command)
    };
    for mut proxy in [proxy(), proxy()] {
        finish(&mut proxy).expect(0, &["the token came back with 3"]);
    }
    let alone = run(Job::new(Hydra, "nameless", 2).rank(0, HELLO_RING, &[]).env_remove("PMI_PORT"));
    alone.expect(
        1,
        &["MGPU_RUN_ID is missing, and hydra does not say which job this rank belongs to", "mgpurun -n 2"],
    );
}

#[test]
fn training_gives_the_weights_that_it_gives_under_mgpurun() {
    let arguments = ["--synthetic", "--steps", "5", "--seed", "3", "--threads", "1"];
    let weights = |finished: &Finished| -> String {
        let line = finished.stdout.lines().find_map(|line| Some(line.split_once("weights ")?.1.to_owned()));
        line.unwrap_or_else(|| panic!("no weights in {finished:#?}"))
    };
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    let launched = run(launcher.args(["-n", "2", "--backend", "cpu", TRAIN]).args(arguments));
    launched.expect(0, &["the same on 2 ranks"]);
    let ranks = Job::new(Torchrun, "train", 2).run(TRAIN, &arguments);
    ranks.iter().for_each(|rank| _ = rank.expect(0, &[]));
    assert_eq!(weights(&ranks[0]), weights(&launched));
}

#[test]
fn a_rank_that_dies_is_named_by_all_others() {
    for (fault, code, how) in [
        ("kill", None, "ended without a goodbye"),
        ("exit-3", Some(3), "ended without a goodbye"),
        ("panic", Some(101), "panicked"),
    ] {
        for culprit in 0..3 {
            let name = format!("{fault}-{culprit}");
            let job = Job::new(Slurm, &name, 3);
            for (rank, finished) in
                job.run(MISBEHAVE, &[fault, &culprit.to_string(), "direct"]).iter().enumerate()
            {
                if rank == culprit {
                    assert_eq!(finished.code, code, "{finished:#?}");
                } else {
                    finished.expect(9, &[&format!("rank {rank} lost rank {culprit} in "), how]);
                }
            }
        }
    }
}

#[test]
fn a_dead_rank_is_named_while_its_child_lives() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job::new(Slurm, "linger", 3);
    let start = |rank| {
        let arguments = ["linger", "1", folder.path().to_str().unwrap()];
        let mut command = job.rank(rank, env!("CARGO_BIN_EXE_t-fork"), &arguments);
        // The child would otherwise keep the pipes of its parent open.
        let output = || if rank == 1 { Stdio::null() } else { Stdio::piped() };
        command.stdout(output()).stderr(output()).spawn().unwrap()
    };
    let [mut first, mut culprit, mut last] = [0, 1, 2].map(start);
    assert_eq!(culprit.wait().unwrap().code(), Some(3));
    for (rank, survivor) in [(0, &mut first), (2, &mut last)] {
        finish(survivor).expect(1, &[&format!("rank {rank} lost rank 1 in "), "ended without a goodbye"]);
    }
}

/// Polls the ranks like torchrun: every 0.1 s, one after the other. The first failed rank found is the root cause;
/// the others are terminated.
fn root_cause(ranks: &mut [Child]) -> usize {
    loop {
        let statuses: Vec<_> = ranks.iter_mut().map(|rank| rank.try_wait().unwrap()).collect();
        let has_failed = |end: &Option<ExitStatus>| end.is_some_and(|end| !end.success());
        if let Some(rank) = statuses.iter().position(has_failed) {
            ranks.iter_mut().for_each(|rank| _ = rank.kill());
            ranks.iter_mut().for_each(|rank| _ = rank.wait());
            return rank;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_rank_that_died_is_the_one_that_torchrun_sees_first() {
    for fault in ["kill", "exit-3", "panic"] {
        for culprit in 0..3 {
            let job = Job::new(Torchrun, &format!("cause-{fault}-{culprit}"), 3);
            let start = |rank| {
                let mut command = job.rank(rank, MISBEHAVE, &[fault, &culprit.to_string(), "direct"]);
                command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
            };
            let mut ranks: Vec<Child> = (0..3).map(start).collect();
            assert_eq!(root_cause(&mut ranks), culprit, "{fault}");
        }
    }
}

#[test]
fn a_rank_that_stops_is_named_at_the_deadline() {
    let job = Job::new(OpenMpi, "stop", 2);
    for culprit in [0, 1] {
        let start = |rank| {
            let arguments = ["stop", &culprit.to_string(), "eager"];
            // Long enough for ranks to start on a busy machine.
            spawn(job.rank(rank, MISBEHAVE, &arguments).env("MGPU_TIMEOUT", "5"))
        };
        let mut children = [start(0), start(1)];
        let other = 1 - culprit;
        finish(&mut children[other])
            .expect(9, &[&format!("rank {other} waited "), &format!(" s for rank {culprit} in ")]);
        children[culprit].kill().unwrap();
        children[culprit].wait().unwrap();
    }
}

#[test]
fn a_rank_that_never_joins_is_named_at_the_deadline() {
    let mut waiting = Vec::new();
    for absent in 0..3 {
        let job = Job::new(Torchrun, &format!("absent-{absent}"), 3);
        for rank in (0..3).filter(|rank| *rank != absent) {
            // Long enough for ranks to start on a busy machine.
            let child = spawn(job.rank(rank, HELLO_RING, &[]).env("MGPU_TIMEOUT", "6"));
            waiting.push((rank, absent, child));
        }
    }
    for (rank, absent, mut child) in waiting {
        let texts =
            [format!("rank {rank} waited "), format!(" s for rank {absent} in join"), "MGPU_TIMEOUT".into()];
        finish(&mut child).expect(1, &texts.each_ref().map(String::as_str));
    }
}

#[test]
fn incompatible_ranks_are_reported_at_once() {
    let job = Job::new(Slurm, "programs", 3);
    let [mut first, mut second] = [0, 1].map(|rank| job.start(rank, HELLO_RING, &[]));
    // A later rank would find no server: rank 0 ends after the error.
    until(|| has_joined(&first, 1));
    let mut third = job.start(2, TRAIN, &["--synthetic", "--steps", "1"]);
    for rank in [&mut first, &mut second, &mut third] {
        finish(rank).expect(1, &["runs", "all ranks run one program"]);
    }
}

/// True if `rank` has joined the rendezvous served by `child`, according to its progress page.
fn has_joined(child: &Child, rank: u32) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", child.id())).into_iter().flatten().flatten();
    let is_page = |path: &PathBuf| {
        let link = fs::read_link(path).unwrap_or_default();
        link.to_string_lossy().starts_with(&format!("/memfd:{PAGE_NAME}"))
    };
    let page = descriptors.map(|entry| entry.path()).find(is_page).and_then(|path| File::open(path).ok());
    let page = page.and_then(|file| ProgressPage::inspect(file.as_fd()).ok());
    page.is_some_and(|page| page.progress(rank).state == RankState::Joined)
}

#[test]
fn concurrent_jobs_are_separate() {
    let jobs: Vec<Job> = [2, 3, 4].map(|ranks| Job::new(Torchrun, &format!("side-{ranks}"), ranks)).into();
    let start = |rank: u32| -> Vec<(&Job, Child)> {
        let with_this_rank = jobs.iter().filter(|job| rank < job.ranks);
        with_this_rank.map(|job| (job, job.start(rank, HELLO_RING, &[]))).collect()
    };
    let children: Vec<(&Job, Child)> = (0..4).rev().flat_map(start).collect();
    for (job, mut child) in children {
        let sum = job.ranks * (job.ranks - 1) / 2;
        finish(&mut child).expect(0, &[&format!("of {} (cpu backend): the ranks sum to {sum}", job.ranks)]);
    }
}

#[test]
fn a_second_run_with_the_same_name_is_refused_while_the_first_starts() {
    let job = Job::new(OpenMpi, "twice", 2);
    let mut first = job.start(0, HELLO_RING, &[]);
    until(|| serves(&first));
    let holder = format!("is being started already, by process {} of user", first.id());
    run(&mut job.rank(0, HELLO_RING, &[])).expect(1, &["Open MPI job twice", &holder, "MGPU_RUN_ID"]);
    let mut second = job.start(1, HELLO_RING, &[]);
    finish(&mut first).expect(0, &["the token came back with 1"]);
    finish(&mut second).expect(0, &[]);
    // Afterwards the name is free.
    job.run(HELLO_RING, &[])[0].expect(0, &["the token came back with 1"]);
}

#[test]
fn a_killed_run_does_not_block_the_next() {
    let job = Job::new(Slurm, "killed", 2);
    let mut killed = job.start(0, HELLO_RING, &[]);
    until(|| serves(&killed));
    killed.kill().unwrap();
    killed.wait().unwrap();
    job.run(HELLO_RING, &[])[0].expect(0, &["the token came back with 1"]);
}

#[test]
fn mgpurun_variables_take_precedence() {
    let mut launcher = Job::new(Slurm, "outer", 1).rank(0, env!("CARGO_BIN_EXE_t-mgpurun"), &[]);
    launcher.envs([("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "7")]);
    launcher.envs([("OMPI_COMM_WORLD_LOCAL_RANK", "5"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "7")]);
    launcher.envs([("TORCHELASTIC_RESTART_COUNT", "2"), ("MASTER_ADDR", "elsewhere")]);
    let finished = run(launcher.args(["-n", "3", HELLO_RING]));
    finished.expect(0, &["hello from rank 2 of 3", "the token came back with 3"]);
}

/// Runs all ranks of a job without a given backend, with this number of fake GPUs.
fn on_gpus(job: &Job, gpus: u32, visible: Option<&str>, program: &str, arguments: &[&str]) -> Vec<Finished> {
    let start = |rank| {
        let mut command = fake_gpu::command(program);
        command.args(arguments).env("FAKE_GPU_COUNT", gpus.to_string());
        command.envs(visible.map(|visible| ("CUDA_VISIBLE_DEVICES", visible)));
        spawn(&mut job.tell(rank, command))
    };
    let children: Vec<Child> = (0..job.ranks).map(start).collect();
    children.into_iter().map(|mut child| finish(&mut child)).collect()
}

#[test]
fn the_number_of_gpus_decides_the_backend() {
    for finished in on_gpus(&Job::new(Slurm, "gpus", 2), 4, None, HELLO_RING, &[]) {
        finished.expect(0, &["of 2 (nccl backend): the ranks sum to 1"]);
    }
    for finished in on_gpus(&Job::new(OpenMpi, "few", 3), 2, None, HELLO_RING, &[]) {
        finished.expect(1, &["MGPU_BACKEND is missing, with 3 ranks and 2 GPUs", "cpu for 3 ranks"]);
    }
    // What statuses like one GPU for each rank is the same GPU.
    for finished in on_gpus(&Job::new(Torchrun, "one", 2), 1, Some("0"), HELLO_RING, &[]) {
        finished.expect(1, &["both use", "give each rank a GPU of its own"]);
    }
}

#[test]
fn a_rank_that_dies_in_nccl_is_named_by_all_others() {
    for culprit in 0..3 {
        let job = Job::new(Hydra, &format!("nccl-{culprit}"), 3);
        let arguments = ["kill", &culprit.to_string(), "direct"];
        for (rank, finished) in on_gpus(&job, 3, None, MISBEHAVE, &arguments).iter().enumerate() {
            if rank != culprit {
                finished
                    .expect(9, &[&format!("rank {rank} lost rank {culprit} in "), "ended without a goodbye"]);
            }
        }
    }
}

#[test]
fn impossible_configurations_are_reported() {
    for (launcher, name, value, text) in [
        (
            Torchrun,
            "LOCAL_WORLD_SIZE",
            "1",
            "LOCAL_WORLD_SIZE is 1 where WORLD_SIZE is 2: the ranks are on several hosts",
        ),
        (Slurm, "SLURM_STEP_NUM_NODES", "2", "SLURM_STEP_NUM_NODES is 2: the ranks are on several hosts"),
        (OpenMpi, "OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_RANK is 2 in a world of 2"),
        (Hydra, "MGPU_BACKEND", "mpi", "MGPU_BACKEND is `mpi`"),
        (Hydra, "PMI_SIZE", "70000", "PMI_SIZE is 70000; a world has at most 65536 ranks"),
        (
            Slurm,
            "SLURM_STEP_NUM_TASKS",
            "4294967295",
            "SLURM_STEP_NUM_TASKS is 4294967295; a world has at most",
        ),
        (Torchrun, "MGPU_INJECT", "rank=2,step=1,fault=abort", "MGPU_INJECT has rank=2,step=1,fault=abort"),
    ] {
        let job = Job::new(launcher, "wrong", 2);
        run(job.rank(0, HELLO_RING, &[]).env(name, value)).expect(1, &[text]);
    }
}
