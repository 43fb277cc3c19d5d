//! A rank that has lost another one holds its error back where the launcher is not `mgpurun`.
//!
//! `mgpurun` reads on the progress page whom a failing rank holds responsible. Others know exit codes alone and take the
//! first failure that they see for the cause, while a survivor ends within milliseconds of the rank that it lost. torchrun
//! looks at its ranks every 0.1 s and names the lowest of those that have ended by then. So a survivor waits until the
//! launcher has seen the culprit's end: the kernel keeps a process that has ended until its parent has waited for it. A
//! shell between the two may wait for it and end itself, which takes a moment more; and a parent that waits for its ranks one
//! after the other never sees it, so that there is a limit. A launcher that ends all ranks when it has seen the first one fail,
//! as torchrun does, ends the survivor in its wait.

use std::time::{Duration, Instant};

use crate::Error;
use crate::process::state;

/// In any case: three looks of torchrun's.
const MIN_DELAY: Duration = Duration::from_millis(300);
/// While the culprit's process is there: ten looks, for a machine that has much else to do.
const MAX_DELAY: Duration = Duration::from_secs(1);
/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Waits until another launcher has seen the end of the peer that `error` names, if it names a lost one. `process` is that
/// of a rank, where it is known.
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
    fn only_the_loss_of_a_peer_that_has_ended_is_held_back() {
        wait_until_culprit_reaped(&lost(true), |_| unreachable!("it has not ended"));
        wait_until_culprit_reaped(&Error::Poisoned { rank: 0, cause: String::new() }, |_| unreachable!());
    }

    #[test]
    fn a_survivor_waits_until_the_culprit_was_waited_for() {
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
