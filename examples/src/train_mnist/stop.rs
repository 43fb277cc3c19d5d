//! The end of a training that was asked to stop: all ranks have stopped after the same step, and save it.

use std::error::Error;

use mgpu::{Phase, World};

use super::Session;
use super::report::{EpochReport, TestResult};
use super::trainer::Trainer;
use crate::print::outln;

/// How a training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    Finished,
    /// On request. It can be resumed.
    Stopped,
}

/// The end of a training that was asked to stop before it began.
pub(super) fn before_training(world: &World) -> Ended {
    if world.rank() == 0 {
        outln!("stopped on request, before the training");
    }
    Ended::Stopped
}

impl Session<'_> {
    /// Saves a training that stops. `unevaluated` are the results of an epoch whose evaluation was cut short: the resumed
    /// run repeats it. Returns no result of the training. Collective.
    pub(super) fn stop(
        &self,
        trainer: &mut Trainer,
        unevaluated: Option<EpochReport>,
    ) -> Result<Option<Option<TestResult>>, Box<dyn Error>> {
        self.world.report_phase(Phase::Checkpoint);
        let (steps, length) = (trainer.steps(), trainer.length());
        let saved = trainer.save_stopped(unevaluated)?;
        if self.world.rank() == 0 {
            let how = match saved {
                Some(folder) => format!("saved to {}: continue with --resume", folder.display()),
                None if steps == 0 => "there is nothing to save".to_owned(),
                None => "nothing was saved, for lack of --checkpoint-dir".to_owned(),
            };
            self.progress.line(&format!("stopped on request after step {steps} of {length}; {how}"));
        }
        Ok(None)
    }
}
