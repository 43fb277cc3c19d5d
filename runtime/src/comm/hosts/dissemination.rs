//! Who sends the arrivals of which runs to whom. Pure.
//!
//! With few runs, the first rank of each sends the arrivals of its run to all others. With more, the number of messages
//! would grow with the square of the runs; so they use the dissemination of Bruck et al. (1997, "Efficient algorithms for
//! all-to-all communications"): in step `k` run `i` sends to run `i + 2^k` what it has of the runs `i, i − 1, …`, as many as
//! the receiver has not got, and every rank has sent and received ⌈log₂ runs⌉ messages when it has all.

/// The most runs of which each sends to all others.
pub(super) const FEW_RUNS: usize = 3;

/// A message of the first rank of a run to that of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    /// The run that receives it.
    pub(super) to: usize,
    /// It has the arrivals of so many runs: that of the sender and those before it.
    pub(super) carried: usize,
}

/// Step `number` of run `own` of `runs` runs, if there is one. Each needs nothing but what it carries.
pub(super) fn step(number: usize, own: usize, runs: usize) -> Option<Step> {
    if runs <= FEW_RUNS {
        return (number + 1 < runs).then(|| Step { to: (own + number + 1) % runs, carried: 1 });
    }
    let distance = 1usize.checked_shl(number as u32).filter(|distance| *distance < runs)?;
    Some(Step { to: (own + distance) % runs, carried: distance.min(runs - distance) })
}

/// The runs that a step of run `own` carries.
pub(super) fn carried(step: Step, own: usize, runs: usize) -> impl Iterator<Item = usize> {
    (0..step.carried).map(move |before| (own + runs - before) % runs)
}

/// The run from which run `own` gets the arrivals of run `run`, which is another one.
pub(super) fn source(run: usize, own: usize, runs: usize) -> usize {
    if runs <= FEW_RUNS {
        return run;
    }
    let behind = (own + runs - run) % runs;
    (own + runs - (1 << behind.ilog2())) % runs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every run gets the arrivals of each other one once, from its source, after that has got them.
    #[test]
    fn everything_is_delivered_once() {
        for runs in 1..=64usize {
            // By run: whose arrivals it has, and the number of the step that comes next.
            let mut has: Vec<Vec<usize>> = (0..runs).map(|run| vec![run]).collect();
            let mut next = vec![0; runs];
            let (mut delivered, mut first) = (true, 0);
            while std::mem::take(&mut delivered) {
                // In another order each time: nothing depends on who is first.
                first += 5;
                for own in (0..runs).map(|run| (run + first) % runs) {
                    let Some(step) = step(next[own], own, runs) else { continue };
                    let carries: Vec<usize> = carried(step, own, runs).collect();
                    if !carries.iter().all(|run| has[own].contains(run)) {
                        continue;
                    }
                    assert!(step.to != own && carries.iter().all(|run| source(*run, step.to, runs) == own));
                    has[step.to].extend(carries);
                    next[own] += 1;
                    delivered = true;
                }
            }
            let messages =
                if runs <= FEW_RUNS { runs - 1 } else { runs.next_power_of_two().ilog2() as usize };
            assert_eq!(next, vec![messages; runs]);
            for mut found in has {
                found.sort_unstable();
                assert!(found.into_iter().eq(0..runs), "{runs} runs");
            }
        }
    }
}
