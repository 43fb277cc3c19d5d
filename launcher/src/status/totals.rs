//! Totals and rates of every rank, from samples of the progress page.
//!
//! Steps and collectives are counted by the ranks. How long a rank communicates, and how long others wait for it, is
//! measured without their help: the page is read many times a second, and each reading stands for the time since the
//! one before. So the ranks spend no time on it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use mgpu_control::progress::{Progress, ProgressPage, RankState};
use serde::Serialize;

/// Interval between two readings of the page.
pub(crate) const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);

/// A reading stands for this time at most: after a longer one the reader was suspended.
const LONGEST_SAMPLE: Duration = Duration::from_secs(1);

/// Rates are those of this time.
const WINDOW: Duration = Duration::from_secs(3);

/// Interval between two entries of the window.
const WINDOW_STEP: Duration = Duration::from_millis(250);

/// What a rank has done since the reader began, or since it was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct RankTotals {
    /// Steps begun.
    pub(crate) steps: u64,
    /// Samples processed.
    pub(crate) samples: u64,
    /// Collectives begun.
    pub(crate) collectives: u64,
    /// Seconds in collectives.
    pub(crate) communicating: f64,
    /// Seconds that other ranks have waited for it, added over these ranks.
    pub(crate) waited_for: f64,
}

/// What a rank does in a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct RankRates {
    /// Steps.
    pub(crate) steps: f64,
    /// Samples.
    pub(crate) samples: f64,
    /// Collectives.
    pub(crate) collectives: f64,
    /// Share of the time in collectives, from 0 to 1.
    pub(crate) communicating: f64,
    /// The mean number of ranks that wait for it.
    pub(crate) waited_for: f64,
}

/// The totals of the ranks of one page.
#[derive(Debug)]
pub(crate) struct Totals {
    ranks: Vec<RankTotals>,
    sampled: Option<Instant>,
    window: VecDeque<(Instant, Vec<RankTotals>)>,
}

/// What a reading of the page says about a rank.
#[derive(Debug, Clone, Copy)]
struct Reading {
    is_running: bool,
    is_communicating: bool,
    waits_for: Option<u32>,
    steps: u64,
    samples: u64,
    collectives: u64,
}

impl Reading {
    fn of(page: &ProgressPage, rank: u32) -> Self {
        let Progress { state, steps_begun, operation, .. } = page.progress(rank);
        let running = operation.filter(|last| last.running);
        Reading {
            is_running: state == RankState::Joined,
            is_communicating: running.is_some(),
            waits_for: running.and_then(|last| last.waits_for),
            steps: steps_begun,
            samples: page.samples(rank),
            collectives: page.recorded(rank),
        }
    }
}

impl Totals {
    /// For a page with so many ranks.
    pub(crate) fn new(ranks: u32) -> Self {
        let ranks = vec![RankTotals::default(); ranks as usize];
        Totals { ranks, sampled: None, window: VecDeque::new() }
    }

    /// Reads the page once.
    pub(crate) fn sample(&mut self, page: &ProgressPage, now: Instant) {
        let readings: Vec<Reading> =
            (0..self.ranks.len() as u32).map(|rank| Reading::of(page, rank)).collect();
        self.add(&readings, now);
    }

    fn add(&mut self, readings: &[Reading], now: Instant) {
        let passed = self.sampled.replace(now).map_or(Duration::ZERO, |last| now.duration_since(last));
        let seconds = passed.min(LONGEST_SAMPLE).as_secs_f64();
        for (rank, reading) in readings.iter().enumerate() {
            let totals = &mut self.ranks[rank];
            totals.steps = reading.steps;
            totals.samples = reading.samples;
            totals.collectives = reading.collectives;
            if reading.is_running && reading.is_communicating {
                totals.communicating += seconds;
            }
            let peer = reading.waits_for.filter(|peer| reading.is_running && *peer as usize != rank);
            if let Some(peer) = peer.and_then(|peer| self.ranks.get_mut(peer as usize)) {
                peer.waited_for += seconds;
            }
        }
        if self.window.back().is_none_or(|(at, _)| now.duration_since(*at) >= WINDOW_STEP) {
            self.window.push_back((now, self.ranks.clone()));
        }
        // The oldest entry is the last one that is as old as the window.
        while self.window.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
            self.window.pop_front();
        }
    }

    /// The totals of a rank.
    pub(crate) fn of(&self, rank: u32) -> RankTotals {
        self.ranks.get(rank as usize).copied().unwrap_or_default()
    }

    /// The rates of a rank; zero after the first reading.
    pub(crate) fn rates(&self, rank: u32) -> RankRates {
        let (Some((from, old)), Some(to)) = (self.window.front(), self.sampled) else {
            return RankRates::default();
        };
        let seconds = to.duration_since(*from).as_secs_f64();
        if seconds == 0.0 {
            return RankRates::default();
        }
        let (old, new) = (old.get(rank as usize).copied().unwrap_or_default(), self.of(rank));
        let counted = |old: u64, new: u64| new.saturating_sub(old) as f64 / seconds;
        RankRates {
            steps: counted(old.steps, new.steps),
            samples: counted(old.samples, new.samples),
            collectives: counted(old.collectives, new.collectives),
            communicating: ((new.communicating - old.communicating) / seconds).clamp(0.0, 1.0),
            waited_for: (new.waited_for - old.waited_for) / seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Reading = Reading {
        is_running: true,
        is_communicating: false,
        waits_for: None,
        steps: 0,
        samples: 0,
        collectives: 0,
    };

    #[test]
    fn readings_add_up_to_shares_and_rates() {
        let (mut totals, start) = (Totals::new(3), Instant::now());
        for reading in 0..=200u64 {
            // Ranks 0 and 2 communicate in every other reading, and then wait for rank 1.
            let waiting = reading % 2 == 0 && reading > 0;
            let waits = Reading {
                is_communicating: waiting,
                waits_for: waiting.then_some(1),
                steps: reading,
                ..IDLE
            };
            let busy = Reading { steps: reading, samples: reading * 32, collectives: reading * 3, ..IDLE };
            totals.add(&[waits, busy, waits], start + SAMPLE_INTERVAL * reading as u32);
        }
        let (rates, of) = (totals.rates(1), totals.of(1));
        assert!((of.waited_for - 10.0).abs() < 1e-6, "{of:?}");
        let near =
            |value: f64, expected: f64| assert!((value - expected).abs() < expected / 50.0, "{rates:?}");
        near(rates.steps, 20.0);
        near(rates.samples, 640.0);
        near(rates.collectives, 60.0);
        near(rates.waited_for, 1.0);
        assert_eq!(rates.communicating, 0.0);
        near(totals.rates(0).communicating, 0.5);
        assert_eq!(totals.rates(0).waited_for, 0.0);
        assert!(totals.window.len() < 16);
    }

    #[test]
    fn a_suspended_reader_and_odd_readings_are_tolerated() {
        let (mut totals, start) = (Totals::new(2), Instant::now());
        assert_eq!(totals.rates(0), RankRates::default());
        let odd = Reading { is_communicating: true, waits_for: Some(u32::MAX), ..IDLE };
        totals.add(&[odd, odd], start);
        assert_eq!(totals.rates(0), RankRates::default());
        totals.add(&[odd, odd], start + Duration::from_secs(1000));
        assert_eq!(totals.of(0).communicating, 1.0);
        assert_eq!((totals.of(7), totals.rates(7)), (RankTotals::default(), RankRates::default()));
    }
}
