//! Plans buckets: which gradients are reduced in one operation.
//!
//! A backward pass computes gradients from the last layer to the first. Buckets are cut in that order, so that the
//! first one can be reduced while earlier layers still compute. The first bucket is small, so that communication
//! starts early.

use std::ops::Range;

use crate::Layout;

/// A bucket: tensors whose gradients are reduced in one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BucketPlan {
    /// Indices in the layout.
    pub(crate) tensors: Range<usize>,
    /// Elements of the arena.
    pub(crate) elements: Range<usize>,
}

/// Cuts `layout` into buckets, in the order of a backward pass: last tensor first.
///
/// A bucket takes tensors until it has reached `first` bytes of f32 (the first bucket) or `rest` bytes (the others).
/// Tensors are never split. Frozen tensors are in no bucket.
pub(crate) fn plan(layout: &Layout, first: usize, rest: usize) -> Vec<BucketPlan> {
    plan_in_order(layout, layout.trained().rev(), first, rest)
}

/// As [`plan`], for gradients that become ready in another order. `order` contains every trained tensor once. A
/// bucket only contains adjacent tensors.
///
/// # Panics
/// If `order` contains an index that is out of range.
pub(crate) fn plan_in_order(
    layout: &Layout,
    order: impl IntoIterator<Item = usize>,
    first: usize,
    rest: usize,
) -> Vec<BucketPlan> {
    let tensors = layout.tensors();
    let bytes = |range: &Range<usize>| -> usize {
        tensors[range.clone()].iter().map(|tensor| tensor.len() * size_of::<f32>()).sum()
    };
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for tensor in order {
        let target = if ranges.len() > 1 { rest } else { first };
        match ranges.last_mut().filter(|range| bytes(range) < target) {
            Some(range) if range.start == tensor + 1 => range.start = tensor,
            Some(range) if range.end == tensor => range.end = tensor + 1,
            _ => ranges.push(tensor..tensor + 1),
        }
    }
    let bucket = |range: Range<usize>| {
        let elements = tensors[range.start].offset..tensors[range.end - 1].range().end;
        BucketPlan { tensors: range, elements }
    };
    ranges.into_iter().map(bucket).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_follow_the_order_of_gradients() {
        let mut layout = Layout::new();
        (0..4).for_each(|index| _ = layout.push(index.to_string(), [100]));
        let tensors = |buckets: &[BucketPlan]| -> Vec<_> {
            buckets.iter().map(|bucket| bucket.tensors.clone()).collect()
        };
        assert_eq!(tensors(&plan(&layout, 100, 800)), [3..4, 1..3, 0..1]);
        assert_eq!(tensors(&plan_in_order(&layout, [1, 0, 2, 3], 100, 800)), [1..2, 0..1, 2..4]);
    }

    proptest! {
        #[test]
        fn every_tensor_is_in_one_bucket_in_any_order(
            order in Just((0usize..20).collect::<Vec<_>>()).prop_shuffle(), first in 0usize..900, rest in 0usize..2000
        ) {
            let mut layout = Layout::new();
            (0..20).for_each(|index| _ = layout.push(index.to_string(), [index * 5]));
            let buckets = plan_in_order(&layout, order.iter().copied(), first, rest);
            let of = |tensor| buckets.iter().position(|bucket| bucket.tensors.contains(&tensor));
            // Buckets are complete in the order in which they are listed.
            let positions: Vec<_> = order.iter().map(|tensor| of(*tensor).unwrap()).collect();
            prop_assert!(positions.is_sorted());
            prop_assert_eq!(buckets.iter().map(|bucket| bucket.tensors.len()).sum::<usize>(), 20);
        }

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
                // Without its first tensor a bucket is below the target: no bucket is larger than necessary.
                let rest_of_it = bucket.elements.end - layout.range(bucket.tensors.start).end;
                prop_assert!(bucket.tensors.len() == 1 || rest_of_it * 4 < target);
            }
        }
    }
}
