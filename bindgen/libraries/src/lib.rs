//! Search paths for NVIDIA's libraries.
//!
//! There are four ways to get such a library: the user names its file, a package puts it on the system loader's path,
//! a CUDA toolkit contains it, or `pip` installs it inside a Python environment, where no loader finds it unaided.
//! They are tried in that order. [`candidates`] is a pure function of [`SearchEnv`] and the Python directories found
//! by [`site_packages`], so the order can be tested on a machine without any of them. Places that do not apply stay
//! in the list with the reason, because "CUDA_HOME is not set" is half of the answer to "why did it not load".
//!
//! This crate opens nothing: NCCL's bindings, the kernels and the launcher's `doctor` share the search order and open
//! what they need, or only check that it is there.

mod python;

use std::env;
use std::fmt;
use std::path::PathBuf;

pub use python::{SitePackages, site_packages};

/// What the search depends on besides the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchEnv {
    /// The library file's name, such as `libnccl.so.2`.
    pub file_name: PathBuf,
    /// The library's folders among a Python environment's packages, such as `nvidia/nccl/lib`.
    pub wheels: &'static [&'static str],
    /// The path of the library itself, from a variable of its own such as `MGPU_NCCL_LIBRARY`.
    pub explicit: Option<PathBuf>,
    /// `CUDA_HOME`: the root of a CUDA toolkit.
    pub cuda_home: Option<PathBuf>,
    /// `VIRTUAL_ENV`: the root of the active Python environment.
    pub virtual_env: Option<PathBuf>,
    /// `CONDA_PREFIX`: the root of the active conda environment.
    pub conda_prefix: Option<PathBuf>,
    /// Where `pip install --user` installs: `PYTHONUSERBASE`, else `~/.local`; `None` with `PYTHONNOUSERSITE`.
    pub user_base: Option<PathBuf>,
    /// The directories of `PATH`, in order.
    pub path: Vec<PathBuf>,
    /// `PYENV_VERSION`: the versions of Python that pyenv's shims start.
    pub pyenv_version: Option<String>,
    /// The current folder: pyenv looks for `.python-version` in it and above.
    pub current_dir: Option<PathBuf>,
}

impl SearchEnv {
    /// A search with nothing set: only the system loader is asked.
    pub fn empty(file_name: &str, wheels: &'static [&'static str]) -> Self {
        Self {
            file_name: file_name.into(),
            wheels,
            explicit: None,
            cuda_home: None,
            virtual_env: None,
            conda_prefix: None,
            user_base: None,
            path: Vec::new(),
            pyenv_version: None,
            current_dir: None,
        }
    }

    /// The variables of this process. A variable that is set but empty counts as unset. `explicit` is the name of the
    /// variable that holds the path of the library.
    pub fn from_process(file_name: &str, explicit: &str, wheels: &'static [&'static str]) -> Self {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let directory = |name| variable(name).map(PathBuf::from);
        let user_base = || Some(directory("PYTHONUSERBASE").unwrap_or(env::home_dir()?.join(".local")));
        Self {
            file_name: file_name.into(),
            wheels,
            explicit: directory(explicit),
            cuda_home: directory("CUDA_HOME"),
            virtual_env: directory("VIRTUAL_ENV"),
            conda_prefix: directory("CONDA_PREFIX"),
            user_base: if variable("PYTHONNOUSERSITE").is_some() { None } else { user_base() },
            path: variable("PATH").map(|value| env::split_paths(&value).collect()).unwrap_or_default(),
            pyenv_version: variable("PYENV_VERSION").and_then(|value| value.into_string().ok()),
            current_dir: env::current_dir().ok(),
        }
    }
}

/// The part of the search order that a place belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The library's own variable.
    Explicit,
    /// `ld.so`: `LD_LIBRARY_PATH`, its cache, the system's library directories.
    SystemLoader,
    /// `$CUDA_HOME/lib64`.
    CudaHome,
    /// An NVIDIA wheel in the environment named by `VIRTUAL_ENV`.
    VirtualEnv,
    /// The environment named by `CONDA_PREFIX`: `lib`, where conda's own packages are, or an NVIDIA wheel.
    Conda,
    /// An NVIDIA wheel of the first `python3` or `python` on `PATH`.
    Interpreter,
    /// An NVIDIA wheel installed by `pip install --user`.
    UserSite,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Explicit => "its variable",
            Self::SystemLoader => "system loader",
            Self::CudaHome => "CUDA_HOME",
            Self::VirtualEnv => "VIRTUAL_ENV",
            Self::Conda => "CONDA_PREFIX",
            Self::Interpreter => "python on PATH",
            Self::UserSite => "pip's --user packages",
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

/// The places to try, best first. Pure: neither the disk nor the process's environment is consulted.
///
/// 1. The variable that names the library. If it is set, nothing else is tried: whoever names a library prefers an
///    error to training with another one.
/// 2. The system loader, asked for the bare file name.
/// 3. `$CUDA_HOME/lib64`.
/// 4. [`SearchEnv::wheels`] of the environments in `sites`: those under `VIRTUAL_ENV`, conda's (after its `lib`), the
///    interpreter's, the user's own.
///
/// ```
/// use nvidia_libraries::{SearchEnv, Source, candidates};
/// let nccl = SearchEnv::empty("libnccl.so.2", &["nvidia/nccl/lib"]);
/// let env = SearchEnv { cuda_home: Some("/opt/cuda".into()), ..nccl };
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
    for source in [Source::VirtualEnv, Source::Conda, Source::Interpreter, Source::UserSite] {
        let before = places.len();
        if let Some(root) = env.conda_prefix.as_ref().filter(|_| source == Source::Conda) {
            places.push(candidate(source, Ok(root.join("lib").join(&env.file_name))));
        }
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
    let root = match source {
        Source::VirtualEnv => &env.virtual_env,
        Source::Conda => &env.conda_prefix,
        Source::UserSite => &env.user_base,
        _ => return "no interpreter with a site-packages directory beside it".to_owned(),
    };
    match root {
        None => "not set".to_owned(),
        Some(root) => format!("no site-packages under {}", root.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nccl() -> SearchEnv {
        SearchEnv::empty("libnccl.so.2", &["nvidia/nccl/lib"])
    }

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
    fn the_order_is_loader_toolkit_virtual_env_conda_interpreter_user() {
        let env = SearchEnv {
            cuda_home: Some("/opt/cuda".into()),
            virtual_env: Some("/home/u/.venv".into()),
            conda_prefix: Some("/opt/conda".into()),
            ..nccl()
        };
        // Given in the wrong order on purpose: the source decides.
        let sites = [
            site(Source::UserSite, "/home/u/.local/lib/python3.12/site-packages"),
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
                (Source::Conda, "/opt/conda/lib/libnccl.so.2"),
                (Source::Interpreter, "/usr/lib/python3/dist-packages/nvidia/nccl/lib/libnccl.so.2"),
                (
                    Source::UserSite,
                    "/home/u/.local/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
                ),
            ]
        );
    }

    #[test]
    fn a_library_named_by_its_variable_is_the_only_candidate() {
        let env = SearchEnv {
            explicit: Some("/opt/mine/libnccl.so".into()),
            cuda_home: Some("/opt/cuda".into()),
            ..nccl()
        };
        let sites = [site(Source::VirtualEnv, "/v/lib/python3.12/site-packages")];
        assert_eq!(files(&candidates(&env, &sites)), [(Source::Explicit, "/opt/mine/libnccl.so")]);
    }

    #[test]
    fn places_that_do_not_apply_stay_in_the_list_with_the_reason() {
        let places = candidates(&nccl(), &[]);
        let sources: Vec<Source> = places.iter().map(|place| place.source).collect();
        assert_eq!(
            sources,
            [
                Source::Explicit,
                Source::SystemLoader,
                Source::CudaHome,
                Source::VirtualEnv,
                Source::Conda,
                Source::Interpreter,
                Source::UserSite,
            ]
        );
        assert_eq!(places.iter().filter(|place| place.file.is_err()).count(), 6);

        let env = SearchEnv { virtual_env: Some("/gone".into()), ..nccl() };
        let reason = candidates(&env, &[])[3].file.clone().unwrap_err();
        assert_eq!(reason, "no site-packages under /gone");
    }
}
