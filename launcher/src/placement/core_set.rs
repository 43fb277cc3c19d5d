//! Sets of cores in the kernel's notation: `0-3,8,10-11`.

use std::collections::BTreeSet;
use std::fmt;

use nix::sched::CpuSet;

/// A set of cores by their kernel numbers (logical CPUs): every hyper-thread has one.
///
/// Numbers above the maximum of the affinity call are left out when a list is parsed, so an absurd list
/// (`0-4000000000`) costs nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CoreSet(BTreeSet<usize>);

impl CoreSet {
    /// Parses the kernel's notation. `None` if the text is invalid; an empty list is the empty set.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.is_empty() {
            return Some(Self::default());
        }
        let mut set = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            if first > last {
                return None;
            }
            set.extend(first..=last.min(CpuSet::count() - 1));
        }
        Some(CoreSet(set))
    }

    /// Number of cores.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if the set contains `core`.
    pub fn contains(&self, core: usize) -> bool {
        self.0.contains(&core)
    }

    /// The lowest core.
    pub fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }

    /// The cores in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    /// The cores in both sets.
    pub fn intersection(&self, other: &CoreSet) -> CoreSet {
        CoreSet(&self.0 & &other.0)
    }

    /// The cores that are not in `other`.
    pub fn without(&self, other: &CoreSet) -> CoreSet {
        CoreSet(&self.0 - &other.0)
    }

    /// The set for the affinity call.
    pub(crate) fn to_cpu_set(&self) -> CpuSet {
        let mut set = CpuSet::new();
        for core in self.iter() {
            // Cannot fail: the set holds only numbers that the call accepts (see `parse` and `From`).
            let _ = set.set(core);
        }
        set
    }
}

impl From<CpuSet> for CoreSet {
    fn from(set: CpuSet) -> Self {
        (0..CpuSet::count()).filter(|core| set.is_set(*core).unwrap_or(false)).collect()
    }
}

impl FromIterator<usize> for CoreSet {
    fn from_iter<I: IntoIterator<Item = usize>>(cores: I) -> Self {
        CoreSet(cores.into_iter().filter(|core| *core < CpuSet::count()).collect())
    }
}

impl<'a> FromIterator<&'a CoreSet> for CoreSet {
    fn from_iter<I: IntoIterator<Item = &'a CoreSet>>(sets: I) -> Self {
        CoreSet(sets.into_iter().flat_map(CoreSet::iter).collect())
    }
}

impl fmt::Display for CoreSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cores = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cores.next() {
            let mut last = first;
            while let Some(next) = cores.next_if_eq(&(last + 1)) {
                last = next;
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn core_sets_round_trip_through_text(cores in proptest::collection::btree_set(0usize..1024, 0..40)) {
            let set: CoreSet = cores.iter().copied().collect();
            prop_assert_eq!(CoreSet::parse(&set.to_string()), Some(set.clone()));
            prop_assert_eq!(CoreSet::from(set.to_cpu_set()), set);
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".{0,40}", list in "[0-9,\\-\n ]{0,40}") {
            let _ = (CoreSet::parse(&text), CoreSet::parse(&list));
        }
    }

    #[test]
    fn the_kernels_notation_is_parsed() {
        let cores = |text: &str| CoreSet::parse(text).map(|set| set.iter().collect::<Vec<_>>());
        assert_eq!(cores("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(cores(" \n"), Some(vec![]));
        for text in ["x", "3-1", "-", "1,,2", "1-2-3", "-1"] {
            assert_eq!(cores(text), None, "{text}");
        }
        assert_eq!(CoreSet::parse("0-4000000000").unwrap().len(), CpuSet::count());
        assert_eq!(CoreSet::parse("3,0,1,7,8").unwrap().to_string(), "0-1,3,7-8");
    }
}
