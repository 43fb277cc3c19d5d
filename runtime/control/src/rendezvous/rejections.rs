//! Aggregates rejected connections, so that a flood of connections causes one line of output instead of thousands.
//! Pure: no I/O.
//!
//! Rejections are counted per group: of processes here (a rank shares its group with the processes that it starts), of
//! addresses between hosts. They are collected for a while and reported together. The collection time doubles after each report, so a long flood does not fill the
//! screen either.

use std::time::{Duration, Instant};

/// First and longest time for which rejections are collected.
const COLLECTION_TIME: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(60));

/// Maximum number of groups that are counted separately; the others are counted together.
const MAX_GROUPS: usize = 8;

/// The rejected connections of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rejection<G = u32> {
    /// `None` if it is not known, or for several groups.
    pub(crate) group: Option<G>,
    pub(crate) count: u64,
    /// The first one, and why it was rejected.
    pub(crate) why: String,
}

/// Rejections that have not been reported yet.
#[derive(Debug)]
pub(crate) struct Rejections<G = u32> {
    collected: Vec<Rejection<G>>,
    report_at: Option<Instant>,
    /// Number of reports.
    reported: u32,
}

impl<G> Default for Rejections<G> {
    fn default() -> Self {
        Rejections { collected: Vec::new(), report_at: None, reported: 0 }
    }
}

impl<G: Copy + PartialEq> Rejections<G> {
    pub(crate) fn add(&mut self, group: Option<G>, why: String, now: Instant) {
        let (first, longest) = COLLECTION_TIME;
        self.report_at.get_or_insert_with(|| now + longest.min(first * (1 << self.reported.min(16))));
        // Beyond the maximum, groups are counted like unknown ones.
        let known = |group| self.collected.iter().position(|rejection| rejection.group == group);
        let is_full = self.collected.len() >= MAX_GROUPS;
        let group = group.filter(|_| known(group).is_some() || !is_full);
        match known(group) {
            Some(position) => self.collected[position].count += 1,
            None => self.collected.push(Rejection { group, count: 1, why }),
        }
    }

    /// When the next report is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.report_at
    }

    /// All rejections, if they have been collected for long enough.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<Rejection<G>> {
        if self.report_at.is_none_or(|at| now < at) {
            return Vec::new();
        }
        self.take()
    }

    /// All rejections.
    pub(crate) fn take(&mut self) -> Vec<Rejection<G>> {
        self.reported += u32::from(self.report_at.take().is_some());
        std::mem::take(&mut self.collected)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_rejection_is_counted_once(groups in prop::collection::vec(prop::option::of(0u32..20), 0..200)) {
            let (mut rejections, now) = (Rejections::<u32>::default(), Instant::now());
            for (number, group) in groups.iter().enumerate() {
                rejections.add(*group, number.to_string(), now);
            }
            let reported = rejections.take();
            prop_assert_eq!(reported.iter().map(|rejection| rejection.count).sum::<u64>(), groups.len() as u64);
            prop_assert!(reported.len() <= MAX_GROUPS + 1);
            for rejection in reported.iter().filter(|rejection| rejection.group.is_some()) {
                let own: Vec<usize> = (0..groups.len()).filter(|index| groups[*index] == rejection.group).collect();
                prop_assert_eq!(rejection.count, own.len() as u64);
                prop_assert_eq!(&rejection.why, &own[0].to_string());
            }
        }
    }

    #[test]
    fn a_long_flood_is_reported_less_and_less_often() {
        let (mut rejections, start) = (Rejections::default(), Instant::now());
        let mut now = start;
        let mut lines = 0;
        while now < start + Duration::from_secs(3600) {
            rejections.add(Some(7), "is a flood".into(), now);
            lines += rejections.take_due(now).len();
            now += Duration::from_millis(100);
        }
        assert!((60..=70).contains(&lines), "{lines} lines in an hour");
        assert!(rejections.next_deadline().is_some_and(|at| at <= now + COLLECTION_TIME.1));
    }
}
