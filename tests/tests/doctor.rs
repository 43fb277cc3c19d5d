//! `mgpurun doctor`: what it finds on this machine, and its tests of ranks, of copies between GPUs and of NCCL.
//!
//! GPUs are fake ones (`tests/gpu`): the tests cover what is reported, and no speed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, command, run};
use serde_json::Value;

#[test]
fn doctor_reports_this_machine_as_healthy() {
    let doctor = |arguments: &[&str]| run(command(env!("CARGO_BIN_EXE_t-mgpurun")).args(arguments));
    doctor(&["doctor"]).expect(0, &["Machine\n", "  ok       cores", "Backends: cpu can be used"]);
    // Whether it was found or not.
    doctor(&["doctor", "--all"]).expect(0, &["libnccl.so.2"]);
    doctor(&["doctor", "--help"]).expect(0, &["Usage: mgpurun doctor", "mgpurun -- doctor"]);
    doctor(&["doctor", "now"]).expect(2, &["unexpected argument 'now'"]);
    // After `--`, `doctor` is a program.
    doctor(&["--", "doctor"]).expect(1, &["no program `doctor`"]);
}

/// A folder with `mgpurun` and the programs that it runs for its tests, under the names that it expects.
struct Installed(tempfile::TempDir);

impl Installed {
    fn new(programs: &[&str]) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for (name, path) in [
            ("mgpurun", env!("CARGO_BIN_EXE_t-mgpurun")),
            ("allreduce_perf", env!("CARGO_BIN_EXE_t-allreduce_perf")),
            ("gpu_check", env!("CARGO_BIN_EXE_t-gpu_check")),
        ] {
            if name == "mgpurun" || programs.contains(&name) {
                fs::hard_link(path, folder.path().join(name)).unwrap();
            }
        }
        Installed(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn without_gpus(&self) -> Command {
        let mut command = command(self.path("mgpurun"));
        command.args(["doctor", "--test", "--timeout", "120"]);
        command
    }

    /// On this number of fake GPUs, with more time than usual: kernels on fake GPUs are slow, and so may the machine be.
    fn with_gpus(&self, gpus: u32) -> Command {
        self.within(120, gpus)
    }

    fn within(&self, seconds: u32, gpus: u32) -> Command {
        let mut command = fake_gpu::command(self.path("mgpurun"));
        command
            .args(["doctor", "--test", "--timeout", &seconds.to_string()])
            .env("FAKE_GPU_COUNT", gpus.to_string());
        command
    }
}

/// The report in one line: it breaks lines.
fn flat(finished: &Finished) -> String {
    finished.stdout.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[track_caller]
fn contains(finished: &Finished, parts: &[&str]) {
    let text = flat(finished);
    for part in parts {
        assert!(text.contains(part), "no `{part}` in {text}; {}", finished.stderr);
    }
}

#[test]
fn doctor_runs_two_ranks_on_this_machine() {
    let installed = Installed::new(&[]);
    let report = |code: i32| {
        let finished = run(&mut installed.without_gpus());
        finished.expect(code, &["Test on the CPU\n"]);
        assert!(!finished.stdout.contains("Test on GPUs"), "{finished:#?}");
        finished
    };
    let folder = installed.0.path().display().to_string();
    let missing = format!("failed two ranks no allreduce_perf in {folder}: install it beside");
    contains(&report(1), &[&missing]);
    let probe = installed.path("allreduce_perf");
    fs::hard_link(env!("CARGO_BIN_EXE_t-allreduce_perf"), &probe).unwrap();
    let lines = ["ok two ranks joined, shared memory, and summed correctly (", " 8 B ", " 8 MiB "];
    contains(&report(0), &lines);
    let finished = run(installed.without_gpus().arg("--json"));
    let parsed: Value = serde_json::from_str(&finished.stdout).unwrap();
    let first = &parsed["sections"][0];
    assert_eq!(
        (&first["title"], &first["items"][0]["name"]),
        (&"Test on the CPU".into(), &"two ranks".into())
    );
    // A program that fails, and says which limit it has reached.
    fs::remove_file(&probe).unwrap();
    fs::write(&probe, "#!/bin/sh\necho socket: Too many open files >&2; exit 3\n").unwrap();
    fs::set_permissions(&probe, fs::Permissions::from_mode(0o755)).unwrap();
    contains(&report(1), &["failed two ranks", "note open files the limit on open files ("]);
}

#[test]
fn copies_peer_access_and_nccl_are_tested_on_gpus() {
    let installed = Installed::new(&["allreduce_perf", "gpu_check"]);
    let finished = run(installed.with_gpus(3).env("FAKE_GPU_PEERS", "1"));
    finished.expect(0, &["Test on GPUs\n"]);
    contains(
        &finished,
        &[
            "ok GPU 0 ",
            "ok GPU 2 ",
            " GB/s from the host, ",
            "ok peer access all 3 pairs: ",
            "with atomics (NVLink)",
            "ok NCCL 2.28.9: all-reduce over 3 GPUs, sums verified, 8 B in ",
            "8 MiB at ",
            "ok transport P2P/CUMEM",
        ],
    );
    // Without peer access, and in the words of a program.
    let finished = run(installed.with_gpus(2).arg("--json").env("NCCL_SHM_DISABLE", "0"));
    let report: Value = serde_json::from_str(&finished.stdout).unwrap();
    let items = report["sections"][1]["items"].as_array().unwrap();
    let item = |name: &str| items.iter().find(|item| item["name"] == name).unwrap();
    let access = item("peer access");
    assert_eq!(access["mark"], "note", "{report:#}");
    let text = access["text"].as_str().unwrap();
    assert!(text.starts_with("GPUs 0-1: none, ") && text.contains("through host memory; "), "{text}");
    assert_eq!(item("transport")["text"], "SHM/direct; NCCL_SHM_DISABLE=0 is set: unset it");
    // One GPU tests NCCL, too.
    let finished = run(&mut installed.with_gpus(1));
    finished.expect(0, &[]);
    contains(&finished, &["NCCL 2.28.9: all-reduce over 1 GPU, sums verified"]);
    assert!(!finished.stdout.contains("transport"), "{finished:#?}");
}

#[test]
fn a_connection_that_damages_refuses_or_hangs_is_named() {
    let installed = Installed::new(&["allreduce_perf", "gpu_check"]);
    for (fault, part) in [
        ("corrupt@1-0", "failed peer access GPUs 0-1: copies deliver wrong bytes; "),
        ("refuse@0-1", "failed peer access GPUs 0-1: the driver promised it, but "),
        ("hang@0-1", "failed copies hung when copying from GPU 0 to GPU 1, and was killed; "),
    ] {
        // One that hangs is killed after 0.4 of the time.
        let mut doctor = installed.within(if fault.starts_with("hang") { 40 } else { 120 }, 2);
        let finished = run(doctor.env("FAKE_GPU_PEERS", "1").env("FAKE_GPU_PEER_FAULT", fault));
        finished.expect(1, &["Test on GPUs\n"]);
        contains(&finished, &["ok GPU 0 ", part]);
        assert_eq!(flat(&finished).contains("NCCL 2.28.9"), !fault.starts_with("hang"), "{finished:#?}");
    }
}

#[test]
fn a_failure_of_nccl_and_absent_gpus_are_named() {
    let installed = Installed::new(&["allreduce_perf", "gpu_check"]);
    let finished = run(installed.with_gpus(2).env("FAKE_NCCL_FAULT", "init_error@1"));
    finished.expect(1, &["Test on GPUs\n"]);
    contains(&finished, &["ok GPU 1 ", "failed NCCL the all-reduce failed (exit status: "]);
    let finished = run(&mut installed.with_gpus(0));
    finished.expect(0, &["Test on GPUs\n"]);
    contains(&finished, &["note GPUs none can be used: "]);
    let finished = run(installed.with_gpus(2).env("MGPU_NCCL_LIBRARY", "/nowhere/libnccl.so"));
    finished.expect(0, &[]);
    contains(&finished, &["note NCCL not tested, because it was not found"]);
}

/// A control group of this test, removed when it is dropped.
struct ControlGroup(PathBuf);

impl ControlGroup {
    /// With this limit; `None` where control groups may not be made.
    fn new(controller: &str, file: &str, value: &str) -> Option<Self> {
        let name = format!("mgpu-doctor-{}", std::process::id());
        let roots = [Path::new("/sys/fs/cgroup").join(controller), "/sys/fs/cgroup".into()];
        roots.iter().find_map(|root| {
            let path = root.join(&name);
            fs::create_dir(&path).ok()?;
            let group = ControlGroup(path);
            fs::write(group.0.join(file), value).ok().map(|()| group)
        })
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // Ended processes leave it a little later.
        for _ in 0..1000 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::park_timeout(std::time::Duration::from_millis(2));
        }
    }
}

#[test]
fn a_limit_of_the_control_group_is_named() {
    // Doctor, a guardian, a launcher and one rank.
    let Some(group) = ControlGroup::new("pids", "pids.max", "4") else {
        return println!("skipped: this environment forbids making a control group for processes");
    };
    let installed = Installed::new(&["allreduce_perf"]);
    let mut shell = command("sh");
    let script = "echo $$ >\"$0/cgroup.procs\" && exec \"$@\"";
    shell.args(["-c", script]).arg(&group.0).arg(installed.path("mgpurun")).args(["doctor", "--test"]);
    let finished = run(&mut shell);
    finished.expect(1, &["Test on the CPU\n"]);
    contains(
        &finished,
        &["failed two ranks", "note pids.max the control group's limit on processes (4) refused "],
    );
}
