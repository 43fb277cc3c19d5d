//! Watching a run: the flight recorder in reports and in `mgpurun ps --collectives`, `--metrics-listen`, and
//! `mgpurun top` in a real terminal (tmux, if it is installed).

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use mgpu_tests::fake_gpu;
use mgpu_tests::process::{command, finish, run, survivors, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_t-mgpurun");
const JOB: &str = env!("CARGO_BIN_EXE_t-job");

/// A launcher whose processes can be identified.
fn launcher(folder: &Path) -> Command {
    let mut launcher = command("env");
    launcher.args(["--default-signal", LAUNCHER, "--backend", "cpu"]);
    launcher.env("TMPDIR", folder).env_remove("XDG_RUNTIME_DIR").env("MGPU_TEST_MARK", folder);
    launcher.stdout(Stdio::piped()).stderr(Stdio::piped());
    launcher
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id() as i32)
}

/// What `mgpurun ps` with these arguments shows of the run whose ranks have the mark of `folder`.
fn shown(folder: &Path, arguments: &[&str]) -> String {
    let text = run(command(LAUNCHER).arg("ps").args(arguments)).stdout;
    let own: Vec<u32> = survivors(&format!("MGPU_TEST_MARK={}", folder.display()));
    let is_own = |block: &&str| {
        let launcher = block.strip_prefix("launcher ").and_then(|rest| rest.split(':').next());
        launcher.and_then(|launcher| launcher.parse().ok()).is_some_and(|launcher| own.contains(&launcher))
    };
    text.split("\n\n").filter(is_own).collect()
}

/// The lines about a rank in a list of collectives.
fn collectives_of(text: &str, rank: u32) -> Vec<&str> {
    let start = format!("rank {rank}: ");
    let lines = text.lines().skip_while(|line| !line.starts_with(&start)).skip(1);
    lines.take_while(|line| line.starts_with("  ")).collect()
}

#[test]
fn a_report_shows_where_the_sequences_part() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    job.args(["-n", "3", "--progress-timeout", "1", "--inject", "rank=1,step=3,fault=hang", JOB]);
    let finished = run(&mut job);
    finished.expect(65, &["mgpurun: the ranks part in communicator 1:\n"]);
    let line = |start: &str| finished.stderr.lines().any(|line| line.starts_with(start));
    assert!(line("mgpurun:   rank 1 is after all_reduce #2 (40.0 kB), ended "), "{finished:#?}");
    assert!(finished.stderr.contains(" s ago, and has not begun #3"), "{finished:#?}");
    assert!(line("mgpurun:   ranks 0,2 are in all_reduce #3 (40.0 kB) since "), "{finished:#?}");
}

#[test]
fn collectives_are_shown_of_running_and_of_dead_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = launcher(folder.path());
    // Rank 0 stays when rank 1 has failed, so that the launcher stays, too.
    let script = format!("[ $RANK = 1 ] && exec {JOB}; trap '' TERM; {JOB}; while :; do sleep 0.05; done");
    job.args([
        "-n",
        "2",
        "--grace",
        "100000",
        "--inject",
        "rank=1,step=4,fault=sigstop",
        "sh",
        "-c",
        &script,
    ]);
    let mut child = job.spawn().unwrap();
    let mut seen = String::new();
    until(|| {
        seen = shown(folder.path(), &["--collectives"]);
        let is_waiting = collectives_of(&seen, 0).last().is_some_and(|line| line.ends_with("running"));
        is_waiting && seen.contains("all_reduce #5 (40.0 kB)")
    });
    assert!(seen.contains("\nthe ranks part in communicator 1:\n"), "{seen}");
    let names = |text: &str, rank| -> Vec<String> {
        let words = |line: &str| line.split_whitespace().take(3).collect::<Vec<_>>().join(" ");
        collectives_of(text, rank).into_iter().skip(1).map(words).collect()
    };
    let of_stopped =
        ["#1 1 all_reduce", "#2 1 all_reduce", "#3 1 all_reduce", "#4 1 barrier"].map(str::to_owned).to_vec();
    assert_eq!(names(&seen, 1), of_stopped, "{seen}");
    assert_eq!(names(&seen, 0)[4..], ["#5 1 all_reduce"], "{seen}");
    // Fewer on request.
    let few = shown(folder.path(), &["--collectives=2"]);
    assert_eq!(names(&few, 1), of_stopped[2..], "{few}");
    // After its death.
    let row = seen.lines().find(|line| line.starts_with("1 ")).unwrap();
    let stopped = Pid::from_raw(row.split_whitespace().nth(1).unwrap().parse().unwrap());
    kill(stopped, Signal::SIGKILL).unwrap();
    until(|| {
        seen = shown(folder.path(), &["--collectives"]);
        seen.contains("was killed by SIGKILL")
    });
    assert_eq!(names(&seen, 1), of_stopped, "{seen}");
    until(|| {
        // A second signal kills the ranks that ignore SIGTERM.
        kill(pid(&child), Signal::SIGTERM).unwrap();
        child.try_wait().unwrap().is_some()
    });
    finish(&mut child).expect(137, &["rank 1 was killed by SIGKILL"]);
    let wrong = run(command(LAUNCHER).args(["ps", "--collectives=65"]));
    wrong.expect(2, &["--collectives"]);
}

/// Starts a job whose rank 1 is stopped in the middle, with metrics at `address`. Returns it and where it listens.
fn start_with_metrics(folder: &Path, address: &str) -> (Child, BufReader<impl Read>, String) {
    let mut job = launcher(folder);
    job.args(["-n", "2", "--metrics-listen", address, "--inject", "rank=1,step=4,fault=sigstop", JOB]);
    let mut child = job.spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    let at = loop {
        line.clear();
        assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "no address of the metrics");
        if let Some(at) = line.strip_prefix("mgpurun: metrics at ") {
            break at.trim_end().to_owned();
        }
    };
    (child, stderr, at)
}

/// The body of an answer.
fn get(mut stream: impl Read + Write, path: &str) -> String {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    body.to_owned()
}

/// Stops a job and returns its exit code.
fn end(mut child: Child, mut stderr: impl Read) -> Option<i32> {
    kill(pid(&child), Signal::SIGTERM).unwrap();
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    child.wait().unwrap().code()
}

#[test]
fn metrics_are_served_and_clients_do_not_disturb_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let (child, stderr, at) = start_with_metrics(folder.path(), "0");
    let at = at.strip_prefix("http://").unwrap().to_owned();
    let connect = || TcpStream::connect(&at).unwrap();
    // More connections than are served at once, and nonsense.
    let flood: Vec<TcpStream> = (0..60).map(|_| connect()).collect();
    flood.iter().take(20).for_each(|mut stream| stream.write_all(&[0xff; 20_000]).unwrap_or_default());
    let mut metrics = String::new();
    until(|| {
        metrics = get(connect(), "/metrics");
        metrics.contains("\nmgpurun_rank_step{mgpurun_job=\"0\",rank=\"1\"} 4\n")
            && !metrics.contains("mgpurun_rank_waited_for_seconds_total{mgpurun_job=\"0\",rank=\"1\"} 0\n")
    });
    assert!(metrics.contains("\nmgpurun_rank_up{mgpurun_job=\"0\",rank=\"1\"} 1\n"), "{metrics}");
    assert!(
        metrics.contains("\nmgpurun_rank_collectives_total{mgpurun_job=\"0\",rank=\"0\"} 5\n"),
        "{metrics}"
    );
    check_with_prometheus_client(&metrics);
    let status: serde_json::Value = serde_json::from_str(&get(connect(), "/status.json")).unwrap();
    assert_eq!(status["runs"][0]["ranks"][1]["state"], "stopped", "{status}");
    assert_eq!(status["runs"][0]["ranks"][0]["waits_for"], 1, "{status}");
    let page = get(connect(), "/");
    assert!(
        !page.contains("http://") || page.matches("http://").count() == page.matches("www.w3.org").count()
    );
    drop(flood);
    assert_eq!(end(child, stderr), Some(143));
}

/// Checks the text with the parser of prometheus_client, if Python has it.
fn check_with_prometheus_client(metrics: &str) {
    let python = std::env::var("MGPU_PROMETHEUS_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = "import sys\nfrom prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
        print(sum(len(family.samples) for family in parse(sys.stdin.read())))";
    if !run(command(&python).args(["-c", "import prometheus_client"])).stderr.is_empty() {
        eprintln!("skipped: {python} has no prometheus_client");
        return;
    }
    let mut child = command(&python);
    child.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    child.stdin.take().unwrap().write_all(metrics.as_bytes()).unwrap();
    let samples: usize = finish(&mut child).expect(0, &[]).stdout.trim().parse().unwrap();
    assert!(samples > 15, "{samples} samples");
}

#[test]
fn metrics_on_a_unix_socket_end_with_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("metrics");
    let address = format!("unix:{}", socket.display());
    let (child, stderr, at) = start_with_metrics(folder.path(), &address);
    assert_eq!(at, address);
    assert!(get(UnixStream::connect(&socket).unwrap(), "/metrics").ends_with("# EOF\n"));
    let mut second = launcher(folder.path());
    let refused = run(second.args(["-n", "1", "--metrics-listen", &address, "true"]));
    refused.expect(1, &["--metrics-listen unix:", "the file exists"]);
    assert_eq!(end(child, stderr), Some(143));
    assert!(!socket.exists());
    // Nor does it stay if the launcher is killed.
    let (mut child, _stderr, _) = start_with_metrics(folder.path(), &address);
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let launcher_of_it: i32 = fs::read_to_string(children).unwrap().trim().parse().unwrap();
    kill(Pid::from_raw(launcher_of_it), Signal::SIGKILL).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(137));
    assert!(!socket.exists());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let wrong = run(launcher(folder.path()).args(["--metrics-listen", "nowhere", "true"]));
    wrong.expect(2, &["it should be a port, such as 9400"]);
}

/// A terminal of 80 columns and 24 rows; its server ends on drop.
struct Tmux {
    socket: String,
}

impl Tmux {
    /// Starts a command in it; `None`, with a message, if tmux is not installed.
    fn start(folder: &Path, words: &[&str]) -> Option<Self> {
        let tmux = Tmux { socket: folder.join("tmux").display().to_string() };
        if Command::new("tmux").arg("-V").output().is_err() {
            eprintln!("skipped: tmux is not installed");
            return None;
        }
        let shell = format!("{}; echo ended with $?; exec sleep 1000", words.join(" "));
        let mut new = tmux.command(&["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", &shell]);
        run(new.env("LC_ALL", "C.UTF-8")).expect(0, &[]);
        Some(tmux)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut tmux = command("tmux");
        tmux.args(["-u", "-S", &self.socket]).args(arguments);
        tmux
    }

    fn screen(&self) -> String {
        run(&mut self.command(&["capture-pane", "-p"])).stdout
    }

    fn press(&self, key: &str) {
        run(&mut self.command(&["send-keys", key])).expect(0, &[]);
    }

    /// Waits until the screen shows all of these.
    fn wait_for(&self, texts: &[&str]) -> String {
        let mut screen = String::new();
        until(|| {
            screen = self.screen();
            texts.iter().all(|text| screen.contains(text))
        });
        screen
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let _ = self.command(&["kill-server"]).output();
    }
}

#[test]
fn top_shows_the_ranks_and_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, mut stderr, _) = start_with_metrics(folder.path(), "0");
    let mut launcher = String::new();
    until(|| {
        let text = shown(folder.path(), &[]);
        launcher = text.lines().next().unwrap_or_default().to_owned();
        text.contains("stopped")
    });
    let launcher = launcher.trim_start_matches("launcher ").split(':').next().unwrap().to_owned();
    let Some(tmux) = Tmux::start(folder.path(), &[LAUNCHER, "top", &launcher]) else {
        assert_eq!(end(child, stderr), Some(143));
        return;
    };
    let screen = tmux.wait_for(&["2 of 2 ranks up", "rank 1 is waited for: 1.00 ranks", "q quit"]);
    assert!(screen.lines().count() <= 24 && screen.contains(&format!("launcher {launcher}")), "{screen}");
    tmux.press("Down");
    tmux.press("Enter");
    tmux.wait_for(&["rank 1, process ", "the ranks part in communicator 1:", "has not begun #5"]);
    tmux.press("Enter");
    tmux.press("x");
    tmux.wait_for(&[&format!("end the run of launcher {launcher}?")]);
    tmux.press("y");
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143), "{rest}");
    tmux.press("q");
    // The terminal is as before: the text that follows is shown, and the view is gone.
    let screen = tmux.wait_for(&["ended with 0"]);
    assert!(!screen.contains("q quit"), "{screen}");
}

#[test]
fn top_needs_a_terminal() {
    run(command(LAUNCHER).arg("top")).expect(1, &["top needs a terminal", "`mgpurun ps`"]);
    run(command(LAUNCHER).args(["top", "--help"])).expect(0, &["Watch the runs of this user live"]);
}

/// On the fake GPUs: collectives on device memory are recorded as enqueued, and NVML's readings are served.
#[test]
fn ranks_with_gpus_are_watched_too() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("metrics");
    let mut job = fake_gpu::launched(LAUNCHER, 2);
    job.env("TMPDIR", folder.path()).env_remove("XDG_RUNTIME_DIR").env("MGPU_TEST_MARK", folder.path());
    job.env("FAKE_NVML_READINGS", "1:93:61").args(["--grace", "0.1", "--metrics-listen"]);
    job.arg(format!("unix:{}", socket.display()));
    job.args([env!("CARGO_BIN_EXE_t-device"), "loop", "hang", "1"]);
    let mut child = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut seen = String::new();
    until(|| {
        seen = shown(folder.path(), &["--collectives"]);
        let count =
            |rank| collectives_of(&seen, rank).iter().filter(|line| line.ends_with("enqueued")).count();
        // Before rank 1 hangs, any of the two may be ahead, and in the middle of a collective.
        let has_settled =
            seen.contains("\nthe ranks part in communicator 1:\n  rank 1 is after all_reduce #");
        count(1) > 0 && count(0) > count(1) && has_settled
    });
    let mut metrics = String::new();
    // NVML is read in the background from the first request on.
    until(|| {
        metrics = get(UnixStream::connect(&socket).unwrap(), "/metrics");
        metrics.contains("mgpurun_gpu_temperature_celsius{")
    });
    let has = |name: &str, value: &str| {
        let start = format!("mgpurun_gpu_{name}{{gpu=\"1\",uuid=\"GPU-");
        metrics.lines().any(|line| line.starts_with(&start) && line.ends_with(value))
    };
    assert!(has("temperature_celsius", "} 61") && has("utilization_ratio", "} 0.93"), "{metrics}");
    assert!(has("memory_used_bytes", "} 2147483648"), "{metrics}");
    check_with_prometheus_client(&metrics);
    kill(pid(&child), Signal::SIGTERM).unwrap();
    finish(&mut child).expect(143, &["stopped by SIGTERM"]);
}
