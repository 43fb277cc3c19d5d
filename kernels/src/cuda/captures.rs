//! Keeps memory that captured graphs may still use.
//!
//! A graph contains addresses. So memory that existed when a graph was captured is not freed before the last graph is
//! destroyed, even if its owner is dropped. Memory that was allocated later is in no graph and is freed at once.

use super::memory::Deallocator;

/// An allocation whose owner has been dropped.
#[derive(Debug, Clone, Copy)]
pub(super) enum Allocation {
    /// Memory of the GPU, from the driver or a library.
    Device { address: u64, bytes: u64, deallocator: Option<&'static dyn Deallocator> },
    /// Pinned memory of the host.
    Host(usize),
    /// An event.
    Event(usize),
}

/// The captures on one GPU.
#[derive(Debug, Default)]
pub(super) struct Captures {
    /// Number of allocations and captures so far.
    clock: u64,
    /// `clock` at the end of the latest capture.
    last_capture: u64,
    /// Number of existing graphs.
    graphs: usize,
    deferred: Vec<Allocation>,
}

impl Captures {
    /// Counts an allocation and returns when it was made.
    pub(super) fn allocated(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Counts a graph that has just been captured.
    pub(super) fn graph_captured(&mut self) {
        self.clock += 1;
        self.last_capture = self.clock;
        self.graphs += 1;
    }

    /// Takes over an allocation made at `allocated_at`, and returns it if it can be freed now.
    pub(super) fn release(&mut self, allocation: Allocation, allocated_at: u64) -> Option<Allocation> {
        if self.graphs > 0 && allocated_at <= self.last_capture {
            self.deferred.push(allocation);
            return None;
        }
        Some(allocation)
    }

    /// Counts the end of a graph, and returns what can be freed now.
    pub(super) fn graph_destroyed(&mut self) -> Vec<Allocation> {
        self.graphs -= 1;
        if self.graphs == 0 { std::mem::take(&mut self.deferred) } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_as_long_as_a_graph_may_use_it() {
        fn freed(allocations: impl IntoIterator<Item = Allocation>) -> Vec<usize> {
            let address = |allocation| match allocation {
                Allocation::Host(address) => address,
                other => panic!("{other:?}"),
            };
            allocations.into_iter().map(address).collect()
        }
        let mut captures = Captures::default();
        let (before, allocation) = (captures.allocated(), Allocation::Host);
        captures.graph_captured();
        let after = captures.allocated();
        assert_eq!(freed(captures.release(allocation(1), before)), []);
        assert_eq!(freed(captures.release(allocation(2), after)), [2]);
        captures.graph_captured();
        assert_eq!(freed(captures.release(allocation(3), after)), []);
        assert_eq!(freed(captures.graph_destroyed()), []);
        assert_eq!(freed(captures.graph_destroyed()), [1, 3]);
        assert_eq!(freed(captures.release(allocation(4), before)), [4]);
    }
}
