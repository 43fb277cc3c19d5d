//! The launcher's handling of the ranks' output: whole lines, no silent loss, nobody blocked for good.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use mgpu_tests::process::{command, finish, run, until};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::Value;

/// A launcher whose ranks run a shell script.
fn shell(ranks: u32, options: &[&str], script: &str) -> Command {
    let mut launcher = command("env");
    launcher.args(["--default-signal", env!("CARGO_BIN_EXE_t-mgpurun"), "-n", &ranks.to_string()]);
    launcher.args(options).args(["sh", "-c", script]);
    launcher
}

/// All bytes that a launcher writes to an unlimited standard output.
fn stdout_of(launcher: &mut Command) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stdout");
    let mut child = launcher.stdout(File::create(&path).unwrap()).spawn().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    fs::read(path).unwrap()
}

#[test]
fn output_bytes_are_unchanged() {
    let script = r"printf '\377\376\000\033x\n\200'; printf 'no end'";
    assert_eq!(stdout_of(&mut shell(1, &[], script)), b"[0] \xff\xfe\0\x1bx\n[0] \x80no end\n");
}

#[test]
fn long_lines_are_not_interleaved() {
    let script = r"for i in 1 2 3; do head -c 1000000 /dev/zero | tr '\0' $RANK; echo; done";
    let bytes = stdout_of(&mut shell(4, &["--no-prefix"], script));
    let mut counts = [0; 4];
    for line in bytes.strip_suffix(b"\n").unwrap().split(|byte| *byte == b'\n') {
        assert!(line.len() == 1_000_000 && line.iter().all(|byte| *byte == line[0]));
        counts[usize::from(line[0] - b'0')] += 1;
    }
    assert_eq!(counts, [3; 4]);
}

#[test]
fn stdout_and_stderr_lines_are_not_interleaved_in_one_pipe() {
    let script = "yes out$RANK | head -n 50000 & yes err$RANK | head -n 50000 >&2; wait";
    let (mut reader, writer) = io::pipe().unwrap();
    let mut launcher = shell(2, &[], script);
    let mut child = launcher.stdout(writer.try_clone().unwrap()).stderr(writer).spawn().unwrap();
    drop(launcher);
    // Slower than the ranks: the pipe is full most of the time.
    let (mut bytes, mut chunk) = (Vec::new(), [0; 100]);
    while let count @ 1.. = reader.read(&mut chunk).unwrap() {
        bytes.extend_from_slice(&chunk[..count]);
    }
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let text = String::from_utf8(bytes).unwrap();
    let lines = ["[0] out0", "[0] err0", "[1] out1", "[1] err1"];
    assert_eq!(text.lines().find(|line| !lines.contains(line)), None);
    assert_eq!(text.lines().count(), 200_000);
}

#[test]
fn partial_lines_are_joined_and_progress_lines_are_dropped() {
    let script = r"for bit in a b c; do printf $bit; done; printf '\n10%%\r20%%\r\r30%%\rdone\r\n'";
    let finished = run(&mut shell(2, &["--no-prefix"], script));
    let mut lines: Vec<&str> = finished.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["abc", "abc", "done", "done"]);
}

#[test]
fn the_last_line_is_kept_with_or_without_a_newline() {
    let folder = tempfile::tempdir().unwrap();
    let options = ["--log-dir", folder.path().to_str().unwrap(), "--tee"];
    let finished = run(&mut shell(1, &options, r"printf 'step 1\rstep 2 loss nan\r'; exit 3"));
    finished.expect(3, &["mgpurun: the last lines of rank 0:\n    step 2 loss nan\n"]);
    assert_eq!(finished.stdout, "[0] step 2 loss nan\n");
    assert_eq!(fs::read_to_string(folder.path().join("rank-0.log")).unwrap(), "step 2 loss nan\n");
}

/// A shell command that returns when the shell that started it has ended.
const ORPHANED: &str = "while grep -q '^State:.[^Z]' /proc/$$/status 2>/dev/null; do sleep 0.01; done";

#[test]
fn leftover_processes_may_finish_their_output() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "({ORPHANED}; echo late; exec >&- 2>&-; sleep 0.1; : > part-$RANK; mv part-$RANK saved-$RANK) & echo early"
    );
    let mut launcher = shell(2, &["--no-prefix"], &script);
    let finished = run(launcher.current_dir(folder.path()));
    let mut lines: Vec<&str> = finished.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""));
    assert_eq!(lines, ["early", "early", "late", "late"]);
    assert!((0..2).all(|rank| folder.path().join(format!("saved-{rank}")).exists()));
}

#[test]
fn long_running_leftover_processes_are_named_and_killed() {
    let finished = run(&mut shell(1, &[], "sleep 1000 & echo $!"));
    let pid = finished.stdout.trim().strip_prefix("[0] ").unwrap();
    let said = format!(
        "mgpurun: still running 2 s after all ranks had ended: sleep (pid {pid}, of rank 0): killed; a rank should wait \
         for its children\n"
    );
    assert_eq!((finished.code, finished.stderr), (Some(0), said));
    assert!(!Path::new("/proc").join(pid).exists());
}

#[test]
fn a_signal_ends_leftover_processes() {
    let folder = tempfile::tempdir().unwrap();
    let script = "trap '' TERM; sleep 1000 & echo $! > part; mv part pid";
    let mut launcher = shell(1, &[], script);
    let mut child =
        launcher.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| folder.path().join("pid").exists());
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    finish(&mut child).expect(143, &["mgpurun: stopped by SIGTERM"]);
    let pid = fs::read_to_string(folder.path().join("pid")).unwrap();
    assert!(!Path::new("/proc").join(pid.trim()).exists());
}

#[test]
fn ranks_have_an_empty_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("input"), "text\n").unwrap();
    let mut launcher = shell(2, &["--no-prefix"], "cat; echo end");
    let input = File::open(folder.path().join("input")).unwrap();
    assert_eq!(run(launcher.stdin(input)).stdout, "end\nend\n");
}

#[test]
fn python_output_is_unbuffered() {
    let value = |set: Option<&str>| {
        let mut launcher = shell(1, &["--no-prefix"], "echo ${PYTHONUNBUFFERED-unset}");
        launcher.env_remove("PYTHONUNBUFFERED");
        launcher.envs(set.map(|value| ("PYTHONUNBUFFERED", value)));
        run(&mut launcher).stdout
    };
    assert_eq!([value(None), value(Some("")), value(Some("x"))], ["1\n", "\n", "x\n"]);
}

#[test]
fn raw_output_is_byte_identical() {
    let folder = tempfile::tempdir().unwrap();
    // All byte values, carriage returns and an unfinished line, more than all pipes hold.
    let bytes: Vec<u8> =
        (0..3_000_001u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(folder.path().join("bytes"), &bytes).unwrap();
    let logs = folder.path().join("logs");
    let options = ["--raw", "--rank-filter", "1", "--tee", "--log-dir", logs.to_str().unwrap()];
    let mut launcher = shell(2, &options, "cat bytes");
    let shown = stdout_of(launcher.current_dir(folder.path()));
    assert!(shown == bytes);
    assert!((0..2).all(|rank| fs::read(logs.join(format!("rank-{rank}.log"))).unwrap() == bytes));
    let finished = run(&mut shell(1, &["--raw"], r"printf '1%%\r2%%\r'; printf oops >&2; exit 3"));
    assert_eq!(finished.stdout, "1%\r2%\r");
    assert!(finished.stderr.starts_with("oopsmgpurun: rank 0 exited with code 3 after "), "{finished:?}");
    assert_eq!(finished.stderr.lines().count(), 1);
}

#[test]
fn lost_raw_output_is_a_failure() {
    let mut launcher = shell(1, &["--raw"], "echo lost");
    let full = File::options().write(true).open("/dev/full").unwrap();
    let child = launcher.stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("standard output is lost from here on: No space left")
    );
}

/// Runs a command whose standard output has no reader or, if `reads`, none after the first bytes.
fn abandoned(launcher: &mut Command, reads: bool) -> (Option<i32>, String) {
    let (reader, writer) = io::pipe().unwrap();
    // Without a reader, the read end is closed before the command starts.
    let reader = reads.then_some(reader);
    let mut child = launcher.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    launcher.stdout(Stdio::null());
    if let Some(mut reader) = reader {
        reader.read_exact(&mut [0; 2]).unwrap();
    }
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (child.wait().unwrap().code(), stderr)
}

/// The programs of this project, with arguments that make them print something.
fn programs() -> Vec<Command> {
    let programs: [(&str, &[&str]); 10] = [
        (env!("CARGO_BIN_EXE_t-mgpurun"), &["--help"]),
        (env!("CARGO_BIN_EXE_t-mgpurun"), &["--dry-run", "true"]),
        (env!("CARGO_BIN_EXE_t-mgpurun"), &["doctor"]),
        (env!("CARGO_BIN_EXE_t-mgpurun"), &["ps"]),
        (env!("CARGO_BIN_EXE_t-hello_ring"), &[]),
        (env!("CARGO_BIN_EXE_t-embed"), &[]),
        (env!("CARGO_BIN_EXE_t-gpu_check"), &["--list"]),
        (env!("CARGO_BIN_EXE_t-golden_check"), &["--version"]),
        (env!("CARGO_BIN_EXE_t-allreduce_perf"), &["--max", "64"]),
        (env!("CARGO_BIN_EXE_t-train_mnist"), &["--synthetic", "--steps", "2", "--skip-test"]),
    ];
    let commands = programs.map(|(program, arguments)| {
        let mut command = command(program);
        command.args(arguments);
        command
    });
    commands.into()
}

#[test]
fn programs_exit_quietly_on_a_closed_pipe() {
    for mut program in programs() {
        assert_eq!(abandoned(&mut program, false), (Some(141), String::new()), "{program:?}");
    }
}

#[test]
fn programs_report_a_full_standard_output() {
    for mut program in programs() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = program.stdout(full).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{program:?}: {stderr}");
        assert!(stderr.contains(": cannot write to standard output: No space left on device"), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

#[test]
fn a_closed_pipe_is_not_reported_as_a_crash() {
    let launcher = env!("CARGO_BIN_EXE_t-mgpurun");
    for arguments in [
        &["--max-restarts", "3", "--restart-always", "yes"][..],
        // Rank 1 notices that rank 0 has ended, and fails to report it.
        &[env!("CARGO_BIN_EXE_t-allreduce_perf"), "--max", "16777216"],
    ] {
        let mut job = command("env");
        job.args(["--default-signal", launcher, "-n", "2"]).args(arguments);
        assert_eq!(abandoned(&mut job, true), (Some(141), String::new()), "{arguments:?}");
    }
}

#[test]
fn the_order_within_a_rank_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().to_str().unwrap();
    let bytes = stdout_of(&mut shell(3, &["--log-dir", logs, "--tee"], "seq 100000"));
    let text = String::from_utf8(bytes).unwrap();
    let numbers: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    for rank in 0..3 {
        let prefix = format!("[{rank}] ");
        let own = text.lines().filter_map(|line| line.strip_prefix(&prefix));
        assert!(own.eq(numbers.lines()), "rank {rank}");
        assert!(fs::read_to_string(folder.path().join(format!("rank-{rank}.log"))).unwrap() == numbers);
    }
}

#[test]
fn a_reader_that_never_reads_blocks_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let script = "seq -f %0100.0f 50000; : > done-$RANK";
    let mut launcher = command(env!("CARGO_BIN_EXE_t-impatient"));
    launcher.args(["2", script]).current_dir(folder.path());
    let mut child = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Ten megabytes exceed all pipes and queues.
    until(|| (0..2).all(|rank| folder.path().join(format!("done-{rank}")).exists()));
    let finished = finish(&mut child);
    assert_eq!(finished.code, Some(0));
    let missed_lines = |line: &str| {
        let line = line.strip_prefix("mgpurun: ")?;
        let count = line
            .strip_suffix(" lines of standard output were dropped: the reader accepted nothing for 0.05 s")?;
        count.parse::<usize>().ok()
    };
    let missed: usize = finished.stderr.lines().filter_map(missed_lines).sum();
    assert!(missed > 50_000, "{}", finished.stderr);
    assert_eq!(finished.stdout.lines().count() + missed, 100_000);
    assert!(finished.stdout.lines().all(|line| line.len() == 104));
}

#[test]
fn a_full_disk_loses_only_the_log() {
    let folder = tempfile::tempdir().unwrap();
    symlink("/dev/full", folder.path().join("rank-0.log")).unwrap();
    let options = ["--log-dir", folder.path().to_str().unwrap()];
    let finished = run(&mut shell(2, &options, "seq 100000"));
    finished.expect(0, &["mgpurun: the log of rank 0 ends here: No space left on device"]);
    assert_eq!(finished.stderr.lines().count(), 1, "{}", finished.stderr);
    assert_eq!(fs::read_to_string(folder.path().join("rank-1.log")).unwrap().lines().count(), 100_000);
    let finished = run(&mut shell(2, &["--events", "/dev/full"], "true"));
    finished.expect(0, &["mgpurun: the events in /dev/full end here: No space left on device"]);
}

#[test]
fn tee_writes_to_the_terminal_and_to_log_files() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().to_str().unwrap();
    let log = |rank: u32| fs::read_to_string(folder.path().join(format!("rank-{rank}.log"))).unwrap();
    let options = ["--log-dir", logs, "--tee", "--rank-filter", "1"];
    let finished = run(&mut shell(2, &options, "echo I am $RANK"));
    assert_eq!((finished.stdout.as_str(), log(0).as_str()), ("[1] I am 1\n", "I am 0\n"));
    let finished = run(&mut shell(2, &["--log-dir", logs], "echo $RANK; exit 3"));
    finished.expect(3, &["mgpurun: the last lines of rank "]);
    assert_eq!((finished.stdout.as_str(), log(1).as_str()), ("", "1\n"));
    run(&mut shell(1, &["--tee"], "true")).expect(2, &["required arguments", "--log-dir <DIR>"]);
}

#[test]
fn every_line_has_a_timestamp() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().to_str().unwrap();
    let options = ["--timestamps", "--log-dir", logs, "--tee"];
    let finished = run(&mut shell(1, &options, "echo out; exit 3"));
    let log = fs::read_to_string(folder.path().join("rank-0.log")).unwrap();
    let bare = run(&mut shell(1, &["--timestamps", "--no-prefix"], "echo bare"));
    let text = [finished.stdout, log, bare.stdout, finished.stderr].concat();
    let stamped = |line: &str| {
        let (time, text) = line.split_once(' ').unwrap();
        assert!(time.len() == 24 && humantime::parse_rfc3339(time).is_ok(), "{line}");
        text.to_owned()
    };
    let mut lines: Vec<String> = text.lines().map(stamped).collect();
    assert!(lines.remove(3).starts_with("mgpurun: rank 0 exited with code 3 after "));
    assert_eq!(lines, ["[0] out", "out", "bare", "mgpurun: the last lines of rank 0:", "    out"]);
}

#[test]
fn colours_are_used_only_on_terminals() {
    let terminal = openpty(None, None).unwrap();
    let mut launcher = shell(1, &[], r"printf '10%%\rdone\n'");
    let mut child = launcher.env_remove("NO_COLOR").stdout(terminal.slave).spawn().unwrap();
    drop(launcher);
    let mut shown = Vec::new();
    // The end of a terminal is an error: the other side is closed.
    let _ = File::from(terminal.master).read_to_end(&mut shown);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let prefix = "\x1b[38;5;30m[0]\x1b[0m ";
    let expected = format!("{prefix}10%\x1b[K\r{prefix}done\x1b[K\r\n");
    assert_eq!(String::from_utf8(shown).unwrap(), expected);
    assert_eq!(stdout_of(&mut shell(1, &[], "echo done")), b"[0] done\n");
}

/// The output of a launcher on a terminal of 20 columns. While it runs, `meanwhile` gets the terminal and the output
/// so far.
fn shown_on_a_narrow_terminal(
    launcher: &mut Command,
    meanwhile: impl FnOnce(&OwnedFd, &Mutex<Vec<u8>>),
) -> String {
    let size = Winsize { ws_row: 24, ws_col: 20, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(&size, None).unwrap();
    let slave = terminal.slave.try_clone().unwrap();
    let mut child = launcher.env("NO_COLOR", "1").stdout(slave).spawn().unwrap();
    launcher.stdout(Stdio::null());
    let shown = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let mut master = File::from(terminal.master);
        let shown = &shown;
        scope.spawn(move || {
            let mut bytes = [0; 1024];
            // The end of a terminal is an error: the other side is closed.
            while let Ok(count @ 1..) = master.read(&mut bytes) {
                shown.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        meanwhile(&terminal.slave, shown);
        drop(terminal.slave);
    });
    assert_eq!(child.wait().unwrap().code(), Some(0));
    String::from_utf8(shown.into_inner().unwrap()).unwrap()
}

#[test]
fn progress_lines_are_truncated_to_the_terminal_width() {
    let folder = tempfile::tempdir().unwrap();
    let text = "0123456789abcdefghijklmnopqrstuvwxyz";
    let script = format!(
        r"printf '{text}\r_'; until [ -e resized ]; do sleep 0.01; done; printf '\r{text}\r_\r'; echo {text}"
    );
    let mut launcher = shell(1, &[], &script);
    let line = |columns: usize| format!("[0] {}\x1b[K\r", &text[..columns - 1 - "[0] ".len()]);
    let shown = shown_on_a_narrow_terminal(launcher.current_dir(folder.path()), |terminal, shown| {
        until(|| *shown.lock().unwrap() == line(20).as_bytes());
        let resize = Command::new("stty").args(["cols", "15"]).stdin(terminal.try_clone().unwrap()).status();
        assert!(resize.unwrap().success());
        File::create(folder.path().join("resized")).unwrap();
    });
    let mark = "[0] _\x1b[K\r";
    // The line may occupy two rows after the resize: both are cleared.
    assert!(shown.contains("\x1b[J\r"), "{shown:?}");
    let shown = shown.replace("\x1b[J", "\x1b[K");
    assert_eq!(shown, format!("{}{mark}{}{mark}[0] {text}\x1b[K\r\n", line(20), line(15)));
}

#[test]
fn a_terminal_provided_by_another_launcher_is_ignored() {
    let mut launcher = shell(1, &[], r"printf '10%%\rdone\n'");
    let shown = shown_on_a_narrow_terminal(launcher.env("OMPI_COMM_WORLD_RANK", "0"), |_, _| {});
    assert_eq!(shown, "[0] done\r\n");
}

#[test]
fn an_unread_terminal_does_not_block_the_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let terminal = openpty(None, None).unwrap();
    let script = "echo $$ > pid.part; mv pid.part pid; while :; do printf '%07d\\n' 1; done";
    let mut launcher = shell(1, &["--grace", "0.2"], script);
    let mut child = launcher.current_dir(folder.path()).stdout(terminal.slave).spawn().unwrap();
    drop(launcher);
    // Everything is full once the rank has made no progress for a while.
    let (mut last, mut unchanged) = (String::new(), 0);
    until(|| {
        let rank = fs::read_to_string(folder.path().join("pid")).unwrap_or_default();
        let written = fs::read_to_string(format!("/proc/{}/io", rank.trim())).unwrap_or_default();
        unchanged = if written == last && !written.is_empty() { unchanged + 1 } else { 0 };
        last = written;
        unchanged == 50
    });
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let mut status = None;
    until(|| {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(143));
    drop(terminal.master);
}

#[test]
fn an_events_pipe_without_a_reader_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events");
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    let finished = run(&mut shell(1, &["--events", path.to_str().unwrap()], "true"));
    finished.expect(1, &["cannot write the log", "events"]);
}

/// The events in a file, without their times and the memory of ranks that have ended.
fn events(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let event = |line: &str| {
        let mut event: Value = serde_json::from_str(line).unwrap();
        let object = event.as_object_mut().unwrap();
        let time = object.remove("time").unwrap();
        assert!(humantime::parse_rfc3339(time.as_str().unwrap()).is_ok(), "{time}");
        assert!(object.remove("elapsed_s").unwrap().as_f64().unwrap() >= 0.0);
        if object["event"] == "exit" {
            assert!(object.remove("peak_rss_mib").unwrap().as_u64().unwrap() > 0);
        }
        event
    };
    text.lines().map(event).collect()
}

/// The events of one kind.
fn of<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == kind).collect()
}

#[test]
fn events_of_a_successful_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.args(["-n", "2", "--events", path.to_str().unwrap(), "t-hello_ring"]);
    run(&mut launcher).expect(0, &[]);
    let events = events(&path);
    assert_eq!(events[0]["event"], "start");
    assert!(events[0]["program"].as_str().unwrap().ends_with("/t-hello_ring"), "{events:?}");
    assert_eq!((&events[0]["ranks"], &events[0]["restart"]), (&2.into(), &0.into()));
    assert!(events[0]["run_id"].as_str().is_some_and(|id| !id.is_empty()));
    let mut joined: Vec<_> = of(&events, "join").iter().map(|event| event["rank"].as_u64()).collect();
    joined.sort_unstable();
    assert_eq!(joined, [Some(0), Some(1)]);
    assert!(of(&events, "join").iter().all(|event| event["pid"].as_u64().is_some_and(|pid| pid > 0)));
    let exits = of(&events, "exit");
    assert!(exits.len() == 2 && exits.iter().all(|exit| exit["code"] == 0 && exit["by_launcher"] == false));
    assert!(of(&events, "fault").is_empty());
    let end = serde_json::json!({"event": "end", "exit_code": 0, "message": null, "culprit": null});
    assert_eq!(events.last(), Some(&end));
    // Events of another run are appended.
    run(&mut launcher).expect(0, &[]);
    assert_eq!(self::events(&path)[..events.len()], events);
}

#[test]
fn events_of_a_failing_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let script = "[ $RANK = 1 ] && exit 3; while :; do sleep 0.05; done";
    run(&mut shell(2, &["--events", path.to_str().unwrap()], script)).expect(3, &[]);
    let events = events(&path);
    assert_eq!(events[0]["arguments"], serde_json::json!(["-c", script]));
    let faults = of(&events, "fault");
    assert!(faults.len() == 1 && faults[0]["rank"] == 1 && faults[0]["exit_code"] == 3, "{events:?}");
    assert!(faults[0]["cause"].as_str().unwrap().starts_with("rank 1 exited with code 3 after "));
    let exits = of(&events, "exit");
    assert_eq!(exits[0], &serde_json::json!({"event": "exit", "rank": 1, "code": 3, "by_launcher": false}));
    assert_eq!(exits[1], &serde_json::json!({"event": "exit", "rank": 0, "signal": 15, "by_launcher": true}));
    let end = events.last().unwrap();
    assert!(end["event"] == "end" && end["exit_code"] == 3 && end["culprit"] == 1, "{end}");
    assert_eq!(end["message"], faults[0]["cause"]);
}

#[test]
fn events_of_an_interrupted_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let script = "trap 'exit 0' INT; : > ready-$RANK; while :; do sleep 0.05; done";
    let mut launcher = shell(2, &["--grace", "30", "--events", path.to_str().unwrap()], script);
    launcher.current_dir(folder.path());
    let mut child = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| (0..2).all(|rank| folder.path().join(format!("ready-{rank}")).exists()));
    // Events can be read while the run continues.
    until(|| !events(&path).is_empty());
    assert_eq!(events(&path)[0]["event"], "start");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    finish(&mut child).expect(130, &[]);
    let events = events(&path);
    let exits = of(&events, "exit");
    assert!(exits.len() == 2 && exits.iter().all(|exit| exit["by_launcher"] == true), "{events:?}");
    assert!(of(&events, "fault").is_empty());
    let end = events.last().unwrap();
    assert!(end["exit_code"] == 130 && end["message"].as_str().is_some_and(|text| text.contains("SIGINT")));
}
