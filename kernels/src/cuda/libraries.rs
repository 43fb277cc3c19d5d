//! Where NVIDIA's libraries are, and opening them.
//!
//! `cudarc` asks the system's loader for each by name. That finds what packages install; it does not find what `pip`
//! drops inside a Python environment, nor a toolkit outside the loader's path. So the library is opened here first, by
//! its path and for all to see; the loader then knows it by its name. The places and their order are those of
//! [`nvidia_libraries::candidates`].

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{self, RTLD_GLOBAL, RTLD_LAZY, RTLD_NOW};
use nvidia_libraries::{SearchEnv, Source, candidates, site_packages};

use super::error::{Error, Result};

/// A library that is opened at run time.
#[derive(Debug, PartialEq, Eq)]
pub struct LibrarySpec {
    /// What it is for.
    pub purpose: &'static str,
    /// Names of the versions that serve, best first.
    pub names: &'static [&'static str],
    /// The variable that names it outright.
    pub variable: &'static str,
    /// Folders of it in a Python environment.
    pub wheels: &'static [&'static str],
    /// Beginnings of the names of files beside it that are opened first.
    pub before: &'static [&'static str],
    /// How to get it.
    pub install: &'static str,
    /// A function that tells that it is this library.
    symbol: &'static str,
}

/// Compiles kernels for drivers of CUDA 13 and newer.
pub const NVRTC: LibrarySpec = LibrarySpec {
    purpose: "the kernel compiler",
    names: &["libnvrtc.so.13", "libnvrtc.so.12"],
    variable: "MGPU_NVRTC_LIBRARY",
    wheels: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    // The compiler looks for it by its bare name.
    before: &["libnvrtc-builtins.so."],
    install: "train without a GPU (--backend cpu), install it with `pip install nvidia-cuda-nvrtc` or the CUDA toolkit",
    symbol: "nvrtcGetCUBIN",
};

/// Compiles kernels for drivers of CUDA 12, which do not take what a compiler of CUDA 13 makes.
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
    before: &[],
    install: "install it with `pip install nvidia-cublas` (`nvidia-cublas-cu12` for a CUDA 12 driver) or the CUDA toolkit",
    symbol: "cublasLtMatmul",
};

/// Convolutions.
pub const CUDNN: LibrarySpec = LibrarySpec {
    purpose: "convolutions",
    names: &["libcudnn.so.9"],
    variable: "MGPU_CUDNN_LIBRARY",
    wheels: &["nvidia/cudnn/lib"],
    before: &[],
    install: "install it with `pip install nvidia-cudnn-cu13` (`nvidia-cudnn-cu12` for a CUDA 12 driver) or your distribution's libcudnn9 package",
    symbol: "cudnnGetConvolutionForwardAlgorithm_v7",
};

/// The driver's functions that are called, newest last: a driver that lacks one is too old.
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
    "cuCtxSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8_v2",
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

/// The driver's library; every function that is called is in it.
///
/// # Errors
/// If there is none, or one too old.
pub(super) fn open_driver() -> Result<()> {
    // `cudarc` takes the first of these names that the loader knows; what it takes is what is checked.
    let names = cudarc::get_lib_name_candidates("cuda");
    let opened = names.iter().find_map(|name| {
        // SAFETY: opening runs the initialisers of the library that the system's loader has under the driver's name.
        let library = unsafe { unix::Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) };
        Some((name, library.ok()?))
    });
    let Some((name, library)) = opened else {
        return Err(Error::Missing(
            "the NVIDIA driver is not there: no libcuda.so.1; install it (in a container, start with the GPUs: `--gpus all`), or train without a GPU (--backend cpu)".into(),
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

/// Opens `library` so that whoever asks the system's loader for it by name gets the same one, and returns where it was.
/// A second call returns at once.
///
/// # Errors
/// If it is in none of its places; the text is one line with all of them.
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

/// An opened library, for its functions to be asked for.
pub(crate) struct Opened {
    name: &'static str,
    file: PathBuf,
    handle: std::mem::ManuallyDrop<unix::Library>,
}

impl Opened {
    /// Opens `library` as [`open`] does.
    ///
    /// # Errors
    /// If it is in none of its places.
    pub(crate) fn open(library: &'static LibrarySpec) -> Result<Self> {
        let file = open(library)?;
        // It is open already: this is the same one again.
        let again = open_for_all(&file, RTLD_NOW).map_err(Error::Missing)?;
        Ok(Opened { name: library.names[0], file, handle: again })
    }

    /// The function of that name.
    ///
    /// # Errors
    /// If the library has none.
    ///
    /// # Safety
    /// `F` is the type of a pointer to that very function.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &str) -> Result<F> {
        // SAFETY: the type is the caller's promise; the library is never closed.
        unsafe { self.handle.get::<F>(symbol.as_bytes()) }.map(|function| *function).map_err(|_| {
            Error::Missing(format!(
                "{} at {} has no {symbol}: it is another version than this program can use",
                self.name,
                self.file.display()
            ))
        })
    }
}

/// Declares the functions that are used of a library as a struct of pointers with a `load`. `cudarc` has the same
/// declarations; it panics where a function is missing, looks for libraries under names of its own, and makes a Rust
/// enum of every number that comes back, which a newer library's numbers are no values of.
macro_rules! functions {
    ($(#[$doc:meta])* $seen:vis $table:ident { $($name:ident = $symbol:ident($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        $seen struct $table {
            $($seen $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Opens `library`, whose functions they are.
            fn load(library: &'static crate::cuda::libraries::LibrarySpec) -> crate::cuda::Result<Self> {
                let library = crate::cuda::libraries::Opened::open(library)?;
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
                // A folder without the file needs no word; a file that does not open does.
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
        "{} ({}) is not there: looked for it in {}; {remedy}",
        library.names[0],
        library.purpose,
        tried.join(", ")
    );
    Err(Error::Missing(text))
}

/// Opens one file for good, and what has to be there before it.
fn load(library: &LibrarySpec, file: &Path) -> Result<(), String> {
    let beside = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    for entry in beside.into_iter().flat_map(std::fs::read_dir).flatten().flatten() {
        let name = entry.file_name();
        if library.before.iter().any(|beginning| name.to_string_lossy().starts_with(beginning)) {
            // What is truly needed and does not open is told by the library itself.
            let _ = open_for_all(&entry.path(), RTLD_LAZY);
        }
    }
    let opened = open_for_all(file, RTLD_NOW)?;
    if has(&opened, library.symbol) { Ok(()) } else { Err(format!("it has no {}", library.symbol)) }
}

fn open_for_all(file: &Path, when: std::ffi::c_int) -> Result<std::mem::ManuallyDrop<unix::Library>, String> {
    // SAFETY: opening runs the file's initialisers. They are trusted as far as the places of the search order are: an
    // explicit choice of the user, the system's libraries, the user's own toolkit and Python environments.
    let library = unsafe { unix::Library::open(Some(file), when | RTLD_GLOBAL) };
    library.map(std::mem::ManuallyDrop::new).map_err(|error| reason(&error))
}

fn has(library: &unix::Library, symbol: &str) -> bool {
    // SAFETY: the symbol is looked up and never called by this type.
    unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok()
}

/// What the system's loader said.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_nowhere_is_one_line_with_places_and_remedy() {
        static NOWHERE: LibrarySpec = LibrarySpec {
            purpose: "nothing",
            names: &["libof-no-machine.so.2"],
            variable: "MGPU_OF_NO_MACHINE",
            wheels: &["nvidia/none/lib"],
            before: &[],
            install: "do without it",
            symbol: "none",
        };
        let text = open(&NOWHERE).unwrap_err().to_string();
        assert!(
            text.starts_with(
                "libof-no-machine.so.2 (nothing) is not there: looked for it in the system's loader"
            ),
            "{text}"
        );
        assert!(text.ends_with("; do without it, or set MGPU_OF_NO_MACHINE to its path"), "{text}");
        assert!(!text.contains('\n'));
        assert_eq!(open(&NOWHERE).unwrap_err().to_string(), text);
    }

    #[test]
    fn a_file_that_is_another_library_is_refused() {
        let other = LibrarySpec { symbol: "cublasLtMatmul", ..NVRTC };
        let error = load(&other, Path::new("libc.so.6")).unwrap_err();
        assert_eq!(error, "it has no cublasLtMatmul");
    }
}
