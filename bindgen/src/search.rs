//! Where to look for the library.
//!
//! People get NCCL in four ways: they say where it is, a package puts it on the system loader's path, a CUDA
//! toolkit brings it, or `pip` drops it inside a Python environment, where no loader finds it unaided. They are
//! tried in that order. [`candidates`] is a pure function of [`SearchEnv`] and the Python directories found by
//! [`site_packages`], so the order can be tested on a machine that has none of it; places that do not apply stay
//! in the list with the reason, because "CUDA_HOME is not set" is half of the answer to "why did it not load".

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The name the library is installed under; the unversioned one belongs to development packages only.
pub const LIBRARY_NAME: &str = "libnccl.so.2";

/// The environment variable that names the library outright.
pub const LIBRARY_VARIABLE: &str = "MGPU_NCCL_LIBRARY";

/// What the search depends on besides the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchEnv {
    /// The library file's name; [`LIBRARY_NAME`] for NCCL.
    pub file_name: PathBuf,
    /// The library's folders among a Python environment's packages; `nvidia/nccl/lib` for NCCL.
    pub wheels: &'static [&'static str],
    /// The path of the library itself, from a variable; `MGPU_NCCL_LIBRARY` for NCCL.
    pub explicit: Option<PathBuf>,
    /// `CUDA_HOME`: the root of a CUDA toolkit.
    pub cuda_home: Option<PathBuf>,
    /// `VIRTUAL_ENV`: the root of the active Python environment.
    pub virtual_env: Option<PathBuf>,
    /// The directories of `PATH`, in order.
    pub path: Vec<PathBuf>,
}

impl SearchEnv {
    /// A search with nothing set: only the system loader is left to ask.
    pub fn empty() -> Self {
        Self {
            file_name: LIBRARY_NAME.into(),
            wheels: &["nvidia/nccl/lib"],
            explicit: None,
            cuda_home: None,
            virtual_env: None,
            path: Vec::new(),
        }
    }

    /// The variables of this process, for NCCL. One that is set but empty counts as unset.
    pub fn from_process() -> Self {
        let nccl = Self::empty();
        Self::for_library(LIBRARY_NAME, LIBRARY_VARIABLE, nccl.wheels)
    }

    /// The variables of this process, for another of NVIDIA's libraries: the places are the same.
    pub fn for_library(name: &str, explicit: &str, wheels: &'static [&'static str]) -> Self {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let directory = |name| variable(name).map(PathBuf::from);
        Self {
            file_name: name.into(),
            wheels,
            explicit: directory(explicit),
            cuda_home: directory("CUDA_HOME"),
            virtual_env: directory("VIRTUAL_ENV"),
            path: variable("PATH").map(|value| env::split_paths(&value).collect()).unwrap_or_default(),
        }
    }
}

/// Which part of the search order a place belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The variable [`LIBRARY_VARIABLE`].
    Explicit,
    /// `ld.so`: `LD_LIBRARY_PATH`, its cache, the system's library directories.
    SystemLoader,
    /// `$CUDA_HOME/lib64`.
    CudaHome,
    /// An NVIDIA wheel in the environment named by `VIRTUAL_ENV`.
    VirtualEnv,
    /// An NVIDIA wheel of the first `python3` or `python` on `PATH`.
    Interpreter,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Explicit => LIBRARY_VARIABLE,
            Self::SystemLoader => "system loader",
            Self::CudaHome => "CUDA_HOME",
            Self::VirtualEnv => "VIRTUAL_ENV",
            Self::Interpreter => "python on PATH",
        })
    }
}

/// One place of the search order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The part of the search order.
    pub source: Source,
    /// The file to open, or why this part of the order offers none.
    pub file: Result<PathBuf, String>,
}

/// A directory that Python imports packages from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePackages {
    /// [`Source::VirtualEnv`] or [`Source::Interpreter`].
    pub source: Source,
    /// The directory, such as `.venv/lib/python3.12/site-packages`.
    pub directory: PathBuf,
}

/// The places to try, best first. Pure: neither the disk nor the process's environment is consulted.
///
/// 1. The variable that names the library ([`LIBRARY_VARIABLE`] for NCCL). When it is set nothing else is tried:
///    whoever names a library would rather read that it does not load than train on another one.
/// 2. The system loader, asked for the bare file name.
/// 3. `$CUDA_HOME/lib64`.
/// 4. [`SearchEnv::wheels`] of the environments in `sites`: those under `VIRTUAL_ENV`, then the interpreter's.
///
/// ```
/// use nccl_sys::{SearchEnv, Source, candidates};
/// let env = SearchEnv { cuda_home: Some("/opt/cuda".into()), ..SearchEnv::empty() };
/// let places = candidates(&env, &[]);
/// assert_eq!(places[1].source, Source::SystemLoader);
/// assert_eq!(places[2].file, Ok("/opt/cuda/lib64/libnccl.so.2".into()));
/// ```
pub fn candidates(env: &SearchEnv, sites: &[SitePackages]) -> Vec<Candidate> {
    let candidate = |source, file| Candidate { source, file };
    if let Some(library) = &env.explicit {
        return vec![candidate(Source::Explicit, Ok(library.clone()))];
    }
    let mut places = vec![
        candidate(Source::Explicit, Err("not set".to_owned())),
        candidate(Source::SystemLoader, Ok(env.file_name.clone())),
        candidate(
            Source::CudaHome,
            match &env.cuda_home {
                Some(root) => Ok(root.join("lib64").join(&env.file_name)),
                None => Err("not set".to_owned()),
            },
        ),
    ];
    for source in [Source::VirtualEnv, Source::Interpreter] {
        let before = places.len();
        for site in sites.iter().filter(|site| site.source == source) {
            let files = env.wheels.iter().map(|folder| site.directory.join(folder).join(&env.file_name));
            places.extend(files.map(|file| candidate(source, Ok(file))));
        }
        if places.len() == before {
            places.push(candidate(source, Err(why_no_site_packages(env, source))));
        }
    }
    places
}

fn why_no_site_packages(env: &SearchEnv, source: Source) -> String {
    match (source, &env.virtual_env) {
        (Source::VirtualEnv, None) => "not set".to_owned(),
        (Source::VirtualEnv, Some(root)) => format!("no site-packages under {}", root.display()),
        _ => "no interpreter with a site-packages directory beside it".to_owned(),
    }
}

/// The directories on this disk that the Python environments of `env` import packages from. No interpreter is
/// started: a wrapper script on `PATH` (as pyenv installs) is not followed, its environment wants `VIRTUAL_ENV`.
pub fn site_packages(env: &SearchEnv) -> Vec<SitePackages> {
    let mut found: Vec<SitePackages> = Vec::new();
    let mut add = |source, prefix: &Path| {
        for directory in site_packages_under(prefix) {
            if found.iter().all(|known| known.directory != directory) {
                found.push(SitePackages { source, directory });
            }
        }
    };
    if let Some(root) = &env.virtual_env {
        add(Source::VirtualEnv, root);
    }
    if let Some(interpreter) = first_interpreter(&env.path) {
        // A virtual environment's interpreter is a link out of it and its packages are beside the link; any other
        // link (say ~/bin/python3) has its packages beside the target. So look at both, the link first.
        let resolved = fs::canonicalize(&interpreter).ok();
        for file in [Some(interpreter), resolved].into_iter().flatten() {
            if let Some(prefix) = file.parent().and_then(Path::parent) {
                add(Source::Interpreter, prefix);
            }
        }
    }
    found
}

fn first_interpreter(path: &[PathBuf]) -> Option<PathBuf> {
    path.iter()
        .flat_map(|directory| [directory.join("python3"), directory.join("python")])
        .find(|file| file.is_file())
}

/// `lib/python3.*/site-packages` and its variations: `lib64` on Fedora, `local/lib` and `dist-packages` on Debian.
/// Newest Python first.
fn site_packages_under(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64", "local/lib"] {
        let mut versions: Vec<(u32, PathBuf)> = fs::read_dir(prefix.join(lib))
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| Some((python_minor(entry.file_name().to_str()?)?, entry.path())))
            .collect();
        versions.sort_by(|a, b| b.cmp(a));
        for (_, python) in versions {
            found.extend(
                ["site-packages", "dist-packages"]
                    .map(|name| python.join(name))
                    .into_iter()
                    .filter(|directory| directory.is_dir()),
            );
        }
    }
    found
}

/// `python3.12` → 12; `python3`, Debian's directory for all versions, sorts last.
fn python_minor(directory: &str) -> Option<u32> {
    match directory.strip_prefix("python3")? {
        "" => Some(0),
        rest => rest.strip_prefix('.')?.trim_end_matches('t').parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(places: &[Candidate]) -> Vec<(Source, &str)> {
        places
            .iter()
            .filter_map(|place| Some((place.source, place.file.as_ref().ok()?.to_str().unwrap())))
            .collect()
    }

    fn site(source: Source, directory: &str) -> SitePackages {
        SitePackages { source, directory: directory.into() }
    }

    #[test]
    fn the_order_is_loader_toolkit_virtual_env_interpreter() {
        let env = SearchEnv {
            cuda_home: Some("/opt/cuda".into()),
            virtual_env: Some("/home/u/.venv".into()),
            ..SearchEnv::empty()
        };
        // Given in the wrong order on purpose: the source decides.
        let sites = [
            site(Source::Interpreter, "/usr/lib/python3/dist-packages"),
            site(Source::VirtualEnv, "/home/u/.venv/lib/python3.12/site-packages"),
        ];
        assert_eq!(
            files(&candidates(&env, &sites)),
            [
                (Source::SystemLoader, "libnccl.so.2"),
                (Source::CudaHome, "/opt/cuda/lib64/libnccl.so.2"),
                (
                    Source::VirtualEnv,
                    "/home/u/.venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
                ),
                (Source::Interpreter, "/usr/lib/python3/dist-packages/nvidia/nccl/lib/libnccl.so.2"),
            ]
        );
    }

    #[test]
    fn a_library_named_outright_is_the_only_candidate() {
        let env = SearchEnv {
            explicit: Some("/opt/mine/libnccl.so".into()),
            cuda_home: Some("/opt/cuda".into()),
            ..SearchEnv::empty()
        };
        let sites = [site(Source::VirtualEnv, "/v/lib/python3.12/site-packages")];
        assert_eq!(files(&candidates(&env, &sites)), [(Source::Explicit, "/opt/mine/libnccl.so")]);
    }

    #[test]
    fn places_that_do_not_apply_stay_in_the_list_with_the_reason() {
        let places = candidates(&SearchEnv::empty(), &[]);
        let sources: Vec<Source> = places.iter().map(|place| place.source).collect();
        assert_eq!(
            sources,
            [
                Source::Explicit,
                Source::SystemLoader,
                Source::CudaHome,
                Source::VirtualEnv,
                Source::Interpreter
            ]
        );
        assert_eq!(places.iter().filter(|place| place.file.is_err()).count(), 4);

        let env = SearchEnv { virtual_env: Some("/gone".into()), ..SearchEnv::empty() };
        let reason = candidates(&env, &[])[3].file.clone().unwrap_err();
        assert_eq!(reason, "no site-packages under /gone");
    }

    #[test]
    fn site_packages_are_found_beside_the_link_and_beside_its_target_newest_python_first() {
        let root = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        for directory in [
            "venv/bin",
            "venv/lib/python3.12/site-packages",
            "base/bin",
            "base/lib/python3.9/site-packages",
            "base/lib/python3.13/site-packages",
            "base/lib/python3/dist-packages",
            "base/lib/python2.7/site-packages",
        ] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::write(root.join("base/bin/python3"), "").unwrap();
        std::os::unix::fs::symlink(root.join("base/bin/python3"), root.join("venv/bin/python3")).unwrap();

        let env = SearchEnv {
            path: vec![root.join("nothing-here"), root.join("venv/bin"), root.join("base/bin")],
            ..SearchEnv::empty()
        };
        let found = site_packages(&env);
        assert!(found.iter().all(|site| site.source == Source::Interpreter));
        let found: Vec<&str> =
            found.iter().map(|site| site.directory.strip_prefix(&root).unwrap().to_str().unwrap()).collect();
        assert_eq!(
            found,
            [
                "venv/lib/python3.12/site-packages",
                "base/lib/python3.13/site-packages",
                "base/lib/python3.9/site-packages",
                "base/lib/python3/dist-packages",
            ]
        );

        // The active environment is the interpreter's own: it is listed once, under the stronger name.
        let env = SearchEnv { virtual_env: Some(root.join("venv")), ..env };
        let sources: Vec<Source> = site_packages(&env).iter().map(|site| site.source).collect();
        assert_eq!(sources[..2], [Source::VirtualEnv, Source::Interpreter]);
        assert_eq!(sources.len(), 4);
    }
}
