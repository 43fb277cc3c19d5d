//! Divides a contiguous arena into chunks, for kernels that process one part per block.
//!
//! Tensors differ in size by four orders of magnitude, and only some of them have weight decay. Divided into chunks
//! of one tensor and of bounded length, they give the blocks of one launch about equal work, and a tensor's factors
//! are stored once per chunk.

use std::ops::Range;

use super::Factors;

/// A range of one tensor: `struct Chunk` of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Chunk {
    /// First element in the arena.
    pub begin: u32,
    /// Number of elements.
    pub len: u32,
    /// First element in the arenas of the optimizer's state and of the moving average, which may hold only some of
    /// the parameters.
    pub state: u32,
    /// Factor of the learning rate for all elements.
    pub learning_rate: f32,
    /// Factor of the weight decay for all elements.
    pub weight_decay: f32,
}

/// Maximum number of elements of a chunk: a few for each thread of a block.
pub const MAX_LEN: usize = 4096;

/// Divides tensors, given by their ranges in an arena and their factors, into chunks, with the state at the same
/// indices.
///
/// ```
/// use mgpu_kernels::optimizer::Factors;
/// use mgpu_kernels::optimizer::chunk::{Chunk, MAX_LEN, chunks};
/// let slow = Factors { learning_rate: 0.5, weight_decay: 0.0 };
/// let table = chunks([(0..MAX_LEN + 10, Factors::ONE), (8192..8202, slow)]);
/// assert_eq!(table, [
///     Chunk { begin: 0, len: 4096, state: 0, learning_rate: 1.0, weight_decay: 1.0 },
///     Chunk { begin: 4096, len: 10, state: 4096, learning_rate: 1.0, weight_decay: 1.0 },
///     Chunk { begin: 8192, len: 10, state: 8192, learning_rate: 0.5, weight_decay: 0.0 },
/// ]);
/// ```
///
/// # Panics
/// If a tensor does not begin at a multiple of 4 elements, which 16-byte accesses need, or ends beyond 2^31.
pub fn chunks(tensors: impl IntoIterator<Item = (Range<usize>, Factors)>) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for (range, Factors { learning_rate, weight_decay }) in tensors {
        assert!(range.start.is_multiple_of(4) && range.end <= 1 << 31, "a tensor at elements {range:?}");
        let end = range.end;
        for begin in range.step_by(MAX_LEN) {
            let (len, begin) = (MAX_LEN.min(end - begin) as u32, begin as u32);
            chunks.push(Chunk { begin, len, state: begin, learning_rate, weight_decay });
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_cover_every_tensor_once(sizes in prop::collection::vec((0usize..20_000, 0.0f32..2.0), 0..8)) {
            let mut begin = 0;
            let tensors: Vec<_> = sizes
                .iter()
                .map(|&(len, factor)| {
                    let range = begin..begin + len;
                    begin += len.next_multiple_of(64);
                    (range, Factors { learning_rate: factor, weight_decay: factor * 0.5 })
                })
                .collect();
            let mut rest = chunks(tensors.clone()).into_iter().peekable();
            for (range, factors) in tensors {
                let mut at = range.start;
                while at < range.end {
                    let chunk = rest.next().expect("a chunk for every element");
                    prop_assert_eq!(chunk.begin as usize, at);
                    prop_assert_eq!(chunk.learning_rate, factors.learning_rate);
                    prop_assert_eq!(chunk.weight_decay, factors.weight_decay);
                    prop_assert!((1..=MAX_LEN as u32).contains(&chunk.len) && at + chunk.len as usize <= range.end);
                    at += chunk.len as usize;
                }
            }
            prop_assert_eq!(rest.next(), None);
        }
    }

    #[test]
    #[should_panic(expected = "a tensor at elements 6..9")]
    fn a_misaligned_tensor_panics() {
        chunks([(6..9, Factors::ONE)]);
    }
}
