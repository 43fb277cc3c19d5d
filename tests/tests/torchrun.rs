//! torchrun's command lines: `mgpurun` takes torchrun's place in them.
//!
//! The table in docs/src/launcher.md says what each option of torchrun does here. The programs agree with it, and with
//! torchrun's own parser where a Python with PyTorch is found: in the variable `MGPU_TORCH_PYTHON`, among the peers of the
//! benchmarks, or in PATH.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use mgpu_tests::process::{Finished, command, run, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A shell that takes a script for Python's: `python3 SCRIPT`, `python3 -m MODULE`.
const PYTHON: &str = r#"#!/bin/sh
echo "python3 $*; rank $RANK of $WORLD_SIZE, local $LOCAL_RANK, role $ROLE_NAME"
"#;

/// A folder with an interpreter `python3` that prints how it was called, and scripts.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str, mode| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    };
    write("python3", PYTHON, 0o755);
    write("train.py", "print()\n", 0o644);
    write("with a space.py", "print()\n", 0o644);
    write("own.py", "#!/bin/sh\necho \"itself $*\"\n", 0o755);
    folder
}

/// A launcher in `folder`, which is first in PATH.
fn launcher(folder: &Path, words: &[&str]) -> Command {
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    let path = std::env::var("PATH").unwrap_or_default();
    launcher.current_dir(folder).env("PATH", format!("{}:{path}", folder.display())).args(words);
    launcher
}

/// The lines that the ranks print, sorted.
#[track_caller]
fn lines(folder: &Path, words: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
    let finished = run(launcher(folder, &["--no-prefix"]).args(words).envs(variables.iter().copied()));
    finished.expect(0, &[]);
    let mut lines: Vec<String> = finished.stdout.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn python(call: &str, ranks: u32) -> Vec<String> {
    let line = |rank| format!("python3 {call}; rank {rank} of {ranks}, local {rank}, role default");
    (0..ranks).map(line).collect()
}

#[test]
fn scripts_and_modules_are_run_by_python() {
    let folder = folder();
    let lines = |words: &[&str], variables: &[(&str, &str)]| lines(folder.path(), words, variables);
    let line = ["--standalone", "--nproc_per_node=2", "train.py", "--nproc-per-node", "9"];
    assert_eq!(lines(&line, &[]), python("train.py --nproc-per-node 9", 2));
    assert_eq!(lines(&["-n", "2", "-m", "package.module", "-m"], &[]), python("-m package.module -m", 2));
    assert_eq!(lines(&["with a space.py"], &[]), python("with a space.py", 1));
    assert_eq!(lines(&["train.py"], &[("PET_NPROC_PER_NODE", "2")]), python("train.py", 2));
    assert_eq!(lines(&["module"], &[("PET_MODULE", "1")]), python("-m module", 1));
    // An executable script starts itself, unless the line is one of torchrun.
    assert_eq!(lines(&["own.py", "x"], &[]), ["itself x"]);
    assert_eq!(lines(&["--role", "default", "./own.py", "x"], &[]), python("./own.py x", 1));
    assert_eq!(lines(&["--no-python", "--nproc-per-node", "1", "./own.py", "x"], &[]), ["itself x"]);
    let called = lines(&["--run-path", "own.py", "x"], &[]).remove(0);
    assert!(called.starts_with("python3 -c import runpy") && called.contains("own.py x; rank 0"), "{called}");
    // Several jobs, each with its own options; `nothing.py` is an argument.
    let jobs = ["--role", "a", "train.py", ":", "-m", "module", ":", "nothing.py"];
    let expected = [
        "python3 -m module : nothing.py; rank 0 of 1, local 0, role default",
        "python3 train.py; rank 0 of 1, local 0, role a",
    ];
    assert_eq!(lines(&jobs, &[]), expected);
    // Any word can name a module, so a variable alone does not make the words behind a `:` a job.
    let jobs = ["module", "--ratio", "3", ":", "4"];
    assert_eq!(lines(&jobs, &[("PET_MODULE", "1")]), python("-m module --ratio 3 : 4", 1));
    let jobs = ["module", ":", "-m", "other", "x"];
    let expected = [python("-m module", 1), python("-m other x", 1)].concat();
    assert_eq!(lines(&jobs, &[("PET_MODULE", "1")]), expected);
    let other = folder.path().join("python4");
    symlink("python3", &other).unwrap();
    assert_eq!(lines(&["train.py"], &[("PYTHON_EXEC", other.to_str().unwrap())]), python("train.py", 1));
}

#[test]
fn what_cannot_be_started_is_named() {
    let folder = folder();
    let refused = |words: &[&str], variables: &[(&str, &str)]| {
        run(launcher(folder.path(), words).envs(variables.iter().copied()))
    };
    refused(&["nothing.py"], &[])
        .expect(1, &["no script `nothing.py`: looked in the current folder and PATH"]);
    refused(&["--run-path", "nothing.py"], &[]).expect(1, &["no program at nothing.py"]);
    refused(&["--no-python", "./train.py"], &[]).expect(1, &["./train.py is not executable"]);
    refused(&["-m", "x"], &[("PATH", "/nowhere")]).expect(1, &["x is run by python3", "PYTHON_EXEC"]);
    refused(&["train.py"], &[("PYTHON_EXEC", "/nowhere/python")])
        .expect(1, &["no program at /nowhere/python"]);
    refused(&["-m", "--no-python", "x"], &[]).expect(2, &["leave one of them out"]);
    let text =
        "the `:` before `-m --no-python x` is passed to the program as an argument, since --module runs";
    refused(&["--dry-run", "train.py", ":", "-m", "--no-python", "x"], &[]).expect(0, &[text]);
    let text = "the `:` before `-n 2 x` is passed to the program as an argument, since a module behind";
    refused(&["--dry-run", "m", ":", "-n", "2", "x"], &[("PET_MODULE", "1")]).expect(0, &[text]);
    refused(&["true"], &[("PET_REDIRECTS", "7")]).expect(2, &["the variable PET_REDIRECTS is `7`"]);
    refused(&["--tee", "3"], &[]).expect(2, &["PROGRAM"]);
    let finished = refused(&["--print-completion", "bash"], &[]);
    finished.expect(0, &["mgpurun completions SHELL prints a script"]);
    assert_eq!(finished.stdout, "");
}

#[test]
fn the_port_and_the_name_of_a_job_on_one_node_can_be_chosen() {
    let folder = folder();
    let print = ["--rdzv-id", "job7", "--no-python", "sh", "-c", "echo $MASTER_PORT $TORCHELASTIC_RUN_ID"];
    let start = |port: &str| {
        let words = ["--nnodes", "1", "--nproc-per-node", "2", "--no-prefix", "--master-port", port];
        run(&mut launcher(folder.path(), &[&words[..], &print].concat()))
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let who = format!("process {} (", std::process::id());
    start(&port).expect(1, &[&format!("--master-port is {port}: "), "in use", &who, "ss -ltnp"]);
    drop(listener);
    let finished = start(&port);
    finished.expect(0, &[]);
    assert_eq!(finished.stdout, format!("{port} job7\n").repeat(2));
    let free = start("0");
    free.expect(0, &[" job7\n"]);
    assert!(!free.stdout.starts_with("0 "), "{free:#?}");
    start("x").expect(2, &["it should be a port from 1 to 65535"]);
    let two_jobs = ["--master-port", &port, "true", ":", "true"];
    run(&mut launcher(folder.path(), &two_jobs)).expect(2, &["this command line has 2 jobs"]);
    run(&mut launcher(folder.path(), &["--master-port", "0", "true", ":", "true"])).expect(0, &[]);
    let one_world = ["--one-world", "--master-port", &port, "sh", "-c", "echo $MASTER_PORT", ":", "true"];
    run(&mut launcher(folder.path(), &one_world)).expect(0, &[&port]);
}

/// Kubeflow's variables, in a container where another launch uses the port.
#[test]
fn a_port_of_the_environment_does_not_stop_another_launch() {
    let folder = folder();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let start = |words: &[&str]| {
        let mut launcher = launcher(folder.path(), words);
        run(launcher.env("PET_NNODES", "1").env("PET_MASTER_PORT", &port))
    };
    start(&["true"]).expect(1, &[&format!("PET_MASTER_PORT is {port}: "), "in use"]);
    start(&["--standalone", "true"]).expect(0, &[]);
    start(&["true", ":", "true"]).expect(0, &[]);
}

/// Each rank writes `out N` and `err N`.
const STREAMS: &str = "echo out $RANK; echo err $RANK >&2";

/// The names and contents of the files in a folder, sorted.
fn files(folder: &Path) -> Vec<(String, String)> {
    let read = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read_to_string(entry.path()).unwrap())
    };
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| read(entry.unwrap())).collect();
    files.sort();
    files
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn streams_are_redirected_and_teed() {
    let folder = folder();
    let start = |options: &[&str]| -> Finished {
        let words = [&["-n", "2", "--no-prefix"], options, &["--", "sh", "-c", STREAMS]].concat();
        let finished = run(launcher(folder.path(), &words).env("TMPDIR", folder.path()));
        finished.expect(0, &[]);
        finished
    };
    let names = |dir: &str| -> Vec<String> {
        files(&folder.path().join(dir)).into_iter().map(|(name, _)| name).collect()
    };
    // Both streams of both ranks go to files; standard output of rank 1 is shown, too.
    let finished = start(&["-r", "3", "-t", "1:1", "--log_dir", "a"]);
    assert_eq!((sorted(&finished.stdout), &*finished.stderr), (vec!["out 1"], ""));
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let expected = [
        file("rank-0.stderr.log", "err 0\n"),
        file("rank-0.stdout.log", "out 0\n"),
        file("rank-1.stderr.log", "err 1\n"),
        file("rank-1.stdout.log", "out 1\n"),
    ];
    assert_eq!(files(&folder.path().join("a")), expected);
    // The word behind --tee is its value if it has the form of one.
    let finished = start(&["--log-dir", "b", "--tee", "2"]);
    assert_eq!(
        (sorted(&finished.stdout), sorted(&finished.stderr)),
        (vec!["out 0", "out 1"], vec!["err 0", "err 1"])
    );
    assert_eq!(names("b"), ["rank-0.stderr.log", "rank-1.stderr.log"]);
    start(&["--log-dir", "c", "--tee"]);
    assert_eq!(names("c"), ["rank-0.log", "rank-1.log"]);
    // The filter concerns what is shown. An option of torchrun makes --log-dir show the output, too.
    let finished = start(&["--log-dir", "d", "--local-ranks-filter", "1"]);
    assert_eq!((sorted(&finished.stdout), names("d").len()), (vec!["out 1"], 2));
    // Without a folder there is a new one.
    let finished = start(&["-r", "0:1"]);
    let (_, place) = finished.stderr.split_once("the logs are in ").expect("the place of the logs");
    let place = PathBuf::from(place.lines().next().unwrap());
    assert!(place.starts_with(folder.path()), "{place:?}");
    assert_eq!(files(&place), [file("rank-0.stdout.log", "out 0\n")]);
    assert_eq!((sorted(&finished.stdout), finished.stderr.contains("err 0")), (vec!["out 1"], true));
}

/// Writes what `@record` writes.
const RECORD: &str = r#"printf '{"message": {"message": "ValueError: 7", "extraInfo": {"py_callstack": "Traceback:\\n  in main\\nValueError: 7\\n", "timestamp": "1"}}}' > "$TORCHELASTIC_ERROR_FILE""#;

#[test]
fn the_recorded_error_of_the_culprit_is_shown() {
    let folder = folder();
    let start = |options: &[&str], script: &str| {
        let words = [&["-n", "2"], options, &["sh", "-c", script]].concat();
        run(launcher(folder.path(), &words).env("TMPDIR", folder.path()).env_remove("XDG_RUNTIME_DIR"))
    };
    let shown = "the error of rank 1:\n    Traceback:\n      in main\n    ValueError: 7\n";
    let failing = format!("[ $RANK = 1 ] && {{ {RECORD}; echo last; exit 5; }}; sleep 100");
    let finished = start(&[], &failing);
    finished.expect(5, &["rank 1 exited with code 5", shown]);
    assert!(!finished.stderr.contains("the last lines"), "{finished:#?}");
    // Every attempt has files of its own.
    let first_fails = format!("[ $MGPU_RESTART_COUNT = 0 ] && {{ {RECORD}; exit 5; }}; exit 6");
    let finished = start(&["--max-restarts", "1"], &first_fails);
    finished.expect(6, &["ValueError: 7", "exited with code 6", "has written nothing"]);
    // An old error, and one of a killed rank, do not hide the last lines.
    let old = "touch -d '1 hour ago' \"$TORCHELASTIC_ERROR_FILE\"";
    for (end, text) in
        [(format!("{old}; exit 5"), "ValueError: 7"), ("kill -KILL $$".to_owned(), "    ValueError: 7")]
    {
        let script = format!("[ $RANK = 1 ] && {{ {RECORD}; echo last; {end}; }}; sleep 100");
        let finished = start(&[], &script);
        let lines = "the last lines of rank 1:\n    last\n";
        finished.expect(finished.code.unwrap(), &[lines, "an error that rank 1 had recorded", text]);
        assert!(!finished.stderr.contains("the error of rank"), "{finished:#?}");
        assert_eq!(finished.stderr.contains("recorded 36"), end.starts_with("touch"), "{finished:#?}");
    }
    // Anything else in the file is ignored.
    start(&[], "echo garbage > $TORCHELASTIC_ERROR_FILE; echo last; exit 4")
        .expect(4, &["the last lines of rank", "    last"]);
    // The files and their folders are gone, also after a kill of the launcher.
    let left = || {
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_str().unwrap().starts_with("mgpurun")).count()
    };
    assert_eq!(left(), 0);
    let script = format!("{RECORD}; echo > ready; exec sleep 100");
    let mut launcher = launcher(folder.path(), &["-n", "1", "sh", "-c", &script]);
    let mut child = launcher.env("TMPDIR", folder.path()).env_remove("XDG_RUNTIME_DIR").spawn().unwrap();
    until(|| folder.path().join("ready").exists());
    assert_eq!(left(), 1);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    until(|| left() == 0);
}

#[test]
fn listed_signals_are_forwarded() {
    let folder = folder();
    let script = "trap 'echo got it > got; exit 0' XCPU; echo > ready; while :; do sleep 0.05; done";
    let words = ["-n", "1", "--signals-to-handle", "SIGTERM,SIGXCPU", "sh", "-c", script];
    let mut child = launcher(folder.path(), &words).spawn().unwrap();
    until(|| folder.path().join("ready").exists());
    kill(Pid::from_raw(child.id() as i32), Signal::SIGXCPU).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(folder.path().join("got").exists());
}

/// The options in the table of docs/src/launcher.md, with what they do here.
fn table() -> Vec<(String, String)> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/launcher.md");
    let text = fs::read_to_string(page).unwrap();
    let (_, section) = text.split_once("### torchrun's command lines").expect("the section");
    let (section, _) = section.split_once("\n## ").expect("its end");
    let mut options = Vec::new();
    for row in section.lines().filter(|line| line.starts_with("| `-")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let names = cells[1].split('`').filter(|name| name.starts_with("--"));
        options.extend(names.map(|name| (name.to_owned(), cells[2].to_owned())));
    }
    options
}

/// The options of PyTorch 2.15's torchrun, with a value.
const OPTIONS: [(&str, &str); 32] = [
    ("--nnodes", "1"),
    ("--nproc-per-node", "1"),
    ("--rdzv-backend", "c10d"),
    ("--rdzv-endpoint", "localhost:0"),
    ("--rdzv-id", "7"),
    ("--rdzv-conf", "timeout=3"),
    ("--standalone", ""),
    ("--max-restarts", "1"),
    ("--monitor-interval", "0.1"),
    ("--start-method", "spawn"),
    ("--event-log-handler", "console"),
    ("--role", "trainer"),
    ("--module", ""),
    ("--no-python", ""),
    ("--run-path", ""),
    ("--log-dir", "logs"),
    ("--redirects", "3"),
    ("--tee", "0:3,1:0"),
    ("--log-line-prefix-template", "x"),
    ("--local-ranks-filter", "0,1"),
    ("--duplicate-stdout-filters", "a,b"),
    ("--duplicate-stderr-filters", "a"),
    ("--node-rank", "0"),
    ("--master-addr", "127.0.0.1"),
    ("--master-port", "29500"),
    ("--local-addr", "127.0.0.1"),
    ("--logs-specs", "x"),
    ("--numa-binding", "node"),
    ("--signals-to-handle", "SIGTERM,SIGUSR1"),
    ("--shutdown-timeout", "10"),
    ("--virtual-local-rank", ""),
    ("--print-completion", "bash"),
];

#[test]
fn options_do_what_the_table_says() {
    let (folder, table) = (folder(), table());
    assert_eq!(table.len(), OPTIONS.len(), "{table:?}");
    for (option, value) in OPTIONS {
        let (_, here) =
            table.iter().find(|(name, _)| name == option).unwrap_or_else(|| panic!("no {option}"));
        for spelling in [option.to_owned(), format!("--{}", option[2..].replace('-', "_"))] {
            // Both ways to write a value.
            for is_joined in [false, true] {
                let mut words = vec![spelling.clone()];
                match value {
                    "" => {}
                    value if is_joined => words[0] += &format!("={value}"),
                    value => words.push(value.to_owned()),
                }
                words.extend(["--dry-run", "own.py"].map(str::to_owned));
                if option == "--print-completion" {
                    words.truncate(words.len() - 2);
                }
                let finished = run(launcher(folder.path(), &[]).args(&words));
                let has_effect =
                    !(finished.stdout + &finished.stderr).contains(&format!("{option} has no effect"));
                let is_useless_alone =
                    ["--node-rank", "--rdzv-endpoint", "--master-addr", "--local-addr"].contains(&option);
                let expected = match here.as_str() {
                    "yes" => (Some(0), !is_useless_alone),
                    "no effect" => (Some(0), false),
                    "error" => (Some(2), true),
                    other => panic!("{option} has `{other}` in the table"),
                };
                assert_eq!((finished.code, has_effect), expected, "{words:?}");
            }
        }
    }
}

/// Prints the options of torchrun's parser.
const PARSER: &str = "\
from torch.distributed.run import get_args_parser
for action in get_args_parser()._actions:
    names = [name for name in action.option_strings if name.startswith('--') and '_' not in name]
    if names and names[0] != '--help':
        print(names[0])
";

/// A Python that has PyTorch, and the options of its torchrun.
fn parser() -> Option<(PathBuf, Vec<String>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let peers = std::env::var_os("MGPU_PEERS").map_or(root.join("target/peers"), PathBuf::from);
    let named = std::env::var_os("MGPU_TORCH_PYTHON").map(PathBuf::from);
    let pythons = named.into_iter().chain([
        peers.join("v/bin/python"),
        root.join("target/clients/v/bin/python"),
        "python3".into(),
    ]);
    let options = |python: &PathBuf| {
        let output = Command::new(python)
            .args(["-c", PARSER])
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    pythons.into_iter().find_map(|python| Some((python.clone(), options(&python)?)))
}

#[test]
fn the_table_has_every_option_of_torchrun() {
    let Some((python, options)) = parser() else {
        println!("skipped: no Python with PyTorch; MGPU_TORCH_PYTHON names one");
        return;
    };
    println!("torchrun of {}", python.display());
    assert!(options.len() >= 20, "{options:?}");
    let table = table();
    let missing: Vec<&String> =
        options.iter().filter(|option| table.iter().all(|(name, _)| name != *option)).collect();
    assert_eq!(missing, [] as [&String; 0], "options of torchrun that docs/src/launcher.md does not have");
}
