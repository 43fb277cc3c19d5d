//! The cores on which a thread may run.

use std::collections::BTreeSet;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The calling thread.
const THIS_THREAD: Pid = Pid::from_raw(0);

/// The cores of the calling thread.
///
/// # Panics
/// If the system does not say.
pub fn own() -> BTreeSet<usize> {
    let set = sched_getaffinity(THIS_THREAD).expect("an affinity mask");
    (0..CpuSet::count()).filter(|core| set.is_set(*core).expect("a core")).collect()
}

/// Binds the calling thread, and what it starts from now on, to the first of its cores. Returns that core.
///
/// # Panics
/// If the system refuses.
pub fn bind_to_first() -> usize {
    let first = *own().first().expect("a core");
    let mut only = CpuSet::new();
    only.set(first).expect("a core");
    sched_setaffinity(THIS_THREAD, &only).expect("its own core");
    first
}
