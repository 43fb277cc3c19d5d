//! A rank that has lost a peer delays its error if the launcher is not `mgpurun`.
//!
//! `mgpurun` reads on the progress page which rank is at fault. Other launchers only know exit codes, and report the
//! first failure that they see as the cause; but a survivor ends within milliseconds of the lost rank. torchrun polls
//! its ranks every 0.1 s and reports the lowest rank of those that have ended by then. So the survivor waits until
//! the launcher has reaped the failed process: the kernel keeps an ended process (a zombie) until its parent has
//! waited for it. A shell between the two may reap it first and end a moment later. A parent that waits for its ranks
//! one after the other may never reap it; hence the limit. A launcher that kills all ranks after the first failure,
//! as torchrun does, kills the survivor during this wait. On several hosts only survivors on the culprit's host wait.

use std::time::{Duration, Instant};

use crate::Error;
use crate::process::state;

/// Minimum delay: three of torchrun's polling intervals.
const MIN_DELAY: Duration = Duration::from_millis(300);
/// Maximum delay while the failed process exists: ten polling intervals, for a busy machine.
const MAX_DELAY: Duration = Duration::from_secs(1);
/// Interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// If `error` is about a lost peer, waits until the launcher has reaped that peer's process. `process` returns the
/// process id of a rank, if known.
pub(crate) fn wait_until_culprit_reaped(error: &Error, process: impl FnOnce(u32) -> Option<u32>) {
    let Error::PeerLost { peer, silent: false, .. } = error else { return };
    let process = process(*peer);
    let is_there = || process.is_some_and(|pid| state(pid).is_some());
    let began = Instant::now();
    while began.elapsed() < MIN_DELAY || began.elapsed() < MAX_DELAY && is_there() {
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn lost(silent: bool) -> Error {
        let (operation, how) = ("barrier".into(), "ended".into());
        Error::PeerLost { rank: 0, peer: 1, operation, how, silent }
    }

    #[test]
    fn only_errors_about_ended_peers_are_delayed() {
        wait_until_culprit_reaped(&lost(true), |_| unreachable!("it has not ended"));
        wait_until_culprit_reaped(&Error::Poisoned { rank: 0, cause: String::new() }, |_| unreachable!());
    }

    #[test]
    fn a_survivor_waits_until_the_failed_process_was_reaped() {
        let mut child = Command::new("true").spawn().unwrap();
        while state(child.id()) != Some('Z') {
            std::thread::yield_now();
        }
        let began = Instant::now();
        wait_until_culprit_reaped(&lost(false), |rank| Some(child.id()).filter(|_| rank == 1));
        assert!(began.elapsed() >= MAX_DELAY);
        child.wait().unwrap();
        let began = Instant::now();
        wait_until_culprit_reaped(&lost(false), |_| Some(child.id()));
        assert!(began.elapsed() >= MIN_DELAY);
    }
}
