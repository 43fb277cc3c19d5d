//! NVML, NVIDIA's management library, loaded at run time: which GPUs there are, and which processes compute on them.
//!
//! NVML comes with the driver and creates no CUDA context, so asking it takes no memory of a GPU. Its functions keep
//! their signature within a version suffix; the types below are those of `nvml.h`.

use std::error::Error as _;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};
use nvidia_libraries::{SearchEnv, candidates};

/// The name under which the driver installs the library.
pub const LIBRARY_NAME: &str = "libnvidia-ml.so.1";

/// The environment variable that holds the path of the library.
pub const LIBRARY_VARIABLE: &str = "MGPU_NVML_LIBRARY";

const SUCCESS: c_int = 0;
/// A buffer is too small.
const INSUFFICIENT_SIZE: c_int = 7;
/// Size of a buffer for a UUID: `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
const UUID_SIZE: usize = 96;

/// `nvmlDevice_t`.
type Device = *mut c_void;

/// `nvmlProcessInfo_t` of the versions 2 and 3 of the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used_memory: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MemoryInfo {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `NVML_TEMPERATURE_GPU`.
const TEMPERATURE_GPU: c_uint = 0;
/// Size of a buffer for a name: `NVML_DEVICE_NAME_V2_BUFFER_SIZE`.
const NAME_SIZE: usize = 96;

type GetUtilization = unsafe extern "C" fn(Device, *mut Utilization) -> c_int;
type GetMemory = unsafe extern "C" fn(Device, *mut MemoryInfo) -> c_int;
type GetTemperature = unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int;

/// What a GPU is doing. A value that the GPU does not tell is `None`: a MIG instance has no utilisation of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuReading {
    /// The name of the model; empty if it is not told.
    pub name: String,
    /// Per cent of the last time, up to a second, in which kernels ran.
    pub utilization_percent: Option<u32>,
    /// Bytes of memory in use, and all.
    pub memory: Option<(u64, u64)>,
    /// Degrees Celsius.
    pub temperature_c: Option<u32>,
}

type Init = unsafe extern "C" fn() -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetCount = unsafe extern "C" fn(*mut c_uint) -> c_int;
type GetByIndex = unsafe extern "C" fn(c_uint, *mut Device) -> c_int;
type GetByUuid = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
type GetText = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int;
type GetProcesses = unsafe extern "C" fn(Device, *mut c_uint, *mut ProcessInfo) -> c_int;

/// Why NVML gives no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// The library cannot be opened.
    #[error("cannot open NVML, which comes with the NVIDIA driver: {}", .0.join("; "))]
    NotFound(Vec<String>),
    /// A function is missing.
    #[error("{} lacks the function {function}: the NVIDIA driver is too old", library.display())]
    MissingFunction {
        /// Its name.
        function: &'static str,
        /// The file.
        library: PathBuf,
    },
    /// A function has failed.
    #[error("{function} failed: {message}")]
    Failed {
        /// Its name.
        function: &'static str,
        /// NVML's text.
        message: String,
    },
}

/// NVML, initialised; shut down on drop. The library itself is never closed.
pub struct Nvml {
    library: &'static Library,
    file: PathBuf,
}

impl Nvml {
    /// Opens and initialises the library: the one named by [`LIBRARY_VARIABLE`], otherwise that of the system loader.
    ///
    /// # Errors
    /// If it is missing, or finds no driver.
    pub fn open() -> Result<Self, NvmlError> {
        let mut reasons = Vec::new();
        for place in candidates(&SearchEnv::from_process(LIBRARY_NAME, LIBRARY_VARIABLE, &[]), &[]) {
            let Ok(file) = place.file else { continue };
            match load(&file) {
                Ok(library) => {
                    let nvml = ManuallyDrop::new(Nvml { library: Box::leak(Box::new(library)), file });
                    let init: Symbol<Init> = nvml.function("nvmlInit_v2")?;
                    // SAFETY: it takes no arguments, and counts how often it is called.
                    nvml.check("nvmlInit_v2", unsafe { init() })?;
                    return Ok(ManuallyDrop::into_inner(nvml));
                }
                Err(reason) => reasons.push(format!("{}: {reason}", file.display())),
            }
        }
        Err(NvmlError::NotFound(reasons))
    }

    /// The UUIDs of the GPUs that this process may use, in the order of their PCI addresses.
    ///
    /// # Errors
    /// If NVML fails.
    pub fn uuids(&self) -> Result<Vec<String>, NvmlError> {
        let get: Symbol<GetCount> = self.function("nvmlDeviceGetCount_v2")?;
        let by_index: Symbol<GetByIndex> = self.function("nvmlDeviceGetHandleByIndex_v2")?;
        let mut count = 0;
        // SAFETY: the pointer is valid during the call.
        self.check("nvmlDeviceGetCount_v2", unsafe { get(&mut count) })?;
        let mut uuids = Vec::new();
        for index in 0..count {
            let mut device = std::ptr::null_mut();
            // SAFETY: the pointer is valid during the call. A device without permission has no handle.
            if unsafe { by_index(index, &mut device) } == SUCCESS {
                uuids.push(self.uuid(device)?);
            }
        }
        Ok(uuids)
    }

    fn uuid(&self, device: Device) -> Result<String, NvmlError> {
        self.text::<UUID_SIZE>("nvmlDeviceGetUUID", device)
    }

    /// What a function writes into a buffer of this size.
    fn text<const SIZE: usize>(&self, name: &'static str, device: Device) -> Result<String, NvmlError> {
        let get: Symbol<GetText> = self.function(name)?;
        let mut text = [0u8; SIZE];
        // SAFETY: the buffer has the given size, and the handle is one of this library.
        self.check(name, unsafe { get(device, text.as_mut_ptr().cast(), SIZE as c_uint) })?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// What the GPU or MIG instance with this UUID is doing.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn read(&self, uuid: &str) -> Result<GpuReading, NvmlError> {
        let device = self.device(uuid)?;
        let utilization = self.function::<GetUtilization>("nvmlDeviceGetUtilizationRates").ok();
        let utilization_percent = utilization.and_then(|get| {
            let mut rates = Utilization::default();
            // SAFETY: the handle is one of this library, and the pointer is valid during the call.
            (unsafe { get(device, &mut rates) } == SUCCESS).then_some(rates.gpu)
        });
        let memory = self.function::<GetMemory>("nvmlDeviceGetMemoryInfo").ok().and_then(|get| {
            let mut memory = MemoryInfo::default();
            // SAFETY: as above.
            (unsafe { get(device, &mut memory) } == SUCCESS).then_some((memory.used, memory.total))
        });
        let temperature = self.function::<GetTemperature>("nvmlDeviceGetTemperature").ok();
        let temperature_c = temperature.and_then(|get| {
            let mut degrees = 0;
            // SAFETY: as above.
            (unsafe { get(device, TEMPERATURE_GPU, &mut degrees) } == SUCCESS).then_some(degrees)
        });
        let name = self.text::<NAME_SIZE>("nvmlDeviceGetName", device).unwrap_or_default();
        Ok(GpuReading { name, utilization_percent, memory, temperature_c })
    }

    /// The handle of a device.
    fn device(&self, uuid: &str) -> Result<Device, NvmlError> {
        const BY_UUID: &str = "nvmlDeviceGetHandleByUUID";
        let by_uuid: Symbol<GetByUuid> = self.function(BY_UUID)?;
        let uuid = CString::new(uuid)
            .map_err(|error| NvmlError::Failed { function: BY_UUID, message: error.to_string() })?;
        let mut device = std::ptr::null_mut();
        // SAFETY: both pointers are valid during the call, and the text ends with a zero.
        self.check(BY_UUID, unsafe { by_uuid(uuid.as_ptr(), &mut device) })?;
        Ok(device)
    }

    /// The processes that compute on the GPU or MIG instance with this UUID, by their ids in the namespace of the driver.
    ///
    /// # Errors
    /// If there is no such device, or NVML fails.
    pub fn processes(&self, uuid: &str) -> Result<Vec<u32>, NvmlError> {
        let device = self.device(uuid)?;
        let (name, get) = self.processes_function()?;
        let mut infos: Vec<ProcessInfo> = Vec::new();
        loop {
            let mut count = infos.len() as c_uint;
            // SAFETY: the handle is one of this library, and the array has room for `count` entries.
            let code = unsafe { get(device, &mut count, infos.as_mut_ptr()) };
            if code == INSUFFICIENT_SIZE && count as usize > infos.len() {
                // Others may start meanwhile.
                infos.resize(count as usize + 8, ProcessInfo::default());
                continue;
            }
            self.check(name, code)?;
            infos.truncate(count as usize);
            return Ok(infos.iter().map(|info| info.pid).collect());
        }
    }

    /// Versions 2 and 3 of the call differ in what they count for MIG, not in their types.
    fn processes_function(&self) -> Result<(&'static str, Symbol<GetProcesses>), NvmlError> {
        const NEW: &str = "nvmlDeviceGetComputeRunningProcesses_v3";
        const OLD: &str = "nvmlDeviceGetComputeRunningProcesses_v2";
        let new = self.function(NEW).map(|function| (NEW, function));
        new.or_else(|error| self.function(OLD).map(|function| (OLD, function)).map_err(|_| error))
    }

    /// The function of this name; `F` is its type in `nvml.h`.
    fn function<F>(&self, name: &'static str) -> Result<Symbol<F>, NvmlError> {
        // SAFETY: every caller gives the type that nvml.h declares for the name.
        unsafe { self.library.get(name.as_bytes()) }
            .map_err(|_| NvmlError::MissingFunction { function: name, library: self.file.clone() })
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<(), NvmlError> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = self.function::<ErrorString>("nvmlErrorString").map(|get| {
            // SAFETY: it accepts any code and returns a constant text.
            let text = unsafe { get(code) };
            if text.is_null() {
                return String::new();
            }
            // SAFETY: the text is not null and ends with a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        });
        let message = text.ok().filter(|text| !text.is_empty());
        Err(NvmlError::Failed { function, message: message.unwrap_or_else(|| format!("code {code}")) })
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        if let Ok(shutdown) = self.function::<Init>("nvmlShutdown") {
            // SAFETY: it takes no arguments, and `open` has initialised the library.
            unsafe { shutdown() };
        }
    }
}

fn load(file: &Path) -> Result<Library, String> {
    // SAFETY: opening runs the file's initialisers. The file is the user's explicit choice or the system's library.
    unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_header() {
        assert_eq!((size_of::<ProcessInfo>(), align_of::<ProcessInfo>()), (24, 8));
        assert_eq!((size_of::<MemoryInfo>(), size_of::<Utilization>()), (24, 8));
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_it() {
        match Nvml::open() {
            Ok(nvml) => assert!(nvml.uuids().is_ok()),
            Err(error) => assert!(error.to_string().to_lowercase().contains("nvml"), "{error}"),
        }
    }
}
