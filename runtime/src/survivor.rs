//! A rank that has lost another one holds its error back where the launcher is not `mgpurun`.
//!
//! `mgpurun` reads on the progress page whom a failing rank holds responsible. Others know exit codes alone and take the
//! first failure that they see for the cause, while a survivor ends within milliseconds of the rank that it lost. torchrun
//! looks at its ranks every 0.1 s (every 5 s before PyTorch 2.4) and names the lowest of those that have ended by then. So a
//! survivor waits until the launcher has seen the culprit's end: the kernel keeps a process that has ended as a zombie until
//! its parent has waited for it. A shell between the two may wait for it and end itself, which takes a moment more. A
//! launcher that then ends all ranks, as torchrun does, ends the survivor in its wait.

use std::time::{Duration, Instant};

use crate::Error;
use crate::process::state;

/// In any case: three looks of torchrun's.
const AT_LEAST: Duration = Duration::from_millis(300);
/// While the culprit still runs: it may have said that it panics before it ends.
const WHILE_RUNNING: Duration = Duration::from_secs(1);
/// While nobody has waited for the culprit's process: more than the longest interval of any torchrun.
const WHILE_UNSEEN: Duration = Duration::from_secs(6);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Waits until another launcher has seen the end of the peer that `error` names, if it names a lost one. `process` is that
/// of a rank, where it is known.
pub(crate) fn let_the_culprit_be_seen(error: &Error, process: impl FnOnce(u32) -> Option<u32>) {
    let Error::PeerLost { peer, silent: false, .. } = error else { return };
    let process = process(*peer);
    let began = Instant::now();
    while began.elapsed() < limit(process.and_then(state)) {
        std::thread::sleep(LOOK_EVERY);
    }
}

/// How long to wait for a culprit whose process is in this state.
fn limit(state: Option<char>) -> Duration {
    match state {
        None => AT_LEAST,
        Some('Z' | 'X') => WHILE_UNSEEN,
        Some(_) => WHILE_RUNNING,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_the_loss_of_a_peer_that_has_ended_is_held_back() {
        let lost = |silent| Error::PeerLost {
            rank: 0,
            peer: 1,
            operation: "barrier".into(),
            how: "ended".into(),
            silent,
        };
        let asked = |error: &Error| {
            let mut asked = None;
            let began = Instant::now();
            let_the_culprit_be_seen(error, |rank| {
                asked = Some(rank);
                None
            });
            (asked, began.elapsed() >= AT_LEAST)
        };
        assert_eq!(asked(&lost(false)), (Some(1), true));
        assert_eq!(asked(&lost(true)).0, None);
        assert_eq!(asked(&Error::Poisoned { rank: 0, cause: String::new() }).0, None);
    }

    #[test]
    fn a_zombie_is_waited_for_until_its_parent_has_seen_it() {
        let mut child = Command::new("true").spawn().unwrap();
        while state(child.id()) != Some('Z') {
            std::thread::yield_now();
        }
        assert_eq!(limit(state(child.id())), WHILE_UNSEEN);
        child.wait().unwrap();
        assert_eq!(limit(state(child.id())), AT_LEAST);
    }
}
