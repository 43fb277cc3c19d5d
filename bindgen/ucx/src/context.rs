//! A context: UCX's devices and settings in this process.

use std::ptr;
use std::sync::Arc;

use crate::error::UcxError;
use crate::loader::{Library, Version};
use crate::sys::{ucp_context_h, ucp_feature, ucp_params_field, ucp_params_t};

/// The devices of this process, opened for tagged messages; shared by [workers](crate::Worker) of any threads. Making
/// one takes milliseconds, so a process should have a single one.
#[derive(Debug)]
pub struct Context {
    library: Library,
    handle: ucp_context_h,
}

// SAFETY: the context is made with `mt_workers_shared`: its workers may be used by different threads.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the devices that `UCX_TLS`, `UCX_NET_DEVICES` and UCX's other variables allow, for about `endpoints`
    /// endpoints in all.
    ///
    /// # Errors
    ///
    /// As UCX reports them, for example if its variables exclude every device.
    pub fn new(library: &Library, endpoints: usize) -> Result<Arc<Self>, UcxError> {
        let fields = ucp_params_field::UCP_PARAM_FIELD_FEATURES
            | ucp_params_field::UCP_PARAM_FIELD_MT_WORKERS_SHARED
            | ucp_params_field::UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
        let features = ucp_feature::UCP_FEATURE_TAG | ucp_feature::UCP_FEATURE_WAKEUP;
        let params = ucp_params_t {
            field_mask: fields.0.into(),
            features: features.0.into(),
            mt_workers_shared: 1,
            estimated_num_eps: endpoints,
            request_size: 0,
            request_init: None,
            request_cleanup: None,
            tag_sender_mask: 0,
            estimated_num_ppn: 0,
            name: ptr::null(),
            node_local_id: 0,
        };
        let mut handle = ptr::null_mut();
        let Version { major, minor, .. } = Version::OLDEST;
        // SAFETY: the struct lives during the call, and names the fields that are set. Without a configuration UCX reads
        // its variables. The API version is the oldest one that has these fields and functions.
        let status =
            unsafe { (library.symbols().ucp_init_version)(major, minor, &params, ptr::null(), &mut handle) };
        library.check("ucp_init", status)?;
        Ok(Arc::new(Context { library: library.clone(), handle }))
    }

    /// The library that it belongs to.
    pub fn library(&self) -> &Library {
        &self.library
    }

    pub(crate) fn handle(&self) -> ucp_context_h {
        self.handle
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the handle is valid, and workers, which keep their context alive, are gone.
        unsafe { (self.library.symbols().ucp_cleanup)(self.handle) };
    }
}
