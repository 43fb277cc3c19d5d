//! How a bucket's gradients are accumulated over micro-batches, reduced over ranks, and applied by the optimizer.

use mgpu_kernels::arena::cuda as arena;
use mgpu_kernels::cuda::{Memory, Stream, View};
use mgpu_kernels::optimizer::cuda::{Arenas, update};

use super::DeviceDataParallel;
use super::device_bucket::DeviceBucket;
use super::sums::all_sum;
use crate::Result;
use crate::comm::{Group, ReduceOp};
use crate::step::{Placement, Reduction};
use crate::timeline::Name;

const REDUCE: Name = Name::new("reduce");
const BROADCAST: Name = Name::new("broadcast");

impl DeviceDataParallel {
    fn is_mean(&self) -> bool {
        self.config.parallel.reducer.reduction == Reduction::Mean
    }

    pub(super) fn is_invariant(&self) -> bool {
        self.config.parallel.reducer.world_size_invariant
    }

    /// Whether the optimizer is sharded.
    pub(super) fn is_sharded(&self) -> bool {
        self.buckets.iter().any(DeviceBucket::is_sharded)
    }

    /// Whether rank 0 updates the parameters of all ranks.
    pub(super) fn is_shared(&self) -> bool {
        self.config.parallel.placement == Placement::Shared && self.ranks() > 1
    }

    /// Whether ranks update different elements.
    pub(super) fn is_divided(&self) -> bool {
        self.is_shared() || self.is_sharded()
    }

    /// Accumulates the gradients of a complete bucket of the current micro-batch.
    pub(super) fn accumulate(&self, bucket: usize) -> Result<()> {
        let counter = &self.readiness.counter;
        // A world-size-invariant reduction divides once at its end.
        let is_mean = self.is_mean() && !self.is_invariant();
        let divisor = if is_mean { counter.count() as f32 } else { 1.0 };
        let elements = self.buckets[bucket].elements.clone();
        self.sums.add(counter, &self.compute, &self.gradients, elements, divisor)
    }

    /// Starts the exchange of a bucket's gradients over ranks.
    pub(super) fn begin_exchange(&self, index: usize) -> Result<()> {
        if self.is_updated_on_host() {
            return Ok(());
        }
        let is_last = index + 1 == self.buckets.len();
        if self.config.parallel.reducer.check_finite {
            // A single rank exchanges nothing, so it checks all buckets in one launch.
            match self.comm.uses_nccl() {
                true => self.find_non_finite(self.buckets[index].parts.clone())?,
                false if is_last => self.find_non_finite(self.all_parts())?,
                false => {}
            }
        }
        let bucket = &self.buckets[index];
        if !self.comm.uses_nccl() {
            // A single rank exchanges nothing and uses no other stream.
            return if self.is_invariant() { self.sum_invariant(bucket, &self.compute) } else { Ok(()) };
        }
        self.compute.record(&bucket.written)?;
        self.exchange.wait_for(&bucket.written)?;
        // The mark of non-finite gradients is reduced together with the last bucket.
        let with_mark = self.config.parallel.reducer.check_finite && is_last;
        let begin = self.begin_span_on(&self.exchange)?;
        if self.is_invariant() {
            self.sum_invariant(bucket, &self.exchange)?;
            self.comm.group(|group| self.add_mark(group, with_mark))?;
        } else {
            self.reduce(bucket, with_mark)?;
        }
        let name = match bucket.is_sharded() {
            true => Name::REDUCE_SCATTER,
            false if self.is_shared() => REDUCE,
            false => Name::ALL_REDUCE,
        };
        let bytes =
            self.compressed.as_ref().unwrap_or(&self.gradients).slice(bucket.elements.clone()).bytes();
        let _ = self.end_span_on(&self.exchange, begin, (name, Some(index as u32), bytes))?;
        Ok(self.exchange.record(&bucket.exchanged)?)
    }

    /// Sums a bucket's gradients over ranks in a world-size-invariant order.
    fn sum_invariant(&self, bucket: &DeviceBucket, stream: &Stream) -> Result<()> {
        let gradients = self.gradients.slice(bucket.elements.clone());
        if gradients.is_empty() {
            return Ok(());
        }
        if let Some(theirs) = &self.theirs {
            all_sum(&self.comm, stream, gradients, theirs.slice(bucket.elements.clone()))?;
        }
        let count = self.ranks() as usize * self.readiness.counter.count();
        if self.is_mean() && count > 1 {
            arena::scale(stream, gradients, 1.0 / count as f32)?;
        }
        Ok(())
    }

    /// Reduces a bucket's gradients over ranks: each rank gets its own shard, and the rest; rank 0 gets all of a model
    /// that it shares.
    fn reduce(&self, bucket: &DeviceBucket, with_mark: bool) -> Result<()> {
        let (stream, ranks) = (&self.exchange, self.ranks());
        let all_have_data = self.active == ranks;
        let op = if self.is_mean() && all_have_data { ReduceOp::Avg } else { ReduceOp::Sum };
        let (own, rest) = (bucket.own(), bucket.rest());
        if let Some(compressed) = &self.compressed {
            let elements = bucket.elements.clone();
            arena::narrow(stream, self.gradients.slice(elements.clone()), compressed.slice(elements))?;
        }
        let sent = self.compressed.as_ref().unwrap_or(&self.gradients);
        self.comm.group(|group| {
            if bucket.is_sharded() {
                let shards = sent.slice(bucket.shards(ranks));
                group.reduce_scatter(stream, shards, sent.slice(own.clone()), op)?;
            }
            if self.is_shared() {
                group.reduce(stream, sent.slice(bucket.elements.clone()), op, 0)?;
            } else if !rest.is_empty() {
                group.all_reduce(stream, sent.slice(rest.clone()), op)?;
            }
            self.add_mark(group, with_mark)
        })?;
        for reduced in [own, rest].into_iter().filter(|reduced| !reduced.is_empty()) {
            let gradients = self.gradients.slice(reduced.clone());
            if let Some(compressed) = &self.compressed {
                arena::widen(stream, compressed.slice(reduced), gradients)?;
            }
            if self.is_mean() && !all_have_data {
                arena::scale(stream, gradients, 1.0 / self.active as f32)?;
            }
        }
        Ok(())
    }

    /// Adds the reduction of the mark of non-finite gradients, if `with_mark`.
    fn add_mark<'a>(&'a self, group: &mut Group<'a>, with_mark: bool) -> Result<()> {
        if !with_mark {
            return Ok(());
        }
        group.all_reduce(&self.exchange, self.non_finite(), ReduceOp::Max)
    }

    /// Updates the parameters, gathers sharded buckets, and broadcasts a model that rank 0 shares.
    pub(super) fn update(&self) -> Result<()> {
        let reducer = &self.config.parallel.reducer;
        // With checks or clipping, an update depends on all gradients.
        let together = reducer.check_finite || reducer.clip_norm.is_some() || !self.comm.uses_nccl();
        if together && self.comm.uses_nccl() {
            self.wait_for_exchanges()?;
        }
        self.check_reduced()?;
        self.clip()?;
        if together && !self.is_divided() {
            return self.update_chunks(self.chunks.view(), self.copy.as_ref());
        }
        let is_sent = |bucket: &DeviceBucket| bucket.is_sharded() || self.is_shared();
        for bucket in &self.buckets {
            self.wait_for_exchange(bucket)?;
            let [own, rest] = bucket.chunks.clone();
            // The copy of what other ranks update is made after it has arrived.
            let copy = self.copy.as_ref().filter(|_| !is_sent(bucket));
            self.update_chunks(self.chunks.slice(own.start..rest.end), copy)?;
            if is_sent(bucket) {
                self.compute.record(&bucket.written)?;
                self.exchange.wait_for(&bucket.written)?;
                self.send_updated(bucket)?;
                self.exchange.record(&bucket.exchanged)?;
            }
        }
        for bucket in self.buckets.iter().filter(|bucket| is_sent(bucket)) {
            self.wait_for_exchange(bucket)?;
            if let Some(copy) = &self.copy {
                let elements = bucket.elements.clone();
                arena::narrow(&self.compute, self.parameters.slice(elements.clone()), copy.slice(elements))?;
            }
        }
        Ok(())
    }

    /// Sends the updated parameters of a bucket to all ranks: every rank those of its shard, or rank 0 all.
    fn send_updated(&self, bucket: &DeviceBucket) -> Result<()> {
        let begin = self.begin_span_on(&self.exchange)?;
        let (name, whole) = if self.is_shared() {
            let whole = self.parameters.slice(bucket.elements.clone());
            self.comm.broadcast(&self.exchange, whole, 0)?;
            (BROADCAST, whole)
        } else {
            let whole = self.parameters.slice(bucket.shards(self.ranks()));
            self.comm.all_gather(&self.exchange, self.parameters.slice(bucket.own()), whole)?;
            (Name::ALL_GATHER, whole)
        };
        let _ = self.end_span_on(&self.exchange, begin, (name, None, whole.bytes()))?;
        Ok(())
    }

    /// Makes the compute stream wait for the exchanges of all buckets.
    pub(super) fn wait_for_exchanges(&self) -> Result<()> {
        // Buckets are exchanged in order on one stream, so the last one ends last.
        self.buckets.last().map_or(Ok(()), |bucket| self.wait_for_exchange(bucket))
    }

    /// Makes the compute stream wait for the exchange of a bucket.
    fn wait_for_exchange(&self, bucket: &DeviceBucket) -> Result<()> {
        let begin = self.begin_span()?;
        self.compute.wait_for(&bucket.exchanged)?;
        let _ = self.end_span(begin, Name::WAIT_REDUCTIONS)?;
        Ok(())
    }

    fn update_chunks(&self, chunks: View<'_>, copy: Option<&Memory>) -> Result<()> {
        let optimizer = &self.config.parallel.optimizer;
        let arenas = Arenas {
            gradients: self.gradients.view(),
            params: self.parameters.view(),
            first: self.first.as_ref().map(Memory::view),
            second: self.second.as_ref().map(Memory::view),
            average: self.average.as_ref().map(Memory::view).zip(optimizer.average),
            copy: copy.map(Memory::view),
        };
        Ok(update(&self.compute, &optimizer.rule, self.state.view(), chunks, &arenas)?)
    }
}
