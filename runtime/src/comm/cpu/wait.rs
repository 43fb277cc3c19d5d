//! Flags in shared memory, and how a rank waits for one.
//!
//! A waiter spins first, because a peer on another core is usually a microsecond away; then offers its core to
//! whoever needs it, because with more ranks than cores the peer may be waiting for exactly this one; then sleeps
//! in the kernel (a futex that works between processes), so that a rank that is early by a second costs nothing.
//! Sleep is taken in slices: between them the waiter looks whether its peers are alive and its deadline has
//! passed.
//!
//! Whoever advances a flag wakes its sleepers. To be certain to see them it would need a full memory barrier after
//! every store, about as long as the whole of a small operation. While every rank has a core of its own, sleepers
//! are rare, and the barrier is left out: the look for sleepers may then be older than the store, and a sleeper
//! missed. It wakes by itself at the end of its slice, and since slices begin short and double, that costs it at
//! most about as much again as it has waited already.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::libc;

/// Shortest and longest sleep without a look at the flag and the peers. The longest bounds how late a death is
/// noticed.
const SLEEP_SLICES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(20));

/// Words that travel with a flag, in its cache line: a peer that has fetched the flag has them too.
pub(super) const FLAG_WORDS: usize = 7;

/// A number that only grows (and wraps) and that others wait for, with a count of those asleep.
///
/// The count is kept out of the cache line: reading it there right after storing the number would mean waiting for
/// the line to arrive. Two lines make the alignment, because processors fetch them in pairs.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Flag {
    value: AtomicU32,
    pub(super) words: [AtomicU64; FLAG_WORDS],
    sleepers: AtomicU32,
}

impl Flag {
    /// The current value; what was written before it was published is visible after.
    pub(super) fn load(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// True when the flag has come to `target` or beyond.
    pub(super) fn reached(&self, target: u32) -> bool {
        self.load().wrapping_sub(target) as i32 >= 0
    }

    /// Publishes `value` and everything written before it. Only one rank does so.
    pub(super) fn publish(&self, value: u32, policy: WaitPolicy) {
        if policy.oversubscribed {
            // With the sequentially consistent operations of `sleep`: either we see the sleeper, or it sees the
            // new value.
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

    /// Sleeps until woken or for `slice`, unless the flag has come to `target` already.
    fn sleep(&self, target: u32, slice: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.value.load(Ordering::SeqCst);
        if (seen.wrapping_sub(target) as i32) < 0 {
            futex(&self.value, libc::FUTEX_WAIT, seen, Some(slice));
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The system call. Its result does not matter here: every caller looks at the value again.
fn futex(word: &AtomicU32, operation: i32, value: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|duration| libc::timespec {
        tv_sec: duration.as_secs() as libc::time_t,
        tv_nsec: duration.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word outlives the call, the timeout is null or points to a live timespec, and both operations
    // ignore the remaining arguments. The operation is not the private one: waiters live in other processes.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, timeout, 0usize, 0u32) };
}

/// How long to spin and to yield before sleeping.
#[derive(Debug, Clone, Copy)]
pub(super) struct WaitPolicy {
    /// More ranks than cores.
    oversubscribed: bool,
    spins: u32,
    yields: u32,
}

/// A core that is offered and comes back later than this was taken by somebody with work of their own: the next offer
/// might cost a whole time slice, while a sleeper is given a core as soon as it is woken.
const YIELD_LIMIT: Duration = Duration::from_micros(50);

/// Looks at a flag before a peer counts as late: some two microseconds.
const BRIEF_SPINS: u32 = 40;

impl WaitPolicy {
    /// For `ranks` ranks on `cores` cores: spinning pays only while everybody has a core.
    pub(super) fn for_ranks(ranks: u32, cores: usize) -> Self {
        if ranks as usize <= cores {
            WaitPolicy { oversubscribed: false, spins: 300, yields: 400 }
        } else {
            WaitPolicy { oversubscribed: true, spins: 1, yields: 100 }
        }
    }

    /// True when there are more ranks than cores.
    pub(super) fn is_oversubscribed(self) -> bool {
        self.oversubscribed
    }

    /// Gives `flag` a moment to come to `target`; true if it has.
    pub(super) fn spin_briefly(self, flag: &Flag, target: u32) -> bool {
        spin(if self.oversubscribed { 1 } else { BRIEF_SPINS }, flag, target)
    }

    /// Spins for as long as [`wait`](Self::wait) would, and does `meanwhile` between looks.
    pub(super) fn spin_while(self, flag: &Flag, target: u32, meanwhile: impl Fn()) {
        (0..self.spins).any(|_| {
            flag.reached(target) || {
                meanwhile();
                std::hint::spin_loop();
                false
            }
        });
    }

    /// Waits until `flag` has come to `target`. `late` is called when that is not a matter of spinning any more. `look`
    /// is asked now and then after that, with the time waited so far, and ends the wait with an error.
    #[inline]
    pub(super) fn wait<E>(
        self,
        flag: &Flag,
        target: u32,
        late: impl FnOnce(),
        look: impl FnMut(Duration) -> Result<(), E>,
    ) -> Result<(), E> {
        if spin(self.spins, flag, target) {
            return Ok(());
        }
        late();
        self.wait_long(flag, target, look)
    }

    #[cold]
    fn wait_long<E>(
        self,
        flag: &Flag,
        target: u32,
        mut look: impl FnMut(Duration) -> Result<(), E>,
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
        let (mut slice, longest) = SLEEP_SLICES;
        while !flag.reached(target) {
            flag.sleep(target, slice);
            slice = longest.min(slice * 2);
            let trouble = look(started.elapsed());
            // A peer may have reached the flag and then ended: what it did before counts.
            if !flag.reached(target) {
                trouble?;
            }
        }
        Ok(())
    }
}

/// Looks up to `times` times. The pause in between also keeps the line from being torn back and forth while its
/// owner writes it.
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

    const SLEEP_AT_ONCE: WaitPolicy = WaitPolicy { oversubscribed: true, spins: 0, yields: 0 };

    #[test]
    fn wrapping_counters_compare() {
        let flag = Flag::default();
        flag.publish(5, SLEEP_AT_ONCE);
        assert!(flag.reached(5) && flag.reached(4) && !flag.reached(6));
        flag.publish(u32::MAX - 2, SLEEP_AT_ONCE);
        assert!(!flag.reached(3) && flag.reached(u32::MAX - 9));
    }

    #[test]
    fn sleepers_are_woken_at_every_step() {
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
    fn a_sleeper_that_is_missed_wakes_by_itself() {
        let flag = Flag::default();
        std::thread::scope(|scope| {
            scope.spawn(|| SLEEP_AT_ONCE.wait(&flag, 1, || {}, |_| Ok::<(), ()>(())).unwrap());
            // Not even a look at the sleepers.
            flag.value.store(1, Ordering::Release);
        });
    }

    #[test]
    fn trouble_ends_a_wait() {
        assert_eq!(SLEEP_AT_ONCE.wait(&Flag::default(), 1, || {}, |_| Err("gone")), Err("gone"));
    }
}
