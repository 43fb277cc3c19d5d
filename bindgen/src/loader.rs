//! Opening the library.
//!
//! A candidate file counts only if it is NCCL: it opens and exports `ncclGetVersion`. If one fails, the loader's
//! reason is recorded and the next one is tried, so that the final error lists every attempt. Other functions may be
//! missing (bindings generated from a newer header name functions that an older library lacks); a missing function is
//! reported when it is called.
//!
//! An opened library is never closed: NCCL starts threads that outlive a communicator, and unmapping their code would
//! crash the process.

use crate::results::NcclError;
use crate::sys::NcclSymbols;
use libloading::os::unix::{self, RTLD_LOCAL, RTLD_NOW};
use nvidia_libraries::{SearchEnv, Source, candidates, site_packages};
use std::error::Error as _;
use std::fmt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The name under which the library is installed; the unversioned name belongs to development packages only.
pub const LIBRARY_NAME: &str = "libnccl.so.2";

/// The environment variable that holds the path of the library.
pub const LIBRARY_VARIABLE: &str = "MGPU_NCCL_LIBRARY";

/// The library's directories among the packages of a Python environment.
pub const LIBRARY_WHEELS: &[&str] = &["nvidia/nccl/lib"];

/// NCCL, loaded. Cheap to clone, and shared freely between threads.
#[derive(Clone)]
pub struct Library {
    symbols: &'static NcclSymbols,
    source: Source,
    file: PathBuf,
}

impl Library {
    /// Opens the first NCCL in the order of [`candidates`], with this process's environment.
    ///
    /// Opening runs the library's initialisers but calls no function of NCCL: no GPU is needed.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every place that was tried.
    pub fn open() -> Result<Self, LoadError> {
        Self::open_in(&SearchEnv::from_process(LIBRARY_NAME, LIBRARY_VARIABLE, LIBRARY_WHEELS))
    }

    /// As [`Library::open`], with an environment given by the caller.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every place that was tried.
    pub fn open_in(env: &SearchEnv) -> Result<Self, LoadError> {
        let mut attempts = Vec::new();
        for place in candidates(env, &site_packages(env)) {
            let (file, reason) = match place.file {
                Ok(file) => match load(&file) {
                    Ok(symbols) => return Ok(Self { symbols, source: place.source, file }),
                    Err(reason) => (Some(file), reason),
                },
                Err(reason) => (None, reason),
            };
            attempts.push(Attempt { source: place.source, file, reason });
        }
        Err(LoadError { attempts })
    }

    /// Where the library was found, for logs: `system loader: libnccl.so.2`.
    pub fn origin(&self) -> String {
        format!("{}: {}", place(self.source), self.file.display())
    }

    /// The part of the search order in which the library was found.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The file that was opened; a bare name if the system loader found it.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// A function of the table, or an error with its name.
    pub(crate) fn function<F: Copy>(
        &self,
        name: &'static str,
        pick: impl FnOnce(&NcclSymbols) -> &Result<F, libloading::Error>,
    ) -> Result<F, NcclError> {
        pick(self.symbols).as_ref().copied().map_err(|error| NcclError::MissingSymbol {
            function: name,
            library: self.origin(),
            message: dlerror_text(error),
        })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("source", &self.source).field("file", &self.file).finish()
    }
}

/// Opens one file and fills the table from it; the reason if it is not NCCL.
fn load(file: &Path) -> Result<&'static NcclSymbols, String> {
    // RTLD_NOW: an incomplete installation (a dependency that lacks symbols this library needs) is an error here and
    // does not end the process at the first call. SAFETY: opening runs the file's initialisers. They are trusted as
    // far as the places of the search order are: an explicit choice of the user, the system's libraries, the user's
    // own toolkit and Python environments.
    let library = unsafe { unix::Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| dlerror_text(&error))?;
    // SAFETY: the table gives each symbol the type that nccl.h declares for that name. NCCL keeps the signature of a
    // published function within libnccl.so.2; a library that merely reuses the name is the user's own responsibility.
    let symbols = unsafe { NcclSymbols::from_library(library) }.map_err(|error| dlerror_text(&error))?;
    match &symbols.ncclGetVersion {
        Ok(_) => Ok(Box::leak(Box::new(symbols))),
        Err(error) => Err(format!("not an NCCL library: no ncclGetVersion ({})", dlerror_text(error))),
    }
}

/// The system loader's message. libloading's own text is only "dlopen failed"; the reason is the error's source.
fn dlerror_text(error: &libloading::Error) -> String {
    match error.source() {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// A short name for a part of the search order.
fn place(source: Source) -> String {
    match source {
        Source::Explicit => LIBRARY_VARIABLE.to_owned(),
        other => other.to_string(),
    }
}

/// One place where the library was not found, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The part of the search order.
    pub source: Source,
    /// The file that was to be opened; `None` if the place offered no file.
    pub file: Option<PathBuf>,
    /// The loader's reason, or why there was nothing to open.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            // Messages of the system loader and of dlopen begin with the file's name, which is printed once.
            Some(file) if !self.reason.starts_with(&*file.to_string_lossy()) => {
                write!(f, "{}: {}: {}", place(self.source), file.display(), self.reason)
            }
            _ => write!(f, "{}: {}", place(self.source), self.reason),
        }
    }
}

/// NCCL could not be loaded from anywhere. [`Display`](fmt::Display) has one line for each place;
/// [`LoadError::summary`] is a single line.
#[derive(Clone, PartialEq, Eq, Error)]
pub struct LoadError {
    /// Every place of the search order, in order.
    pub attempts: Vec<Attempt>,
}

/// As [`Display`](fmt::Display), because `main` prints a returned error with `Debug`.
impl fmt::Debug for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl LoadError {
    /// One line: what is missing, where it was searched for, what to install.
    pub fn summary(&self) -> String {
        let places: Vec<String> = self
            .attempts
            .iter()
            .filter_map(|attempt| {
                Some(format!("{} ({})", place(attempt.source), attempt.file.as_ref()?.display()))
            })
            .collect();
        format!("NCCL could not be loaded from: {}; {}", places.join(", "), self.advice())
    }

    fn advice(&self) -> String {
        // With an explicit path nothing else is searched, so the fix is to correct that path.
        if self.attempts.iter().any(|attempt| attempt.source == Source::Explicit && attempt.file.is_some()) {
            return format!("correct {LIBRARY_VARIABLE}, or unset it to search the usual places");
        }
        format!(
            "install it with `pip install nvidia-nccl-cu13` (`nvidia-nccl-cu12` for a CUDA 12 driver) or your \
             distribution's libnccl2 package, or set {LIBRARY_VARIABLE} to the path of {LIBRARY_NAME}"
        )
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "NCCL could not be loaded. Tried:")?;
        for attempt in &self.attempts {
            writeln!(f, "  {attempt}")?;
        }
        write!(f, "{}", self.advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_shared_between_threads() {
        fn assert_shareable<T: Send + Sync + Clone>() {}
        assert_shareable::<Library>();
    }
}
