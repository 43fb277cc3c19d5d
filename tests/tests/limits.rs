//! Foreign files and resource limits do not make the launcher do harm.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use mgpu_tests::process::{Finished, command, run};

const LAUNCHER: &str = env!("CARGO_BIN_EXE_t-mgpurun");

/// `launcher` and its arguments, after a shell has run `limit`, in its own environment.
fn limited(folder: &Path, limit: &str, arguments: &[&str]) -> Finished {
    let mut shell = command("bash");
    shell.args(["-c", &format!("{limit} && exec \"$@\""), "bash", LAUNCHER]).args(arguments);
    run(shell.current_dir(folder).env("TMPDIR", folder).env_remove("XDG_RUNTIME_DIR"))
}

/// Foreign files and folders with names similar to the launcher's.
fn put_foreign_files(base: &Path) {
    let file = |path: &str| {
        let path = base.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "kept").unwrap();
    };
    file("mgpurun-checkpoints/step-1/weights");
    file("mgpurun-0123456789abcdef/weights");
    file("mgpurun-0123456789abcdef/nested/rendezvous");
    // Names exactly like a launcher's.
    file("mgpurun-socket-0123456789abcdef/weights");
    file("mgpurun-socket-0000000000000000/rendezvous");
    file("mgpurun-socket-1111111111111111/rendezvous/weights");
    file("mgpurun-socket-2222222222222222");
    file("mgpurun-socket-3333333333333333-1/weights");
    file("mgpurun-socket-FFFFFFFFFFFFFFFF/weights");
    for entry in fs::read_dir(base).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o700)).unwrap();
    }
    symlink("mgpurun-checkpoints", base.join("mgpurun-socket-4444444444444444")).unwrap();
    let linked = base.join("mgpurun-socket-5555555555555555");
    fs::create_dir(&linked).unwrap();
    symlink("../mgpurun-socket-0000000000000000/rendezvous", linked.join("rendezvous")).unwrap();
    drop(UnixListener::bind(base.join("mgpurun-socket-0123456789abcdef/rendezvous")).unwrap());
}

/// All paths below `base`, sorted.
fn paths(base: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(base).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            found.extend(paths(&entry.path()));
        }
        found.push(entry.path());
    }
    found.sort();
    found
}

#[test]
fn cleanup_removes_the_folder_of_a_killed_launcher_and_no_foreign_files() {
    let (temporary, runtime) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bases = [temporary.path(), runtime.path()];
    bases.iter().for_each(|base| put_foreign_files(base));
    let before = bases.map(paths);
    for base in bases {
        let abandoned = base.join("mgpurun-socket-fedcba9876543210");
        fs::create_dir(&abandoned).unwrap();
        fs::set_permissions(&abandoned, fs::Permissions::from_mode(0o700)).unwrap();
        drop(UnixListener::bind(abandoned.join("rendezvous")).unwrap());
    }
    for arguments in [&["-n", "2", "true"][..], &["doctor"], &["-n", "1", "false"]] {
        let mut launcher = command(LAUNCHER);
        launcher.args(arguments).env("TMPDIR", bases[0]).env("XDG_RUNTIME_DIR", bases[1]);
        run(&mut launcher);
        assert_eq!(bases.map(paths), before, "{arguments:?}");
    }
    assert_eq!(fs::read(bases[0].join("mgpurun-checkpoints/step-1/weights")).unwrap(), b"kept");
}

#[test]
fn few_descriptors_leave_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    let codes: Vec<Option<i32>> = (4..40)
        .map(|files| {
            let finished = limited(folder.path(), &format!("ulimit -n {files}"), &["-n", "2", "true"]);
            assert_eq!(paths(folder.path()), [] as [PathBuf; 0], "{files}: {finished:#?}");
            finished.code
        })
        .collect();
    assert!(codes.contains(&Some(1)) && codes.ends_with(&[Some(0)]), "{codes:?}");
}

#[test]
fn the_launcher_takes_all_descriptors_and_ranks_get_the_users_limits() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo $(ulimit -Sn) $(ulimit -Hn); grep 'open files' /proc/$PPID/limits";
    let words = ["-n", "1", "--no-prefix", "sh", "-c", script];
    let finished = limited(folder.path(), "ulimit -Sn 30 && ulimit -Hn 300", &words);
    finished.expect(0, &[]);
    let words: Vec<&str> = finished.stdout.split_whitespace().collect();
    assert_eq!(words, ["30", "300", "Max", "open", "files", "300", "300", "files"], "{finished:#?}");
    // More ranks than 30 descriptors suffice for.
    limited(folder.path(), "ulimit -Sn 30 && ulimit -Hn 300", &["-n", "16", "true"]).expect(0, &[]);
}

#[test]
fn a_file_size_limit_ends_the_log_but_not_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let script = "head -c 300000 /dev/zero | tr '\\0' '\\n'; echo done $RANK >&2";
    let logged = ["-n", "2", "--log-dir", "logs", "--events", "events", "sh", "-c", script];
    let finished = limited(folder.path(), "ulimit -f 100", &logged);
    finished.expect(0, &["the log of rank 0 ends here: File too large", "the log of rank 1 ends here"]);
    assert_eq!(fs::metadata(folder.path().join("logs/rank-1.log")).unwrap().len(), 102_400);
    assert!(fs::read_to_string(folder.path().join("events")).unwrap().contains("\"exit_code\":0"));

    let shown = ["-n", "2", "--no-prefix", "sh", "-c", script];
    let finished = limited(folder.path(), "exec >shown; ulimit -f 100", &shown);
    finished.expect(0, &["done 0", "done 1", "standard output", "File too large"]);
    assert_eq!(fs::metadata(folder.path().join("shown")).unwrap().len(), 102_400);

    // A rank gets the signal as it would without a launcher.
    let finished = limited(folder.path(), "ulimit -f 100", &["-n", "1", "sh", "-c", "exec yes >big"]);
    finished.expect(153, &["rank 0 was killed by SIGXFSZ"]);
}

#[test]
fn shared_memory_beyond_the_file_size_limit_is_a_named_error() {
    let folder = tempfile::tempdir().unwrap();
    let named = "raise the limit with `ulimit -f`";
    let finished = limited(folder.path(), "ulimit -f 1", &["-n", "2", "true"]);
    finished.expect(1, &["files are limited to 1024 bytes", named]);
    let finished = limited(folder.path(), "ulimit -f 64", &["-n", "2", env!("CARGO_BIN_EXE_t-job")]);
    assert!(!finished.stderr.contains("SIGXFSZ") && finished.stderr.contains(named), "{finished:#?}");
    assert_ne!(finished.code, Some(0));
    assert_eq!(paths(folder.path()), [] as [PathBuf; 0]);
}

#[test]
fn a_missing_proc_file_system_is_named() {
    let isolated = |arguments: &[&str]| -> Command {
        let mut isolated = command("unshare");
        isolated.args(["--mount", "sh", "-c", "mount -t tmpfs none /proc && exec \"$@\"", "sh"]);
        isolated.args(arguments);
        isolated
    };
    if run(&mut isolated(&["true"])).code != Some(0) {
        return eprintln!("skipped: this user may not mount anything over /proc");
    }
    run(&mut isolated(&[LAUNCHER, "-n", "1", "true"]))
        .expect(1, &["cannot read /proc/self/task: No such file or directory", "is /proc mounted?"]);
    let finished = run(&mut isolated(&[LAUNCHER, "ps"]));
    finished.expect(1, &["cannot print the runs: cannot read /proc/self: ", "is /proc mounted?"]);
    assert_eq!(finished.stdout, "");
    run(&mut isolated(&[LAUNCHER, "doctor"])).expect(1, &["cpu cannot be used (/proc is missing)"]);
}
