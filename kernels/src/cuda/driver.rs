//! The driver's library: its functions and their errors.
//!
//! The types are cudarc's, the functions are not. cudarc opens `libcuda.so` before `libcuda.so.1`, but the former may
//! be the stub of a CUDA toolkit, which serves linking only; it panics if a function is missing; and its result codes
//! are a Rust enum, for which a code of a newer driver would be undefined behaviour.
//!
//! All functions except [`open`] may only be called after [`open`] has succeeded, so through a
//! [`Device`](super::Device).

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::error::{Context, Result};
use super::libraries;

/// `CUresult`.
type Status = c_uint;

/// A result other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DriverError(pub(super) u32);

impl DriverError {
    pub(super) const OUT_OF_MEMORY: Self = DriverError(2);
    pub(super) const NOT_READY: Self = DriverError(600);
    pub(super) const PEER_ACCESS_ALREADY_ENABLED: Self = DriverError(704);

    /// Its name and description.
    pub(super) fn text(self) -> String {
        let functions = functions();
        let text = |function: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = std::ptr::null();
            // SAFETY: the function accepts every number, and `text` is writable.
            let status = unsafe { function(self.0, &mut text) };
            if status != 0 || text.is_null() {
                return "unknown".to_owned();
            }
            // SAFETY: one of the library's constants, which is never closed.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        format!("{}, {}", text(functions.error_name), text(functions.error_string))
    }
}

type Outcome<T> = std::result::Result<T, DriverError>;

fn check(status: Status) -> Outcome<()> {
    if status == 0 { Ok(()) } else { Err(DriverError(status)) }
}

libraries::functions! {
    /// The functions of the driver that are called, newest last. A driver that lacks one is too old.
    Functions {
        init = cuInit(c_uint) -> Status;
        driver_version = cuDriverGetVersion(*mut c_int) -> Status;
        device = cuDeviceGet(*mut sys::CUdevice, c_int) -> Status;
        device_count = cuDeviceGetCount(*mut c_int) -> Status;
        device_name = cuDeviceGetName(*mut c_char, c_int, sys::CUdevice) -> Status;
        device_attribute = cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice) -> Status;
        retain_context = cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice) -> Status;
        set_context = cuCtxSetCurrent(sys::CUcontext) -> Status;
        allocate = cuMemAlloc_v2(*mut sys::CUdeviceptr, usize) -> Status;
        free = cuMemFree_v2(sys::CUdeviceptr) -> Status;
        memory_info = cuMemGetInfo_v2(*mut usize, *mut usize) -> Status;
        allocate_host = cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Status;
        free_host = cuMemFreeHost(*mut c_void) -> Status;
        fill = cuMemsetD8Async(sys::CUdeviceptr, c_uchar, usize, sys::CUstream) -> Status;
        copy_to_device = cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, sys::CUstream) -> Status;
        copy_to_host = cuMemcpyDtoHAsync_v2(*mut c_void, sys::CUdeviceptr, usize, sys::CUstream) -> Status;
        copy = cuMemcpyDtoDAsync_v2(sys::CUdeviceptr, sys::CUdeviceptr, usize, sys::CUstream) -> Status;
        create_stream = cuStreamCreate(*mut sys::CUstream, c_uint) -> Status;
        create_priority = cuStreamCreateWithPriority(*mut sys::CUstream, c_uint, c_int) -> Status;
        priorities = cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int) -> Status;
        destroy_stream = cuStreamDestroy_v2(sys::CUstream) -> Status;
        query_stream = cuStreamQuery(sys::CUstream) -> Status;
        synchronize_stream = cuStreamSynchronize(sys::CUstream) -> Status;
        wait_event = cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint) -> Status;
        create_event = cuEventCreate(*mut sys::CUevent, c_uint) -> Status;
        destroy_event = cuEventDestroy_v2(sys::CUevent) -> Status;
        query_event = cuEventQuery(sys::CUevent) -> Status;
        record_event = cuEventRecord(sys::CUevent, sys::CUstream) -> Status;
        record_event_with_flags = cuEventRecordWithFlags(sys::CUevent, sys::CUstream, c_uint) -> Status;
        elapsed_time = cuEventElapsedTime(*mut f32, sys::CUevent, sys::CUevent) -> Status;
        synchronize_event = cuEventSynchronize(sys::CUevent) -> Status;
        load_module = cuModuleLoadData(*mut sys::CUmodule, *const c_void) -> Status;
        function = cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char) -> Status;
        set_attribute = cuFuncSetAttribute(sys::CUfunction, sys::CUfunction_attribute, c_int) -> Status;
        launch_kernel = cuLaunchKernel(
            sys::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, sys::CUstream,
            *mut *mut c_void, *mut *mut c_void
        ) -> Status;
        error_name = cuGetErrorName(Status, *mut *const c_char) -> Status;
        error_string = cuGetErrorString(Status, *mut *const c_char) -> Status;
        begin_capture = cuStreamBeginCapture_v2(sys::CUstream, sys::CUstreamCaptureMode) -> Status;
        end_capture = cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph) -> Status;
        is_capturing = cuStreamIsCapturing(sys::CUstream, *mut c_uint) -> Status;
        launch_graph = cuGraphLaunch(sys::CUgraphExec, sys::CUstream) -> Status;
        destroy_graph = cuGraphDestroy(sys::CUgraph) -> Status;
        destroy_exec = cuGraphExecDestroy(sys::CUgraphExec) -> Status;
        can_access_peer = cuDeviceCanAccessPeer(*mut c_int, sys::CUdevice, sys::CUdevice) -> Status;
        enable_peer_access = cuCtxEnablePeerAccess(sys::CUcontext, c_uint) -> Status;
        copy_peer = cuMemcpyPeerAsync(
            sys::CUdeviceptr, sys::CUcontext, sys::CUdeviceptr, sys::CUcontext, usize, sys::CUstream
        ) -> Status;
        bus_id = cuDeviceGetPCIBusId(*mut c_char, c_int, sys::CUdevice) -> Status;
        peer_attribute = cuDeviceGetP2PAttribute(
            *mut c_int, sys::CUdevice_P2PAttribute, sys::CUdevice, sys::CUdevice
        ) -> Status;
        device_uuid = cuDeviceGetUuid_v2(*mut sys::CUuuid, sys::CUdevice) -> Status;
        instantiate = cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, c_ulonglong) -> Status;
    }
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// The functions of the driver, which is open.
fn functions() -> &'static Functions {
    FUNCTIONS.get().expect("the driver is opened before any of its functions is called")
}

/// Opens and initialises the driver, once for the process; returns the version of CUDA that it supports, major and
/// minor.
///
/// # Errors
/// If there is no driver, if it is too old, or if it returns an error.
pub(super) fn open() -> Result<(u32, u32)> {
    static VERSION: OnceLock<Result<(u32, u32)>> = OnceLock::new();
    let open = || {
        let functions = Functions::from_library(&libraries::open_driver()?)?;
        let functions = FUNCTIONS.get_or_init(|| functions);
        // SAFETY: the function has no preconditions.
        check(unsafe { (functions.init)(0) }).context("cuInit")?;
        let mut version = 0;
        // SAFETY: a writable integer.
        check(unsafe { (functions.driver_version)(&mut version) }).context("cuDriverGetVersion")?;
        let version = version.max(0) as u32;
        Ok((version / 1000, version % 1000 / 10))
    };
    VERSION.get_or_init(open).clone()
}

/// The version of CUDA that the driver supports, if there is a driver.
pub(super) fn version() -> Option<(u32, u32)> {
    open().ok()
}

/// Number of GPUs.
pub(super) fn device_count() -> Outcome<c_int> {
    let mut count = 0;
    // SAFETY: a writable integer.
    check(unsafe { (functions().device_count)(&mut count) })?;
    Ok(count)
}

/// The GPU with this ordinal.
pub(super) fn device(ordinal: c_int) -> Outcome<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: a writable handle.
    check(unsafe { (functions().device)(&mut device, ordinal) })?;
    Ok(device)
}

/// An attribute of a GPU.
pub(super) fn device_attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Outcome<c_int> {
    let mut value = 0;
    // SAFETY: a writable integer; the driver checks the device.
    check(unsafe { (functions().device_attribute)(&mut value, attribute, device) })?;
    Ok(value)
}

/// The product name of a GPU.
pub(super) fn device_name(device: sys::CUdevice) -> Outcome<String> {
    let mut name = [0u8; 256];
    // SAFETY: the driver writes at most as many bytes as given, and checks the device.
    check(unsafe { (functions().device_name)(name.as_mut_ptr().cast(), name.len() as c_int, device) })?;
    let text = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy);
    Ok(text.map_or_else(|_| "unknown".to_owned(), std::borrow::Cow::into_owned))
}

/// The bytes of a GPU's UUID.
pub(super) fn device_uuid(device: sys::CUdevice) -> Outcome<[c_char; 16]> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: a writable UUID; the driver checks the device.
    check(unsafe { (functions().device_uuid)(&mut uuid, device) })?;
    Ok(uuid.bytes)
}

/// The PCI address of a GPU, such as `0000:3b:00.0`.
pub(super) fn device_bus(device: sys::CUdevice) -> Outcome<String> {
    let mut text = [0u8; 32];
    // SAFETY: the driver writes at most as many bytes as given, and checks the device.
    check(unsafe { (functions().bus_id)(text.as_mut_ptr().cast(), text.len() as c_int, device) })?;
    let bus = CStr::from_bytes_until_nul(&text).map(CStr::to_string_lossy);
    Ok(bus.map_or_else(|_| String::new(), |bus| bus.to_ascii_lowercase()))
}

/// Whether a GPU can be given access to the memory of another.
pub(super) fn can_access_peer(device: sys::CUdevice, peer: sys::CUdevice) -> Outcome<bool> {
    let mut can = 0;
    // SAFETY: a writable integer; the driver checks the devices.
    check(unsafe { (functions().can_access_peer)(&mut can, device, peer) })?;
    Ok(can != 0)
}

/// An attribute of the connection from one GPU to another.
pub(super) fn peer_attribute(
    attribute: sys::CUdevice_P2PAttribute,
    from: sys::CUdevice,
    to: sys::CUdevice,
) -> Outcome<c_int> {
    let mut value = 0;
    // SAFETY: a writable integer; the driver checks the devices.
    check(unsafe { (functions().peer_attribute)(&mut value, attribute, from, to) })?;
    Ok(value)
}

/// Gives the thread's context access to the memory of another context.
///
/// # Safety
/// The other context is retained.
pub(super) unsafe fn enable_peer_access(peer: sys::CUcontext) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().enable_peer_access)(peer, 0) })
}

/// Enqueues a copy from the memory of one GPU to that of another.
///
/// # Safety
/// As for [`copy_to_device`]; each context is retained and is that of its memory.
pub(super) unsafe fn copy_peer(
    (to, to_context): (sys::CUdeviceptr, sys::CUcontext),
    (from, from_context): (sys::CUdeviceptr, sys::CUcontext),
    bytes: usize,
    stream: sys::CUstream,
) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().copy_peer)(to, to_context, from, from_context, bytes, stream) })
}

/// The primary context of a GPU, retained.
pub(super) fn retain_context(device: sys::CUdevice) -> Outcome<sys::CUcontext> {
    let mut context = null_mut();
    // SAFETY: a writable handle; the driver checks the device.
    check(unsafe { (functions().retain_context)(&mut context, device) })?;
    Ok(context)
}

/// Makes a context the calling thread's.
///
/// # Safety
/// The context is retained.
pub(super) unsafe fn set_context(context: sys::CUcontext) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().set_context)(context) })
}

/// Allocates memory on the GPU of the thread's context.
pub(super) fn allocate(bytes: usize) -> Outcome<sys::CUdeviceptr> {
    let mut address = 0;
    // SAFETY: a writable address.
    check(unsafe { (functions().allocate)(&mut address, bytes) })?;
    Ok(address)
}

/// Frees memory of a GPU, after waiting for work that may use it.
///
/// # Safety
/// [`allocate`] returned the address, and nothing uses the memory any more.
pub(super) unsafe fn free(address: sys::CUdeviceptr) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().free)(address) })
}

/// Free and total bytes of the GPU.
pub(super) fn memory_info() -> Outcome<(usize, usize)> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writable integers.
    check(unsafe { (functions().memory_info)(&mut free, &mut total) })?;
    Ok((free, total))
}

/// Allocates pinned memory of the host.
pub(super) fn allocate_host(bytes: usize) -> Outcome<*mut c_void> {
    let mut address = null_mut();
    // SAFETY: a writable address.
    check(unsafe { (functions().allocate_host)(&mut address, bytes, 0) })?;
    Ok(address)
}

/// Frees pinned memory, at once.
///
/// # Safety
/// [`allocate_host`] returned the address, and nothing uses the memory any more, nor does a copy.
pub(super) unsafe fn free_host(address: *mut c_void) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().free_host)(address) })
}

/// Enqueues the filling of memory with zeros.
///
/// # Safety
/// The memory has this many bytes and lives until the work has finished; the stream exists.
pub(super) unsafe fn fill_zero(
    address: sys::CUdeviceptr,
    bytes: usize,
    stream: sys::CUstream,
) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().fill)(address, 0, bytes, stream) })
}

/// Enqueues a copy from the host.
///
/// # Safety
/// Both memories have this many bytes and live until the work has finished; the stream exists.
pub(super) unsafe fn copy_to_device(
    to: sys::CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: sys::CUstream,
) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().copy_to_device)(to, from, bytes, stream) })
}

/// Enqueues a copy to the host.
///
/// # Safety
/// As for [`copy_to_device`]; nobody reads the host's memory before the work has finished.
pub(super) unsafe fn copy_to_host(
    to: *mut c_void,
    from: sys::CUdeviceptr,
    bytes: usize,
    stream: sys::CUstream,
) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().copy_to_host)(to, from, bytes, stream) })
}

/// Enqueues a copy on the GPU.
///
/// # Safety
/// As for [`copy_to_device`].
pub(super) unsafe fn copy(
    to: sys::CUdeviceptr,
    from: sys::CUdeviceptr,
    bytes: usize,
    stream: sys::CUstream,
) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().copy)(to, from, bytes, stream) })
}

/// Streams do not synchronise with the default stream.
const NON_BLOCKING: c_uint = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;

/// A new stream of the thread's context.
pub(super) fn create_stream() -> Outcome<sys::CUstream> {
    let mut stream = null_mut();
    // SAFETY: a writable handle.
    check(unsafe { (functions().create_stream)(&mut stream, NON_BLOCKING) })?;
    Ok(stream)
}

/// A new stream with a priority; lower numbers are higher priorities.
pub(super) fn create_stream_with_priority(priority: c_int) -> Outcome<sys::CUstream> {
    let mut stream = null_mut();
    // SAFETY: a writable handle.
    check(unsafe { (functions().create_priority)(&mut stream, NON_BLOCKING, priority) })?;
    Ok(stream)
}

/// The number of the highest priority.
pub(super) fn highest_priority() -> Outcome<c_int> {
    let (mut least, mut highest) = (0, 0);
    // SAFETY: writable integers.
    check(unsafe { (functions().priorities)(&mut least, &mut highest) })?;
    Ok(highest)
}

/// Destroys a stream; the work on it still finishes.
///
/// # Safety
/// The stream exists and is not used any more.
pub(super) unsafe fn destroy_stream(stream: sys::CUstream) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().destroy_stream)(stream) })
}

/// Success if all work so far has finished.
///
/// # Safety
/// The stream exists.
pub(super) unsafe fn query_stream(stream: sys::CUstream) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().query_stream)(stream) })
}

/// Returns once all work so far has finished.
///
/// # Safety
/// The stream exists.
pub(super) unsafe fn synchronize_stream(stream: sys::CUstream) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().synchronize_stream)(stream) })
}

/// Makes further work of a stream wait for an event.
///
/// # Safety
/// Both exist.
pub(super) unsafe fn wait_event(stream: sys::CUstream, event: sys::CUevent) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().wait_event)(stream, event, 0) })
}

/// A new event without a time.
pub(super) fn create_event() -> Outcome<sys::CUevent> {
    create_event_with(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
}

/// A new event with a time.
pub(super) fn create_timed_event() -> Outcome<sys::CUevent> {
    create_event_with(sys::CUevent_flags::CU_EVENT_DEFAULT)
}

fn create_event_with(flags: sys::CUevent_flags) -> Outcome<sys::CUevent> {
    let mut event = null_mut();
    // SAFETY: a writable handle.
    check(unsafe { (functions().create_event)(&mut event, flags as c_uint) })?;
    Ok(event)
}

/// Destroys an event.
///
/// # Safety
/// The event exists and is not used any more; streams may still wait for it.
pub(super) unsafe fn destroy_event(event: sys::CUevent) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().destroy_event)(event) })
}

/// Success if the stream that recorded the event last has reached it.
///
/// # Safety
/// The event exists.
pub(super) unsafe fn query_event(event: sys::CUevent) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().query_event)(event) })
}

/// Records an event at the end of a stream's work so far.
///
/// # Safety
/// Both exist.
pub(super) unsafe fn record_event(event: sys::CUevent, stream: sys::CUstream) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().record_event)(event, stream) })
}

/// Adds a node to the capture of a stream that records the event at each launch of the graph. The event does not become
/// part of the capture. Outside of a capture this is an error.
///
/// # Safety
/// Both exist, and the event exists at each launch of the graph.
pub(super) unsafe fn capture_event(event: sys::CUevent, stream: sys::CUstream) -> Outcome<()> {
    let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as c_uint;
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().record_event_with_flags)(event, stream, flags) })
}

/// Milliseconds between two events.
///
/// # Safety
/// Both exist.
pub(super) unsafe fn elapsed_time(from: sys::CUevent, to: sys::CUevent) -> Outcome<f32> {
    let mut milliseconds = 0.0;
    // SAFETY: a writable number; the rest as the caller guarantees.
    check(unsafe { (functions().elapsed_time)(&mut milliseconds, from, to) })?;
    Ok(milliseconds)
}

/// Returns once the stream that recorded the event last has reached it.
///
/// # Safety
/// The event exists.
pub(super) unsafe fn synchronize_event(event: sys::CUevent) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().synchronize_event)(event) })
}

/// Loads an image of compiled kernels.
///
/// # Safety
/// The image is complete.
pub(super) unsafe fn load_module(image: *const c_void) -> Outcome<sys::CUmodule> {
    let mut module = null_mut();
    // SAFETY: a writable handle; the rest as the caller guarantees.
    check(unsafe { (functions().load_module)(&mut module, image) })?;
    Ok(module)
}

/// A kernel of a module.
///
/// # Safety
/// The module is loaded.
pub(super) unsafe fn function(module: sys::CUmodule, name: &CStr) -> Outcome<sys::CUfunction> {
    let mut function = null_mut();
    // SAFETY: a writable handle and a string; the rest as the caller guarantees.
    check(unsafe { (functions().function)(&mut function, module, name.as_ptr()) })?;
    Ok(function)
}

/// Sets an attribute of a kernel.
///
/// # Safety
/// The kernel is loaded.
pub(super) unsafe fn set_attribute(
    function: sys::CUfunction,
    attribute: sys::CUfunction_attribute,
    value: c_int,
) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().set_attribute)(function, attribute, value) })
}

/// Launches a kernel with one-dimensional blocks of `threads` threads.
///
/// # Safety
/// The kernel and the stream exist, and there is a pointer for each of its parameters, to a value of its type.
pub(super) unsafe fn launch_kernel(
    function: sys::CUfunction,
    [x, y, z]: [u32; 3],
    threads: u32,
    shared: u32,
    stream: sys::CUstream,
    parameters: &mut [*mut c_void],
) -> Outcome<()> {
    let (launch, parameters) = (functions().launch_kernel, parameters.as_mut_ptr());
    // SAFETY: as the caller guarantees.
    check(unsafe { launch(function, x, y, z, threads, 1, 1, shared, stream, parameters, null_mut()) })
}

/// Begins a capture. Calls of other threads stay allowed: a watchdog may query events meanwhile.
///
/// # Safety
/// The stream exists.
pub(super) unsafe fn begin_capture(stream: sys::CUstream) -> Outcome<()> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().begin_capture)(stream, mode) })
}

/// Ends a capture.
///
/// # Safety
/// The stream exists.
pub(super) unsafe fn end_capture(stream: sys::CUstream) -> Outcome<sys::CUgraph> {
    let mut graph = null_mut();
    // SAFETY: a writable handle; the rest as the caller guarantees.
    check(unsafe { (functions().end_capture)(stream, &mut graph) })?;
    Ok(graph)
}

/// Whether the stream is being captured.
///
/// # Safety
/// The stream exists.
pub(super) unsafe fn is_capturing(stream: sys::CUstream) -> Outcome<bool> {
    let mut status = 0;
    // SAFETY: a writable status; the rest as the caller guarantees.
    check(unsafe { (functions().is_capturing)(stream, &mut status) })?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint)
}

/// Makes a graph executable.
///
/// # Safety
/// The graph exists.
pub(super) unsafe fn instantiate(graph: sys::CUgraph) -> Outcome<sys::CUgraphExec> {
    let mut exec = null_mut();
    // SAFETY: a writable handle; the rest as the caller guarantees.
    check(unsafe { (functions().instantiate)(&mut exec, graph, 0) })?;
    Ok(exec)
}

/// Enqueues a graph.
///
/// # Safety
/// Both exist, and all that the graph uses lives until it has finished.
pub(super) unsafe fn launch_graph(exec: sys::CUgraphExec, stream: sys::CUstream) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().launch_graph)(exec, stream) })
}

/// Destroys an executable graph; a launch that is running still finishes.
///
/// # Safety
/// It exists and is not used any more.
pub(super) unsafe fn destroy_exec(exec: sys::CUgraphExec) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().destroy_exec)(exec) })
}

/// Destroys a graph.
///
/// # Safety
/// It exists and is not used any more.
pub(super) unsafe fn destroy_graph(graph: sys::CUgraph) -> Outcome<()> {
    // SAFETY: as the caller guarantees.
    check(unsafe { (functions().destroy_graph)(graph) })
}
