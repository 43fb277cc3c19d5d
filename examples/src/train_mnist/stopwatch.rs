//! Measures the time of an epoch's steps and of their collectives, without the work between steps.

use std::cell::Cell;
use std::ops::{AddAssign, Sub};
use std::time::Instant;

use mgpu::timeline::Timeline;

/// Seconds in total, in collectives, and, of these, waiting for peers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TimeSpent {
    pub(super) seconds: f64,
    collectives: f64,
    waiting: f64,
}

impl TimeSpent {
    /// Shares of the time in collectives, and waiting for peers there.
    pub(super) fn communication(&self) -> [f64; 2] {
        [self.collectives, self.waiting].map(|seconds| seconds / self.seconds.max(1e-9))
    }
}

impl AddAssign for TimeSpent {
    fn add_assign(&mut self, more: TimeSpent) {
        self.seconds += more.seconds;
        self.collectives += more.collectives;
        self.waiting += more.waiting;
    }
}

impl Sub for TimeSpent {
    type Output = TimeSpent;

    fn sub(self, less: TimeSpent) -> TimeSpent {
        TimeSpent {
            seconds: self.seconds - less.seconds,
            collectives: self.collectives - less.collectives,
            waiting: self.waiting - less.waiting,
        }
    }
}

/// Runs from its creation, or from an earlier instant.
pub(super) struct Stopwatch {
    started: Instant,
    timeline: Timeline,
    /// Time that does not count.
    left_out: Cell<TimeSpent>,
}

impl Stopwatch {
    /// Counts collectives from now on, and the time since `earlier`: a GPU works on the next epoch while the host
    /// reports the last one.
    pub(super) fn start(timeline: &Timeline, earlier: Option<Instant>) -> Self {
        let started = earlier.unwrap_or_else(Instant::now);
        let watch = Stopwatch { started, timeline: timeline.clone(), left_out: Cell::default() };
        watch.left_out.set(TimeSpent { seconds: 0.0, ..watch.total() });
        watch
    }

    fn total(&self) -> TimeSpent {
        let seconds = |counted: Option<std::time::Duration>| counted.unwrap_or_default().as_secs_f64();
        TimeSpent {
            seconds: self.started.elapsed().as_secs_f64(),
            collectives: seconds(self.timeline.communication()),
            waiting: seconds(self.timeline.waiting()),
        }
    }

    /// The time so far.
    pub(super) fn spent(&self) -> TimeSpent {
        self.total() - self.left_out.get()
    }

    /// Runs `work` without counting its time.
    pub(super) fn leave_out<R>(&self, work: impl FnOnce() -> R) -> R {
        let before = self.total();
        let result = work();
        let mut left_out = self.left_out.get();
        left_out += self.total() - before;
        self.left_out.set(left_out);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_does_not_count() {
        let timeline = Timeline::new(0).unwrap();
        let mut comm = timeline.observe(mgpu::World::from_env().unwrap().communicator().unwrap());
        comm.barrier().unwrap();
        let watch = Stopwatch::start(&timeline, None);
        assert_eq!(watch.spent().collectives, 0.0);
        watch.leave_out(|| comm.barrier().unwrap());
        let before = watch.spent();
        assert!(before.collectives.abs() < 1e-12 && before.seconds >= 0.0);
        comm.barrier().unwrap();
        let spent = watch.spent() - before;
        assert!(spent.collectives > 0.0 && spent.seconds >= spent.collectives);
        let [share, waiting] = spent.communication();
        assert!(share > 0.0 && share <= 1.0 && waiting <= share);
    }

    #[test]
    fn the_time_since_an_earlier_instant_counts() {
        let second = std::time::Duration::from_secs(1);
        let earlier = Instant::now().checked_sub(second);
        let watch = Stopwatch::start(&Timeline::new(0).unwrap(), earlier);
        assert!(earlier.is_none() || watch.spent().seconds >= 1.0);
    }
}
