//! Looks at the machine again before a restart: which GPUs are left?
//!
//! A GPU that has failed may keep the driver busy for seconds, and the event loop must not wait for it. So a thread looks,
//! during the pause before the restart. If it takes too long, the restart does not wait: all GPUs count as usable then.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use crate::placement::Gpu;
use crate::plan::Machine;

/// Longest wait for the driver after the pause, and the interval at which to look for its answer.
const TIMES: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(20));

/// A look at the machine.
pub(super) struct Survey {
    result: Receiver<Present>,
    /// When it has taken too long.
    limit: Instant,
}

/// What was found.
pub(super) struct Present {
    machine: Machine,
    /// The UUIDs of the GPUs; `None` if they are unknown.
    uuids: Option<BTreeSet<String>>,
}

impl Survey {
    /// Begins a look that is wanted at `until`.
    pub(super) fn begin(until: Instant) -> Self {
        let (sender, result) = channel();
        // If the thread cannot be started, the channel is closed, and nothing is known.
        let _ = std::thread::Builder::new().name("survey".into()).spawn(move || {
            // Ignored: the job may be over.
            let _ = sender.send(Present::detect());
        });
        Survey { result, limit: until + TIMES.0 }
    }

    /// What was found.
    ///
    /// # Errors
    /// The time at which to ask again.
    pub(super) fn take(&self) -> Result<Present, Instant> {
        match self.result.try_recv() {
            Ok(present) => Ok(present),
            Err(TryRecvError::Empty) if Instant::now() < self.limit => Err(Instant::now() + TIMES.1),
            Err(_) => Ok(Present::unknown()),
        }
    }
}

impl Present {
    fn detect() -> Self {
        let (machine, uuids) = Machine::detect_present();
        Present { machine, uuids }
    }

    fn unknown() -> Self {
        Present { machine: Machine::detect(), uuids: None }
    }

    /// Whether a GPU can be used, as far as is known.
    pub(super) fn has(&self, gpu: &Gpu) -> bool {
        let (Some(uuids), Some(uuid)) = (&self.uuids, &gpu.uuid) else { return true };
        uuids.contains(uuid)
    }

    pub(super) fn machine(&self) -> &Machine {
        &self.machine
    }
}
