//! `mgpurun sweep`: tables of several launches, failing cells, interruption and continuation.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use mgpu_tests::process::{
    Finished, command, finish, mounting_is_forbidden, on_a_small_disk, run, survivors, until,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const MGPURUN: &str = env!("CARGO_BIN_EXE_t-mgpurun");

/// A sweep with default signal dispositions, whatever the test itself inherited. Numbers of ranks do not depend on the
/// cores of the machine.
fn sweep(options: &[&str]) -> Command {
    let mut command = command("env");
    command.args(["--default-signal", MGPURUN, "sweep", "--backend", "cpu", "--oversubscribe"]).args(options);
    command
}

/// A sweep over a shell script.
fn shell(options: &[&str], script: &str) -> Command {
    let mut command = sweep(options);
    command.args(["--", "sh", "-c", script, "sh"]);
    command
}

/// The JSON lines of a text that have this event.
fn of(text: &str, event: &str) -> Vec<Value> {
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["event"] == event).collect()
}

/// The lines of the table below its caption, split at spaces.
fn table(finished: &Finished) -> Vec<Vec<&str>> {
    let lines = finished.stdout.lines().skip_while(|line| !line.is_empty()).skip(1);
    lines.take_while(|line| !line.is_empty()).map(|line| line.split_whitespace().collect()).collect()
}

#[test]
fn a_training_is_compared_over_ranks_and_options() {
    let folder = tempfile::tempdir().unwrap();
    let (out, svg) = (folder.path().join("the sweep.jsonl"), folder.path().join("a plot.svg"));
    let mut command = sweep(&["-n", "1,2", "--strong", "--vary=--seed=1,2"]);
    command.arg("--out").arg(&out).arg("--svg").arg(&svg).args(["--", env!("CARGO_BIN_EXE_t-train_mnist")]);
    command.args(["--synthetic", "--steps", "4", "--batch", "8", "--json"]).env("MGPU_THREADS", "1");
    let finished = run(&mut command);
    finished
        .expect(0, &["strong scaling: --batch is divided by the number of ranks", "4/4: -n 2 --seed=2: "]);
    let table = table(&finished);
    let head = "--seed ranks train s images/s train % test s test % communication MiB a rank";
    assert_eq!(table[0].join(" "), head);
    let cells: Vec<_> = table[1..].iter().map(|row| [row[0], row[1].trim_end_matches('*')]).collect();
    assert_eq!(cells, [["1", "1"], ["1", "2"], ["2", "1"], ["2", "2"]]);
    for row in &table[1..] {
        assert_eq!(row.contains(&"100%"), row[1] == "1", "{row:?}");
    }
    let runs = of(&fs::read_to_string(&out).unwrap(), "run");
    assert_eq!(runs.len(), 4);
    for run in &runs {
        let (ranks, result) = (run["ranks"].as_u64().unwrap(), &run["result"]);
        assert_eq!((&result["ranks"], &result["batch"]), (&ranks.into(), &(8 / ranks).into()));
        assert_eq!(result["seed"].to_string(), run["vary"]["--seed"].as_str().unwrap());
        let memory = run["peak_rss_mib"].as_array().unwrap();
        assert!(memory.len() as u64 == ranks && memory.iter().all(|mib| mib.as_u64().unwrap() > 1), "{run}");
    }
    let plot = fs::read_to_string(&svg).unwrap();
    assert_eq!(plot.matches("<polyline").count(), 2);
    assert!(plot.contains(">--seed=2<") && plot.contains(">ideal<"), "{plot}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
}

#[test]
fn any_program_is_compared_by_keys_or_wall_time() {
    let script = r#"echo "{\"a_s\": [9, $((8 / WORLD_SIZE))], \"in\": {\"loss\": $1}}"; echo done"#;
    let options = ["-n", "2,1", "--keys", "a_s,in.loss", "--json", "--repeat", "2"];
    let mut command = shell(&options, script);
    let finished = run(command.arg("7"));
    finished.expect(0, &[]);
    let rows = of(&finished.stdout, "row");
    assert_eq!(rows.len(), 2);
    for (row, ranks) in rows.iter().zip([1.0, 2.0]) {
        assert_eq!(row["ranks"], ranks as u64);
        assert_eq!(row["figures"]["a_s"]["median"], 8.0 / ranks);
        assert_eq!(row["figures"]["a_s"]["percent"], 100.0 * ranks);
        assert_eq!(row["figures"]["in.loss"]["median"], 7.0);
    }
    assert_eq!(of(&finished.stdout, "sweep").len(), 1);
    // In rounds, so that a machine that becomes slower affects all cells alike.
    let runs = of(&finished.stdout, "run");
    let order: Vec<_> = runs.iter().map(|run| [&run["repeat"], &run["ranks"]].map(Value::as_u64)).collect();
    assert_eq!(order, [[1, 1], [1, 2], [2, 1], [2, 2]].map(|run| run.map(Some)));
    let finished = run(&mut shell(&["-n", "1,3"], "echo no result"));
    finished.expect(0, &[]);
    assert_eq!(table(&finished)[0], ["ranks", "wall", "s", "%", "MiB", "a", "rank"]);
}

#[test]
fn a_failing_cell_is_a_cell() {
    let script = "[ $WORLD_SIZE = 2 ] || exit 0; echo the reason >&2; exit 7";
    let finished = run(&mut shell(&["-n", "1,2,3"], script));
    finished.expect(1, &["2/3: -n 2: failed (7): rank ", "-n 2 failed: rank "]);
    assert!(finished.stdout.contains(": the reason\n"), "{finished:#?}");
    let table = table(&finished);
    assert_eq!(table.len(), 4);
    assert_eq!(table[2][1..], ["failed", "(7)", "-", "-"]);
    assert!(table[1].contains(&"100%"), "{table:?}");
    // A rank killed by a signal.
    let finished = run(&mut shell(&["-n", "1", "--json"], "kill -SEGV $$"));
    finished.expect(1, &[]);
    assert_eq!(of(&finished.stdout, "run")[0]["exit_code"], 139);
    assert!(of(&finished.stdout, "row")[0]["error"].as_str().unwrap().contains("SIGSEGV"));
}

/// A program that waits for the file `go`, unless there is one rank. Each rank notes its start.
const WAITS: &str =
    "echo $WORLD_SIZE >> started; [ $WORLD_SIZE = 1 ] || while [ ! -e go ]; do sleep 0.02; done";

/// Starts a sweep over [`WAITS`], and waits for its run on two ranks.
fn start(folder: &Path, options: &[&str]) -> Child {
    let mut command = shell(options, WAITS);
    command.current_dir(folder).env("MGPU_TEST_MARK", folder);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| fs::read_to_string(folder.join("started")).is_ok_and(|text| text.contains('2')));
    child
}

fn leftovers(folder: &Path) -> Vec<u32> {
    survivors(&format!("MGPU_TEST_MARK={}", folder.display()))
}

#[test]
fn an_interrupted_sweep_shows_what_it_has_and_can_be_continued() {
    let folder = tempfile::tempdir().unwrap();
    let options = ["-n", "1,2", "--out", "r.jsonl"];
    let mut child = start(folder.path(), &options);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let finished = finish(&mut child);
    finished
        .expect(130, &["interrupted after 1 of 2 runs; repeat the same command with --resume to continue"]);
    assert_eq!(table(&finished).len(), 2, "{finished:#?}");
    assert!(leftovers(folder.path()).is_empty());
    let again = |options: &[&str]| run(shell(options, WAITS).current_dir(folder.path()));
    again(&options).expect(1, &["--out r.jsonl has results already; continue with --resume"]);
    let resume = [&options[..], &["--resume"]].concat();
    fs::write(folder.path().join("go"), "").unwrap();
    let finished = again(&resume);
    finished.expect(0, &["2/2: -n 2: wall"]);
    assert_eq!(table(&finished).len(), 3, "{finished:#?}");
    // More of the same can be added; nothing is run twice.
    let more = ["-n", "1,2,3", "--out", "r.jsonl", "--resume"];
    again(&more).expect(0, &["3/3: -n 3: wall"]);
    let mut started: Vec<_> =
        fs::read_to_string(folder.path().join("started")).unwrap().lines().map(str::to_owned).collect();
    started.dedup();
    assert_eq!(started, ["1", "2", "3"]);
    assert_eq!(of(&fs::read_to_string(folder.path().join("r.jsonl")).unwrap(), "run").len(), 3);
    // Something else cannot.
    again(&resume).expect(1, &["the results have repeat 1 of -n 3, which this sweep has not"]);
    let other = run(shell(&more, "other").current_dir(folder.path()));
    other.expect(
        1,
        &["cannot continue r.jsonl: it is of another sweep by its command: `sh -c 'echo $WORLD_SIZE"],
    );
    let weak = [&more[..], &["--weak"]].concat();
    again(&weak)
        .expect(1, &["by its scaling: the same command line on any number of ranks, not weak scaling"]);
}

#[test]
fn failed_runs_are_repeated_by_a_continued_sweep() {
    let folder = tempfile::tempdir().unwrap();
    let script = "[ $WORLD_SIZE = 1 ] || [ -e go ] || exit 3";
    let once = |options: &[&str]| {
        run(shell(&[&["-n", "1,2", "--out", "r.jsonl"], options].concat(), script).current_dir(folder.path()))
    };
    once(&[]).expect(1, &["-n 2 failed: rank"]);
    fs::write(folder.path().join("go"), "").unwrap();
    let finished = once(&["--resume"]);
    finished.expect(0, &["2/2: -n 2: wall"]);
    assert!(!finished.stdout.contains("failed") && !finished.stderr.contains("1/2"), "{finished:#?}");
    assert_eq!(of(&once(&["--resume", "--json"]).stdout, "run").len(), 2);
}

#[test]
fn nothing_survives_a_killed_sweep() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(folder.path(), &["-n", "1,2", "--out", "r.jsonl"]);
    child.kill().unwrap();
    finish(&mut child);
    until(|| leftovers(folder.path()).is_empty());
    let runs = of(&fs::read_to_string(folder.path().join("r.jsonl")).unwrap(), "run");
    assert_eq!(runs.len(), 1);
}

#[test]
fn what_cannot_be_run_is_refused_before_the_first_run() {
    let refuse = |options: &[&str], program: &[&str], code: i32, text: &str| {
        let finished = run(command(MGPURUN).arg("sweep").args(options).arg("--").args(program));
        finished.expect(code, &[text]);
        assert!(!finished.stderr.contains("1/"), "{finished:#?}");
    };
    let cores = std::thread::available_parallelism().unwrap().get();
    let most = (cores + 1).to_string();
    let cpu = ["--backend", "cpu", "-n", most.as_str()];
    refuse(&cpu, &["true"], 2, &format!("mgpurun sweep: {most} ranks are more than the {cores} core"));
    refuse(&["-n", "0"], &["true"], 2, "numbers from 1, such as 1,2,4, or auto");
    refuse(&["-n", "1,1"], &["true"], 2, "1 is there twice");
    refuse(&["--strong"], &["true"], 2, "the command line of the program has no --batch");
    refuse(&["--strong=-b"], &["true", "-b", "x"], 2, "`x` is not a whole number");
    refuse(&["--strong", "--weak"], &["true"], 2, "cannot be used with");
    refuse(&["--vary=a=1"], &["true"], 2, "`a` is no option of a program");
    refuse(&["--vary=--a=1", "--vary=--a=2"], &["true"], 2, "--vary=--a is there twice");
    refuse(&["--resume"], &["true"], 2, "--out <FILE.jsonl>");
    refuse(&["-n", "1"], &["no-such-program"], 1, "no program `no-such-program`: looked in PATH");
    refuse(&["-n", "1", "--launch-option=--bnd=core"], &["true"], 2, "unexpected argument '--bnd'");
    refuse(&["-n", "1", "--launch-option=--raw"], &["true"], 2, "cannot be used with");
    refuse(
        &["-n", "1", "--out", "/nonexistent/r.jsonl"],
        &["true"],
        1,
        "cannot open --out /nonexistent/r.jsonl",
    );
    refuse(
        &["-n", "1", "--out", "/dev/full"],
        &["true"],
        1,
        "cannot write to --out /dev/full: No space left",
    );
}

#[test]
fn results_are_shown_when_the_disk_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = on_a_small_disk(folder.path(), "16k", "head -c 12288 /dev/zero > filler", MGPURUN);
    let script =
        "echo \"{\\\"a_s\\\": $WORLD_SIZE, \\\"long\\\": \\\"$(head -c 5000 /dev/zero | tr '\\0' x)\\\"}\"";
    let options = ["--backend", "cpu", "--oversubscribe", "-n", "1,2", "--keys", "a_s"];
    command.arg("sweep").args(options).args(["--out", "r.jsonl", "--svg", "p.svg", "--", "sh", "-c", script]);
    let finished = run(&mut command);
    if mounting_is_forbidden(&finished) {
        return;
    }
    finished.expect(
        1,
        &["cannot write to --out r.jsonl: No space left", "cannot write --svg p.svg: No space left"],
    );
    assert_eq!(table(&finished)[2][..3], ["2", "2", "50%"], "{finished:#?}");
    assert!(!finished.stdout.contains("partial"), "{finished:#?}");
}

#[test]
fn a_dry_run_prints_command_lines_that_can_be_run() {
    let finished = run(shell(&["-n", "1,2", "--strong=-b", "--dry-run", "--launch-option=--grace=1"], "a b")
        .args(["-b", "4"]));
    finished.expect(0, &[]);
    let expected =
        |ranks, batch| format!("mgpurun -n {ranks} --grace=1 --backend cpu -- sh -c 'a b' sh -b {batch}\n");
    assert_eq!(finished.stdout, expected(1, 4) + &expected(2, 2));
}

#[test]
fn a_reader_that_exits_ends_the_sweep() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = sweep(&[
        "-n",
        "1,2,3,4",
        "--json",
        "--",
        "sh",
        "-c",
        "echo >> started; while [ ! -e go ]; do sleep 0.02; done",
    ])
    .current_dir(folder.path())
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let started = || fs::read_to_string(folder.path().join("started")).map_or(0, |text| text.lines().count());
    until(|| started() > 0);
    drop(child.stdout.take());
    fs::write(folder.path().join("go"), "").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(141));
    assert_eq!(started(), 1);
}

#[test]
fn a_program_named_sweep_can_be_started() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/bin/true", folder.path().join("sweep")).unwrap();
    run(command(MGPURUN).args(["--", "sweep"]).env("PATH", folder.path())).expect(0, &[]);
}
