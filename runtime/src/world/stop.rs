//! Stopping on request: all ranks learn at the same place that they should save their work and end.

use std::sync::atomic::Ordering::Relaxed;

use mgpu_control::stop_signals;

use super::World;
use crate::Result;

impl World {
    /// Whether the ranks should stop: save a checkpoint and exit with code
    /// [`EXIT_STOPPED`](crate::protocol::EXIT_STOPPED). All ranks ask equally often, for instance before each step. The
    /// n-th call returns the same on all ranks, and after the first `true` every further call returns `true`. It is no
    /// collective, and costs as much as two atomic operations; a rank waits in it only while a stop on several hosts is
    /// being agreed, for some milliseconds.
    ///
    /// Who asks the ranks to stop: `mgpurun`, when it gets SIGTERM, SIGINT, SIGHUP or SIGUSR1, by `mgpurun stop` and by
    /// `--stop-after`; [`request_stop`](Self::request_stop) on any rank; and SIGTERM, SIGINT or SIGUSR1 sent to any rank,
    /// which matters under other launchers. From its first call on, this process handles these three signals, except
    /// those that it already handles or ignores. A second SIGTERM or SIGINT, a second later or more, ends it.
    ///
    /// ```
    /// # fn main() -> mgpu::Result<()> {
    /// # let (world, steps) = (mgpu::World::from_env()?, 3);
    /// for step in 0..steps {
    ///     if world.stop_requested()? {
    ///         // Save a checkpoint, wait until it is written, and leave main with code EXIT_STOPPED.
    ///         break;
    ///     }
    ///     world.report_step(step + 1);
    ///     // …
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a rank fails, or the timeout passes, while the ranks agree; if the launcher is gone.
    pub fn stop_requested(&self) -> Result<bool> {
        if self.handles_signals {
            stop_signals::handle(self.membership.as_ref().and_then(|membership| membership.launcher()));
        }
        let is_wanted = self.wants_stop.load(Relaxed) || self.handles_signals && stop_signals::have_asked();
        match &self.membership {
            Some(membership) => membership.stop_requested(is_wanted, self.timeout()),
            None => Ok(is_wanted),
        }
    }

    /// Asks all ranks to stop, for a reason of the program's own. They learn it when all of them next ask
    /// [`stop_requested`](Self::stop_requested), this one included. May be called by one rank or by several.
    pub fn request_stop(&self) {
        self.wants_stop.store(true, Relaxed);
    }
}
