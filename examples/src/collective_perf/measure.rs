//! Timing of an operation.
//!
//! Ranks leave a barrier, read the clock, run the operation and read the clock again. The times of all ranks are
//! compared afterwards; the time of the operation is that of the slowest rank.

use std::time::{Duration, Instant};

use mgpu::{Buffer, Communicator, Result};

/// Number and duration limits of the runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunLimits {
    /// Runs that do not count.
    pub(super) warm_up: usize,
    pub(super) runs: usize,
    /// No new run starts after this time.
    pub(super) limit: Duration,
}

impl RunLimits {
    /// The default limits for `bytes` bytes.
    pub(super) fn for_size(bytes: usize) -> Self {
        let runs = match bytes {
            0..=65_536 => 2000,
            65_537..=4_194_304 => 200,
            _ => 20,
        };
        RunLimits { warm_up: runs / 10 + 2, runs, limit: Duration::from_secs(3) }
    }
}

/// Statistics of the runs, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Times {
    pub(super) p50: f64,
    pub(super) min: f64,
}

/// Runs `operation` on `buffer` within `limits`. Collective.
pub(super) fn sample(
    comm: &mut Communicator,
    mut buffer: Buffer,
    limits: RunLimits,
    mut operation: impl FnMut(&mut Communicator, Buffer) -> Result<Buffer>,
) -> Result<(Buffer, Times)> {
    let most = limits.warm_up + limits.runs;
    // The ranks' clocks are compared at most 20 times, to keep that cheap.
    let poll_interval = limits.runs.div_ceil(20);
    let mut micros = Vec::with_capacity(most);
    let begin = Instant::now();
    while micros.len() < most {
        comm.barrier()?;
        let start = Instant::now();
        buffer = operation(comm, buffer)?;
        micros.push(start.elapsed().as_secs_f64() * 1e6);
        // All ranks must stop at the same run: all use the clock of the slowest rank.
        if micros.len() % poll_interval == 0
            && slowest(comm, &[begin.elapsed().as_secs_f64()])?[0] > limits.limit.as_secs_f64()
        {
            break;
        }
    }
    Ok((buffer, summarise(slowest(comm, &micros)?, limits.warm_up)))
}

/// The maximum over ranks of each value. Uses a gather, because a reduction may be what is being measured.
fn slowest(comm: &mut Communicator, values: &[f64]) -> Result<Vec<f64>> {
    let all = comm.all_gather_slice(values)?;
    let of_ranks = |index| all[index..].iter().step_by(values.len()).copied().fold(0.0, f64::max);
    Ok((0..values.len()).map(of_ranks).collect())
}

/// Drops the warm-up, or half of the runs if the time limit ended them early.
fn summarise(mut micros: Vec<f64>, warm_up: usize) -> Times {
    micros.drain(..warm_up.min(micros.len() / 2));
    micros.sort_by(f64::total_cmp);
    Times { p50: micros[micros.len() / 2], min: micros[0] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_does_not_count() {
        assert_eq!(summarise(vec![1.0, 9.0, 8.0, 7.0], 1), Times { p50: 8.0, min: 7.0 });
        assert_eq!(summarise(vec![1.0, 9.0, 8.0, 7.0], 100), Times { p50: 8.0, min: 7.0 });
        assert_eq!(summarise(vec![5.0], 100), Times { p50: 5.0, min: 5.0 });
    }

    #[test]
    fn the_time_limit_stops_all_ranks_at_the_same_run() {
        let limits = RunLimits { warm_up: 2, runs: 100, limit: Duration::ZERO };
        let worlds = mgpu::World::threads(3).unwrap();
        std::thread::scope(|scope| {
            for mut world in worlds {
                scope.spawn(move || {
                    let mut comm = world.communicator().unwrap();
                    let mut runs = 0;
                    let buffer = Buffer::zeroed::<f32>(1);
                    let count = |_: &mut Communicator, buffer| {
                        runs += 1;
                        Ok(buffer)
                    };
                    sample(&mut comm, buffer, limits, count).unwrap();
                    assert_eq!(runs, 5, "up to the first comparison");
                });
            }
        });
    }
}
