//! Several jobs in one launch: worlds of their own, one supervision, and `--one-world`.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, command, finish, run, survivors, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const JOB: &str = env!("CARGO_BIN_EXE_t-job");
const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");

/// The launcher on the CPU, with these words behind it.
fn mgpurun(words: &[&str]) -> Command {
    let mut launcher = command("env");
    launcher.args(["--default-signal", env!("CARGO_BIN_EXE_t-mgpurun")]).args(words);
    launcher
}

/// A launcher whose processes can be found by the mark of `folder`, and which runs in it.
fn marked(folder: &Path, words: &[&str]) -> Command {
    let mut launcher = mgpurun(words);
    launcher.current_dir(folder).env("MGPU_TEST_MARK", folder);
    launcher
}

fn leftover_processes(folder: &Path) -> Vec<u32> {
    survivors(&format!("MGPU_TEST_MARK={}", folder.display()))
}

/// A running launcher. A test that fails leaves none behind.
struct Launched(Child);

impl Launched {
    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    fn finish(mut self) -> Finished {
        finish(&mut self.0)
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn started(launcher: &mut Command) -> Launched {
    Launched(launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

fn events(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    // The last line may not be complete.
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn jobs_train_the_weights_of_separate_launches() {
    let options =
        |seed| ["--synthetic", "--json", "--skip-test", "--steps", "4", "--threads", "1", "--seed", seed];
    let weights = |words: &[&str]| -> BTreeSet<String> {
        let finished = run(&mut mgpurun(&[&["--no-prefix"], words].concat()));
        assert_eq!(finished.code, Some(0), "{finished:#?}");
        let objects = finished.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        objects.filter_map(|object| Some(object["weights"].as_str()?.to_owned())).collect()
    };
    let (one, two) = (
        [&["-n", "2", TRAIN][..], &options("1")].concat(),
        [&["-n", "1", TRAIN][..], &options("2")].concat(),
    );
    let together = weights(&[&one[..], &[":"], &two].concat());
    assert_eq!(together.len(), 2);
    assert_eq!(together, &weights(&one) | &weights(&two));
}

#[test]
fn output_logs_and_events_name_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let words = [
        "--log-dir",
        "logs",
        "--tee",
        "--events",
        "events",
        "-n",
        "2",
        "sh",
        "-c",
        "echo $RANK/$WORLD_SIZE",
        ":",
        "sh",
        "-c",
        "echo alone $RANK; echo $MGPU_RUN_ID",
    ];
    let finished = run(&mut marked(folder.path(), &words));
    finished.expect(0, &["[0.0] 0/2\n", "[0.1] 1/2\n", "[1.0] alone 0\n"]);
    let log = |name: &str| fs::read_to_string(folder.path().join("logs").join(name)).unwrap();
    assert_eq!([log("job-0/rank-0.log"), log("job-0/rank-1.log")], ["0/2\n", "1/2\n"]);
    let run_id = log("job-1/rank-0.log").lines().nth(1).unwrap().to_owned();
    assert!(run_id.ends_with(".1"), "{run_id}");

    let events = events(&folder.path().join("events"));
    let of = |job: Value, event: &str| -> Vec<&Value> {
        events.iter().filter(|line| line["event"] == event && line["job"] == job).collect()
    };
    assert_eq!(
        (of(0.into(), "start")[0]["ranks"].as_u64(), of(1.into(), "start")[0]["ranks"].as_u64()),
        (Some(2), Some(1))
    );
    assert_eq!(of(1.into(), "start")[0]["run_id"], run_id.as_str());
    assert_eq!((of(0.into(), "exit").len(), of(1.into(), "exit").len()), (2, 1));
    let ends = [0.into(), 1.into(), Value::Null].map(|job| of(job, "end").len());
    assert_eq!(ends, [1, 1, 1]);
    assert_eq!(events.last().unwrap()["event"], "end");

    let quiet =
        run(&mut mgpurun(&["--rank-filter", "0", "-n", "2", "echo", "a", ":", "-n", "3", "echo", "b"]));
    let mut lines: Vec<&str> = quiet.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0.0] a", "[1.0] b"]);
}

#[test]
fn a_failure_ends_all_jobs_unless_only_one_should_fail() {
    let folder = tempfile::tempdir().unwrap();
    let fail = "until [ -e ready ]; do sleep 0.01; done; echo the reason; exit 3";
    let wait = "trap '' TERM; : > ready; until [ -e go ]; do sleep 0.01; done; : > done";
    let words = |policy| {
        [
            "--grace", "0.2", "--events", "events", "--fail", policy, "-n", "2", "sh", "-c", wait, ":", "sh",
            "-c", fail,
        ]
    };
    let finished = run(&mut marked(folder.path(), &words("all")));
    finished.expect(
        3,
        &[
            "mgpurun: job 1: rank 0 exited with code 3 after ",
            "mgpurun: the last lines of rank 0 of job 1:\n    the reason\n",
            "mgpurun: job 0: stopped, since job 1 has failed (--fail one ",
        ],
    );
    assert!(!folder.path().join("done").exists());
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
    let end = events(&folder.path().join("events")).pop().unwrap();
    assert_eq!(
        (&end["exit_code"], &end["culprit"], &end["culprit_job"], &end["job"]),
        (&3.into(), &0.into(), &1.into(), &Value::Null)
    );

    let child = started(&mut marked(folder.path(), &words("one")));
    let has_ended = |line: &Value| line["event"] == "end" && line["job"] == 1 && line["exit_code"] == 3;
    until(|| events(&folder.path().join("events")).iter().filter(|line| has_ended(line)).count() == 2);
    fs::write(folder.path().join("go"), "").unwrap();
    child.finish().expect(3, &["job 1: rank 0 exited with code 3"]);
    assert!(folder.path().join("done").exists());
}

/// Its program has disappeared before the restart.
#[test]
fn a_restart_that_cannot_start_fails_its_job_only() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("prog");
    fs::write(&program, "#!/bin/sh\nuntil [ -e ready ]; do sleep 0.01; done\nrm -f \"$0\"\nexit 7\n")
        .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let wait = "trap 'exit 9' TERM; : > ready; until [ -e go ]; do sleep 0.01; done; : > done";
    let restart = ["--fail", "one", "--events", "events", "--max-restarts", "1", "--restart-always"];
    let jobs = ["-n", "1", "sh", "-c", wait, ":", "./prog"];
    let child = started(&mut marked(folder.path(), &[&restart[..], &jobs].concat()));
    let has_ended = |line: &Value| line["event"] == "end" && line["job"] == 1 && line["exit_code"] == 1;
    let log = folder.path().join("events");
    until(|| log.exists() && events(&log).iter().any(has_ended));
    fs::write(folder.path().join("go"), "").unwrap();
    child.finish().expect(1, &["job 1: rank 0 exited with code 7", "job 1: cannot start rank 0"]);
    assert!(folder.path().join("done").exists());
}

#[test]
fn a_signal_ends_all_jobs_and_is_reported_once() {
    for (times, trap, code) in [(1, "exit 0", 130), (2, ": > got-$MGPU_RUN_ID", 130)] {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("trap '{trap}' INT; : > ready-$MGPU_RUN_ID; while :; do sleep 0.02; done");
        let words = ["--grace", "1000", "sh", "-c", &script, ":", "-n", "1", "sh", "-c", &script];
        let child = started(&mut marked(folder.path(), &words));
        let count = |prefix: &str| {
            let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
            names.filter(|name| name.to_string_lossy().starts_with(prefix)).count()
        };
        until(|| count("ready") == 2);
        child.signal(Signal::SIGINT);
        if times == 2 {
            until(|| count("got") == 2);
            child.signal(Signal::SIGINT);
        }
        let finished = child.finish();
        finished.expect(code, &["mgpurun: stopped by SIGINT\n"]);
        assert_eq!(finished.stderr.matches("stopped").count(), 1, "{finished:#?}");
        assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
    }
}

#[test]
fn only_the_failed_job_is_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let words = [
        "--max-restarts",
        "1",
        "-n",
        "2",
        "--inject",
        "rank=1,step=3,fault=exit:7",
        JOB,
        "4",
        ":",
        "-n",
        "2",
        JOB,
        "4",
    ];
    let finished = run(&mut marked(folder.path(), &words));
    finished.expect(
        0,
        &[
            "mgpurun: job 0: rank 1 exited with code 7",
            "mgpurun: job 0: restart 1 of 1 in 0.5 s",
            "[0.0] life 1\n",
        ],
    );
    assert!(!finished.stdout.contains("[1.0] life 1"), "{finished:#?}");
    assert!(finished.stderr.contains("job 0: a fault will be injected"), "{finished:#?}");
    // The last restart fails, too: then the other job ends.
    let wait = "while :; do sleep 0.02; done";
    let words = ["--max-restarts", "1", "sh", "-c", wait, ":", "sh", "-c", "exit 4"];
    run(&mut marked(folder.path(), &words))
        .expect(4, &["job 1: no restart is left", "job 0: stopped, since job 1"]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}

#[test]
fn processes_that_left_their_group_end_with_their_job() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = "setsid sh -c 'echo $$ > daemon; sleep 1000' & until [ -s daemon ]; do sleep 0.01; done";
    let wait = "until [ -e go ]; do sleep 0.01; done";
    let child = started(&mut marked(
        folder.path(),
        &["--events", "events", "sh", "-c", daemon, ":", "sh", "-c", wait],
    ));
    let has_ended = |line: &Value| line["event"] == "end" && line["job"] == 0;
    until(|| {
        folder.path().join("events").exists() && events(&folder.path().join("events")).iter().any(has_ended)
    });
    let daemon: i32 = fs::read_to_string(folder.path().join("daemon")).unwrap().trim().parse().unwrap();
    assert!(kill(Pid::from_raw(daemon), None).is_err(), "the daemon of job 0 runs beyond its end");
    fs::write(folder.path().join("go"), "").unwrap();
    child.finish().expect(0, &[]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}

#[test]
fn sigquit_and_ps_show_a_table_for_each_job() {
    let folder = tempfile::tempdir().unwrap();
    let script = ": > ready-$MGPU_RUN_ID; until [ -e go ]; do sleep 0.01; done";
    // The name of the folder marks the lines of this launch.
    let (mark, sh) = (folder.path().to_str().unwrap(), ["sh", "-c", script]);
    let words = [&["-n", "2"], &sh[..], &[mark, ":"], &sh[..], &[mark]].concat();
    let mut launcher = command("sh");
    launcher.args(["-c", r#"exec "$0" "$@" 2> messages"#, env!("CARGO_BIN_EXE_t-mgpurun")]).args(words);
    let child = started(launcher.current_dir(folder.path()));
    let ready = || {
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("ready-")).count()
    };
    until(|| ready() == 2);
    let shown = run(&mut mgpurun(&["ps"])).stdout;
    child.signal(Signal::SIGQUIT);
    let messages = || fs::read_to_string(folder.path().join("messages")).unwrap();
    until(|| messages().matches("mgpurun: rank  pid ").count() == 2);
    assert!(messages().contains("mgpurun: job 0: sh -c ") && messages().contains("mgpurun: job 1: sh -c "));
    fs::write(folder.path().join("go"), "").unwrap();
    child.finish().expect(0, &[]);
    let of_launch = |ranks: &str| {
        let is_its =
            |line: &&str| line.starts_with("launcher ") && line.contains(&format!("{mark} on {ranks} for "));
        shown.lines().filter(is_its).count()
    };
    assert_eq!((of_launch("2 ranks"), of_launch("1 rank")), (1, 1), "{shown}");
}

/// A copy of a program with other bytes at its end.
fn variant(program: &str, folder: &Path) -> PathBuf {
    let path = folder.join("variant");
    fs::copy(program, &path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"x").unwrap();
    path
}

#[test]
fn different_programs_form_one_world() {
    let folder = tempfile::tempdir().unwrap();
    let other = variant(JOB, folder.path());
    let other = other.to_str().unwrap();
    let finished = run(&mut mgpurun(&["--one-world", "-n", "2", JOB, "3", ":", "-n", "1", other, "3"]));
    finished.expect(0, &["[0] life 0\n", "[1] life 0\n", "[2] life 0\n"]);
    // Only ranks of one part have to run the same program.
    let script = format!("if [ $RANK = 1 ]; then exec {other}; else exec {JOB}; fi");
    let finished = run(&mut mgpurun(&["--one-world", "-n", "2", "sh", "-c", &script, ":", "-n", "1", other]));
    finished.expect(67, &["rank 0 runs ", "rank 1 runs "]);
    // As separate jobs each has a world of its own.
    let finished = run(&mut mgpurun(&["-n", "2", JOB, "3", ":", "-n", "1", other, "3"]));
    finished.expect(0, &["[0.1] life 0\n", "[1.0] life 0\n"]);
}

#[test]
fn a_dry_run_shows_what_was_understood() {
    let dry = |words: &[&str]| run(&mut mgpurun(&[&["--dry-run"], words].concat()));
    dry(&["-n", "2", "echo", "x", ":", "-n", "1", "--bind", "none", "true", "y"]).expect(
        0,
        &[
            "# job 0: 2 ranks of echo x\n",
            "# job 1: 1 rank of true y\n",
            "bin/echo x\n",
            "bin/true y\n",
            "# rank 0: not bound",
        ],
    );
    let finished = dry(&["echo", "a", ":", "no-such-program"]);
    assert!(finished.stdout.ends_with("/echo a : no-such-program\n"), "{finished:#?}");
    assert!(dry(&["--", "echo", "a", ":", "true"]).stdout.ends_with("/echo a : true\n"));
    assert!(dry(&["echo", "a", r"\:", "true"]).stdout.ends_with("/echo a : true\n"));
    dry(&["echo", ":", "-n", "2", "no-such-program"])
        .expect(0, &["# the `:` before `-n 2 no-such-program` is passed to the program as an argument"]);
    let finished = dry(&["--one-world", "-n", "1", "echo", ":", "-n", "2", "true"]);
    assert!(finished.stdout.contains("\nRANK=2 ") && !finished.stdout.contains("# job"), "{finished:#?}");
}

#[test]
fn wrong_jobs_are_usage_errors() {
    for (words, text) in [
        (&["true", ":", "--timeout", "5", "true"][..], "--timeout concerns the whole launch"),
        (&[":", "true"], "there is no program before the first `:`"),
        (&["true", ":", "--inject", "rank=1,step=1,fault=hang", "true"], "job 1: --inject rank=1"),
        (&["--one-world", "--backend", "cpu", "true", ":", "true"], "--one-world: --backend differs"),
        (&["--backend", "cpu", "--gpus", "0", "true"], "--gpus chooses GPUs, and --backend cpu uses none"),
        (&["--gpus", "x", "true"], "it should be all, free, or numbers"),
        (&["--fail", "none", "true"], "possible values: one, all"),
        (&["--min-ranks", "1", "true"], "says how a restart goes on, and there is none: add --max-restarts"),
        (&["--nproc-per-node", "1:2", "true"], "add --max-restarts"),
        (&["-n", "2", "true", ":", "--min-ranks", "3", "true"], "add --max-restarts"),
    ] {
        run(&mut mgpurun(words)).expect(2, &[text]);
    }
}

/// The launcher on a machine with four fake GPUs, whose locks are in `folder`.
fn with_gpus(folder: &Path, words: &[&str]) -> Command {
    let mut launcher = fake_gpu::command("env");
    launcher.args(["--default-signal", env!("CARGO_BIN_EXE_t-mgpurun")]).args(words).current_dir(folder);
    launcher
        .env("FAKE_GPU_COUNT", "4")
        .env("MGPU_LOCK_DIR", folder.join("locks"))
        .env("MGPU_TEST_MARK", folder);
    launcher
}

/// The UUID of a fake GPU.
fn uuid(gpu: u32) -> String {
    format!("GPU-46414b45-0000-0000-0000-{gpu:012x}")
}

/// `CUDA_VISIBLE_DEVICES` of each rank of a dry run.
fn visible(folder: &Path, words: &[&str]) -> Vec<String> {
    let finished = run(&mut with_gpus(folder, &[&["--dry-run"], words].concat()));
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    let lines = finished.stdout.lines().filter_map(|line| line.strip_prefix("CUDA_VISIBLE_DEVICES="));
    lines.map(|line| line.trim_end_matches(" \\").to_owned()).collect()
}

#[test]
fn jobs_train_on_disjoint_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let device = env!("CARGO_BIN_EXE_t-device");
    let words = ["-n", "2", device, "all", ":", "-n", "1", "--gpus", "0", device, "all"];
    run(&mut with_gpus(folder.path(), &words)).expect(0, &["[0.1] rank 1 of 2", "[1.0] rank 0 of 1"]);
    let pair = format!("{},{}", uuid(1), uuid(2));
    assert_eq!(visible(folder.path(), &words), [pair.clone(), pair, uuid(0)]);
    let too_many = ["-n", "3", "--backend", "nccl", "true", ":", "-n", "2", "--backend", "nccl", "true"];
    run(&mut with_gpus(folder.path(), &too_many))
        .expect(1, &["job 1: 2 ranks, and the other jobs of this launch leave 1 of 4 GPUs"]);
    // Without several jobs or a choice, nothing is narrowed.
    assert_eq!(visible(folder.path(), &["-n", "2", "--backend", "nccl", "true"]), [] as [&str; 0]);
}

#[test]
fn gpus_are_chosen_by_number_and_by_uuid() {
    let folder = tempfile::tempdir().unwrap();
    let pair = format!("{},{}", uuid(3), uuid(1));
    assert_eq!(visible(folder.path(), &["--gpus", "3,1", "true"]), [pair.clone(), pair]);
    assert_eq!(visible(folder.path(), &["--gpus", &uuid(2), "--isolate-gpus", "true"]), [uuid(2)]);
    let dry = |variable: &str, words: &[&str]| {
        run(with_gpus(folder.path(), &[&["--dry-run"], words].concat()).env("CUDA_VISIBLE_DEVICES", variable))
    };
    dry("2,3", &["--gpus", "1", "true"]).expect(0, &[&format!("CUDA_VISIBLE_DEVICES={} ", uuid(3))]);
    dry("2,3", &["--gpus", "2", "true"])
        .expect(1, &["--gpus 2: there is no such GPU among the visible ones, 0 to 1"]);
    dry("2,3", &["--gpus", "0,0", "true"]).expect(1, &["the GPU is named twice"]);
    dry("2,3", &["--gpus", "GPU-4", "true"]).expect(1, &["several GPUs have a UUID that begins so"]);
    dry("0,1", &["-n", "3", "--gpus", "0,1", "true"]).expect(1, &["3 ranks and 2 GPUs: choose -n 2"]);
}

#[test]
fn free_gpus_are_those_that_nobody_uses() {
    let folder = tempfile::tempdir().unwrap();
    let free = |ranks: &str, processes: &str, more: &[&str]| {
        let words = [&["--dry-run", "-n", ranks, "--gpus", "free"], more, &["true"]].concat();
        run(with_gpus(folder.path(), &words).env("FAKE_NVML_PROCESSES", processes))
    };
    free("2", "0:1,2:1", &[]).expect(0, &[&format!("CUDA_VISIBLE_DEVICES={},{} ", uuid(1), uuid(3))]);
    free("3", "0:1,2:4000000,2:4000001", &[]).expect(
        1,
        &[
            "3 ranks and 2 free GPUs of 4: GPU 0 is used by ",
            "(pid 1), GPU 2 is used by ? (pid 4000000) and 1 more; choose fewer ranks",
        ],
    );
    assert_eq!(free("auto", "3:1", &[]).stdout.matches("\nRANK=").count(), 3);
    let mut without = with_gpus(folder.path(), &["--gpus", "free", "true"]);
    run(without.env("FAKE_NVML_NO_DRIVER", "1"))
        .expect(1, &["--gpus free: neither the driver nor NVML lists a GPU"]);
}

#[test]
fn a_reserved_gpu_is_not_chosen_again() {
    let folder = tempfile::tempdir().unwrap();
    let wait = ": > ready; until [ -e go ]; do sleep 0.01; done";
    let child = started(&mut with_gpus(folder.path(), &["-n", "2", "--gpus", "free", "sh", "-c", wait]));
    until(|| folder.path().join("ready").exists());
    assert_eq!(visible(folder.path(), &["-n", "1", "--gpus", "free", "true"]), [uuid(2)]);
    let refused = |words: &[&str], text: &str| {
        let finished = run(&mut with_gpus(folder.path(), words));
        finished.expect(1, &[text, "reserved by launch ", " (sh -c : > ready; "]);
    };
    refused(&["--gpus", "1", "true"], "--gpus 1: the GPU is ");
    refused(&["-n", "3", "--gpus", "free", "true"], "3 ranks and 2 free GPUs of 4: GPU 0 is ");
    // A launch that has not chosen is not refused, and one that shares knowingly neither.
    run(&mut with_gpus(folder.path(), &["--gpus", "1", "--share-gpus", "true"]))
        .expect(0, &["GPU 1 is reserved by launch "]);
    run(&mut with_gpus(
        folder.path(),
        &["-n", "1", "--backend", "nccl", "true", ":", "-n", "1", "--backend", "nccl", "true"],
    ))
    .expect(0, &["job 1: GPU 1 is reserved by "]);
    fs::write(folder.path().join("go"), "").unwrap();
    child.finish().expect(0, &[]);
    run(&mut with_gpus(folder.path(), &["-n", "4", "--gpus", "free", "true"])).expect(0, &[]);
}

#[test]
fn a_job_goes_on_without_a_gpu_that_has_died_and_with_it_again() {
    let script = "echo life $MGPU_RESTART_COUNT rank $RANK of $WORLD_SIZE on $CUDA_VISIBLE_DEVICES; \
                  [ $RANK = $MGPU_RESTART_COUNT ] && [ -e life-$RANK ] && sh ./life-$RANK; :";
    let run_with = |first: &str, gpus: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("life-0"), format!("echo {first} > lost; kill $PPID")).unwrap();
        fs::write(folder.path().join("life-1"), "rm lost; kill $PPID").unwrap();
        let elastic = ["-n", "3", "--backend", "nccl", "--min-ranks", "2", "--max-restarts", "2"];
        let words = [&elastic[..], gpus, &["sh", "-c", script]].concat();
        run(with_gpus(folder.path(), &words).env("FAKE_NVML_LOST", folder.path().join("lost")))
    };
    let pair = format!("{},{}", uuid(0), uuid(2));
    let gone = format!("going on with 2 of 3 ranks: GPU {} is gone\n", uuid(1));
    for (gpus, whole) in
        [(&[][..], ""), (&["--gpus", "0,1,2"], &format!(" {},{},{}", uuid(0), uuid(1), uuid(2)))]
    {
        let finished = run_with("1", gpus);
        let first = format!("[2] life 0 rank 2 of 3 on{whole}\n");
        let second = format!("[1] life 1 rank 1 of 2 on {pair}\n");
        let third = format!("[2] life 2 rank 2 of 3 on{whole}\n");
        finished.expect(0, &[&first, &gone, &second, "going on with all 3 ranks again", &third]);
        assert!(!finished.stdout.contains("[2] life 1"), "{finished:#?}");
    }
    let text = "not restarted: 1 of 3 GPUs can be used, fewer than --min-ranks 2";
    run_with("0 2", &[]).expect(128 + 15, &["restart 1 of 2", text]);
}

#[test]
fn launches_at_the_same_moment_get_different_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let script = ": > got-$CUDA_VISIBLE_DEVICES; until [ -e go ]; do sleep 0.01; done";
    let launch =
        |_| started(&mut with_gpus(folder.path(), &["-n", "1", "--gpus", "free", "sh", "-c", script]));
    let children: Vec<Launched> = (0..4).map(launch).collect();
    until(|| (0..4).all(|gpu| folder.path().join(format!("got-{}", uuid(gpu))).exists()));
    run(&mut with_gpus(folder.path(), &["-n", "1", "--gpus", "free", "true"]))
        .expect(1, &["1 rank and 0 free GPUs of 4"]);
    fs::write(folder.path().join("go"), "").unwrap();
    for child in children {
        child.finish().expect(0, &[]);
    }
}

#[test]
fn a_killed_launcher_keeps_its_gpus_until_its_ranks_have_ended() {
    let folder = tempfile::tempdir().unwrap();
    let script = "if [ $RANK = 0 ]; then echo $PPID > launcher; : > ready; fi; sleep 1000";
    let child = started(&mut with_gpus(folder.path(), &["-n", "4", "--gpus", "free", "sh", "-c", script]));
    until(|| folder.path().join("ready").exists());
    let launcher: i32 = fs::read_to_string(folder.path().join("launcher")).unwrap().trim().parse().unwrap();
    kill(Pid::from_raw(launcher), Signal::SIGKILL).unwrap();
    child.finish().expect(137, &["the launcher was killed by SIGKILL"]);
    run(&mut with_gpus(folder.path(), &["-n", "4", "--gpus", "free", "true"])).expect(0, &[]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}
