//! Scratch memory for the layers of a network on the CPU.

use crate::AlignedVec;
use crate::threads::Threads;

/// Scratch memory that all layers of a network share; it grows once to what the largest layer needs.
#[derive(Debug)]
pub struct Scratch {
    /// One buffer for each thread.
    pub(crate) parts: Vec<AlignedVec>,
    /// One buffer that all threads read.
    pub(crate) shared: AlignedVec,
}

impl Scratch {
    /// Empty scratch memory for the threads of a rank.
    pub fn new(threads: &Threads) -> Self {
        Self { parts: vec![AlignedVec::default(); threads.count()], shared: AlignedVec::default() }
    }
}
