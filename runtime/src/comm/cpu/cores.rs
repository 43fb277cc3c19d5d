//! Whether every rank has a core of its own, and seeing to it that it does.
//!
//! Whether there are enough decides how to wait and which path small payloads take, so all ranks must come to the same
//! answer: each publishes the cores it may use, and all count their union. A control group may allow less time than
//! there are cores; its quota is for all ranks together, so it limits the union. It is read from the group itself: what
//! the standard library offers as a process's parallelism is 1 for a rank that is bound to one core, quota or not.
//!
//! Ranks that start together and wait for each other may come to lie on the same core while another is idle, and the
//! scheduler, which sees two tasks that forever give way to each other, may leave them there. A rank that finds itself
//! on the core of a lower one moves to a free core. It does not bind itself: it asks to run there and then takes the
//! wish back.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

use crate::control_group::cpu_quota;

/// Words of a set of cores: as many as the system call knows.
const WORDS: usize = 16;

const THIS_THREAD: Pid = Pid::from_raw(0);

/// The cores of one rank. Written before the communicator is connected, read afterwards.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Cores {
    set: [AtomicU64; WORDS],
    /// How many cores all processes of the control group may keep busy together; the largest number without a limit.
    quota: AtomicU32,
    /// The core it was last seen on, plus one; 0 before.
    last: AtomicU32,
}

impl Cores {
    /// Publishes what this thread may use.
    pub(super) fn publish(&self) {
        let set = sched_getaffinity(THIS_THREAD).unwrap_or_else(|_| CpuSet::new());
        for core in (0..WORDS * 64).filter(|core| set.is_set(*core).unwrap_or(false)) {
            self.set[core / 64].fetch_or(1 << (core % 64), Ordering::Relaxed);
        }
        let quota = cpu_quota().and_then(|quota| u32::try_from(quota).ok());
        self.quota.store(quota.unwrap_or(u32::MAX), Ordering::Relaxed);
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
        // What was allowed a moment ago is allowed still, unless the core was taken away from the whole machine.
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
    fn this_process_has_what_the_standard_library_says() {
        let own = Cores::default();
        own.publish();
        assert_eq!(Cores::count([own].iter()), std::thread::available_parallelism().unwrap().get());
    }

    #[test]
    fn ranks_bound_to_a_core_each_have_a_core_each() {
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
    fn two_ranks_on_one_core_part() {
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
