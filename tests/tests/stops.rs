//! Trainings that are asked to stop: all ranks stop after the same step, save it and exit with code 74, and the resumed run
//! has the bits of an uninterrupted one. `engines` are ranks that other launchers start, `nodes` jobs on several hosts,
//! `library` is the agreement itself.

#[path = "stops/engines.rs"]
mod engines;
#[path = "stops/library.rs"]
mod library;
#[path = "stops/nodes.rs"]
mod nodes;

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use mgpu_tests::process::{Finished, command, finish, run, until};
use mgpu_tests::{fake_gpu, mnist, page};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_t-mgpurun");
const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");

/// A training that is stopped and resumed.
struct Training {
    folder: tempfile::TempDir,
    arguments: Vec<String>,
}

impl Training {
    /// On 64 training images, with these test images. `arguments` must contain the number of steps or epochs.
    fn new(test: u32, arguments: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        fs::create_dir(&data).unwrap();
        mnist::write_sets(&data, 64, test);
        let own = format!("--json --threads 1 --data {} {arguments}", data.display());
        Training { folder, arguments: own.split_whitespace().map(str::to_owned).collect() }
    }

    fn checkpoints(&self) -> PathBuf {
        self.folder.path().join("checkpoints")
    }

    /// Adds the training to the command of its launcher; it saves and resumes.
    fn saved(&self, mut launcher: Command) -> Command {
        launcher.arg(TRAIN).args(&self.arguments).arg("--checkpoint-dir").arg(self.checkpoints());
        launcher.arg("--resume");
        launcher
    }

    /// The weights of the uninterrupted run.
    fn weights(&self, mut launcher: Command) -> String {
        run(launcher.arg(TRAIN).args(&self.arguments)).weights()
    }
}

/// `mgpurun` with these options, which does not inherit that this process ignores signals.
fn mgpurun(options: &str) -> Command {
    let mut launcher = command("env");
    launcher.args(["--default-signal", LAUNCHER, "--backend", "cpu", "--no-prefix"]);
    launcher.args(options.split_whitespace());
    launcher
}

fn start(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The launcher of a started `mgpurun`: the child of its guardian.
fn launcher_of(guardian: &Child) -> u32 {
    let path = format!("/proc/{0}/task/{0}/children", guardian.id());
    let child = || fs::read_to_string(&path).ok()?.split_whitespace().next()?.parse().ok();
    until(|| child().is_some());
    child().unwrap()
}

fn send(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

/// The step after which a run was stopped, according to its output.
#[track_caller]
fn stopped_after(finished: &Finished) -> u64 {
    let line = finished.stdout.lines().find_map(|line| line.strip_prefix("stopped on request after step "));
    let line = line.unwrap_or_else(|| panic!("not stopped: {finished:#?}"));
    line.split(' ').next().unwrap().parse().unwrap()
}

/// Asserts that a run continued where one was stopped.
#[track_caller]
fn expect_resumed(finished: &Finished, step: u64) {
    finished.expect(0, &["resumed from", &format!("step-{step:08} after step {step}\n")]);
}

/// Starts the training, stops it after about `step` steps, and returns its results.
fn stop_after(training: &Training, options: &str, step: u64, signal: Signal) -> Finished {
    let mut child = start(training.saved(mgpurun(options)));
    page::wait(launcher_of(&child), page::has_made(step));
    send(&child, signal);
    finish(&mut child)
}

/// Numbers that differ from run to run.
fn random(below: u64) -> u64 {
    let mut bytes = [0; 8];
    std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").unwrap(), &mut bytes).unwrap();
    u64::from_le_bytes(bytes) % below
}

#[test]
fn ranks_stop_at_the_same_step_and_resume_with_the_same_bits() {
    for (ranks, steps, options) in [
        (1, 1500, ""),
        (2, 1500, ""),
        (3, 500, "--global-batch 9"),
        (4, 400, ""),
        (2, 400, "--overlap"),
        (4, 300, "--placement layers:2"),
    ] {
        let batch = if options.contains("batch") { "" } else { "--batch 4" };
        let training = Training::new(16, &format!("--steps {steps} {batch} {options}"));
        let options = format!("-n {ranks}");
        let whole = training.weights(mgpurun(&options));
        let mut last = 0;
        for (signal, code) in [(Signal::SIGTERM, 74), (Signal::SIGUSR1, 74), (Signal::SIGINT, 130)] {
            let stopped = stop_after(&training, &options, last + 1 + random(steps / 8), signal);
            let text = format!("mgpurun: stopped on request ({signal})\n");
            stopped.expect(code, &["mgpurun: stopping (", "saved to", &text]);
            let step = stopped_after(&stopped);
            assert!(step > last && step < steps, "{stopped:#?}");
            last = step;
        }
        let resumed = run(&mut training.saved(mgpurun(&options)));
        expect_resumed(&resumed, last);
        assert_eq!(resumed.weights(), whole, "{ranks} ranks {:?}", training.arguments);
    }
}

#[test]
fn gpus_stop_between_two_launches() {
    for (ranks, options) in [(1, ""), (2, ""), (2, "--placement layers --cut 7")] {
        let training = Training::new(16, &format!("--steps 80 --batch 2 --kernels builtin {options}"));
        let launched = || {
            let mut launcher = fake_gpu::launched(LAUNCHER, ranks);
            launcher.arg("--no-prefix");
            launcher
        };
        let whole = training.weights(launched());
        let mut child = start(training.saved(launched()));
        page::wait(launcher_of(&child), page::has_made(1 + random(20)));
        send(&child, Signal::SIGTERM);
        let stopped = finish(&mut child);
        stopped.expect(74, &["saved to"]);
        let resumed = run(&mut training.saved(launched()));
        expect_resumed(&resumed, stopped_after(&stopped));
        assert_eq!(resumed.weights(), whole, "{ranks} ranks {options}");
    }
}

#[test]
fn an_evaluation_is_cut_short_and_repeated() {
    // Of two epochs; the ranks of a pipeline have one replica, and so half the images in a step.
    for (options, steps) in [("", 8), ("--placement layers", 16)] {
        let training = Training::new(4_000, &format!("--epochs 2 --batch 4 {options}"));
        let text = format!("stopped on request after step {steps} of {}; saved to", 2 * steps);
        let metrics = training.folder.path().join("metrics");
        let with_metrics = |launcher| {
            let mut command = training.saved(launcher);
            command.arg("--metrics").arg(&metrics);
            command
        };
        let whole = run(mgpurun("-n 2").arg(TRAIN).args(&training.arguments));
        let mut child = start(with_metrics(mgpurun("-n 2")));
        page::wait(launcher_of(&child), page::evaluates(1));
        send(&child, Signal::SIGTERM);
        let stopped = finish(&mut child);
        stopped.expect(74, &[&text]);
        assert_eq!(fs::read_to_string(&metrics).unwrap(), "");
        // Again in the same evaluation: what is saved is still there.
        let mut child = start(with_metrics(mgpurun("-n 2")));
        page::wait(launcher_of(&child), page::evaluates(0));
        send(&child, Signal::SIGTERM);
        finish(&mut child).expect(74, &[&text]);
        let resumed = run(&mut with_metrics(mgpurun("-n 2")));
        expect_resumed(&resumed, steps);
        assert_eq!(resumed.weights(), whole.weights());
        assert_eq!(resumed.json()["test_loss"], whole.json()["test_loss"]);
        let epochs = fs::read_to_string(&metrics).unwrap();
        let epochs: Vec<serde_json::Value> =
            epochs.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(epochs.len(), 2, "{epochs:#?}");
        for (epoch, number) in epochs.iter().zip(1..) {
            assert_eq!(epoch["epoch"], number);
            assert!(epoch["test_loss"].is_number() && epoch["train_loss"].as_f64() > Some(0.0), "{epoch:#}");
        }
    }
}

#[test]
fn a_stop_without_a_folder_says_that_nothing_is_saved() {
    let training = Training::new(16, "--steps 100000 --batch 4 --skip-test");
    let mut launcher = mgpurun("-n 2 --max-restarts 5 --restart-always");
    let mut child = start({
        launcher.arg(TRAIN).args(&training.arguments);
        launcher
    });
    page::wait(launcher_of(&child), page::has_made(3));
    send(&child, Signal::SIGTERM);
    let stopped = finish(&mut child);
    stopped.expect(74, &["nothing was saved, for lack of --checkpoint-dir"]);
    assert!(!stopped.stderr.contains("restart"), "{stopped:#?}");
}

#[test]
fn a_time_limit_and_a_command_stop_a_job() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    let stopped = run(&mut training.saved(mgpurun("-n 2 --stop-after 3")));
    stopped.expect(74, &["stopping (--stop-after)", "stopped on request (--stop-after)"]);
    let step = stopped_after(&stopped);

    let mut child = start(training.saved(mgpurun("-n 2")));
    let launcher = launcher_of(&child);
    page::wait(launcher, page::has_made(step + 1));
    let stop = |words: &[&str]| run(command(LAUNCHER).arg("stop").args(words));
    stop(&["1"]).expect(1, &["process 1 belongs to none of this user's runs"]);
    let rank = page::of_process(launcher).unwrap().process(1).unwrap();
    stop(&[&rank.to_string(), "--wait"]).expect(0, &[&format!("asked to stop: launcher {launcher}: ")]);
    finish(&mut child).expect(74, &["stopping (SIGUSR1)", "saved to"]);

    // A program that would only be killed.
    let mut child = start({
        let mut launcher = mgpurun("-n 1");
        launcher.args(["sh", "-c", "echo started; read forever </dev/zero"]);
        launcher
    });
    let guardian = child.id().to_string();
    until(|| page::of_process(launcher_of(&child)).is_some());
    stop(&[&guardian])
        .expect(1, &["not all of its ranks can stop by themselves", &format!("kill {guardian} ends it")]);
    assert!(child.try_wait().unwrap().is_none());
    send(&child, Signal::SIGTERM);
    finish(&mut child).expect(143, &["stopped by SIGTERM"]);
}

#[test]
fn a_program_that_never_asks_gets_the_signal() {
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGUSR1, 128 + 10)] {
        let mut launcher = mgpurun("-n 2");
        launcher.args(["sleep", "1000"]);
        let mut child = start(launcher);
        page::wait(launcher_of(&child), |page| page.process(1).is_some());
        send(&child, signal);
        let ended = finish(&mut child);
        ended.expect(code, &[]);
        assert!(!ended.stderr.contains("stopping"), "{ended:#?}");
    }
}

#[test]
fn a_suspended_rank_is_continued_to_stop() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    let mut child = start(training.saved(mgpurun("-n 2")));
    let launcher = launcher_of(&child);
    page::wait(launcher, page::has_made(5));
    let rank = page::of_process(launcher).unwrap().process(1).unwrap();
    kill(Pid::from_raw(rank as i32), Signal::SIGSTOP).unwrap();
    // Rank 0 waits for it.
    page::wait(launcher, |page| {
        page.progress(0).operation.is_some_and(|last| last.running && last.waits_for == Some(1))
    });
    send(&child, Signal::SIGTERM);
    finish(&mut child).expect(74, &["saved to"]);
}

#[test]
fn ranks_that_do_not_stop_are_killed_at_the_deadline_or_by_a_second_signal() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    let hangs = "--inject rank=0,phase=checkpoint,fault=hang";
    let mut child = start(training.saved(mgpurun(&format!("-n 2 --stop-grace 0.7 {hangs}"))));
    page::wait(launcher_of(&child), page::has_made(5));
    send(&child, Signal::SIGTERM);
    let text = "did not stop within 0.7 s: killed; --stop-grace allows more time";
    finish(&mut child).expect(143, &[text, "stopped by SIGTERM"]);

    let mut child = start(training.saved(mgpurun(&format!("-n 2 {hangs}"))));
    let launcher = launcher_of(&child);
    page::wait(launcher, page::has_made(5));
    send(&child, Signal::SIGINT);
    page::wait(launcher, |page| page.progress(0).phase == mgpu::Phase::Checkpoint);
    send(&child, Signal::SIGINT);
    finish(&mut child).expect(130, &["stopped by SIGINT"]);
}

#[test]
fn a_failure_on_the_way_is_one_and_is_not_restarted() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    let options = "-n 2 --max-restarts 3 --inject rank=1,phase=checkpoint,fault=exit:9";
    let mut child = start(training.saved(mgpurun(options)));
    page::wait(launcher_of(&child), page::has_made(5));
    send(&child, Signal::SIGTERM);
    let failed = finish(&mut child);
    failed.expect(9, &["rank 1 exited with code 9"]);
    assert!(!failed.stderr.contains("restart 1"), "{failed:#?}");
}

#[test]
fn a_filter_of_the_output_may_finish() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    let log = training.folder.path().join("log");
    let script = r#"exec > >(sed -u 's/^/filtered: /; $a end' >"$0"); exec "$@""#;
    let mut launcher = mgpurun("-n 1 bash -c");
    launcher.arg(script).arg(&log);
    let mut child = start(training.saved(launcher));
    page::wait(launcher_of(&child), page::has_made(5));
    send(&child, Signal::SIGTERM);
    finish(&mut child).expect(74, &[]);
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("filtered: stopped on request after step"), "{log}");
}

#[test]
fn a_signal_stops_all_jobs_of_a_launch() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    let mut launcher = training.saved(mgpurun("-n 1"));
    launcher.args([":", "-n", "2", TRAIN]).args(&training.arguments);
    let mut child = start(launcher);
    let launcher = launcher_of(&child);
    until(|| {
        let pages = page::all_of_process(launcher);
        pages.len() == 2 && pages.iter().all(page::has_made(2))
    });
    send(&child, Signal::SIGTERM);
    let stopped = finish(&mut child);
    stopped.expect(74, &["saved to", "nothing was saved", "job 1: stopping (SIGTERM)"]);
    assert_eq!(stopped.stderr.matches("stopped on request").count(), 1, "{stopped:#?}");
}

#[test]
fn a_repeated_evaluation_is_reported_once() {
    let training = Training::new(4_000, "--epochs 1 --batch 4");
    let metrics = training.folder.path().join("metrics");
    let with_metrics = || {
        let mut command = training.saved(mgpurun("-n 2"));
        command.arg("--metrics").arg(&metrics);
        command
    };
    let mut child = start(with_metrics());
    page::wait(launcher_of(&child), page::evaluates(1));
    send(&child, Signal::SIGTERM);
    finish(&mut child).expect(74, &["saved to"]);
    expect_resumed(&run(&mut with_metrics()), 8);
    run(&mut with_metrics()).expect(0, &["nothing left to train"]);
    assert_eq!(fs::read_to_string(&metrics).unwrap().lines().count(), 1);
}

#[test]
fn a_request_to_ranks_that_are_starting_is_held() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    let mut child = start(training.saved(mgpurun("-n 2")));
    page::wait(launcher_of(&child), |page| page.process(1).is_some());
    send(&child, Signal::SIGUSR1);
    finish(&mut child).expect(74, &["stopping (SIGUSR1)"]);
}

#[test]
fn a_signal_after_the_time_limit_is_the_first_one() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"trap 'n=$((n + 1)); : > "$0/$n"; [ $n = 2 ] && exit' TERM; while :; do sleep 0.1; done"#;
    let mut launcher = mgpurun("-n 1 --stop-after 0.3 sh -c");
    launcher.arg(script).arg(folder.path());
    let mut child = start(launcher);
    until(|| folder.path().join("1").exists());
    send(&child, Signal::SIGTERM);
    let ended = finish(&mut child);
    ended.expect(143, &["stopped by SIGTERM (--stop-after)"]);
    assert!(folder.path().join("2").exists(), "killed at once: {ended:#?}");
}

#[test]
fn a_stopped_job_does_not_hide_the_failure_of_another_one() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    let flag = training.folder.path().join("flag");
    let mut launcher = training.saved(mgpurun("-n 1"));
    launcher
        .args([":", "-n", "1", "sh", "-c", r#"until [ -e "$0" ]; do sleep 0.1; done; exit 3"#])
        .arg(&flag);
    let mut child = start(launcher);
    let launcher = launcher_of(&child);
    let trains = |page: &mgpu_control::progress::ProgressPage| page::has_made(2)(page);
    until(|| page::all_of_process(launcher).iter().any(trains));
    let page = page::all_of_process(launcher).into_iter().find(trains).unwrap();
    let rank = Pid::from_raw(page.process(0).unwrap() as i32);
    kill(rank, Signal::SIGTERM).unwrap();
    until(|| kill(rank, None).is_err());
    fs::write(&flag, "").unwrap();
    finish(&mut child).expect(3, &["saved to", "job 1: rank 0 exited with code 3"]);
}
