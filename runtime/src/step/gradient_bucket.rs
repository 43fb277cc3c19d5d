//! A bucket in a step: its gradients, and which of its elements this rank updates.
//!
//! Where the optimizer is replicated, the bucket's gradients are all-reduced, and every rank updates all elements by itself.
//! Where it is sharded, gradients are reduce-scattered, every rank updates the elements of its own
//! [shard](crate::comm::shard), and the updated parameters are all-gathered. In bytes, with S of them a bucket and Adam on
//! n ranks: replicated, 2·n·S for the sums and 7·n·S for the updates; sharded, (n + 1)·S, 7·S and (n − 1)·S for what is
//! passed on.

use std::ops::Range;

use half::bf16;
use mgpu_kernels::arena::cpu as arena;

use super::{Reduction, tree};
use crate::bucket::BucketPlan;
use crate::comm::{Buffer, Communicator, Pending, ReduceOp};
use crate::{Error, Layout, Result};

/// How gradients become one over ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exchange {
    pub(super) reduction: Reduction,
    /// Whether the result is not to depend on the number of ranks.
    pub(super) invariant: bool,
    /// Micro-batches of each rank.
    pub(super) micro_batches: usize,
    /// Ranks that have data in this step. The others' gradients are 0.
    pub(super) active: u32,
}

/// A bucket's gradient: here, or with the communicator.
#[derive(Debug)]
pub(super) enum Gradient {
    Local(Buffer),
    /// `scale` makes a sum over the ranks that have data their mean.
    Reducing {
        pending: Pending,
        scale: f32,
    },
    /// A copy of it travels, rounded to bf16.
    Compressed {
        pending: Pending,
        gradient: Buffer,
        scale: f32,
    },
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
pub(super) struct GradientBucket {
    pub(super) plan: BucketPlan,
    /// Elements of the arena: the bucket's, and what lies between them and the next one's.
    pub(super) elements: Range<usize>,
    pub(super) sharded: bool,
    /// Elements of the arena that this rank updates.
    pub(super) own: Range<usize>,
    /// Where their state begins in the optimizer's arenas.
    pub(super) state: usize,
    pub(super) gradient: Gradient,
    /// Where gradients are compressed, memory for what travels; `None` while that does.
    pub(super) compressed: Option<Buffer>,
    pub(super) averaged: Averaged,
}

impl GradientBucket {
    /// Gets ready for a step. One that broke off may have left a reduction under way.
    pub(super) fn begin_step(&mut self) -> Result<()> {
        self.averaged = Averaged::None;
        self.finish_reduction()
    }

    /// Waits for the reduction, if that is under way.
    pub(super) fn finish_reduction(&mut self) -> Result<()> {
        self.gradient = Gradient::Local(self.take()?);
        Ok(())
    }

    /// The gradient, which is settled.
    pub(super) fn values(&self) -> &[f32] {
        match &self.gradient {
            Gradient::Local(gradient) => gradient.as_slice(),
            _ => panic!("a gradient is read while it is reduced"),
        }
    }

    /// As [`values`](Self::values), to be changed.
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        match &mut self.gradient {
            Gradient::Local(gradient) => gradient.as_mut_slice(),
            _ => panic!("a gradient is written after all of its bucket was ready"),
        }
    }

    /// Takes the gradient, waiting for its reduction if that is under way.
    pub(super) fn take(&mut self) -> Result<Buffer> {
        match std::mem::replace(&mut self.gradient, Gradient::Lost) {
            Gradient::Local(buffer) => Ok(buffer),
            Gradient::Reducing { pending, scale } => {
                let mut gradient = pending.wait()?;
                self.scale_reduced(&mut gradient, scale);
                Ok(gradient)
            }
            Gradient::Compressed { pending, mut gradient, scale } => {
                let compressed = pending.wait()?;
                let reduced = self.reduced();
                arena::widen(
                    &compressed.as_slice::<bf16>()[reduced.clone()],
                    &mut gradient.as_mut_slice()[reduced],
                );
                self.compressed = Some(compressed);
                self.scale_reduced(&mut gradient, scale);
                Ok(gradient)
            }
            Gradient::Lost => {
                let problem =
                    "gradients were lost to an earlier error; no further step can be made".to_owned();
                Err(Error::InvalidArgument { operation: "step", problem })
            }
        }
    }

    fn scale_reduced(&self, gradient: &mut Buffer, scale: f32) {
        if scale != 1.0 {
            arena::scale(&mut gradient.as_mut_slice()[self.reduced()], scale);
        }
    }

    /// Starts the reduction of what is bucket `number`.
    pub(super) fn reduce(&mut self, comm: &mut Communicator, exchange: Exchange, number: u32) -> Result<()> {
        let mut gradient = self.take()?;
        if exchange.invariant {
            gradient = tree::all_sum(comm, gradient)?;
            if exchange.reduction == Reduction::Mean {
                // Divided once, as a single rank would.
                let count = comm.size() as usize * exchange.micro_batches;
                arena::scale(gradient.as_mut_slice(), 1.0 / count as f32);
            }
            (self.gradient, self.averaged) = (Gradient::Local(gradient), Averaged::All);
            return Ok(());
        }
        let (op, scale) = match exchange.reduction {
            Reduction::Mean if exchange.active == comm.size() => (ReduceOp::Avg, 1.0),
            Reduction::Mean => (ReduceOp::Sum, 1.0 / exchange.active as f32),
            Reduction::Sum => (ReduceOp::Sum, 1.0),
        };
        let mut start = |buffer| match self.sharded {
            true => comm.reduce_scatter_tagged(buffer, op, Some(number)),
            false => comm.all_reduce_tagged(buffer, op, Some(number)),
        };
        self.gradient = match self.compressed.take() {
            None => Gradient::Reducing { pending: start(gradient)?, scale },
            Some(mut compressed) => {
                arena::narrow(gradient.as_slice(), compressed.as_mut_slice::<bf16>());
                Gradient::Compressed { pending: start(compressed)?, gradient, scale }
            }
        };
        self.averaged = if self.sharded { Averaged::Shard } else { Averaged::All };
        Ok(())
    }

    /// Elements of the gradient that a reduction leaves on this rank.
    pub(super) fn reduced(&self) -> Range<usize> {
        if self.averaged == Averaged::Shard { self.own_within() } else { 0..self.elements.len() }
    }

    /// Elements of the gradient that this rank updates.
    pub(super) fn own_within(&self) -> Range<usize> {
        self.own.start - self.elements.start..self.own.end - self.elements.start
    }

    /// The averaged gradient. Collective where only shards of it have been averaged.
    pub(super) fn averaged(&mut self, comm: &mut Communicator) -> Result<&[f32]> {
        match self.averaged {
            Averaged::None => {
                let problem = "it has not been averaged since the last step began".to_owned();
                return Err(Error::InvalidArgument { operation: "gradient", problem });
            }
            Averaged::Shard => {
                let gradient = self.take()?;
                self.gradient = Gradient::Local(comm.all_gather(gradient)?.wait()?);
                self.averaged = Averaged::All;
            }
            Averaged::All => {}
        }
        self.finish_reduction()?;
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
