//! Access of one GPU to the memory of another: whether the driver allows it, and copies.
//!
//! A copy between GPUs works without such access, too: the driver then takes it through memory of the host.

use cudarc::driver::sys::CUdevice_P2PAttribute as Attribute;

use super::driver::{self, DriverError};
use super::error::{Context, Result};
use super::{Device, Memory, Stream};

impl Device {
    /// The PCI address in lower case, such as `0000:3b:00.0`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn bus(&self) -> Result<String> {
        driver::device(self.ordinal() as i32).and_then(driver::device_bus).context("cuDeviceGetPCIBusId")
    }

    /// Whether this GPU can be given access to the memory of `peer`. The driver knows from the topology; it has not tried.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn can_access(&self, peer: &Device) -> Result<bool> {
        let handle = |device: &Device| driver::device(device.ordinal() as i32).context("cuDeviceGet");
        driver::can_access_peer(handle(self)?, handle(peer)?).context("cuDeviceCanAccessPeer")
    }

    /// Whether atomic operations of this GPU work in the memory of `peer`, as they do over NVLink.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn has_atomics_on(&self, peer: &Device) -> Result<bool> {
        let handle = |device: &Device| driver::device(device.ordinal() as i32).context("cuDeviceGet");
        let attribute = Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        let value = driver::peer_attribute(attribute, handle(self)?, handle(peer)?);
        value.map(|value| value != 0).context("cuDeviceGetP2PAttribute")
    }

    /// Gives this GPU access to the memory of `peer`, for this process and until its end. The calling thread is bound to
    /// this GPU.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn enable_access(&self, peer: &Device) -> Result<()> {
        self.bind()?;
        // SAFETY: contexts of devices are retained until the end of the process.
        match unsafe { driver::enable_peer_access(peer.context()) } {
            Err(DriverError::PEER_ACCESS_ALREADY_ENABLED) => Ok(()),
            outcome => outcome.context("cuCtxEnablePeerAccess"),
        }
    }
}

impl Stream {
    /// Copies `from`, which may be on another GPU, to `to` on this stream's GPU, `times` times, and returns when that has
    /// finished.
    ///
    /// # Errors
    /// If the driver refuses, or earlier work on the stream failed.
    ///
    /// # Panics
    /// If the sizes differ, or `to` is on another GPU.
    pub fn copy_from_peer(&self, from: &Memory, to: &Memory, times: u32) -> Result<()> {
        let bytes = to.view().bytes();
        assert_eq!(from.view().bytes(), bytes, "sizes of a copy");
        assert_eq!(to.device().ordinal(), self.device().ordinal(), "the destination is on another GPU");
        if bytes == 0 {
            return Ok(());
        }
        let end = |memory: &Memory| (memory.view().address(), memory.device().context());
        for _ in 0..times {
            // SAFETY: both memories have this many bytes, belong to these contexts, and live until `synchronize` returns.
            let enqueued = unsafe { driver::copy_peer(end(to), end(from), bytes, self.raw()) };
            if enqueued.is_err() {
                // Copies that were enqueued before still use the memories.
                let _ = self.synchronize();
                return enqueued.context("cuMemcpyPeerAsync");
            }
        }
        self.synchronize()
    }
}
