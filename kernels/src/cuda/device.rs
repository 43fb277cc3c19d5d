//! One GPU: its context, its properties, and the kernels loaded on it.

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::captures::{Allocation, Captures};
use super::compile::{self, Source};
use super::driver;
use super::error::{Context, Error, Result};
use super::launches::{Launch, Launches};

/// Dynamic shared memory in bytes that a block gets without a request for more.
const SHARED_BY_DEFAULT: u32 = 48 << 10;

/// A GPU with its primary context, which the whole process shares. Opened once and never closed, so that the handles
/// that libraries, threads and graphs have of it stay valid.
pub struct Device {
    ordinal: u32,
    context: sys::CUcontext,
    name: String,
    uuid: String,
    architecture: (u32, u32),
    multiprocessors: u32,
    driver: (u32, u32),
    used: AtomicU64,
    peak: AtomicU64,
    /// Work on it will never finish, so nothing may wait for it any more.
    abandoned: AtomicBool,
    /// The kernels that have been requested, by source and name.
    functions: Mutex<HashMap<&'static str, HashMap<String, Function>>>,
    captures: Mutex<Captures>,
    launches: Launches,
    /// Fills new memory. Nothing else is enqueued on it, and it is never captured, so waiting for it is always legal.
    set_up: sys::CUstream,
    /// A copy from or to pinned memory was captured.
    pinned_captured: AtomicBool,
}

// SAFETY: the handles are the driver's, which may be called from all threads; everything that changes is atomic or
// locked.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A kernel on the GPU it was loaded on.
#[derive(Clone)]
pub struct Function {
    raw: sys::CUfunction,
    context: sys::CUcontext,
    name: Arc<str>,
    /// Dynamic shared memory that the driver currently allows.
    shared: Arc<AtomicU32>,
}

// SAFETY: a handle that may be used from all threads, of a module that is never unloaded.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Name of the kernel.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    pub(super) fn belongs_to(&self, device: &Device) -> bool {
        self.context == device.context
    }

    /// Allows `bytes` of dynamic shared memory for each block.
    pub(super) fn allow_shared(&self, bytes: u32) -> Result<()> {
        if bytes <= self.shared.load(Ordering::Relaxed) {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { driver::set_attribute(self.raw, attribute, bytes as i32) }.context("cuFuncSetAttribute")?;
        self.shared.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Function").field(&self.name).finish()
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.ordinal).field("name", &self.name).finish()
    }
}

impl Device {
    /// Records launches from now on, on all streams.
    pub fn record_launches(&self) {
        self.launches.start();
    }

    /// Ends the record of launches, and returns it.
    pub fn recorded_launches(&self) -> Vec<Launch> {
        self.launches.take()
    }

    /// Adds a launch to the record, if there is one.
    pub(super) fn note_launch(&self, kernel: &str, bytes: impl FnOnce() -> u64) {
        self.launches.add(kernel, bytes);
    }

    /// Number of GPUs that CUDA sees.
    ///
    /// # Errors
    /// If there is no driver, if it is too old, or if it returns an error.
    pub fn count() -> Result<u32> {
        driver::open()?;
        let count = driver::device_count().context("cuDeviceGetCount")?;
        Ok(count.max(0) as u32)
    }

    /// Opens GPU `ordinal` and binds it to the calling thread.
    ///
    /// # Errors
    /// If there is no such GPU, or the driver refuses.
    pub fn open(ordinal: u32) -> Result<Arc<Device>> {
        static OPEN: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = open.iter().find(|device| device.ordinal == ordinal).map(Arc::clone);
        let device = known.map_or_else(|| Self::first(ordinal).map(Arc::new), Ok)?;
        if !open.iter().any(|known| Arc::ptr_eq(known, &device)) {
            open.push(Arc::clone(&device));
        }
        device.bind()?;
        Ok(device)
    }

    fn first(ordinal: u32) -> Result<Device> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let handle = driver::device(ordinal as i32).context("cuDeviceGet")?;
        let attribute = |attribute| {
            let value = driver::device_attribute(handle, attribute);
            value.map(|value| value.max(0) as u32).context("cuDeviceGetAttribute")
        };
        use sys::CUdevice_attribute as Attribute;
        let architecture = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1);
        let name = driver::device_name(handle).context("cuDeviceGetName")?;
        let uuid = format_uuid(driver::device_uuid(handle).context("cuDeviceGetUuid")?);
        // Released with the process.
        let context = driver::retain_context(handle).context("cuDevicePrimaryCtxRetain")?;
        // SAFETY: the context was just retained.
        unsafe { driver::set_context(context) }.context("cuCtxSetCurrent")?;
        let set_up = driver::create_stream().context("cuStreamCreate")?;
        Ok(Device {
            ordinal,
            context,
            name,
            uuid,
            architecture,
            multiprocessors,
            driver: driver::open()?,
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
            functions: Mutex::default(),
            captures: Mutex::default(),
            launches: Launches::default(),
            set_up,
            pinned_captured: AtomicBool::new(false),
        })
    }

    /// Makes this GPU the current one of the calling thread. Every thread has to call this once before it uses the
    /// GPU.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained and never released.
        unsafe { driver::set_context(self.context) }.context("cuCtxSetCurrent")
    }

    /// The context, retained until the end of the process.
    pub(super) fn context(&self) -> sys::CUcontext {
        self.context
    }

    /// Ordinal of the GPU among those that CUDA sees.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The product name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The UUID, `GPU-` and hexadecimal digits: the same in every process.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Compute capability, major and minor.
    pub fn architecture(&self) -> (u32, u32) {
        self.architecture
    }

    /// Number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Version of CUDA that the driver supports, major and minor.
    pub fn driver(&self) -> (u32, u32) {
        self.driver
    }

    /// Bytes that this process has allocated through [`Memory`](super::Memory).
    pub fn memory_used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Maximum of [`memory_used`](Self::memory_used) since the start or the last
    /// [`reset_memory_peak`](Self::reset_memory_peak).
    pub fn memory_peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Free and total bytes of the GPU.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn free_and_total(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (free, total) = driver::memory_info().context("cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    /// Marks the GPU as lost: work on it never finishes, for example after a collective that could not be aborted.
    /// From now on its memory is not freed before the end of the process, since freeing it would wait for that work.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// True after [`abandon`](Self::abandon).
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    fn captures(&self) -> MutexGuard<'_, Captures> {
        self.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an allocation of `bytes` on the GPU and returns when it was made.
    pub(super) fn allocated(&self, bytes: u64) -> u64 {
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(used, Ordering::Relaxed);
        self.captures().allocated()
    }

    /// Frees an allocation made at `allocated_at`, or defers that to the end of the last graph if a graph may use it.
    pub(super) fn release(&self, allocation: Allocation, allocated_at: u64) {
        if self.is_abandoned() {
            return;
        }
        let freeable = self.captures().release(allocation, allocated_at);
        freeable.into_iter().for_each(|allocation| self.free(allocation));
    }

    /// The stream that new memory is filled on.
    pub(super) fn set_up_stream(&self) -> sys::CUstream {
        self.set_up
    }

    /// Notes that a graph which is being captured uses pinned memory.
    pub(super) fn pinned_captured(&self) {
        self.pinned_captured.store(true, Ordering::Relaxed);
    }

    /// True if any graph uses pinned memory.
    pub(super) fn is_pinned_captured(&self) -> bool {
        self.pinned_captured.load(Ordering::Relaxed)
    }

    pub(super) fn graph_captured(&self) {
        self.captures().graph_captured();
    }

    pub(super) fn graph_destroyed(&self) {
        let freeable = self.captures().graph_destroyed();
        freeable.into_iter().for_each(|allocation| self.free(allocation));
    }

    fn free(&self, allocation: Allocation) {
        let _ = self.bind();
        match allocation {
            Allocation::Device { address, bytes, deallocator } => {
                match deallocator {
                    // SAFETY: allocated by `Memory`, whose owner is dropped; the call waits for work that may still use
                    // it, and no graph can.
                    None => drop(unsafe { driver::free(address) }),
                    // SAFETY: as above, but that work has ended: `Memory::zeroed_at` demands it.
                    Some(deallocator) => unsafe { deallocator.free(address) },
                }
                self.used.fetch_sub(bytes, Ordering::Relaxed);
            }
            Allocation::Host(address) => {
                // SAFETY: allocated by `Pinned`, whose owner is dropped and has waited for its copies; so has every
                // graph that used it for its launches.
                let _ = unsafe { driver::free_host(address as *mut _) };
            }
            Allocation::Event(event) => {
                // SAFETY: created by `TimedEvent`, whose owner is dropped; no graph can record it any more.
                let _ = unsafe { driver::destroy_event(event as *mut _) };
            }
        }
    }

    /// Sets the peak to what is allocated now: autotuning during set-up allocates memory that training does not need.
    pub fn reset_memory_peak(&self) {
        self.peak.store(self.memory_used(), Ordering::Relaxed);
    }

    /// Names of all kernels requested so far, sorted.
    pub fn kernels(&self) -> Vec<String> {
        let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<String> = functions.values().flat_map(HashMap::keys).cloned().collect();
        names.sort();
        names
    }

    /// Loads a kernel, from the cache or by compiling it. An image is cached after it has been loaded successfully.
    fn load(&self, source: &'static Source, kernel: &str) -> Result<sys::CUmodule> {
        // SAFETY: a complete image of the compiler (the digest of a file's content was verified).
        let load = |image: &[u8]| unsafe { driver::load_module(image.as_ptr().cast()) };
        let image = compile::Image::new(source, kernel, self.architecture, self.driver);
        if let Some(module) = image.cached().and_then(|cached| load(&cached).ok()) {
            return Ok(module);
        }
        let compiled = image.compile()?;
        let module = load(&compiled).context("cuModuleLoadData")?;
        image.store(&compiled);
        Ok(module)
    }

    /// Kernel `name` of `source`. The first call compiles and loads it, so it must not be made during a capture.
    ///
    /// # Errors
    /// If there is neither a compiler nor a cached image, or if the kernel does not compile or does not exist.
    pub fn function(&self, source: &'static Source, name: &str) -> Result<Function> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let of_source = functions.entry(source.name).or_default();
        if let Some(function) = of_source.get(name) {
            return Ok(function.clone());
        }
        self.bind()?;
        let module = self.load(source, name)?;
        let symbol = CString::new(name).expect("names of kernels have no zero bytes");
        // SAFETY: the module is loaded, and never unloaded.
        let raw = unsafe { driver::function(module, &symbol) }.context("cuModuleGetFunction")?;
        let shared = Arc::new(AtomicU32::new(SHARED_BY_DEFAULT));
        let function = Function { raw, context: self.context, name: name.into(), shared };
        of_source.insert(name.to_owned(), function.clone());
        Ok(function)
    }
}

/// The format of `nvidia-smi`.
fn format_uuid(bytes: [std::ffi::c_char; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_formatted_as_by_nvidia_smi() {
        let bytes = std::array::from_fn(|i| (i * 17) as std::ffi::c_char);
        assert_eq!(format_uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
