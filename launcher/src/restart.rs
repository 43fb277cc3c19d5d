//! Once more? A pure decision.
//!
//! A run that broke in its midst is worth another try: a GPU that fell off the bus, a machine short of memory. One whose
//! ranks joined and never made a step is broken by its start, and would only break again. Of ranks that never join, such
//! as a PyTorch script's, nobody can tell how far they came: they are given the benefit of the doubt.

use std::time::Duration;

use crate::supervisor::Outcome;

/// First and longest pause before a restart; it doubles from one to the next.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// When ranks are restarted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestartPolicy {
    /// How often at most.
    pub max_restarts: u32,
    /// Also if ranks joined and no step was made since the last start.
    pub always: bool,
}

/// How far the ranks came before they ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reached {
    /// None has joined.
    Start,
    /// Some rank has joined.
    Join,
    /// Some rank has made a training step.
    Step,
}

/// What to do after an end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Restart after this pause.
    Restart(Duration),
    /// This was the end. The user may want to know why there is no restart.
    Stop(Option<&'static str>),
}

impl RestartPolicy {
    /// After `restarts` restarts the ranks have ended with this outcome, and `reached` so much since the last one.
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
    fn only_what_may_go_better_is_tried_again() {
        let policy = RestartPolicy { max_restarts: 2, always: false };
        for reached in [Reached::Start, Reached::Step] {
            let decide = |restarts| policy.decide(&failed(137), reached, restarts);
            assert_eq!(decide(0), Decision::Restart(Duration::from_millis(500)));
            assert_eq!(decide(1), Decision::Restart(Duration::from_secs(1)));
            assert_eq!(decide(2), Decision::Stop(Some("no restart is left")));
        }
        assert!(matches!(policy.decide(&failed(137), Reached::Join, 0), Decision::Stop(Some(_))));
        let always = RestartPolicy { max_restarts: 99, always: true };
        // By whatever code a program fails.
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
