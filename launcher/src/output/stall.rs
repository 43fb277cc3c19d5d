//! Distinguishes a slow destination of output from a stalled one. Pure: no I/O.
//!
//! A slow reader should slow the ranks down and lose nothing, as a pipe does. A reader that has stopped for good, such
//! as a terminal after Ctrl-S or a disk that hangs, should not stop the ranks: a training run is worth more than its
//! output. The difference is whether the destination accepts anything from time to time. The timeout starts when ranks
//! have to wait, and restarts whenever something is accepted.

use std::time::{Duration, Instant};

/// The state of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// The queue is short.
    Open,
    /// The queue is long: ranks wait, and nothing was accepted since then.
    Waiting(Instant),
    /// Ranks do not wait any more: their output is dropped.
    Stalled,
}

/// Detects that a destination has stalled.
#[derive(Debug)]
pub(super) struct StallDetector {
    limit: Duration,
    state: Flow,
}

impl StallDetector {
    /// A detector for which ranks wait for `limit` while nothing is accepted.
    pub(super) fn new(limit: Duration) -> Self {
        StallDetector { limit, state: Flow::Open }
    }

    /// Updates the state at `now`: whether something was accepted since the last call, and whether the queue is long.
    pub(super) fn observe(&mut self, taken: bool, long: bool, now: Instant) {
        self.state = match self.state {
            _ if !long => Flow::Open,
            _ if taken => Flow::Waiting(now),
            Flow::Open => Flow::Waiting(now),
            unchanged => unchanged,
        };
    }

    /// Changes to stalled if the timeout has passed.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            self.state = Flow::Stalled;
        }
    }

    /// When [`expire`](Self::expire) is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            // If the deadline is not representable, there is none.
            Flow::Waiting(since) => since.checked_add(self.limit),
            Flow::Open | Flow::Stalled => None,
        }
    }

    /// True while ranks should wait.
    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.state, Flow::Waiting(_))
    }

    /// True while the ranks' output should be dropped.
    pub(super) fn is_stalled(&self) -> bool {
        self.state == Flow::Stalled
    }

    /// The stall timeout.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(30);

    #[test]
    fn a_stalled_reader_is_detected_and_may_recover() {
        let start = Instant::now();
        let mut stall = StallDetector::new(LIMIT);
        stall.observe(false, true, start);
        assert!(stall.is_waiting());
        assert_eq!(stall.deadline(), Some(start + LIMIT));
        stall.expire(start + LIMIT);
        assert!(stall.is_stalled() && stall.deadline().is_none());
        stall.observe(true, true, start + 2 * LIMIT);
        assert_eq!(stall.deadline(), Some(start + 3 * LIMIT));
        stall.observe(true, false, start + 2 * LIMIT);
        assert!(!stall.is_waiting() && !stall.is_stalled());
    }

    proptest! {
        /// Whenever something is accepted: a queue that makes progress often enough never counts as stalled, and ranks
        /// never wait longer than the limit for one that does not.
        #[test]
        fn a_slow_reader_is_not_stalled(gaps in prop::collection::vec((0u64..80, any::<bool>()), 1..60)) {
            let start = Instant::now();
            let mut stall = StallDetector::new(LIMIT);
            let (mut now, mut last) = (start, start);
            stall.observe(false, true, now);
            for (gap, taken) in gaps {
                now += Duration::from_millis(gap);
                stall.expire(now);
                prop_assert_eq!(stall.is_stalled(), now - last >= LIMIT);
                prop_assert_ne!(stall.is_stalled(), stall.is_waiting());
                stall.observe(taken, true, now);
                if taken {
                    last = now;
                }
            }
        }
    }
}
