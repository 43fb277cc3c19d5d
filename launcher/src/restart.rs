//! Once more? A pure decision.
//!
//! A run that broke in its midst is worth another try: a GPU that fell off the bus, a machine short of memory. One that
//! never made a step is broken by its start, and would only break again.

use std::time::Duration;

use crate::supervisor::Outcome;

/// First and longest pause before a restart; it doubles from one to the next.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// When ranks are restarted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestartPolicy {
    /// How often at most.
    pub most: u32,
    /// Also if no step was made since the last start.
    pub always: bool,
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
    /// After `restarts` restarts the ranks have ended so, `made_a_step` since the last one.
    pub(crate) fn decide(self, outcome: &Outcome, made_a_step: bool, restarts: u32) -> Decision {
        if outcome.culprit.is_none() || outcome.interrupted || outcome.unfit || self.most == 0 {
            return Decision::Stop(None);
        }
        if restarts >= self.most {
            return Decision::Stop(Some("no restart is left"));
        }
        if !made_a_step && !self.always {
            return Decision::Stop(Some(
                "not restarted, since no training step was made (--restart-always does all the same)",
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
        Outcome { exit_code, culprit: Some(1), unfit: false, message: None, interrupted: false }
    }

    #[test]
    fn only_what_may_go_better_is_tried_again() {
        let policy = RestartPolicy { most: 2, always: false };
        assert_eq!(policy.decide(&failed(137), true, 0), Decision::Restart(Duration::from_millis(500)));
        assert_eq!(policy.decide(&failed(137), true, 1), Decision::Restart(Duration::from_secs(1)));
        assert_eq!(policy.decide(&failed(137), true, 2), Decision::Stop(Some("no restart is left")));
        assert!(matches!(policy.decide(&failed(137), false, 0), Decision::Stop(Some(_))));
        let always = RestartPolicy { most: 99, always: true };
        // By whatever code a program fails.
        for code in [64, 70] {
            assert_eq!(always.decide(&failed(code), false, 40), Decision::Restart(PAUSES.1));
        }
        for outcome in [
            Outcome { culprit: None, ..failed(0) },
            Outcome { interrupted: true, ..failed(143) },
            Outcome { unfit: true, ..failed(69) },
        ] {
            assert_eq!(always.decide(&outcome, true, 0), Decision::Stop(None));
        }
        assert_eq!(RestartPolicy::default().decide(&failed(1), true, 0), Decision::Stop(None));
    }
}
