//! The directories from which Python imports packages, read from the file system.
//!
//! `pip` installs NVIDIA's libraries into such a directory, and which one depends on how Python was installed: a
//! virtual environment, conda, `pip install --user`, pyenv, the system's own. No interpreter is started: that takes
//! tens of milliseconds in every rank, and `python3` on `PATH` may be any program.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::{SearchEnv, Source};

/// A directory from which Python imports packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePackages {
    /// Which environment it belongs to: [`Source::VirtualEnv`], [`Source::Conda`], [`Source::Interpreter`] or
    /// [`Source::UserSite`].
    pub source: Source,
    /// The directory, such as `.venv/lib/python3.12/site-packages`.
    pub directory: PathBuf,
}

/// The existing directories from which the Python environments of `env` import packages, in search order: the active
/// virtual environment, the active conda environment, the first interpreter on `PATH`, and the user's own packages
/// (`pip install --user`) unless that interpreter belongs to a virtual environment.
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
    if let Some(root) = &env.conda_prefix {
        add(Source::Conda, root);
    }
    let prefixes = interpreter_prefixes(env);
    for prefix in &prefixes {
        add(Source::Interpreter, prefix);
    }
    // As in Python: a virtual environment does not see them.
    let is_virtual = prefixes.first().is_some_and(|prefix| prefix.join("pyvenv.cfg").is_file());
    if let Some(root) = env.user_base.as_ref().filter(|_| !is_virtual) {
        add(Source::UserSite, root);
    }
    found
}

/// The installations that the first `python3` or `python` on `PATH` may belong to, most likely first.
fn interpreter_prefixes(env: &SearchEnv) -> Vec<PathBuf> {
    for directory in &env.path {
        let Some(interpreter) =
            ["python3", "python"].map(|name| directory.join(name)).into_iter().find(|file| file.is_file())
        else {
            continue;
        };
        if let Some(root) = pyenv_root(directory) {
            match pyenv_version(env, root) {
                Some(prefix) => return vec![prefix],
                // pyenv is set to the system's Python: the next one on PATH.
                None => continue,
            }
        }
        // The interpreter of a virtual environment is a link that leads out of it, and its packages are beside the
        // link; any other link (say ~/bin/python3) has its packages beside the target. So both are searched, the link
        // first.
        let resolved = fs::canonicalize(&interpreter).ok();
        let files = [Some(interpreter), resolved].into_iter().flatten();
        return files.filter_map(|file| Some(file.parent()?.parent()?.to_owned())).collect();
    }
    Vec::new()
}

/// The root of pyenv, if `directory` holds its shims: scripts that start the interpreter of the selected version.
fn pyenv_root(directory: &Path) -> Option<&Path> {
    let root = directory.parent()?;
    (directory.file_name()? == "shims" && root.join("versions").is_dir()).then_some(root)
}

/// The installation of the Python that pyenv's shim would start; `None` for the system's.
///
/// The version is selected as pyenv documents it: by `PYENV_VERSION`, by `.python-version` in the current directory
/// or the nearest one above it, by the file `version` in pyenv's root. Several may be named; the first one that is
/// installed is used.
fn pyenv_version(env: &SearchEnv, root: &Path) -> Option<PathBuf> {
    let local = || {
        let folders = env.current_dir.iter().flat_map(|folder| folder.ancestors());
        folders.map(|folder| folder.join(".python-version")).find_map(|file| fs::read_to_string(file).ok())
    };
    let global = || fs::read_to_string(root.join("version")).ok();
    let chosen = env.pyenv_version.clone().or_else(local).or_else(global)?;
    let names = chosen.lines().filter(|line| !line.trim_start().starts_with('#')).flat_map(|line| {
        line.split(|separator: char| separator == ':' || separator.is_whitespace())
            .filter(|name| !name.is_empty())
    });
    for name in names {
        if name == "system" {
            return None;
        }
        let installed = installed_version(&root.join("versions"), name);
        if installed.is_some() {
            return installed;
        }
    }
    None
}

/// The directory of version `name` in `versions`, or else that of the newest `name.N`.
fn installed_version(versions: &Path, name: &str) -> Option<PathBuf> {
    let name = name.strip_prefix("python-").unwrap_or(name);
    // A file in the current directory may contain the name: it must not lead outside `versions`.
    if !Path::new(name).components().all(|part| matches!(part, Component::Normal(_))) {
        return None;
    }
    let exact = versions.join(name);
    if exact.is_dir() {
        return Some(exact);
    }
    let entries = fs::read_dir(versions).into_iter().flatten().flatten();
    let newer = entries.filter_map(|entry| {
        let version = entry.file_name().into_string().ok()?;
        let rest = version.strip_prefix(name)?.strip_prefix('.')?;
        let numbers: Vec<u32> = rest.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
        Some((numbers, entry.path()))
    });
    newer.max().map(|(_, path)| path)
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

    /// Creates these directories and, for paths without a trailing slash, files.
    fn disk(entries: &[&str]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        for entry in entries {
            let path = root.join(entry);
            match entry.ends_with('/') {
                true => fs::create_dir_all(path).unwrap(),
                false => {
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::write(path, "").unwrap();
                }
            }
        }
        (folder, root)
    }

    /// The result, relative to `root`.
    fn found(env: &SearchEnv, root: &Path) -> Vec<(Source, String)> {
        let below = |path: &Path| path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        site_packages(env).into_iter().map(|site| (site.source, below(&site.directory))).collect()
    }

    #[test]
    fn site_packages_are_found_beside_the_link_and_beside_its_target_newest_python_first() {
        let (_disk, root) = disk(&[
            "venv/bin/",
            "venv/lib/python3.12/site-packages/",
            "base/bin/python3",
            "base/lib/python3.9/site-packages/",
            "base/lib/python3.13/site-packages/",
            "base/lib/python3/dist-packages/",
            "base/lib/python2.7/site-packages/",
        ]);
        std::os::unix::fs::symlink(root.join("base/bin/python3"), root.join("venv/bin/python3")).unwrap();
        let env = SearchEnv {
            path: vec![root.join("nothing-here"), root.join("venv/bin"), root.join("base/bin")],
            ..SearchEnv::empty("libnccl.so.2", &["nvidia/nccl/lib"])
        };
        let expected = [
            "venv/lib/python3.12/site-packages",
            "base/lib/python3.13/site-packages",
            "base/lib/python3.9/site-packages",
            "base/lib/python3/dist-packages",
        ];
        assert_eq!(found(&env, &root), expected.map(|path| (Source::Interpreter, path.to_owned())));

        // The active environment is the interpreter's own: it is listed once, with the source that comes first.
        let env = SearchEnv { virtual_env: Some(root.join("venv")), ..env };
        let sources: Vec<Source> = site_packages(&env).iter().map(|site| site.source).collect();
        assert_eq!(sources[..2], [Source::VirtualEnv, Source::Interpreter]);
        assert_eq!(sources.len(), 4);
    }

    #[test]
    fn conda_and_the_users_own_packages_are_found() {
        let (_disk, root) = disk(&[
            "conda/lib/python3.12/site-packages/",
            "usr/bin/python3",
            "usr/lib/python3/dist-packages/",
            "home/.local/lib/python3.11/site-packages/",
        ]);
        let env = SearchEnv {
            conda_prefix: Some(root.join("conda")),
            user_base: Some(root.join("home/.local")),
            path: vec![root.join("usr/bin")],
            ..SearchEnv::empty("libnccl.so.2", &["nvidia/nccl/lib"])
        };
        let expected = [
            (Source::Conda, "conda/lib/python3.12/site-packages"),
            (Source::Interpreter, "usr/lib/python3/dist-packages"),
            (Source::UserSite, "home/.local/lib/python3.11/site-packages"),
        ];
        assert_eq!(found(&env, &root), expected.map(|(source, path)| (source, path.to_owned())));
        // The interpreter of a virtual environment does not see the user's own packages.
        fs::write(root.join("usr/pyvenv.cfg"), "").unwrap();
        assert_eq!(found(&env, &root).len(), 2);
    }

    #[test]
    fn the_selected_pyenv_version_is_found() {
        let (_disk, root) = disk(&[
            "pyenv/shims/python3",
            "pyenv/versions/3.9.18/lib/python3.9/site-packages/",
            "pyenv/versions/3.12.9/lib/python3.12/site-packages/",
            "pyenv/versions/3.12.10/lib/python3.12/site-packages/",
            "elsewhere/lib/python3.8/site-packages/",
            "project/deeper/",
            "usr/bin/python3",
            "usr/lib/python3/dist-packages/",
        ]);
        let env = SearchEnv {
            path: vec![root.join("pyenv/shims"), root.join("usr/bin")],
            current_dir: Some(root.join("project/deeper")),
            ..SearchEnv::empty("libnccl.so.2", &["nvidia/nccl/lib"])
        };
        let only = |env: &SearchEnv| match found(env, &root).as_slice() {
            [(Source::Interpreter, path)] => path.clone(),
            other => panic!("{other:?}"),
        };
        let system = "usr/lib/python3/dist-packages";
        assert_eq!(only(&env), system, "no version is selected");
        fs::write(root.join("pyenv/version"), "3.9.18\n").unwrap();
        assert_eq!(only(&env), "pyenv/versions/3.9.18/lib/python3.9/site-packages");
        // A version that is not installed is skipped; a prefix means the newest version that has it.
        fs::write(root.join("project/.python-version"), "# ours\n2.7.1\npython-3.12\n").unwrap();
        assert_eq!(only(&env), "pyenv/versions/3.12.10/lib/python3.12/site-packages");
        let told = |version: &str| SearchEnv { pyenv_version: Some(version.into()), ..env.clone() };
        assert_eq!(only(&told("3.12.9:3.9.18")), "pyenv/versions/3.12.9/lib/python3.12/site-packages");
        let absolute = root.join("elsewhere");
        for version in ["system", "4.0", "../../elsewhere", absolute.to_str().unwrap()] {
            assert_eq!(only(&told(version)), system, "{version}");
        }
    }
}
