//! Streams and events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use cudarc::driver::sys;

use super::arguments::{Arg, Grid};
use super::driver::{self, DriverError};
use super::error::{Context, Result};
use super::{Device, Function, Graph, Pinned, View};

/// A queue of work that a GPU executes in order, concurrently with other streams.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
    number: u64,
    /// Another owner destroys it.
    is_foreign: bool,
}

// SAFETY: a handle that may be used from all threads, destroyed by its only owner.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// A position in a stream's work that other streams can wait for.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

/// True if the work has finished.
fn finished(state: Result<(), DriverError>, call: &'static str) -> Result<bool> {
    match state {
        Ok(()) => Ok(true),
        Err(DriverError::NOT_READY) => Ok(false),
        Err(error) => Err(error).context(call),
    }
}

impl Event {
    /// An event that no stream has recorded yet: waiting for it returns at once.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let raw = driver::create_event().context("cuEventCreate")?;
        Ok(Event { device: Arc::clone(device), raw })
    }

    /// True once the stream that recorded it last has reached it.
    ///
    /// # Errors
    /// If the work before it failed.
    pub fn is_done(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the event is this object's.
        finished(unsafe { driver::query_event(self.raw) }, "cuEventQuery")
    }

    /// Returns once the stream that recorded it last has reached it.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the event is this object's.
        unsafe { driver::synchronize_event(self.raw) }.context("cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.is_abandoned() {
            return;
        }
        let _ = self.device.bind();
        // SAFETY: created in `new`; the driver keeps it as long as a stream waits for it.
        let _ = unsafe { driver::destroy_event(self.raw) };
    }
}

impl Stream {
    /// A stream that does not synchronise with the default stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let raw = driver::create_stream().context("cuStreamCreate")?;
        Ok(Self::owning(device, raw))
    }

    fn owning(device: &Arc<Device>, raw: sys::CUstream) -> Self {
        static STREAMS: AtomicU64 = AtomicU64::new(0);
        let number = STREAMS.fetch_add(1, Ordering::Relaxed);
        Stream { device: Arc::clone(device), raw, number, is_foreign: false }
    }

    /// A stream that another owner has created, such as a framework. Work that is enqueued on it runs between the
    /// framework's own, so neither waits on the host. Dropping it does not destroy the stream.
    ///
    /// # Safety
    /// `raw` is a stream of `device`'s primary context. It is not destroyed before this object is dropped and all work
    /// that was enqueued through it has finished.
    pub unsafe fn from_raw(device: &Arc<Device>, raw: sys::CUstream) -> Self {
        let mut stream = Self::owning(device, raw);
        stream.is_foreign = true;
        stream
    }

    /// As [`new`](Self::new), but with the highest priority: when work of several streams could start, this stream's
    /// starts first. For work that other ranks wait for.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn with_high_priority(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let highest = driver::highest_priority().context("cuCtxGetStreamPriorityRange")?;
        let raw = driver::create_stream_with_priority(highest).context("cuStreamCreateWithPriority")?;
        Ok(Self::owning(device, raw))
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The driver's handle, for libraries that enqueue work on the stream.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// A number that no other stream of this process has, before or after.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Records `event` at the end of the work so far.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive.
        unsafe { driver::record_event(event.raw, self.raw) }.context("cuEventRecord")
    }

    /// Work enqueued from now on waits for `event` as it was last recorded.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive.
        unsafe { driver::wait_event(self.raw, event.raw) }.context("cuStreamWaitEvent")
    }

    /// True once all work so far has finished.
    ///
    /// # Errors
    /// If some of it failed.
    pub fn is_done(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the stream is this object's.
        finished(unsafe { driver::query_stream(self.raw) }, "cuStreamQuery")
    }

    /// Returns once all work so far has finished. If that never happens, it waits for ever: not for work that other
    /// ranks take part in.
    ///
    /// # Errors
    /// If some of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the stream is this object's.
        unsafe { driver::synchronize_stream(self.raw) }.context("cuStreamSynchronize")
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// If the driver refuses the launch.
    ///
    /// # Panics
    /// If the function belongs to another GPU.
    ///
    /// # Safety
    /// `arguments` has the number and the types of the kernel's parameters; whatever the kernel reads and writes at
    /// the addresses in it, for this grid, lies within memory that lives until the call returns.
    pub unsafe fn launch(&self, function: &Function, grid: Grid, arguments: &[Arg]) -> Result<()> {
        assert!(function.belongs_to(&self.device), "kernel {} was loaded on another GPU", function.name());
        function.allow_shared(grid.shared)?;
        self.device.note_launch(function.name(), || arguments.iter().map(Arg::bytes).sum());
        let mut pointers: smallvec::SmallVec<[_; 24]> = arguments.iter().map(Arg::pointer).collect();
        let Grid { blocks, threads, shared } = grid;
        // SAFETY: the driver reads as many bytes at each pointer as the parameter has, which the caller guarantees.
        unsafe { driver::launch_kernel(function.raw(), blocks, threads, shared, self.raw, &mut pointers) }
            .context("cuLaunchKernel")
    }

    /// Sets all bytes of `view` to zero.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn zero(&self, view: View<'_>) -> Result<()> {
        if view.is_empty() {
            return Ok(());
        }
        self.device.note_launch("fill", || view.bytes() as u64);
        // SAFETY: a view lies within its memory.
        unsafe { driver::fill_zero(view.address(), view.bytes(), self.raw) }.context("cuMemsetD8Async")
    }

    /// Copies `from` to `to` on the GPU.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn copy(&self, from: View<'_>, to: View<'_>) -> Result<()> {
        assert_eq!(from.bytes(), to.bytes(), "sizes of a copy");
        if from.is_empty() {
            return Ok(());
        }
        self.device.note_launch("copy", || 2 * from.bytes() as u64);
        // SAFETY: views lie within their memories.
        unsafe { driver::copy(to.address(), from.address(), from.bytes(), self.raw) }
            .context("cuMemcpyDtoDAsync")
    }

    /// Copies from the host, and returns when `values` may be reused.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn upload<T: Pod>(&self, values: &[T], to: View<'_>) -> Result<()> {
        assert_eq!(size_of_val(values), to.bytes(), "sizes of a copy");
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: the view lies within its memory, and `values` lives until `synchronize` returns.
        unsafe { driver::copy_to_device(to.address(), values.as_ptr().cast(), to.bytes(), self.raw) }
            .context("cuMemcpyHtoDAsync")?;
        self.synchronize()
    }

    /// Copies to the host, and returns when the values have arrived.
    ///
    /// # Errors
    /// If the driver refuses, or earlier work on the stream failed.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn download<T: Pod>(&self, from: View<'_>, values: &mut [T]) -> Result<()> {
        assert_eq!(size_of_val(values), from.bytes(), "sizes of a copy");
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: the view lies within its memory, and `values` lives until `synchronize` returns.
        unsafe { driver::copy_to_host(values.as_mut_ptr().cast(), from.address(), from.bytes(), self.raw) }
            .context("cuMemcpyDtoHAsync")?;
        self.synchronize()
    }

    /// Enqueues a copy to pinned memory of the host.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn enqueue_download(&self, from: View<'_>, to: &mut Pinned) -> Result<()> {
        assert_eq!(to.len(), from.bytes(), "sizes of a copy");
        self.enqueue_download_part(from, to, 0)
    }

    /// Enqueues a copy to the bytes of pinned host memory from `at` on.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the copy would exceed the pinned memory.
    pub fn enqueue_download_part(&self, from: View<'_>, to: &mut Pinned, at: usize) -> Result<()> {
        assert!(
            at <= to.len() && from.bytes() <= to.len() - at,
            "{} bytes to {at}.. of {}",
            from.bytes(),
            to.len()
        );
        // SAFETY: both ranges lie within their memories; pinned memory is freed only after the GPU's work, and is
        // read by `unsafe` calls only, whose callers guarantee that the copy has finished.
        unsafe { driver::copy_to_host(to.address().add(at).cast(), from.address(), from.bytes(), self.raw) }
            .context("cuMemcpyDtoHAsync")?;
        to.copied_by(self)
    }

    /// Enqueues a copy from the bytes of pinned host memory from `at` on.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the copy would exceed the pinned memory.
    pub fn enqueue_upload_part(&self, from: &Pinned, at: usize, to: View<'_>) -> Result<()> {
        assert!(
            at <= from.len() && to.bytes() <= from.len() - at,
            "{} bytes from {at}.. of {}",
            to.bytes(),
            from.len()
        );
        // SAFETY: both ranges lie within their memories; otherwise as in `enqueue_download_part`.
        unsafe { driver::copy_to_device(to.address(), from.address().add(at).cast(), to.bytes(), self.raw) }
            .context("cuMemcpyHtoDAsync")?;
        from.copied_by(self)
    }

    /// From now on, work that any thread enqueues on this stream is not executed but recorded for a graph, as is that
    /// of streams that wait for an event of this one.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn begin_capture(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the stream is this object's.
        unsafe { driver::begin_capture(self.raw) }.context("cuStreamBeginCapture")
    }

    /// True between [`begin_capture`](Self::begin_capture) and [`end_capture`](Self::end_capture) of this stream, or
    /// of one that this stream waits for.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn is_capturing(&self) -> Result<bool> {
        // SAFETY: the stream is this object's.
        unsafe { driver::is_capturing(self.raw) }.context("cuStreamIsCapturing")
    }

    /// Ends the capture that [`begin_capture`](Self::begin_capture) started in the same thread.
    ///
    /// # Errors
    /// If some of the enqueued work cannot be captured.
    pub fn end_capture(&self) -> Result<Graph> {
        // SAFETY: the stream is this object's.
        let graph = unsafe { driver::end_capture(self.raw) }.context("cuStreamEndCapture")?;
        Graph::new(&self.device, graph)
    }

    /// Captures the work that `work` enqueues on the stream and executes it `times` times; returns when it has
    /// finished. `work` must have run before, so that its kernels are loaded.
    ///
    /// # Errors
    /// If some of the work cannot be captured, or the driver refuses.
    pub fn repeat(&self, times: u32, work: impl Fn() -> Result<()>) -> Result<()> {
        self.begin_capture()?;
        let captured = work();
        // The capture is ended even after an error, so that the stream can be used again.
        let graph = self.end_capture();
        captured?;
        let graph = graph?;
        for _ in 0..times {
            // SAFETY: whatever `work` uses outlives it, since nothing is allocated or freed during a capture; `work`
            // borrows it until the end of this call, which waits for the stream.
            unsafe { self.launch_graph(&graph) }?;
        }
        self.synchronize()
    }

    /// Replays a graph.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the graph was captured on another GPU.
    ///
    /// # Safety
    /// Every communicator used by the captured work lives until the call returns.
    pub unsafe fn launch_graph(&self, graph: &Graph) -> Result<()> {
        assert!(Arc::ptr_eq(graph.device(), &self.device), "a graph of another GPU");
        // SAFETY: both handles are alive, and the graph keeps its memory; the caller guarantees the communicators.
        unsafe { driver::launch_graph(graph.exec(), self.raw) }.context("cuGraphLaunch")?;
        graph.launched_on(self)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_foreign || self.device.is_abandoned() {
            return;
        }
        let _ = self.device.bind();
        // SAFETY: created in `new`; the driver finishes the work that is still on it first.
        let _ = unsafe { driver::destroy_stream(self.raw) };
    }
}
