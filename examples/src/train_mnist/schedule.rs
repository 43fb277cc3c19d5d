//! `--schedule` and `--warm-up`: the learning rate schedule.

use std::fmt;
use std::str::FromStr;

use mgpu::optimizer::{Decay, Schedule};

/// How the learning rate changes after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ScheduleKind {
    /// Linear decay to 0 at the end of the training.
    Linear,
    /// Constant.
    Constant,
    /// Cosine decay to `floor` times the initial rate at the end of the training.
    Cosine { floor: f64 },
    /// Multiplied by `factor` after every `every` steps.
    Step { every: u64, factor: f64 },
}

impl ScheduleKind {
    /// The schedule of a training of `length` steps, with `warm_up` steps of warm-up.
    pub(super) fn over(self, length: u64, warm_up: u64) -> Schedule {
        let steps = length.saturating_sub(warm_up).max(1);
        let decay = match self {
            ScheduleKind::Linear => Decay::Linear { steps },
            ScheduleKind::Constant => Decay::Constant,
            ScheduleKind::Cosine { floor } => Decay::Cosine { steps, floor },
            ScheduleKind::Step { every, factor } => Decay::Step { every, factor },
        };
        Schedule { warm_up, decay }
    }

    /// True if the schedule depends on the length of the training, so that it cannot be extended.
    pub(super) fn ends(self) -> bool {
        matches!(self, ScheduleKind::Linear | ScheduleKind::Cosine { .. })
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScheduleKind::Linear => f.write_str("linear"),
            ScheduleKind::Constant => f.write_str("constant"),
            ScheduleKind::Cosine { floor: 0.0 } => f.write_str("cosine"),
            ScheduleKind::Cosine { floor } => write!(f, "cosine:{floor}"),
            ScheduleKind::Step { every, factor } => write!(f, "step:{every}:{factor}"),
        }
    }
}

impl FromStr for ScheduleKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let part = |text: &str| text.parse().ok().filter(|part: &f64| (0.0..=1.0).contains(part));
        let parts: Vec<&str> = text.split(':').collect();
        let shape = match parts[..] {
            ["linear"] => Some(ScheduleKind::Linear),
            ["constant"] => Some(ScheduleKind::Constant),
            ["cosine"] => Some(ScheduleKind::Cosine { floor: 0.0 }),
            ["cosine", floor] => part(floor).map(|floor| ScheduleKind::Cosine { floor }),
            ["step", every, factor] => {
                let every = every.parse().ok().filter(|every| *every > 0);
                every.zip(part(factor)).map(|(every, factor)| ScheduleKind::Step { every, factor })
            }
            _ => None,
        };
        shape.ok_or_else(|| {
            "it should be linear, constant, cosine, cosine:FLOOR or step:EVERY:FACTOR, such as step:1000:0.1".into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_parse_as_they_are_printed() {
        for text in ["linear", "constant", "cosine", "cosine:0.1", "step:1000:0.5"] {
            assert_eq!(text.parse::<ScheduleKind>().unwrap().to_string(), text);
        }
        for text in
            ["", "triangle", "cosine:2", "cosine:x", "step:0:0.5", "step:10", "step:10:-1", "linear:1"]
        {
            assert!(text.parse::<ScheduleKind>().unwrap_err().contains("step:EVERY:FACTOR"), "{text}");
        }
    }

    #[test]
    fn a_schedule_ends_with_the_training() {
        for shape in [ScheduleKind::Linear, ScheduleKind::Cosine { floor: 0.0 }] {
            let schedule = shape.over(100, 20);
            assert!(schedule.factor(99) > 0.0 && schedule.factor(99) < 0.02 && schedule.factor(100) == 0.0);
            assert_eq!(schedule.factor(19), 1.0);
        }
        assert_eq!(ScheduleKind::Linear.over(10, 50).factor(9), 0.2);
    }
}
