//! A sequence of launches, captured once and replayed for the cost of one.

use std::cell::RefCell;
use std::sync::Arc;

use cudarc::driver::sys;

use super::error::{Context, Result};
use super::uses::LastUses;
use super::{Device, Stream, driver};

/// A captured graph, ready to be launched by [`Stream::launch_graph`](super::Stream::launch_graph).
///
/// It keeps the [`Memory`](super::Memory) and [`Pinned`](super::Pinned) memory that existed when it was captured,
/// even if their owners are dropped.
#[derive(Debug)]
pub struct Graph {
    device: Arc<Device>,
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    /// The launches, if the graph may copy from or to pinned memory.
    launches: Option<RefCell<LastUses>>,
}

// SAFETY: handles that may be used from any thread; launching takes a reference, and only the owner destroys them.
unsafe impl Send for Graph {}

impl Graph {
    /// Takes over the result of a capture.
    pub(super) fn new(device: &Arc<Device>, graph: sys::CUgraph) -> Result<Self> {
        // SAFETY: a graph as `cuStreamEndCapture` returns it.
        let exec = match unsafe { driver::instantiate(graph) } {
            Ok(exec) => exec,
            Err(error) => {
                // SAFETY: this call owns it.
                let _ = unsafe { driver::destroy_graph(graph) };
                return Err(error).context("cuGraphInstantiateWithFlags");
            }
        };
        device.graph_captured();
        let launches = device.is_pinned_captured().then(RefCell::default);
        Ok(Graph { device: Arc::clone(device), graph, exec, launches })
    }

    /// Notes that it was enqueued last on `stream`.
    pub(super) fn launched_on(&self, stream: &Stream) -> Result<()> {
        match &self.launches {
            Some(launches) => launches.borrow_mut().record(stream).map(drop),
            None => Ok(()),
        }
    }

    pub(super) fn exec(&self) -> sys::CUgraphExec {
        self.exec
    }

    /// The GPU it was captured on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.is_abandoned() {
            return;
        }
        let _ = self.device.bind();
        let ended = self.launches.as_ref().map_or(Ok(()), |launches| launches.borrow().wait());
        // SAFETY: both belong to this graph, and the driver keeps a running graph until it has finished.
        let _ = unsafe { driver::destroy_exec(self.exec) };
        // SAFETY: as above.
        let _ = unsafe { driver::destroy_graph(self.graph) };
        // If the wait failed, a launch may still be running, so its memory is never freed.
        if ended.is_ok() {
            self.device.graph_destroyed();
        }
    }
}
