//! How long ranks wait for whoever takes their output: pure.
//!
//! A reader that is slow should slow the ranks down, and lose nothing: that is what a pipe does. A reader that has
//! stopped for good, a terminal after Ctrl-S or a disk that hangs, should not: a training run is worth more than its
//! output. The two differ in one thing, whether anything is taken now and then, so that is what is watched. The time
//! counts from the moment in which ranks had to wait; whatever is taken starts it again.

use std::time::{Duration, Instant};

/// How one destination is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The queue is short.
    Open,
    /// The queue is long: ranks wait, and nothing was taken since then.
    Waiting(Instant),
    /// Ranks do not wait any more: what they write is dropped.
    Stuck,
}

/// Tells a slow destination from a stuck one.
#[derive(Debug)]
pub(super) struct Patience {
    limit: Duration,
    state: State,
}

impl Patience {
    /// Ranks wait for `limit` while nothing is taken.
    pub(super) fn new(limit: Duration) -> Self {
        Patience { limit, state: State::Open }
    }

    /// Takes in what was seen at `now`: whether something was taken since the last look, and whether the queue is
    /// long.
    pub(super) fn observe(&mut self, taken: bool, long: bool, now: Instant) {
        self.state = match self.state {
            _ if !long => State::Open,
            _ if taken => State::Waiting(now),
            State::Open => State::Waiting(now),
            unchanged => unchanged,
        };
    }

    /// Gives up if the time has passed.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            self.state = State::Stuck;
        }
    }

    /// When [`expire`](Self::expire) is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            // A time beyond all clocks is for ever.
            State::Waiting(since) => since.checked_add(self.limit),
            State::Open | State::Stuck => None,
        }
    }

    /// Ranks should wait.
    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting(_))
    }

    /// What ranks write should be dropped.
    pub(super) fn is_stuck(&self) -> bool {
        self.state == State::Stuck
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
        let mut patience = Patience::new(LIMIT);
        patience.observe(false, true, start);
        assert!(patience.is_waiting());
        assert_eq!(patience.deadline(), Some(start + LIMIT));
        patience.expire(start + LIMIT);
        assert!(patience.is_stuck() && patience.deadline().is_none());
        patience.observe(true, true, start + 2 * LIMIT);
        assert_eq!(patience.deadline(), Some(start + 3 * LIMIT));
        patience.observe(true, false, start + 2 * LIMIT);
        assert!(!patience.is_waiting() && !patience.is_stuck());
    }

    proptest! {
        /// Whatever the times at which something is taken: a queue that moves often enough is never given up, and
        /// nobody waits longer than the limit for one that does not.
        #[test]
        fn slow_is_not_stuck(gaps in prop::collection::vec((0u64..80, any::<bool>()), 1..60)) {
            let start = Instant::now();
            let mut patience = Patience::new(LIMIT);
            let (mut now, mut last) = (start, start);
            patience.observe(false, true, now);
            for (gap, taken) in gaps {
                now += Duration::from_millis(gap);
                patience.expire(now);
                prop_assert_eq!(patience.is_stuck(), now - last >= LIMIT);
                prop_assert_ne!(patience.is_stuck(), patience.is_waiting());
                patience.observe(taken, true, now);
                if taken {
                    last = now;
                }
            }
        }
    }
}
