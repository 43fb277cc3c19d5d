//! Whether every rank has a core of its own.
//!
//! That decides how to wait and which path small payloads take, so all ranks must come to the same answer: each
//! publishes the cores it may use, and all count their union.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

/// Words of a set of cores: as many as the system call knows.
const WORDS: usize = 16;

/// The cores of one rank. Written before the communicator is connected, read afterwards.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Cores {
    set: [AtomicU64; WORDS],
    /// How many of them the process may keep busy at a time, if a control group allows fewer than the set holds.
    quota: AtomicU32,
}

impl Cores {
    /// Publishes what this thread may use.
    pub(super) fn publish(&self) {
        let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_else(|_| CpuSet::new());
        let mut count = 0;
        for core in (0..WORDS * 64).filter(|core| set.is_set(*core).unwrap_or(false)) {
            self.set[core / 64].fetch_or(1 << (core % 64), Ordering::Relaxed);
            count += 1;
        }
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        let quota = if usable < count { usable as u32 } else { u32::MAX };
        self.quota.store(quota, Ordering::Relaxed);
    }

    /// How many cores the ranks have between them.
    pub(super) fn count<'a>(ranks: impl Iterator<Item = &'a Cores> + Clone) -> usize {
        let union = |word: usize| {
            ranks.clone().fold(0, |union, cores| union | cores.set[word].load(Ordering::Relaxed)).count_ones()
        };
        let count: u32 = (0..WORDS).map(union).sum();
        let quota = ranks.clone().map(|cores| cores.quota.load(Ordering::Relaxed)).min();
        count.min(quota.unwrap_or(u32::MAX)).max(1) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(set: u64, quota: u32) -> Cores {
        let cores = Cores::default();
        cores.set[1].store(set, Ordering::Relaxed);
        cores.quota.store(quota, Ordering::Relaxed);
        cores
    }

    #[test]
    fn a_union_counts_every_core_once() {
        let bound = [cores(0b0011, u32::MAX), cores(0b0110, u32::MAX)];
        assert_eq!(Cores::count(bound.iter()), 3);
        let limited = [cores(0b1111, 2), cores(0b1111, u32::MAX)];
        assert_eq!(Cores::count(limited.iter()), 2);
        assert_eq!(Cores::count([Cores::default()].iter()), 1);
    }

    #[test]
    fn this_process_has_what_the_standard_library_says() {
        let own = Cores::default();
        own.publish();
        assert_eq!(Cores::count([own].iter()), std::thread::available_parallelism().unwrap().get());
    }
}
