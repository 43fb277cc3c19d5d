//! Work in order, and order between streams.

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{DriverError, result, sys};

use super::arguments::{Arg, Grid};
use super::error::{Context, Result};
use super::{Device, Function, Graph, Pinned, View};

/// Work that a GPU does in the order in which it was asked for, beside that of other streams.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
}

// SAFETY: a handle that may be used from all threads, destroyed by its only owner.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// A place in a stream's work, for other streams to wait for.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

/// True for work that is over, false for work that is not.
fn finished(state: Result<(), DriverError>, call: &'static str) -> Result<bool> {
    match state {
        Ok(()) => Ok(true),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(error) => Err(error).context(call),
    }
}

impl Event {
    /// A place that no stream has come to yet: waiting for it is no wait.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let raw =
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).context("cuEventCreate")?;
        Ok(Event { device: Arc::clone(device), raw })
    }

    /// True once the stream that recorded it last has come to it.
    ///
    /// # Errors
    /// If the work before it failed.
    pub fn is_done(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the event is this object's.
        finished(unsafe { result::event::query(self.raw) }, "cuEventQuery")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.is_abandoned() {
            return;
        }
        let _ = self.device.bind();
        // SAFETY: created in `new`; the driver keeps what still waits for it.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

impl Stream {
    /// A stream that waits for no other.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let raw =
            result::stream::create(result::stream::StreamKind::NonBlocking).context("cuStreamCreate")?;
        Ok(Stream { device: Arc::clone(device), raw })
    }

    /// As [`new`](Self::new), with its work before that of other streams wherever both could start: for what other ranks
    /// wait for.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn with_high_priority(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let (_, most) = result::stream::get_priority_range().context("cuCtxGetStreamPriorityRange")?;
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = result::stream::create_with_priority(kind, most).context("cuStreamCreateWithPriority")?;
        Ok(Stream { device: Arc::clone(device), raw })
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The driver's handle, for libraries that put work on the stream.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Marks the place in `event`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive.
        unsafe { result::event::record(event.raw, self.raw) }.context("cuEventRecord")
    }

    /// What is put on the stream from now on waits for `event`, as it was recorded last.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }.context("cuStreamWaitEvent")
    }

    /// True once all work so far is over.
    ///
    /// # Errors
    /// If some of it failed.
    pub fn is_done(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the stream is this object's.
        finished(unsafe { sys::cuStreamQuery(self.raw) }.result(), "cuStreamQuery")
    }

    /// Returns once all work so far is over. It waits for ever where that never is: not for work that other ranks take
    /// part in.
    ///
    /// # Errors
    /// If some of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the stream is this object's.
        unsafe { result::stream::synchronize(self.raw) }.context("cuStreamSynchronize")
    }

    /// Runs a kernel.
    ///
    /// # Errors
    /// If the driver refuses the launch.
    ///
    /// # Panics
    /// If the function belongs to another GPU.
    ///
    /// # Safety
    /// `arguments` are as many as the kernel has parameters and of their types; what the kernel reads and writes at the
    /// addresses among them, for this grid, lies within memory that lives until the call returns.
    pub unsafe fn launch(&self, function: &Function, grid: Grid, arguments: &[Arg]) -> Result<()> {
        assert!(function.belongs_to(&self.device), "kernel {} was loaded on another GPU", function.name());
        function.allow_shared(grid.shared)?;
        let mut pointers: smallvec::SmallVec<[_; 24]> = arguments.iter().map(Arg::pointer).collect();
        let [x, y, z] = grid.blocks;
        // SAFETY: the driver reads as many bytes at each pointer as the parameter has, which the caller vouches for.
        unsafe {
            result::launch_kernel(
                function.raw(),
                (x, y, z),
                (grid.threads, 1, 1),
                grid.shared,
                self.raw,
                &mut pointers,
            )
        }
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
        // SAFETY: a view lies within its memory.
        unsafe { result::memset_d8_async(view.address(), 0, view.bytes(), self.raw) }
            .context("cuMemsetD8Async")
    }

    /// Copies `from` to `to` on the GPU.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If they differ in size.
    pub fn copy(&self, from: View<'_>, to: View<'_>) -> Result<()> {
        assert_eq!(from.bytes(), to.bytes(), "sizes of a copy");
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: views lie within their memories.
        unsafe { result::memcpy_dtod_async(to.address(), from.address(), from.bytes(), self.raw) }
            .context("cuMemcpyDtoDAsync")
    }

    /// Copies from the host, and returns when `values` may be used again.
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
        // SAFETY: the view lies within its memory, and `values` stays until the stream has been waited for.
        unsafe { result::memcpy_htod_async(to.address(), values, self.raw) }.context("cuMemcpyHtoDAsync")?;
        self.synchronize()
    }

    /// Copies to the host, and returns when the values are there.
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
        // SAFETY: the view lies within its memory, and `values` stays until the stream has been waited for.
        unsafe { result::memcpy_dtoh_async(values, from.address(), self.raw) }
            .context("cuMemcpyDtoHAsync")?;
        self.synchronize()
    }

    /// Copies to pinned memory of the host and does not wait.
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

    /// Copies to bytes `at..` of pinned memory of the host and does not wait.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn enqueue_download_part(&self, from: View<'_>, to: &mut Pinned, at: usize) -> Result<()> {
        assert!(
            at <= to.len() && from.bytes() <= to.len() - at,
            "{} bytes to {at}.. of {}",
            from.bytes(),
            to.len()
        );
        // SAFETY: both ranges lie within their memories; pinned memory waits for the GPU's work before it is freed, and is
        // read by `unsafe` calls only, whose callers know that the copy is over.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.address().add(at).cast(), from.address(), from.bytes(), self.raw)
        }
        .result()
        .context("cuMemcpyDtoHAsync")
    }

    /// Copies from bytes `at..` of pinned memory of the host and does not wait.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn enqueue_upload_part(&self, from: &Pinned, at: usize, to: View<'_>) -> Result<()> {
        assert!(
            at <= from.len() && to.bytes() <= from.len() - at,
            "{} bytes from {at}.. of {}",
            to.bytes(),
            from.len()
        );
        // SAFETY: both ranges lie within their memories; else as in `enqueue_download_part`.
        unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address(), from.address().add(at).cast(), to.bytes(), self.raw)
        }
        .result()
        .context("cuMemcpyHtoDAsync")
    }

    /// From here on, work put on the stream by any thread is not done but kept for a graph, and so is that of streams
    /// that wait for an event of it.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn begin_capture(&self) -> Result<()> {
        self.device.bind()?;
        // Other threads go on as they are: a watchdog may ask the driver about events meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this object's.
        unsafe { result::stream::begin_capture(self.raw, mode) }.context("cuStreamBeginCapture")
    }

    /// True between [`begin_capture`](Self::begin_capture) and [`end_capture`](Self::end_capture), here or on a stream that
    /// this one waits for.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn is_capturing(&self) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is this object's; a writable status.
        unsafe { sys::cuStreamIsCapturing(self.raw, &mut status) }.result().context("cuStreamIsCapturing")?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Ends what [`begin_capture`](Self::begin_capture) began, in the same thread.
    ///
    /// # Errors
    /// If something put on the stream cannot be captured.
    pub fn end_capture(&self) -> Result<Graph> {
        // SAFETY: the stream is this object's.
        let graph = unsafe { result::stream::end_capture(self.raw) }.context("cuStreamEndCapture")?;
        Graph::new(&self.device, graph)
    }

    /// Captures what `work` puts on the stream and has it done `times` times; returns once it is over. `work` must have
    /// run before, so that its kernels are loaded.
    ///
    /// # Errors
    /// If something of `work` cannot be captured, or the driver refuses.
    pub fn repeat(&self, times: u32, work: impl Fn() -> Result<()>) -> Result<()> {
        self.begin_capture()?;
        let captured = work();
        // Ended in any case, so that the stream serves again.
        let graph = self.end_capture();
        captured?;
        let graph = graph?;
        for _ in 0..times {
            // SAFETY: what `work` uses outlives it, since nothing is allocated or freed during a capture; it borrows that
            // until the end of this call, which waits for the stream.
            unsafe { self.launch_graph(&graph) }?;
        }
        self.synchronize()
    }

    /// Repeats the work of a graph.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the graph was captured on another GPU.
    ///
    /// # Safety
    /// Every communicator that the captured work takes part in lives until the call returns.
    pub unsafe fn launch_graph(&self, graph: &Graph) -> Result<()> {
        assert!(Arc::ptr_eq(graph.device(), &self.device), "a graph of another GPU");
        // SAFETY: both handles are alive, and the graph keeps its memory; communicators are the caller's promise.
        unsafe { result::graph::launch(graph.exec(), self.raw) }.context("cuGraphLaunch")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.is_abandoned() {
            return;
        }
        let _ = self.device.bind();
        // SAFETY: created in `new`; work still on it is finished first.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}
