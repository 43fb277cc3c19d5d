//! The limits on descriptors: `mgpurun` takes as many as it may have, and its ranks get the limits of the user.
//!
//! The launcher has several descriptors for each rank, one for each other host, and those of the clients of `--metrics-listen`.
//! The usual soft limit of 1,024 exists for programs that call `select`, which the launcher does not.

use std::sync::OnceLock;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The limits before they were raised: soft and hard.
static OF_USER: OnceLock<[u64; 2]> = OnceLock::new();

/// Raises the soft limit of this process to its hard limit. Nothing changes if the kernel refuses that.
pub(crate) fn raise() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        // Set already only by an earlier call, which saw the limits of the user.
        let _ = OF_USER.set([soft, hard]);
    }
}

/// The soft and the hard limit of the ranks; `None` if they are those of this process.
pub(crate) fn of_ranks() -> Option<[u64; 2]> {
    OF_USER.get().copied()
}
