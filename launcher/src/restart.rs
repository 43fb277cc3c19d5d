//! Decides whether ranks are restarted. Pure: no I/O.
//!
//! A run that failed after some steps is worth a restart: a GPU may have fallen off the bus, or the machine was short of
//! memory. If ranks joined and completed no step, the failure is likely to repeat, so there is no restart. For ranks that
//! never join, such as a PyTorch script's, it is unknown how far they came: they are restarted.

use std::time::Duration;

use crate::supervisor::Outcome;

/// First and longest pause before a restart; it doubles from one to the next.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// When ranks are restarted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestartPolicy {
    /// Maximum number of restarts.
    pub max_restarts: u32,
    /// Restart even if ranks joined and completed no step since the last start.
    pub always: bool,
}

/// What the failure of one of several jobs means for the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FailPolicy {
    /// They run on.
    One,
    /// They end.
    #[default]
    All,
}

/// How far the ranks came before they ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reached {
    /// None has joined.
    Start,
    /// Some rank has joined.
    Join,
    /// Some rank has completed a training step.
    Step,
}

/// What to do after the end of all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Restart after this pause.
    Restart(Duration),
    /// Do not restart; a reason to print, if any.
    Stop(Option<&'static str>),
}

impl RestartPolicy {
    /// Decides after `restarts` restarts, for the outcome of the last start and what it `reached`.
    pub(crate) fn decide(self, outcome: &Outcome, reached: Reached, restarts: u32) -> Decision {
        if outcome.culprit.is_none() || outcome.interrupted || outcome.incompatible || self.max_restarts == 0
        {
            return Decision::Stop(None);
        }
        if restarts >= self.max_restarts {
            return Decision::Stop(Some("no restart is left"));
        }
        if reached == Reached::Join && !self.always {
            return Decision::Stop(Some(
                "not restarted, since no training step was completed (--restart-always restarts anyway)",
            ));
        }
        let (first, longest) = PAUSES;
        Decision::Restart(longest.min(first.saturating_mul(1 << restarts.min(16))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(exit_code: u8) -> Outcome {
        Outcome { exit_code, culprit: Some(1), incompatible: false, message: None, interrupted: false }
    }

    #[test]
    fn only_runs_that_may_succeed_are_restarted() {
        let policy = RestartPolicy { max_restarts: 2, always: false };
        for reached in [Reached::Start, Reached::Step] {
            let decide = |restarts| policy.decide(&failed(137), reached, restarts);
            assert_eq!(decide(0), Decision::Restart(Duration::from_millis(500)));
            assert_eq!(decide(1), Decision::Restart(Duration::from_secs(1)));
            assert_eq!(decide(2), Decision::Stop(Some("no restart is left")));
        }
        assert!(matches!(policy.decide(&failed(137), Reached::Join, 0), Decision::Stop(Some(_))));
        let always = RestartPolicy { max_restarts: 99, always: true };
        // Whatever code a program fails with.
        for code in [64, 70] {
            assert_eq!(always.decide(&failed(code), Reached::Join, 40), Decision::Restart(PAUSES.1));
        }
        for outcome in [
            Outcome { culprit: None, ..failed(0) },
            Outcome { interrupted: true, ..failed(143) },
            Outcome { incompatible: true, ..failed(69) },
        ] {
            assert_eq!(always.decide(&outcome, Reached::Step, 0), Decision::Stop(None));
        }
        assert_eq!(RestartPolicy::default().decide(&failed(1), Reached::Step, 0), Decision::Stop(None));
    }
}
