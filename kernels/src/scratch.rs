//! Scratch memory of the layers of a network on the CPU.

use crate::AlignedVec;
use crate::threads::Threads;

/// Memory that all layers of a network share; it grows to the largest layer's needs once.
#[derive(Debug)]
pub struct Scratch {
    /// One for each thread.
    pub(crate) parts: Vec<AlignedVec>,
    /// One that all threads read.
    pub(crate) shared: AlignedVec,
}

impl Scratch {
    /// Empty scratch memory for the threads of a rank.
    pub fn new(threads: &Threads) -> Self {
        Self { parts: vec![AlignedVec::default(); threads.count()], shared: AlignedVec::default() }
    }
}
