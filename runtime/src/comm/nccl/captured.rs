//! Operations that are captured into a CUDA graph and replayed with one launch each time.

use mgpu_kernels::cuda::{Graph, Stream};

use super::call::RawStream;
use super::group::Copies;
use super::{DeviceCommunicator, Group};
use crate::Result;

/// Captured operations of a communicator, created by [`DeviceCommunicator::capture`]. They borrow all memory that
/// they use and the communicator, and can be launched any number of times.
#[derive(Debug)]
pub struct CapturedGroup<'a> {
    graph: Graph,
    copies: Copies<'a>,
    comm: &'a DeviceCommunicator,
}

impl DeviceCommunicator {
    /// Captures the operations that `fill` collects, `times` times; their streams are ignored. Collective, and so is
    /// every launch. The operations must have run once before.
    ///
    /// # Errors
    /// That of `fill`, or as [`all_reduce`](Self::all_reduce), or if the driver returns an error.
    pub fn capture<'a>(
        &'a self,
        times: u32,
        fill: impl FnOnce(&mut Group<'a>) -> Result<()>,
    ) -> Result<CapturedGroup<'a>> {
        let mut group = self.collect(fill)?;
        // A new stream, so that only these operations are captured.
        let stream = Stream::new(self.device())?;
        group.calls.iter_mut().for_each(|call| call.stream = RawStream(stream.raw().cast()));
        self.note_capture();
        stream.begin_capture()?;
        let turns = (0..times).try_for_each(|_| self.submit(group.calls.clone()));
        // End the capture even after an error.
        let graph = stream.end_capture();
        turns?;
        Ok(CapturedGroup { graph: graph?, copies: group.copies, comm: self })
    }
}

impl CapturedGroup<'_> {
    /// Enqueues all of it on `stream`.
    ///
    /// # Errors
    /// If an earlier error has poisoned the communicator, or the driver returns an error.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.comm.begin_launch()?;
        for (from, to, _) in &self.copies {
            stream.copy(*from, *to)?;
        }
        // SAFETY: the graph only contains operations of the communicator. It and the memory are borrowed, and it was
        // not aborted when this was checked. If another thread aborts it now, NCCL keeps what captured operations use
        // until the graph is gone.
        Ok(unsafe { stream.launch_graph(&self.graph) }?)
    }
}
