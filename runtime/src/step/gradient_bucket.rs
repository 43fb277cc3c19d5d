//! A bucket of gradients during a step, and the elements of it that this rank updates.
//!
//! Its [`Owner`] says who averages and updates it. Every rank: gradients are all-reduced, and every rank updates all
//! elements itself. Shards: gradients are reduce-scattered, every rank updates the elements of its own
//! [shard](crate::comm::shard), and the updated parameters are all-gathered. Rank 0: gradients are reduced to rank 0,
//! which updates all elements and broadcasts the parameters. Memory traffic in bytes, for a bucket of S bytes and Adam
//! on n ranks: every rank, 2·n·S for the reduction and 7·n·S for the updates; shards, (n + 1)·S, 7·S, and (n − 1)·S for
//! the all-gather; rank 0, (n + 1)·S, 7·S and (n − 1)·S, of which rank 0 alone does the first two.

use std::ops::Range;

use half::bf16;
use mgpu_kernels::arena::cpu as arena;

use super::{Reduction, tree};
use crate::bucket::BucketPlan;
use crate::comm::{Buffer, Communicator, Pending, ReduceOp};
use crate::{Error, Layout, Result};

/// Who averages and updates a bucket, and has the optimizer's state of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// Every rank, all of it.
    EveryRank,
    /// Every rank, its shard.
    Shards,
    /// Rank 0.
    RankZero,
}

/// How a bucket is reduced over ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exchange {
    pub(super) reduction: Reduction,
    /// Whether the reduction is world-size-invariant.
    pub(super) invariant: bool,
    /// Number of micro-batches of each rank.
    pub(super) micro_batches: usize,
    /// Number of ranks with data in this step. The gradients of the others are 0.
    pub(super) active: u32,
}

/// State of a bucket's gradient buffer.
#[derive(Debug)]
pub(super) enum Gradient {
    Local(Buffer),
    /// `scale` turns the sum into the mean over the ranks with data.
    Reducing {
        pending: Pending,
        scale: f32,
    },
    /// A copy that is rounded to bf16 is being reduced.
    Compressed {
        pending: Pending,
        gradient: Buffer,
        scale: f32,
    },
    /// Lost to a failed operation.
    Lost,
}

/// Which elements of a bucket are averaged over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Averaged {
    None,
    /// Those that this rank updates.
    Own,
    All,
}

/// A bucket and its gradients.
#[derive(Debug)]
pub(super) struct GradientBucket {
    pub(super) plan: BucketPlan,
    /// Elements of the arena: the bucket's tensors and the padding after them.
    pub(super) elements: Range<usize>,
    pub(super) owner: Owner,
    /// Elements of the arena that this rank updates.
    pub(super) own: Range<usize>,
    /// Where the optimizer's state of these elements begins.
    pub(super) state: usize,
    pub(super) gradient: Gradient,
    /// Buffer of the compressed gradients, if gradients are compressed; `None` during the reduction.
    pub(super) compressed: Option<Buffer>,
    pub(super) averaged: Averaged,
}

impl GradientBucket {
    /// Prepares a step. If the previous step broke off, waits for its reduction.
    pub(super) fn begin_step(&mut self) -> Result<()> {
        self.averaged = Averaged::None;
        self.finish_reduction()
    }

    /// Waits for the reduction, if one is in flight.
    pub(super) fn finish_reduction(&mut self) -> Result<()> {
        self.gradient = Gradient::Local(self.take()?);
        Ok(())
    }

    /// The gradient; no reduction may be in flight.
    pub(super) fn values(&self) -> &[f32] {
        match &self.gradient {
            Gradient::Local(gradient) => gradient.as_slice(),
            _ => panic!("a gradient is read while it is reduced"),
        }
    }

    /// As [`values`](Self::values), mutable.
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        match &mut self.gradient {
            Gradient::Local(gradient) => gradient.as_mut_slice(),
            _ => panic!("a gradient is written after all of its bucket was ready"),
        }
    }

    /// Takes the gradient, after waiting for its reduction if one is in flight.
    pub(super) fn take(&mut self) -> Result<Buffer> {
        match std::mem::replace(&mut self.gradient, Gradient::Lost) {
            Gradient::Local(buffer) => Ok(buffer),
            Gradient::Reducing { pending, scale } => {
                let mut gradient = pending.wait()?;
                self.scale_buffer(&mut gradient, scale);
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
                self.scale_buffer(&mut gradient, scale);
                Ok(gradient)
            }
            Gradient::Lost => {
                let problem =
                    "gradients were lost to an earlier error; no further step can be made".to_owned();
                Err(Error::InvalidArgument { operation: "step", problem })
            }
        }
    }

    fn scale_buffer(&self, gradient: &mut Buffer, scale: f32) {
        if scale != 1.0 {
            arena::scale(&mut gradient.as_mut_slice()[self.reduced()], scale);
        }
    }

    /// Multiplies this rank's part of the reduced gradients by `scale`.
    pub(super) fn scale_reduced(&mut self, scale: f32) {
        let reduced = self.reduced();
        arena::scale(&mut self.values_mut()[reduced], scale);
    }

    /// Starts the reduction. `number` is the index of the bucket.
    pub(super) fn reduce(&mut self, comm: &mut Communicator, exchange: Exchange, number: u32) -> Result<()> {
        let mut gradient = self.take()?;
        if exchange.invariant {
            gradient = tree::all_sum(comm, gradient)?;
            if exchange.reduction == Reduction::Mean {
                // Divide once, as a single rank would.
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
        let mut start = |buffer| match self.owner {
            Owner::EveryRank => comm.all_reduce_tagged(buffer, op, Some(number)),
            Owner::Shards => comm.reduce_scatter_tagged(buffer, op, Some(number)),
            Owner::RankZero => comm.reduce_by_root_tagged(buffer, op, 0, Some(number)),
        };
        self.gradient = match self.compressed.take() {
            None => Gradient::Reducing { pending: start(gradient)?, scale },
            Some(mut compressed) => {
                arena::narrow(gradient.as_slice(), compressed.as_mut_slice::<bf16>());
                Gradient::Compressed { pending: start(compressed)?, gradient, scale }
            }
        };
        self.averaged = if self.owner == Owner::EveryRank { Averaged::All } else { Averaged::Own };
        Ok(())
    }

    /// Elements of the gradient that hold the reduction's result on this rank.
    pub(super) fn reduced(&self) -> Range<usize> {
        if self.averaged == Averaged::Own { self.own_within() } else { 0..self.elements.len() }
    }

    /// Elements of the gradient that this rank updates.
    pub(super) fn own_within(&self) -> Range<usize> {
        self.own.start - self.elements.start..self.own.end - self.elements.start
    }

    /// The averaged gradient. Collective if a rank has only the averages of its own elements.
    pub(super) fn averaged(&mut self, comm: &mut Communicator) -> Result<&[f32]> {
        match self.averaged {
            Averaged::None => {
                let problem = "it has not been averaged since the last step began".to_owned();
                return Err(Error::InvalidArgument { operation: "gradient", problem });
            }
            Averaged::Own => {
                let gradient = self.take()?;
                let whole = match self.owner {
                    Owner::RankZero => comm.broadcast(gradient, 0)?,
                    _ => comm.all_gather(gradient)?,
                };
                self.gradient = Gradient::Local(whole.wait()?);
                self.averaged = Averaged::All;
            }
            Averaged::All => {}
        }
        self.finish_reduction()?;
        Ok(self.values())
    }

    /// Range of this bucket in the optimizer's state.
    pub(super) fn states(&self) -> Range<usize> {
        self.state..self.state + self.own.len()
    }

    /// Elements of tensor `tensor` within the gradient.
    pub(super) fn within(&self, layout: &Layout, tensor: usize) -> Range<usize> {
        let range = layout.range(tensor);
        range.start - self.elements.start..range.end - self.elements.start
    }
}
