//! Opening the library.
//!
//! A candidate file counts only if it is UCX: it opens, exports all functions that these bindings use, and is not older
//! than [`Version::OLDEST`]. If one fails, the reason is recorded and the next one is tried, so that the final error
//! lists every attempt.
//!
//! An opened library is never closed: UCX has a thread, and hooks in the C library's memory functions.

use std::error::Error as _;
use std::ffi::{c_char, c_int, c_schar};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{self, RTLD_LOCAL, RTLD_NOW};
use nvidia_libraries::{SearchEnv, Source, candidates, site_packages};

use crate::sys::UcxSymbols;

/// Keeps a library in the process even if it is rejected and closed, with all libraries that it needs (dlfcn.h of Linux).
const RTLD_NODELETE: c_int = 0x1000;

/// The name under which the library is installed; the unversioned name belongs to development packages only.
pub const LIBRARY_NAME: &str = "libucp.so.0";

/// The environment variable that holds the path of the library.
pub const LIBRARY_VARIABLE: &str = "MGPU_UCX_LIBRARY";

/// The library's directories among the packages of a Python environment.
pub const LIBRARY_WHEELS: &[&str] = &["libucx/lib"];

/// How to install UCX.
pub const INSTALL: &str = "apt install libucx0, or pip install libucx-cu12 (which needs no GPU)";

/// A release of UCX; ordered as releases are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 1 in 1.13.1.
    pub major: u32,
    /// 13 in 1.13.1.
    pub minor: u32,
    /// 1 in 1.13.1.
    pub patch: u32,
}

impl Version {
    /// The oldest release with which the bindings were seen to work. (Their functions are in 1.11, too.)
    pub const OLDEST: Version = Version { major: 1, minor: 13, patch: 0 };

    /// Whether workers of both releases are taken to understand each other: UCX promises it for the same minor version.
    pub fn is_compatible(self, other: Version) -> bool {
        (self.major, self.minor) == (other.major, other.minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// UCX, loaded. Cheap to clone, and shared freely between threads.
#[derive(Clone)]
pub struct Library {
    symbols: &'static UcxSymbols,
    version: Version,
    source: Source,
    file: PathBuf,
}

impl Library {
    /// Opens the first UCX in the order of [`candidates`], with this process's environment.
    ///
    /// Opening runs the library's initialisers: UCX reads its `UCX_*` variables then. Its log, which goes to standard
    /// output, is silenced unless `UCX_LOG_LEVEL` is set, and its handlers of SIGSEGV and the like are removed.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every file that was tried.
    pub fn open() -> Result<Self, LoadError> {
        Self::open_in(&SearchEnv::from_process(LIBRARY_NAME, LIBRARY_VARIABLE, LIBRARY_WHEELS))
    }

    /// As [`Library::open`], with an environment given by the caller.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every file that was tried.
    pub fn open_in(env: &SearchEnv) -> Result<Self, LoadError> {
        let mut attempts = Vec::new();
        for place in candidates(env, &site_packages(env)) {
            // CUDA toolkits have no UCX.
            let Ok(file) = place.file.map_err(drop).and_then(|file| match place.source {
                Source::CudaHome => Err(()),
                _ => Ok(file),
            }) else {
                continue;
            };
            match load(&file) {
                Ok((symbols, version)) => {
                    return Ok(Library { symbols, version, source: place.source, file });
                }
                Err(reason) => attempts.push((file, reason)),
            }
        }
        Err(LoadError { attempts, is_explicit: env.explicit.is_some() })
    }

    /// The version of the loaded library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Where the library was found, for logs: `system loader: libucp.so.0`.
    pub fn origin(&self) -> String {
        match self.source {
            Source::Explicit => format!("{LIBRARY_VARIABLE}: {}", self.file.display()),
            source => format!("{source}: {}", self.file.display()),
        }
    }

    /// The file that was opened; a bare name if the system loader found it.
    pub fn file(&self) -> &Path {
        &self.file
    }

    pub(crate) fn symbols(&self) -> &'static UcxSymbols {
        self.symbols
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("version", &self.version).field("file", &self.file).finish()
    }
}

/// Opens one file and fills the table from it; the reason if it is not a UCX that can be used.
fn load(file: &Path) -> Result<(&'static UcxSymbols, Version), String> {
    // RTLD_NOW: an incomplete installation is an error here and does not end the process at the first call. SAFETY:
    // opening runs the file's initialisers. They are trusted as far as the places of the search order are: an explicit
    // choice of the user, the system's libraries, the user's own Python environments.
    let library = unsafe { unix::Library::open(Some(file), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) }
        .map_err(|error| dlerror_text(&error))?;
    quieten(&library);
    // SAFETY: the table gives each symbol the type that ucp.h declares for that name. UCX keeps the signature of a
    // published function within libucp.so.0; a library that merely reuses the name is the user's own responsibility.
    let symbols = unsafe { UcxSymbols::from_library(library) }
        .map_err(|error| format!("not a UCX library that can be used: {}", dlerror_text(&error)))?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: the arguments are live, writable integers.
    unsafe { (symbols.ucp_get_version)(&mut major, &mut minor, &mut patch) };
    let version = Version { major, minor, patch };
    if version < Version::OLDEST || version.major != Version::OLDEST.major {
        let Version { major, minor, .. } = Version::OLDEST;
        return Err(format!("is UCX {version}, but {major}.{minor} or a later {major}.x is needed"));
    }
    Ok((Box::leak(Box::new(symbols)), version))
}

/// Keeps UCX from writing to the output of the program, and from catching signals. Both functions are UCX's own, so a
/// later release may do without.
fn quieten(library: &unix::Library) {
    type SetOption = unsafe extern "C" fn(*const c_char, *const c_char) -> c_schar;
    type DisableSignals = unsafe extern "C" fn();
    if std::env::var_os("UCX_LOG_LEVEL").is_none() {
        // SAFETY: this is the type in ucs/config/global_opts.h. Both texts are terminated, and UCX copies the value.
        unsafe {
            if let Ok(set) = library.get::<SetOption>(b"ucs_global_opts_set_value\0") {
                set(c"LOG_LEVEL".as_ptr(), c"fatal".as_ptr());
            }
        }
    }
    // SAFETY: this is its type. It restores the handlers that were there before the library was opened.
    unsafe {
        if let Ok(disable) = library.get::<DisableSignals>(b"ucs_debug_disable_signals\0") {
            disable();
        }
    }
}

/// The system loader's message. libloading's own text is only "dlopen failed"; the reason is the error's source.
fn dlerror_text(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// UCX could not be loaded from anywhere. Its text is one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    /// Every file that was tried, in order, and why it cannot be used.
    pub attempts: Vec<(PathBuf, String)>,
    /// Whether [`LIBRARY_VARIABLE`] names the library, so that nothing else was tried.
    pub is_explicit: bool,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UCX cannot be loaded (")?;
        for (index, (file, reason)) in self.attempts.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { "; " })?;
            // Messages of the system loader begin with the file's name.
            match reason.starts_with(&*file.to_string_lossy()) {
                true => f.write_str(reason)?,
                false => write!(f, "{}: {reason}", file.display())?,
            }
        }
        match self.is_explicit {
            true => write!(f, "): correct {LIBRARY_VARIABLE}, or unset it to search the usual places"),
            false => write!(f, "): {INSTALL}, or set {LIBRARY_VARIABLE} to the path of {LIBRARY_NAME}"),
        }
    }
}

impl std::error::Error for LoadError {}
