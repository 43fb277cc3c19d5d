//! Which memory graphs may still need.
//!
//! A graph holds addresses. So memory that was there when one was captured is not freed before the last graph is gone,
//! even if its owner is. Memory that came later is in no graph and is freed at once.

/// An allocation without an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allocation {
    /// Of the GPU.
    Device { address: u64, bytes: u64 },
    /// Pinned, of the host.
    Host(usize),
}

/// What is to be known of captures on one GPU.
#[derive(Debug, Default)]
pub(super) struct Captures {
    /// Allocations and captures so far, in one count.
    clock: u64,
    /// The count at the end of the latest capture.
    latest: u64,
    /// Graphs that there are.
    graphs: usize,
    kept: Vec<Allocation>,
}

impl Captures {
    /// Counts an allocation and returns when it was made.
    pub(super) fn allocated(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Counts a graph that has just been captured.
    pub(super) fn captured(&mut self) {
        self.clock += 1;
        self.latest = self.clock;
        self.graphs += 1;
    }

    /// Takes over an allocation made at `born`, and returns it if it can be freed now.
    pub(super) fn released(&mut self, allocation: Allocation, born: u64) -> Option<Allocation> {
        if self.graphs > 0 && born <= self.latest {
            self.kept.push(allocation);
            return None;
        }
        Some(allocation)
    }

    /// Counts a graph less, and returns what can be freed now.
    pub(super) fn gone(&mut self) -> Vec<Allocation> {
        self.graphs -= 1;
        if self.graphs == 0 { std::mem::take(&mut self.kept) } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_stays_as_long_as_a_graph_may_need_it() {
        let mut captures = Captures::default();
        let (before, allocation) = (captures.allocated(), Allocation::Host);
        captures.captured();
        let after = captures.allocated();
        assert_eq!(captures.released(allocation(1), before), None);
        assert_eq!(captures.released(allocation(2), after), Some(allocation(2)));
        captures.captured();
        assert_eq!(captures.released(allocation(3), after), None);
        assert_eq!(captures.gone(), []);
        assert_eq!(captures.gone(), [allocation(1), allocation(3)]);
        assert_eq!(captures.released(allocation(4), before), Some(allocation(4)));
    }
}
