//! How long ranks wait for whoever takes their output: pure.
//!
//! A reader that is slow should slow the ranks down, and lose nothing: that is what a pipe does. A reader that has
//! stopped for good, a terminal after Ctrl-S or a disk that hangs, should not: a training run is worth more than its
//! output. The two differ in one thing, whether anything is taken now and then, so that is what is watched. The time
//! counts from the moment in which ranks had to wait; whatever is taken starts it again.

use std::time::{Duration, Instant};

/// How one destination is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// The queue is short.
    Open,
    /// The queue is long: ranks wait, and nothing was taken since then.
    Waiting(Instant),
    /// Ranks do not wait any more: what they write is dropped.
    Stalled,
}

/// Tells a slow destination from a stuck one.
#[derive(Debug)]
pub(super) struct StallDetector {
    limit: Duration,
    state: Flow,
}

impl StallDetector {
    /// Ranks wait for `limit` while nothing is taken.
    pub(super) fn new(limit: Duration) -> Self {
        StallDetector { limit, state: Flow::Open }
    }

    /// Takes in what was seen at `now`: whether something was taken since the last look, and whether the queue is
    /// long.
    pub(super) fn observe(&mut self, taken: bool, long: bool, now: Instant) {
        self.state = match self.state {
            _ if !long => Flow::Open,
            _ if taken => Flow::Waiting(now),
            Flow::Open => Flow::Waiting(now),
            unchanged => unchanged,
        };
    }

    /// Gives up if the time has passed.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            self.state = Flow::Stalled;
        }
    }

    /// When [`expire`](Self::expire) is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            // A time beyond all clocks is for ever.
            Flow::Waiting(since) => since.checked_add(self.limit),
            Flow::Open | Flow::Stalled => None,
        }
    }

    /// Ranks should wait.
    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.state, Flow::Waiting(_))
    }

    /// What ranks write should be dropped.
    pub(super) fn is_stalled(&self) -> bool {
        self.state == Flow::Stalled
    }

    /// The time that ranks wait.
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
    fn a_stuck_reader_is_given_up_and_comes_back() {
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
        /// Whatever the times at which something is taken: a queue that moves often enough is never given up, and
        /// nobody waits longer than the limit for one that does not.
        #[test]
        fn slow_is_not_stuck(gaps in prop::collection::vec((0u64..80, any::<bool>()), 1..60)) {
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
