//! What a rank holds as long as it belongs to the run.

use crate::Error;
use crate::progress::{ProgressPage, RankState};
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
    /// left.
    pub(crate) fn lost_peer(&self, awaited: &[u32], operation: impl FnOnce() -> String) -> Option<Error> {
        let failed = (0..self.page.world_size()).find(|peer| self.page.state(*peer) == RankState::Failed);
        let left = || awaited.iter().copied().find(|peer| self.page.state(*peer) == RankState::Left);
        let peer = failed.or_else(left)?;
        let how = match self.page.blame_of(peer) {
            Some(blame) => format!("{} ({})", self.page.departure(peer), blame.message),
            None => self.page.departure(peer),
        };
        Some(Error::PeerLost { rank: self.rank, peer, operation: operation(), how })
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.page.depart(self.rank, RankState::Failed, "panicked");
        }
        self.store.leave();
    }
}
