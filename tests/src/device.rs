//! Collectives on device memory: every operation, element type and reduction, with results that are exact in any
//! order of summation.

use half::{bf16, f16};
use mgpu::{DeviceCommunicator, Element, ReduceOp, Result};
use mgpu_kernels::cuda::{Memory, Stream, View};

/// None, one, less and more than a block.
const LENGTHS: [usize; 4] = [0, 1, 100, 4097];

/// An element type with small numbers and quarters; integers truncate the latter.
pub trait Number: Element {
    /// The number.
    fn of(value: f64) -> Self;
}

macro_rules! numbers {
    ($($type:ty: $of:expr;)*) => {$(
        impl Number for $type {
            fn of(value: f64) -> Self {
                $of(value)
            }
        }
    )*};
}
numbers! {
    f32: |x| x as f32;
    f64: |x| x;
    f16: f16::from_f64;
    bf16: bf16::from_f64;
    i32: |x| x as i32;
    i64: |x| x as i64;
    u8: |x| x as u8;
}

/// The value of `rank` at `index`. Sums are exact in every type, as are products of up to 4 ranks and averages of 1,
/// 2 and 4.
fn value(rank: u32, index: usize) -> f64 {
    1.0 + ((index + rank as usize) % 3) as f64
}

/// The input of a rank.
pub fn input<T: Number>(rank: u32, len: usize) -> Vec<T> {
    (0..len).map(|index| T::of(value(rank, index))).collect()
}

/// The result of a reduction.
pub fn reduced<T: Number>(ranks: u32, len: usize, op: ReduceOp) -> Vec<T> {
    let element = |index| {
        let values = (0..ranks).map(|rank| value(rank, index));
        match op {
            ReduceOp::Sum => values.sum(),
            ReduceOp::Avg => values.sum::<f64>() / f64::from(ranks),
            ReduceOp::Min => values.fold(f64::MAX, f64::min),
            ReduceOp::Max => values.fold(f64::MIN, f64::max),
            ReduceOp::Prod => values.product(),
        }
    };
    (0..len).map(|index| T::of(element(index))).collect()
}

/// A communicator and a stream for tests.
pub struct DeviceTest<'a> {
    /// The communicator.
    pub comm: &'a DeviceCommunicator,
    /// The stream.
    pub stream: &'a Stream,
}

impl DeviceTest<'_> {
    /// Waits for the stream and compares.
    ///
    /// # Errors
    /// If the wait fails.
    pub fn expect<T: Number>(&self, view: View<'_>, expected: &[T], what: &str) -> Result<()> {
        self.comm.wait(self.stream, what)?;
        let found = view.to_vec::<T>(self.stream)?;
        let wrong = (0..expected.len()).find(|i| found[*i] != expected[*i]);
        if let Some(i) = wrong {
            panic!(
                "{what} of {} {}: element {i} is {:?}, not {:?}",
                view.len(),
                T::DTYPE,
                found[i],
                expected[i]
            );
        }
        Ok(())
    }

    fn reductions<T: Number>(&self, len: usize, op: ReduceOp) -> Result<()> {
        let DeviceTest { comm, stream } = *self;
        let (rank, ranks) = (comm.rank(), comm.size());
        let memory = Memory::from_slice(stream, &input::<T>(rank, len))?;
        comm.all_reduce(stream, memory.view(), op)?;
        self.expect(memory.view(), &reduced::<T>(ranks, len, op), &format!("{op} all_reduce"))?;

        let from = Memory::from_slice(stream, &input::<T>(rank, len))?;
        let to = Memory::zeroed(comm.device(), T::DTYPE, len)?;
        comm.all_reduce_into(stream, from.view(), to.view(), op)?;
        self.expect(to.view(), &reduced::<T>(ranks, len, op), &format!("{op} all_reduce_into"))?;
        self.expect(from.view(), &input::<T>(rank, len), "what an all_reduce_into reads")?;

        let whole = len * ranks as usize;
        let own = rank as usize * len..(rank as usize + 1) * len;
        let shard = reduced::<T>(ranks, whole, op)[own.clone()].to_vec();
        let from = Memory::from_slice(stream, &input::<T>(rank, whole))?;
        comm.reduce_scatter(stream, from.view(), to.view(), op)?;
        self.expect(to.view(), &shard, &format!("{op} reduce_scatter"))?;
        comm.reduce_scatter(stream, from.view(), from.slice(own.clone()), op)?;
        self.expect(from.slice(own), &shard, &format!("{op} reduce_scatter in place"))?;

        for root in [0, ranks - 1] {
            let memory = Memory::from_slice(stream, &input::<T>(rank, len))?;
            comm.reduce(stream, memory.view(), op, root)?;
            let expected = if rank == root { reduced(ranks, len, op) } else { input::<T>(rank, len) };
            self.expect(memory.view(), &expected, &format!("{op} reduce to {root}"))?;
        }
        Ok(())
    }

    fn moves<T: Number>(&self, len: usize) -> Result<()> {
        let DeviceTest { comm, stream } = *self;
        let (rank, ranks) = (comm.rank(), comm.size());
        let shard = Memory::from_slice(stream, &input::<T>(rank, len))?;
        let whole = Memory::zeroed(comm.device(), T::DTYPE, len * ranks as usize)?;
        let gathered: Vec<T> = (0..ranks).flat_map(|rank| input::<T>(rank, len)).collect();
        comm.all_gather(stream, shard.view(), whole.view())?;
        self.expect(whole.view(), &gathered, "all_gather")?;
        let own = rank as usize * len..(rank as usize + 1) * len;
        stream.zero(whole.view())?;
        stream.copy(shard.view(), whole.slice(own.clone()))?;
        comm.all_gather(stream, whole.slice(own), whole.view())?;
        self.expect(whole.view(), &gathered, "all_gather in place")?;

        for root in [0, ranks - 1] {
            let memory = Memory::from_slice(stream, &input::<T>(rank, len))?;
            comm.broadcast(stream, memory.view(), root)?;
            self.expect(memory.view(), &input::<T>(root, len), &format!("broadcast from {root}"))?;
        }
        if ranks > 1 {
            let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
            let from_left = Memory::zeroed(comm.device(), T::DTYPE, len)?;
            // A ring of sends and receives needs a group, or each rank would wait for itself.
            comm.group(|group| {
                group.send(stream, shard.view(), right)?;
                group.recv(stream, from_left.view(), left)
            })?;
            self.expect(from_left.view(), &input::<T>(left, len), "send and recv in a group")?;
            if rank == 0 {
                comm.send(stream, shard.view(), 1)?;
            } else if rank == 1 {
                comm.recv(stream, from_left.view(), 0)?;
                self.expect(from_left.view(), &input::<T>(0, len), "send and recv")?;
            }
        }
        Ok(())
    }

    fn element<T: Number>(&self) -> Result<()> {
        for len in LENGTHS {
            ReduceOp::ALL.into_iter().try_for_each(|op| self.reductions::<T>(len, op))?;
            self.moves::<T>(len)?;
        }
        Ok(())
    }

    /// Every operation, element type and reduction.
    ///
    /// # Errors
    /// As the operations.
    pub fn all(&self) -> Result<()> {
        self.element::<f32>()?;
        self.element::<f64>()?;
        self.element::<f16>()?;
        self.element::<bf16>()?;
        self.element::<i32>()?;
        self.element::<i64>()?;
        self.element::<u8>()
    }

    /// Several collectives in one group, on two streams.
    ///
    /// # Errors
    /// As the operations.
    pub fn groups(&self) -> Result<()> {
        let DeviceTest { comm, stream } = *self;
        let (rank, ranks) = (comm.rank(), comm.size());
        let other = Stream::new(comm.device())?;
        let sum = Memory::from_slice(stream, &input::<f32>(rank, 1000))?;
        let largest = Memory::from_slice(&other, &input::<i64>(rank, 10))?;
        comm.group(|group| {
            group.all_reduce(stream, sum.view(), ReduceOp::Sum)?;
            group.all_reduce(&other, largest.view(), ReduceOp::Max)
        })?;
        self.expect(sum.view(), &reduced::<f32>(ranks, 1000, ReduceOp::Sum), "the first of a group")?;
        comm.wait(&other, "the second of a group")?;
        self.expect(largest.view(), &reduced::<i64>(ranks, 10, ReduceOp::Max), "the second of a group")?;
        // An incompatible call is an error, and the rest of the group is not started.
        let refused = comm.group(|group| {
            group.all_reduce(stream, sum.view(), ReduceOp::Sum)?;
            group.all_gather(stream, sum.view(), largest.view())
        });
        let refused = refused.expect_err("two types");
        assert!(matches!(refused, mgpu::Error::InvalidArgument { .. }), "{refused}");
        self.expect(sum.view(), &reduced::<f32>(ranks, 1000, ReduceOp::Sum), "a group that was refused")
    }
}
