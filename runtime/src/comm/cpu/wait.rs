//! Flags in shared memory, and how a rank waits for one.
//!
//! A waiter spins first, because a peer on another core is usually a microsecond away; then offers its core to
//! whoever needs it, because with more ranks than cores the peer may be waiting for exactly this one; then sleeps
//! in the kernel (a futex that works between processes), so that a rank that is early by a second costs nothing.
//! Sleep is taken in slices: between them the waiter looks whether its peers are alive and its deadline has
//! passed.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use nix::libc;

/// Longest sleep without a look at the peers: bounds how late a death is noticed.
const SLICE: Duration = Duration::from_millis(20);

/// A number that one rank advances and others wait for, with a count of those asleep.
#[repr(C)]
pub(super) struct Flag {
    value: AtomicU32,
    sleepers: AtomicU32,
}

impl Flag {
    /// The current value; what was written before it was published is visible after.
    pub(super) fn load(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Publishes `value` and everything written before it.
    pub(super) fn publish(&self, value: u32) {
        self.value.store(value, Ordering::Release);
        self.wake();
    }

    /// Adds one, and publishes everything written before it.
    pub(super) fn increment(&self) {
        self.value.fetch_add(1, Ordering::AcqRel);
        self.wake();
    }

    fn wake(&self) {
        // Pairs with the fence in `sleep`: either we see the sleeper, or it sees the new value.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            futex(&self.value, libc::FUTEX_WAKE, i32::MAX as u32, None);
        }
    }

    /// Sleeps for at most a slice, unless `reached` holds already.
    fn sleep(&self, reached: impl Fn(u32) -> bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = self.load();
        if !reached(seen) {
            futex(&self.value, libc::FUTEX_WAIT, seen, Some(SLICE));
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

/// True when a wrapping counter has come to `target` or beyond.
pub(super) fn at_least(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) as i32 >= 0
}

/// How long to spin and to yield before sleeping.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// For `ranks` ranks on the cores this process may use: spinning pays only while everybody has a core.
    pub(super) fn for_ranks(ranks: u32) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if ranks as usize <= cores {
            Patience { spins: 4000, yields: 200 }
        } else {
            Patience { spins: 20, yields: 20 }
        }
    }

    /// Waits until `flag` has come to `target`. `look` is asked now and then, with the time waited so far, and
    /// ends the wait with an error.
    pub(super) fn wait<E>(
        self,
        flag: &Flag,
        target: u32,
        mut look: impl FnMut(Duration) -> Result<(), E>,
    ) -> Result<(), E> {
        let reached = |value| at_least(value, target);
        for _ in 0..self.spins {
            if reached(flag.load()) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        for _ in 0..self.yields {
            if reached(flag.load()) {
                return Ok(());
            }
            std::thread::yield_now();
        }
        let started = Instant::now();
        while !reached(flag.load()) {
            flag.sleep(reached);
            let trouble = look(started.elapsed());
            // A peer may have reached the flag and then ended: what it did before counts.
            if !reached(flag.load()) {
                trouble?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapping_counters_compare() {
        assert!(at_least(5, 5) && at_least(6, 5) && !at_least(4, 5));
        assert!(at_least(3, u32::MAX - 2) && !at_least(u32::MAX - 2, 3));
    }

    #[test]
    fn sleepers_are_woken_at_every_step() {
        let flags = [const { Flag { value: AtomicU32::new(0), sleepers: AtomicU32::new(0) } }; 2];
        let patience = Patience { spins: 0, yields: 0 };
        let never = |_: Duration| Ok::<(), ()>(());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 1..=2000 {
                    patience.wait(&flags[0], turn, never).unwrap();
                    flags[1].increment();
                }
            });
            for turn in 1..=2000 {
                flags[0].publish(turn);
                patience.wait(&flags[1], turn, never).unwrap();
            }
        });
        assert_eq!(flags[1].load(), 2000);
    }

    #[test]
    fn trouble_ends_a_wait() {
        let flag = Flag { value: AtomicU32::new(0), sleepers: AtomicU32::new(0) };
        let patience = Patience { spins: 1, yields: 1 };
        assert_eq!(patience.wait(&flag, 1, |_| Err("gone")), Err("gone"));
    }
}
