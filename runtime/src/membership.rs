//! What a rank holds as long as it belongs to the run.

use crate::inject::{Moment, Planned};
use crate::progress::{Blame, Ending, Phase, ProgressPage, RankState};
use crate::rendezvous::Store;
use crate::survivor::wait_until_culprit_reaped;
use crate::{Error, Result};

/// Connection and progress page of one rank. The last owner to let go says goodbye.
#[derive(Debug)]
pub(crate) struct Membership {
    rank: u32,
    store: Store,
    page: ProgressPage,
    /// Faults this rank is to commit.
    injections: Vec<Planned>,
    /// How it stands with this rank's communicators on the GPU.
    #[cfg(feature = "cuda")]
    pub(crate) collectives: crate::comm::nccl::CollectiveCounters,
}

impl Membership {
    pub(crate) fn new(rank: u32, store: Store, page: ProgressPage, injections: Vec<Planned>) -> Self {
        let is_past = |planned: &&Planned| matches!(planned.injection.moment, Moment::Start | Moment::Join);
        injections.iter().filter(is_past).for_each(|planned| page.note_fault(rank, planned.number));
        Membership {
            rank,
            store,
            page,
            injections,
            #[cfg(feature = "cuda")]
            collectives: crate::comm::nccl::CollectiveCounters::default(),
        }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn page(&self) -> &ProgressPage {
        &self.page
    }

    /// An error in a child that the rank has forked: the run is not its own.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        Ok(self.store.check_process()?)
    }

    /// Where another launcher judges, waits until it has seen the end of the peer that `error` tells the loss of.
    pub(crate) fn delay_error(&self, error: &Error) {
        if self.store.is_served_by_a_rank() {
            let process = |peer| Some(self.page.progress(peer).pid).filter(|pid| *pid > 0);
            wait_until_culprit_reaped(error, process);
        }
    }

    /// Notes that a step begins.
    pub(crate) fn begin_step(&self, step: u64) {
        if self.check_process().is_err() {
            return;
        }
        self.page.begin_step(self.rank, step);
        self.inject_faults(Moment::Step(step));
    }

    /// Notes that another part of the work begins.
    pub(crate) fn begin_phase(&self, phase: Phase) {
        if self.check_process().is_err() {
            return;
        }
        self.page.set_phase(self.rank, phase);
        if phase == Phase::Checkpoint {
            self.inject_faults(Moment::Checkpoint);
        }
    }

    /// Notes whom `error` holds responsible, unless that is this rank itself: its own end says that.
    pub(crate) fn blame(&self, error: &Error) {
        if error.culprit() != Some(self.rank) {
            self.record_blame(error);
        }
    }

    /// Notes whom `error` holds responsible, be it this rank itself.
    pub(crate) fn record_blame(&self, error: &Error) {
        if let Some(blame) = error.blame() {
            self.page.blame(self.rank, &blame);
        }
    }

    /// Commits the faults of this moment.
    pub(crate) fn inject_faults(&self, moment: Moment) {
        for planned in due(&self.injections, moment) {
            self.page.note_fault(self.rank, planned.number);
            planned.injection.fault.commit();
        }
    }

    /// The error of waiting for `awaited` in vain, if it is in vain: some rank has failed, or one of `awaited` has
    /// left. It names the rank where the trouble began.
    pub(crate) fn lost_peer(&self, awaited: &[u32], operation: impl FnOnce() -> String) -> Option<Error> {
        // The server notes how ranks end, but not its own end.
        if self.store.host_is_gone() && self.page.state(0) == RankState::Joined {
            self.page.depart(0, Ending::Failed("ended without a goodbye"));
        }
        let failed = self.page.first_failed();
        let left = || awaited.iter().copied().find(|peer| self.page.state(*peer) == RankState::Left);
        let peer = failed.or_else(left)?;
        let (peer, accusation) = self.find_culprit(peer);
        let silent = accusation.as_ref().is_some_and(|blame| blame.timed_out);
        let departure = self.page.departure(peer);
        let how = match (self.page.blame_of(peer), accusation) {
            (_, Some(accusation)) if silent => format!("made no progress ({})", accusation.message),
            (Some(own), _) if !departure.is_empty() => format!("{departure} ({})", own.message),
            (_, Some(accusation)) if departure.is_empty() => format!("is to blame ({})", accusation.message),
            _ => departure,
        };
        Some(Error::PeerLost { rank: self.rank, peer, operation: operation(), how, silent })
    }

    /// Follows the blame from a rank that has ended to the rank where the trouble began, and returns what that one is
    /// accused of. Ranks that record_blame each other, or this one, are as far as one can tell the beginning.
    fn find_culprit(&self, ended: u32) -> (u32, Option<Blame>) {
        let (mut origin, mut accusation) = (ended, None);
        let mut seen = vec![self.rank, ended];
        while let Some(blame) = self.page.blame_of(origin).filter(|blame| !seen.contains(&blame.culprit)) {
            origin = blame.culprit;
            seen.push(origin);
            accusation = Some(blame);
        }
        (origin, accusation)
    }
}

/// Those of `injections` that are due at `moment`.
fn due(injections: &[Planned], moment: Moment) -> impl Iterator<Item = &Planned> {
    injections.iter().filter(move |planned| planned.injection.moment == moment)
}

/// Commits the faults of a moment at which there is no progress page yet.
pub(crate) fn inject_planned(injections: &[Planned], moment: Moment) {
    due(injections, moment).for_each(|planned| planned.injection.fault.commit());
}

impl Drop for Membership {
    fn drop(&mut self) {
        // A forked child has a copy, and says goodbye for nobody.
        if self.check_process().is_err() {
            return;
        }
        if std::thread::panicking() {
            self.page.depart(self.rank, Ending::Failed("panicked"));
        } else {
            self.begin_phase(Phase::Finalise);
            self.inject_faults(Moment::Finalise);
        }
        self.store.leave();
    }
}
