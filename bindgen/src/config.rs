//! The communicator's configuration, in a form that every library since 2.18 reads.
//!
//! `ncclConfig_t` grows with nearly every release, and each library copies as many bytes of it as the `size` field
//! says, up to what it knows, and takes its defaults for the rest. So the whole struct of a new header is not what
//! to pass around: its beginning, as it was in 2.18, does all we need and means the same everywhere.

use crate::sys;
use std::ffi::{c_char, c_int, c_uint};
use std::ptr;

/// "Not set: NCCL decides", for every integer of the configuration.
const UNSET: c_int = c_int::MIN;

/// The release whose configuration this is the whole of.
const VERSION: c_uint = 2_18_00;

/// The first 48 bytes of `ncclConfig_t`, everything unset but what the constructor names.
///
/// ```
/// let config = nccl_sys::InitConfig::non_blocking();
/// assert_eq!(config.blocking(), Some(false));
/// ```
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct InitConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// Padding in 2.18, a field of its own from 2.25 on; unset means the same to both.
    after_split_share: c_int,
}

impl InitConfig {
    /// Calls on the communicator return at once with "in progress" instead of waiting for peers: the only
    /// form under which a rank can notice a deadline.
    pub const fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: sys::NCCL_API_MAGIC,
            version: VERSION,
            blocking: 0,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: ptr::null(),
            split_share: UNSET,
            after_split_share: UNSET,
        }
    }

    /// The same with a bound on the thread blocks a collective occupies, so that computation keeps the rest of the
    /// GPU. NCCL refuses zero and negative numbers.
    pub const fn with_max_ctas(mut self, max_ctas: i32) -> Self {
        self.max_ctas = max_ctas;
        self
    }

    /// Whether calls wait for their completion; `None` leaves it to NCCL.
    pub const fn blocking(&self) -> Option<bool> {
        match self.blocking {
            UNSET => None,
            value => Some(value != 0),
        }
    }

    /// The pointer that `ncclCommInitRankConfig` wants. NCCL reads `size` bytes through it and writes none.
    pub(crate) fn as_nccl(&mut self) -> *mut sys::ncclConfig_t {
        ptr::from_mut(self).cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn it_is_a_prefix_of_the_header_struct() {
        assert_eq!(size_of::<InitConfig>(), 48);
        assert_eq!(align_of::<InitConfig>(), align_of::<sys::ncclConfig_t>());
        assert_eq!(offset_of!(InitConfig, size), offset_of!(sys::ncclConfig_t, size));
        assert_eq!(offset_of!(InitConfig, magic), offset_of!(sys::ncclConfig_t, magic));
        assert_eq!(offset_of!(InitConfig, version), offset_of!(sys::ncclConfig_t, version));
        assert_eq!(offset_of!(InitConfig, blocking), offset_of!(sys::ncclConfig_t, blocking));
        assert_eq!(offset_of!(InitConfig, cga_cluster_size), offset_of!(sys::ncclConfig_t, cgaClusterSize));
        assert_eq!(offset_of!(InitConfig, min_ctas), offset_of!(sys::ncclConfig_t, minCTAs));
        assert_eq!(offset_of!(InitConfig, max_ctas), offset_of!(sys::ncclConfig_t, maxCTAs));
        assert_eq!(offset_of!(InitConfig, net_name), offset_of!(sys::ncclConfig_t, netName));
        assert_eq!(offset_of!(InitConfig, split_share), offset_of!(sys::ncclConfig_t, splitShare));
        assert_eq!(offset_of!(InitConfig, after_split_share), offset_of!(sys::ncclConfig_t, trafficClass));
    }
}
