//! Whether every rank has a core of its own (or the machine is oversubscribed), and spreading ranks over cores.
//!
//! This decides how ranks wait and which path small payloads take, so all ranks must get the same result: each
//! publishes the cores it may use, and all count their union. A control group may allow less CPU time than there are
//! cores; its quota is for all ranks together, so it limits the union. It is read from the group itself, because the
//! standard library reports a parallelism of 1 for a rank that is bound to one core, with or without a quota.
//!
//! Ranks that start together and wait for each other may run on the same core while another is idle, and the
//! scheduler, which sees two tasks that keep yielding to each other, may leave them there. A rank that finds itself
//! on the core of a lower rank moves to a free core. It does not stay bound: it sets its affinity to that core and
//! then restores it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

use crate::control_group::cpu_quota;

/// Words of a core set: as many as the system call supports.
const WORDS: usize = 16;

const THIS_THREAD: Pid = Pid::from_raw(0);

/// The cores of one rank. Written before the communicator is connected, read afterwards.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Cores {
    set: [AtomicU64; WORDS],
    /// CPU quota of the control group in cores, shared by all of its processes; `u32::MAX` without a limit.
    quota: AtomicU32,
    /// The core on which the rank was last seen, plus one; 0 if none.
    last: AtomicU32,
}

impl Cores {
    /// Publishes the cores that this thread may use.
    pub(super) fn publish(&self) {
        let set = sched_getaffinity(THIS_THREAD).unwrap_or_else(|_| CpuSet::new());
        for core in (0..WORDS * 64).filter(|core| set.is_set(*core).unwrap_or(false)) {
            self.set[core / 64].fetch_or(1 << (core % 64), Ordering::Relaxed);
        }
        let quota = cpu_quota().and_then(|quota| u32::try_from(quota).ok());
        self.quota.store(quota.unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Number of cores that all ranks have together.
    pub(super) fn count<'a>(ranks: impl Iterator<Item = &'a Cores> + Clone) -> usize {
        let union = |word: usize| {
            ranks.clone().fold(0, |union, cores| union | cores.set[word].load(Ordering::Relaxed)).count_ones()
        };
        let count: u32 = (0..WORDS).map(union).sum();
        let quota = ranks.clone().map(|cores| cores.quota.load(Ordering::Relaxed)).min();
        count.min(quota.unwrap_or(u32::MAX)).max(1) as usize
    }
}

/// Moves the calling thread away from the core of a rank below `rank`, if there is a core that no rank is on.
pub(super) fn spread<'a>(rank: u32, cores_of: impl Fn(u32) -> &'a Cores, ranks: u32) {
    let Ok(core) = sched_getcpu() else { return };
    cores_of(rank).last.store(core as u32 + 1, Ordering::Relaxed);
    let taken_by = |core: usize, mut ranks: std::ops::Range<u32>| {
        ranks.any(|rank| cores_of(rank).last.load(Ordering::Relaxed) == core as u32 + 1)
    };
    if !taken_by(core, 0..rank) {
        return;
    }
    let Ok(allowed) = sched_getaffinity(THIS_THREAD) else { return };
    let free =
        (0..WORDS * 64).find(|core| allowed.is_set(*core).unwrap_or(false) && !taken_by(*core, 0..ranks));
    let Some(free) = free else { return };
    let mut only = CpuSet::new();
    if only.set(free).and_then(|()| sched_setaffinity(THIS_THREAD, &only)).is_ok() {
        cores_of(rank).last.store(free as u32 + 1, Ordering::Relaxed);
        // This restores the previous affinity; it only fails if the core was taken offline.
        let _ = sched_setaffinity(THIS_THREAD, &allowed);
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
    fn the_core_count_of_a_process_is_that_of_the_standard_library() {
        let own = Cores::default();
        own.publish();
        assert_eq!(Cores::count([own].iter()), std::thread::available_parallelism().unwrap().get());
    }

    #[test]
    fn ranks_bound_to_different_cores_are_not_oversubscribed() {
        let allowed = sched_getaffinity(THIS_THREAD).unwrap();
        let cores = (0..WORDS * 64).filter(|core| allowed.is_set(*core).unwrap_or(false));
        let bound = |core: usize| {
            let rank = Cores::default();
            let mut only = CpuSet::new();
            only.set(core).unwrap();
            sched_setaffinity(THIS_THREAD, &only).unwrap();
            rank.publish();
            rank
        };
        let ranks: Vec<Cores> = cores.map(bound).collect();
        sched_setaffinity(THIS_THREAD, &allowed).unwrap();
        assert_eq!(Cores::count(ranks.iter()), std::thread::available_parallelism().unwrap().get());
    }

    #[test]
    fn two_ranks_on_one_core_are_spread() {
        let allowed = sched_getaffinity(THIS_THREAD).unwrap();
        let ranks = [Cores::default(), Cores::default()];
        ranks[0].last.store(sched_getcpu().unwrap() as u32 + 1, Ordering::Relaxed);
        spread(1, |rank| &ranks[rank as usize], 2);
        let last = |rank: usize| ranks[rank].last.load(Ordering::Relaxed);
        let cores = (0..WORDS * 64).filter(|core| allowed.is_set(*core).unwrap_or(false)).count();
        assert!(last(1) != 0);
        assert_eq!(last(0) == last(1), cores == 1);
        assert_eq!(sched_getaffinity(THIS_THREAD).unwrap(), allowed);
    }
}
