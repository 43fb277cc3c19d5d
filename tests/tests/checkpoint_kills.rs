//! A checkpoint writer killed before or after any system call of a write loses no checkpoint.
//!
//! A killed process does not lose the page cache, as a power failure would. So the recorded system calls are checked
//! for flushes before every dependency.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use mgpu::checkpoint::{self, Checkpoint, Writer};
use mgpu_tests::checkpoints::{identify, snapshot};
use mgpu_tests::process::command;
use mgpu_tests::tracer::{Action, ProgramEnd, SyscallStop, trace};
use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::Signal;
use tempfile::TempDir;

/// The contents of the folder, and what is written.
struct Scenario {
    name: &'static str,
    /// Steps of the existing checkpoints, all of run 1.
    there: &'static [u64],
    /// Whether killed writers have left files.
    leftovers: bool,
    /// Whether an old checkpoint contains foreign notes.
    notes: bool,
    keep: usize,
    /// The step to write, of run 2.
    step: u64,
}

const SCENARIOS: [Scenario; 5] = [
    Scenario { name: "the first one", there: &[], leftovers: false, notes: false, keep: 2, step: 10 },
    Scenario { name: "an old one goes", there: &[10, 20], leftovers: true, notes: false, keep: 2, step: 30 },
    Scenario { name: "the only one goes", there: &[10], leftovers: false, notes: false, keep: 1, step: 20 },
    Scenario { name: "the same step again", there: &[20], leftovers: false, notes: false, keep: 1, step: 20 },
    Scenario { name: "one with notes goes", there: &[10], leftovers: false, notes: true, keep: 1, step: 20 },
];

/// A foreign file in the checkpoint after 10 steps.
const NOTES: &str = "step-00000010/notes";

impl Scenario {
    /// Creates a folder to write to, in `parent`.
    fn prepare(&self, parent: &Path) -> PathBuf {
        let folder = parent.join("on/the/way");
        if !self.there.is_empty() {
            let mut writer = Writer::new(&folder, self.there.len()).unwrap();
            self.there.iter().for_each(|step| writer.save(snapshot(*step, 1)).unwrap());
            writer.finish().unwrap();
        }
        if self.leftovers {
            let half = self.leave(&folder, 25, "partial", "manifest.json").join("weights.safetensors");
            let bytes = fs::read(&half).unwrap();
            fs::write(half, &bytes[..bytes.len() / 2]).unwrap();
            self.leave(&folder, 5, "removed", "weights.safetensors");
        }
        if self.notes {
            fs::write(folder.join(NOTES), "mine").unwrap();
        }
        folder
    }

    /// Creates the remains of a killed writer: a checkpoint without one of its files. Returns its path.
    fn leave(&self, folder: &Path, step: u64, suffix: &str, lacks: &str) -> PathBuf {
        let other = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(other.path(), 1).unwrap();
        writer.save(snapshot(step, 1)).unwrap();
        let left = folder.join(format!(".step-{step:08}.{suffix}"));
        copy(&writer.finish().unwrap().unwrap(), &left);
        fs::remove_file(left.join(lacks)).unwrap();
        left
    }

    /// Runs the writing program.
    fn write(&self, folder: &Path, at: impl FnMut(&SyscallStop) -> Action) -> Result<ProgramEnd, Errno> {
        let mut program = command(env!("CARGO_BIN_EXE_t-checkpoint"));
        program.arg(folder).args([self.keep as u64, self.step, 2].map(|number| number.to_string()));
        trace(&mut program, libc::SYS_getppid, at)
    }

    /// Checks the invariants after a kill. Returns whether the new checkpoint exists.
    fn check(&self, folder: &Path) -> bool {
        let found = checkpoint::find(folder).unwrap();
        let Some(found) = found else {
            assert!(self.there.is_empty(), "all checkpoints are lost");
            return false;
        };
        assert!(found.damaged.is_empty(), "{:?}", found.damaged);
        // Every checkpoint with a final name must be complete, not only the newest.
        for name in self.checkpoints(folder).iter().filter(|name| name.starts_with("step-")) {
            let checkpoint = Checkpoint::open(folder.join(name)).unwrap();
            checkpoint.verify().unwrap();
            identify(&checkpoint);
        }
        let newest = identify(&found.checkpoint);
        let old = self.there.last().map(|step| (*step, 1));
        assert!(newest == (self.step, 2) || Some(newest) == old, "{newest:?}");
        newest == (self.step, 2)
    }

    /// All names in the folder, except a folder with nothing but notes.
    fn checkpoints(&self, folder: &Path) -> BTreeSet<String> {
        let mut names = names(folder);
        if self.notes && self::names(&folder.join("step-00000010")).iter().all(|name| name == "notes") {
            names.remove("step-00000010");
        }
        names
    }

    /// The next run writes normally.
    fn go_on(&self, folder: &Path, new: bool) {
        let mut writer = Writer::new(folder, self.keep).unwrap();
        writer.save(snapshot(40, 3)).unwrap();
        writer.finish().unwrap();
        assert_eq!(identify(&checkpoint::find(folder).unwrap().unwrap().checkpoint), (40, 3));
        let steps: BTreeSet<u64> =
            self.there.iter().copied().chain(new.then_some(self.step)).chain([40]).collect();
        let kept = steps.iter().skip(steps.len().saturating_sub(self.keep));
        assert_eq!(self.checkpoints(folder), kept.map(|step| format!("step-{step:08}")).collect());
        assert!(!self.notes || fs::read_to_string(folder.join(NOTES)).unwrap() == "mine");
    }
}

/// Copies a folder if it exists.
fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).into_iter().flatten() {
        let from = entry.unwrap().path();
        let to = to.join(from.file_name().unwrap());
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(&from, &to).unwrap();
        }
    }
}

/// Empty if there is no such folder.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Whether tracing is forbidden here; prints that the test is skipped.
fn forbidden<T>(result: &Result<T, Errno>) -> bool {
    let forbidden = matches!(result, Err(Errno::EPERM));
    if forbidden {
        eprintln!("skipped: this environment forbids ptrace");
    }
    forbidden
}

/// A folder in memory if possible, where flushing takes no time: a killed process loses nothing that it has written.
fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

#[test]
fn a_writer_killed_at_any_system_call_loses_no_checkpoint() {
    for scenario in &SCENARIOS {
        // The number of stops of each thread without a kill.
        let mut stops = [0; 2];
        let parent = in_memory();
        let folder = scenario.prepare(parent.path());
        let ended = scenario.write(&folder, |stop| {
            stops[stop.thread] = stop.index + 1;
            Action::Continue
        });
        if forbidden(&ended) {
            return;
        }
        assert_eq!(ended, Ok(ProgramEnd::Exited(0)));
        assert!(scenario.check(&folder));
        let made = in_memory();
        let template = scenario.prepare(made.path());
        let (mut killed, mut with_new) = (0, 0);
        for (thread, index) in (0..2).flat_map(|thread| (0..stops[thread]).map(move |index| (thread, index)))
        {
            let parent = in_memory();
            let folder = parent.path().join("on/the/way");
            copy(&template, &folder);
            let mut call = None;
            let ended = scenario.write(&folder, |stop| {
                let here = (stop.thread, stop.index) == (thread, index);
                call = call.or(here.then_some((stop.call, stop.before)));
                if here { Action::Kill } else { Action::Continue }
            });
            let place = format!("{}: thread {thread}, stop {index}, {call:?}", scenario.name);
            match ended.unwrap() {
                ProgramEnd::Killed(Signal::SIGKILL) => killed += 1,
                // How often threads wait for each other varies between runs.
                ProgramEnd::Exited(0) if call.is_none() => {}
                other => panic!("{place}: {other:?}"),
            }
            let checked = std::panic::catch_unwind(|| {
                let new = scenario.check(&folder);
                scenario.go_on(&folder, new);
                new
            });
            with_new += usize::from(checked.unwrap_or_else(|_| panic!("{place}")));
        }
        println!("{}: killed {killed} times, the new one was there {with_new} times", scenario.name);
        assert!(
            killed > 50 && (1..killed).contains(&with_new),
            "{killed} kills, {with_new} with the new one"
        );
    }
}

/// The effect of a system call on the folder or its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
enum FileOp {
    /// A file or folder is created.
    Make(PathBuf),
    Write(PathBuf),
    /// A file's content or a folder's entries are flushed to disk.
    Flush(PathBuf),
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
    Exchange(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl FileOp {
    /// The effect of a call before it runs; `None` if it changes no file.
    fn of(stop: &SyscallStop) -> Option<FileOp> {
        Some(match stop.call {
            libc::SYS_openat if stop.argument(2) & libc::O_CREAT as u64 != 0 => {
                FileOp::Make(stop.path(Some(0), 1))
            }
            libc::SYS_mkdir => FileOp::Make(stop.path(None, 0)),
            libc::SYS_mkdirat => FileOp::Make(stop.path(Some(0), 1)),
            libc::SYS_write | libc::SYS_writev | libc::SYS_pwrite64 => FileOp::Write(stop.file(0)),
            libc::SYS_fsync | libc::SYS_fdatasync => FileOp::Flush(stop.file(0)),
            libc::SYS_rename => FileOp::Rename { from: stop.path(None, 0), to: stop.path(None, 1) },
            libc::SYS_renameat => FileOp::Rename { from: stop.path(Some(0), 1), to: stop.path(Some(2), 3) },
            // The flags in its fifth argument are not checked: std does not use this call, and the runtime only
            // exchanges with it.
            libc::SYS_renameat2 => FileOp::Exchange(stop.path(Some(0), 1), stop.path(Some(2), 3)),
            libc::SYS_unlink | libc::SYS_rmdir => FileOp::Remove(stop.path(None, 0)),
            libc::SYS_unlinkat => FileOp::Remove(stop.path(Some(0), 1)),
            _ => return None,
        })
    }
}

/// The file operations of a whole write, with their threads.
fn record(scenario: &Scenario, folder: &Path) -> Result<Vec<(usize, FileOp)>, Errno> {
    let (mut ops, mut begun) = (Vec::new(), [None, None]);
    let ended = scenario.write(folder, |stop| {
        if stop.before {
            begun[stop.thread] = FileOp::of(stop);
        } else if let Some(op) = begun[stop.thread].take().filter(|_| stop.succeeded()) {
            ops.push((stop.thread, op));
        }
        Action::Continue
    })?;
    assert_eq!(ended, ProgramEnd::Exited(0));
    Ok(ops)
}

/// Asserts that every dependency was flushed before.
fn assert_flushed(ops: &[FileOp], folder: &Path) {
    let position = |from: usize, wanted: &FileOp| {
        let place = ops[from..].iter().position(|op| op == wanted);
        from + place.unwrap_or_else(|| panic!("no {wanted:?} after number {from} of {ops:#?}"))
    };
    let hidden = |path: &Path| {
        let inside = path.strip_prefix(folder).unwrap_or_else(|_| panic!("{} is elsewhere", path.display()));
        inside.to_string_lossy().starts_with('.')
    };
    let of_folder = FileOp::Flush(folder.to_owned());
    let is_final = |path: &Path| path.parent() == Some(folder) && !hidden(path) && path.extension().is_none();
    let mut named = 0;
    for (index, op) in ops.iter().enumerate() {
        match op {
            // A checkpoint gets its final name.
            FileOp::Rename { from, to } | FileOp::Exchange(from, to) if is_final(to) => {
                named += 1;
                let files: Vec<&PathBuf> = ops[..index]
                    .iter()
                    .filter_map(|op| match op {
                        FileOp::Make(path) if path.parent() == Some(from) => Some(path),
                        _ => None,
                    })
                    .collect();
                assert_eq!(files.len(), 3, "two arenas and a manifest: {files:?}");
                for file in files {
                    let written = ops.iter().rposition(|op| *op == FileOp::Write(file.clone()));
                    let flushed = position(written.expect("a write"), &FileOp::Flush(file.clone()));
                    let entered = position(flushed, &FileOp::Flush(from.clone()));
                    assert!(entered < index, "{} was not on the disk: {ops:#?}", file.display());
                }
                // Nothing is removed before the new name is flushed.
                let flushed = position(index, &of_folder);
                for op in &ops[index + 1..flushed] {
                    assert!(
                        !matches!(op, FileOp::Rename { .. } | FileOp::Exchange(..) | FileOp::Remove(_)),
                        "{op:?}"
                    );
                }
            }
            // A checkpoint loses its name.
            FileOp::Rename { from, to } => {
                assert!(is_final(from) && hidden(to), "{op:?}");
                let removed =
                    ops.iter().position(|op| matches!(op, FileOp::Remove(path) if path.starts_with(to)));
                assert!(position(index, &of_folder) < removed.expect("it is removed"), "{ops:#?}");
            }
            FileOp::Exchange(..) => panic!("{op:?}"),
            FileOp::Make(path) | FileOp::Remove(path) | FileOp::Write(path) => {
                assert!(folder.starts_with(path) || hidden(path), "under a final name: {op:?}");
            }
            FileOp::Flush(_) => {}
        }
    }
    assert_eq!(named, 1, "{ops:#?}");
}

#[test]
fn every_dependency_is_flushed_before_use_and_by_another_thread() {
    // Foreign files are moved, which no checkpoint depends on.
    for scenario in SCENARIOS.iter().filter(|scenario| !scenario.notes) {
        let parent = tempfile::tempdir().unwrap();
        let folder = scenario.prepare(&parent.path().canonicalize().unwrap());
        let recorded = record(scenario, &folder);
        if forbidden(&recorded) {
            return;
        }
        let recorded = recorded.unwrap();
        // The training thread creates the folder and cleans it up before training.
        let first = recorded.iter().position(|(thread, _)| *thread == 1).expect("a thread that writes");
        assert!(recorded[first..].iter().all(|(thread, _)| *thread == 1), "{recorded:#?}");
        for (_, op) in &recorded[..first] {
            let made_or_cleaned = match op {
                FileOp::Make(path) => folder.starts_with(path),
                FileOp::Flush(path) => folder.starts_with(path),
                FileOp::Remove(path) => path != &folder && path.starts_with(&folder),
                _ => false,
            };
            assert!(made_or_cleaned, "{}: {op:?}", scenario.name);
        }
        let ops: Vec<FileOp> = recorded.into_iter().map(|(_, op)| op).collect();
        if scenario.there.is_empty() {
            // The parent folders must survive a power failure too.
            for made in folder.ancestors().take(3) {
                let make = ops.iter().position(|op| *op == FileOp::Make(made.to_owned()));
                let flush = FileOp::Flush(made.parent().unwrap().to_owned());
                let make = make.unwrap_or_else(|| panic!("{} was not made", made.display()));
                assert!(ops[make..].contains(&flush), "{} has no name on the disk", made.display());
            }
        }
        assert_flushed(&ops, &folder);
    }
}
