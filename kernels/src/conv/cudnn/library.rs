//! The functions of cuDNN that are used, its handle, and its descriptors.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cudnn::sys::{
    cudnnActivationMode_t as Activation, cudnnConvolutionMode_t as Mode, cudnnDataType_t as DataType,
    cudnnMathType_t as Math, cudnnNanPropagation_t as Nan, cudnnTensorFormat_t as Format,
};

use crate::cuda::{Device, Error, Result, Stream, libraries};

/// An opaque object of the library.
pub(super) type Raw = *mut c_void;
/// An integer and not an enum, since a newer library may have more codes.
pub(super) type Status = u32;
/// Device memory, or a number on the host.
pub(super) type Address = *const c_void;

pub(super) type Convolve = unsafe extern "C" fn(
    Raw,
    Address,
    Raw,
    Address,
    Raw,
    Address,
    Raw,
    u32,
    *mut c_void,
    usize,
    Address,
    Raw,
    *mut c_void,
) -> Status;
pub(super) type Rank =
    unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, c_int, *mut c_int, *mut AlgorithmPerf) -> Status;
pub(super) type WorkspaceSize = unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, u32, *mut usize) -> Status;

/// `cudnnConvolutionFwdAlgoPerf_t`, which has the same layout for all passes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AlgorithmPerf {
    pub(super) algorithm: u32,
    pub(super) status: Status,
    pub(super) milliseconds: f32,
    pub(super) memory: usize,
    pub(super) deterministic: u32,
    pub(super) math: u32,
    pub(super) reserved: [c_int; 3],
}

libraries::functions! {
    /// The functions of cuDNN that are used.
    pub(super) Functions {
        version = cudnnGetVersion() -> usize;
        error_string = cudnnGetErrorString(Status) -> *const c_char;
        create = cudnnCreate(*mut Raw) -> Status;
        set_stream = cudnnSetStream(Raw, Raw) -> Status;
        create_tensor = cudnnCreateTensorDescriptor(*mut Raw) -> Status;
        set_tensor = cudnnSetTensor4dDescriptor(Raw, Format, DataType, c_int, c_int, c_int, c_int) -> Status;
        destroy_tensor = cudnnDestroyTensorDescriptor(Raw) -> Status;
        create_filter = cudnnCreateFilterDescriptor(*mut Raw) -> Status;
        set_filter = cudnnSetFilter4dDescriptor(Raw, DataType, Format, c_int, c_int, c_int, c_int) -> Status;
        destroy_filter = cudnnDestroyFilterDescriptor(Raw) -> Status;
        create_convolution = cudnnCreateConvolutionDescriptor(*mut Raw) -> Status;
        set_convolution = cudnnSetConvolution2dDescriptor(
            Raw, c_int, c_int, c_int, c_int, c_int, c_int, Mode, DataType
        ) -> Status;
        set_math = cudnnSetConvolutionMathType(Raw, Math) -> Status;
        destroy_convolution = cudnnDestroyConvolutionDescriptor(Raw) -> Status;
        create_activation = cudnnCreateActivationDescriptor(*mut Raw) -> Status;
        set_activation = cudnnSetActivationDescriptor(Raw, Activation, Nan, f64) -> Status;
        destroy_activation = cudnnDestroyActivationDescriptor(Raw) -> Status;
        rank_forward = cudnnGetConvolutionForwardAlgorithm_v7(
            Raw, Raw, Raw, Raw, Raw, c_int, *mut c_int, *mut AlgorithmPerf
        ) -> Status;
        rank_backward_data = cudnnGetConvolutionBackwardDataAlgorithm_v7(
            Raw, Raw, Raw, Raw, Raw, c_int, *mut c_int, *mut AlgorithmPerf
        ) -> Status;
        rank_backward_filter = cudnnGetConvolutionBackwardFilterAlgorithm_v7(
            Raw, Raw, Raw, Raw, Raw, c_int, *mut c_int, *mut AlgorithmPerf
        ) -> Status;
        forward_workspace = cudnnGetConvolutionForwardWorkspaceSize(
            Raw, Raw, Raw, Raw, Raw, u32, *mut usize
        ) -> Status;
        backward_data_workspace = cudnnGetConvolutionBackwardDataWorkspaceSize(
            Raw, Raw, Raw, Raw, Raw, u32, *mut usize
        ) -> Status;
        backward_filter_workspace = cudnnGetConvolutionBackwardFilterWorkspaceSize(
            Raw, Raw, Raw, Raw, Raw, u32, *mut usize
        ) -> Status;
        forward = cudnnConvolutionForward(
            Raw, Address, Raw, Address, Raw, Address, Raw, u32, *mut c_void, usize, Address, Raw, *mut c_void
        ) -> Status;
        forward_fused = cudnnConvolutionBiasActivationForward(
            Raw, Address, Raw, Address, Raw, Address, Raw, u32, *mut c_void, usize,
            Address, Raw, Address, Raw, Address, Raw, Raw, *mut c_void
        ) -> Status;
        backward_data = cudnnConvolutionBackwardData(
            Raw, Address, Raw, Address, Raw, Address, Raw, u32, *mut c_void, usize, Address, Raw, *mut c_void
        ) -> Status;
        backward_filter = cudnnConvolutionBackwardFilter(
            Raw, Address, Raw, Address, Raw, Address, Raw, u32, *mut c_void, usize, Address, Raw, *mut c_void
        ) -> Status;
    }
}

/// The library's handle for one GPU, shared by all layers.
pub(super) struct Handle {
    pub(super) functions: Functions,
    device: Arc<Device>,
    /// Locked, because the library allows one call at a time.
    handle: Mutex<Raw>,
}

// SAFETY: the handle may be used from any thread, by one at a time.
unsafe impl Send for Handle {}
// SAFETY: as above; the mutex ensures it.
unsafe impl Sync for Handle {}

impl Handle {
    /// The handle for this GPU, created by the first call.
    ///
    /// # Errors
    /// If the library is not found, lacks a function, or refuses this GPU.
    pub(super) fn for_device(device: &Arc<Device>) -> Result<Arc<Self>> {
        // Kept until the end of the process: captured graphs may use resources of the handle.
        static OPEN: Mutex<Vec<Arc<Handle>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = open.iter().find(|known| Arc::ptr_eq(&known.device, device)) {
            return Ok(Arc::clone(known));
        }
        // cuDNN needs cuBLASLt, and by itself finds it only on the loader's path.
        let _ = libraries::open(&libraries::CUBLAS_LT);
        let functions = Functions::from_library(&libraries::OpenLibrary::open(&libraries::CUDNN)?)?;
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is writable.
        let status = unsafe { (functions.create)(&mut handle) };
        functions.check("cudnnCreate", status)?;
        let open_handle =
            Arc::new(Handle { functions, device: Arc::clone(device), handle: Mutex::new(handle) });
        open.push(Arc::clone(&open_handle));
        Ok(open_handle)
    }

    /// Name and version.
    pub(super) fn version(&self) -> String {
        // SAFETY: the function has no arguments.
        format!("cuDNN {}", unsafe { (self.functions.version)() })
    }

    /// Calls the library with its handle, after setting the handle's stream.
    pub(super) fn call(
        &self,
        name: &'static str,
        stream: &Stream,
        call: impl FnOnce(Raw) -> Status,
    ) -> Result<()> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: both handles are alive.
        let status = unsafe { (self.functions.set_stream)(*handle, stream.raw().cast()) };
        self.functions.check("cudnnSetStream", status)?;
        self.functions.check(name, call(*handle))
    }

    /// Calls the library with its handle, for a query that enqueues nothing.
    pub(super) fn query(&self, name: &'static str, call: impl FnOnce(Raw) -> Status) -> Result<()> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        self.functions.check(name, call(*handle))
    }
}

impl Functions {
    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function accepts any number and returns a constant string.
        let text = unsafe { (self.error_string)(status) };
        let text = if text.is_null() {
            "unknown".into()
        } else {
            // SAFETY: a constant string of the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(Error::Library { call, text: format!("{text} ({status})") })
    }
}

/// The description of a tensor, or of an operation.
pub(super) struct Descriptor {
    pub(super) raw: Raw,
    destroy: unsafe extern "C" fn(Raw) -> Status,
}

impl Descriptor {
    pub(super) fn new(
        functions: &Functions,
        create: unsafe extern "C" fn(*mut Raw) -> Status,
        destroy: unsafe extern "C" fn(Raw) -> Status,
        set: impl FnOnce(Raw) -> Status,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable.
        functions.check("cudnnCreate…Descriptor", unsafe { create(&mut raw) })?;
        let descriptor = Descriptor { raw, destroy };
        functions.check("cudnnSet…Descriptor", set(raw))?;
        Ok(descriptor)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created in `new`. The library reads descriptors only during a call.
        unsafe { (self.destroy)(self.raw) };
    }
}
