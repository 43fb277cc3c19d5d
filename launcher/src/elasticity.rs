//! Decides which ranks of a job go on after a failure, if the job can do with fewer (`--min-ranks`). Pure: no I/O.
//!
//! Ranks are known by their numbers in the first start. A rank that failed once may have had bad luck: the next start has
//! it again. If it fails in two starts in a row, its GPU may be broken, although the driver lists it: it is left out. The
//! same holds for a rank that fails before the first step of a restart, since the job has made steps before. Often the
//! program then refuses this number of ranks (a power of two may be needed), and one fewer is tried.
//!
//! What was left out may work again later: after a start that made steps, the next one has all ranks that can be used.

use crate::restart::Reached;

/// The ranks of a job over its restarts.
#[derive(Debug, Clone)]
pub(crate) struct Elasticity {
    /// Fewest and most ranks of a start.
    fewest: u32,
    most: u32,
    /// The ranks of the current start, ascending.
    current: Vec<u32>,
    /// Ranks that the next start does without, the latest one last.
    left_out: Vec<u32>,
    /// The rank that has failed in the last start, if that was the first time.
    suspect: Option<u32>,
    /// An earlier start has made steps, or may have.
    has_advanced: bool,
}

impl Elasticity {
    /// For a job that starts with `most` ranks and goes on with at least `fewest`.
    pub(crate) fn new(fewest: u32, most: u32) -> Self {
        let current = (0..most).collect();
        Elasticity { fewest, most, current, left_out: Vec::new(), suspect: None, has_advanced: false }
    }

    /// Whether a start that failed before its first step is worth another one with fewer ranks.
    pub(crate) fn may_shrink(&self) -> bool {
        self.has_advanced && self.current.len() as u32 > self.fewest
    }

    /// Notes that rank `culprit` of the current start has failed.
    pub(crate) fn note_failure(&mut self, culprit: u32, reached: Reached) {
        let Some(culprit) = self.current.get(culprit as usize).copied() else { return };
        let is_early = reached == Reached::Join;
        if self.suspect == Some(culprit) || is_early && self.may_shrink() {
            self.left_out.push(culprit);
            self.suspect = None;
        } else {
            self.left_out.clear();
            self.suspect = Some(culprit);
        }
        self.has_advanced |= !is_early;
    }

    /// Chooses the ranks of the next start. `can_run` tells whether a rank has what it needs.
    ///
    /// # Errors
    /// The number of ranks that can run, if it is below the minimum.
    pub(crate) fn choose(&mut self, can_run: impl Fn(u32) -> bool) -> Result<&[u32], usize> {
        let usable: Vec<u32> = (0..self.most).filter(|rank| can_run(*rank)).collect();
        if usable.len() < self.fewest as usize {
            return Err(usable.len());
        }
        // What is missing in any case need not be left out, and the minimum comes first.
        self.left_out.retain(|rank| usable.contains(rank));
        let surplus = self.left_out.len().saturating_sub(usable.len() - self.fewest as usize);
        self.left_out.drain(..surplus);
        self.current = usable;
        self.current.retain(|rank| !self.left_out.contains(rank));
        Ok(&self.current)
    }

    /// The ranks of the current start, by their numbers in the first one.
    pub(crate) fn current(&self) -> &[u32] {
        &self.current
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(_: u32) -> bool {
        true
    }

    #[test]
    fn a_rank_that_fails_twice_in_a_row_is_left_out_until_steps_were_made() {
        let mut job = Elasticity::new(2, 4);
        job.note_failure(1, Reached::Step);
        assert_eq!(job.choose(all), Ok(&[0, 1, 2, 3][..]));
        job.note_failure(1, Reached::Step);
        assert_eq!(job.choose(all), Ok(&[0, 2, 3][..]));
        // It refuses three ranks.
        assert!(job.may_shrink());
        job.note_failure(0, Reached::Join);
        assert_eq!(job.choose(all), Ok(&[2, 3][..]));
        assert!(!job.may_shrink());
        job.note_failure(1, Reached::Step);
        assert_eq!(job.choose(all), Ok(&[0, 1, 2, 3][..]));
        // Rank 1 of the last start is rank 3 of all.
        job.note_failure(3, Reached::Step);
        assert_eq!(job.choose(all), Ok(&[0, 1, 2][..]));
    }

    #[test]
    fn other_ranks_have_bad_luck() {
        let mut job = Elasticity::new(1, 3);
        for culprit in [0, 1, 2, 0, 2] {
            job.note_failure(culprit, Reached::Start);
            assert_eq!(job.choose(all), Ok(&[0, 1, 2][..]));
        }
    }

    #[test]
    fn a_rank_without_its_gpu_is_missing_as_long_as_the_gpu() {
        let mut job = Elasticity::new(2, 4);
        job.note_failure(3, Reached::Step);
        assert_eq!(job.choose(|rank| rank != 3), Ok(&[0, 1, 2][..]));
        assert!(job.left_out.is_empty());
        job.note_failure(0, Reached::Step);
        assert_eq!(job.choose(all), Ok(&[0, 1, 2, 3][..]));
        assert_eq!(job.choose(|rank| rank == 1), Err(1));
    }

    #[test]
    fn before_the_first_step_of_all_no_rank_is_left_out() {
        let mut job = Elasticity::new(1, 2);
        assert!(!job.may_shrink());
        job.note_failure(1, Reached::Join);
        assert_eq!(job.choose(all), Ok(&[0, 1][..]));
        assert!(!job.may_shrink());
    }

    proptest! {
        #[test]
        fn a_start_has_as_many_ranks_as_required_if_they_can_run(
            fewest in 1u32..5, more in 0u32..5,
            failures in prop::collection::vec((any::<u32>(), any::<bool>(), any::<u16>()), 0..12),
        ) {
            let mut job = Elasticity::new(fewest, fewest + more);
            for (culprit, early, missing) in failures {
                let ranks = job.current().len() as u32;
                job.note_failure(culprit % ranks, if early { Reached::Join } else { Reached::Step });
                let can_run = |rank: u32| missing >> rank & 1 == 0;
                let usable = (0..fewest + more).filter(|rank| can_run(*rank)).count();
                match job.choose(can_run) {
                    Ok(chosen) => {
                        prop_assert!((fewest as usize..=usable).contains(&chosen.len()));
                        prop_assert!(chosen.is_sorted() && chosen.iter().all(|rank| can_run(*rank)));
                    }
                    Err(found) => prop_assert!(found == usable && usable < fewest as usize),
                }
            }
        }
    }
}
