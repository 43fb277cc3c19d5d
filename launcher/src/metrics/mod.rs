//! `--metrics-listen`: the state of the runs for Prometheus (OpenMetrics), and a page that draws it.
//!
//! | module | job |
//! |---|---|
//! | `address` | where to listen |
//! | `http` | request → resource (pure) |
//! | `openmetrics` | snapshots → text (pure) |
//! | `content` | reads the progress pages, and makes the answers |
//! | `server` | a thread with connections that may be slow or hostile |
//!
//! A thread of its own serves, so nothing that a client does delays the event loop. What the thread knows are the
//! progress pages, which the loop puts on a [`Board`]. It is never joined: it may be inside a driver that hangs.

mod address;
mod content;
mod http;
mod openmetrics;
mod server;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use mgpu_control::progress::ProgressPage;
use nix::unistd::geteuid;

use crate::error::LaunchError;
pub use address::MetricsAddress;
use content::Content;
use server::Listener;

/// The progress page of the last start of each job, by the job's number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Board {
    pages: Arc<Mutex<BTreeMap<Option<u32>, Arc<ProgressPage>>>>,
}

impl Board {
    /// Replaces the page of a job.
    pub(crate) fn put(&self, job: Option<u32>, page: Arc<ProgressPage>) {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner).insert(job, page);
    }

    fn pages(&self) -> Vec<(Option<u32>, Arc<ProgressPage>)> {
        let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        pages.iter().map(|(job, page)| (*job, Arc::clone(page))).collect()
    }
}

/// The server; dropping it ends its thread.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    /// Its end tells the thread to end.
    _alive: UnixStream,
    /// Where clients reach it.
    pub(crate) address: MetricsAddress,
    /// Removes the Unix socket.
    _socket: Option<SocketFile>,
}

impl MetricsServer {
    /// Listens, and starts to serve what is on the board.
    ///
    /// # Errors
    /// If the address cannot be listened on.
    pub(crate) fn start(address: &MetricsAddress, board: Board) -> Result<Self, LaunchError> {
        let failed = |why: String| LaunchError::Metrics { address: address.to_string(), why };
        let (listener, address, socket) = Listener::bind(address).map_err(failed)?;
        let (alive, watched) = UnixStream::pair().map_err(|error| failed(error.to_string()))?;
        std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || server::serve(&listener, &watched, Content::new(board)))
            .map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        Ok(MetricsServer { _alive: alive, address, _socket: socket })
    }
}

/// A Unix socket that this process has bound, removed on drop unless something else has its name by then.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> Option<Self> {
        Some(SocketFile { identity: identity(path)?, path: path.to_owned() })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path) == Some(self.identity) {
            // It only stays behind.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The place of a Unix socket that another process of this launch will bind, and may leave behind if it is killed.
#[derive(Debug)]
pub(crate) struct FutureSocket(PathBuf);

impl FutureSocket {
    /// `None` if there is no such socket, or if its name is taken already.
    pub(crate) fn of(address: &MetricsAddress) -> Option<Self> {
        match address {
            MetricsAddress::Unix(path) if identity(path).is_none() => Some(FutureSocket(path.clone())),
            _ => None,
        }
    }

    /// Removes it if nobody listens there any more.
    pub(crate) fn remove(&self) {
        let is_own = fs::symlink_metadata(&self.0)
            .is_ok_and(|file| file.file_type().is_socket() && file.uid() == geteuid().as_raw());
        let is_dead =
            || UnixStream::connect(&self.0).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
        if is_own && is_dead() {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Device and inode.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}
