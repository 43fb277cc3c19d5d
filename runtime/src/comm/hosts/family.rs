//! A communicator of the world and the groups that were split from it: they have one fate.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::wire::Sender;

/// The connections of all of them that exist on this rank.
#[derive(Default)]
pub(super) struct Family(Mutex<Vec<Weak<dyn Sender>>>);

impl Family {
    pub(super) fn add(&self, sender: &Arc<dyn Sender>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|sender| sender.strong_count() > 0);
        all.push(Arc::downgrade(sender));
    }

    /// Those that are in use.
    pub(super) fn senders(&self) -> Vec<Arc<dyn Sender>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    }
}
