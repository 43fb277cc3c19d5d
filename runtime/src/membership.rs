//! What a rank holds as long as it belongs to the run.

use crate::Error;
use crate::progress::{Blame, Ending, ProgressPage, RankState};
use crate::rendezvous::Store;

/// Connection and progress page of one rank. The last owner to let go says goodbye.
#[derive(Debug)]
pub(crate) struct Membership {
    rank: u32,
    store: Store,
    page: ProgressPage,
}

impl Membership {
    pub(crate) fn new(rank: u32, store: Store, page: ProgressPage) -> Self {
        Membership { rank, store, page }
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

    /// The error of waiting for `awaited` in vain, if it is in vain: some rank has failed, or one of `awaited` has
    /// left. It names the rank where the trouble began.
    pub(crate) fn lost_peer(&self, awaited: &[u32], operation: impl FnOnce() -> String) -> Option<Error> {
        let failed = (0..self.page.world_size()).find(|peer| self.page.state(*peer) == RankState::Failed);
        let left = || awaited.iter().copied().find(|peer| self.page.state(*peer) == RankState::Left);
        let peer = failed.or_else(left)?;
        let (peer, accusation) = self.origin(peer);
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
    /// accused of. Ranks that accuse each other, or this one, are as far as one can tell the beginning.
    fn origin(&self, ended: u32) -> (u32, Option<Blame>) {
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

impl Drop for Membership {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.page.depart(self.rank, Ending::Failed("panicked"));
        }
        self.store.leave();
    }
}
