//! Whatever fails, in any phase: the culprit is named, the exit code tells the failure, and nothing survives. The
//! matrix: every fault in every phase of a job, on 1, 2 and 5 ranks. (`bench/chaos.sh` measures how fast.)

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use mgpu_tests::process::{Finished, command, finish, run, survivors, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PHASES: [&str; 6] =
    ["phase=start", "phase=join", "phase=collective", "step=3", "phase=checkpoint", "phase=finalise"];

/// Faults that end a rank, and the resulting exit code.
const DEADLY: [(&str, i32); 6] =
    [("abort", 134), ("exit:3", 3), ("sigkill", 137), ("segv", 139), ("oom", 134), ("panic", 101)];

/// Exit code of ranks that lose another rank.
const VICTIM: i32 = 9;

/// A launcher with its own environment, whose processes can be identified.
fn launcher(folder: &Path) -> Command {
    let mut launcher = command("env");
    launcher.args(["--default-signal", env!("CARGO_BIN_EXE_t-mgpurun"), "--backend", "cpu"]);
    launcher.env("TMPDIR", folder).env_remove("XDG_RUNTIME_DIR").env("MGPU_TEST_MARK", folder);
    launcher.env("RUST_BACKTRACE", "0");
    launcher
}

fn leftover_processes(folder: &Path) -> Vec<u32> {
    survivors(&format!("MGPU_TEST_MARK={}", folder.display()))
}

/// One combination of the matrix.
#[derive(Debug, Clone, Copy)]
struct FaultCase {
    ranks: u32,
    culprit: u32,
    fault: &'static str,
    phase: &'static str,
}

impl FaultCase {
    fn run(self) {
        let folder = tempfile::tempdir().unwrap();
        let inject = format!("rank={},{},fault={}", self.culprit, self.phase, self.fault);
        let mut job = launcher(folder.path());
        job.args(["-n", &self.ranks.to_string(), "--inject", &inject]);
        if matches!(self.fault, "hang" | "sigstop") {
            // The other ranks need time to start on a busy machine.
            job.args(["--timeout", "4", "--progress-timeout", "1"]);
        }
        let finished = run(job.arg(env!("CARGO_BIN_EXE_t-job")));
        assert_eq!(leftover_processes(folder.path()), [] as [u32; 0], "{self:?}: {finished:#?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{self:?}: {finished:#?}");
        let (code, said) = self.expected();
        assert_eq!(finished.code, Some(code), "{self:?}: {finished:#?}");
        let is_said = finished.stderr.lines().any(|line| line.starts_with(&said));
        assert!(said.is_empty() || is_said, "no `{said}`: {self:?}: {finished:#?}");
        if code != 0 && self.phase != "phase=finalise" {
            self.others_name_it(&finished);
        }
    }

    /// Exit code, and the beginning of the launcher's verdict.
    fn expected(self) -> (i32, String) {
        let verdict = |code, what: &str| (code, format!("mgpurun: rank {} {what}", self.culprit));
        let deadly = DEADLY.iter().find(|(fault, _)| *fault == self.fault);
        match (self.fault, self.phase) {
            _ if deadly.is_some() => verdict(deadly.unwrap().1, ""),
            // No other rank needs it any more.
            ("exit0", "phase=finalise") | ("leak-child", _) => (0, String::new()),
            ("exit0", _) if self.ranks == 1 => (0, String::new()),
            ("exit0", _) => verdict(VICTIM, "exited with code 0 while others needed it"),
            (_, "phase=start" | "phase=join") => verdict(64, "did not join within 4 s"),
            _ => verdict(65, "made no progress for "),
        }
    }

    /// Every other rank fails with an error that names the culprit.
    fn others_name_it(self, finished: &Finished) {
        for rank in (0..self.ranks).filter(|rank| *rank != self.culprit) {
            let said = format!("[{rank}] error: rank {rank} lost rank {} in ", self.culprit);
            assert!(finished.stderr.contains(&said), "no `{said}`: {self:?}: {finished:#?}");
        }
    }
}

/// Runs the cases of these faults, a few at a time.
fn run_all(faults: &[&'static str]) {
    let cases = faults.iter().flat_map(|fault| PHASES.map(|phase| (*fault, phase)));
    let sized = cases.flat_map(|(fault, phase)| [1, 2, 5].map(|ranks| (ranks, fault, phase)));
    // A single rank that never joins is a program that does not use the runtime: no one waits for it.
    let is_possible = |(ranks, fault, phase): &(u32, &str, &str)| {
        !(*ranks == 1 && ["hang", "sigstop"].contains(fault) && ["phase=start", "phase=join"].contains(phase))
    };
    let cases: VecDeque<FaultCase> = sized
        .filter(is_possible)
        .enumerate()
        .map(|(index, (ranks, fault, phase))| FaultCase {
            ranks,
            culprit: index as u32 % ranks,
            fault,
            phase,
        })
        .collect();
    let queue = Mutex::new(cases);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap().pop_front();
                    let Some(case) = next else { break };
                    case.run();
                }
            });
        }
    });
}

#[test]
fn a_rank_that_dies_in_any_phase() {
    run_all(&DEADLY.map(|(fault, _)| fault));
}

#[test]
fn a_rank_that_exits_early_in_any_phase() {
    run_all(&["exit0"]);
}

#[test]
fn a_rank_that_is_silent_in_any_phase() {
    run_all(&["hang", "sigstop"]);
}

#[test]
fn a_rank_that_leaves_a_child_in_any_phase() {
    run_all(&["leak-child"]);
}

#[test]
fn leftover_processes_of_a_dead_rank_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    job.args(["-n", "2", "--inject", "rank=1,step=2,fault=leak-child"]);
    job.args(["--inject", "rank=1,step=3,fault=sigkill", env!("CARGO_BIN_EXE_t-job")]);
    run(&mut job).expect(137, &["rank 1 was killed by SIGKILL"]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}

/// A script that starts a child in another session, reports that it is ready, and stays.
const STUBBORN: &str = "trap '' TERM INT HUP; setsid sh -c 'trap \"\" TERM INT HUP; : > child-'$RANK'; \
                        while :; do sleep 1; done' & : > ready-$RANK; while :; do sleep 1; done";

/// Starts a job of such scripts; returns it with the processes of guardian and launcher.
fn start_stubborn(folder: &Path) -> (Child, Pid) {
    let mut job = launcher(folder);
    job.args(["-n", "2", "sh", "-c", STUBBORN]).current_dir(folder);
    let child = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| {
        (0..2)
            .all(|rank| ["ready", "child"].iter().all(|name| folder.join(format!("{name}-{rank}")).exists()))
    });
    let id = child.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let launcher = children.trim().parse().expect("a guardian has one child");
    (child, Pid::from_raw(launcher))
}

#[test]
fn nothing_survives_a_killed_guardian() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, _) = start_stubborn(folder.path());
    assert!(leftover_processes(folder.path()).len() >= 6);
    child.kill().unwrap();
    child.wait().unwrap();
    until(|| leftover_processes(folder.path()).is_empty());
}

#[test]
fn nothing_survives_a_killed_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, launcher) = start_stubborn(folder.path());
    kill(launcher, Signal::SIGKILL).unwrap();
    finish(&mut child).expect(137, &["the launcher was killed by SIGKILL, and its ranks with it"]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
    let folders = fs::read_dir(folder.path()).unwrap().flatten().filter(|entry| entry.path().is_dir());
    assert_eq!(folders.count(), 0);
}

#[test]
fn rank_process_groups_end_when_launcher_and_guardian_are_killed_together() {
    let folder = tempfile::tempdir().unwrap();
    let stubborn = "trap '' TERM INT HUP; sh -c 'while :; do sleep 1; done' & : > ready-$RANK; \
                    while :; do sleep 1; done";
    // A process that changes its user loses its parent-death signal.
    let is_root = nix::unistd::geteuid().is_root();
    let change = if is_root { "setpriv --reuid 65534 --clear-groups" } else { "" };
    let script = format!("{change} sh -c 'while :; do sleep 1; done' & {stubborn}");
    let (mut guardian, launcher) = start_script(folder.path(), 2, &script);
    until(|| leftover_processes(folder.path()).len() >= 8);
    // While stopped, the guardian does not notice the launcher's end.
    kill(Pid::from_raw(guardian.id() as i32), Signal::SIGSTOP).unwrap();
    kill(launcher, Signal::SIGKILL).unwrap();
    guardian.kill().unwrap();
    guardian.wait().unwrap();
    until(|| leftover_processes(folder.path()).is_empty());
}

#[test]
fn processes_that_keep_forking_are_all_killed() {
    let folder = tempfile::tempdir().unwrap();
    // Each daemon of a chain starts the next one, in the same or a new session, and exits.
    let fork = "chain() { chain & exit; }; chain";
    let session = "CHAIN='setsid sh -c \"$CHAIN\" & exit'; export CHAIN; eval \"$CHAIN\"";
    let script = format!(
        "exec >/dev/null 2>&1; for i in 1 2 3 4; do setsid sh -c '{fork}' & setsid sh -c \"$SESSION\" & done"
    );
    let mut job = launcher(folder.path());
    // They must not slow down the tests that run at the same time.
    job.args(["-n", "1", "nice", "-n", "19", "sh", "-c", &script]).env("SESSION", session);
    run(&mut job).expect(0, &[]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}

#[test]
fn processes_started_by_the_shell_before_exec_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let launcher = env!("CARGO_BIN_EXE_t-mgpurun");
    let script = format!("sleep 1000 & echo $!; exec {launcher} --no-prefix -n 2 true");
    let mut shell = command("sh");
    shell.args(["-c", &script]).env("TMPDIR", folder.path()).stderr(Stdio::null());
    let mut child = shell.stdout(Stdio::piped()).spawn().unwrap();
    let mut number = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut number).unwrap();
    assert!(child.wait().unwrap().success());
    let sleeper = Pid::from_raw(number.trim().parse().unwrap());
    assert_eq!(kill(sleeper, Signal::SIGKILL), Ok(()), "it still ran");
}

#[test]
fn the_status_of_a_run_is_visible_from_inside_and_outside() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    job.args(["-n", "2", "--inject", "rank=1,step=3,fault=sigstop", env!("CARGO_BIN_EXE_t-job")]);
    let mut child = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let list_runs = || run(launcher(folder.path()).arg("ps")).stdout;
    // The launcher's `ps` is selected by its first argument.
    let ps = || run(command(env!("CARGO_BIN_EXE_t-mgpurun")).arg("ps")).stdout;
    let mut seen = String::new();
    until(|| {
        seen = ps();
        let own = |line: &str| line.contains("stopped") && line.contains("in step 3, after all_reduce #2");
        seen.lines().any(own) && seen.lines().any(|line| line.ends_with("rank 1"))
    });
    assert!(seen.contains(": t-job on 2 ranks for "), "{seen}");
    assert!(!list_runs().contains("launcher "), "only as the first argument");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGQUIT).unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let finished = finish(&mut child);
    finished.expect(143, &["mgpurun: rank  pid", "stopped by SIGTERM"]);
    assert!(finished.stderr.contains("in step 3, in all_reduce #3, 40.0 kB"), "{finished:#?}");
}

#[test]
fn ranks_that_never_join_are_shown_as_alive() {
    let folder = tempfile::tempdir().unwrap();
    let script = "[ $RANK = 0 ] && { : > ready-0; exit; }; : > ready-1; while :; do sleep 1; done";
    let (mut child, launcher) = start_script(folder.path(), 2, script);
    let title = format!("launcher {launcher}: sh -c ");
    let mut seen = Vec::new();
    until(|| {
        let runs = run(command(env!("CARGO_BIN_EXE_t-mgpurun")).arg("ps")).stdout;
        let lines = runs.lines().skip_while(|line| !line.starts_with(&title));
        seen = lines.take_while(|line| !line.is_empty()).map(str::to_owned).collect();
        let shows =
            |rank: &str, state| seen.iter().any(|line| line.starts_with(rank) && line.contains(state));
        shows("0 ", "exited with code 0") && shows("1 ", "sleeping, not joined")
    });
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    finish(&mut child).expect(143, &["stopped by SIGTERM"]);
}

#[test]
fn the_culprit_is_named_before_the_others_have_ended() {
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events");
    let script = "[ $RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 0.05; done";
    let mut job = launcher(folder.path());
    job.args(["-n", "2", "--grace", "100000", "--events", events.to_str().unwrap(), "sh", "-c", script]);
    let mut child = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut verdict = String::new();
    stderr.read_line(&mut verdict).unwrap();
    assert!(verdict.starts_with("mgpurun: rank 1 exited with code 3 after "), "{verdict}");
    let faults = || fs::read_to_string(&events).unwrap().matches("\"event\":\"fault\",\"rank\":1,").count();
    until(|| faults() == 1);
    assert!(child.try_wait().unwrap().is_none());
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    assert_eq!((rest.matches("rank 1 exited").count(), faults()), (0, 1), "{rest}");
}

#[test]
fn a_timeout_inside_a_rank_also_prints_the_status_table() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    job.env("MGPU_TIMEOUT", "3").args(["-n", "3", "--inject", "rank=2,step=3,fault=hang"]);
    let finished = run(job.arg(env!("CARGO_BIN_EXE_t-job")));
    finished.expect(65, &["mgpurun: rank 2 made no progress: ", "mgpurun: rank  pid", " s for rank 2 in "]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}

#[test]
fn incompatible_ranks_are_reported_by_rank() {
    let hello = env!("CARGO_BIN_EXE_t-hello");
    for (lists, code, said) in [
        (["5,5", "2,2", "GPU-a,GPU-b", "570,570", "2.27,2.27"], 0, ""),
        (["5,5", "2,2", "-,-", "-,-", "-,-"], 0, ""),
        (["5,1", "2,2", "-,-", "-,-", "-,-"], 66, "rank 1 uses version 1 of the protocol"),
        (["5,5", "2,3", "-,-", "-,-", "-,-"], 68, "claims to be rank 1 of 3 in a world of 2"),
        (["5,5", "2,2", "GPU-a,GPU-a", "-,-", "-,-"], 69, "both use GPU-a: give each rank a GPU of its own"),
        (["5,5", "2,2", "GPU-a,GPU-b", "570,550", "-,-"], 70, "uses NVIDIA driver 5"),
        (["5,5", "2,2", "GPU-a,GPU-b", "-,-", "2.27,2.26"], 70, "uses NCCL 2.2"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let finished = run(launcher(folder.path()).args(["-n", "2", hello]).args(lists));
        finished.expect(code, &[said]);
        assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
    }
}

#[test]
fn ranks_must_run_the_same_program() {
    let folder = tempfile::tempdir().unwrap();
    let job = env!("CARGO_BIN_EXE_t-job");
    let other = folder.path().join("other");
    fs::write(&other, [fs::read(job).unwrap(), b"x".to_vec()].concat()).unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).unwrap();
    let script = format!("[ $RANK = 1 ] && exec {}; exec {job}", other.display());
    let finished = run(launcher(folder.path()).args(["-n", "3", "sh", "-c", &script]));
    finished.expect(67, &["all ranks run one program", "/other"]);
}

#[test]
fn a_failed_rank_is_restarted_with_all_others() {
    let restart = |options: &[&str], faults: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let mut job = launcher(folder.path());
        job.args(["-n", "2"]).args(options);
        faults.iter().for_each(|fault| _ = job.args(["--inject", fault]));
        let finished = run(job.arg(env!("CARGO_BIN_EXE_t-job")));
        assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
        finished
    };
    let fault = "rank=1,step=3,fault=sigkill";
    let again = "rank=0,step=4,fault=exit:5,restart=1";
    let finished = restart(&["--max-restarts", "2"], &[fault, again]);
    finished.expect(0, &["mgpurun: rank 1 was killed by SIGKILL", "restart 1 of 2 in 0.5 s"]);
    finished.expect(0, &["mgpurun: rank 0 exited with code 5", "restart 2 of 2 in 1 s", "[1] life 2"]);
    restart(&["--max-restarts", "1"], &[fault, again]).expect(5, &["no restart is left"]);
    // A failed start is not repeated.
    let early = "rank=1,phase=collective,fault=exit:6";
    restart(&["--max-restarts", "3"], &[early])
        .expect(6, &["not restarted, since no training step was completed"]);
    restart(&["--max-restarts", "3", "--restart-always"], &[early]).expect(0, &["[0] life 1"]);
}

/// Events and faults are those of the ranks that are left.
#[test]
fn a_rank_that_fails_in_two_starts_in_a_row_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo life $MGPU_RESTART_COUNT of $WORLD_SIZE; [ $RANK$WORLD_SIZE != 13 ] || exit 3";
    let mut job = launcher(folder.path());
    job.current_dir(folder.path()).args(["-n", "3", "--min-ranks", "2", "--max-restarts", "2"]);
    job.args(["--events", "events", "--inject", "rank=2,step=1,fault=abort,restart=2", "sh", "-c", script]);
    let finished = run(&mut job);
    finished.expect(
        0,
        &[
            "restart 2 of 2 in 1 s",
            "going on with 2 of 3 ranks: rank 1 is left out after failures",
            "[0] life 2 of 2\n",
            "[1] life 2 of 2\n",
            "fault=abort,restart=2 did not happen: this start had 2 ranks",
        ],
    );
    assert!(!finished.stdout.contains("[2] life 2"), "{finished:#?}");
    let events = fs::read_to_string(folder.path().join("events")).unwrap();
    let starts = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let starts: Vec<u64> = starts.filter_map(|event| event["ranks"].as_u64()).collect();
    assert_eq!(starts, [3, 3, 2]);
}

#[test]
fn programs_that_never_join_are_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    let script = "echo life $MGPU_RESTART_COUNT; [ $RANK$MGPU_RESTART_COUNT != 10 ] || exit 3";
    job.args(["-n", "2", "--max-restarts", "2", "sh", "-c", script]);
    run(&mut job).expect(0, &["rank 1 exited with code 3", "restart 1 of 2 in 0.5 s", "[0] life 1"]);
}

#[test]
fn a_signal_in_the_pause_before_a_restart_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    job.args(["-n", "1", "--max-restarts", "9", "sh", "-c", "exit 3"]);
    let mut child = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    // The pause is long enough for the signal to arrive during it.
    while !said.ends_with("restart 4 of 9 in 4 s\n") {
        assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "{said}");
    }
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    stderr.read_to_string(&mut said).unwrap();
    assert!(said.ends_with("restart 4 of 9 in 4 s\nmgpurun: stopped by SIGTERM\n"), "{said}");
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_fault_that_was_not_injected_is_reported() {
    let job = env!("CARGO_BIN_EXE_t-job");
    let folder = tempfile::tempdir().unwrap();
    let inject = |faults: &[&str], program: &str| {
        let mut launcher = launcher(folder.path());
        launcher.args(["-n", "2"]);
        faults.iter().for_each(|fault| _ = launcher.args(["--inject", fault]));
        run(launcher.arg(program))
    };
    let late = "rank=1,step=100,fault=abort";
    for (fault, program, why) in [
        (late, job, "the last step of rank 1 was 5"),
        (late, "true", "rank 1 never joined the run"),
        ("rank=0,phase=start,fault=exit:3", "true", "rank 0 never joined the run"),
        ("rank=0,step=2,fault=abort,restart=1", job, "the ranks were restarted 0 times"),
    ] {
        inject(&[fault], program).expect(0, &[&format!("mgpurun: the fault {fault} did not happen: {why}")]);
    }
    // Another fault happened first.
    inject(&["rank=0,step=2,fault=exit:3", late], job)
        .expect(3, &[&format!("the fault {late} did not happen")]);
    for fault in ["rank=1,phase=start,fault=exit0", "rank=1,phase=checkpoint,fault=leak-child"] {
        let finished = inject(&[fault], job);
        assert!(!finished.stderr.contains("did not happen"), "{finished:#?}");
    }
    inject(&["rank=2,step=1,fault=abort"], job).expect(2, &["there is no rank 2 among 2"]);
}

#[test]
fn a_rank_that_floods_the_rendezvous_blocks_nobody_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    let finished = run(job.args(["-n", "2", env!("CARGO_BIN_EXE_t-flood"), "1", "3000"]));
    finished.expect(0, &["[0] 2 ranks are here", "[1] 2 ranks are here"]);
    let rejected: Vec<&str> = finished.stderr.lines().filter(|line| line.contains("rejected")).collect();
    // Events within a short time are reported in one line.
    assert!((1..=5).contains(&rejected.len()), "{finished:#?}");
    for line in rejected {
        let parts = [
            "mgpurun: rejected ",
            " connections, the first of rank 1: process ",
            " silent connections, and no process has more",
        ];
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
}

#[test]
fn ranks_that_use_mpi_are_warned_about_their_world_of_one() {
    let folder = tempfile::tempdir().unwrap();
    // Any library serves under that name.
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let library = maps.split_ascii_whitespace().find(|word| word.contains("/libgcc_s.so")).unwrap();
    let mpi = folder.path().join("libmpi.so.40");
    fs::copy(library, &mpi).unwrap();
    let mut job = launcher(folder.path());
    job.args(["-n", "2", "env"]).arg(format!("LD_PRELOAD={}", mpi.display())).args(["sleep", "1000"]);
    let mut child = job.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let warning = lines.find_map(|line| line.ok().filter(|line| line.contains("MPI")));
    let warning = warning.expect("a line about MPI");
    assert!(warning.starts_with("mgpurun: the ranks use MPI, ") && warning.contains("mpirun"), "{warning}");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    child.wait().unwrap();
    assert!(!lines.any(|line| line.unwrap().contains("MPI")), "the warning is printed once");
}

#[test]
fn a_forked_child_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let finished = run(launcher(folder.path()).args(["-n", "3", env!("CARGO_BIN_EXE_t-fork")]));
    finished.expect(0, &["[0] 3 ranks went on", "[2] 3 ranks went on", "a forked child cannot use"]);
    let child = |line: &&str| line.contains("was forked by rank 1 and is not a rank");
    assert_eq!(finished.stdout.lines().filter(child).count(), 3, "{finished:#?}");
}

#[test]
fn many_launches_at_once() {
    std::thread::scope(|scope| {
        for _ in 0..50 {
            scope.spawn(|| {
                let folder = tempfile::tempdir().unwrap();
                run(launcher(folder.path()).args(["-n", "2", env!("CARGO_BIN_EXE_t-job")])).expect(0, &[]);
                assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
            });
        }
    });
}

#[test]
fn a_used_port_or_a_missing_network_does_not_matter() {
    // The port is taken, whoever holds it.
    let _holder = std::net::TcpListener::bind(("127.0.0.1", 29500));
    let folder = tempfile::tempdir().unwrap();
    run(launcher(folder.path()).args(["-n", "2", env!("CARGO_BIN_EXE_t-job")])).expect(0, &[]);
    // A separate network namespace, where even the loopback interface is down.
    let namespace = ["--user", "--map-root-user", "--net"];
    if run(command("unshare").args(namespace).arg("true")).code != Some(0) {
        return eprintln!("skipped: this machine makes no network namespaces for its users");
    }
    let mut isolated = command("unshare");
    isolated.args(namespace).arg(env!("CARGO_BIN_EXE_t-mgpurun"));
    isolated.args(["-n", "2", env!("CARGO_BIN_EXE_t-job")]);
    run(&mut isolated).expect(0, &["[1] life 0"]);
}

#[test]
fn inherited_ignored_signals_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = command("env");
    job.args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_t-mgpurun"), "-n", "2"]);
    run(job.args(["sh", "-c", "exit 3"]).env("TMPDIR", folder.path())).expect(3, &["exited with code 3"]);
}

/// Starts ranks that report that they are ready and then run `script`; returns the child and its launcher.
fn start_script(folder: &Path, ranks: u32, script: &str) -> (Child, Pid) {
    let mut job = launcher(folder);
    job.args(["-n", &ranks.to_string(), "sh", "-c", script]).current_dir(folder);
    let child = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| (0..ranks).all(|rank| folder.join(format!("ready-{rank}")).exists()));
    let id = child.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    (child, Pid::from_raw(children.trim().parse().expect("a guardian has one child")))
}

#[test]
fn a_signal_to_all_processes_counts_once() {
    let folder = tempfile::tempdir().unwrap();
    let script = "trap 'sleep 0.3; echo clean; exit 0' TERM; : > ready-$RANK; while :; do sleep 0.01; done";
    let (mut child, launcher) = start_script(folder.path(), 2, script);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    kill(launcher, Signal::SIGTERM).unwrap();
    finish(&mut child).expect(143, &["[0] clean", "[1] clean"]);
}

#[test]
fn children_of_a_shell_get_the_grace_time() {
    let folder = tempfile::tempdir().unwrap();
    // The inner shell is the program; the outer one dies from the signal at once.
    let inner = "trap \"sleep 0.3; echo saved; exit 0\" TERM; : > ready-$RANK; while :; do sleep 0.01; done";
    let (mut child, _) = start_script(folder.path(), 2, &format!("sh -c '{inner}'; exit $?"));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    finish(&mut child).expect(143, &["[0] saved", "[1] saved"]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}

#[test]
fn a_rank_that_leaves_its_process_group_is_still_killed() {
    let folder = tempfile::tempdir().unwrap();
    let wait = "[ $RANK = 1 ] && { until [ -e wandered ]; do sleep 0.01; done; exit 3; }";
    let script = format!("{wait}; exec {} wandered", env!("CARGO_BIN_EXE_t-wander"));
    let mut job = launcher(folder.path());
    job.current_dir(folder.path()).args(["--grace", "0.3", "-n", "2", "sh", "-c", &script]);
    let finished = run(&mut job);
    finished.expect(3, &["[0] wandered", "rank 0 did not end within 0.3 s: killed"]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}

#[test]
fn a_rank_outside_the_world_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    job.args(["-n", "2", "env", "RANK=5", "WORLD_SIZE=6", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=6"]);
    run(job.arg(env!("CARGO_BIN_EXE_t-job"))).expect(68, &["claims to be rank 5 of 6 in a world of 2"]);
}

#[test]
fn a_cancelled_restart_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (program, events) = (folder.path().join("prog"), folder.path().join("events"));
    fs::write(&program, "#!/bin/sh\nseq 1 60000\nrm -f \"$0\"\nexit 7\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut job = launcher(folder.path());
    job.args([
        "--no-prefix",
        "--max-restarts",
        "1",
        "--restart-always",
        "--events",
        events.to_str().unwrap(),
    ]);
    let finished = run(job.args(["-n", "1", program.to_str().unwrap()]));
    finished.expect(1, &["rank 0 exited with code 7", "cannot start rank 0"]);
    assert_eq!(finished.stdout.lines().count(), 60_000);
    assert!(fs::read_to_string(&events).unwrap().contains("\"event\":\"end\",\"exit_code\":1"));
}

#[test]
fn a_nested_run_does_not_inherit_faults() {
    let folder = tempfile::tempdir().unwrap();
    let inner =
        format!("exec {} --no-prefix -n 1 sh -c 'echo faults:$MGPU_INJECT'", env!("CARGO_BIN_EXE_t-mgpurun"));
    let mut job = launcher(folder.path());
    job.args(["-n", "1", "--no-prefix", "--inject", "rank=0,step=9,fault=hang", "sh", "-c", &inner]);
    let finished = run(&mut job);
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "faults:\n"), "{finished:#?}");
}
