//! A flat arena in chunks, for kernels that give every block its own part.
//!
//! Tensors differ in size by four orders of magnitude, and only some of them have weight decay. Cut into chunks of one
//! tensor and bounded length each, they are work of about equal size for the blocks of one launch, and what holds for a
//! tensor is said once a chunk.

use std::ops::Range;

/// A part of one tensor: `struct Chunk` of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Chunk {
    /// First element in the arena.
    pub begin: u32,
    /// Number of elements.
    pub len: u32,
    /// Weight decay of all of them.
    pub decay: f32,
    /// First element in the arenas of the optimizer's state and of the moving average, which may hold a part of the parameters
    /// only.
    pub state: u32,
}

/// Elements of a chunk at most: a few for each thread of a block.
pub const LONGEST: usize = 4096;

/// Cuts tensors, given by their elements in an arena and whether they decay, into chunks with `weight_decay` or none, whose state
/// lies as they do.
///
/// ```
/// use mgpu_kernels::optimizer::chunk::{Chunk, LONGEST, chunks};
/// let table = chunks([(0..LONGEST + 10, true), (8192..8202, false)], 0.5);
/// assert_eq!(table, [
///     Chunk { begin: 0, len: 4096, decay: 0.5, state: 0 },
///     Chunk { begin: 4096, len: 10, decay: 0.5, state: 4096 },
///     Chunk { begin: 8192, len: 10, decay: 0.0, state: 8192 },
/// ]);
/// ```
///
/// # Panics
/// If a tensor does not begin at a multiple of 4 elements, where 16 bytes can be moved at once, or ends behind 2^31.
pub fn chunks(tensors: impl IntoIterator<Item = (Range<usize>, bool)>, weight_decay: f64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for (range, decays) in tensors {
        assert!(range.start.is_multiple_of(4) && range.end <= 1 << 31, "a tensor at elements {range:?}");
        let decay = if decays { weight_decay as f32 } else { 0.0 };
        let end = range.end;
        for begin in range.step_by(LONGEST) {
            let (len, begin) = (LONGEST.min(end - begin) as u32, begin as u32);
            chunks.push(Chunk { begin, len, decay, state: begin });
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
        fn chunks_cover_every_tensor_once(sizes in prop::collection::vec((0usize..20_000, any::<bool>()), 0..8)) {
            let mut begin = 0;
            let tensors: Vec<_> = sizes
                .iter()
                .map(|&(len, decays)| {
                    let range = begin..begin + len;
                    begin += len.next_multiple_of(64);
                    (range, decays)
                })
                .collect();
            let mut rest = chunks(tensors.clone(), 0.25).into_iter().peekable();
            for (range, decays) in tensors {
                let mut at = range.start;
                while at < range.end {
                    let chunk = rest.next().expect("a chunk for every element");
                    prop_assert_eq!(chunk.begin as usize, at);
                    prop_assert_eq!(chunk.decay, if decays { 0.25 } else { 0.0 });
                    prop_assert!((1..=LONGEST as u32).contains(&chunk.len) && at + chunk.len as usize <= range.end);
                    at += chunk.len as usize;
                }
            }
            prop_assert_eq!(rest.next(), None);
        }
    }

    #[test]
    #[should_panic(expected = "a tensor at elements 6..9")]
    fn a_tensor_askew_is_refused() {
        chunks([(6..9, true)], 0.0);
    }
}
