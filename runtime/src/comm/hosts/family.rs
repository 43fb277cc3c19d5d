//! A communicator of the world and the groups that were split from it: they have one fate.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::wire::Wires;

/// The connections of all of them that exist on this rank.
#[derive(Default)]
pub(super) struct Family(Mutex<Vec<Weak<Wires>>>);

impl Family {
    pub(super) fn add(&self, wires: &Arc<Wires>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|wires| wires.strong_count() > 0);
        all.push(Arc::downgrade(wires));
    }

    /// Those that are in use.
    pub(super) fn wires(&self) -> Vec<Arc<Wires>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    }
}
