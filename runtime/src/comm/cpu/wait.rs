//! Flags in shared memory, and how a rank waits for one.
//!
//! A waiter spins first, because a peer on another core usually arrives within a microsecond. Then it yields its
//! core, because on an oversubscribed machine the peer may need exactly this core. Then it sleeps in the kernel (a
//! futex shared between processes), so that a rank that is early by a second does not burn CPU time. It sleeps in
//! slices: between them it checks whether its peers are alive and whether it has timed out.
//!
//! Whoever advances a flag wakes the sleepers. To be certain to see them, a full memory barrier would be needed after
//! every store, which takes about as long as a whole small operation. While every rank has a core of its own,
//! sleepers are rare, and the barrier is omitted: the load of the sleeper count may then be ordered before the store,
//! and a sleeper may be missed. It wakes by itself at the end of its slice. Slices begin short and double, so this at
//! most doubles the time that it has waited already.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::time::TimeSpec;

/// Longest sleep between two checks of the flag and the peers. It bounds how late the death of a peer is noticed.
const LONGEST_SLICE: Duration = Duration::from_millis(20);

/// Additional words in the flag's cache line: a peer that has fetched the flag has them, too.
pub(super) const FLAG_WORDS: usize = 7;

/// A counter that only grows (and wraps) and that others wait for, with the number of sleeping waiters.
///
/// That number is in another cache line: loading it from the same line right after storing the counter would have to
/// wait until the line arrives. The alignment is two lines, because processors prefetch them in pairs.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Flag {
    value: AtomicU32,
    pub(super) words: [AtomicU64; FLAG_WORDS],
    sleepers: AtomicU32,
}

impl Flag {
    /// The current value. Everything written before it was published is visible afterwards.
    pub(super) fn load(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// True if the flag has reached `target` or passed it.
    pub(super) fn reached(&self, target: u32) -> bool {
        self.load().wrapping_sub(target) as i32 >= 0
    }

    /// Publishes `value` and everything written before it. Only one rank may do so.
    pub(super) fn publish(&self, value: u32, policy: WaitPolicy) {
        if policy.oversubscribed {
            // Paired with the sequentially consistent operations of `sleep`: either we see the sleeper, or it sees
            // the new value.
            self.value.swap(value, Ordering::SeqCst);
        } else {
            self.value.store(value, Ordering::Release);
        }
        self.wake();
    }

    /// Adds one, and publishes everything written before it.
    pub(super) fn increment(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            futex(&self.value, libc::FUTEX_WAKE, i32::MAX as u32, None);
        }
    }

    /// Sleeps until woken or for `slice`, unless the flag has already reached `target`.
    fn sleep(&self, target: u32, slice: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.value.load(Ordering::SeqCst);
        if (seen.wrapping_sub(target) as i32) < 0 {
            futex(&self.value, libc::FUTEX_WAIT, seen, Some(slice));
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The futex system call. Its result is ignored: every caller checks the value again.
pub(in crate::comm) fn futex(word: &AtomicU32, operation: i32, value: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(TimeSpec::from);
    let timeout = timeout.as_ref().map_or(std::ptr::null(), |timeout| std::ptr::from_ref(timeout.as_ref()));
    // SAFETY: the word outlives the call, the timeout is null or points to a live timespec, and both operations
    // ignore the remaining arguments. The futex is shared, not private: waiters live in other processes.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, timeout, 0usize, 0u32) };
}

/// How long to spin and to yield before sleeping.
#[derive(Debug, Clone, Copy)]
pub(super) struct WaitPolicy {
    /// More ranks than cores.
    oversubscribed: bool,
    spins: u32,
    yields: u32,
    /// The first sleep between two checks.
    first_slice: Duration,
}

/// A yield that takes longer than this ran another task: the next yield might cost a whole time slice, while a
/// sleeper gets a core as soon as it is woken.
const YIELD_LIMIT: Duration = Duration::from_micros(50);

/// Number of polls before a peer counts as late: about two microseconds.
const BRIEF_SPINS: u32 = 40;

impl WaitPolicy {
    /// The policy for `ranks` ranks on `cores` cores: spinning only pays while every rank has a core.
    pub(super) fn for_ranks(ranks: u32, cores: usize) -> Self {
        if ranks as usize <= cores {
            let first_slice = Duration::from_micros(50);
            WaitPolicy { oversubscribed: false, spins: 300, yields: 400, first_slice }
        } else {
            // No sleeper is missed, and who wakes early takes a core from a rank that computes.
            let first_slice = Duration::from_millis(2);
            WaitPolicy { oversubscribed: true, spins: 1, yields: 100, first_slice }
        }
    }

    /// True when there are more ranks than cores.
    pub(super) fn is_oversubscribed(self) -> bool {
        self.oversubscribed
    }

    /// Spins briefly; true if `flag` has reached `target`.
    pub(super) fn spin_briefly(self, flag: &Flag, target: u32) -> bool {
        spin(if self.oversubscribed { 1 } else { BRIEF_SPINS }, flag, target)
    }

    /// Spins as long as [`wait`](Self::wait) would, and calls `meanwhile` between polls.
    pub(super) fn spin_while(self, flag: &Flag, target: u32, meanwhile: impl Fn()) {
        (0..self.spins).any(|_| {
            flag.reached(target) || {
                meanwhile();
                std::hint::spin_loop();
                false
            }
        });
    }

    /// Waits until `flag` has reached `target`. Calls `late` once if spinning was not enough. Then calls `check` from
    /// time to time with the time waited so far; an error of it ends the wait.
    #[inline]
    pub(super) fn wait<E>(
        self,
        flag: &Flag,
        target: u32,
        late: impl FnOnce(),
        check: impl FnMut(Duration) -> Result<(), E>,
    ) -> Result<(), E> {
        if spin(self.spins, flag, target) {
            return Ok(());
        }
        late();
        self.wait_long(flag, target, check)
    }

    #[cold]
    fn wait_long<E>(
        self,
        flag: &Flag,
        target: u32,
        mut check: impl FnMut(Duration) -> Result<(), E>,
    ) -> Result<(), E> {
        for _ in 0..self.yields {
            if flag.reached(target) {
                return Ok(());
            }
            let offered = Instant::now();
            std::thread::yield_now();
            if offered.elapsed() > YIELD_LIMIT {
                break;
            }
        }
        let started = Instant::now();
        let mut slice = self.first_slice;
        while !flag.reached(target) {
            flag.sleep(target, slice);
            slice = LONGEST_SLICE.min(slice * 2);
            let checked = check(started.elapsed());
            // If the peer has reached the flag and then ended, the wait has succeeded.
            if !flag.reached(target) {
                checked?;
            }
        }
        Ok(())
    }
}

/// Polls up to `times` times. The pause between polls also keeps the line with its owner while that writes it.
#[inline]
fn spin(times: u32, flag: &Flag, target: u32) -> bool {
    (0..times).any(|_| {
        flag.reached(target) || {
            std::hint::spin_loop();
            false
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLEEP_AT_ONCE: WaitPolicy =
        WaitPolicy { oversubscribed: true, spins: 0, yields: 0, first_slice: Duration::from_micros(50) };

    #[test]
    fn counters_compare_across_wrapping() {
        let flag = Flag::default();
        flag.publish(5, SLEEP_AT_ONCE);
        assert!(flag.reached(5) && flag.reached(4) && !flag.reached(6));
        flag.publish(u32::MAX - 2, SLEEP_AT_ONCE);
        assert!(!flag.reached(3) && flag.reached(u32::MAX - 9));
    }

    #[test]
    fn every_publish_wakes_sleepers() {
        let flags = [Flag::default(), Flag::default()];
        let turns = if cfg!(miri) { 20 } else { 2000 };
        let never = |_: Duration| Ok::<(), ()>(());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 1..=turns {
                    SLEEP_AT_ONCE.wait(&flags[0], turn, || {}, never).unwrap();
                    flags[1].increment();
                }
            });
            for turn in 1..=turns {
                flags[0].publish(turn, SLEEP_AT_ONCE);
                SLEEP_AT_ONCE.wait(&flags[1], turn, || {}, never).unwrap();
            }
        });
        assert_eq!(flags[1].load(), turns);
    }

    #[test]
    fn a_missed_sleeper_wakes_by_itself() {
        let flag = Flag::default();
        std::thread::scope(|scope| {
            scope.spawn(|| SLEEP_AT_ONCE.wait(&flag, 1, || {}, |_| Ok::<(), ()>(())).unwrap());
            // Without checking for sleepers.
            flag.value.store(1, Ordering::Release);
        });
    }

    #[test]
    fn an_error_ends_a_wait() {
        assert_eq!(SLEEP_AT_ONCE.wait(&Flag::default(), 1, || {}, |_| Err("gone")), Err("gone"));
    }
}
