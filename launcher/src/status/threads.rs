//! The threads of a process, as the kernel reports them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use syscalls::Sysno;

use crate::group::Stat;

/// Maximum number of kinds of threads in a report.
const MAX_KINDS: usize = 8;

/// The state of a thread. Threads with equal values are one kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Thread {
    name: String,
    /// One letter, as `ps` shows it.
    state: char,
    /// The kernel function it sleeps in; empty if the kernel does not tell.
    sleeps_in: String,
    /// Its current system call; empty if there is none or the kernel does not tell.
    call: String,
}

/// All threads of a process.
#[derive(Debug, Default)]
pub(super) struct Threads {
    /// State of the process; `None` if it does not exist.
    process: Option<char>,
    threads: Vec<Thread>,
}

impl Threads {
    pub(super) fn of(pid: u32) -> Self {
        Self::in_folder(Path::new("/proc").join(pid.to_string()).as_path())
    }

    /// The state of the process without its threads, which takes much less time.
    pub(super) fn of_process_only(pid: u32) -> Self {
        let process = state_of(&Path::new("/proc").join(pid.to_string()));
        Threads { process, threads: Vec::new() }
    }

    fn in_folder(folder: &Path) -> Self {
        let tasks = fs::read_dir(folder.join("task")).into_iter().flatten().flatten();
        let mut tasks: Vec<_> = tasks.map(|task| task.path()).collect();
        tasks.sort();
        Threads {
            process: state_of(folder),
            threads: tasks.iter().filter_map(|task| Thread::in_folder(task)).collect(),
        }
    }

    /// The state of the process in a word.
    pub(super) fn state(&self) -> &'static str {
        match self.process {
            // A process with one running thread is running, even if its main thread sleeps.
            Some('S') if self.threads.iter().any(|thread| thread.state == 'R') => "running",
            state => state.map_or("gone", word),
        }
    }

    /// A line for each kind of thread.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut kinds: BTreeMap<&Thread, usize> = BTreeMap::new();
        for thread in &self.threads {
            *kinds.entry(thread).or_default() += 1;
        }
        let mut lines: Vec<String> =
            kinds.iter().take(MAX_KINDS).map(|(thread, count)| thread.line(*count)).collect();
        if kinds.len() > MAX_KINDS {
            lines.push(format!("… and {} other kinds of threads", kinds.len() - MAX_KINDS));
        }
        lines
    }
}

impl Thread {
    fn in_folder(folder: &Path) -> Option<Self> {
        let text = |name: &str| {
            let bytes = fs::read(folder.join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).trim_end().to_owned()
        };
        let sleeps_in = text("wchan");
        let number = text("syscall").split(' ').next().and_then(|number| number.parse::<usize>().ok());
        Some(Thread {
            name: text("comm"),
            state: state_of(folder)?,
            sleeps_in: if sleeps_in == "0" { String::new() } else { sleeps_in },
            call: number.and_then(Sysno::new).map(|call| call.name().to_owned()).unwrap_or_default(),
        })
    }

    fn line(&self, count: usize) -> String {
        let times = if count > 1 { format!("{count} × ") } else { String::new() };
        let mut line = format!("{times}{}: {}", self.name, word(self.state));
        if !self.call.is_empty() {
            line += &format!(", system call {}", self.call);
        }
        if !self.sleeps_in.is_empty() {
            line += &format!(", in {}", self.sleeps_in);
        }
        line
    }
}

fn state_of(folder: &Path) -> Option<char> {
    Stat::of(folder).map(|stat| stat.state)
}

fn word(state: char) -> &'static str {
    match state {
        'R' => "running",
        'S' | 'I' => "sleeping",
        'D' => "waiting for a device",
        'T' => "stopped",
        't' => "stopped by a debugger",
        'Z' | 'X' => "ended",
        _ => "in an unknown state",
    }
}

/// True if process `pid` was stopped by a signal.
pub(crate) fn is_stopped(pid: u32) -> bool {
    state_of(&Path::new("/proc").join(pid.to_string())).is_some_and(|state| matches!(state, 'T' | 't'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_running() {
        let threads = Threads::of(std::process::id());
        assert_eq!(threads.state(), "running");
        assert!(!threads.lines().is_empty());
        assert_eq!(Threads::of(u32::MAX).state(), "gone");
    }

    #[test]
    fn missing_files_in_proc_are_tolerated() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("stat"), "7 (train) S 1 7 7 0").unwrap();
        for (name, call) in [("7", "202 0x7f 0x80"), ("8", "202 0x7f 0x80"), ("9", "")] {
            let task = folder.path().join("task").join(name);
            fs::create_dir_all(&task).unwrap();
            fs::write(task.join("stat"), format!("{name} (train) T 1 7 7 0")).unwrap();
            fs::write(task.join("comm"), "train\n").unwrap();
            fs::write(task.join("syscall"), call).unwrap();
            fs::write(task.join("wchan"), if name == "9" { "0" } else { "do_futex" }).unwrap();
        }
        let threads = Threads::in_folder(folder.path());
        assert_eq!(threads.state(), "sleeping");
        assert_eq!(threads.lines(), ["train: stopped", "2 × train: stopped, system call futex, in do_futex"]);
    }
}
