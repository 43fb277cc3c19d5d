//! How long a wait tries again and again before it sleeps.
//!
//! To sleep and to be woken takes several times as long as a small message between two hosts. So a wait tries for a
//! while first. A rank that is likely to have a core of its own does so without a break as long as a message may take; then,
//! and otherwise from the start, with an offer of the core to others between two attempts: what it waits for may be the
//! work of a rank that needs the same core. When such offers take long, somebody computes on the core: then waits sleep at
//! once for a while, since a sleeper gets a core as soon as it is woken.
//!
//! Ranks that start together may share a core while another is idle, and the scheduler may leave them there: it sees
//! two tasks that keep offering the core to each other. A rank that notices moves to the core of its number, and does
//! not stay bound to it. If that does not help, its waits offer the core at once for a while.

use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};

/// How long a wait tries without a break: about as long as it would take to be woken.
const BUSY_TIME: Duration = Duration::from_micros(50);
/// How long a wait tries: longer than ranks that do the same work are apart, and much shorter than a step.
const SPIN_TIME: Duration = Duration::from_micros(200);
/// If an offer of the core takes longer although waits offer it at once, another task computes there, and has used up its time. Another
/// rank takes less for its part of a small collective.
const LONG_OFFER: Duration = Duration::from_millis(1);
/// If this many offers in a row take longer than this, another task uses the same core.
const TAKEN_OFFERS: (u32, Duration) = (8, Duration::from_micros(2));
/// How long waits offer the core at once after another task has taken it: a rank, or one that computes.
const SHARED_TIMES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// How long waits sleep at once when another task computes on the core. It doubles each time within the time for which
/// waits offer the core at once: an offer to a task that goes on computing costs a few milliseconds.
const RESTS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(40));
/// Shortest time between two moves.
const MOVE_PAUSE: Duration = Duration::from_secs(1);

const THIS_THREAD: Pid = Pid::from_raw(0);

/// The waits of one rank.
#[derive(Debug)]
pub(in super::super) struct Spinner {
    spins: bool,
    /// There are more ranks than cores: waits offer the core at once.
    is_crowded: bool,
    rank: u32,
    /// Offers of the core in a row that another task took.
    taken_offers: u32,
    moved: Option<Instant>,
    /// Until then, another task is likely to use the same core: waits offer it at once.
    shared_until: Option<Instant>,
    /// Until then waits sleep at once.
    rests_until: Option<Instant>,
    /// The last rest, and when it began.
    rest: Option<(Duration, Instant)>,
}

/// A wait that tries.
pub(super) struct Spin {
    since: Instant,
    time: Duration,
}

impl Spinner {
    /// For this world rank, on a host with `local_ranks` ranks.
    pub(in super::super) fn new(rank: u32, local_ranks: u32) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let is_crowded = local_ranks as usize > cores && !is_bound();
        Spinner {
            spins: true,
            is_crowded,
            rank,
            taken_offers: 0,
            moved: None,
            shared_until: None,
            rests_until: None,
            rest: None,
        }
    }

    /// Other threads compute on the rank's core: waits sleep at once.
    pub(super) fn stop(&mut self) {
        self.spins = false;
    }

    /// Begins a wait of at most `patience`.
    pub(super) fn begin(&self, patience: Duration) -> Spin {
        let since = Instant::now();
        let spins = self.spins && self.rests_until.is_none_or(|until| until < since);
        Spin { since, time: if spins { SPIN_TIME.min(patience) } else { Duration::ZERO } }
    }

    /// Whether to try again, after an attempt without success.
    pub(super) fn again(&mut self, spin: &mut Spin) -> bool {
        if spin.time.is_zero() {
            return false;
        }
        let now = Instant::now();
        let waited = now.duration_since(spin.since);
        let shares_core = self.is_crowded || self.shared_until.is_some_and(|until| until >= now);
        if waited < BUSY_TIME && !shares_core {
            std::hint::spin_loop();
            return true;
        }
        if waited >= spin.time {
            return false;
        }
        std::thread::yield_now();
        let offered = now.elapsed();
        // Another rank that waits without a break takes that time once.
        if offered > LONG_OFFER && shares_core {
            // Once more: what is awaited may have come meanwhile.
            spin.time = Duration::ZERO;
            self.rest(now + offered);
        }
        if offered > TAKEN_OFFERS.1 {
            self.taken_offers += 1;
            self.shared_until = self.shared_until.max(Some(now + SHARED_TIMES.0));
        } else {
            self.taken_offers = 0;
        }
        if self.taken_offers == TAKEN_OFFERS.0 {
            self.taken_offers = 0;
            self.leave_core(now);
        }
        true
    }

    /// Waits sleep at once from now on, for a while.
    #[cold]
    fn rest(&mut self, now: Instant) {
        let last = self.rest.filter(|(_, at)| now.duration_since(*at) < SHARED_TIMES.1);
        let rest = last.map_or(RESTS.0, |(rest, _)| (2 * rest).min(RESTS.1));
        self.rest = Some((rest, now));
        self.rests_until = Some(now + rest);
        self.shared_until = Some(now + SHARED_TIMES.1);
    }

    /// Moves to the core of this rank's number, unless it has done so just before.
    #[cold]
    fn leave_core(&mut self, now: Instant) {
        if self.moved.is_some_and(|moved| now.duration_since(moved) < MOVE_PAUSE) {
            return;
        }
        self.moved = Some(now);
        let Ok(allowed) = sched_getaffinity(THIS_THREAD) else { return };
        let cores: Vec<usize> = cores_of(&allowed).collect();
        let mut only = CpuSet::new();
        let own = cores.get(self.rank as usize % cores.len().max(1));
        if own.is_some_and(|own| only.set(*own).is_ok()) && sched_setaffinity(THIS_THREAD, &only).is_ok() {
            // This restores the previous affinity; it only fails if the core was taken offline.
            let _ = sched_setaffinity(THIS_THREAD, &allowed);
        }
    }
}

fn cores_of(set: &CpuSet) -> impl Iterator<Item = usize> {
    (0..CpuSet::count()).filter(|core| set.is_set(*core).unwrap_or(false))
}

/// Whether this thread may only use some of the machine's cores: then the others are for other ranks.
fn is_bound() -> bool {
    let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten().unwrap_or(1);
    sched_getaffinity(THIS_THREAD).is_ok_and(|allowed| (cores_of(&allowed).count() as i64) < online)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_tries_for_a_bounded_time() {
        let tries = |spins: bool, patience: Duration| {
            let mut spinner = Spinner { spins, ..Spinner::new(0, 1) };
            let mut spin = spinner.begin(patience);
            std::iter::repeat_with(|| spinner.again(&mut spin)).take_while(|again| *again).count()
        };
        assert_eq!(tries(false, Duration::from_secs(1)), 0);
        assert_eq!(tries(true, Duration::ZERO), 0);
        assert!(tries(true, Duration::from_secs(1)) > 0);
    }

    #[test]
    fn rests_become_longer_while_another_task_computes() {
        let (start, mut spinner) = (Instant::now(), Spinner::new(0, 1));
        let mut rest_at = |milliseconds| {
            let now = start + Duration::from_millis(milliseconds);
            spinner.rest(now);
            spinner.rests_until.unwrap().duration_since(now).as_millis()
        };
        let rests = [0, 10, 30, 80, 200, 1199, 3000].map(&mut rest_at);
        assert_eq!(rests, [5, 10, 20, 40, 40, 40, 5]);
    }

    #[test]
    fn a_rank_that_moves_stays_unbound() {
        let allowed = sched_getaffinity(THIS_THREAD).unwrap();
        for rank in [0, 1, 1000] {
            let mut spinner = Spinner::new(rank, 1);
            spinner.leave_core(Instant::now());
            assert_eq!(sched_getaffinity(THIS_THREAD).unwrap(), allowed);
            let moved = spinner.moved;
            assert!(moved.is_some());
            // Not once more at once: the other cores are busy, too.
            spinner.leave_core(Instant::now());
            assert_eq!(spinner.moved, moved);
        }
    }
}
