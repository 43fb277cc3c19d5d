//! The launcher: output, exit codes, signals, and that nothing survives.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use mgpu_tests::process::{Finished, command, finish, run, survivors, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The launcher with default signal dispositions, whatever the test itself inherited.
fn mgpurun() -> Command {
    let mut launcher = command("env");
    launcher.args(["--default-signal", env!("CARGO_BIN_EXE_t-mgpurun")]);
    launcher
}

/// Ranks that run a shell script.
fn shell(ranks: u32, options: &[&str], script: &str) -> Command {
    let mut launcher = mgpurun();
    launcher.args(["-n", &ranks.to_string()]).args(options).args(["sh", "-c", script]);
    launcher
}

/// Starts a launcher whose ranks create `ready-RANK` in `folder` and then run `script`.
fn start(folder: &tempfile::TempDir, ranks: u32, options: &[&str], script: &str) -> Child {
    let script = format!("{script}\n: > ready-$RANK\nwhile :; do sleep 0.05; done");
    let mut launcher = shell(ranks, options, &script);
    launcher.current_dir(folder.path()).env("MGPU_TEST_MARK", folder.path());
    let child = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| (0..ranks).all(|rank| folder.path().join(format!("ready-{rank}")).exists()));
    child
}

fn mark(folder: &tempfile::TempDir) -> String {
    format!("MGPU_TEST_MARK={}", folder.path().display())
}

fn send(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

#[test]
fn lines_have_a_rank_prefix() {
    let finished = run(&mut shell(3, &[], "echo out $RANK of $WORLD_SIZE; echo err $LOCAL_RANK >&2"));
    assert_eq!(finished.code, Some(0));
    for rank in 0..3 {
        assert!(
            finished.stdout.lines().any(|line| line == format!("[{rank}] out {rank} of 3")),
            "{finished:#?}"
        );
        assert!(finished.stderr.lines().any(|line| line == format!("[{rank}] err {rank}")), "{finished:#?}");
    }
    let finished = run(&mut shell(11, &[], "echo x"));
    assert!(finished.stdout.contains("[ 0] x\n") && finished.stdout.contains("[10] x\n"), "{finished:#?}");
    let finished = run(&mut shell(2, &["--no-prefix", "--rank-filter", "0"], "echo $RANK"));
    assert_eq!(finished.stdout, "0\n");
    let finished = run(&mut shell(1, &["--color", "always"], "printf cut"));
    assert_eq!(finished.stdout, "\x1b[38;5;30m[0]\x1b[0m cut\n");
}

#[test]
fn lines_are_never_interleaved() {
    let script = "i=0; while [ $i -lt 300 ]; do printf \"$RANK\"; printf \"$RANK$RANK\\n\"; i=$((i+1)); done";
    let finished = run(&mut shell(4, &["--no-prefix"], script));
    assert_eq!(finished.stdout.lines().count(), 1200);
    assert!(
        finished.stdout.lines().all(|line| ["000", "111", "222", "333"].contains(&line)),
        "{finished:#?}"
    );
}

#[test]
fn standard_input_is_empty_and_the_environment_is_complete() {
    let finished = run(&mut shell(2, &["--no-prefix", "--backend", "cpu"], "cat; env | sort"));
    finished.expect(0, &["MASTER_ADDR=127.0.0.1\n", "MGPU_BACKEND=cpu\n", "MGPU_RESTART_COUNT=0\n"]);
    for name in ["MASTER_PORT", "MGPU_RENDEZVOUS", "MGPU_RUN_ID"] {
        let value =
            |line: &str| line.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')).map(str::to_owned);
        let values: Vec<String> = finished.stdout.lines().filter_map(value).collect();
        assert!(values.len() == 2 && values[0] == values[1] && !values[0].is_empty(), "{name}: {values:?}");
    }
}

#[test]
fn the_first_failure_decides_the_exit_code_and_is_reported_last() {
    let script = "[ $RANK = 1 ] || sleep 60; echo the reason; echo more >&2; exit 3";
    let finished = run(&mut shell(3, &[], script));
    assert_eq!(finished.code, Some(3));
    let tail: Vec<&str> = finished.stderr.lines().rev().take(4).collect();
    assert!(tail[3].starts_with("mgpurun: rank 1 exited with code 3 after "), "{finished:#?}");
    assert_eq!(tail[2], "mgpurun: the last lines of rank 1:");
    let mut repeated = [tail[1], tail[0]];
    repeated.sort_unstable();
    assert_eq!(repeated, ["    more", "    the reason"]);
}

#[test]
fn exit_codes_match_the_documentation() {
    for (script, code) in [("exit 0", 0), ("exit 77", 77), ("kill -SEGV $$", 139), ("kill -KILL $$", 137)] {
        assert_eq!(run(&mut shell(2, &[], script)).code, Some(code), "{script}");
    }
    let usage = |arguments: &[&str]| run(mgpurun().args(arguments));
    usage(&["-n", "0", "true"]).expect(2, &["at least one rank is needed"]);
    usage(&["-n", "x", "true"]).expect(2, &["a number from 1, or auto"]);
    usage(&[]).expect(2, &["Usage: mgpurun"]);
    usage(&["--help"]).expect(0, &["Exit codes:", "Example:"]);
}

#[test]
fn programs_that_cannot_be_run_are_the_launchers_failure() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("script");
    fs::write(&file, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let start = |program: &str| run(mgpurun().args(["-n", "2", program]));
    start("no-such-program").expect(1, &["no program `no-such-program`: looked in PATH"]);
    start("./no/such/file").expect(1, &["no program at ./no/such/file"]);
    start(file.to_str().unwrap()).expect(1, &["is not executable; try: chmod +x"]);
    start(folder.path().to_str().unwrap()).expect(1, &["is a folder, not a program"]);
    fs::write(&file, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    // Of several ranks, any may be the first.
    let alone = run(mgpurun().args(["-n", "1", file.to_str().unwrap()]));
    alone.expect(1, &["cannot start rank 0", "the interpreter in its first line"]);
}

#[test]
fn programs_beside_the_launcher_are_found() {
    run(mgpurun().args(["-n", "2", "t-hello_ring"])).expect(0, &["hello from rank 1 of 2 (cpu backend)"]);
}

#[test]
fn a_dry_run_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("touched");
    let finished = run(mgpurun().args(["-n", "2", "--dry-run", "touch", file.to_str().unwrap()]));
    finished.expect(0, &["# rank 0: ", "\nRANK=0 ", "# rank 1: ", "\nRANK=1 ", "WORLD_SIZE=2", "bin/touch "]);
    assert!(!file.exists());
}

#[test]
fn logs_hold_both_streams() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("logs");
    let options = ["--log-dir", logs.to_str().unwrap()];
    let finished = run(&mut shell(2, &options, "echo out $RANK; echo err $RANK >&2"));
    assert_eq!((finished.code, finished.stdout.as_str(), finished.stderr.as_str()), (Some(0), "", ""));
    for rank in 0..2 {
        let log = fs::read_to_string(logs.join(format!("rank-{rank}.log"))).unwrap();
        let mut lines: Vec<&str> = log.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, [format!("err {rank}"), format!("out {rank}")]);
    }
    run(&mut shell(1, &["--log-dir", "/proc/none"], "true"))
        .expect(1, &["cannot write the log /proc/none: "]);
}

/// Sends `signal` to a launcher whose ranks record the signals they get; returns its end and the records.
fn interrupt(signal: Signal, times: usize, trap: &str) -> (Finished, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(&folder, 2, &["--grace", "30"], trap);
    for _ in 0..times {
        send(&child, signal);
    }
    let finished = finish(&mut child);
    assert_eq!(survivors(&mark(&folder)), [] as [u32; 0]);
    let note = |rank: u32| fs::read_to_string(folder.path().join(format!("got-{rank}"))).unwrap_or_default();
    (finished, (0..2).map(note).collect())
}

#[test]
fn the_first_signal_is_forwarded() {
    for (signal, name, code) in
        [(Signal::SIGINT, "INT", 130), (Signal::SIGTERM, "TERM", 143), (Signal::SIGHUP, "HUP", 129)]
    {
        let trap = format!("trap 'echo {name} > got-$RANK; exit 0' {name}");
        let (finished, notes) = interrupt(signal, 1, &trap);
        finished.expect(code, &["mgpurun: stopped by SIG"]);
        assert_eq!(notes, [format!("{name}\n"), format!("{name}\n")]);
    }
}

#[test]
fn an_ignored_signal_stays_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let script = ": > ready-$RANK; while :; do sleep 0.05; done";
    let mut launcher = command("env");
    launcher.args(["--default-signal", "--ignore-signal=HUP", env!("CARGO_BIN_EXE_t-mgpurun")]);
    launcher.args(["-n", "1", "sh", "-c", script]).current_dir(folder.path());
    let mut child = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| folder.path().join("ready-0").exists());
    send(&child, Signal::SIGHUP);
    send(&child, Signal::SIGTERM);
    finish(&mut child).expect(143, &["stopped by SIGTERM"]);
}

#[test]
fn the_second_signal_kills() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(&folder, 2, &["--grace", "1000"], "trap ': > got-$RANK' INT");
    send(&child, Signal::SIGINT);
    until(|| (0..2).all(|rank| folder.path().join(format!("got-{rank}")).exists()));
    send(&child, Signal::SIGINT);
    finish(&mut child).expect(130, &[]);
    assert_eq!(survivors(&mark(&folder)), [] as [u32; 0]);
}

#[test]
fn ranks_that_ignore_sigterm_are_killed_after_the_grace_time() {
    let folder = tempfile::tempdir().unwrap();
    let script = "trap '' TERM; if [ $RANK = 1 ]; then until [ -e ready-0 ]; do :; done; exit 5; fi";
    let script = format!("{script}\n: > ready-$RANK\nwhile :; do sleep 0.05; done");
    let mut launcher = shell(2, &["--grace", "0.3"], &script);
    launcher.current_dir(folder.path()).env("MGPU_TEST_MARK", folder.path());
    run(&mut launcher).expect(5, &["rank 1 exited with code 5"]);
    assert_eq!(survivors(&mark(&folder)), [] as [u32; 0]);
}

#[test]
fn user_signals_are_passed_through() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(&folder, 2, &[], "trap ': > usr1-$RANK' USR1; trap 'exit 0' USR2");
    send(&child, Signal::SIGUSR1);
    until(|| (0..2).all(|rank| folder.path().join(format!("usr1-{rank}")).exists()));
    send(&child, Signal::SIGUSR2);
    finish(&mut child).expect(0, &[]);
}

#[test]
fn ranks_die_with_the_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(&folder, 3, &[], "trap '' TERM INT HUP");
    assert!(survivors(&mark(&folder)).len() >= 4);
    child.kill().unwrap();
    child.wait().unwrap();
    // The shells die at once; their `sleep`s end by themselves within 50 ms.
    until(|| survivors(&mark(&folder)).is_empty());
}

#[test]
fn children_of_a_rank_are_killed_with_its_process_group() {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = shell(2, &[], "sleep 1000 & echo started");
    launcher.env("MGPU_TEST_MARK", folder.path());
    run(&mut launcher).expect(0, &["started"]);
    assert_eq!(survivors(&mark(&folder)), [] as [u32; 0]);
}

#[test]
fn no_folder_is_left() {
    let base = tempfile::tempdir().unwrap();
    let left = || fs::read_dir(base.path()).unwrap().count();
    for script in ["true", "exit 3"] {
        run(shell(2, &[], script).env("XDG_RUNTIME_DIR", base.path()));
        assert_eq!(left(), 0);
    }
    // After a killed launcher, its remaining process removes the folder, or else the next launch does.
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = shell(1, &[], ": > ready-0; sleep 1000");
    let mut child = launcher.current_dir(folder.path()).env("XDG_RUNTIME_DIR", base.path()).spawn().unwrap();
    until(|| folder.path().join("ready-0").exists());
    child.kill().unwrap();
    child.wait().unwrap();
    run(shell(2, &[], "true").env("XDG_RUNTIME_DIR", base.path()));
    until(|| left() == 0);
}

#[test]
fn a_closed_pipe_ends_ranks_as_without_a_launcher() {
    let mut child = shell(2, &[], "while echo line; do :; done")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let code = child.wait().unwrap().code();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
}
