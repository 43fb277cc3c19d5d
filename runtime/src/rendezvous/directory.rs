//! The folder of the rendezvous socket: private to its user, gone with its owner.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Longest path of a Unix socket, with its terminating zero.
const MAX_SOCKET_PATH: usize = 108;

/// A folder of mode 0700, removed with all it holds on drop.
#[derive(Debug)]
pub(super) struct PrivateDirectory {
    path: PathBuf,
}

impl PrivateDirectory {
    /// Makes the folder of run `run_id` in `XDG_RUNTIME_DIR`, or among the temporary files.
    pub(super) fn create(run_id: &str) -> Result<Self> {
        let name = format!("mgpu-{}", &run_id[..run_id.len().min(16)]);
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let mut refusals = Vec::new();
        for base in runtime.into_iter().chain([std::env::temp_dir()]) {
            let path = base.join(&name);
            if path.as_os_str().len() + "/rendezvous".len() >= MAX_SOCKET_PATH {
                refusals.push(format!("{} is too long for a socket's path", path.display()));
                continue;
            }
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(PrivateDirectory { path }),
                Err(error) => refusals.push(format!("{}: {error}", path.display())),
            }
        }
        Err(Error::system("make a private folder for the rendezvous socket", refusals.join("; ")))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
