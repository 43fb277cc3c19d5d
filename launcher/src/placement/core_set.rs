//! Sets of cores, as the kernel writes them: `0-3,8,10-11`.

use std::collections::BTreeSet;
use std::fmt;

use nix::sched::CpuSet;

/// Cores by the numbers that the kernel gives them: every hyper-thread has one.
///
/// Numbers past the largest that the affinity call knows are left out when a list is read, so a list that nobody could
/// mean (`0-4000000000`) costs nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CoreSet(BTreeSet<usize>);

impl CoreSet {
    /// Reads the kernel's notation. `None` if it is anything else; an empty list is the empty set.
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

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if `core` is one of them.
    pub fn contains(&self, core: usize) -> bool {
        self.0.contains(&core)
    }

    /// The lowest.
    pub fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }

    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    /// Those in both.
    pub fn intersection(&self, other: &CoreSet) -> CoreSet {
        CoreSet(&self.0 & &other.0)
    }

    /// Those that are not in `other`.
    pub fn without(&self, other: &CoreSet) -> CoreSet {
        CoreSet(&self.0 - &other.0)
    }

    /// As the affinity call takes it.
    pub(crate) fn to_cpu_set(&self) -> CpuSet {
        let mut set = CpuSet::new();
        for core in self.iter() {
            // A number it does not know cannot be in the set: see `parse` and `From`.
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
        fn what_is_written_is_read_back(cores in proptest::collection::btree_set(0usize..1024, 0..40)) {
            let set: CoreSet = cores.iter().copied().collect();
            prop_assert_eq!(CoreSet::parse(&set.to_string()), Some(set.clone()));
            prop_assert_eq!(CoreSet::from(set.to_cpu_set()), set);
        }

        #[test]
        fn nothing_makes_the_reader_panic(text in ".{0,40}", list in "[0-9,\\-\n ]{0,40}") {
            let _ = (CoreSet::parse(&text), CoreSet::parse(&list));
        }
    }

    #[test]
    fn the_kernels_notation() {
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
