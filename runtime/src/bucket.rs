//! Which gradients travel together.
//!
//! A backward pass finishes gradients from the last layer to the first. Buckets are cut in that order, so that
//! the first one can be all-reduced while earlier layers still compute. The first bucket is small: it starts the
//! communication early.

use std::ops::Range;

use crate::Layout;

/// Tensors whose gradients are all-reduced in one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Indices in the layout.
    pub tensors: Range<usize>,
    /// Elements of the arena.
    pub elements: Range<usize>,
}

/// Cuts `layout` into buckets, in the order in which a backward pass fills them.
///
/// A bucket takes tensors, last one first, until it has reached `first` bytes of f32 (the first bucket) or
/// `rest` bytes (the others). Tensors are never cut.
pub fn plan(layout: &Layout, first: usize, rest: usize) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let mut end = layout.tensors().len();
    let bytes = |tensors: Range<usize>| -> usize {
        layout.tensors()[tensors].iter().map(|tensor| tensor.len() * size_of::<f32>()).sum()
    };
    for begin in (0..end).rev() {
        let target = if buckets.is_empty() { first } else { rest };
        if bytes(begin..end) >= target || begin == 0 {
            let elements = layout.range(begin).start..layout.range(end - 1).end;
            buckets.push(Bucket { tensors: begin..end, elements });
            end = begin;
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_tensor_is_in_one_bucket_in_reverse_order(
            sizes in prop::collection::vec(0usize..5000, 0..30), first in 0usize..9000, rest in 0usize..20_000
        ) {
            let mut layout = Layout::new();
            for (index, size) in sizes.iter().enumerate() {
                layout.push(format!("t{index}"), [*size]);
            }
            let buckets = plan(&layout, first, rest);
            let tensors: Vec<usize> = buckets.iter().rev().flat_map(|bucket| bucket.tensors.clone()).collect();
            prop_assert_eq!(tensors, (0..sizes.len()).collect::<Vec<_>>());
            let elements: usize = buckets.iter().map(|bucket| bucket.elements.len()).sum();
            prop_assert_eq!(elements, layout.len());
            for (index, bucket) in buckets.iter().enumerate() {
                let target = if index == 0 { first } else { rest };
                // Without its first tensor a bucket is below the target: no bucket is larger than it must be.
                let rest_of_it = bucket.elements.end - layout.range(bucket.tensors.start).end;
                prop_assert!(bucket.tensors.len() == 1 || rest_of_it * 4 < target);
            }
        }
    }
}
