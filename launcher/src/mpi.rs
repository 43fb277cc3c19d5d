//! Detects MPI programs, which `mgpurun` cannot start as the ranks of one MPI world.
//!
//! An MPI program that was not started by an MPI launcher silently becomes an MPI world of size 1: each of N copies
//! does the whole work. So the user gets a message. It is printed only if the case is certain: no rank has joined, and
//! rank 0 has loaded the extension of mpi4py, whose import initialises MPI, or is an executable that has loaded libmpi.
//! Python and PyTorch alone do not count: some builds of PyTorch are linked with libmpi and do not use it.

use std::fs;
use std::time::{Duration, Instant};

/// The message.
pub(crate) const ADVICE: &str = "the ranks use MPI, and each of them is an MPI world of size 1 here: start them with mpirun \
                                 (mgpurun is for programs that use mgpu, or PyTorch's own backends)";

/// Variables in which MPI launchers pass the rank to a process.
const OF_LAUNCHERS: [&str; 4] = ["PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"];

/// Times after the start of the first and the last check of rank 0; each check is at twice the time of the previous one.
const CHECK_TIMES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

/// The schedule of the checks.
#[derive(Debug)]
pub(crate) struct MpiWatch {
    started: Instant,
    next: Option<Duration>,
}

impl MpiWatch {
    /// For `ranks` ranks that have just been started. If an MPI launcher has started `mgpurun` itself, its variables
    /// define the MPI world, and nothing is checked.
    pub(crate) fn new(ranks: usize) -> Self {
        let has_launcher = OF_LAUNCHERS.into_iter().any(|name| std::env::var_os(name).is_some());
        MpiWatch { started: Instant::now(), next: (ranks > 1 && !has_launcher).then_some(CHECK_TIMES.0) }
    }

    /// When the next check is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next.map(|next| self.started + next)
    }

    /// Ends the checks.
    pub(crate) fn end(&mut self) {
        self.next = None;
    }

    /// Checks rank 0, process `pid`, if a check is due. True once, when it is found to use MPI.
    pub(crate) fn check(&mut self, pid: i32, now: Instant) -> bool {
        let Some(next) = self.next.filter(|next| self.started + *next <= now) else { return false };
        let found = fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| uses_mpi(&maps));
        self.next = Some(next * 2).filter(|next| !found && *next <= CHECK_TIMES.1);
        found
    }
}

/// True if a process with these mappings, the text of `/proc/PID/maps`, certainly uses MPI.
fn uses_mpi(maps: &str) -> bool {
    // Address, permissions, offset, device, inode, path.
    let paths = || maps.lines().filter_map(|line| line.split_ascii_whitespace().nth(5));
    let has = |prefix: &str| {
        paths().any(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(prefix)))
    };
    let is_mpi4py = |path: &str| path.contains("/mpi4py/MPI.") && path.ends_with(".so");
    let is_program = !has("python") && !has("libpython") && !has("libtorch");
    paths().any(is_mpi4py) || is_program && (has("libmpi.so") || has("libmpich.so"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps(paths: &[&str]) -> String {
        let line = |path: &&str| format!("7f00-7f01 r-xp 00000000 08:01 4242                       {path}\n");
        paths.iter().map(line).chain(["7ffe-7fff rw-p 00000000 00:00 0 \n".into()]).collect()
    }

    #[test]
    fn only_certain_cases_count() {
        for (paths, expected) in [
            (&["/home/me/a.out", "/usr/lib/x86_64-linux-gnu/libmpi.so.40.30.4"][..], true),
            (&["/home/me/a.out", "/opt/mpich/lib/libmpich.so.12"], true),
            (
                &[
                    "/usr/bin/python3.12",
                    "/venv/mpi4py/MPI.cpython-312-x86_64-linux-gnu.so",
                    "/l/libmpi.so.12",
                ],
                true,
            ),
            (&["/usr/bin/python3.12", "/opt/conda/lib/libmpi.so.40"], false),
            (&["/home/me/a.out", "/l/libtorch_cpu.so", "/l/libmpi.so.40"], false),
            (&["/home/me/libmpi.so.d/a.out", "/usr/lib/libc.so.6"], false),
            (&[], false),
        ] {
            assert_eq!(uses_mpi(&maps(paths)), expected, "{paths:?}");
        }
    }

    #[test]
    fn checks_become_rarer_and_end() {
        let mut watch = MpiWatch { started: Instant::now(), next: Some(CHECK_TIMES.0) };
        let mut checks = 0;
        while let Some(next) = watch.next_deadline() {
            assert!(!watch.check(0, next));
            checks += 1;
        }
        assert_eq!(checks, 10);
    }
}
