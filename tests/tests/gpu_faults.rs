//! Faults of a GPU, of NCCL or of a peer: every rank ends in bounded time, the error names cause and rank, the exit
//! code matches the kind of failure, and nothing is left over.
//!
//! Everything runs on the fake libraries of `tests/gpu`, which inject faults.

use std::fs;
use std::process::{Command, Stdio};

use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, finish, run, survivors, until};

/// The timeout of waits in seconds, in tests about one.
const TIMEOUT: &str = "4";

/// A run of `t-device` on a fake machine.
struct Case {
    ranks: u32,
    fault: &'static str,
    timeout: &'static str,
    environment: Vec<(&'static str, &'static str)>,
    options: Vec<&'static str>,
    arguments: Vec<&'static str>,
}

impl Case {
    fn new(ranks: u32, arguments: &[&'static str]) -> Self {
        let arguments = arguments.to_vec();
        Case { ranks, fault: "", timeout: "60", environment: Vec::new(), options: Vec::new(), arguments }
    }

    /// A fault of NCCL.
    fn nccl(ranks: u32, fault: &'static str) -> Self {
        Case { fault, timeout: TIMEOUT, ..Case::new(ranks, &["loop"]) }
    }

    fn run(&self) -> Finished {
        let temporary = tempfile::tempdir().unwrap();
        let mut launcher = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
        launcher.env("TMPDIR", temporary.path()).env_remove("XDG_RUNTIME_DIR");
        launcher.env("MGPU_TEST_MARK", temporary.path());
        launcher.env("FAKE_GPU_COUNT", "4").env("MGPU_TIMEOUT", self.timeout);
        if !self.fault.is_empty() {
            launcher.env("FAKE_NCCL_FAULT", self.fault);
        }
        launcher.envs(self.environment.iter().copied());
        launcher.args(["-n", &self.ranks.to_string(), "--backend", "nccl", "--grace", "5"]);
        launcher.args(&self.options).arg(env!("CARGO_BIN_EXE_t-device")).args(&self.arguments);
        let finished = run(&mut launcher);
        let mark = format!("MGPU_TEST_MARK={}", temporary.path().display());
        assert_eq!(survivors(&mark), [] as [u32; 0], "{finished:#?}");
        let left: Vec<_> = fs::read_dir(temporary.path()).unwrap().flatten().map(|e| e.file_name()).collect();
        assert!(left.is_empty(), "{left:?} of {finished:#?}");
        finished
    }
}

/// The errors of rank `rank`: of the fault, and of the next call.
fn said(finished: &Finished, rank: u32) -> (String, String) {
    let line = |what: &str| {
        let prefix = format!("[{rank}] {what}: ");
        finished.stderr.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_default().to_owned()
    };
    (line("error"), line("then"))
}

/// Rank `rank` fails with an error that contains all `texts`, and its communicator is poisoned from then on.
#[track_caller]
fn gives_up(finished: &Finished, rank: u32, texts: &[&str]) {
    let (error, then) = said(finished, rank);
    for text in texts {
        assert!(error.contains(text), "rank {rank} should say `{text}`: {finished:#?}");
    }
    let poisoned = format!("communicator of rank {rank} is unusable after an earlier error: {error}");
    assert!(then.contains(&poisoned), "rank {rank} should say so again: {finished:#?}");
}

#[test]
fn a_rank_that_dies() {
    for (ranks, culprit, fault, code, how) in [
        (2, "1", "kill", 137, "was killed by SIGKILL"),
        (3, "0", "kill", 137, "was killed by SIGKILL"),
        (2, "0", "panic", 101, "panicked"),
        (3, "1", "exit-0", 9, "exited with code 0"),
    ] {
        let finished = Case::new(ranks, &["loop", fault, culprit]).run();
        finished.expect(code, &[&format!("mgpurun: rank {culprit} ")]);
        for rank in (0..ranks).filter(|rank| rank.to_string() != culprit) {
            let lost = format!("lost rank {culprit} in operation ");
            gives_up(&finished, rank, &[&lost, "of communicator-1, ", "all_reduce(1000 f32, sum)", how]);
        }
    }
}

#[test]
fn a_rank_that_is_silent() {
    for fault in ["stop", "hang"] {
        let finished = Case { timeout: TIMEOUT, ..Case::new(3, &["loop", fault, "2"]) }.run();
        finished.expect(65, &["mgpurun: rank 2 made no progress"]);
        for rank in [0, 1] {
            gives_up(&finished, rank, &[" s for rank 2 in operation 4 of communicator-1, turn 3"]);
        }
    }
}

/// The peers are in a collective that the failed rank never joins, and that rank is in finalise, which they never
/// join. Neither waits for the timeout.
#[test]
fn a_rank_that_returns_an_error() {
    // Two communicators; the one that no rank waits in ends first.
    let finished = Case::new(3, &["loop", "error", "1"]).run();
    finished.expect(9, &["mgpurun: rank 1 exited with code 9", "error: turn: an error of its own"]);
    for rank in [0, 2] {
        gives_up(&finished, rank, &["lost rank 1 in operation 4 of communicator-1"]);
    }
}

/// A training with small batches, of as many steps as a test adds.
const LENET5: [&str; 8] =
    ["--net", "lenet5", "--synthetic", "--images", "10000", "--batch", "4", "--skip-test"];

/// In every placement: the peers wait for the failed rank in NCCL, or in host memory.
#[test]
fn a_training_whose_rank_0_cannot_save() {
    for placement in ["replicated", "shared", "host"] {
        let mut launcher = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
        // Longer than any program may run here, so that waiting for this timeout would be noticed.
        launcher.env("MGPU_TIMEOUT", "600");
        launcher.args(["-n", "2", "--backend", "nccl", env!("CARGO_BIN_EXE_t-train_mnist")]);
        launcher.args(LENET5).args(["--steps", "100000"]);
        launcher.args(["--placement", placement]);
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = folder.path().join("checkpoints");
        launcher
            .args(["--kernels", "builtin", "--checkpoint-every", "1", "--checkpoint-dir"])
            .arg(&checkpoints);
        let mut training = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Rank 0 can no longer save after the folder is removed.
        until(|| fs::read_dir(&checkpoints).is_ok_and(|mut entries| entries.next().is_some()));
        fs::rename(&checkpoints, folder.path().join("elsewhere")).unwrap();
        let finished = finish(&mut training);
        finished.expect(1, &["mgpurun: rank 0 exited with code 1", checkpoints.to_str().unwrap()]);
        assert!(!finished.stderr.contains("made no progress"), "{placement}: {finished:#?}");
    }
}

/// Steps are replayed from graphs at that point, and more are enqueued than the GPU has finished. Dropping the model,
/// its graphs and its memory must still end.
#[test]
fn a_rank_that_goes_missing_between_replays() {
    for (fault, code, texts) in [
        (
            "sigstop",
            65,
            ["mgpurun: rank 1 made no progress", " s for rank 1 in operation ", ", training step"],
        ),
        // The launcher stops the other rank before or after that rank has noticed.
        ("sigkill", 137, ["mgpurun: rank 1 was killed by SIGKILL"; 3]),
    ] {
        let mut launcher = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
        launcher.env("MGPU_TIMEOUT", TIMEOUT).args(["-n", "2", "--backend", "nccl", "--inject"]);
        launcher.arg(format!("rank=1,step=15,fault={fault}")).arg(env!("CARGO_BIN_EXE_t-train_mnist"));
        launcher.args(LENET5).args(["--steps", "60"]);
        launcher.args(["--kernels", "builtin"]);
        let finished = run(&mut launcher);
        finished.expect(code, &texts);
        assert!(!finished.stderr.contains("did not end within"), "{finished:#?}");
    }
}

#[test]
fn an_initialisation_that_never_ends() {
    let finished = Case::nccl(2, "hang_init@1").run();
    finished.expect(65, &["made no progress", "in the initialisation of NCCL, communicator-1"]);
}

#[test]
fn a_call_that_never_returns_is_blamed_on_its_own_rank() {
    let finished = Case::nccl(2, "hang_call_init@0").run();
    finished.expect(65, &["mgpurun: rank 0 made no progress"]);
    let texts = [
        "rank 0 is stuck in the initialisation of NCCL",
        "ncclCommInitRankConfig has not returned",
        "for rank 0 in",
    ];
    assert!(texts.iter().any(|text| finished.stderr.contains(text)), "{finished:#?}");
}

#[test]
fn an_initialisation_that_nccl_refuses() {
    let finished = Case::nccl(2, "init_error").run();
    finished.expect(9, &["in the initialisation of NCCL, communicator-1: ", "NCCL result 2"]);
}

#[test]
fn an_asynchronous_error() {
    let finished = Case::nccl(2, "async_error@1:after=3").run();
    // Rank 0 knows rank 1's error at once, and may exit first.
    finished.expect(9, &[" exited with code 9"]);
    gives_up(&finished, 1, &["rank 1 in operation ", "all_reduce(1000 f32, sum)", "NCCL result 6"]);
    gives_up(&finished, 0, &["lost rank 1 in operation ", "NCCL result 6"]);
}

#[test]
fn a_collective_that_never_ends() {
    let finished = Case::nccl(2, "stuck_collective@0:after=2").run();
    finished.expect(65, &["made no progress", "turn 2, after all_reduce(1000 f32, sum)"]);
}

#[test]
fn local_work_that_never_ends() {
    let stuck = Case { fault: "stuck_collective@1:after=3", ..Case::new(2, &["loop", "local", "1"]) };
    let finished = Case { timeout: TIMEOUT, ..stuck }.run();
    finished.expect(65, &["mgpurun: rank 1 made no progress"]);
    let texts =
        ["rank 1 is stuck in turn 3: the GPU's own work has not returned", " s for rank 1 in operation 4"];
    assert!(texts.iter().any(|text| finished.stderr.contains(text)), "{finished:#?}");
}

#[test]
fn an_abort_that_never_returns() {
    let finished = Case { fault: "stuck_abort", ..Case::new(2, &["loop", "kill", "1"]) }.run();
    finished.expect(137, &["mgpurun: rank 1 was killed by SIGKILL"]);
    gives_up(&finished, 0, &["lost rank 1"]);
}

#[test]
fn a_finalise_that_never_returns() {
    // All work is done at that point, so a finalise that never returns loses nothing.
    Case::nccl(2, "stuck_finalize").run().expect(0, &[]);
}

/// Runs `t-misbehave` on host buffers.
fn misbehave(ranks: u32, arguments: &[&str]) -> Finished {
    let mut launcher = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.env("FAKE_GPU_COUNT", "4").env("MGPU_TIMEOUT", "60");
    launcher.args(["-n", &ranks.to_string(), "--backend", "nccl", env!("CARGO_BIN_EXE_t-misbehave")]);
    run(launcher.args(arguments))
}

#[test]
fn host_operations_that_differ_name_both_sides() {
    let ours = "all_reduce(2048 f32, sum)";
    for (fault, theirs) in [
        ("wrong-count", "all_reduce(1024 f32, sum)"),
        ("wrong-type", "all_reduce(2048 i32, sum)"),
        ("wrong-reduction", "all_reduce(2048 f32, max)"),
        ("barrier", "barrier"),
        ("broadcast", "broadcast(2048 f32, root 0)"),
    ] {
        let finished = misbehave(3, &[fault, "1", "private"]);
        finished.expect(9, &[]);
        for rank in [0, 2] {
            let (calls, other) = (format!("rank {rank} calls {ours}"), format!("rank 1 calls {theirs}"));
            gives_up(&finished, rank, &["ranks disagree on operation 4", &calls, &other]);
        }
    }
}

#[test]
fn a_rank_that_dies_in_a_host_operation() {
    for seed in ["1", "2", "3", "4"] {
        let finished = misbehave(3, &["kill", "2", "staged", seed]);
        finished.expect(137, &["mgpurun: rank 2 was killed by SIGKILL"]);
        for rank in [0, 1] {
            gives_up(&finished, rank, &["lost rank 2 in operation", "was killed by SIGKILL"]);
        }
    }
}

/// Runs `t-groups` on 2 × 2 ranks: the rows are 0, 1 and 2, 3, the columns 0, 2 and 1, 3.
fn grid(fault: &str, timeout: &str, arguments: &[&str]) -> Finished {
    let mut launcher = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.env("FAKE_GPU_COUNT", "4").env("MGPU_TIMEOUT", timeout).env("FAKE_NCCL_FAULT", fault);
    launcher.args(["-n", "4", "--backend", "nccl", "--grace", "2", env!("CARGO_BIN_EXE_t-groups")]);
    run(launcher.args(arguments))
}

/// No rank ends before all have reported, so the ranks of the other row do not learn it from the launcher.
#[test]
fn a_mismatch_in_a_group_names_the_group_and_ends_all_groups() {
    let finished = grid("", "60", &["mismatch", "3"]);
    finished.expect(9, &[]);
    let calls = ["rank 2 calls all_reduce(2048 f32, sum)", "rank 3 calls all_reduce(1024 f32, sum)"];
    for (rank, [ours, theirs]) in [(2, calls), (3, [calls[1], calls[0]])] {
        let theirs = format!("{theirs}, in group 1 (ranks 2, 3)");
        gives_up(&finished, rank, &["ranks disagree on operation 4: ", ours, &theirs]);
    }
    for rank in [0, 1] {
        let texts =
            ["lost rank ", " in operation 4 of group ", "ranks disagree on operation 4", "(ranks 2, 3)"];
        gives_up(&finished, rank, &texts);
    }
}

#[test]
fn a_rank_that_dies_is_known_in_all_groups() {
    for memory in [&["kill", "3"][..], &["kill", "3", "device"]] {
        let finished = grid("", "60", memory);
        finished.expect(137, &["mgpurun: rank 3 was killed by SIGKILL"]);
        for rank in 0..3 {
            gives_up(&finished, rank, &["lost rank 3 in operation ", " of group ", "was killed by SIGKILL"]);
        }
    }
}

/// Rank 0 waits for rank 2, which waits in its row.
#[test]
fn a_silent_rank_is_named_in_groups_without_it() {
    for memory in [&["hang", "3"][..], &["hang", "3", "device"]] {
        let finished = grid("", "2", memory);
        finished.expect(65, &["mgpurun: rank 3 made no progress"]);
        for rank in 0..3 {
            gives_up(&finished, rank, &[" s for rank 3 in operation 4", " of group "]);
        }
    }
}

#[test]
fn a_rank_that_does_not_join_a_split() {
    for (fault, arguments, texts) in [
        (
            "",
            &["no-split", "2", "device"][..],
            [" s for rank 2 in ", "the arguments of a split, after all_gather("],
        ),
        ("", &["no-split", "2"], [" s for rank 2 in ", "all_gather("]),
        ("hang_call_split@2", &["none", "9"], ["rank 2", "the connection of group 1 (ranks "]),
        ("hang_call_split@2", &["none", "9", "device"], ["rank 2", "the connection of group 1 (ranks "]),
    ] {
        let finished = grid(fault, "2", arguments);
        finished.expect(65, &["mgpurun: rank 2 made no progress"]);
        for rank in [0, 1, 3] {
            let (error, _) = said(&finished, rank);
            assert!(texts.iter().all(|text| error.contains(text)), "rank {rank}: {finished:#?}");
        }
    }
}

#[test]
fn a_split_that_never_ends_or_fails() {
    for memory in [&["none", "9"][..], &["none", "9", "device"]] {
        let finished = grid("hang_split@1", "2", memory);
        finished.expect(65, &["made no progress", "in the connection of group 1 (ranks "]);
        let finished = grid("split_error@1", "2", memory);
        finished.expect(9, &["in the connection of group 1 (ranks 0, 1), communicator-1: ", "NCCL result 2"]);
    }
}

#[test]
fn two_ranks_on_one_gpu() {
    let one = Case { environment: vec![("MGPU_DEVICE", "0")], ..Case::new(2, &["loop"]) };
    let finished = one.run();
    finished.expect(69, &["both use GPU-", "give each rank a GPU of its own", "rank 0", "rank 1"]);
    Case { options: vec!["--share-gpus"], ..one }.run().expect(0, &["share"]);
}

#[test]
fn too_few_gpus() {
    let case = Case { environment: vec![("FAKE_GPU_COUNT", "1")], ..Case::new(2, &["loop"]) };
    case.run().expect(9, &["there is no GPU 1: CUDA sees 1"]);
}

#[test]
fn missing_libraries_are_reported_in_one_line() {
    let missing = |command: &mut Command, code: i32, text: &str| {
        let finished = run(command);
        finished.expect(code, &[text]);
        let lines = finished.stderr.lines().filter(|line| line.contains(text)).count();
        assert!(lines >= 1, "{finished:#?}");
    };
    let launch = |command: &mut Command, ranks: &str| {
        command.args(["-n", ranks, "--backend", "nccl", env!("CARGO_BIN_EXE_t-device"), "loop"]);
    };
    // No driver: a folder that contains only NCCL.
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(fake_gpu::folder().join("libnccl.so.2"), folder.path().join("libnccl.so.2"))
        .unwrap();
    let mut command = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
    command.env("LD_LIBRARY_PATH", folder.path());
    launch(&mut command, "1");
    if !std::path::Path::new("/proc/driver/nvidia/version").exists() {
        missing(&mut command, 9, "error: the NVIDIA driver was not found: no libcuda.so.1");
    }
    // No NCCL at the given path.
    let mut command = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
    command.env("MGPU_NCCL_LIBRARY", "/nonexistent/libnccl.so.2");
    launch(&mut command, "2");
    missing(
        &mut command,
        9,
        "error: NCCL could not be loaded from: MGPU_NCCL_LIBRARY (/nonexistent/libnccl.so.2)",
    );
    // Another library under its name.
    let mut command = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
    command.env("MGPU_NCCL_LIBRARY", "libc.so.6");
    launch(&mut command, "2");
    missing(&mut command, 9, "error: NCCL could not be loaded from: MGPU_NCCL_LIBRARY (libc.so.6)");
}

/// Nearly empty NCCL libraries: one too old, and one without a function that its version should have.
#[test]
fn an_unsuitable_nccl_is_named_by_version_or_function() {
    for (version, text) in [
        (21000, "libnccl-odd.so is too old, 2.18.0 or newer is needed"),
        (21900, "in the initialisation of NCCL, communicator-1: ncclCommInitRankConfig is missing from "),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (folder.path().join("odd.c"), folder.path().join("libnccl-odd.so"));
        let functions = "int ncclGetUniqueId(char* id) { id[0] = 1; return 0; }";
        fs::write(
            &source,
            format!("int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}\n{functions}\n"),
        )
        .unwrap();
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "gcc".into());
        let built =
            Command::new(compiler).args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        assert!(built.unwrap().success());
        let mut command = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
        command.env("MGPU_NCCL_LIBRARY", &library);
        command.args(["-n", "2", "--backend", "nccl", env!("CARGO_BIN_EXE_t-device"), "loop"]);
        run(&mut command).expect(9, &[text]);
    }
}

/// Host buffers: the rank in the collective reports the mismatch, and the others lose it.
#[test]
fn a_message_paired_with_a_collective() {
    for (ranks, fault, theirs) in
        [(2, "recv", "recv of 8192 bytes with rank 0"), (3, "send", "send of 4194304 bytes with rank 2")]
    {
        let mut launcher = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
        launcher.env("FAKE_GPU_COUNT", "4").env("MGPU_TIMEOUT", "200");
        launcher.args(["-n", &ranks.to_string(), "--backend", "nccl", "--grace", "5"]);
        let finished = run(launcher.args([env!("CARGO_BIN_EXE_t-misbehave"), fault, "1", "private"]));
        assert_eq!(finished.code, Some(9), "{finished:#?}");
        let meets = (1 + 1) % ranks;
        let ours = format!("ranks disagree on operation 4: rank {meets} calls all_reduce(2048 f32, sum)");
        gives_up(&finished, meets, &[&ours, &format!("rank 1 calls {theirs}")]);
        for rank in (0..ranks).filter(|rank| *rank != meets) {
            let (error, _) = said(&finished, rank);
            assert!(error.starts_with(&format!("rank {rank} lost rank ")), "{rank}: {finished:#?}");
        }
    }
}
