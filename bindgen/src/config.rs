//! The communicator's configuration, in a form that every library since 2.18 reads.
//!
//! `ncclConfig_t` grows with nearly every release. Each library copies as many bytes of it as the `size` field says,
//! up to the size it knows, and uses defaults for the rest. So this crate does not pass the whole struct of a new
//! header: its prefix as of 2.18 has everything that is needed and means the same in every version.

use crate::sys;
use std::ffi::{c_char, c_int, c_uint};
use std::ptr;

/// "Not set, NCCL decides", for every integer of the configuration.
const UNSET: c_int = c_int::MIN;

/// The release whose whole configuration this is.
const VERSION: c_uint = 2_18_00;

/// The first 48 bytes of `ncclConfig_t`; all fields are unset except those that the constructor names.
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
    /// Padding in 2.18, a field of its own since 2.25; unset means the same to both.
    after_split_share: c_int,
}

impl InitConfig {
    /// Calls on the communicator return at once with "in progress" instead of waiting for peers. Only with such a
    /// communicator can a rank enforce a deadline.
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

    /// Limits the number of thread blocks that a collective occupies, so that computation keeps the rest of the GPU.
    /// NCCL rejects zero and negative numbers.
    pub const fn with_max_ctas(mut self, max_ctas: i32) -> Self {
        self.max_ctas = max_ctas;
        self
    }

    /// Whether calls wait for their completion; `None` if NCCL decides.
    pub const fn blocking(&self) -> Option<bool> {
        match self.blocking {
            UNSET => None,
            value => Some(value != 0),
        }
    }

    /// The pointer for `ncclCommInitRankConfig`. NCCL reads `size` bytes through it and writes none.
    pub(crate) fn as_nccl(&mut self) -> *mut sys::ncclConfig_t {
        ptr::from_mut(self).cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn init_config_is_a_prefix_of_the_header_struct() {
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
