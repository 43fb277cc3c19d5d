//! How long a wait tries again and again before it sleeps.
//!
//! To sleep and to be woken takes several times as long as a small message between two hosts. So a wait tries for a
//! while first, if its rank is likely to have a core of its own, and offers the core to others between two attempts.
//! When that takes long, somebody else needs the core: then the wait sleeps at once, since a sleeper gets a core as
//! soon as it is woken.

use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};

/// How long a wait tries. Longer than ranks that do the same work are apart, and much shorter than a step.
const SPIN_TIME: Duration = Duration::from_micros(200);
/// If the core was away for longer, another task ran on it.
const YIELD_LIMIT: Duration = Duration::from_micros(50);

/// Whether waits try before they sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct SpinPolicy {
    spins: bool,
}

impl SpinPolicy {
    /// The policy of a rank that uses this thread, on a host with `ranks` ranks.
    pub(in super::super) fn for_ranks(ranks: u32) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        SpinPolicy { spins: ranks as usize <= cores || is_bound() }
    }

    /// Other threads compute on the rank's core.
    pub(in super::super) fn never() -> Self {
        SpinPolicy { spins: false }
    }

    /// Begins a wait of at most `patience`.
    pub(super) fn begin(self, patience: Duration) -> Spin {
        let now = Instant::now();
        let time = if self.spins { SPIN_TIME.min(patience) } else { Duration::ZERO };
        Spin { last: now, until: now + time }
    }
}

/// Whether this thread may only use some of the machine's cores: then the others are for other ranks.
fn is_bound() -> bool {
    let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten().unwrap_or(1);
    let allowed = sched_getaffinity(Pid::from_raw(0)).map_or(i64::MAX, |set| {
        (0..CpuSet::count()).filter(|core| set.is_set(*core).unwrap_or(false)).count() as i64
    });
    allowed < online
}

/// A wait that tries.
pub(super) struct Spin {
    last: Instant,
    until: Instant,
}

impl Spin {
    /// Offers the core to others. Returns whether to try once more.
    pub(super) fn again(&mut self) -> bool {
        if self.last >= self.until {
            return false;
        }
        std::thread::yield_now();
        let now = Instant::now();
        let was_away = now.duration_since(self.last) > YIELD_LIMIT;
        self.last = if was_away { self.until } else { now };
        // After a long absence, once more: what is awaited may have come meanwhile.
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_tries_for_a_bounded_time() {
        let tries = |policy: SpinPolicy, patience: Duration| {
            let mut spin = policy.begin(patience);
            std::iter::repeat_with(|| spin.again()).take_while(|again| *again).count()
        };
        assert_eq!(tries(SpinPolicy::never(), Duration::from_secs(1)), 0);
        assert_eq!(tries(SpinPolicy { spins: true }, Duration::ZERO), 0);
        assert!(tries(SpinPolicy { spins: true }, Duration::from_secs(1)) > 0);
    }
}
