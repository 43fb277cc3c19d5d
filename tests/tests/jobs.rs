//! Several jobs in one launch: worlds of their own, one supervision, and `--one-world`.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use mgpu_tests::process::{command, finish, run, survivors, until};
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

fn started(launcher: &mut Command) -> Child {
    launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn events(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
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

    let mut child = started(&mut marked(folder.path(), &words("one")));
    let has_ended = |line: &Value| line["event"] == "end" && line["job"] == 1 && line["exit_code"] == 3;
    until(|| {
        events(&folder.path().join("events")).iter().skip(1).filter(|line| has_ended(line)).count() == 2
    });
    fs::write(folder.path().join("go"), "").unwrap();
    finish(&mut child).expect(3, &["job 1: rank 0 exited with code 3"]);
    assert!(folder.path().join("done").exists());
}

#[test]
fn a_signal_ends_all_jobs_and_is_reported_once() {
    for (times, trap, code) in [(1, "exit 0", 130), (2, ": > got-$MGPU_RUN_ID", 130)] {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("trap '{trap}' INT; : > ready-$MGPU_RUN_ID; while :; do sleep 0.02; done");
        let words = ["--grace", "1000", "sh", "-c", &script, ":", "-n", "1", "sh", "-c", &script];
        let mut child = started(&mut marked(folder.path(), &words));
        let count = |prefix: &str| {
            let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
            names.filter(|name| name.to_string_lossy().starts_with(prefix)).count()
        };
        until(|| count("ready") == 2);
        kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
        if times == 2 {
            until(|| count("got") == 2);
            kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
        }
        let finished = finish(&mut child);
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
    let mut child = started(&mut marked(
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
    finish(&mut child).expect(0, &[]);
    assert_eq!(leftover_processes(folder.path()), [] as [u32; 0]);
}

#[test]
fn sigquit_and_ps_show_a_table_for_each_job() {
    let folder = tempfile::tempdir().unwrap();
    let script = ": > ready-$MGPU_RUN_ID; until [ -e go ]; do sleep 0.01; done";
    let mut child = started(&mut marked(
        folder.path(),
        &["-n", "2", "sh", "-c", script, ":", "sh", "-c", script, "other"],
    ));
    until(|| fs::read_dir(folder.path()).unwrap().count() == 2);
    let shown = run(&mut mgpurun(&["ps"])).stdout;
    let launcher_lines = |text: &str| {
        shown.lines().filter(|line| line.contains(text) && line.starts_with("launcher ")).count()
    };
    assert!(launcher_lines(" on 2 ranks") >= 1 && launcher_lines(" other on 1 rank ") == 1, "{shown}");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGQUIT).unwrap();
    fs::write(folder.path().join("go"), "").unwrap();
    let finished = finish(&mut child);
    finished.expect(0, &["mgpurun: job 0: sh -c ", "mgpurun: job 1: sh -c "]);
    assert_eq!(finished.stderr.matches("mgpurun: rank  pid ").count(), 2, "{finished:#?}");
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
        (&["true", ":", "-n", "0", "true"], ""),
        (&["true", ":", "--inject", "rank=1,step=1,fault=hang", "true"], "job 1: --inject rank=1"),
        (&["--one-world", "--backend", "cpu", "true", ":", "true"], "--one-world: --backend differs"),
        (&["--backend", "cpu", "--gpus", "0", "true"], "--gpus chooses GPUs, and --backend cpu uses none"),
        (&["--gpus", "x", "true"], "it should be all, free, or numbers"),
        (&["--fail", "none", "true"], "possible values: one, all"),
    ] {
        let finished = run(&mut mgpurun(words));
        let code = if text.is_empty() { 0 } else { 2 };
        finished.expect(code, &[text]);
    }
}
