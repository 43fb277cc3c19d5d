//! `--log-every N`: the results of every N training steps, of all ranks.
//!
//! The engine counts from the beginning of an epoch, a line from the one before it. So a line that follows the end of
//! an epoch adds up two parts: what that epoch had after its last line, and what the new one has so far.

use std::fmt;

use crate::nets::LossReport;

/// Losses and seconds of some steps.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    score: LossReport,
    seconds: f64,
}

impl Part {
    /// What came after `earlier`, of the same epoch.
    fn since(self, earlier: Part) -> Part {
        let LossReport { loss_sum, correct, samples } = self.score;
        let score = LossReport {
            loss_sum: loss_sum - earlier.score.loss_sum,
            correct: correct - earlier.score.correct,
            samples: samples - earlier.score.samples,
        };
        Part { score, seconds: self.seconds - earlier.seconds }
    }

    fn plus(mut self, other: Part) -> Part {
        self.score += other.score;
        Part { score: self.score, seconds: self.seconds + other.seconds }
    }
}

/// When the next line is due, and what it has to cover.
#[derive(Debug)]
pub(super) struct TrainingLog {
    /// Steps from one line to the next.
    every: u64,
    /// Of earlier epochs, after the last line.
    carried: Part,
    /// Of this epoch, up to the last line.
    logged: Part,
}

impl TrainingLog {
    pub(super) fn new(every: u64) -> Self {
        TrainingLog { every, carried: Part::default(), logged: Part::default() }
    }

    /// The step of the next line after `step` steps.
    pub(super) fn next(&self, step: u64) -> u64 {
        (step / self.every + 1).saturating_mul(self.every)
    }

    /// Whether a line is due after `step` steps.
    pub(super) fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every)
    }

    /// The line after `step` of `length` steps, for the `score` of all ranks in this epoch and its `seconds` so far.
    pub(super) fn line(&mut self, (step, length): (u64, u64), score: LossReport, seconds: f64) -> LogLine {
        let so_far = Part { score, seconds };
        let Part { score, seconds } = self.carried.plus(so_far.since(self.logged));
        (self.carried, self.logged) = (Part::default(), so_far);
        LogLine {
            step,
            length,
            loss: score.loss(),
            accuracy: score.accuracy(),
            images_per_s: score.samples as f64 / seconds.max(1e-9),
        }
    }

    /// Ends an epoch with this `score` of all ranks, after `seconds`.
    pub(super) fn end_epoch(&mut self, score: LossReport, seconds: f64) {
        self.carried = self.carried.plus(Part { score, seconds }.since(self.logged));
        self.logged = Part::default();
    }
}

/// The results of the steps since the line before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LogLine {
    pub(super) step: u64,
    /// Steps of the whole training.
    length: u64,
    pub(super) loss: f64,
    pub(super) accuracy: f64,
    pub(super) images_per_s: f64,
}

impl fmt::Display for LogLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LogLine { step, length, loss, accuracy, images_per_s } = self;
        let percent = accuracy * 100.0;
        write!(f, "step {step}/{length}: train {percent:.2}% loss {loss:.4} ({images_per_s:.0} images/s)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(loss_sum: f64, correct: u64, samples: u64) -> LossReport {
        LossReport { loss_sum, correct, samples }
    }

    #[test]
    fn a_line_covers_the_steps_since_the_one_before() {
        let mut log = TrainingLog::new(10);
        assert_eq!((log.next(0), log.next(9), log.next(10), log.next(u64::MAX)), (10, 10, 20, u64::MAX));
        assert!(log.is_due(20) && !log.is_due(25));
        let line = log.line((10, 100), score(200.0, 50, 100), 2.0);
        assert_eq!(line.to_string(), "step 10/100: train 50.00% loss 2.0000 (50 images/s)");
        let line = log.line((20, 100), score(300.0, 140, 200), 4.0);
        assert_eq!((line.loss, line.accuracy, line.images_per_s), (1.0, 0.9, 50.0));
        // An epoch of 25 steps.
        log.end_epoch(score(350.0, 190, 250), 5.0);
        let line = log.line((30, 100), score(150.0, 40, 50), 0.25);
        assert_eq!((line.loss, line.accuracy, line.images_per_s), (2.0, 0.9, 80.0));
        // An epoch that ends with a line leaves nothing to carry.
        log.end_epoch(score(150.0, 40, 50), 0.25);
        let line = log.line((40, 100), score(10.0, 10, 10), 1.0);
        assert_eq!((line.loss, line.accuracy, line.images_per_s), (1.0, 1.0, 10.0));
    }

    #[test]
    fn epochs_shorter_than_a_window_are_added_up() {
        let mut log = TrainingLog::new(30);
        for _ in 0..3 {
            log.end_epoch(score(10.0, 5, 10), 1.0);
        }
        let line = log.line((30, 100), score(20.0, 5, 10), 1.0);
        assert_eq!((line.loss, line.accuracy, line.images_per_s), (1.25, 0.5, 10.0));
    }
}
