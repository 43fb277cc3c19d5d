//! What a rank runs: a program, or Python with a script or a module.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use crate::program::{ProgramError, find};

/// Runs the script whose name is the first argument, as torchrun does with `--run-path`.
const RUN_PATH: &str = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')";

/// How the first word of a job is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// A Python script, by its name, or else a program.
    Any {
        /// Scripts that are executable are run by Python, too.
        python: bool,
    },
    /// A program.
    Direct,
    /// A Python module.
    Module,
    /// A Python script, run inside the interpreter.
    RunPath,
}

/// Where programs are looked up.
pub(super) struct Search<'a> {
    /// PATH.
    pub(super) path: &'a [PathBuf],
    /// The folder of the launcher.
    pub(super) beside: Option<&'a Path>,
    /// The variable `PYTHON_EXEC`.
    pub(super) python: Option<OsString>,
}

impl Search<'_> {
    /// The program and the arguments that `words` mean.
    ///
    /// # Errors
    /// If there is no such program or script, or no Python to run it.
    pub(super) fn command(
        &self,
        style: Style,
        words: &[OsString],
    ) -> Result<(PathBuf, Vec<OsString>), ProgramError> {
        let name = words.first().map(OsString::as_os_str).unwrap_or_default();
        let arguments = words.get(1..).unwrap_or_default();
        let python = |before: &[&OsStr]| {
            let before = before.iter().map(|word| (*word).to_owned());
            Ok((self.python(name)?, before.chain(arguments.iter().cloned()).collect()))
        };
        match style {
            Style::Direct => Ok((find(name, self.path, self.beside)?, arguments.to_vec())),
            Style::Module => python(&["-m".as_ref(), name]),
            Style::RunPath => match Path::new(name).exists() {
                true => python(&["-c".as_ref(), RUN_PATH.as_ref(), name]),
                false => Err(ProgramError::NoFile(name.into())),
            },
            Style::Any { python: always } => {
                let Some(script) = script(name) else {
                    let program = find(name, self.path, self.beside).map_err(missing)?;
                    return Ok((program, arguments.to_vec()));
                };
                match !always && can_run(script) {
                    // A name without a slash would be looked up in PATH.
                    true if !name.as_encoded_bytes().contains(&b'/') => {
                        Ok((Path::new(".").join(script), arguments.to_vec()))
                    }
                    true => Ok((script.to_owned(), arguments.to_vec())),
                    false => python(&[name]),
                }
            }
        }
    }

    /// The interpreter for the script or module `name`.
    fn python(&self, name: &OsStr) -> Result<PathBuf, ProgramError> {
        match &self.python {
            Some(python) => find(python, self.path, None),
            None => find("python3".as_ref(), self.path, None)
                .or_else(|_| find("python".as_ref(), self.path, None))
                .map_err(|_| ProgramError::NoPython { script: name.to_string_lossy().into_owned() }),
        }
    }
}

/// The Python script of this name, in the current folder if the name has no slash.
fn script(name: &OsStr) -> Option<&Path> {
    let path = Path::new(name);
    (name.as_encoded_bytes().ends_with(b".py") && path.is_file()).then_some(path)
}

/// The error for a program that was not found: a script was also looked for in the current folder.
fn missing(error: ProgramError) -> ProgramError {
    match error {
        ProgramError::NotFound { name, looked } if name.ends_with(".py") => {
            ProgramError::NoScript { name, looked }
        }
        error => error,
    }
}

/// True if the kernel can start the script: it is executable, and its first line names an interpreter.
fn can_run(script: &Path) -> bool {
    let mut start = [0; 2];
    let has_interpreter = File::open(script).and_then(|mut file| file.read_exact(&mut start)).is_ok();
    access(script, AccessFlags::X_OK).is_ok() && has_interpreter && &start == b"#!"
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A folder with an interpreter, and scripts of these contents and modes.
    fn folder(scripts: &[(&str, &str, u32)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text, mode) in scripts.iter().chain(&[("python3", "#!/bin/sh\n", 0o755)]) {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
        }
        folder
    }

    #[test]
    fn scripts_are_run_by_their_first_line_or_by_python() {
        let folder = folder(&[
            ("plain.py", "print()", 0o644),
            ("with a space.py", "print()", 0o644),
            ("own.py", "#!/usr/bin/env python3\n", 0o755),
            ("no line.py", "print()", 0o755),
            ("empty.py", "", 0o755),
        ]);
        let path = [folder.path().to_owned()];
        let search = Search { path: &path, beside: None, python: None };
        let python = folder.path().join("python3");
        let command = |style, name: &str| {
            let script = folder.path().join(name).into_os_string();
            search.command(style, &[script, "-x".into()])
        };
        for (name, always, is_python) in [
            ("plain.py", false, true),
            ("with a space.py", false, true),
            ("own.py", false, false),
            ("own.py", true, true),
            ("no line.py", false, true),
            ("empty.py", false, true),
        ] {
            let script = folder.path().join(name);
            let expected = match is_python {
                true => (python.clone(), vec![script.into_os_string(), "-x".into()]),
                false => (script, vec!["-x".into()]),
            };
            assert_eq!(command(Style::Any { python: always }, name), Ok(expected), "{name}");
        }
        let error = command(Style::Direct, "plain.py").unwrap_err().to_string();
        assert!(error.contains("is not executable"), "{error}");
        assert!(command(Style::Direct, "own.py").unwrap().0.ends_with("own.py"));
        let missing = command(Style::Any { python: true }, "none.py").unwrap_err().to_string();
        assert!(missing.starts_with("no program at "), "{missing}");
        assert!(matches!(command(Style::RunPath, "none.py"), Err(ProgramError::NoFile(_))));
        assert_eq!(command(Style::RunPath, "plain.py").unwrap().1[0], "-c");
    }

    #[test]
    fn modules_need_python_only() {
        let folder = folder(&[]);
        let path = [folder.path().to_owned()];
        let words = ["pkg.module", "a"].map(OsString::from);
        let search = Search { path: &path, beside: None, python: None };
        let expected =
            (folder.path().join("python3"), ["-m", "pkg.module", "a"].map(OsString::from).to_vec());
        assert_eq!(search.command(Style::Module, &words), Ok(expected));
        let search = Search { path: &[], beside: Some(folder.path()), python: None };
        let error = search.command(Style::Module, &words).unwrap_err().to_string();
        assert!(error.starts_with("pkg.module is run by python3, and there is none in PATH"), "{error}");
        let search = Search { path: &[], beside: None, python: Some(folder.path().join("python4").into()) };
        assert!(matches!(search.command(Style::Module, &words), Err(ProgramError::NoFile(_))));
    }
}
