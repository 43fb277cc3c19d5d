//! The Python module: collectives on arrays and tensors, errors as exceptions, Ctrl-C, the hook for PyTorch's DDP, and the
//! wheel. `MGPU_PYTHON` is the Python to use (default: `python3`). Parts that need NumPy or PyTorch are skipped without
//! them, and say so.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mgpu_tests::c_library::shared_library;
use mgpu_tests::process::{Finished, command, run, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const MGPURUN: &str = env!("CARGO_BIN_EXE_t-mgpurun");

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a folder of the repository").join("runtime/python")
}

/// The Python to use; `None` if there is none that is new enough, which it prints.
fn python() -> Option<String> {
    let python = std::env::var("MGPU_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let check = "import sys; sys.exit(sys.version_info < (3, 9))";
    let found = Command::new(&python).args(["-c", check]).status().is_ok_and(|status| status.success());
    if !found {
        println!("skipped: no {python} of version 3.9 or newer");
    }
    found.then_some(python)
}

/// `mgpurun -n RANKS python SCRIPT ARGUMENTS`.
fn launcher(python: &str, ranks: u32, script: &str, arguments: &[&str]) -> Command {
    let mut launcher = command(MGPURUN);
    launcher
        .args(["-n", &ranks.to_string(), "--backend", "cpu", "--no-prefix", python])
        .arg(package().join("tests").join(script))
        .args(arguments)
        .env("PYTHONPATH", package())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("MGPU_C_LIBRARY", shared_library());
    launcher
}

fn launch(ranks: u32, script: &str, arguments: &[&str]) -> Option<Finished> {
    let finished = run(&mut launcher(&python()?, ranks, script, arguments));
    for line in finished.stdout.lines().filter(|line| line.starts_with("skipped")) {
        println!("{line}");
    }
    Some(finished)
}

#[test]
fn collectives_work_on_all_kinds_of_memory() {
    let Some(finished) = launch(3, "check_collectives.py", &[]) else { return };
    finished.expect(74, &["all collectives are right"]);
}

#[test]
fn a_mismatch_is_an_exception_on_both_ranks() {
    let Some(finished) = launch(2, "check_errors.py", &["mismatch"]) else { return };
    finished.expect(
        5,
        &["rank 0: fault of rank 1", "rank 1: fault of rank 0", "all_reduce", "broadcast", "then: "],
    );
}

#[test]
fn a_lost_rank_is_named() {
    let Some(finished) = launch(2, "check_errors.py", &["lost"]) else { return };
    finished.expect(1, &["fault of rank 1", "rank 1 has no more data", "exited with code 1"]);
}

#[test]
fn another_thread_interrupts_a_wait() {
    for case in ["interrupt", "connect"] {
        let Some(finished) = launch(2, "check_errors.py", &[case]) else { return };
        finished.expect(6, &["interrupted: rank 0 was interrupted in "]);
    }
}

#[test]
fn refused_arguments_leave_the_run_unjoined() {
    let Some(finished) = launch(2, "check_errors.py", &["timeout"]) else { return };
    finished.expect(0, &["refused before joining"]);
}

#[test]
fn communicators_are_freed_before_their_parents() {
    let Some(finished) = launch(2, "check_errors.py", &["close"]) else { return };
    let order = "freed ['columns', 'rows', 'groups', 'parent', 'comm']";
    finished.expect(0, &[&format!("rank 0 {order}"), &format!("rank 1 {order}"), "closed: `comm` is null"]);
}

#[test]
fn ctrl_c_ends_a_wait() {
    let Some(python) = python() else { return };
    // With Python's own handler: also if asyncio or the program has replaced it meanwhile. A handler of the program runs.
    for (handler, ending) in [
        ("python", "KeyboardInterrupt after the wait"),
        ("asyncio", "KeyboardInterrupt after the wait"),
        ("again", "KeyboardInterrupt after the wait"),
        ("handler", "Interrupted after own handler"),
    ] {
        let mut command = launcher(&python, 2, "check_errors.py", &["ctrl_c", handler]);
        // Only rank 0 gets the signal, as when the other one does not react to it.
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the launcher");
        let stdout = child.stdout.take().expect("a pipe");
        let mut lines = BufReader::new(stdout).lines();
        assert_eq!(lines.next().expect("a line").expect("a line"), "waiting", "{handler}");
        let mut waiting = None;
        // It wakes up again and again.
        until(|| {
            waiting = children(child.id()).into_iter().find(|pid| is_waiting(*pid));
            waiting.is_some()
        });
        kill(Pid::from_raw(waiting.expect("it waits") as i32), Signal::SIGINT).expect("the rank exists");
        let rest: Vec<String> = lines.map_while(Result::ok).collect();
        assert_eq!(rest, [ending], "{handler}");
        assert_eq!(child.wait().expect("a child").code(), Some(130), "{handler}");
    }
}

/// All descendants of a process.
fn children(pid: u32) -> Vec<u32> {
    let read = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let direct: Vec<u32> = read.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
    direct.iter().flat_map(|pid| std::iter::once(*pid).chain(children(*pid))).collect()
}

/// Whether the process is rank 0 and sleeps in a futex.
fn is_waiting(pid: u32) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let is_rank_0 = environment.split(|byte| *byte == 0).any(|variable| variable == b"RANK=0");
    let call = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    is_rank_0 && call.starts_with(&format!("{} ", nix::libc::SYS_futex))
}

#[test]
fn ddp_with_the_hook_trains_the_same_as_with_gloo() {
    let Some(finished) = launch(2, "check_ddp.py", &[]) else { return };
    finished.expect(0, &[if finished.stdout.contains("skipped") { "skipped" } else { "trains the same" }]);
}

#[test]
fn an_error_in_the_hook_names_the_rank() {
    let Some(finished) = launch(2, "check_ddp.py", &["fail"]) else { return };
    if !finished.stdout.contains("skipped") {
        finished.expect(1, &["rank 0 lost rank 1", "rank 1 has no more data"]);
    }
}

/// With the launcher and the library that the tests have built.
#[test]
fn the_wheel_installs_launcher_and_module() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("built")).expect("a folder");
    let programs = [
        ("mgpurun", MGPURUN),
        ("allreduce_perf", env!("CARGO_BIN_EXE_t-allreduce_perf")),
        ("gpu_check", env!("CARGO_BIN_EXE_t-gpu_check")),
    ];
    for (name, program) in programs {
        fs::copy(program, path("built").join(name)).expect("a copy");
    }
    fs::copy(shared_library(), path("built/libmgpu_c.so")).expect("a copy");
    let venv = run(command(&python).args(["-m", "venv"]).arg(path("venv")));
    if venv.code != Some(0) {
        println!("skipped: {python} -m venv fails: {}", venv.stderr);
        return;
    }
    let in_venv = path("venv/bin/python");
    let mut pip = command(&in_venv);
    pip.args(["-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"]).arg(package());
    run(pip.env("MGPU_PREBUILT", path("built")).env("HOME", folder.path())).expect(0, &[]);
    for (name, _) in programs {
        let installed = path("venv/bin").join(name).metadata().expect("the program");
        assert!(installed.permissions().mode() & 0o111 != 0, "{name}");
    }
    // The programs that it runs are in the wheel.
    let doctor = run(command(path("venv/bin/mgpurun")).args(["doctor", "--test"]));
    let report = doctor.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(report.contains("ok two ranks joined, shared memory, and summed correctly"), "{doctor:#?}");
    let script = path("sum.py");
    let text = "import mgpurun, sys\nv = mgpurun.all_reduce(bytearray([mgpurun.rank() + 1]))\nprint('sum', v[0], sys.prefix)\n";
    fs::write(&script, text).expect("a script");
    let sum = format!("sum 3 {}", path("venv").display());
    let mut direct = command(path("venv/bin/mgpurun"));
    direct.args(["-n", "2", "--backend", "cpu", "--no-prefix"]).arg(&in_venv).arg(&script);
    run(&mut direct).expect(0, &[&sum]);
    // As torchrun: the script is run by the same Python.
    let mut module = command(&in_venv);
    module.args(["-m", "mgpurun.run", "--nproc-per-node", "2", "--backend", "cpu"]).arg(&script);
    run(module.env_remove("PYTHON_EXEC")).expect(0, &[&sum]);
}
