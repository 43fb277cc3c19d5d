//! Measurements with the nccl backend: buffers in GPU memory.
//!
//! A CUDA graph of several captured operations is launched at once, as in a training step. That hides the launch
//! time, which is longer than a small operation. The time of a run is divided by the number of operations in the
//! graph. Ranks synchronise and compare times through a second communicator.

use mgpu::{Buffer, Communicator, DeviceCommunicator, Group, ReduceOp, World};
use mgpu_kernels::cuda::{Memory, Stream, View};

use super::Failure;
use super::collective::{Collective, ROOT};
use super::measure::{RunLimits, Times, sample};
use super::pattern::{self, ReductionOrder, Value};

/// A GPU to measure on.
pub(super) struct Gpu {
    comm: DeviceCommunicator,
    stream: Stream,
}

/// Number of operations in a graph.
fn operations_per_graph(bytes: usize) -> u32 {
    match bytes {
        0..=65_536 => 20,
        65_537..=4_194_304 => 5,
        _ => 1,
    }
}

/// A closure that adds one in-place operation to a group.
fn operation<'a>(
    collective: Collective,
    op: ReduceOp,
    comm: &DeviceCommunicator,
    stream: &'a Stream,
    buffer: View<'a>,
) -> impl Fn(&mut Group<'a>) -> mgpu::Result<()> + Copy + use<'a> {
    let (rank, ranks, len) = (comm.rank(), comm.size(), buffer.len() / comm.size() as usize);
    move |group| {
        let shard_of = |rank: u32| buffer.slice(rank as usize * len..(rank as usize + 1) * len);
        let shard = || shard_of(rank);
        let others = || (0..ranks).filter(|peer| *peer != rank).map(|peer| (peer, shard_of(peer)));
        match collective {
            Collective::AllReduce => group.all_reduce(stream, buffer, op),
            Collective::ReduceScatter => group.reduce_scatter(stream, buffer, shard(), op),
            Collective::AllGather => group.all_gather(stream, shard(), buffer),
            Collective::Broadcast => group.broadcast(stream, buffer, ROOT),
            Collective::Reduce => group.reduce(stream, buffer, op, ROOT),
            Collective::Gather if rank == ROOT => {
                others().try_for_each(|(peer, shard)| group.recv(stream, shard, peer))
            }
            Collective::Gather => group.send(stream, shard(), ROOT),
            Collective::Scatter if rank == ROOT => {
                others().try_for_each(|(peer, shard)| group.send(stream, shard, peer))
            }
            Collective::Scatter => group.recv(stream, shard(), ROOT),
            Collective::AllToAll => unreachable!("it is measured on host buffers"),
        }
    }
}

impl Gpu {
    /// The GPU of this rank. Collective.
    pub(super) fn new(world: &mut World) -> mgpu::Result<Self> {
        let comm = world.device_communicator()?;
        let stream = Stream::new(comm.device())?;
        Ok(Gpu { comm, stream })
    }

    /// Product name of the GPU.
    pub(super) fn name(&self) -> String {
        self.comm.device().name().to_owned()
    }

    /// Verifies and times `collective` on `len` elements. Ranks synchronise through `host`.
    pub(super) fn measure<T: Value>(
        &self,
        host: &mut Communicator,
        collective: Collective,
        op: ReduceOp,
        len: usize,
        check: bool,
    ) -> Result<Times, Failure> {
        let Gpu { comm, stream } = self;
        let (rank, ranks, bytes) = (comm.rank(), comm.size(), len * T::DTYPE.size());
        let buffer = Memory::zeroed(comm.device(), T::DTYPE, len).map_err(mgpu::Error::from)?;
        let operation = operation(collective, op, comm, stream, buffer.view());
        let wait = || comm.wait(stream, &format!("the end of {collective}"));
        if check {
            let mut values = vec![T::from_number(0); len];
            pattern::fill(&mut values, rank, ranks, op);
            stream.upload(&values, buffer.view()).map_err(mgpu::Error::from)?;
            comm.group(operation)?;
            wait()?;
            let found = buffer.to_vec::<T>(stream).map_err(mgpu::Error::from)?;
            pattern::compare(&found, rank, ranks, collective, op, ReductionOrder::Nccl)?;
        }
        // Zeros stay zeros under every reduction. This also sets up connections before the capture.
        stream.zero(buffer.view()).map_err(mgpu::Error::from)?;
        comm.group(operation)?;
        wait()?;
        let operations_per_graph = operations_per_graph(bytes);
        let captured = comm.capture(operations_per_graph, operation)?;
        let limits = RunLimits::for_size(bytes);
        let limits = RunLimits { runs: (limits.runs / operations_per_graph as usize).max(20), ..limits };
        let (_, times) = sample(host, Buffer::zeroed::<u8>(0), limits, |_, nothing| {
            captured.launch(stream)?;
            wait()?;
            Ok(nothing)
        })?;
        let each = |time: f64| time / f64::from(operations_per_graph);
        Ok(Times { p50: each(times.p50), min: each(times.min) })
    }
}
