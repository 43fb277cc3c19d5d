//! A bucket in a step: its gradients, and which of its elements this rank updates.
//!
//! Where the optimizer is replicated, the bucket's gradients are all-reduced, and every rank updates all elements by itself.
//! Where it is sharded, gradients are reduce-scattered, every rank updates the elements of its own
//! [shard](crate::comm::shard), and the updated parameters are all-gathered. In bytes, with S of them a bucket and Adam on
//! n ranks: replicated, 2·n·S for the sums and 7·n·S for the updates; sharded, (n + 1)·S, 7·S and (n − 1)·S for what is
//! passed on.

use std::ops::Range;

use super::GradientSink;
use crate::bucket::Bucket;
use crate::comm::{Buffer, Communicator, Pending, ReduceOp};
use crate::replicate::sum_over_ranks;
use crate::{Error, Layout, Result};

/// A bucket's gradient: here, or with the communicator.
#[derive(Debug)]
pub(super) enum Gradient {
    Here(Buffer),
    Reducing(Pending),
    /// Lost to a failed operation.
    Lost,
}

/// How much of a gradient is averaged over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Averaged {
    None,
    /// This rank's.
    Shard,
    All,
}

/// A bucket and the gradients in it.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) bucket: Bucket,
    /// Elements of the arena: the bucket's, and what lies between them and the next one's.
    pub(super) elements: Range<usize>,
    pub(super) sharded: bool,
    /// Elements of the arena that this rank updates.
    pub(super) own: Range<usize>,
    /// Where their state begins in the optimizer's arenas.
    pub(super) state: usize,
    pub(super) gradient: Gradient,
    pub(super) averaged: Averaged,
    /// Tensors not yet ready in this step.
    pub(super) open: Vec<bool>,
}

impl Slot {
    /// Gets ready for a step. One that broke off may have left a reduction under way.
    pub(super) fn begin_step(&mut self) -> Result<()> {
        self.open.fill(true);
        self.averaged = Averaged::None;
        self.settle()
    }

    /// Waits for the reduction, if that is under way.
    pub(super) fn settle(&mut self) -> Result<()> {
        self.gradient = Gradient::Here(self.take()?);
        Ok(())
    }

    /// The gradient, which is settled.
    pub(super) fn values(&self) -> &[f32] {
        match &self.gradient {
            Gradient::Here(gradient) => gradient.as_slice(),
            _ => panic!("a gradient is read while it is reduced"),
        }
    }

    /// Takes the gradient, waiting for its reduction if that is under way.
    fn take(&mut self) -> Result<Buffer> {
        match std::mem::replace(&mut self.gradient, Gradient::Lost) {
            Gradient::Here(buffer) => Ok(buffer),
            Gradient::Reducing(pending) => pending.wait(),
            Gradient::Lost => {
                let problem =
                    "gradients were lost to an earlier error; no further step can be made".to_owned();
                Err(Error::InvalidArgument { operation: "step", problem })
            }
        }
    }

    /// Starts the reduction, unless it is under way.
    fn reduce(&mut self, comm: &mut dyn Communicator) -> Result<()> {
        self.gradient = match std::mem::replace(&mut self.gradient, Gradient::Lost) {
            Gradient::Here(gradient) if self.sharded => {
                Gradient::Reducing(comm.reduce_scatter(gradient, ReduceOp::Avg)?)
            }
            Gradient::Here(gradient) => Gradient::Reducing(comm.all_reduce(gradient, ReduceOp::Avg)?),
            // Announced twice: it is on its way already.
            other => other,
        };
        self.averaged = if self.sharded { Averaged::Shard } else { Averaged::All };
        Ok(())
    }

    /// The averaged gradient. Collective where only shards of it have been averaged.
    pub(super) fn averaged(&mut self, comm: &mut dyn Communicator) -> Result<&[f32]> {
        match self.averaged {
            Averaged::None => {
                let problem = "it has not been averaged since the last step began".to_owned();
                return Err(Error::InvalidArgument { operation: "gradient", problem });
            }
            Averaged::Shard => {
                let gradient = self.take()?;
                self.gradient = Gradient::Here(comm.all_gather(gradient)?.wait()?);
                self.averaged = Averaged::All;
            }
            Averaged::All => {}
        }
        self.settle()?;
        Ok(self.values())
    }

    /// Elements of the state that this rank has.
    pub(super) fn states(&self) -> Range<usize> {
        self.state..self.state + self.own.len()
    }

    /// Elements of tensor `tensor` within the gradient.
    pub(super) fn within(&self, layout: &Layout, tensor: usize) -> Range<usize> {
        let range = layout.range(tensor);
        range.start - self.elements.start..range.end - self.elements.start
    }
}

/// The error of a bucket that was not completed: names its first open tensor.
pub(super) fn unready(layout: &Layout, bucket: &Bucket, open: &[bool]) -> Error {
    let open = open.iter().position(|open| *open).unwrap_or_default();
    let name = &layout.tensors()[bucket.tensors.start + open].name;
    let problem = format!("the gradient of tensor `{name}` was not handed over");
    Error::InvalidArgument { operation: "step", problem }
}

/// Gathers a state arena of which this rank has the elements `local`. Collective, if a bucket is sharded. Leaves the whole
/// in `into`, unless that is empty.
pub(super) fn gather(
    comm: &mut dyn Communicator,
    slots: &[Slot],
    local: &[f32],
    into: &mut [f32],
) -> Result<()> {
    for slot in slots {
        let mine = &local[slot.states()];
        let gathered = if slot.sharded {
            let mut buffer = Buffer::zeroed::<f32>(slot.elements.len());
            let own = slot.own.start - slot.elements.start..slot.own.end - slot.elements.start;
            buffer.as_mut_slice()[own].copy_from_slice(mine);
            Some(comm.all_gather(buffer)?.wait()?)
        } else {
            None
        };
        if !into.is_empty() {
            into[slot.elements.clone()].copy_from_slice(gathered.as_ref().map_or(mine, Buffer::as_slice));
        }
    }
    Ok(())
}

/// What `compute` sees of the buckets.
pub(super) struct Sink<'a> {
    pub(super) comm: &'a mut dyn Communicator,
    pub(super) layout: &'a Layout,
    pub(super) slots: &'a mut [Slot],
    pub(super) slot_of: &'a [usize],
}

impl GradientSink for Sink<'_> {
    fn gradient(&mut self, tensor: usize) -> &mut [f32] {
        let slot = &mut self.slots[self.slot_of[tensor]];
        let range = slot.within(self.layout, tensor);
        let Gradient::Here(buffer) = &mut slot.gradient else {
            panic!("the gradient of tensor {tensor} is written after all of its bucket was ready");
        };
        &mut buffer.as_mut_slice()[range]
    }

    fn ready(&mut self, tensor: usize) -> Result<()> {
        let slot = &mut self.slots[self.slot_of[tensor]];
        slot.open[tensor - slot.bucket.tensors.start] = false;
        if slot.open.contains(&true) {
            return Ok(());
        }
        self.comm.timeline().set_bucket(self.slot_of[tensor]);
        slot.reduce(self.comm)
    }

    fn sum_over_ranks(&mut self, values: &mut [f64]) -> Result<()> {
        sum_over_ranks(self.comm, values)
    }
}
