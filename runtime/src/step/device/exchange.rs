//! The way of a bucket's gradients from micro-batches through ranks to the update.

use mgpu_kernels::arena::cuda as arena;
use mgpu_kernels::cuda::{Memory, Stream, View};
use mgpu_kernels::optimizer::cuda::{Arenas, update};

use super::DeviceDataParallel;
use super::slot::Slot;
use super::sums::all_sum;
use crate::Result;
use crate::comm::{Group, ReduceOp};
use crate::step::Reduction;

impl DeviceDataParallel {
    fn is_mean(&self) -> bool {
        self.config.parallel.reduction == Reduction::Mean
    }

    pub(super) fn is_invariant(&self) -> bool {
        self.config.parallel.world_size_invariant
    }

    /// Whether a rank updates a part of the parameters only.
    pub(super) fn is_sharded(&self) -> bool {
        self.slots.iter().any(Slot::is_sharded)
    }

    /// All of a bucket's gradients of a micro-batch are on their way: adds them to those of earlier ones; with the last one the
    /// exchange over ranks begins.
    pub(super) fn end_bucket(&mut self, place: usize) -> Result<()> {
        // Where ranks are to make no difference, all are divided by at once.
        let is_mean = self.is_mean() && !self.is_invariant();
        let divisor = if is_mean { self.config.micro_batches as f32 } else { 1.0 };
        self.sums.add(&self.compute, &self.gradients, self.slots[place].elements.clone(), divisor)?;
        if !self.sums.counter.is_last() {
            return Ok(());
        }
        if self.config.parallel.check_finite {
            self.find_not_finite(place)?;
        }
        self.last_exchange = place;
        self.exchanges += 1;
        let slot = &self.slots[place];
        if self.ranks() == 1 {
            // Nobody to exchange with, and no other stream to wait for.
            return if self.is_invariant() { self.sum_invariant(slot, &self.compute) } else { Ok(()) };
        }
        self.compute.record(&slot.written)?;
        self.exchange.wait_for(&slot.written)?;
        if self.is_invariant() {
            self.sum_invariant(slot, &self.exchange)?;
            self.comm.group(|group| self.add_mark(group))?;
        } else {
            self.reduce(slot)?;
        }
        Ok(self.exchange.record(&slot.exchanged)?)
    }

    /// Sums a bucket's gradients over ranks as a tree.
    fn sum_invariant(&self, slot: &Slot, stream: &Stream) -> Result<()> {
        let gradients = self.gradients.slice(slot.elements.clone());
        if gradients.is_empty() {
            return Ok(());
        }
        if let Some(theirs) = &self.theirs {
            all_sum(&self.comm, stream, gradients, theirs.slice(slot.elements.clone()))?;
        }
        let count = self.ranks() as usize * self.config.micro_batches;
        if self.is_mean() && count > 1 {
            arena::scale(stream, gradients, 1.0 / count as f32)?;
        }
        Ok(())
    }

    /// Reduces a bucket's gradients over ranks: of its shards each rank gets its own.
    fn reduce(&self, slot: &Slot) -> Result<()> {
        let (stream, ranks) = (&self.exchange, self.ranks());
        let op = if self.is_mean() { ReduceOp::Avg } else { ReduceOp::Sum };
        let (own, rest) = (slot.own(), slot.rest(ranks));
        if let Some(narrow) = &self.narrow {
            let elements = slot.elements.clone();
            arena::narrow(stream, self.gradients.slice(elements.clone()), narrow.slice(elements))?;
        }
        let travels = self.narrow.as_ref().unwrap_or(&self.gradients);
        self.comm.group(|group| {
            if slot.is_sharded() {
                let shards = travels.slice(slot.shards(ranks));
                group.reduce_scatter(stream, shards, travels.slice(own.clone()), op)?;
            }
            if !rest.is_empty() {
                group.all_reduce(stream, travels.slice(rest.clone()), op)?;
            }
            self.add_mark(group)
        })?;
        if let Some(narrow) = &self.narrow {
            for reduced in [own, rest].into_iter().filter(|reduced| !reduced.is_empty()) {
                arena::widen(stream, narrow.slice(reduced.clone()), self.gradients.slice(reduced))?;
            }
        }
        Ok(())
    }

    /// With the last bucket goes the mark of gradients that are no numbers.
    fn add_mark<'a>(&'a self, group: &mut Group<'a>) -> Result<()> {
        if !self.config.parallel.check_finite || self.exchanges < self.slots.len() {
            return Ok(());
        }
        group.all_reduce(&self.exchange, self.not_finite(), ReduceOp::Max)
    }

    /// Updates the parameters, and gathers what is sharded.
    pub(super) fn update(&self) -> Result<()> {
        let parallel = &self.config.parallel;
        // Whether a part may be updated, and by how much, is known when all gradients are.
        let together = parallel.check_finite || parallel.clip_norm.is_some() || self.ranks() == 1;
        if together && self.ranks() > 1 && !self.slots.is_empty() {
            // The exchange stream goes in order: what began last ends last.
            self.compute.wait_for(&self.slots[self.last_exchange].exchanged)?;
        }
        self.check_reduced()?;
        self.clip()?;
        if together && !self.is_sharded() {
            return self.update_chunks(self.chunks.view(), self.copy.as_ref());
        }
        let ranks = self.ranks();
        for slot in &self.slots {
            self.compute.wait_for(&slot.exchanged)?;
            let [own, rest] = slot.chunks.clone();
            // The copy of a sharded bucket is made when all of it is here.
            let copy = self.copy.as_ref().filter(|_| !slot.is_sharded());
            self.update_chunks(self.chunks.slice(own.start..rest.end), copy)?;
            if slot.is_sharded() {
                self.compute.record(&slot.written)?;
                self.exchange.wait_for(&slot.written)?;
                let whole = self.parameters.slice(slot.shards(ranks));
                self.comm.all_gather(&self.exchange, self.parameters.slice(slot.own()), whole)?;
                self.exchange.record(&slot.exchanged)?;
            }
        }
        for slot in self.slots.iter().filter(|slot| slot.is_sharded()) {
            self.compute.wait_for(&slot.exchanged)?;
            if let Some(copy) = &self.copy {
                let elements = slot.elements.clone();
                arena::narrow(&self.compute, self.parameters.slice(elements.clone()), copy.slice(elements))?;
            }
        }
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
