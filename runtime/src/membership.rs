//! A rank's membership of the run: its connection to the rendezvous and its progress page.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::comm::Members;
use crate::inject::{InjectionPoint, ScheduledInjection};
use crate::interruption::caller_is_interrupted;
use crate::progress::{self, Blame, Ending, Phase, ProgressPage, RankState, StopState};
use crate::rendezvous::{RunningServer, Store};
use crate::survivor::wait_until_culprit_reaped;
use crate::{Error, Result};

/// Time between two looks at the page while the ranks agree where to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_micros(500);

/// Connection and progress page of one rank. Dropping the last reference leaves the run.
#[derive(Debug)]
pub(crate) struct Membership {
    rank: u32,
    /// All ranks of the world, after the first communicator.
    everyone: OnceLock<Members>,
    /// The number of the next group that this rank can be in.
    next_group: AtomicU32,
    /// Number of communicators that this rank has created.
    communicators: AtomicU32,
    store: Store,
    page: ProgressPage,
    /// Where ranks of several hosts connect.
    pub(crate) listener: crate::comm::hosts::Listener,
    /// Faults to inject into this rank.
    injections: Vec<ScheduledInjection>,
    /// The server of the ranks of this host, if this rank runs it.
    server: Option<RunningServer>,
    /// This rank has asked all ranks to stop.
    has_asked_to_stop: AtomicBool,
    /// How many collectives this rank's NCCL communicators have begun.
    #[cfg(feature = "cuda")]
    pub(crate) collectives: crate::comm::nccl::CollectiveCounters,
}

impl Membership {
    pub(crate) fn new(
        rank: u32,
        store: Store,
        page: ProgressPage,
        injections: Vec<ScheduledInjection>,
    ) -> Self {
        let is_past = |planned: &&ScheduledInjection| {
            matches!(planned.injection.point, InjectionPoint::Start | InjectionPoint::Join)
        };
        injections.iter().filter(is_past).for_each(|planned| page.note_fault(rank, planned.number));
        Membership {
            rank,
            everyone: OnceLock::new(),
            next_group: AtomicU32::new(1),
            communicators: AtomicU32::new(0),
            store,
            page,
            listener: crate::comm::hosts::Listener::default(),
            injections,
            server: None,
            has_asked_to_stop: AtomicBool::new(false),
            #[cfg(feature = "cuda")]
            collectives: crate::comm::nccl::CollectiveCounters::default(),
        }
    }

    /// The same rank, which runs the server of the ranks of this host.
    pub(crate) fn with_server(mut self, server: Option<RunningServer>) -> Self {
        self.server = server;
        self
    }

    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// All ranks of a world of `size`.
    pub(crate) fn everyone(&self, size: u32) -> Members {
        self.everyone.get_or_init(|| Members::everyone(self.rank, size)).clone()
    }

    /// The number of the next group that this rank can be in.
    pub(crate) fn next_group(&self) -> u32 {
        self.next_group.load(Ordering::Relaxed)
    }

    /// Counts a communicator that this rank creates, and returns their number.
    pub(crate) fn count_communicator(&self) -> u32 {
        self.communicators.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Whether this rank has created no second communicator, so that no two threads of it can run collectives at once.
    #[inline]
    pub(crate) fn has_one_communicator(&self) -> bool {
        self.communicators.load(Ordering::Relaxed) <= 1
    }

    /// Whether this rank has taken part in a split.
    pub(crate) fn has_groups(&self) -> bool {
        self.next_group() > 1
    }

    /// Takes `number` for a group. False if this rank has a group of that number or of a higher one, from a split in another
    /// thread.
    pub(crate) fn take_group_number(&self, number: u32) -> bool {
        let next = |next: u32| (next <= number).then_some(number + 1);
        self.next_group.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn page(&self) -> &ProgressPage {
        &self.page
    }

    /// Returns an error in a forked child of the rank, which is not part of the run.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        Ok(self.store.check_process()?)
    }

    /// Delays the error about a lost peer under other launchers, until the launcher has seen the peer's end (see
    /// [`survivor`](crate::survivor)).
    pub(crate) fn delay_error(&self, error: &Error) {
        // Each host has a launcher process of its own, which sees the ends of its own ranks only.
        let is_here = |rank| self.store.layout().is_none_or(|layout| layout.is_local(rank));
        if self.store.is_served_by_a_rank() && error.culprit().is_none_or(is_here) {
            let process = |peer| Some(self.page.progress(peer).pid).filter(|pid| *pid > 0);
            wait_until_culprit_reaped(error, process);
        }
    }

    /// Records on the progress page that a step begins.
    pub(crate) fn begin_step(&self, step: u64) {
        if self.check_process().is_err() {
            return;
        }
        self.page.begin_step(self.rank, step);
        self.inject_faults(InjectionPoint::Step(step));
    }

    /// Counts samples on the progress page.
    pub(crate) fn count_samples(&self, samples: u64) {
        if self.check_process().is_ok() {
            self.page.count_samples(self.rank, samples);
        }
    }

    /// Records on the progress page that another phase begins.
    pub(crate) fn begin_phase(&self, phase: Phase) {
        if self.check_process().is_err() {
            return;
        }
        self.page.set_phase(self.rank, phase);
        if phase == Phase::Checkpoint {
            self.inject_faults(InjectionPoint::Checkpoint);
        }
    }

    /// Records the rank at fault on the progress page, unless it is this rank: the launcher sees this rank's own end.
    pub(crate) fn blame(&self, error: &Error) {
        if error.culprit() != Some(self.rank) {
            self.record_blame(error);
        }
    }

    /// Records the rank at fault on the progress page, even if it is this rank.
    pub(crate) fn record_blame(&self, error: &Error) {
        if let Some(blame) = error.blame() {
            self.page.blame(self.rank, &blame);
        }
    }

    /// The process of the launcher that serves this rank; `None` if a rank does.
    pub(crate) fn launcher(&self) -> Option<u32> {
        (!self.store.is_served_by_a_rank()).then(|| self.page.run().launcher)
    }

    /// Makes a stop check: whether all ranks stop here (see [`StopState`]). `is_wanted` if this rank wants them to.
    pub(crate) fn stop_requested(&self, is_wanted: bool, timeout: Duration) -> Result<bool> {
        self.check_process()?;
        // Another thread may be in a long call: then this rank asks at its next check.
        if is_wanted && !self.store.is_in_use() && !self.has_asked_to_stop.swap(true, Ordering::Relaxed) {
            self.store.ask_to_stop()?;
        }
        let check = self.page.begin_stop_check(self.rank);
        match self.page.stop_state() {
            StopState::NotAsked => Ok(false),
            StopState::At(number) => Ok(check >= number),
            StopState::Proposed => self.wait_for_stop(timeout).map(|number| check >= number),
        }
    }

    /// Waits until the ranks have agreed at which stop check they stop. Returns its number.
    #[cold]
    fn wait_for_stop(&self, timeout: Duration) -> Result<u64> {
        let begin = Instant::now();
        loop {
            if let StopState::At(number) = self.page.stop_state() {
                return Ok(number);
            }
            let operation = || "the agreement where to stop".to_owned();
            if let Some(error) = self.lost_peer(&[], operation) {
                return Err(error);
            }
            if begin.elapsed() >= timeout {
                let problem = format!(
                    "the hosts did not agree where to stop within {:.1} s; is the network between them slow?",
                    timeout.as_secs_f64()
                );
                return Err(Error::Rendezvous { rank: self.rank, operation: operation(), problem });
            }
            std::thread::sleep(STOP_POLL_INTERVAL);
        }
    }

    /// Injects the faults that are planned for this moment.
    pub(crate) fn inject_faults(&self, moment: InjectionPoint) {
        for planned in due(&self.injections, moment) {
            self.page.note_fault(self.rank, planned.number);
            planned.injection.fault.trigger();
        }
    }

    /// The error of waiting for `awaited`, if the wait cannot succeed: some rank has failed, or one of `awaited` has
    /// left. It names the rank that failed first, as far as known. Or the wait of this thread was interrupted.
    pub(crate) fn lost_peer(&self, awaited: &[u32], operation: impl FnOnce() -> String) -> Option<Error> {
        // The server records how ranks end, but the rank that runs it cannot record its own end.
        if self.store.serving_rank_is_gone()
            && let Some(serving) = self.store.serving_rank()
            && self.page.state(serving) == RankState::Joined
        {
            self.page.record_end(serving, Ending::Failed("ended without a goodbye"));
        }
        let failed = self.page.first_failed();
        if failed.is_none() && (self.store.is_interrupted() || caller_is_interrupted()) {
            return Some(Error::Interrupted { rank: self.rank, operation: operation() });
        }
        let left = || awaited.iter().copied().find(|peer| self.page.state(*peer) == RankState::Left);
        let peer = failed.or_else(left)?;
        Some(self.lost_error(peer, operation()))
    }

    /// The error of waiting for `peer`, which has ended, or takes part in no operation any more because one has failed. It
    /// names the rank that `peer` blames, or else `peer`.
    pub(crate) fn lost_error(&self, peer: u32, operation: String) -> Error {
        let (peer, accusation) = self.find_culprit(peer);
        let departure = self.page.end_description(peer);
        let own = self.page.blame_of(peer);
        // A rank that is stuck blames itself.
        let own_silence =
            own.clone().filter(|own| departure.is_empty() && own.culprit == peer && own.timed_out);
        let accusation = accusation.or(own_silence);
        let silent = accusation.as_ref().is_some_and(|blame| blame.timed_out);
        let how = match (own, accusation) {
            (_, Some(accusation)) if silent => format!("made no progress ({})", accusation.message),
            (Some(own), _) if !departure.is_empty() => format!("{departure} ({})", own.message),
            (_, Some(accusation)) if departure.is_empty() => format!("is to blame ({})", accusation.message),
            (Some(own), _) => format!("has failed ({})", own.message),
            _ if departure.is_empty() => "has failed in another operation".to_owned(),
            _ => departure,
        };
        Error::PeerLost { rank: self.rank, peer, operation, how, silent }
    }

    /// How long `rank` has made no progress: begun no step, no other phase and no operation of any communicator. A rank
    /// that has ended makes none.
    pub(crate) fn idle_time(&self, rank: u32) -> Duration {
        let progress = self.page.progress(rank);
        match progress.state {
            RankState::Joined => progress::now().saturating_sub(progress.changed),
            _ => Duration::MAX,
        }
    }

    /// The rank that blocks `rank` according to the progress page: follows who waits for whom, up to a rank that does
    /// not wait. `rank` itself if they wait in a cycle, or for this rank.
    pub(crate) fn end_of_wait_chain(&self, rank: u32) -> u32 {
        let waits_for = |rank: u32| self.page.progress(rank).operation.filter(|last| last.running)?.waits_for;
        let (mut last, mut seen) = (rank, vec![self.rank, rank]);
        while let Some(next) = waits_for(last) {
            if next >= self.page.world_size() || seen.contains(&next) {
                return rank;
            }
            seen.push(next);
            last = next;
        }
        last
    }

    /// Follows the recorded blame from an ended rank to the rank that failed first, and returns that rank with the
    /// error that blames it. Stops at a cycle, or at this rank.
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

/// The faults that are planned for `moment`.
fn due(
    injections: &[ScheduledInjection],
    moment: InjectionPoint,
) -> impl Iterator<Item = &ScheduledInjection> {
    injections.iter().filter(move |planned| planned.injection.point == moment)
}

/// Injects the faults of a moment before the rank has a progress page.
pub(crate) fn inject_planned(injections: &[ScheduledInjection], moment: InjectionPoint) {
    due(injections, moment).for_each(|planned| planned.injection.fault.trigger());
}

impl Drop for Membership {
    fn drop(&mut self) {
        // A forked child has a copy of this; it must not leave the run in the rank's name.
        if self.check_process().is_err() {
            return;
        }
        if std::thread::panicking() {
            self.page.record_end(self.rank, Ending::Failed("panicked"));
        } else {
            self.begin_phase(Phase::Finalise);
            self.inject_faults(InjectionPoint::Finalise);
        }
        self.store.leave();
        if let Some(server) = &self.server {
            server.wait_until_idle(|| self.page.first_failed().is_some());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::in_process_on_nodes;

    /// Ranks 0 to 2 on a node each. Rank 1 is stuck; rank 2 blames it and fails; rank 0 has to name rank 1.
    #[test]
    fn the_culprit_is_found_on_every_node() {
        let ranks = in_process_on_nodes(&[0, 1, 2], 3, "a-test").unwrap();
        let memberships: Vec<Membership> = (0..)
            .zip(ranks)
            .map(|(rank, (store, page))| Membership::new(rank, store, page, Vec::new()))
            .collect();
        let (after, patience) = (Duration::from_secs(1), Duration::from_secs(60));
        let timeout = Error::Timeout { rank: 2, waited_for: vec![1], operation: "barrier".into(), after };
        memberships[2].blame(&timeout);
        memberships[2].page().record_end(2, Ending::Failed("exited with code 1"));
        memberships[2].store().leave();
        for rank in [0, 1] {
            let lost = memberships[rank].store().get("never", 2, patience).map_err(Error::from).unwrap_err();
            assert_eq!(lost.culprit(), Some(2), "{lost}");
        }
        let lost = memberships[0].lost_peer(&[2], || "all_reduce 7".into()).unwrap();
        assert_eq!(lost.culprit(), Some(1), "{lost}");
        assert!(
            lost.to_string().contains("rank 1 made no progress (rank 2 waited 1.0 s for rank 1"),
            "{lost}"
        );
        // The accused one sees who has accused it.
        let lost = memberships[1].lost_peer(&[2], || "all_reduce 7".into()).unwrap();
        assert_eq!(lost.culprit(), Some(2), "{lost}");
    }
}
