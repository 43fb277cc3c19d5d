//! Events with a time.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::captures::Allocation;
use super::error::{Context, Result};
use super::{Device, Stream, driver};

/// A position in a stream's work whose time is taken, with a resolution of about half a microsecond.
///
/// It may be recorded in a capture: then it is a node of the graph, and every launch of the graph takes its time
/// again. A graph keeps the events that existed when it was captured, even if their owners are dropped.
#[derive(Debug)]
pub struct TimedEvent {
    device: Arc<Device>,
    raw: sys::CUevent,
    /// When it was created, in the device's count of allocations.
    created_at: u64,
}

// SAFETY: a handle that may be used from all threads, destroyed by its only owner.
unsafe impl Send for TimedEvent {}

impl TimedEvent {
    /// An event that no stream has recorded yet.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let raw = driver::create_timed_event().context("cuEventCreate")?;
        Ok(TimedEvent { device: Arc::clone(device), raw, created_at: device.allocated(0) })
    }

    /// The time from `earlier` to this event, as they were last recorded; 0 if it was not earlier.
    ///
    /// # Errors
    /// If one of them was never recorded, or the work before it has not finished.
    pub fn since(&self, earlier: &TimedEvent) -> Result<Duration> {
        self.device.bind()?;
        // SAFETY: both events exist.
        let milliseconds =
            unsafe { driver::elapsed_time(earlier.raw, self.raw) }.context("cuEventElapsedTime")?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        self.device.release(Allocation::Event(self.raw as usize), self.created_at);
    }
}

impl Stream {
    /// Takes the time of `event` when the work so far has finished; in a capture, whenever the graph is launched.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn record_time(&self, event: &TimedEvent) -> Result<()> {
        if self.is_capturing()? {
            // SAFETY: both handles are alive, and a graph keeps the event.
            return unsafe { driver::capture_event(event.raw, self.raw()) }.context("cuEventRecordWithFlags");
        }
        // SAFETY: both handles are alive.
        unsafe { driver::record_event(event.raw, self.raw()) }.context("cuEventRecord")
    }
}
