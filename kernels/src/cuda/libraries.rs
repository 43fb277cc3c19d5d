//! Finds and opens NVIDIA's libraries.
//!
//! The system's loader finds what packages install; it finds neither what `pip` installs inside a Python environment
//! nor a toolkit outside the loader's path. So a library is opened by its path and with `RTLD_GLOBAL`; the loader then
//! resolves its name to it when another library asks for it. The search order is that of
//! [`nvidia_libraries::candidates`].
//!
//! A library of CUDA 13 needs a driver of CUDA 13, and one of CUDA 12 runs on both. With a driver of CUDA 12, names
//! and files of CUDA 13 are passed over, and if there is no other, the error says so.

use std::ffi::{c_int, c_uint};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{self, RTLD_GLOBAL, RTLD_LAZY, RTLD_LOCAL, RTLD_NOW};
use nvidia_libraries::{SearchEnv, Source, candidates, site_packages};

use super::driver;
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
    /// A function that returns the version of CUDA that the library was built with, 12080 for 12.8.
    built_with: Option<&'static str>,
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
    // Without a GPU, kernels are compiled for any driver. The compiler's own version is compared with the driver's.
    built_with: None,
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
    built_with: Some("cublasLtGetCudartVersion"),
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
    built_with: Some("cudnnGetCudartVersion"),
};

/// Opens the driver's library.
///
/// # Errors
/// If there is no driver.
pub(super) fn open_driver() -> Result<OpenLibrary> {
    let mut stub = None;
    // The unversioned name is for linking. A toolkit has a stub under it.
    for name in ["libcuda.so.1", "libcuda.so"] {
        let file = Path::new(name);
        let Ok(tried) = open_file(file, RTLD_NOW | RTLD_LOCAL) else { continue };
        if is_stub(&tried) {
            stub.get_or_insert(name);
            continue;
        }
        // It is open already: this makes its functions visible to the libraries that are opened later. Never closed,
        // because the driver starts threads of its own.
        let handle = open_globally(file, RTLD_NOW).map_err(Error::Missing)?;
        let too_old = |library: &OpenLibrary, symbol: &str| {
            format!(
                "the NVIDIA driver is too old: {} has no {symbol}; a driver for CUDA 12.0 (525.60.13) or newer is needed, or train without a GPU (--backend cpu)",
                library.name
            )
        };
        return Ok(OpenLibrary { name, file: file.to_owned(), handle, unsupported: too_old });
    }
    let found = match stub {
        Some(name) => format!(
            "{name} is the stub of a CUDA toolkit, which serves linking only: remove its folder from LD_LIBRARY_PATH, and"
        ),
        None => "no libcuda.so.1;".to_owned(),
    };
    Err(Error::Missing(format!(
        "the NVIDIA driver was not found: {found} install it (in a container, start with the GPUs: `--gpus all`), or train without a GPU (--backend cpu)"
    )))
}

/// True if this `libcuda` is the stub of a toolkit, all of whose functions return an error.
fn is_stub(library: &unix::Library) -> bool {
    const STUB_LIBRARY: c_uint = 34;
    // SAFETY: the type of `cuInit`.
    let Ok(init) = (unsafe { library.get::<unsafe extern "C" fn(c_uint) -> c_uint>(b"cuInit") }) else {
        return false;
    };
    // SAFETY: the function accepts every number and may be called repeatedly.
    unsafe { init(0) == STUB_LIBRARY }
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
    /// The error if it lacks the function of this name.
    unsupported: fn(&Self, &str) -> String,
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
        let unsupported = |library: &Self, symbol: &str| {
            let (name, file) = (library.name, library.file.display());
            format!("{name} at {file} has no {symbol}: this version of the library is not supported")
        };
        Ok(OpenLibrary { name: library.names[0], file, handle, unsupported })
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
        unsafe { self.handle.get::<F>(symbol.as_bytes()) }
            .map(|function| *function)
            .map_err(|_| Error::Missing((self.unsupported)(self, symbol)))
    }
}

/// Declares the used functions of a library as a struct of pointers with a constructor. `cudarc` has the same
/// declarations, but it panics if a function is missing, looks for libraries under names of its own, and turns every
/// result code into a Rust enum, for which the codes of a newer library would be undefined behaviour.
macro_rules! functions {
    ($(#[$doc:meta])* $seen:vis $table:ident { $($name:ident = $symbol:ident($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        $seen struct $table {
            $($seen $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Looks up the functions.
            fn from_library(library: &crate::cuda::libraries::OpenLibrary) -> crate::cuda::Result<Self> {
                Ok($table {$(
                    // SAFETY: the type is what the library's header declares.
                    $name: unsafe { library.function(stringify!($symbol)) }?,
                )*})
            }
        }
    };
}
pub(crate) use functions;

/// The names to search for a driver of CUDA version `driver`.
fn names_for(library: &LibrarySpec, driver: Option<(u32, u32)>) -> Vec<&'static str> {
    let built_with =
        |name: &str| name.rsplit_once(".so.").and_then(|(_, version)| version.parse::<u32>().ok());
    // Only names of libraries with several versions end in a version of CUDA.
    let serves = |name: &&&'static str| match (driver, built_with(name)) {
        (Some((major, _)), Some(version)) if library.names.len() > 1 => version <= major,
        _ => true,
    };
    library.names.iter().filter(serves).copied().collect()
}

/// Why a library built with version `built_with` of CUDA (12080 for 12.8) cannot be used with a driver, if so.
fn too_new(built_with: usize, driver: Option<(u32, u32)>) -> Option<String> {
    let (major, minor) = driver?;
    let needed = built_with / 1000;
    (needed > major as usize)
        .then(|| format!("it needs a driver of CUDA {needed}, but this driver is of CUDA {major}.{minor}"))
}

fn search(library: &LibrarySpec) -> Result<PathBuf> {
    // A compiler may be needed without a driver.
    let driver = library.built_with.and_then(|_| driver::version());
    search_for(library, driver)
}

fn search_for(library: &LibrarySpec, driver: Option<(u32, u32)>) -> Result<PathBuf> {
    let mut tried = Vec::new();
    let mut unusable = false;
    // The other names are searched last, only to say that what is there cannot be used.
    let mut names = names_for(library, driver);
    names.extend(library.names.iter().filter(|name| !names.contains(name)).copied().collect::<Vec<_>>());
    for name in names {
        let env = SearchEnv::from_process(name, library.variable, library.wheels);
        for place in candidates(&env, &site_packages(&env)) {
            let Ok(file) = place.file else { continue };
            match load(library, &file, driver) {
                Ok(()) => return Ok(file),
                Err(Unusable::TooNew(reason)) => {
                    unusable = true;
                    tried.push(format!("{} ({reason})", file.display()));
                }
                // A directory without the file is listed without a reason; a file that does not open is listed with
                // one.
                Err(Unusable::Broken(reason)) if file.is_file() => {
                    tried.push(format!("{} ({reason})", file.display()));
                }
                Err(Unusable::Broken(_)) => tried.push(match place.source {
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
    let outcome = if unusable { "cannot be used" } else { "was not found" };
    let text = format!(
        "{} ({}) {outcome}; searched: {}; {remedy}",
        library.names[0],
        library.purpose,
        tried.join(", ")
    );
    Err(Error::Missing(text))
}

/// Why a file is not used.
#[derive(Debug, PartialEq, Eq)]
enum Unusable {
    /// It does not exist, does not open, or is another library.
    Broken(String),
    /// It is the library, but for a newer driver.
    TooNew(String),
}

/// Opens one file, never to be closed if it can be used, and before it the files that it needs.
fn load(library: &LibrarySpec, file: &Path, driver: Option<(u32, u32)>) -> Result<(), Unusable> {
    let beside = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    for entry in beside.into_iter().flat_map(std::fs::read_dir).flatten().flatten() {
        let name = entry.file_name();
        if library.preload.iter().any(|beginning| name.to_string_lossy().starts_with(beginning)) {
            // If a file that is really needed does not open, the library's own error says so.
            let _ = open_globally(&entry.path(), RTLD_LAZY);
        }
    }
    // A file that turns out to be unusable is closed again, so that no other library finds it under its name.
    let opened = open_file(file, RTLD_NOW | RTLD_LOCAL).map_err(Unusable::Broken)?;
    if !has(&opened, library.symbol) {
        return Err(Unusable::Broken(format!("it has no {}", library.symbol)));
    }
    let built_with = library.built_with.and_then(|name| version_of(&opened, name));
    if let Some(reason) = built_with.and_then(|built_with| too_new(built_with, driver)) {
        return Err(Unusable::TooNew(reason));
    }
    open_globally(file, RTLD_NOW).map(|_| ()).map_err(Unusable::Broken)
}

/// The result of the function `name`, which returns a version; `None` if the library has no such function.
fn version_of(library: &unix::Library, name: &str) -> Option<usize> {
    // SAFETY: the libraries' functions for this purpose all have this type.
    let version = unsafe { library.get::<unsafe extern "C" fn() -> usize>(name.as_bytes()) }.ok()?;
    // SAFETY: it has no arguments and needs no GPU.
    Some(unsafe { version() })
}

/// Opens a file for as long as the result lives.
fn open_file(file: &Path, flags: c_int) -> Result<unix::Library, String> {
    // SAFETY: opening runs the file's initialisers. They are trusted as far as the places of the search order are: an
    // explicit choice of the user, the system's libraries, the user's own toolkit and Python environments.
    unsafe { unix::Library::open(Some(file), flags) }.map_err(|error| reason(&error))
}

/// Opens a file, never to be closed, so that the loader finds its functions for other libraries.
fn open_globally(file: &Path, when: c_int) -> Result<std::mem::ManuallyDrop<unix::Library>, String> {
    open_file(file, when | RTLD_GLOBAL).map(std::mem::ManuallyDrop::new)
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
            built_with: None,
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
        let error = load(&other, Path::new("libc.so.6"), None).unwrap_err();
        assert_eq!(error, Unusable::Broken("it has no cublasLtMatmul".into()));
    }

    #[test]
    fn the_driver_decides_which_versions_are_searched() {
        let both = ["libcublasLt.so.13", "libcublasLt.so.12"];
        for driver in [None, Some((13, 0)), Some((14, 1))] {
            assert_eq!(names_for(&CUBLAS_LT, driver), both);
        }
        assert_eq!(names_for(&CUBLAS_LT, Some((12, 9))), both[1..]);
        // The version of cuDNN is its own.
        assert_eq!(names_for(&CUDNN, Some((12, 9))), ["libcudnn.so.9"]);
    }

    #[test]
    fn a_library_for_a_newer_driver_is_unusable() {
        assert_eq!(
            too_new(13010, Some((12, 8))).unwrap(),
            "it needs a driver of CUDA 13, but this driver is of CUDA 12.8"
        );
        for (built_with, driver) in [(12080, (12, 4)), (12080, (13, 0)), (13010, (13, 0))] {
            assert_eq!(too_new(built_with, Some(driver)), None, "newer minor versions run on older drivers");
        }
        assert_eq!(too_new(13010, None), None);
    }
}
