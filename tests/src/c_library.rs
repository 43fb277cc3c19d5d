//! The C library as Cargo has built it, and programs that are compiled against it.

use std::env;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::process::run;

/// The folder of the C interface.
pub fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a folder of the repository").join("runtime/c")
}

/// The shared library, beside the running test program.
///
/// # Panics
/// If it is not there.
pub fn shared_library() -> PathBuf {
    let program = env::current_exe().expect("the test program has a path");
    let folders = program.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("libmgpu_c.so")).find(|path| path.exists());
    found.expect("libmgpu_c.so is built with the tests, because they depend on mgpu-c")
}

/// The compiler for C (`CC`, or `cc`) or C++ (`CXX`, or `g++`); `None` if there is none, which it prints.
pub fn compiler(variable: &str, default: &str) -> Option<String> {
    let compiler = env::var(variable).unwrap_or_else(|_| default.to_owned());
    let found = Command::new(&compiler).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: no {compiler}");
    }
    found.then_some(compiler)
}

/// A folder for compiled programs. It has the library under the name that programs look for.
pub struct Workshop {
    folder: TempDir,
}

impl Workshop {
    /// An empty one.
    ///
    /// # Panics
    /// If it cannot be created.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for name in ["libmgpu_c.so", "libmgpu_c.so.0"] {
            symlink(shared_library(), folder.path().join(name)).expect("a symbolic link");
        }
        Workshop { folder }
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Compiles `source` with warnings as errors, and links it with the library. Returns the program's path.
    ///
    /// # Panics
    /// If the compiler finds an error.
    pub fn compile(&self, compiler: &str, source: &Path, options: &[&str]) -> PathBuf {
        let name = source.file_name().expect("a file").to_string_lossy().replace('.', "_");
        let program = self.path(&format!("{name}-program"));
        let folder = self.folder.path();
        let mut command = Command::new(compiler);
        command
            .args(["-O2", "-g", "-Wall", "-Wextra", "-Werror"])
            .args(options)
            .arg(source)
            .arg("-o")
            .arg(&program)
            .arg("-I")
            .arg(self::source().join("include"))
            .arg("-I")
            .arg(self::source().join("examples"))
            .arg("-L")
            .arg(folder)
            .arg(format!("-Wl,-rpath,{}", folder.display()))
            .args(["-lmgpu_c", "-lm", "-lpthread"]);
        run(&mut command).expect(0, &[]);
        program
    }
}

impl Default for Workshop {
    fn default() -> Self {
        Self::new()
    }
}
