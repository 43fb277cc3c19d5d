//! Finds the program.
//!
//! The program is looked up before anything is started, so that a typing error causes one line that says where was
//! searched, and not one line from every rank.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

/// Why a program cannot be started.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// There is no program of that name.
    #[error("no program `{name}`: looked in {}; a program of the current folder needs a path, such as ./{name}", looked.join(", "))]
    NotFound {
        /// The name.
        name: String,
        /// The searched places.
        looked: Vec<String>,
    },
    /// There is no file at that path.
    #[error("no program at {}", .0.display())]
    NoFile(PathBuf),
    /// The path is a folder.
    #[error("{} is a folder, not a program", .0.display())]
    Folder(PathBuf),
    /// The file is not executable.
    #[error("{path} is not executable; try: chmod +x {path}", path = .0.display())]
    NotExecutable(PathBuf),
    /// There is no Python script of that name.
    #[error("no script `{name}`: looked in the current folder and {}", looked.join(", "))]
    NoScript {
        /// The name.
        name: String,
        /// The other searched places.
        looked: Vec<String>,
    },
    /// There is no Python for a script or a module.
    #[error(
        "{script} is run by python3, and there is none in PATH: activate its environment, or set PYTHON_EXEC to the interpreter"
    )]
    NoPython {
        /// The script or the module.
        script: String,
    },
}

/// Same text as [`Display`](fmt::Display): `main` prints the error that it returns by its `Debug` text.
impl fmt::Debug for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Finds the program `name`. A name with a slash is a path; any other name is looked up in `search` (PATH), then in
/// `beside`, the folder of the launcher itself.
///
/// # Errors
/// If there is no executable file.
pub fn find(name: &OsStr, search: &[PathBuf], beside: Option<&Path>) -> Result<PathBuf, ProgramError> {
    let path = Path::new(name);
    if name.as_encoded_bytes().contains(&b'/') {
        return check(path).map(|()| path.to_owned());
    }
    let mut refusal = None;
    for folder in search.iter().map(PathBuf::as_path).chain(beside) {
        // An empty entry of PATH is the current folder.
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let candidate = folder.join(path);
        match check(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(error @ ProgramError::NotExecutable(_)) => refusal = refusal.or(Some(error)),
            Err(_) => {}
        }
    }
    let mut looked = vec!["PATH".to_owned()];
    looked.extend(beside.map(|folder| folder.display().to_string()));
    let name = path.display().to_string();
    Err(refusal.unwrap_or(ProgramError::NotFound { name, looked }))
}

fn check(path: &Path) -> Result<(), ProgramError> {
    let metadata = path.metadata().map_err(|_| ProgramError::NoFile(path.to_owned()))?;
    if metadata.is_dir() {
        return Err(ProgramError::Folder(path.to_owned()));
    }
    if access(path, AccessFlags::X_OK).is_err() {
        return Err(ProgramError::NotExecutable(path.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn path_is_searched_before_the_folder_of_the_launcher() {
        let (first, beside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let search = [first.path().to_owned()];
        let file = |folder: &Path, mode| {
            let path = folder.join("prog");
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let find = || find(OsStr::new("prog"), &search, Some(beside.path()));
        let error = find().unwrap_err().to_string();
        assert!(
            error.starts_with("no program `prog`: looked in PATH, ") && error.ends_with("./prog"),
            "{error}"
        );
        let second = file(beside.path(), 0o755);
        assert_eq!(find().unwrap(), second);
        let unable = file(first.path(), 0o644);
        assert_eq!(find().unwrap(), second);
        fs::remove_file(second).unwrap();
        assert_eq!(find(), Err(ProgramError::NotExecutable(unable)));
        assert_eq!(find().unwrap_err().to_string().matches("chmod +x").count(), 1);
        let able = file(first.path(), 0o755);
        assert_eq!(find().unwrap(), able);
    }

    #[test]
    fn a_name_with_a_slash_is_a_path() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &Path| find(path.as_os_str(), &[], None).unwrap_err();
        assert!(matches!(at(folder.path()), ProgramError::Folder(_)));
        assert!(matches!(at(&folder.path().join("none")), ProgramError::NoFile(_)));
    }
}
