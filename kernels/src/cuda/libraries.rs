//! Finds and opens NVIDIA's libraries.
//!
//! `cudarc` asks the system's loader for each library by name. That finds what packages install; it finds neither
//! what `pip` installs inside a Python environment nor a toolkit outside the loader's path. So the library is first
//! opened here, by its path and with `RTLD_GLOBAL`; the loader then resolves its name to it. The search order is that
//! of [`nvidia_libraries::candidates`].

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{self, RTLD_GLOBAL, RTLD_LAZY, RTLD_NOW};
use nvidia_libraries::{SearchEnv, Source, candidates, site_packages};

use super::error::{Error, Result};

/// A library that is opened at run time.
#[derive(Debug, PartialEq, Eq)]
pub struct LibrarySpec {
    /// Its purpose, for error messages.
    pub purpose: &'static str,
    /// File names of the supported versions, best first.
    pub names: &'static [&'static str],
    /// The environment variable that holds its path.
    pub variable: &'static str,
    /// Its directories among the packages of a Python environment.
    pub wheels: &'static [&'static str],
    /// Prefixes of the names of files in its directory that are opened before it.
    pub preload: &'static [&'static str],
    /// How to install it, or to do without it.
    pub install: &'static str,
    /// A function that identifies the library.
    symbol: &'static str,
}

/// Compiles kernels for drivers of CUDA 13 and newer.
pub const NVRTC: LibrarySpec = LibrarySpec {
    purpose: "the kernel compiler",
    names: &["libnvrtc.so.13", "libnvrtc.so.12"],
    variable: "MGPU_NVRTC_LIBRARY",
    wheels: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    // The compiler opens it by its bare name.
    preload: &["libnvrtc-builtins.so."],
    install: "train without a GPU (--backend cpu), install it with `pip install nvidia-cuda-nvrtc` or the CUDA toolkit",
    symbol: "nvrtcGetCUBIN",
};

/// Compiles kernels for drivers of CUDA 12, which do not load the output of a CUDA 13 compiler.
pub const NVRTC_12: LibrarySpec = LibrarySpec {
    names: &["libnvrtc.so.12"],
    install: "train without a GPU (--backend cpu), install it with `pip install nvidia-cuda-nvrtc-cu12` or the CUDA 12 toolkit",
    ..NVRTC
};

/// Matrix products.
pub const CUBLAS_LT: LibrarySpec = LibrarySpec {
    purpose: "matrix products",
    names: &["libcublasLt.so.13", "libcublasLt.so.12"],
    variable: "MGPU_CUBLASLT_LIBRARY",
    wheels: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
    preload: &[],
    install: "install it with `pip install nvidia-cublas` (`nvidia-cublas-cu12` for a CUDA 12 driver) or the CUDA toolkit",
    symbol: "cublasLtMatmul",
};

/// Convolutions.
pub const CUDNN: LibrarySpec = LibrarySpec {
    purpose: "convolutions",
    names: &["libcudnn.so.9"],
    variable: "MGPU_CUDNN_LIBRARY",
    wheels: &["nvidia/cudnn/lib"],
    preload: &[],
    install: "install it with `pip install nvidia-cudnn-cu13` (`nvidia-cudnn-cu12` for a CUDA 12 driver) or your distribution's libcudnn9 package",
    symbol: "cudnnGetConvolutionForwardAlgorithm_v7",
};

/// The driver's functions that are called, newest last. A driver that lacks one is too old.
const DRIVER: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuCtxGetStreamPriorityRange",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuDeviceGetUuid_v2",
    "cuGraphInstantiateWithFlags",
];

/// Opens the driver's library and checks that it has every function that is called.
///
/// # Errors
/// If there is no driver, or it is too old.
pub(super) fn open_driver() -> Result<()> {
    // `cudarc` opens the first of these names that the loader finds, so that is the library to check.
    let names = cudarc::get_lib_name_candidates("cuda");
    let opened = names.iter().find_map(|name| {
        // SAFETY: opening runs the initialisers of the library that the system's loader finds under the driver's
        // name.
        let library = unsafe { unix::Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) };
        Some((name, library.ok()?))
    });
    let Some((name, library)) = opened else {
        return Err(Error::Missing(
            "the NVIDIA driver was not found: no libcuda.so.1; install it (in a container, start with the GPUs: `--gpus all`), or train without a GPU (--backend cpu)".into(),
        ));
    };
    let missing = DRIVER.iter().find(|symbol| !has(&library, symbol));
    // Never closed: the driver starts threads of its own.
    std::mem::forget(library);
    match missing {
        None => Ok(()),
        Some(symbol) => Err(Error::Missing(format!(
            "the NVIDIA driver is too old: {name} has no {symbol}; a driver for CUDA 12.0 (525.60.13) or newer is needed, or train without a GPU (--backend cpu)"
        ))),
    }
}

/// Opens `library` so that the system's loader resolves its name to the same file, and returns that file. A second
/// call returns at once.
///
/// # Errors
/// If it is not found; the text is one line with all places that were searched.
pub fn open(library: &'static LibrarySpec) -> Result<PathBuf> {
    static OPENED: Mutex<Vec<(&LibrarySpec, Result<PathBuf>)>> = Mutex::new(Vec::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, outcome)) = opened.iter().find(|(known, _)| *known == library) {
        return outcome.clone();
    }
    let outcome = search(library);
    opened.push((library, outcome.clone()));
    outcome
}

/// An open library, for looking up functions.
pub(crate) struct OpenLibrary {
    name: &'static str,
    file: PathBuf,
    handle: std::mem::ManuallyDrop<unix::Library>,
}

impl OpenLibrary {
    /// Opens `library` as [`open`] does.
    ///
    /// # Errors
    /// If it is not found.
    pub(crate) fn open(library: &'static LibrarySpec) -> Result<Self> {
        let file = open(library)?;
        // It is open already: this returns a handle to the same library.
        let handle = open_globally(&file, RTLD_NOW).map_err(Error::Missing)?;
        Ok(OpenLibrary { name: library.names[0], file, handle })
    }

    /// The function named `symbol`.
    ///
    /// # Errors
    /// If the library lacks it.
    ///
    /// # Safety
    /// `F` is the type of a pointer to that function.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &str) -> Result<F> {
        // SAFETY: the caller guarantees the type; the library is never closed.
        unsafe { self.handle.get::<F>(symbol.as_bytes()) }.map(|function| *function).map_err(|_| {
            Error::Missing(format!(
                "{} at {} has no {symbol}: this version of the library is not supported",
                self.name,
                self.file.display()
            ))
        })
    }
}

/// Declares the used functions of a library as a struct of pointers with a constructor `load`. `cudarc` has the same
/// declarations, but it panics if a function is missing, looks for libraries under names of its own, and turns every
/// result code into a Rust enum, for which the codes of a newer library would be undefined behaviour.
macro_rules! functions {
    ($(#[$doc:meta])* $seen:vis $table:ident { $($name:ident = $symbol:ident($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        $seen struct $table {
            $($seen $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Opens `library` and looks up the functions.
            fn load(library: &'static crate::cuda::libraries::LibrarySpec) -> crate::cuda::Result<Self> {
                let library = crate::cuda::libraries::OpenLibrary::open(library)?;
                Ok($table {$(
                    // SAFETY: the type is what the library's header declares.
                    $name: unsafe { library.function(stringify!($symbol)) }?,
                )*})
            }
        }
    };
}
pub(crate) use functions;

fn search(library: &LibrarySpec) -> Result<PathBuf> {
    let mut tried = Vec::new();
    for name in library.names {
        let env = SearchEnv::from_process(name, library.variable, library.wheels);
        for place in candidates(&env, &site_packages(&env)) {
            let Ok(file) = place.file else { continue };
            match load(library, &file) {
                Ok(()) => return Ok(file),
                // A directory without the file is listed without a reason; a file that does not open is listed with
                // one.
                Err(reason) if file.is_file() => tried.push(format!("{} ({reason})", file.display())),
                Err(_) => tried.push(match place.source {
                    Source::Explicit => format!("{} ({})", library.variable, file.display()),
                    Source::SystemLoader => format!("the system's loader ({name})"),
                    _ => file.display().to_string(),
                }),
            }
        }
    }
    tried.dedup();
    let remedy = match std::env::var_os(library.variable) {
        Some(_) => format!("correct {}, or unset it to search the usual places", library.variable),
        None => format!("{}, or set {} to its path", library.install, library.variable),
    };
    let text = format!(
        "{} ({}) was not found; searched: {}; {remedy}",
        library.names[0],
        library.purpose,
        tried.join(", ")
    );
    Err(Error::Missing(text))
}

/// Opens one file, never to be closed, and before it the files that it needs.
fn load(library: &LibrarySpec, file: &Path) -> Result<(), String> {
    let beside = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    for entry in beside.into_iter().flat_map(std::fs::read_dir).flatten().flatten() {
        let name = entry.file_name();
        if library.preload.iter().any(|beginning| name.to_string_lossy().starts_with(beginning)) {
            // If a file that is really needed does not open, the library's own error says so.
            let _ = open_globally(&entry.path(), RTLD_LAZY);
        }
    }
    let opened = open_globally(file, RTLD_NOW)?;
    if has(&opened, library.symbol) { Ok(()) } else { Err(format!("it has no {}", library.symbol)) }
}

fn open_globally(
    file: &Path,
    when: std::ffi::c_int,
) -> Result<std::mem::ManuallyDrop<unix::Library>, String> {
    // SAFETY: opening runs the file's initialisers. They are trusted as far as the places of the search order are: an
    // explicit choice of the user, the system's libraries, the user's own toolkit and Python environments.
    let library = unsafe { unix::Library::open(Some(file), when | RTLD_GLOBAL) };
    library.map(std::mem::ManuallyDrop::new).map_err(|error| reason(&error))
}

fn has(library: &unix::Library, symbol: &str) -> bool {
    // SAFETY: the symbol is only looked up, never called with this type.
    unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok()
}

/// The system loader's message.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_one_line_with_places_and_remedy() {
        static NOWHERE: LibrarySpec = LibrarySpec {
            purpose: "nothing",
            names: &["libof-no-machine.so.2"],
            variable: "MGPU_OF_NO_MACHINE",
            wheels: &["nvidia/none/lib"],
            preload: &[],
            install: "do without it",
            symbol: "none",
        };
        let text = open(&NOWHERE).unwrap_err().to_string();
        assert!(
            text.starts_with("libof-no-machine.so.2 (nothing) was not found; searched: the system's loader"),
            "{text}"
        );
        assert!(text.ends_with("; do without it, or set MGPU_OF_NO_MACHINE to its path"), "{text}");
        assert!(!text.contains('\n'));
        assert_eq!(open(&NOWHERE).unwrap_err().to_string(), text);
    }

    #[test]
    fn a_file_that_is_another_library_is_rejected() {
        let other = LibrarySpec { symbol: "cublasLtMatmul", ..NVRTC };
        let error = load(&other, Path::new("libc.so.6")).unwrap_err();
        assert_eq!(error, "it has no cublasLtMatmul");
    }
}
