//! Which gradients of a step are ready, and which buckets may be reduced: bookkeeping without memory or
//! communication, shared by host and device.
//!
//! A bucket is *complete* when the gradients of all its tensors have been marked ready. It may be *reduced* when it
//! is complete in the last micro-batch and all buckets before it have been dispatched. So every rank reduces buckets
//! in the same order, whatever the order of its gradients, even if it does not use a tensor or has no data at all
//! ([`join`](super::Reducer::join)).
//!
//! In the first step the order of gradients is recorded, so that buckets can follow it.

use std::ops::Range;

use super::accumulate::Counter;
use crate::bucket::BucketPlan;
use crate::{Error, Layout, Result};

/// Readiness of a step's gradients.
#[derive(Debug)]
pub(super) struct Readiness {
    /// The bucket of each tensor; `None` for frozen tensors.
    bucket_of: Vec<Option<usize>>,
    /// Whether the gradient of each tensor is still missing in this micro-batch.
    open: Vec<bool>,
    /// The tensors of each bucket, in the order of reduction.
    buckets: Vec<Range<usize>>,
    /// Number of gradients of each bucket that are still missing in this micro-batch.
    missing: Vec<usize>,
    /// Number of buckets dispatched for reduction in this step.
    dispatched: usize,
    /// The current micro-batch.
    pub(super) counter: Counter,
    /// Tensors in the order of their gradients, until buckets follow it.
    observed: Option<Vec<usize>>,
}

impl Readiness {
    /// For steps with these buckets. Records the order of gradients if `observe`.
    pub(super) fn new(layout: &Layout, buckets: &[BucketPlan], observe: bool, counter: Counter) -> Self {
        let mut readiness = Readiness {
            bucket_of: Vec::new(),
            open: vec![false; layout.tensors().len()],
            buckets: Vec::new(),
            missing: Vec::new(),
            dispatched: 0,
            counter,
            observed: observe.then(Vec::new),
        };
        readiness.set_buckets(buckets);
        readiness
    }

    /// Replaces the buckets, between two steps.
    pub(super) fn set_buckets(&mut self, buckets: &[BucketPlan]) {
        self.bucket_of = vec![None; self.open.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            self.bucket_of[bucket.tensors.clone()].fill(Some(index));
        }
        self.buckets = buckets.iter().map(|bucket| bucket.tensors.clone()).collect();
        self.missing = vec![0; buckets.len()];
    }

    /// The bucket of a tensor; `None` for a frozen one.
    pub(super) fn bucket_of(&self, tensor: usize) -> Option<usize> {
        self.bucket_of[tensor]
    }

    /// Begins a step of `count` micro-batches, and its first one.
    pub(super) fn begin_step(&mut self, count: usize) {
        self.counter = self.counter.with_count(count);
        self.dispatched = 0;
        self.observed.iter_mut().for_each(Vec::clear);
        self.begin_batch(0);
    }

    /// Begins micro-batch `index`.
    pub(super) fn begin_batch(&mut self, index: usize) {
        self.counter.begin_batch(index);
        for (bucket, missing) in self.buckets.iter().zip(&mut self.missing) {
            self.open[bucket.clone()].fill(true);
            *missing = bucket.len();
        }
    }

    /// Checks that the gradient of `tensor` is still missing, and returns its bucket.
    ///
    /// # Errors
    /// If there is no such tensor, it is frozen, or its gradient was marked ready before.
    pub(super) fn check_open(&self, layout: &Layout, tensor: usize) -> Result<usize> {
        check_tensor(layout, "step", tensor)?;
        let name = &layout.tensors()[tensor].name;
        let problem = match self.bucket_of[tensor] {
            Some(bucket) if self.open[tensor] => return Ok(bucket),
            Some(_) => format!("the gradient of tensor `{name}` was marked ready twice"),
            None => format!("tensor `{name}` is frozen: it has no gradient"),
        };
        Err(Error::InvalidArgument { operation: "step", problem })
    }

    /// Marks the gradient of `tensor` ready. Returns its bucket, and whether that is now complete.
    ///
    /// # Errors
    /// As [`check_open`](Self::check_open).
    pub(super) fn mark_ready(&mut self, layout: &Layout, tensor: usize) -> Result<(usize, bool)> {
        let bucket = self.check_open(layout, tensor)?;
        self.open[tensor] = false;
        self.missing[bucket] -= 1;
        if let Some(order) = self.observed.as_mut().filter(|_| self.counter.is_last()) {
            order.push(tensor);
        }
        Ok((bucket, self.missing[bucket] == 0))
    }

    /// The next bucket to reduce, if it may be reduced now.
    pub(super) fn next_bucket(&mut self) -> Option<usize> {
        let bucket = self.dispatched;
        let may_be = self.counter.is_last() && self.missing.get(bucket) == Some(&0);
        self.dispatched += usize::from(may_be);
        may_be.then_some(bucket)
    }

    /// The last tensor whose gradient is missing.
    pub(super) fn last_open(&self) -> Option<usize> {
        self.open.iter().rposition(|open| *open)
    }

    /// Checks that no gradient of the micro-batch is missing.
    ///
    /// # Errors
    /// Names a tensor whose gradient was not marked ready, of the first incomplete bucket.
    pub(super) fn check_complete(&self, layout: &Layout) -> Result<()> {
        let Some(bucket) = self.missing.iter().position(|missing| *missing > 0) else { return Ok(()) };
        let tensor = self.buckets[bucket].clone().find(|tensor| self.open[*tensor]);
        let name = &layout.tensors()[tensor.unwrap_or_default()].name;
        let problem = format!("the gradient of tensor `{name}` was not marked ready");
        Err(Error::InvalidArgument { operation: "step", problem })
    }

    /// The order of gradients in a complete step; returned once.
    pub(super) fn take_observed_order(&mut self) -> Option<Vec<usize>> {
        let tensors = self.bucket_of.iter().flatten().count();
        self.observed.take_if(|order| order.len() == tensors)
    }
}

/// Checks that tensor `tensor` exists.
pub(super) fn check_tensor(layout: &Layout, operation: &'static str, tensor: usize) -> Result<()> {
    let tensors = layout.tensors().len();
    if tensor < tensors {
        return Ok(());
    }
    let problem = format!("there is no tensor {tensor}: the model has {tensors}");
    Err(Error::InvalidArgument { operation, problem })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ParameterGroup;
    use crate::bucket::plan;

    fn layout(sizes: &[(usize, bool)]) -> Layout {
        let mut layout = Layout::new();
        for (index, (size, frozen)) in sizes.iter().enumerate() {
            layout.push(index.to_string(), [*size]);
            if *frozen {
                layout.assign([index], ParameterGroup::FROZEN);
            }
        }
        layout
    }

    /// Random tensors, some frozen; bucket size; number of micro-batches; seed of a shuffle.
    fn models() -> impl Strategy<Value = (Vec<(usize, bool)>, usize, usize, u64)> {
        let tensors = prop::collection::vec((0usize..200, prop::bool::weighted(0.2)), 0..20);
        (tensors, 1usize..2000, 1usize..5, any::<u64>())
    }

    /// The trained tensors, in an order that depends on `seed`.
    fn shuffled(layout: &Layout, seed: u64) -> Vec<usize> {
        let mut tensors: Vec<usize> = layout.trained().collect();
        tensors
            .sort_by_key(|tensor| (*tensor as u64 + 1).wrapping_mul(seed | 1).wrapping_mul(0x9e37_79b9) >> 7);
        tensors
    }

    proptest! {
        #[test]
        fn buckets_are_dispatched_once_complete_and_in_order(
            (sizes, bytes, count, seed) in models()
        ) {
            let layout = layout(&sizes);
            let buckets = plan(&layout, bytes / 2, bytes);
            let mut readiness = Readiness::new(&layout, &buckets, true, Counter::new(1, false));
            for step in 0..2 {
                readiness.begin_step(count);
                let mut reduced = Vec::new();
                for index in 0..count {
                    readiness.begin_batch(index);
                    let mut there = vec![false; sizes.len()];
                    for tensor in shuffled(&layout, seed + index as u64) {
                        let (bucket, complete) = readiness.mark_ready(&layout, tensor).unwrap();
                        there[tensor] = true;
                        prop_assert!(buckets[bucket].tensors.contains(&tensor));
                        prop_assert_eq!(complete, there[buckets[bucket].tensors.clone()].iter().all(|there| *there));
                        prop_assert!(readiness.mark_ready(&layout, tensor).is_err());
                        while let Some(bucket) = readiness.next_bucket() {
                            prop_assert_eq!(index + 1, count, "before the last micro-batch");
                            prop_assert!(there[buckets[bucket].tensors.clone()].iter().all(|there| *there));
                            reduced.push(bucket);
                        }
                    }
                    prop_assert!(readiness.check_complete(&layout).is_ok());
                }
                prop_assert_eq!(reduced, (0..buckets.len()).collect::<Vec<_>>());
                let order = (step == 0).then(|| shuffled(&layout, seed + count as u64 - 1));
                prop_assert_eq!(readiness.take_observed_order(), order);
            }
        }

        #[test]
        fn a_missing_gradient_is_named_and_blocks_its_bucket((sizes, bytes, _, seed) in models()) {
            let layout = layout(&sizes);
            let buckets = plan(&layout, bytes / 2, bytes);
            let mut readiness = Readiness::new(&layout, &buckets, true, Counter::new(1, false));
            readiness.begin_step(1);
            let order = shuffled(&layout, seed);
            let Some((missing, rest)) = order.split_first() else { return Ok(()) };
            for tensor in rest {
                readiness.mark_ready(&layout, *tensor).unwrap();
            }
            let held = readiness.bucket_of(*missing).unwrap();
            let reduced: Vec<usize> = std::iter::from_fn(|| readiness.next_bucket()).collect();
            prop_assert_eq!(reduced, (0..held).collect::<Vec<_>>());
            let error = readiness.check_complete(&layout).unwrap_err().to_string();
            prop_assert_eq!(error, format!("step: the gradient of tensor `{missing}` was not marked ready"));
            prop_assert_eq!(readiness.last_open(), Some(*missing));
            prop_assert_eq!(readiness.take_observed_order(), None);
        }
    }

    #[test]
    fn a_frozen_tensor_has_no_gradient() {
        let layout = layout(&[(3, false), (4, true), (5, false)]);
        let buckets = plan(&layout, 1 << 20, 1 << 20);
        assert_eq!(buckets.iter().map(|bucket| bucket.tensors.clone()).collect::<Vec<_>>(), [2..3, 0..1]);
        let mut readiness = Readiness::new(&layout, &buckets, false, Counter::new(1, false));
        readiness.begin_step(1);
        let error = readiness.mark_ready(&layout, 1).unwrap_err().to_string();
        assert_eq!(error, "step: tensor `1` is frozen: it has no gradient");
        let error = readiness.mark_ready(&layout, 3).unwrap_err().to_string();
        assert_eq!(error, "step: there is no tensor 3: the model has 3");
    }
}
