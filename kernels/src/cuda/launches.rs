//! A record of launches: how many kernels a step has, and how many bytes they move.
//!
//! A kernel is counted with its operands, each read or written once, twice if it is changed in place: what has to go
//! through the GPU's memory if its caches keep nothing from one kernel to the next, and everything within one. Calls of
//! libraries are not recorded.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// One launch of a kernel, or one command that fills or copies memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name.
    pub kernel: String,
    /// Bytes of its operands.
    pub bytes: u64,
}

/// The launches on a GPU, while they are recorded.
#[derive(Debug, Default)]
pub(super) struct Launches {
    is_recording: AtomicBool,
    launches: Mutex<Vec<Launch>>,
}

impl Launches {
    /// Records from now on.
    pub(super) fn start(&self) {
        self.launches.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.is_recording.store(true, Ordering::Relaxed);
    }

    /// Ends the record, and returns it.
    pub(super) fn take(&self) -> Vec<Launch> {
        self.is_recording.store(false, Ordering::Relaxed);
        std::mem::take(&mut self.launches.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a launch, if launches are recorded.
    pub(super) fn add(&self, kernel: &str, bytes: impl FnOnce() -> u64) {
        if self.is_recording.load(Ordering::Relaxed) {
            let launch = Launch { kernel: kernel.to_owned(), bytes: bytes() };
            self.launches.lock().unwrap_or_else(PoisonError::into_inner).push(launch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_launches_between_start_and_take_are_recorded() {
        let launches = Launches::default();
        launches.add("early", || 1);
        launches.start();
        launches.add("first", || 2);
        launches.add("second", || 3);
        let expected = [("first", 2), ("second", 3)];
        let expected = expected.map(|(kernel, bytes)| Launch { kernel: kernel.to_owned(), bytes });
        assert_eq!(launches.take(), expected);
        launches.add("late", || 4);
        assert_eq!(launches.take(), []);
    }
}
