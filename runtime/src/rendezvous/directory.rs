//! The folder of the rendezvous socket: private to its user, gone with its owner.

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use crate::{Error, Result};

/// What the folders' names begin with.
const PREFIX: &str = "mgpu-";
/// Name of the socket in the folder.
const SOCKET: &str = "rendezvous";
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
        let name = format!("{PREFIX}{}", &run_id[..run_id.len().min(16)]);
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let mut refusals = Vec::new();
        for base in runtime.into_iter().chain([std::env::temp_dir()]) {
            let path = base.join(&name);
            if path.join(SOCKET).as_os_str().len() >= MAX_SOCKET_PATH {
                refusals.push(format!("{} is too long for a socket's path", path.display()));
                continue;
            }
            remove_abandoned(&base);
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(PrivateDirectory { path }),
                Err(error) => refusals.push(format!("{}: {error}", path.display())),
            }
        }
        Err(Error::system("make a private folder for the rendezvous socket", refusals.join("; ")))
    }

    /// Where the socket belongs.
    pub(super) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }
}

/// Removes what killed launchers of this user have left.
pub fn remove_abandoned_everywhere() {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    runtime.into_iter().chain([std::env::temp_dir()]).for_each(|base| remove_abandoned(&base));
}

/// Removes what killed launchers have left in `base`: our own folders in whose socket nobody listens.
fn remove_abandoned(base: &Path) {
    for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX))
            && entry
                .metadata()
                .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == geteuid().as_raw());
        // Without a socket in it, another launcher may be about to make one. A socket refuses from the moment its
        // process is gone.
        let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
        if ours && UnixStream::connect(entry.path().join(SOCKET)).is_err_and(refused) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
