//! Operations that are captured once and repeated at the price of one launch.

use mgpu_kernels::cuda::{Graph, Stream};

use super::call::RawStream;
use super::group::Copies;
use super::{DeviceCommunicator, Group};
use crate::Result;

/// Operations of a communicator in a graph, made by [`DeviceCommunicator::capture`]. It borrows all that they use, so it
/// can be launched as often as one likes, and is gone before the communicator is.
#[derive(Debug)]
pub struct CapturedGroup<'a> {
    graph: Graph,
    copies: Copies<'a>,
    comm: &'a DeviceCommunicator,
}

impl DeviceCommunicator {
    /// Captures `times` turns of what `fill` collects; the streams that it names do not matter. Collective, and so is every
    /// launch. The operations have been run once before.
    ///
    /// # Errors
    /// That of `fill`, or as [`all_reduce`](Self::all_reduce), or if the driver refuses.
    pub fn capture<'a>(
        &'a self,
        times: u32,
        fill: impl FnOnce(&mut Group<'a>) -> Result<()>,
    ) -> Result<CapturedGroup<'a>> {
        let mut group = self.collect(fill)?;
        // A stream that nobody else knows: nothing but these operations gets into the graph.
        let stream = Stream::new(self.device())?;
        group.calls.iter_mut().for_each(|call| call.stream = RawStream(stream.raw().cast()));
        self.note_capture();
        stream.begin_capture()?;
        let turns = (0..times).try_for_each(|_| self.submit(group.calls.clone()));
        // The capture has to be ended whatever has come of it.
        let graph = stream.end_capture();
        turns?;
        Ok(CapturedGroup { graph: graph?, copies: group.copies, comm: self })
    }
}

impl CapturedGroup<'_> {
    /// Puts all of it on `stream`.
    ///
    /// # Errors
    /// If an error has made the communicator unusable, or the driver refuses.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.comm.begin_launch()?;
        for (from, to, _) in &self.copies {
            stream.copy(*from, *to)?;
        }
        // SAFETY: nothing is in the graph but operations of the communicator, which was not aborted when it was looked at
        // and is borrowed, as is the memory. If another thread aborts it now, NCCL keeps what captured operations use until
        // the graph is gone.
        Ok(unsafe { stream.launch_graph(&self.graph) }?)
    }
}
