//! Are the ranks programs of MPI, which `mgpurun` does not start as such?
//!
//! An MPI program that no MPI launcher has started is a world of one and says nothing: N of them each do the whole work.
//! That is what happens to it here, so the user should know. It is told only where it is sure: no rank has joined, and rank
//! 0 has the extension of mpi4py loaded, whose import initialises MPI, or is an executable that has libmpi loaded. Python and
//! PyTorch alone do not count: some builds of PyTorch are linked with libmpi and do not use it.

use std::fs;
use std::time::{Duration, Instant};

/// What is said.
pub(crate) const ADVICE: &str = "the ranks use MPI, and each of them is an MPI world of size 1 here: start them with mpirun \
                                 (mgpurun is for programs that use mgpu, or PyTorch's own backends)";

/// Variables by which launchers of MPI tell a process its rank.
const OF_LAUNCHERS: [&str; 4] = ["PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"];

/// First and last time after the start at which rank 0 is looked at; each look is at twice the time of the one before.
const CHECK_TIMES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

/// When to look at rank 0.
#[derive(Debug)]
pub(crate) struct MpiWatch {
    started: Instant,
    next: Option<Duration>,
}

impl MpiWatch {
    /// Of `ranks` ranks that have just been started. A launcher of MPI may have started `mgpurun` itself: then its variables
    /// make worlds of another size.
    pub(crate) fn new(ranks: usize) -> Self {
        let has_launcher = OF_LAUNCHERS.into_iter().any(|name| std::env::var_os(name).is_some());
        MpiWatch { started: Instant::now(), next: (ranks > 1 && !has_launcher).then_some(CHECK_TIMES.0) }
    }

    /// When the next look is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next.map(|next| self.started + next)
    }

    /// There is no need to look any more.
    pub(crate) fn end(&mut self) {
        self.next = None;
    }

    /// Looks at rank 0, process `pid`, if a look is due. True once, when it is found to use MPI.
    pub(crate) fn check(&mut self, pid: i32, now: Instant) -> bool {
        let Some(next) = self.next.filter(|next| self.started + *next <= now) else { return false };
        let found = fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| uses_mpi(&maps));
        self.next = Some(next * 2).filter(|next| !found && *next <= CHECK_TIMES.1);
        found
    }
}

/// True if a process with these mappings, the text of a `/proc/PID/maps`, is sure to use MPI.
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
    fn only_what_is_sure_counts() {
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
    fn looks_become_rarer_and_end() {
        let mut watch = MpiWatch { started: Instant::now(), next: Some(CHECK_TIMES.0) };
        let mut looks = 0;
        while let Some(next) = watch.next_deadline() {
            assert!(!watch.check(0, next));
            looks += 1;
        }
        assert_eq!(looks, 10);
    }
}
